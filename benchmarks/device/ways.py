"""The ways to hold saved tensors on an accelerator: PyTorch's own, other libraries', and a stash's budgets."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from bench._workloads import Around, Workload, blocks_of, call

__all__ = ["WAYS", "DeviceWay"]


@dataclass(frozen=True, slots=True)
class DeviceWay:
    """One row of the table."""

    title: str
    """What the table calls it."""
    make: Callable[[Workload], tuple[Any, Around | None]] = lambda workload: (nullcontext(), None)
    """Makes the context to enter for each forward pass, and what to put around each block (or ``None``)."""
    around: Around = call
    """What to put around each block, where ``make`` returns ``None`` for it."""
    host_times: int = 0
    """How many times the bytes that a step saves this way may take of host memory, without that of the stashes:
    it copies each save, and rounds a pinned copy up to a power of two."""
    stash: dict[str, Any] | None = None
    """For a stash: ``keep``, the share of what a step saves that stays on the device (``None``: all), and
    ``disk``, whether three quarters of the rest go on to disk."""


def _checkpointed(block: nn.Module, x: Tensor) -> Tensor:
    y: Tensor = checkpoint(block, x, use_reentrant=False)
    return y


def _foreign(module: str, name: str) -> Callable[[Workload], tuple[Any, None]]:
    """Another library's offloading context, where that library is installed."""

    def context(workload: Workload) -> tuple[Any, None]:
        return getattr(importlib.import_module(module), name)(), None

    return context


def _transformer_engine(workload: Workload) -> tuple[Any, Around]:
    """Enters its context around each block, and calls its function after each block."""
    module = importlib.import_module("transformer_engine.pytorch")
    count = len(list(blocks_of(workload.model)))
    context, after = module.get_cpu_offload_context(
        enabled=True,
        num_layers=count - 1,
        model_layers=count,
        offload_activations=True,
        offload_weights=False,
    )

    def around(block: nn.Module, x: Tensor) -> Tensor:
        with context:
            y = block(x)
        synchronized: Tensor = after(y)
        return synchronized

    return nullcontext(), around


WAYS: dict[str, DeviceWay] = {
    "plain": DeviceWay("plain PyTorch"),
    "save_on_cpu": DeviceWay("`save_on_cpu`", lambda workload: (save_on_cpu(), None), host_times=2),
    "save_on_cpu-pinned": DeviceWay(
        "`save_on_cpu(pin_memory=True)`",
        lambda workload: (save_on_cpu(pin_memory=True), None),
        host_times=4,
    ),
    "checkpoint": DeviceWay("`torch.utils.checkpoint`", around=_checkpointed),
    "trl": DeviceWay(
        "TRL's `OffloadActivations`",
        _foreign("trl.models.activation_offloading", "OffloadActivations"),
        host_times=4,
    ),
    "torchtune": DeviceWay(
        "torchtune's `OffloadActivations`",
        _foreign("torchtune.training", "OffloadActivations"),
        host_times=4,
    ),
    "transformer-engine": DeviceWay(
        "Transformer Engine's offloading", _transformer_engine, host_times=4
    ),
    "stash-all": DeviceWay("`Stash(keep=None)`", stash={"keep": None}),
    "stash-half": DeviceWay("`Stash`, half in place", stash={"keep": 0.5}),
    "stash-tenth": DeviceWay("`Stash`, a tenth in place", stash={"keep": 0.1}),
    "stash": DeviceWay("`Stash`, nothing in place", stash={"keep": 0.0}),
    "stash-disk": DeviceWay(
        "`Stash`, a quarter in host memory, then disk", stash={"keep": 0.0, "disk": True}
    ),
    "stash-checkpoint": DeviceWay(
        "`Stash` and checkpoint", around=_checkpointed, stash={"keep": 0.0}
    ),
}
"""All ways, by key; a results file names its rows by these keys."""
