"""Steps of optimizers, which may write to parameters without raising the versions that a replay compares.

In torch 2.13 a fused optimizer raises none. A step on a DTensor raises the version of the wrapper and not of
its local tensor, and FSDP2 gathers what was written without a version. ``ZeroRedundancyOptimizer`` receives the
parameters of other ranks, and optimizers of other libraries may write through ``.data``.
"""

from __future__ import annotations

import functools
import sys
import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from .storages import storage_of
from .tensors import flattened, is_wrapper_subclass, wrapped_leaf_of

__all__ = [
    "OPTIMIZER_STEPS",
    "LeafRead",
    "OptimizerStep",
    "read_now",
    "watch_optimizer_steps",
]


class OptimizerStep(int):
    """The number of a step, among all those of optimizers."""

    def is_outdated_by(self, parameter: Tensor) -> bool:
        """Whether a later step may have written to the memory of a parameter."""
        latest = OPTIMIZER_STEPS.latest
        return self is not latest and OPTIMIZER_STEPS.have_written(parameter, self, gathered=True)


class _OptimizerSteps:
    """The steps since the first call of :func:`watch_optimizer_steps`."""

    def __init__(self) -> None:
        self.latest = OptimizerStep(0)
        """The latest step."""
        self._of: weakref.WeakKeyDictionary[torch.UntypedStorage, OptimizerStep] = (
            weakref.WeakKeyDictionary()
        )
        self._of_wrapped = OptimizerStep(0)  # the latest on parameters that wrap others

    def have_written(self, tensor: Tensor, since: OptimizerStep, *, gathered: bool = False) -> bool:
        """Whether a step after ``since`` may have written to the memory of ``tensor``.

        Args:
            tensor: any tensor.
            since: a step.
            gathered: whether it is a parameter. If ``fully_shard`` was called, it may be one that is gathered
                for a forward, which no optimizer has, so any step on a DTensor may have changed it.
        """
        storage = storage_of(tensor)
        written = None if storage is None else self._of.get(storage)
        if written is not None:
            return written > since
        return gathered and self._of_wrapped > since and _is_sharding()

    def add(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Count a step: see ``register_optimizer_step_pre_hook``. Called before it and after it: a closure may
        make gradients, and another hook may delete them."""
        written: list[Tensor] = []
        for group in optimizer.param_groups:
            written += (each for each in group["params"] if each.grad is not None)
        if not written:
            return
        self.latest = OptimizerStep(self.latest + 1)
        while written:
            each = written.pop()
            if is_wrapper_subclass(each):
                written += flattened(each)[0].values()
                self._of_wrapped = self.latest
            elif (storage := storage_of(each)) is not None:
                self._of[storage] = self.latest


def _is_sharding() -> bool:
    """Whether ``fully_shard`` was called: it makes a class for each class of modules that it is given."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and bool(fsdp.FSDPModule.__subclasses__())


OPTIMIZER_STEPS = _OptimizerSteps()
"""The steps of all optimizers of this process."""


class LeafRead:
    """When a forward read a leaf that is no parameter, or an inner tensor of one, such as a DTensor's local
    tensor.

    Args:
        tensor: the tensor, or a view of it.
        base: the leaf or the inner tensor.
    """

    __slots__ = ("_step", "_version", "_wrapper")

    def __init__(self, tensor: Tensor, base: Tensor) -> None:
        wrapper = None if base.requires_grad else wrapped_leaf_of(tensor, base)
        self._step = OPTIMIZER_STEPS.latest
        self._wrapper = None if wrapper is None else weakref.ref(wrapper)
        self._version = 0 if wrapper is None else wrapper._version

    def is_outdated_by(self, tensor: Tensor) -> bool:
        """Whether the leaf, whose memory ``tensor`` has, may have been written since without a version."""
        wrapper = self._wrapper() if self._wrapper is not None else None
        if wrapper is not None and wrapper._version != self._version:
            return True
        gathered = self._wrapper is not None
        return OPTIMIZER_STEPS.have_written(tensor, self._step, gathered=gathered)


def read_now(tensor: Tensor) -> OptimizerStep | LeafRead | None:
    """Return what shows later whether a tensor that requires a gradient was written after it was read now."""
    base = tensor if tensor._base is None else tensor._base
    if type(base) is nn.Parameter:
        return OPTIMIZER_STEPS.latest
    return LeafRead(tensor, base) if base.is_leaf else None


@functools.cache
def watch_optimizer_steps() -> None:
    """Count them from now on."""
    register_optimizer_step_pre_hook(OPTIMIZER_STEPS.add)
    register_optimizer_step_post_hook(OPTIMIZER_STEPS.add)
