#!/usr/bin/env python3
"""Changes the package's source, one small change at a time, and looks whether a test notices.

    scripts/soak_mutants.py                          every file in FILES; an hour or two on 2 cores
    scripts/soak_mutants.py stores/_extents.py       these files only
    scripts/soak_mutants.py --only 'StorageVersion\\.'        these keys only (a regular expression)
    scripts/soak_mutants.py --again RESULT           those that survived in an earlier run's output
    scripts/soak_mutants.py --picked                 the short form: the hand-picked ones, in seconds

First the tests run once, unchanged, under coverage: so it is known which test runs which line, and how long
it takes. Then each mutant is tried in a process of its own, forked from this one, which has torch imported
and no threads: on a copy of the package, with the tests that run the changed lines, the quickest first, as
many as fit into ``--budget`` seconds, until one fails. One that takes far too long counts as killed.

A mutant that survives is a test that is missing, code that is not needed, or a change that makes no
difference: the last have a reason in tests/survivors.txt, by their keys. Exits with 1 when another survives.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Iterator
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # a process with threads cannot be forked safely

from mutation.changes import Mutant, keys_of, mutants_of
from mutation.trial import PACKAGE, ROOT, Coverage, Trial, the_map

REASONS = ROOT / "tests/survivors.txt"
PICKED = ROOT / "tests/mutants_picked.txt"
FILES = (
    "_saved/block.py _saved/entry.py _saved/view.py _tiers/backing.py _core/session.py _runtime/weak.py "
    "_runtime/reclaim.py _runtime/critical_section.py _runtime/workers.py stores/_extents.py "
    "stores/_leases.py stores/_disk.py stores/_file.py stores/_buffer_pool.py _device/pinned_pool.py "
    "_tiers/eviction.py _tiers/resident.py _tiers/health.py _tiers/inflight.py _tiers/disk.py "
    "_tiers/segments.py _tiers/host_buffers.py _tiers/host_writeback.py _saved/thread_state.py "
    "_tiers/host.py _tiers/host_backing.py _tiers/ahead.py _tiers/prefetch.py "
    "_saved/access_order.py _core/admission.py "
    "_core/hook_scope.py _device/memory.py memory.py launcher/_job.py "
    "_tiers/device_tiers.py _runtime/trace.py _runtime/trim.py _core/stats.py _torch/modules.py "
    "_device/accelerator.py stash.py _device/base.py _saved/placement.py _torch/hook_stack.py "
    "_torch/versions.py _tiers/base.py"
).split()


def reasons(path: Path = REASONS) -> dict[str, str]:
    """Each key that may survive, and why: a paragraph of lines with ``#``, then the keys it is for."""
    found, words, in_words = {}, "", False
    for line in path.read_text().splitlines():
        if line.startswith("#"):
            words = f"{words} {line[1:].strip()}" if in_words else line[1:].strip()
        elif line.strip() and words:
            found[line.strip()] = words
        in_words = line.startswith("#")
    return found


def texts(files: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Of these files of the package: where each lies, and what is in it."""
    for file in files:
        path = f"{PACKAGE}/{file}"
        yield path, (ROOT / path).read_text()


def all_mutants(files: Iterable[str], wanted: Container[str] | None = None) -> list[Mutant]:
    """Of these files of the package; ``wanted``: those of these keys."""
    return [each for path, text in texts(files) for each in mutants_of(path, text, wanted)]


def report(trial: Trial, mutants: list[Mutant], verbose: bool) -> int:
    """Print what did not end as it should, the counts of each file, and return the exit status."""
    began, listed = time.perf_counter(), reasons()
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    unlisted = 0
    for mutant, outcome, failed in trial.of(mutants):
        if outcome == "survived" and mutant.key in listed:
            outcome = "has a reason"
        elif outcome == "survived":
            unlisted += 1
        elif mutant.key in listed:
            outcome += ", though tests/survivors.txt lists it"
        counts[mutant.key.split("::")[0]][outcome.split(",")[0]] += 1
        if verbose or outcome != "killed":
            print(f"{outcome:13} {mutant.key}{f'    # {failed}' if failed else ''}", flush=True)
    total: Counter[str] = Counter()
    for file, each in counts.items():
        total += each
        print(f"{file:22} {_words(each)}")
    print(f"{_words(total)}; {time.perf_counter() - began:.0f} s")
    return 1 if unlisted else 0


def _words(counts: Counter[str]) -> str:
    kinds = ("killed", "timed out", "has a reason", "survived")
    return f"{sum(counts.values())} mutants: " + ", ".join(
        f"{counts[kind]} {kind}" for kind in kinds
    )


def stale() -> int:
    """Print each key in tests/survivors.txt that no mutant has; 1 if there is one."""
    listed = reasons()
    files = sorted({key.split("::")[0] for key in listed})
    known = {key for path, text in texts(files) for key in keys_of(path, text)}
    found = sorted(listed.keys() - known)
    print(*(f"no mutant is called {key}" for key in found), sep="\n")
    return 1 if found else 0


def the_picked(path: Path) -> tuple[list[Mutant], Coverage]:
    """The hand-picked mutants, and the tests that are to notice them: lines of ``KEY | TEST``."""
    lines = path.read_text().splitlines()
    wanted = dict(line.split(" | ") for line in lines if " | " in line)
    files = sorted({key.split("::")[0] for key in wanted})
    found = all_mutants(files, wanted)
    missing = wanted.keys() - {mutant.key for mutant in found}
    if missing:
        sys.exit(f"{path.name} names what is not in the source: {', '.join(sorted(missing))}")
    coverage = Coverage()
    for mutant in found:
        test = wanted[mutant.key]
        coverage.seconds[test] = 1.0
        runs = coverage.lines.setdefault(mutant.file, {})
        for line in mutant.lines:
            runs.setdefault(line, []).append(test)
    return found, coverage


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("files", nargs="*", default=FILES, help="files of the package")
    parser.add_argument("--only", default="", help="a regular expression for keys")
    parser.add_argument("--again", type=Path, help="an earlier run's output: what survived there")
    parser.add_argument(
        "--picked", nargs="?", const=PICKED, type=Path, help="hand-picked ones only"
    )
    parser.add_argument("--stale", action="store_true", help="look for reasons without a mutant")
    parser.add_argument("--jobs", type=int, default=2, help="how many at a time")
    parser.add_argument(
        "--budget", type=float, default=12.0, help="seconds of tests for each mutant"
    )
    parser.add_argument("--map", type=Path, help="where what runs which line is kept between runs")
    parser.add_argument("--tests", nargs="+", default=[], help="test files; all that say something")
    parser.add_argument("--list", action="store_true", help="print the keys and stop")
    parser.add_argument("--verbose", action="store_true", help="print what was killed, too")
    options = parser.parse_args()
    os.chdir(ROOT)
    if options.stale:
        return stale()
    if options.picked:
        mutants, coverage = the_picked(options.picked)
    else:
        mutants = [m for m in all_mutants(options.files) if re.search(options.only, m.key)]
        if options.again:
            text = options.again.read_text()
            mutants = [m for m in mutants if f" {m.key}" in text]
        if options.list:
            print(*(mutant.key for mutant in mutants), sep="\n")
            return 0
        coverage = the_map(options.tests, options.map)
    return report(Trial(coverage, options.jobs, options.budget), mutants, options.verbose)


if __name__ == "__main__":
    sys.exit(main())
