"""One process of the accelerator's benchmark: one model, every variant in turn, what each took and held."""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from ... import Stash
from ...testing import TwinDevice, stash_on
from ._device_models import DEVICE_WORKLOADS, llama
from ._device_ways import WAYS, DeviceWay
from ._workloads import Workload

__all__ = ["main"]


def main() -> None:
    """Measure what the only argument asks for, in JSON, and print the figures on the last line."""
    task = json.loads(sys.argv[1])
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.benchmark = False
    kinds = {"rows": _rows, "largest": _largest, "steady": _steady}
    print(json.dumps(kinds[task["kind"]](task, torch.device(task["device"]))))


def make_stash(device: torch.device, **options: Any) -> Stash:
    """A stash; on the CPU, where this runs for tests alone, a twin plays the accelerator."""
    if device.type == "cpu":
        return stash_on(TwinDevice(chance=1.0), min_bytes=1024, **options)
    return Stash(**options)


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _reset_peak(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.empty_cache()
        torch.accelerator.reset_peak_memory_stats(device)


def _peak(device: torch.device) -> int:
    return 0 if device.type == "cpu" else int(torch.accelerator.max_memory_allocated(device))


def _allocated(device: torch.device) -> int:
    return 0 if device.type == "cpu" else int(torch.accelerator.memory_allocated(device))


def _step(workload: Workload, hold: AbstractContextManager[Any], around: Any) -> float:
    device = workload.inputs[0].device
    workload.model.zero_grad()
    _synchronize(device)
    started = time.perf_counter()
    with hold:
        loss = workload.model(*workload.inputs, around)
    loss.backward()
    _synchronize(device)
    return time.perf_counter() - started


def _rows(task: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Every variant ``repeats`` times in turn: seconds, peak, bytes that moved, gradients."""
    torch.manual_seed(0)
    workload = DEVICE_WORKLOADS[task["workload"]](device)
    saved = _saved_bytes(workload, device)
    start = _allocated(device)
    ways = {name: WAYS[name] for name in task["ways"]}
    rows: dict[str, dict[str, Any]] = {name: {"step_seconds": [], "peaks": []} for name in ways}
    for repeat in range(task["repeats"]):
        order = list(ways)[repeat % len(ways) :] + list(ways)[: repeat % len(ways)]
        for name in order:
            if "failed" not in rows[name]:
                _run(workload, ways[name], rows[name], task, saved, start)
    return {
        "description": workload.description,
        "saved_bytes": saved,
        "start_bytes": start,
        "rows": rows,
    }


def _saved_bytes(workload: Workload, device: torch.device) -> int:
    """What one step saves, each storage once."""
    stash = make_stash(device, keep=None, host="1GiB")
    with stash:
        loss = workload.model(*workload.inputs)
    saved = stash.stats().eligible_bytes
    del loss
    stash.close()
    return saved


def _run(
    workload: Workload,
    way: DeviceWay,
    row: dict[str, Any],
    task: dict[str, Any],
    saved: int,
    start: int,
) -> None:
    device = workload.inputs[0].device
    stash = None
    try:
        made = way.make(saved, task["directory"])
        hold = made if not isinstance(made, dict) else make_stash(device, **made)
        stash = hold if isinstance(hold, Stash) else None
        _step(workload, hold, way.around)
        _reset_peak(device)
        torch.manual_seed(1)
        seconds = [_step(workload, hold, way.around) for _ in range(task["steps"])]
        row["step_seconds"] += seconds
        row["peaks"].append(_peak(device) - start)
        row.setdefault("gradients", []).append(digest(workload.model))
        if stash is not None:
            stats = stash.stats()
            steps = task["steps"] + 1
            row["down_bytes"] = stats.written_bytes // steps
            row["up_bytes"] = stats.read_bytes // steps
            row["stats"] = stats.as_dict()
    except torch.OutOfMemoryError:
        row["failed"] = "out of device memory"
    except ImportError as error:
        row["failed"] = str(error)
    finally:
        if stash is not None:
            stash.close()
        workload.model.zero_grad()
        gc.collect()


def digest(model: nn.Module) -> str:
    """A sum over the bits of all gradients, weighted by place; computed where they are."""
    total = 0
    for parameter in model.parameters():
        if parameter.grad is None:
            continue
        kind = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
        bits = parameter.grad.contiguous().view(kind[parameter.grad.element_size()]).flatten()
        for part in torch.split(bits, 1 << 24):
            weights = torch.arange(part.numel(), device=part.device) % 65_521 + 1
            total = (total * 31 + int((part.long() * weights).sum())) % (1 << 61)
    return f"{total:016x}"


def _largest(task: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """The most tokens that each way trains within a device budget, doubling and then halving the gap."""
    if device.type == "cuda":
        whole = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(task["budget_bytes"] / whole, device)
    rows: dict[str, Any] = {}
    for name in task["ways"]:
        until = time.perf_counter() + task["seconds"]
        good, bad = 0, 0
        tokens = task["tokens"]
        while time.perf_counter() < until and tokens not in (good, bad):
            if _trains(task, WAYS[name], tokens, device):
                good = tokens
            else:
                bad = tokens
            tokens = 2 * good if not bad else (good + bad) // 2048 * 1024
        rows[name] = {"tokens": good, "next_that_failed": bad}
    return {"budget_bytes": task["budget_bytes"], "rows": rows}


def _trains(task: dict[str, Any], way: DeviceWay, tokens: int, device: torch.device) -> bool:
    torch.manual_seed(0)
    stash = None
    try:
        workload = llama(task["blocks"], task["width"], tokens, device)
        made = way.make(1 << 62, task["directory"])
        hold = made if not isinstance(made, dict) else make_stash(device, **made)
        stash = hold if isinstance(hold, Stash) else None
        _step(workload, hold, way.around)
    except torch.OutOfMemoryError:
        return False
    finally:
        if stash is not None:
            stash.close()
        gc.collect()
        _reset_peak(device)
    most: int = task["most"]
    return tokens <= most


def _steady(task: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Many steps with changing shapes: what the device, the host and the process hold after each tenth."""
    from .._resident import resident_bytes

    torch.manual_seed(0)
    width = task["width"]
    with torch.device(device):
        model = nn.Sequential(*(nn.Linear(width, width) for _ in range(6)), nn.GELU())
    stash = make_stash(device, host="1GiB", inflight="16MiB", prefetch="16MiB")
    held = []
    for step in range(task["steps"]):
        x = torch.randn(256 + 64 * (step % 7), width, device=device)
        _plain_step(model, x, stash)
        del x
        if (step + 1) % max(1, task["steps"] // 10) == 0:
            stats = stash.stats()
            held.append([_allocated(device), stats.host_peak_bytes, resident_bytes()])
    stash.close()
    return {"steps": task["steps"], "device_host_resident_bytes": held}


def _plain_step(model: nn.Module, x: torch.Tensor, hold: AbstractContextManager[Any]) -> None:
    model.zero_grad()
    with hold:
        loss = model(x).square().mean()
    loss.backward()


if __name__ == "__main__":
    main()
