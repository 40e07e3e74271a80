"""What a budget costs that everything fits in: steps within it and plain PyTorch's, which take turns.

    OMP_NUM_THREADS=1 python benchmarks/left_alone.py           # prints a table
    OMP_NUM_THREADS=1 python benchmarks/left_alone.py --tiny    # small, for tests

The models are those of ``budget_cells.py``. In one process a stash with a budget of 64 GiB has its first steps
until it measures no more; then come pairs of steps, one in its context and one without it, each first in turn.
The losses of all of them are compared with those of a process's plain steps.
"""

from __future__ import annotations

import argparse
import statistics
import time
from contextlib import nullcontext
from typing import Any

import torch

from backstash import Stash
from backstash._admission import FITS
from backstash.cli.bench._markdown import markdown
from backstash.plan import Plan
from budget_cells import MODELS, step_of

HEAD = ("model", "saves of a step, small ones left out", "plain [s]", "within a budget", "it takes")
SETTLED = 12


def row(name: str, pairs: int, *, tiny: bool) -> tuple[str, ...]:
    """One line of the table."""
    step, plain = step_of(name, tiny, "budget"), step_of(name, tiny, "plain")
    stash = Stash(budget="64GiB")
    for _ in range(SETTLED):
        states = torch.get_rng_state()
        found = step(stash)
        torch.set_rng_state(states)
        assert found == plain(nullcontext())
    assert isinstance(stash.plan, Plan) and stash.plan.state == "left alone"
    left = stash.stats().left[FITS].count
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for number in range(pairs):
        states, losses = torch.get_rng_state(), []
        for within in (number % 2 == 0, number % 2 == 1):
            torch.set_rng_state(states)
            context: Any = stash if within else nullcontext()
            began = time.perf_counter()
            losses.append((step if within else plain)(context))
            seconds[within].append(time.perf_counter() - began)
        assert losses[0] == losses[1], name
    saves = (stash.stats().left[FITS].count - left) // pairs
    ratios = [one / other for one, other in zip(seconds[True], seconds[False], strict=True)]
    stash.close()
    return (
        name,
        str(saves),
        f"{statistics.median(seconds[False]):.3f}",
        f"{statistics.median(seconds[True]):.3f}",
        f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--tiny", action="store_true", help="small models, whose figures mean nothing"
    )
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("models", nargs="*", default=MODELS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, {given.pairs} pairs; all losses equal\n")
    print(markdown(HEAD, [row(name, given.pairs, tiny=given.tiny) for name in given.models]))


if __name__ == "__main__":
    main()
