#!/usr/bin/env python
"""How long this machine's host needs for a step, if the device takes no time.

    python benchmarks/host_time.py [--models gpt,llama] [--budgets 8.1,9.3,12.7,20] [--tiny]

On the device of :mod:`timed`, at full size: it has no data, so an operation costs what PyTorch's dispatcher
costs. A device that computes for longer hides all of this. Each figure is the least of some steps, in
milliseconds for each block; "calls" are Python calls of the package, of ``torch.utils.checkpoint`` and of
PyTorch's hooks for saved tensors, counted in a step of their own. A budget's steps come after its plan has
settled by the played clock.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import time
import warnings
from contextlib import AbstractContextManager
from typing import Any

import torch

from bench._markdown import markdown
from budget_cells import ground_of
from interleaved import Checkpoint, Recompute, Way, Work

GiB = 2**30
SETTLED, TIMED = 24, 12
HEAD = ("way", "forward, ms", "backward, ms", "of plain", "calls forward", "calls backward")


def profiled(*, on: bool) -> None:
    """Start or stop counting Python calls, on this thread and on that of the device's backward."""
    set_profile = ctypes.pythonapi.PyEval_SetProfile
    timed = ctypes.PyDLL(torch.ops.loaded_libraries.copy().pop())

    def switch(*_: object) -> None:
        if on:
            timed.timed_profile()
        else:
            set_profile(None, None)

    x = torch.ones((), device="timed", requires_grad=True).exp()
    x.register_hook(switch)
    x.backward()
    switch()


def step(way: Way, work: Work, context: AbstractContextManager[Any]) -> tuple[float, ...]:
    """Seconds and calls of forward and backward."""
    work.optimizer.zero_grad()
    marks = [(time.monotonic(), torch.ops.timed.calls())]
    with context:
        loss = work.net.through(way.call, work.batch).float().square().mean()
    marks.append((time.monotonic(), torch.ops.timed.calls()))
    loss.backward()
    marks.append((time.monotonic(), torch.ops.timed.calls()))
    torch.accelerator.synchronize()
    work.optimizer.step()
    (a, p), (b, q), (c, r) = marks
    return b - a, c - b, q - p, r - q


def host_of(way: Way, work: Work, context: AbstractContextManager[Any]) -> list[float]:
    """What :func:`step` returns, of each the least."""
    profiled(on=False)
    took = [step(way, work, context)[:2] for _ in range(TIMED)]
    profiled(on=True)
    calls = [step(way, work, context)[2:] for _ in range(4)]
    return [min(each) for each in (*zip(*took, strict=True), *zip(*calls, strict=True))]


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--models", default="gpt,llama", help="default: %(default)s")
    parser.add_argument("--budgets", default="8.1,9.3,12.7,20", help="GiB; default: %(default)s")
    parser.add_argument("--tiny", action="store_true", help="small models, for tests")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    ground = ground_of("timed")
    for model in options.models.split(","):
        work = Work(model, ground, tiny=options.tiny)
        count = len(work.blocks)
        found: dict[str, list[float]] = {}
        for way in (Way("plain"), Checkpoint("checkpoint", count), Recompute("recompute", count)):
            with way.turn(work) as context:
                for _ in range(3):
                    work.step(way, context)
                found[way.name] = host_of(way, work, context)
        for each in options.budgets.split(","):
            stash, way = ground.stash("", budget=int(float(each) * GiB)), Way(f"budget {each} GiB")
            with contextlib.closing(stash):
                for _ in range(SETTLED):
                    work.step(way, stash)
                    _ = stash.plan
                found[way.name] = host_of(way, work, stash)
        plain = sum(found["plain"][:2])
        rows = [
            [
                name,
                *(f"{seconds * 1e3 / count:.2f}" for seconds in figures[:2]),
                f"{sum(figures[:2]) / plain:.2f}",
                *(f"{calls / count:.0f}" for calls in figures[2:]),
            ]
            for name, figures in found.items()
        ]
        print(f"{model}, for each of {count} blocks\n\n{markdown(HEAD, rows)}\n", flush=True)


if __name__ == "__main__":
    main()
