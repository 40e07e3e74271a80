"""Steps of fused optimizers: they write to parameters without raising their versions (seen in torch 2.13)."""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from .storages import storage_of

__all__ = ["FUSED_STEPS", "FusedStep", "watch_fused_steps"]


class FusedStep(int):
    """The number of a step, among all those of fused optimizers."""


class _FusedSteps:
    """The steps since the first call of :func:`watch_fused_steps`."""

    def __init__(self) -> None:
        self.latest = FusedStep(0)
        """The latest step."""
        self._of: weakref.WeakKeyDictionary[torch.UntypedStorage, FusedStep] = (
            weakref.WeakKeyDictionary()
        )

    def have_written(self, tensor: Tensor, since: FusedStep) -> bool:
        """Whether a step after ``since`` has written to the memory of ``tensor``."""
        storage = storage_of(tensor)
        return storage is not None and self._of.get(storage, 0) > since

    def add(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Count a step: see ``register_optimizer_step_post_hook``."""
        written: list[Tensor] = []
        for group in optimizer.param_groups:
            if group.get("fused"):
                written += (each for each in group["params"] if each.grad is not None)
        if written:
            self.latest = FusedStep(self.latest + 1)
        for each in written:
            if (storage := storage_of(each)) is not None:
                self._of[storage] = self.latest


FUSED_STEPS = _FusedSteps()
"""The steps of all optimizers of this process."""


@functools.cache
def watch_fused_steps() -> None:
    """Count them from now on."""
    register_optimizer_step_post_hook(FUSED_STEPS.add)
