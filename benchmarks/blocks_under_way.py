"""The computing thread's time for a block of an accelerator's, with few and with many copies under way.

    python benchmarks/blocks_under_way.py                        on a GPU
    CUDA_ON_CPU_CHANCE=0 python tests/cuda_on_cpu benchmarks/blocks_under_way.py
                                             without one: all copies wait, as for a host that runs ahead

A chain of sigmoids on 64 KiB each, so that nearly all of the time is the host's. Seconds are of the host; the
device is waited for between forward and backward, not within. Medians of interleaved repeats. On a machine
that others use too, ``--processor`` counts the computing thread's processor time, which is forward's alone:
backward runs on a thread of the engine.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from backstash import Stash

ELEMENTS = 16_384
WAYS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "all stay": {"keep": None},
    "all move": {"keep": 0},
}


def measure(
    hold: AbstractContextManager[Any], blocks: int, clock: Callable[[], float] = time.perf_counter
) -> tuple[float, float]:
    """Seconds per block: of forward, and of backward."""
    x = torch.ones(ELEMENTS, device=torch.accelerator.current_accelerator(), requires_grad=True)
    torch.accelerator.synchronize()
    began = clock()
    with hold:
        y = x
        for _ in range(blocks):
            y = y.sigmoid()
    packed = clock()
    y.backward(torch.ones_like(y))
    ended = clock()
    torch.accelerator.synchronize()
    return (packed - began) / blocks, (ended - packed) / blocks


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, nargs="+", default=[300, 1200])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--processor", action="store_true", help="processor time of forward")
    options = parser.parse_args(arguments)
    clock = time.thread_time if options.processor else time.perf_counter
    if not torch.accelerator.is_available():
        parser.error("there is no accelerator; tests/cuda_on_cpu plays one")
    holds: dict[str, Any] = {
        way: nullcontext() if budgets is None else Stash(host="1GiB", **budgets)
        for way, budgets in WAYS.items()
    }
    print(f"torch {torch.__version__}, {torch.accelerator.current_accelerator()}")
    print(f"{'way':10} {'blocks':>7} {'forward':>11} {'backward':>11}  per block")
    for blocks in options.blocks:
        found: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
        for _ in range(options.repeats + 1):
            for way, hold in holds.items():
                found[way].append(measure(hold, blocks, clock))
        for way, times in found.items():
            down, up = (statistics.median(each) * 1e6 for each in zip(*times[1:], strict=True))
            backward = "-" if options.processor else f"{up:.1f} us"
            print(f"{way:10} {blocks:7} {down:8.1f} us {backward:>11}", flush=True)


if __name__ == "__main__":
    main()
