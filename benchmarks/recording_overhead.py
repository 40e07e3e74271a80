"""What recording a stash costs: the step of `backstash bench gpt`, recorded and not, in turn.

    python benchmarks/recording_overhead.py --disk DIR        measure, and write results/recording_overhead.json
    python benchmarks/recording_overhead.py --tiny --out FILE    seconds; the figures mean nothing

One process, one model, one stash. A pair is one step without and one with a timeline, and each pair begins with
the other one. The ratio is the median over the pairs of recorded over not recorded, so that a slow moment
weighs on both. Two steps go before, which are not timed.
"""

import argparse
import contextlib
import json
import shlex
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from backstash import Stash
from backstash.cli._machine import machine, versions
from backstash.report import timeline
from backstash.scratch import file_system
from bench._workloads import WORKLOADS, Workload, call

__all__ = ["main"]

OUT = Path(__file__).resolve().parent / "results" / "recording_overhead.json"


def step(workload: Workload, optimizer: torch.optim.Optimizer, stash: Stash) -> float:
    """Seconds of one training step."""
    began = time.perf_counter()
    optimizer.zero_grad()
    with stash:
        loss = workload.model(*workload.inputs, call)
    loss.backward()
    optimizer.step()
    return time.perf_counter() - began


def measure(name: str, pairs: int, directory: str, min_bytes: int) -> dict[str, Any]:
    """Times of ``pairs`` pairs of steps, and how many events one recorded step has."""
    torch.manual_seed(0)
    workload = WORKLOADS[name]()
    optimizer = torch.optim.SGD(workload.model.parameters(), lr=1e-3)
    stash = Stash(disk=directory, min_bytes=min_bytes)
    seconds: dict[str, list[float]] = {"not recorded": [], "recorded": []}
    events = 0
    for _ in range(2):
        step(workload, optimizer, stash)
    for pair in range(pairs):
        for recorded in (pair % 2 == 0, pair % 2 == 1):
            line = timeline(stash) if recorded else None
            with line or contextlib.nullcontext():
                taken = step(workload, optimizer, stash)
            seconds["recorded" if recorded else "not recorded"].append(taken)
            events = len(line.events) if line is not None else events
    stash.close()
    ratios = [a / b for a, b in zip(seconds["recorded"], seconds["not recorded"], strict=True)]
    return {
        "workload": workload.description,
        "pairs": pairs,
        "seconds": {kind: [round(each, 4) for each in found] for kind, found in seconds.items()},
        "median_seconds": {k: round(statistics.median(v), 4) for k, v in seconds.items()},
        "ratio": round(statistics.median(ratios), 4),
        "least_ratio": round(min(ratios), 4),
        "most_ratio": round(max(ratios), 4),
        "events_per_step": events,
    }


def main() -> int:
    """Measure, write the JSON and print it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="seconds; the figures mean nothing")
    parser.add_argument("--pairs", type=int, default=12, help="pairs of steps (default 12)")
    parser.add_argument(
        "--disk", metavar="DIR", help="where the stash's file is (default: the system's)"
    )
    parser.add_argument("--out", type=Path, default=OUT, metavar="FILE", help="where the JSON goes")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.disk) as directory:
        name, pairs, min_bytes = (
            ("gpt-tiny", 2, 0) if options.tiny else ("gpt", options.pairs, 64 << 10)
        )
        found = measure(name, pairs, directory, min_bytes)
        results = {
            "command": shlex.join(
                ["python", "benchmarks/recording_overhead.py", *_arguments(options)]
            ),
            "machine": machine().as_dict() | {"file_system": file_system(directory)},
            "versions": versions(),
            "threads": torch.get_num_threads(),
            **found,
        }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(results, indent=1))
    return 0


def _arguments(options: argparse.Namespace) -> list[str]:
    chosen = ["--tiny"] if options.tiny else ["--pairs", str(options.pairs)]
    return [*chosen, *(["--disk", "DIR"] if options.disk else [])]


if __name__ == "__main__":
    sys.exit(main())
