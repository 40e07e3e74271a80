#!/usr/bin/env python
"""How long a plan takes to make, while the program trains on the same interpreter.

    OMP_NUM_THREADS=1 python benchmarks/planning.py [--models gpt,lstm,ode] [--tiny]

Each model of ``budget_cells.py``, and a neural ODE of 600 calls, trains in a process of its own until its steps
were measured. Then plans are made for six budgets, from 3% to 80% of the way from the smallest one to what
plain PyTorch takes. ``seconds`` are of the processor, the median and the most of the six; ``step`` is the mean
of what the plans are predicted to take, of the step in which everything stays.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from backstash import Stash
from backstash._budget.solving import Solving
from backstash._plan.solve import left_alone, smallest_budget, solve_with_cuts
from bench._markdown import markdown
from budget_cells import MODELS, step_of

SHARES = (0.03, 0.1, 0.25, 0.4, 0.6, 0.8)
STEPS = 12
HEAD = ("model", "blocks", "calls", "seconds, median", "seconds, most", "step")


class _RecordedError(BaseException):
    """The steps were measured."""


def ode(tiny: bool) -> Callable[[AbstractContextManager[Any]], str]:
    """A step of a neural ODE, solved by Runge-Kutta steps of four calls each."""
    rows, steps = (64, 20) if tiny else (256, 150)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))

    def step(context: AbstractContextManager[Any]) -> str:
        y: Tensor = torch.randn(rows, 2)
        h = 1 / steps
        with context:
            for _ in range(steps):
                k1 = net(y)
                k2 = net(y + h / 2 * k1)
                k3 = net(y + h / 2 * k2)
                y = y + h / 6 * (k1 + 2 * k2 + 2 * k3 + net(y + h * k3))
            loss = y.square().mean()
        loss.backward()
        return float(loss).hex()

    return step


def measure(name: str, *, tiny: bool) -> dict[str, Any]:
    """Record the steps of one model in this process, and make plans."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    step = ode(tiny) if name == "ode" else step_of(name, tiny, "budget")
    recorded: list[Any] = []

    def begin(self: Solving, trace: Any, *_: Any, **__: Any) -> None:
        recorded.append((trace, self._windows))
        raise _RecordedError

    Solving.begin = begin  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory() as directory:
        # Of no budget so small that a step is only measured, and never planned.
        with contextlib.closing(Stash(disk=directory, budget="1MiB")) as stash:
            with contextlib.suppress(_RecordedError):
                for _ in range(STEPS):
                    step(stash)
            if not recorded:
                raise SystemExit(f"{name}: no step was measured")
            trace, windows = recorded[0]
    least = smallest_budget(trace, windows=windows)
    left = left_alone(trace).forecast
    took, steps = [], []
    for share in SHARES:
        budget = int(least + share * (left.peak_bytes - least))
        began = time.process_time()
        found = solve_with_cuts(trace, budget, windows=windows)
        took.append(time.process_time() - began)
        steps.append(found.forecast.step_seconds / left.step_seconds)
    return {
        "blocks": len(trace.blocks),
        "calls": len(trace.regions),
        "seconds": took,
        "step": statistics.fmean(steps),
    }


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--models", default=",".join((*MODELS, "ode")), help="default: %(default)s")
    parser.add_argument("--tiny", action="store_true", help="small models, for tests")
    parser.add_argument("--one", action="store_true", help="only this model, in this process")
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options.models, tiny=options.tiny)), flush=True)
        return
    rows = []
    for name in options.models.split(","):
        command = [sys.executable, __file__, "--one", "--models", name, *["--tiny"] * options.tiny]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        of = json.loads(done.stdout)
        seconds = of["seconds"]
        rows.append(
            [
                name,
                str(of["blocks"]),
                str(of["calls"]),
                f"{statistics.median(seconds):.2f}",
                f"{max(seconds):.2f}",
                f"{of['step']:.4f}",
            ]
        )
    print(markdown(HEAD, rows), flush=True)


if __name__ == "__main__":
    main()
