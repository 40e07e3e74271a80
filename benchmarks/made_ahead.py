"""What it gains that a worker makes recomputed and packed blocks ahead of need.

    OMP_NUM_THREADS=1 python benchmarks/made_ahead.py           # prints a table
    OMP_NUM_THREADS=1 python benchmarks/made_ahead.py --tiny    # small, for tests

Steps of small models of ``backstash bench`` in one process, in pairs that take turns: with the worker and
without it, all in memory (``keep=None``). The gradients of each step are compared with plain PyTorch's.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from contextlib import nullcontext
from typing import Any

import torch

from backstash import Action, Stash
from backstash.cli._machine import machine
from bench import _workloads
from bench._markdown import markdown
from bench._step_worker import digest

HEAD = (
    *("model", "action", "ahead", "backward: without", "with"),
    *("computing thread's processor: without", "with", "step, of that without"),
)
SMALL = {
    "gpt": lambda: _workloads._gpt(3, 512, 2, 512),
    "llama": lambda: _workloads._llama(3, 512, 2, 512),
    "resnet": lambda: _workloads._resnet((1, 1, 2, 1), 64, 4, 160),
    "unet": lambda: _workloads._unet(4, 16, 2, 128),
}


def row(name: str, work: Any, action: str, pairs: int, small: str) -> tuple[str, ...]:
    """One line of the table."""
    stash = Stash(keep=None, policy=lambda saved: Action(action), min_bytes=small)
    parameters = list(work.model.parameters())

    def step(hold: Any, *, ahead: bool) -> tuple[float, float, float, str]:
        """Seconds of the step, of its backward, of this thread's processor in backward; the gradients."""
        stash._session.device_tiers[0].prefetcher._made.is_off = not ahead
        torch.manual_seed(1)
        for each in parameters:
            each.grad = None
        begun = time.perf_counter()
        with hold:
            loss = work.model(*work.inputs)
        middle, processor = time.perf_counter(), time.thread_time()
        loss.backward()
        ended, processor = time.perf_counter(), time.thread_time() - processor
        return ended - begun, ended - middle, processor, digest(work.model)

    expected = step(nullcontext(), ahead=False)[-1]
    found: dict[bool, list[tuple[float, float, float, str]]] = {False: [], True: []}
    step(stash, ahead=False)
    before = stash.stats().prefetch_hits
    for number in range(pairs):
        for ahead in (False, True) if number % 2 else (True, False):
            found[ahead].append(step(stash, ahead=ahead))
    hits = (stash.stats().prefetch_hits - before) / pairs
    assert {each[-1] for of in found.values() for each in of} == {expected}
    of_step = statistics.median(a[0] / b[0] for a, b in zip(found[True], found[False], strict=True))
    seconds = [
        statistics.median(each[at] for each in found[ahead])
        for at in (1, 2)
        for ahead in (False, True)
    ]
    stash.close()
    cells = (f"{hits:.0f} blocks", *(f"{1000 * each:.0f} ms" for each in seconds))
    return (name, action, *cells, f"{of_step:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", default=list(SMALL))
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--tiny", action="store_true", help="the small models, for tests")
    options = parser.parse_args()
    rows = []
    for name in options.models:
        torch.manual_seed(0)
        work = _workloads.WORKLOADS[f"{name}-tiny"]() if options.tiny else SMALL[name]()
        for action in ("recompute", "pack"):
            small = "4KiB" if options.tiny else "64KiB"
            rows.append(row(name, work, action, options.pairs, small))
    print(markdown(HEAD, rows))
    about = machine()
    print(
        f"\n{time.strftime('%Y-%m-%d')}; {about.processor}, {about.cores} cores, PyTorch on "
        f"{torch.get_num_threads()} thread(s); load {os.getloadavg()[0]:.1f} at the end; "
        f"torch {torch.__version__}"
    )


if __name__ == "__main__":
    main()
