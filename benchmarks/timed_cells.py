#!/usr/bin/env python
"""What a step would take on an accelerator that is not here: budgets, checkpoints and what is possible.

    python benchmarks/timed_cells.py [--models gpt,llama,resnet152] [--tiny] --out FILE.json

On the device of :mod:`timed`, which has no data and whose time is played. Its rates are those of an H100: for
the GPT plain PyTorch and ``torch.utils.checkpoint`` took within 2% of these seconds there
(results/budget_cells_h100.json). So the script shows what plans are worth, and where the host's Python would be
the limit. It shows nothing of kernels, and no figure of it is one of a real device.

Each way runs in a process of its own: ``torch.utils.checkpoint`` around a quarter to all of the blocks,
``Stash.recompute`` of all, and a budget for each of their peaks and for some between. A budget runs until its
plan has settled. ``limit`` is the least that a linear program over fractions of each saved tensor finds, which
may be kept, recomputed from what is kept, or moved while the device computes (GPT and Llama).
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.optimize import linprog

from bench._markdown import markdown
from budget_cells import ground_of
from interleaved import Checkpoint, Recompute, Way, Work, turn

GiB, MiB = 2**30, 2**20
MODELS = ("gpt", "llama", "resnet152")
STEPS, TIMED = 48, 7  # that a plan may take until it has settled, and after that
# Of device.cpp: bytes per second of its memory and its link, operations per second of products and attention.
MEMORY, LINK, PRODUCTS, ATTENTION = 2.6e12, 55e9, 680e12, 350e12
TOKENS, WIDTH, LENGTH = 8192, 2048, 2048
# Between the smallest and the largest peak of the checkpoints.
SHARES = (0.1, 0.4, 0.7, 0.9)


def kinds_of(model: str) -> dict[str, tuple[float, float | None]]:
    """Of one block: what it saves, in MiB, and the seconds to compute each again from what is kept."""
    unit = TOKENS * WIDTH * 2 / MiB

    def bandwidth(units: float) -> float:
        return units * unit * MiB / MEMORY

    def product(inside: int, outside: int) -> float:
        return 2 * TOKENS * inside * outside / PRODUCTS

    attention = 4 * TOKENS * WIDTH * LENGTH / 2 / ATTENTION
    kinds: dict[str, tuple[float, float | None]] = {
        "input": (unit, None),
        "first norm": (unit, bandwidth(2)),
        "query, key, value": (3 * unit, product(WIDTH, 3 * WIDTH)),
        "attention": (unit, attention),
        "second input": (unit, product(WIDTH, WIDTH) + bandwidth(3)),
        "second norm": (unit, bandwidth(2)),
    }
    if model == "gpt":
        return kinds | {
            "masks": (unit, None),  # random: not recomputed on an accelerator
            "up": (4 * unit, product(WIDTH, 4 * WIDTH)),
            "activation": (4 * unit, bandwidth(8)),
        }
    return kinds | {
        "gate": (3 * unit, product(WIDTH, 3 * WIDTH)),
        "activation": (3 * unit, bandwidth(6)),
        "up": (3 * unit, product(WIDTH, 3 * WIDTH)),
        "down": (3 * unit, bandwidth(9)),
    }


def limit(model: str, peak_bytes: int, plain: dict[str, Any], blocks: int = 16) -> float | None:
    """Return the least seconds of a step within a peak; ``None`` if nothing fits.

    Args:
        model: which.
        peak_bytes: at any moment of forward and backward.
        plain: figures of plain PyTorch's step.
        blocks: of the model.
    """
    kinds = list(kinds_of(model).values())
    sizes = np.array([mib * MiB / GiB for mib, _ in kinds])
    seconds = np.array([each or 0.0 for _, each in kinds])
    count = len(kinds)
    forward, backward = (plain[key] / blocks for key in ("forward_seconds", "backward_seconds"))
    # Of each block: shares that are recomputed, shares that move, and waits in forward and in backward.
    width = 2 * count + 2
    costs = np.tile([*seconds, *[0.0] * count, 1.0, 1.0], blocks)
    bounds = [
        bound
        for _ in range(blocks)
        for bound in (
            *((0, 1 if each else 0) for _, each in kinds),
            *[(0, 1)] * count,
            (0, None),
            (0, None),
        )
    ]
    rows, most = [], []

    def row() -> np.ndarray:
        return np.zeros((blocks, width))

    for block in range(blocks):
        for kind in range(count):
            share = row()
            share[block, kind] = share[block, count + kind] = 1
            rows.append(share), most.append(1.0)
        held = row()  # while this block's backward runs
        held[:block, :count] = held[:block, count : 2 * count] = -sizes
        rows.append(held)
        saved = sizes.sum() * (block + 1)
        grads = plain["block_parameter_bytes"] / GiB * (blocks - 1 - block)
        most.append(peak_bytes / GiB - saved - plain["base_bytes"] / GiB - grads)
        down = row()  # what is saved from here on is down before backward begins
        down[block:, count : 2 * count] = sizes * GiB / LINK
        down[block:, -2] = -1
        rows.append(down), most.append(forward * (blocks - block - 0.5))
        up = row()  # what moved is back before its block's backward
        up[block:, count : 2 * count] = sizes * GiB / LINK
        up[block + 1 :, :count] = -seconds
        up[block:, -1] = -1
        rows.append(up), most.append(backward * (blocks - 1 - block))
    found = linprog(costs, A_ub=np.array([each.ravel() for each in rows]), b_ub=most, bounds=bounds)
    return plain["seconds"] + float(found.fun) if not found.status else None


def cell(model: str, way: str, *, tiny: bool) -> dict[str, Any]:
    """Run one way in this process."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    ground = ground_of("timed")
    work = Work(model, ground, tiny=tiny)
    kind, _, number = way.partition("=")
    found: dict[str, Any] = {}
    if kind == "budget":
        budget = int(number)
        stash = ground.stash("", budget=budget)
        took, calls, peaks = list[float](), list[int](), list[int]()
        torch.ops.timed.highest()
        for _ in range(STEPS + TIMED):
            began, before = ground.now(), torch.ops.timed.calls()
            work.step(Way(way), stash)
            took.append(ground.seconds(began, ground.now()))
            calls.append(torch.ops.timed.calls() - before)
            # PyTorch's own peak is not reset, as in most programs.
            peaks.append(torch.ops.timed.highest())
            plan = stash.plan
        assert plan is not None
        # Some of them may be measured again, which takes longer.
        found["seconds"] = statistics.median(took[-TIMED:])
        found["calls"] = statistics.median(calls[-TIMED:])
        found["peak_bytes"], found["highest_bytes"] = max(peaks[-TIMED:]), max(peaks)
        predicted = plan.predicted
        found |= {
            "seconds_of_steps": took,
            "state": plan.state,
            "predicted_seconds": predicted and predicted.step_seconds,
            "predicted_peak_bytes": predicted and predicted.peak_bytes,
            "kept_the_budget": found["highest_bytes"] <= budget,
        }
        stash.close()
        return found
    ways = {"plain": Way, "checkpoint": Checkpoint, "recompute": Recompute}
    one = ways[kind](way, int(number or 0))
    turn(one, work)
    with one.turn(work) as context:
        for _ in range(4):  # until forwards follow routes
            work.step(one, context)
        ground.reset_peak()
        calls, began = torch.ops.timed.calls(), ground.now()
        work.optimizer.zero_grad()
        base = torch.accelerator.memory_allocated()
        with context:
            loss = work.net.through(one.call, work.batch).float().square().mean()
        middle = ground.now()
        loss.backward()
        ended = ground.now()
        work.optimizer.step()
        found["seconds"] = ground.seconds(began, ground.now())
    found["peak_bytes"] = ground.peak_bytes()
    found["calls"] = torch.ops.timed.calls() - calls
    found["forward_seconds"] = ground.seconds(began, middle)
    found["backward_seconds"] = ground.seconds(middle, ended)
    found["base_bytes"] = base
    found["block_parameter_bytes"] = sum(each.nbytes for each in work.blocks[0].parameters())
    found["blocks"] = len(work.blocks)
    return found


def run(model: str, way: str, *, tiny: bool) -> dict[str, Any]:
    """Run one way in a process of its own."""
    command = [sys.executable, __file__, "--cell", way, "--models", model]
    done = subprocess.run([*command, *["--tiny"] * tiny], capture_output=True, text=True)
    if done.returncode:
        return {"failed": done.stderr.strip().splitlines()[-1:]}
    return dict(json.loads(done.stdout.splitlines()[-1]))


def measure(model: str, *, tiny: bool) -> dict[str, Any]:
    """Run all ways of one model."""
    cells = {"plain": run(model, "plain", tiny=tiny)}
    blocks = cells["plain"]["blocks"]
    for quarter in (1, 2, 3, 4):
        way = f"checkpoint={blocks * quarter // 4}"
        cells[way] = run(model, way, tiny=tiny)
    cells[f"recompute={blocks}"] = run(model, f"recompute={blocks}", tiny=tiny)
    peaks = [
        each["peak_bytes"] for way, each in cells.items() if way.startswith(("plain", "check"))
    ]
    least, most = min(peaks), max(peaks)
    between = [int(least + share * (most - least)) for share in SHARES]
    budgets = sorted({*between, *(int(each * 1.01) for each in peaks)})
    for nbytes in budgets[::3] if tiny else budgets:
        cells[f"budget={nbytes}"] = run(model, f"budget={nbytes}", tiny=tiny)
    for way, each in cells.items():
        if model in ("gpt", "llama") and not tiny and "failed" not in each:
            nbytes = int(way.partition("=")[2]) if way.startswith("budget") else each["peak_bytes"]
            each["limit_seconds"] = limit(model, nbytes, cells["plain"])
    return cells


def rows(cells: dict[str, Any]) -> list[list[str]]:
    """The table of one model."""
    table = []
    for way, each in cells.items():
        kind, _, number = way.partition("=")
        name = f"budget {int(number) / GiB:.2f} GiB" if kind == "budget" else way
        if "failed" in each:
            table.append([name, str(each["failed"]), "", "", "", "", "", ""])
            continue
        # The fastest checkpoint that takes no more memory than the budget, or than this way.
        room = int(number) if kind == "budget" else each["peak_bytes"]
        others = [
            other["seconds"]
            for key, other in cells.items()
            if key.startswith(("plain", "checkpoint")) and other.get("peak_bytes", room + 1) <= room
        ]
        best, least = min(others, default=None), each.get("limit_seconds")
        table.append(
            [
                name,
                f"{each['peak_bytes'] / GiB:.2f}",
                f"{each['highest_bytes'] / GiB:.2f}" if kind == "budget" else "",
                f"{each['seconds'] * 1e3:.1f}",
                f"{each['seconds'] / best:.3f}" if best and kind == "budget" else "",
                f"{least * 1e3:.1f}" if least else "",
                f"{each['seconds'] / least:.3f}" if least else "",
                f"{each['calls'] / 1e3:.1f}",
            ]
        )
    return table


HEAD = (
    "way",
    "peak, GiB",
    "of all steps",
    "step, ms",
    "of the best checkpoint",
    "limit, ms",
    "of the limit",
    "thousand Python calls",
)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--models", default=",".join(MODELS), help="default: %(default)s")
    parser.add_argument("--tiny", action="store_true", help="small models, for tests")
    parser.add_argument("--cell", metavar="WAY", help="only this way, in this process")
    parser.add_argument("--out", type=Path, help="write all figures to this file")
    options = parser.parse_args()
    if options.cell:
        print(json.dumps(cell(options.models, options.cell, tiny=options.tiny)), flush=True)
        return
    results: dict[str, Any] = {"torch": torch.__version__, "models": {}}
    if options.out is not None and options.out.exists():
        results = json.loads(options.out.read_text())
    for model in options.models.split(","):
        results["models"][model] = measure(model, tiny=options.tiny)
        if options.out is not None:
            options.out.write_text(json.dumps(results, indent=1) + "\n")
        print(f"{model}\n\n{markdown(HEAD, rows(results['models'][model]))}\n", flush=True)


if __name__ == "__main__":
    main()
