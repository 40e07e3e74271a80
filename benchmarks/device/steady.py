"""Many steps with changing shapes: the memory of device, host and process after each tenth of them."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from backstash.cli._resident import resident_bytes

from .step import Report, allocated, make_stash, synchronize

__all__ = ["small", "steady"]


def steady(task: dict[str, Any], device: torch.device, report: Report) -> int:
    """Run ``count`` steps of an MLP under a stash, or as many as there is time for."""
    torch.manual_seed(0)
    width, count = task["width"], task["count"]
    with torch.device(device):
        model = nn.Sequential(*(nn.Linear(width, width) for _ in range(6)), nn.GELU())
    stash = make_stash(device, host=1 << 30, inflight="16MiB", prefetch="16MiB")
    until = time.monotonic() + task["seconds"]
    held: list[list[int]] = []
    for number in range(1, count + 1):
        _step(model, torch.randn(256 + 64 * (number % 7), width, device=device), stash)
        if number % max(1, count // 10) == 0:
            synchronize(device)
            held.append([allocated(device), stash.stats().host_peak_bytes, resident_bytes()])
            report(["device_host_resident_bytes"], held)
            report(["steps"], number)
        if time.monotonic() > until:
            break
    stash.close()
    return 0


def small(task: dict[str, Any], device: torch.device, report: Report) -> int:
    """Run a few small steps, for a tool that checks every memory access."""
    torch.manual_seed(0)
    with torch.device(device):
        model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)), nn.GELU())
    stash = make_stash(device, host=1 << 28, inflight="512KiB", prefetch="512KiB", min_bytes=1024)
    for number in range(3):
        _step(model, torch.randn(256, 256, device=device), stash)
        synchronize(device)
        report(["steps"], number)
    stash.close()
    return 0


def _step(model: nn.Module, x: torch.Tensor, hold: AbstractContextManager[Any]) -> None:
    model.zero_grad()
    with hold:
        loss = model(x).square().mean()
    loss.backward()
