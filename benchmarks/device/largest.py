"""The longest sequence, or the largest batch, that each way trains within a device budget."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from backstash import Stash
from bench._workloads import Workload

from .models import llama, resnet_within
from .step import Report, make_stash, step
from .ways import WAYS, DeviceWay

__all__ = ["largest"]

_BUILD: dict[str, Callable[[int, torch.device], Workload]] = {
    "sequence": lambda tokens, device: llama(24, 2048, tokens, device),
    "batch": lambda batch, device: resnet_within(batch, device),
    "sequence-tiny": lambda tokens, device: llama(2, 256, tokens, device),
}


def largest(task: dict[str, Any], device: torch.device, report: Report) -> int:
    """Search the largest size for each way, doubling and then halving, within its share of the time."""
    if device.type == "cuda":
        share = task["budget_bytes"] / torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, share), device.index)
    torch.use_deterministic_algorithms(False)
    build = _BUILD[task["what"]]
    report(["description"], build(task["step"], device).description)
    report(["budget_bytes"], task["budget_bytes"])
    stash = make_stash(device, keep=0, host=task["host_bytes"])
    try:
        for name in task["ways"]:
            report(["rows", name], _search(task, build, WAYS[name], stash, device))
    finally:
        stash.close()
    return 0


def _search(
    task: dict[str, Any],
    build: Callable[[int, torch.device], Workload],
    way: DeviceWay,
    stash: Stash,
    device: torch.device,
) -> dict[str, Any]:
    until = time.monotonic() + task["seconds"] / len(task["ways"])
    grain, size, good, took = task["step"], task["size"], 0, 0.0
    bad: int | None = None
    why = ""
    while size > good and time.monotonic() + 2 * took < until:
        began = time.monotonic()
        failed = _fails(build, size, way, stash, device)
        took = time.monotonic() - began
        if failed:
            bad, why = size, failed
        else:
            good = size
        if bad is None:
            size = min(2 * good, task["most"])
        else:
            size = (good + bad) // 2 // grain * grain
            if size in (good, bad):
                break
    return {"most": good, "least_that_failed": bad, "why": why}


def _fails(
    build: Callable[[int, torch.device], Workload],
    size: int,
    way: DeviceWay,
    stash: Stash,
    device: torch.device,
) -> str:
    """Why a step of that size fails; ``""`` when it works."""
    torch.manual_seed(0)
    try:
        workload = build(size, device)
        step(workload, stash if way.stash is not None else nullcontext(), way.around)
    except torch.OutOfMemoryError:
        return "out of device memory"
    except RuntimeError as error:
        if isinstance(error, torch.AcceleratorError):
            raise
        return str(error)[:200]
    finally:
        workload = None  # type: ignore[assignment]
        gc.collect()
        if device.type != "cpu":
            torch.accelerator.empty_cache()
    return ""
