#!/usr/bin/env python
"""Random programs under a stash in every way, against plain PyTorch: equal to the bit, or its error.

    scripts/soak_programs.py                            # 10,000 programs in all ways
    scripts/soak_programs.py --programs 500 --seed 7    # others, and fewer
    scripts/soak_programs.py --way 'host|disk'          # ways whose name matches
    scripts/soak_programs.py --ways-each 5              # each program in five of the ways, by turns
    scripts/soak_programs.py --simulated 0.1            # on three streams of a simulated accelerator
    scripts/soak_programs.py --undo all                 # without each guard: is it missed?
    scripts/soak_programs.py --undo 'version|dedup'     # without the guards that match
    scripts/soak_programs.py --table benchmarks/results/soak/programs_undo.txt    # a kept run, as a table

Every seed is another set of programs. A program that fails is made as small as hypothesis can and printed as
code for ``FOUND`` in ``tests/test_programs.py``. With ``--undo``, one guard of the library at a time is
patched away, and the row says after how many programs the search caught it, and by which way.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from guards import GUARDS, Guard
from programs.judge import Verdict, judge
from programs.places import CPU, Accelerator, Place, Simulated
from programs.search import Found, search
from programs.ways import DEVICE_WAYS, WAYS

TRIED = "."  # what a process writes for each program before it runs it


def soak(options: argparse.Namespace) -> int:
    """The programs of this process; returns how many failed."""
    place = _place(options)
    known = DEVICE_WAYS if isinstance(place, Accelerator) else WAYS
    ways = {name: way for name, way in known.items() if re.search(options.way, name)}
    names, failing = list(ways), list[str]()
    said: Counter[str] = Counter()

    def check(steps: list) -> None:
        verdict = Verdict(steps, place)
        said["programs"] += 1
        said["with races of their own"] += verdict.has_races
        said["steps"] += len(steps)
        said["changed"] += "changed" in verdict.plain
        said["gradients"] += sum(isinstance(result, list) for result in verdict.plain)
        first = said["programs"] * options.ways_each
        turns = [(first + number) % len(names) for number in range(options.ways_each or len(names))]
        for name in failing or [names[turn] for turn in turns]:
            said["runs"] += 1
            try:
                verdict.check(name, ways[name], directory)
            except Exception:
                failing[:] = [name]  # a smaller program is tried in this one
                raise

    failed = 0
    until = time.monotonic() + 60 * options.minutes
    with tempfile.TemporaryDirectory() as directory:
        left, number = options.programs, options.seed
        while left > 0:
            found = search(check, min(left, 250), number=number, shrink=True, most=options.steps)
            left -= found.programs
            failing.clear()
            failed += found.error is not None
            print(f"seed {number:<6} {found.programs:5} programs  {_outcome(found)}", flush=True)
            number += 1000
            if failed >= options.most_failures or time.monotonic() > until:
                break
    print(_counts(said))
    return failed


def _place(options: argparse.Namespace) -> Place:
    if options.accelerator:
        return Accelerator()
    return CPU if options.simulated is None else Simulated(options.simulated, options.seed)


def _outcome(found: Found) -> str:
    if found.error is None:
        return "equal"
    kind = type(found.error).__name__
    return f"FAILED: {kind}: {found.error}\n{found.as_code()}"


def soak_in_processes(options: argparse.Namespace) -> int:
    """The same in several processes, each with its share and seeds of its own."""
    share = -(-options.programs // options.processes)
    command = [sys.executable, __file__, "--way", options.way, "--steps", str(options.steps)]
    command += ["--ways-each", str(options.ways_each), "--minutes", str(options.minutes)]
    if options.simulated is not None:
        command += ["--simulated", str(options.simulated)]
    command += ["--accelerator"] * options.accelerator
    running = [
        subprocess.Popen(
            [*command, "--programs", str(share), "--seed", str(options.seed + number)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(options.processes)
    ]
    said: Counter[str] = Counter()
    failed = 0
    for process in running:
        out, _ = process.communicate()
        *lines, _ = out.rstrip().split("\n")
        counts = next((line for line in reversed(lines) if line.startswith("{")), "{}")
        print("\n".join(line for line in lines if line is not counts), flush=True)
        said.update(json.loads(counts))
        failed += bool(process.returncode)
    print(_counts(said))
    return failed


def _counts(said: Counter[str]) -> str:
    return json.dumps(dict(said))


def undo(options: argparse.Namespace) -> int:
    """Without each guard in turn: how many programs until a wrong result; returns how many were missed."""
    missed = 0
    for name, guard in GUARDS.items():
        if options.undo != "all" and not re.search(options.undo, name):
            continue
        if guard.not_searched:
            print(f"{name:52} not searched: {guard.not_searched}", flush=True)
            continue
        began = time.perf_counter()
        tried, said = _undone(name, options)
        missed += said == "MISSED"
        seconds = time.perf_counter() - began
        print(f"{name:52} {tried:5} programs {seconds:6.1f} s  {said}", flush=True)
    return missed


def _undone(name: str, options: argparse.Namespace) -> tuple[int, str]:
    """How many programs were tried without a guard, and what the last gave; in a process that may end."""
    theirs, ours = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(ours, _search_without(GUARDS[name], options, ours).encode())
        finally:
            os._exit(0)
    os.close(ours)
    with open(theirs, "rb") as pipe:
        output = pipe.read().decode()
    _, status = os.waitpid(child, 0)
    tried = output.count(TRIED)
    if os.WIFSIGNALED(status):
        return tried, f"the process ended by {signal.Signals(os.WTERMSIG(status)).name}"
    return tried, output.replace(TRIED, "")


def _search_without(guard: Guard, options: argparse.Namespace, pipe: int) -> str:
    ways = {way: WAYS[way] for way in WAYS if re.search(guard.ways, way)}

    def check(steps: list) -> None:
        os.write(pipe, TRIED.encode())
        judge(steps, directory, ways)

    with tempfile.TemporaryDirectory() as directory, guard.undone():
        found = search(
            check, options.programs, number=options.seed, shrink=False, most=options.steps
        )
    if found.error is None:
        return "MISSED"
    return f"{type(found.error).__name__} {str(found.error).split(':')[0]}"


def table(result: Path) -> str:
    """Return the rows of a kept ``--undo`` run, with the purpose of each guard, as a table."""
    rows = ["| undone | what it is for | programs until it was missed |", "| --- | --- | ---: |"]
    outcomes = {line[:52].strip(): line[52:].strip() for line in result.read_text().splitlines()}
    for name, guard in GUARDS.items():
        said = outcomes.get(name, "not in this run")
        count = re.match(r"(\d+) programs", said)
        if count is not None and "MISSED" not in said:
            said = count[1]
        elif count is not None:
            said = f"not within {count[1]}: {guard.elsewhere or 'no test is named'}"
        rows.append(f"| {name} | {guard.why} | {said} |")
    return "\n".join(rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--programs", type=int, default=10_000, help="how many; default 10000")
    parser.add_argument("--steps", type=int, default=40, help="the most steps of one; default 40")
    parser.add_argument("--seed", type=int, default=0, help="which programs; default 0")
    parser.add_argument("--way", default="", metavar="REGEX", help="ways that match")
    parser.add_argument(
        "--ways-each", type=int, default=0, help="ways of a program, by turns; default 0: all"
    )
    parser.add_argument(
        "--minutes", type=float, default=1e9, help="begin no further search after so many"
    )
    parser.add_argument(
        "--simulated",
        type=float,
        metavar="CHANCE",
        help="on a simulated accelerator, whose streams each do their next work with this chance at each look",
    )
    parser.add_argument(
        "--accelerator", action="store_true", help="on the accelerator that is there"
    )
    parser.add_argument("--processes", type=int, default=1, help="at once; default 1")
    parser.add_argument("--undo", default="", metavar="REGEX", help="guards to do without, or all")
    parser.add_argument(
        "--most-failures", type=int, default=3, help="stop after so many; default 3"
    )
    parser.add_argument("--table", type=Path, help="print a kept --undo run as a table")
    options = parser.parse_args()
    if options.table is not None:
        print(table(options.table))
        return 0
    warnings.simplefilter("ignore")
    if not options.undo:  # there a process may well end
        faulthandler.enable()
    torch.set_num_threads(1)
    began = time.perf_counter()
    if options.undo:
        bad = undo(options)
        summary = f"{bad} missed"
    else:
        bad = soak_in_processes(options) if options.processes > 1 else soak(options)
        summary = f"{bad} failed"
    print(f"{summary} in {time.perf_counter() - began:.0f} s")
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
