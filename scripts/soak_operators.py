#!/usr/bin/env python
"""Every operator that PyTorch can differentiate, with a stash and without: the bits must agree.

    scripts/soak_operators.py                          # all lists, dtypes, samples and mixes of tiers
    scripts/soak_operators.py --only 'linalg|nn.functional' --dtypes float64 --first-sample
    scripts/soak_operators.py --lists foreach nested --mixes disk

The operators and their sample inputs, views and broadcasts among them, are torch's own
(``torch.testing._internal``): its ``op_db``, the same in place, on sparse and on nested tensors, the
``_foreach`` functions, all modules of ``torch.nn``, custom functions and operators. Each sample's inputs are
made to be results of another operation, since leaves stay where they are. First and second gradients are
compared. A sample whose plain run does not repeat to the bit, or does not run, says nothing and is counted as
such. See ``tests/operators.py`` for the mixes.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import re
import sys
import tempfile
import time
import warnings
from collections import Counter
from itertools import islice
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from operators import LISTS, MIXES, Stashes, difference

DTYPES = ("float32", "float64", "complex64", "complex128", "bfloat16", "float16")


def examine(work: tuple[str, int, argparse.Namespace]) -> tuple[Counter[str], list[str]]:
    """One operator in every dtype, sample, order and mix: what came of each, and what went wrong."""
    kind, index, args = work
    counts: Counter[str] = Counter()
    wrong: list[str] = []
    stashes = _stashes(args.directory)
    operator = LISTS[kind]()[index]
    before = {mix: stashes.of(mix).stats().written_bytes for mix in args.mixes}
    for name in args.dtypes:
        cases = operator.cases(getattr(torch, name))
        for number, case in enumerate(islice(cases, 1 if args.first_sample else None)):
            for second in (False, True)[: 1 + (operator.second and not args.no_second)]:
                found = difference(case, stashes, args.mixes, second=second)
                for mix, text in found.items():
                    result = text.split()[0] if text else "equal"
                    counts[f"{kind}: {mix}: {result}"] += 1
                    if result in ("differs", "raises"):
                        order = "second" if second else "first"
                        wrong.append(
                            f"{operator.name} {name} sample {number} {order}, {mix}: {text}"
                        )
    for mix, already in before.items():
        counts[f"{kind}: {mix}: bytes down"] += stashes.of(mix).stats().written_bytes - already
    return counts, wrong


_OF_THIS_PROCESS: list[Stashes] = []


def _stashes(directory: str) -> Stashes:
    if not _OF_THIS_PROCESS:
        warnings.simplefilter("ignore")
        torch.set_num_threads(1)
        _OF_THIS_PROCESS.append(Stashes(directory))
    return _OF_THIS_PROCESS[0]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--only", default="", metavar="REGEX", help="operators to run (default: all)")
    add("--lists", nargs="+", default=list(LISTS), choices=list(LISTS))
    add("--mixes", nargs="+", default=list(MIXES), choices=list(MIXES))
    add("--dtypes", nargs="+", default=list(DTYPES))
    add("--first-sample", action="store_true", help="one sample an operator")
    add("--no-second", action="store_true", help="first gradients only")
    add("--jobs", type=int, default=os.cpu_count(), help="processes at a time (default: all cores)")
    add("--directory", help="where the disk tier lies (default: a temporary one)")
    args = parser.parse_args(argv)
    warnings.simplefilter("ignore")
    began = time.monotonic()
    total: Counter[str] = Counter()
    failed = 0
    with tempfile.TemporaryDirectory(dir=args.directory) as args.directory:
        work = [
            (kind, index, args)
            for kind in args.lists
            for index, operator in enumerate(LISTS[kind]())
            if re.search(args.only, operator.name)
        ]
        with multiprocessing.get_context("fork").Pool(args.jobs) as pool:
            for number, (counts, wrong) in enumerate(pool.imap_unordered(examine, work), 1):
                total += counts
                failed += len(wrong)
                for text in wrong:
                    print(text, flush=True)
                if sys.stderr.isatty():
                    print(f"\r{number}/{len(work)}", end="", file=sys.stderr)
    _print_counts(total, Counter(kind for kind, _, _ in work))
    cases = sum(
        count for name, count in total.items() if not name.endswith(("plain", "bytes down"))
    )
    seconds = time.monotonic() - began
    print(f"{len(work)} operators, {cases} comparisons, {failed} different in {seconds:.0f} s")
    return 1 if failed else 0


def _print_counts(total: Counter[str], operators: Counter[str]) -> None:
    for kind, count in operators.items():
        silent = max(
            (n for name, n in total.items() if re.match(f"{kind}: .*: plain", name)), default=0
        )
        print(
            f"{kind}: {count} operators; {silent} samples say nothing (plain does not run or repeat)"
        )
        rows: dict[str, list[str]] = {}
        for name, n in total.items():
            list_name, mix, result = name.split(": ")
            if list_name == kind and result != "plain":
                rows.setdefault(mix, []).append(f"{n} {result}")
        for mix in MIXES:
            if mix in rows:
                print(f"  {mix:16} {', '.join(rows[mix])}")


if __name__ == "__main__":
    sys.exit(main())
