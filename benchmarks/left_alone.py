"""What a budget costs that everything fits in: steps within it and plain PyTorch's, which take turns.

    OMP_NUM_THREADS=1 python benchmarks/left_alone.py           # prints a table
    OMP_NUM_THREADS=1 python benchmarks/left_alone.py --tiny    # small, for tests

The models are those of ``budget_cells.py``. In one process a stash with a budget has its first steps until it
measures no more and the hooks are off after the first blocks: one that twice the step fits in, and one that it
fits in with less than a tenth to spare, where that takes 16 steps. Then come rounds of three steps, one within
the stash's context and two without it, in each order in turn; all are of the same model. What two plain steps
differ by is what the figures are worth.
"""

from __future__ import annotations

import argparse
import statistics
import time
from contextlib import nullcontext
from typing import Any

import torch

from backstash import Stash
from backstash.plan import Plan
from bench._markdown import markdown
from budget_cells import MODELS, step_of

HEAD = (
    "model",
    "budget",
    "saves looked at",
    "plain [s]",
    "within",
    "it takes",
    "plain beside plain",
)
SETTLED, MOST_STEPS = 8, 80


def rows(name: str, rounds: int, *, tiny: bool) -> list[tuple[str, ...]]:
    """Two lines of the table."""
    step = step_of(name, tiny, "budget")
    twice, plan = row(name, step, "64GiB", rounds)
    assert plan.predicted is not None
    once, _ = row(name, step, plan.predicted.peak_bytes * 27 // 25, rounds)
    return [twice, once]


def row(name: str, step: Any, budget: int | str, rounds: int) -> tuple[tuple[str, ...], Plan]:
    """One line, and what was planned."""
    stash = Stash(budget=budget)
    alike, steps, looked = 0, 0, 0
    is_twice = isinstance(budget, str)
    # Until steps are looked at as the one before, without hooks.
    while alike < SETTLED or stash.stats().hooks_off < SETTLED:
        before = stash.stats().saves
        step(stash)
        steps, last = steps + 1, looked
        looked = stash.stats().saves - before
        plan = stash.plan
        assert isinstance(plan, Plan)
        alike = alike + 1 if plan.state == "left alone" and looked == last else 0
        assert steps < MOST_STEPS, (name, plan.state, looked)
    seconds: dict[str, list[float]] = {"plain": [], "within": [], "again": []}
    for number in range(rounds):
        for at in range(3):
            which = [*seconds][(number + at) % 3]
            context: Any = stash if which == "within" else nullcontext()
            began = time.perf_counter()
            step(context)
            seconds[which].append(time.perf_counter() - began)
    ratios = {
        which: sorted(map(float.__truediv__, seconds[which], seconds["plain"]))
        for which in ("within", "again")
    }
    middle = {which: f"{statistics.median(of):.3f}" for which, of in ratios.items()}
    quarter = len(ratios["within"]) // 4
    spread = [f"{of[quarter]:.3f} to {of[-1 - quarter]:.3f}" for of in ratios.values()]
    times = [f"{statistics.median(seconds[which]):.3f}" for which in ("plain", "within")]
    kind = "twice the step fits" if is_twice else "the step fits"
    stash.close()
    return (
        name,
        kind,
        str(looked),
        *times,
        f"{middle['within']} ({spread[0]})",
        f"{middle['again']} ({spread[1]})",
    ), plan


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--tiny", action="store_true", help="small models, whose figures mean nothing"
    )
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("models", nargs="*", default=MODELS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    made = [each for name in given.models for each in rows(name, given.rounds, tiny=given.tiny)]
    print(f"torch {torch.__version__}, {given.rounds} rounds; in brackets the middle half\n")
    print(markdown(HEAD, made))


if __name__ == "__main__":
    main()
