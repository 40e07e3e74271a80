#!/usr/bin/env python
"""Budgets: a thousand steps of random length within one, and how near plans are to the least that is possible.

    scripts/soak_budget.py                           # both
    scripts/soak_budget.py lengths --steps 200       # GPT blocks, batches of random length
    scripts/soak_budget.py gaps                      # plans from recorded steps compared with a linear program

lengths: each way (plain PyTorch, a budget with a disk, one without) trains in a process of its own on the same
batches. A step is over the budget where the resident peak that the system counted in it is. Every loss must be
plain PyTorch's to the bit. It fails where a loss differs, where more than one step in a hundred is over the
budget, one by more than a twentieth, or where the process holds more in the last tenth of its steps than the
budget.

gaps: for each model of benchmarks/budget_cells.py a step is recorded, without and with all its blocks given to
Stash.recompute, and planned for ten budgets between the smallest that can be kept and what plain PyTorch takes.
SciPy solves a linear program to compare with, in which a fraction of a block or of a region may be kept, the
plan's windows are full where it moves anything, and what is saved after the last block that goes is left alone;
one in which a region runs again whole or not at all, as it has to; and one in which what moves takes no window,
which is below whatever any plan can do. It fails where the gap to the first at the 95th percentile is above 3%.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "tests")]

MIB = 1 << 20
LENGTHS = (32, 256)
GAP = 0.03


def train(way: str, steps: int, budget: int, disk: str) -> dict[str, Any]:
    """Losses and resident peaks of one way, in this process."""
    import contextlib

    import torch

    import budget_cells
    from backstash import Stash
    from backstash.cli._resident import reset_resident_peak, resident_bytes, resident_peak_bytes

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    net, _ = budget_cells.model("gpt", budget_cells.FULL)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)
    stash: Any = contextlib.nullcontext()
    if way != "plain":
        stash = Stash(budget=budget, disk=disk if way == "disk" else None)
    draw, losses, peaks, held, seconds = random.Random(0), [], [], [], []
    for _ in range(steps):
        x = torch.randint(256, (8, draw.randint(*LENGTHS)))
        reset_resident_peak()
        began = time.perf_counter()
        optimizer.zero_grad()
        with stash:
            loss = net.through(lambda number, block, x: block(x), x).square().mean()
        loss.backward()
        optimizer.step()
        seconds.append(time.perf_counter() - began)
        losses.append(float(loss.detach()).hex())
        del loss
        peaks.append(resident_peak_bytes())
        held.append(resident_bytes())
    stats = stash.stats() if way != "plain" else None
    return {
        "losses": losses,
        "peaks": peaks,
        "held": held,
        "seconds": statistics.median(seconds),
        "moved": stats.written_bytes if stats else 0,
        "recomputed": stats.recomputed_bytes if stats else 0,
    }


def in_process(*arguments: str) -> dict[str, Any]:
    command = [sys.executable, __file__, "--train", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def lengths(steps: int, disk: str) -> bool:
    """Whether all held."""
    plain = in_process("plain", str(steps), "0", disk)
    # What the libraries and the weights take, and a share of what plain PyTorch takes in addition.
    least, most = min(plain["peaks"]), max(plain["peaks"])
    good = True
    for way, share in (("disk", 0.5), ("disk", 0.7), ("memory", 0.75)):
        budget = int(least + share * (most - least))
        found = in_process(way, str(steps), str(budget), disk)
        after = found["peaks"][8:]
        over = [peak for peak in after if peak > budget]
        worst = max(after) / budget
        early, late = (
            statistics.median(found["held"][part]) / MIB
            for part in (slice(steps // 10, steps // 5), slice(-steps // 10, None))
        )
        differ = sum(a != b for a, b in zip(found["losses"], plain["losses"], strict=True))
        good &= not differ and len(over) <= steps / 100 and worst <= 1.05 and late * MIB <= budget
        place = "a disk" if way == "disk" else "no disk"
        print(
            f"{steps} steps of {LENGTHS[0]} to {LENGTHS[1]} tokens, budget {budget / MIB:.0f} MiB, {place}: "
            f"{differ} losses differ; {len(over)} steps over it from the ninth on, the highest {worst:.1%} of "
            f"it; held after a step {early:.0f} MiB in the second tenth, {late:.0f} in the last; "
            f"{found['seconds'] / plain['seconds']:.2f} of plain's step; plain's peak {most / MIB:.0f} MiB",
            flush=True,
        )
    return good


def gaps(disk: str) -> bool:
    """Whether plans are near the bound."""
    import torch

    import budget_cells
    from backstash import Stash
    from backstash._plan.solve import smallest_budget, solve
    from plan_bound import linear_program

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    found, free, whole, took = [], [], [], []
    ways = [(name, way) for name in budget_cells.MODELS for way in ("budget", "regions")]
    for name, way in ways:
        step, stash = budget_cells.step_of(name, False, way), Stash(budget=1, disk=disk)
        while stash.plan is None or stash.plan.trace is None:
            step(stash)
        trace = stash.plan.trace
        stash.close()
        largest = max(64 * MIB, 3 * max(block.nbytes for block in trace.blocks))
        least = smallest_budget(trace)
        most = max(moment.other_bytes for moment in trace.moments) + sum(
            block.nbytes for block in trace.blocks
        )
        of_model, of_whole = [], []
        for share in range(1, 11):
            budget = int(least + share / 10 * (most - least))
            began = time.perf_counter()
            solution = solve(trace, budget)
            took.append(time.perf_counter() - began)
            windows = solution.windows
            is_moving = solution.forecast.moved_bytes > 0
            reserved = (windows.inflight_bytes, windows.prefetch_bytes) if is_moving else (0, 0)
            seconds = solution.forecast.step_seconds
            if all(name == "keep" for name in solution.choices):
                # What whole steps took that were left alone is not in the program, which counts them as others.
                seconds += trace.extra_seconds(all_stay=False) - trace.extra_seconds(all_stay=True)
            least_seconds = linear_program(trace, budget, largest)
            free.append(seconds / least_seconds - 1)
            # Where nothing fits in addition to full windows, the plan's are not full.
            for gaps_to, are_whole in ((of_model, False), (of_whole, True)):
                bound = linear_program(trace, budget, largest, reserved, whole_regions=are_whole)
                if bound == math.inf:
                    bound = linear_program(trace, budget, largest, whole_regions=are_whole)
                gaps_to.append(seconds / bound - 1)
        found, whole = found + of_model, whole + of_whole
        whole_gaps = ""
        if trace.regions:
            whole_gaps = (
                f"; with whole regions {statistics.median(of_whole):.2%} and {max(of_whole):.2%}"
            )
        print(
            f"{name}, {way}: {len(trace.blocks)} blocks, {len(trace.regions)} regions; "
            f"gap {statistics.median(of_model):.2%} in the median, {max(of_model):.2%} at most{whole_gaps}",
            flush=True,
        )
    at_95, free_at_95, whole_at_95 = (
        sorted(each)[int(0.95 * len(each))] for each in (found, free, whole)
    )
    print(
        f"{len(found)} plans: gap {statistics.median(found):.2%} in the median, {at_95:.2%} at the 95th "
        f"percentile; compared with a program with whole regions {statistics.median(whole):.2%} "
        f"and {whole_at_95:.2%}, and with one in which what moves takes no memory "
        f"{statistics.median(free):.2%} and {free_at_95:.2%}; a plan took {statistics.median(took):.2f} s, "
        f"{max(took):.2f} at most"
    )
    return at_95 <= GAP


def main() -> int:
    if sys.argv[1:2] == ["--train"]:
        way, steps, budget, disk = sys.argv[2:]
        print(json.dumps(train(way, int(steps), int(budget), disk)))
        return 0
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", nargs="*", help="lengths, gaps; default: both")
    parser.add_argument("--steps", type=int, default=1000, help="default 1000")
    parser.add_argument("--disk", default=tempfile.gettempdir(), help="where what moves goes")
    options = parser.parse_args()
    good = True
    for what in options.what or ("lengths", "gaps"):
        good &= lengths(options.steps, options.disk) if what == "lengths" else gaps(options.disk)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
