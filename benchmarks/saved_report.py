"""saved_report against the operating system's account of what forward adds, and what recording costs.

    python benchmarks/saved_report.py                      measure, and write results/saved_report.json
    python benchmarks/saved_report.py --tiny --out FILE    seconds; the figures mean nothing
    python benchmarks/saved_report.py --device cuda        an accelerator's allocator is asked instead

*memory*: a process of its own for each model and repeat. After two forwards that warm up, what a forward adds
is the process's resident memory with its loss alive, less that before; then the same again under a report. So
that the difference is that of live tensors, tensors of 64 KiB and more are mapped one by one
(MALLOC_MMAP_THRESHOLD_) and the heap is trimmed before each look. On an accelerator it is what its allocator
says is allocated.

*overhead*: steps (forward, backward) without a report, under one, under one that looks at no values, and
without one again, in turn, in one process for each model; the ratios are medians of the rounds' own. Times
are of the processor, on one thread (of the clock, on an accelerator). The second one without shows what
chance does. *an operation*: a chain of small operations, forward and backward,
where there is nothing but saves. *entering*: looking at all of Python's objects for the tensors that are there
already, once for each report.
"""

import argparse
import contextlib
import ctypes
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from backstash.cli._machine import machine, versions
from backstash.cli._resident import resident_bytes
from backstash.report import saved_report
from bench._workloads import WORKLOADS, Workload

__all__ = ["main"]

OUT = Path(__file__).resolve().parent / "results" / "saved_report.json"
SMALLEST_MAPPED_BYTES = 64 << 10


def workload(name: str, device: str) -> Workload:
    torch.manual_seed(0)
    made = WORKLOADS[name]()
    made.model.to(device)
    inputs = tuple(each.to(device) for each in made.inputs)
    return Workload(made.model, inputs, made.description)


def held_bytes(device: str) -> int:
    """What the system, or the device's allocator, says is held now."""
    gc.collect()
    if device != "cpu":
        torch.accelerator.synchronize()
        return torch.accelerator.memory_allocated()
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)
    return resident_bytes()


def memory(name: str, device: str) -> dict[str, Any]:
    """In a process of its own: what a forward adds, and what the report says that it adds."""
    work = workload(name, device)

    def forward() -> Tensor:
        return work.model(*work.inputs)

    forward().backward()
    work.model.zero_grad()
    forward()
    before = held_bytes(device)
    loss = forward()
    added = held_bytes(device) - before
    del loss
    before = held_bytes(device)
    with saved_report(work.model) as saved:
        loss = forward()
    added_under_report = held_bytes(device) - before
    loss.backward()
    return {
        "description": work.description,
        "added_bytes": added,
        "added_under_report_bytes": added_under_report,
        "activation_bytes": saved.activation_bytes,
        "unique_bytes": saved.unique_bytes,
        "total_bytes": saved.total_bytes,
        "saves": len(saved.tensors),
    }


def memory_case(name: str, device: str, repeats: int) -> dict[str, Any]:
    command = [sys.executable, __file__, "--memory", name, "--device", device]
    variables = os.environ | {"MALLOC_MMAP_THRESHOLD_": str(SMALLEST_MAPPED_BYTES)}
    found = []
    for _ in range(repeats):
        done = subprocess.run(command, env=variables, capture_output=True, text=True, check=True)
        found.append(json.loads(done.stdout))
    middle = statistics.median_low([each["added_bytes"] for each in found])
    chosen = next(each for each in found if each["added_bytes"] == middle)
    off = [each["activation_bytes"] / each["added_bytes"] - 1 for each in found]
    return {**chosen, "processes": repeats, "off": [round(each, 5) for each in off]}


def overhead(
    run: Callable[[], Tensor], model: Any, repeats: int, device: str
) -> dict[str, dict[str, float]]:
    """Seconds of a step in each way, and how many times those of a step without a report."""
    variants: dict[str, Callable[[], AbstractContextManager[Any]]] = {
        "none": contextlib.nullcontext,
        "report": lambda: saved_report(model),
        "report, look=False": lambda: saved_report(model, look=False),
        "none again": contextlib.nullcontext,
    }
    names, clock = list(variants), time.process_time if device == "cpu" else time.perf_counter
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for repeat in range(repeats + 1):
        at = repeat % len(names)
        for name in names[at:] + names[:at]:
            begun = clock()
            with variants[name]():
                loss = run()
            loss.backward()
            if device != "cpu":
                torch.accelerator.synchronize()
            if repeat:  # the first round warms up
                seconds[name].append(clock() - begun)
            del loss
    ratios = {
        name: [a / b for a, b in zip(found, seconds["none"], strict=True)]
        for name, found in seconds.items()
    }
    return {
        name: {
            "seconds": round(statistics.median(found), 5),
            "ratio": round(statistics.median(ratios[name]), 4),
            "least": round(min(ratios[name]), 4),
            "most": round(max(ratios[name]), 4),
        }
        for name, found in seconds.items()
    }


def overhead_case(name: str, device: str, repeats: int) -> dict[str, Any]:
    work = workload(name, device)

    def run() -> Tensor:
        work.model.zero_grad()
        return work.model(*work.inputs)

    variants = overhead(run, work.model, repeats, device)
    return {"description": work.description, "repeats": repeats, "variants": variants}


def save_case(length: int, repeats: int) -> dict[str, Any]:
    """Microseconds of a small operation, forward and backward, without and within a report."""
    x = torch.ones(16, requires_grad=True)

    def seconds() -> float:
        begun = time.process_time()
        y = x
        for _ in range(length):
            y = y.sin()
        y.sum().backward()
        return time.process_time() - begun

    found: dict[str, list[float]] = {"none": [], "report": []}
    for _ in range(repeats):
        found["none"].append(seconds())
        with saved_report():
            found["report"].append(seconds())
    medians = {
        name: round(statistics.median(each) / length * 1e6, 2) for name, each in found.items()
    }
    return {"operations": length, "repeats": repeats, "microseconds": medians}


def enter_case(repeats: int) -> dict[str, Any]:
    """Milliseconds to enter and leave a report: at its beginning it looks for the tensors that are there."""
    found = []
    for _ in range(repeats):
        begun = time.process_time()
        with saved_report():
            pass
        found.append(time.process_time() - begun)
    objects = len(gc.get_objects())
    return {"objects": objects, "milliseconds": round(statistics.median(found) * 1e3, 2)}


def results(options: argparse.Namespace) -> dict[str, Any]:
    models = {"gpt-tiny": 2, "resnet-tiny": 2} if options.tiny else {"gpt": 3, "resnet": 7}
    repeats = 1 if options.tiny else 3
    torch.set_num_threads(1)
    flags = [*(["--tiny"] if options.tiny else [])]
    flags += ["--device", options.device] if options.device != "cpu" else []
    return {
        "command": " ".join(["python", "benchmarks/saved_report.py", *flags]),
        "date": date.today().isoformat(),
        "device": options.device,
        "machine": machine().as_dict(),
        "versions": versions() | {"torch": torch.__version__},
        "memory": {name: memory_case(name, options.device, repeats) for name in models},
        "overhead": {
            name: overhead_case(name, options.device, rounds) for name, rounds in models.items()
        },
        "an operation": save_case(100 if options.tiny else 2000, 2 if options.tiny else 9),
        "entering": enter_case(2 if options.tiny else 9),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="seconds; the figures mean nothing")
    parser.add_argument("--out", type=Path, default=OUT, metavar="FILE", help="where the JSON goes")
    parser.add_argument("--device", default="cpu", help="where the models are (default cpu)")
    parser.add_argument(
        "--only", metavar="MODEL", help="its overhead again; the rest of FILE stays"
    )
    parser.add_argument("--memory", metavar="MODEL", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.memory:
        print(json.dumps(memory(options.memory, options.device)))
        return 0
    if options.only:
        torch.set_num_threads(1)
        found = json.loads(options.out.read_text(encoding="utf-8"))
        found["overhead"][options.only] = overhead_case(options.only, options.device, 7)
        found["command"] += f", then the same with --only {options.only}"
    else:
        found = results(options)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
