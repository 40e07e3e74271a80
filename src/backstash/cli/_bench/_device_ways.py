"""The ways to hold what is saved on an accelerator: PyTorch's own, other libraries', and a stash's budgets."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from ._workloads import Around, call

__all__ = ["WAYS", "DeviceWay"]


@dataclass(frozen=True, slots=True)
class DeviceWay:
    """One row of the table."""

    title: str
    """What the table calls it."""
    make: Callable[[int, str], AbstractContextManager[Any] | dict[str, Any]]
    """From the bytes that a step saves, and the disk's directory, to what is entered for each forward
    pass: a context, or the options of a stash."""
    around: Around = call
    """Put around each block."""


def _checkpointed(block: nn.Module, x: Tensor) -> Tensor:
    y: Tensor = checkpoint(block, x, use_reentrant=False)
    return y


def _stash(share: float, **more: Any) -> Callable[[int, str], dict[str, Any]]:
    """A stash that keeps a share of what is saved on the device and all the rest in host memory."""

    def options(saved: int, directory: str) -> dict[str, Any]:
        return {"keep": int(share * saved), "host": None, **more}

    return options


def _on_disk(saved: int, directory: str) -> dict[str, Any]:
    return {"keep": 0, "host": max(saved // 4, 1 << 20), "disk": directory}


def _foreign(module: str, name: str) -> Callable[[int, str], AbstractContextManager[Any]]:
    """Another library's offloading context, where that library is installed."""

    def context(saved: int, directory: str) -> AbstractContextManager[Any]:
        made: AbstractContextManager[Any] = getattr(importlib.import_module(module), name)()
        return made

    return context


WAYS: dict[str, DeviceWay] = {
    "plain": DeviceWay("plain PyTorch", lambda saved, directory: nullcontext()),
    "save_on_cpu": DeviceWay("`save_on_cpu`", lambda saved, directory: save_on_cpu()),
    "save_on_cpu-pinned": DeviceWay(
        "`save_on_cpu(pin_memory=True)`", lambda saved, directory: save_on_cpu(pin_memory=True)
    ),
    "checkpoint": DeviceWay(
        "`torch.utils.checkpoint`", lambda saved, directory: nullcontext(), _checkpointed
    ),
    "trl": DeviceWay(
        "TRL's `OffloadActivations`",
        _foreign("trl.models.activation_offloading", "OffloadActivations"),
    ),
    "torchtune": DeviceWay(
        "torchtune's `OffloadActivations`", _foreign("torchtune.training", "OffloadActivations")
    ),
    "stash-all": DeviceWay("`Stash(keep=None)`", lambda saved, _: {"keep": None, "host": None}),
    "stash-half": DeviceWay("`Stash`, half in place", _stash(0.5)),
    "stash-tenth": DeviceWay("`Stash`, a tenth in place", _stash(0.1)),
    "stash": DeviceWay("`Stash`, nothing in place", _stash(0.0)),
    "stash-disk": DeviceWay("`Stash`, a quarter in host memory, then disk", _on_disk),
    "stash-checkpoint": DeviceWay("`Stash` and checkpoint", _stash(0.0), _checkpointed),
}
"""From what ``--only`` calls it to the row."""
