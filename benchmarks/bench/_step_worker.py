"""One process of the step benchmark: trains a few steps and prints what it measured as JSON.

The operating system counts the resident peak of a whole process, so each variant and each repeat is a
process of its own.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import resource
import sys
import time
from typing import Any

import torch
from torch import nn

from backstash.cli._resident import reset_resident_peak, resident_bytes, resident_peak_bytes

from ._ways import WAYS
from ._workloads import WORKLOADS, Workload

__all__ = ["main", "measure"]


def main() -> None:
    """Measure what the only argument asks for, in JSON, and print the figures on the last line."""
    print(json.dumps(measure(json.loads(sys.argv[1]))))


def measure(task: dict[str, Any]) -> dict[str, Any]:
    """Train and measure.

    Args:
        task: ``workload`` and ``way`` (names), ``steps``, ``warmup`` (how many steps go before those
            that are timed), ``directory`` and ``min_bytes`` (for the ways that use a disk).

    Returns:
        Seconds of each timed step and of its forward and backward, its processor seconds and page
        faults; resident bytes before the first step, and their peak; the exact loss of every step, as
        hexadecimal; a digest of the last step's gradients; the stash's figures where there is one.
    """
    torch.manual_seed(0)
    workload = WORKLOADS[task["workload"]]()
    optimizer = torch.optim.SGD(workload.model.parameters(), lr=1e-3)
    start_bytes = resident_bytes()
    peak_is_new = reset_resident_peak()
    hold, around = WAYS[task["way"]](task["directory"], task["min_bytes"])
    steps = [
        _step(workload, optimizer, hold, around) for _ in range(task["warmup"] + task["steps"])
    ]
    timed = steps[task["warmup"] :]
    held: Any = hold()
    return {
        "description": workload.description,
        "threads": torch.get_num_threads(),
        "forward_seconds": [step["forward"] for step in timed],
        "backward_seconds": [step["backward"] for step in timed],
        "step_seconds": [step["step"] for step in timed],
        "user_seconds": [step["user"] for step in timed],
        "system_seconds": [step["system"] for step in timed],
        "page_faults": [step["faults"] for step in timed],
        "losses": [step["loss"] for step in steps],
        "gradients": digest(workload.model),
        "resident_start_bytes": start_bytes,
        "resident_peak_bytes": resident_peak_bytes(),
        "resident_peak_is_of_the_steps": peak_is_new,
        "stats": held.stats().as_json() if hasattr(held, "stats") else None,
    }


def _step(
    workload: Workload, optimizer: torch.optim.Optimizer, hold: Any, around: Any
) -> dict[str, Any]:
    before = resource.getrusage(resource.RUSAGE_SELF)
    started = time.perf_counter()
    optimizer.zero_grad()
    with hold():
        loss = workload.model(*workload.inputs, around)
    forward = time.perf_counter()
    loss.backward()
    backward = time.perf_counter()
    optimizer.step()
    ended = time.perf_counter()
    after = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "forward": forward - started,
        "backward": backward - forward,
        "step": ended - started,
        "user": after.ru_utime - before.ru_utime,
        "system": after.ru_stime - before.ru_stime,
        "faults": after.ru_minflt - before.ru_minflt,
        "loss": loss.item().hex(),
    }


def digest(model: nn.Module) -> str:
    """SHA-256 over the bytes of all gradients, in the order of the parameters."""
    total = hashlib.sha256()
    for parameter in model.parameters():
        if parameter.grad is not None:
            grad = parameter.grad.contiguous()
            total.update(ctypes.string_at(grad.data_ptr(), grad.nbytes))
    return total.hexdigest()


if __name__ == "__main__":
    main()
