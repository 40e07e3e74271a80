"""One training step on a device: its seconds, its memory, and a digest of its gradients."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from backstash import Stash
from backstash.testing import TwinDevice, stash_on
from bench._workloads import Workload

__all__ = [
    "Report",
    "allocated",
    "digest",
    "make_stash",
    "peak",
    "reset_peak",
    "step",
    "synchronize",
]

Report = Callable[[list[str], Any], None]
"""Called with the path of a figure in the result, and its value."""
_KINDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PART = 1 << 24  # elements summed at once
_PRIME = 65_521


def make_stash(device: torch.device, **options: Any) -> Stash:
    """A stash. On the CPU, which is for tests only, a twin plays the accelerator."""
    if device.type == "cpu":
        return stash_on(TwinDevice(chance=1.0), **{"min_bytes": 1024} | options)
    return Stash(**options)


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def reset_peak(device: torch.device) -> None:
    """Restart the peak at the bytes that are allocated now."""
    if device.type != "cpu":
        torch.accelerator.reset_peak_memory_stats(device)


def peak(device: torch.device) -> int:
    """Peak bytes of tensors since :func:`reset_peak`; 0 on the CPU."""
    return 0 if device.type == "cpu" else int(torch.accelerator.max_memory_allocated(device))


def allocated(device: torch.device) -> int:
    """Bytes that tensors take now; 0 on the CPU."""
    return 0 if device.type == "cpu" else int(torch.accelerator.memory_allocated(device))


def step(workload: Workload, hold: AbstractContextManager[Any], around: Any) -> float:
    """Run forward under ``hold``, then backward, from a fixed seed; return the seconds."""
    device = workload.inputs[0].device
    workload.model.zero_grad()
    torch.manual_seed(1)
    synchronize(device)
    started = time.perf_counter()
    with hold:
        loss = workload.model(*workload.inputs, around)
    loss.backward()
    synchronize(device)
    return time.perf_counter() - started


def digest(model: nn.Module) -> str:
    """A sum over the bits of all gradients, weighted by place, computed on their own device."""
    total = 0
    for parameter in model.parameters():
        if parameter.grad is None:
            continue
        bits = parameter.grad.contiguous().flatten().view(_KINDS[parameter.grad.element_size()])
        for part in torch.split(bits, _PART):
            weights = torch.arange(part.numel(), device=part.device) % _PRIME + 1
            total = (total * 31 + int((part.long() * weights).sum())) % (1 << 61)
    return f"{total:016x}"
