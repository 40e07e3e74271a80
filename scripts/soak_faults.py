#!/usr/bin/env python3
"""Faults in their long form: interrupts and nested calls at every point, signals, kills, bad disks.

    scripts/soak_faults.py                              all of it
    scripts/soak_faults.py --only kills --kills 100     one part
    scripts/soak_faults.py --every 7 --seconds 20       a shorter form of the parts that can be long

``interrupts`` raises ``KeyboardInterrupt`` at every ``--every``-th place inside the package where Python
could deliver one, during a forward and a backward; ``signals`` presses Ctrl-C at random moments from another
thread, for ``--seconds`` in each mix of tiers; ``nested`` makes a call of the same stash, as a signal's
handler does, at the first time that a step reaches each line of the package, lines inside critical sections
too: a step, ``stats()`` and ``close()``, at each ``--every``-th of them; ``kills`` kills training processes,
two to a directory, at random moments; ``transfers`` takes steps on a disk whose calls fail, stop short or are
interrupted; ``flips`` changes one byte on disk at a time. After each fault the gradients that are given must
be plain PyTorch's to the bit, and nothing may be left: hooks, files, budgets, shared memory. Each trial has a
watchdog.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import os
import random
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "faults"))

from backstash import Disk, Stash
from backstash.errors import StashCorruptError, StashIOError
from faulty import INPUTS, MIXES, are_right, forward, gradients, run_python, wrong_after
from interrupts import step_interrupted_at
from killed import kill_at_random
from nesting import step_with_a_call_at
from signals import PRESSES
from transfers import Faults

PATIENCE_SECONDS = 120
Trial = tuple[str, str, str]  # what was tried, how it went in a word, what is wrong


def interrupts(options: argparse.Namespace, where: Path) -> Iterator[Trial]:
    """A ``KeyboardInterrupt`` at each point of a step, one at a time."""
    for mix in MIXES:
        step_interrupted_at(-1, MIXES[mix](where))  # see Interrupter
        at, last = 1, None
        while last is None or at <= last:
            stash = MIXES[mix](where)
            interrupter, found = step_interrupted_at(at, stash)
            found += wrong_after(stash)
            if not interrupter.where:
                last = interrupter.count
                continue
            yield f"{mix}, point {at}, {interrupter.where}", "as good as new", "; ".join(found)
            at += options.every


def signals(options: argparse.Namespace, where: Path) -> Iterator[Trial]:
    """Ctrl-C from outside, whenever it likes, in a process of its own."""
    for mix in MIXES:
        seconds = options.seconds
        result = run_python(PRESSES, mix, where, options.seed, seconds, seconds=seconds + 100)
        wrong = (
            "" if result.returncode == 0 and not result.stderr else result.stdout + result.stderr
        )
        caught = result.stdout.split()[0] if result.stdout else "no"
        yield f"{mix}, {seconds} s, {caught} interrupts", "as good as new", wrong


def nested(options: argparse.Namespace, where: Path) -> Iterator[Trial]:
    """A call of the stash in the middle of another, at each line, one at a time."""
    for mix in MIXES:
        lines: list[int] = []
        for _ in range(2):  # the first time, more is imported and made
            caller, _ = step_with_a_call_at(-1, MIXES[mix](where), "stats")
            lines = sorted(count for counts in caller.first.values() for count in counts)
        for call in ("a step", "stats", "close"):
            for at in lines[:: options.every]:
                stash = MIXES[mix](where)
                caller, found = step_with_a_call_at(at, stash, call)
                if call != "close" or not caller.where:
                    found += wrong_after(stash)
                stash.close()
                how = "both right" if caller.where else "not reached"
                yield f"{mix}, {call} at line {at}, {caller.where}", how, "; ".join(found)


def kills(options: argparse.Namespace, where: Path) -> Iterator[Trial]:
    """``kill -9`` at random moments; then a stash in the same directory begins."""
    rng = random.Random(options.seed)
    for number in range(-(-options.kills // 2)):
        mixes = [rng.choice(list(MIXES)) for _ in range(2)]
        found = kill_at_random(rng, where, mixes)
        stash = MIXES[mixes[0]](where)
        gradients(stash)
        found += wrong_after(stash)
        yield (
            f"kills {2 * number + 1} and {2 * number + 2}, {mixes}",
            "nothing left",
            "; ".join(found),
        )


class _Patch:
    """What ``Faults.put_under`` needs of pytest's monkeypatch."""

    def __init__(self) -> None:
        self._stack: list[Any] = []

    def setattr(self, target: object, name: str, value: object) -> None:
        patch = mock.patch.object(target, name, value)
        patch.start()
        self._stack.append(patch)

    def undo(self) -> None:
        while self._stack:
            self._stack.pop().stop()


def transfers(options: argparse.Namespace, where: Path) -> Iterator[Trial]:
    """A step on a bad disk: the right gradients, or a ``StashIOError`` of the injected fault."""
    for seed in range(options.programs):
        rng = random.Random(seed)
        mix, fails = rng.choice(list(MIXES)), rng.choice((0.0, 0.1, 0.5))
        stash = MIXES[mix](where)
        patch = _Patch()
        Faults(rng, fails=fails, short=0.3, interrupted=0.3).put_under(patch)
        try:
            how, wrong = "equal", "" if are_right(gradients(stash)) else "a wrong gradient"
        except StashIOError as error:
            how, wrong = "told", "" if "Input/output error" in str(error) and fails else str(error)
        finally:
            patch.undo()
        # After an error autograd holds the nodes it did not run, until this thread's next backward.
        torch.ones((), requires_grad=True).backward()
        gc.collect()
        stash.close()
        left = stash.stats()
        if left.blocks or left.disk_bytes or left.keep_bytes or left.inflight_bytes:
            wrong += f" left: {left}"
        yield f"step {seed}, {mix}, fails={fails}", how, wrong


def flips(options: argparse.Namespace, where: Path) -> Iterator[Trial]:
    """A byte that changes on disk is detected by ``verify=True``, or changes nothing."""
    rng = random.Random(options.seed)
    stash = Stash(disk=Disk(where, verify=True), min_bytes=64, inflight=0)
    with stash:
        loss = forward()
    disk: Any = stash._store
    for number in range(options.flips):
        at = rng.randrange(disk._file.leases.extents.end_bytes)
        _flip(disk, at)
        wrong, how = "", "harmless"
        try:
            if not are_right(torch.autograd.grad(loss, INPUTS, retain_graph=True)):
                wrong = "a wrong gradient"
        except StashCorruptError:
            how = "told"
        _flip(disk, at)
        yield f"flip {number} at {at}", how, wrong
    del loss
    yield "afterwards", "as good as new", "; ".join(wrong_after(stash))


def _flip(disk: Any, at: int) -> None:
    file = os.open(f"/proc/self/fd/{disk._file.fd}", os.O_RDWR)
    try:
        os.pwrite(file, bytes([os.pread(file, 1, at)[0] ^ 0x10]), at)
    finally:
        os.close(file)


PARTS = {part.__name__: part for part in (interrupts, nested, signals, kills, transfers, flips)}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default=",".join(PARTS), help="comma-separated; default all")
    parser.add_argument("--every", type=int, default=1, help="interrupts, nested: each n-th point")
    parser.add_argument("--seconds", type=int, default=60, help="signals: in each mix")
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--programs", type=int, default=1000, help="transfers: steps")
    parser.add_argument("--flips", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--verbose", action="store_true", help="each trial, not only what is wrong")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    wrong = 0
    for name in options.only.split(","):
        started, counts = time.perf_counter(), Counter[str]()
        with tempfile.TemporaryDirectory() as directory:
            faulthandler.dump_traceback_later(PATIENCE_SECONDS, exit=True)
            for what, how, found in PARTS[name](options, Path(directory)):
                counts["wrong" if found else how] += 1
                if found or options.verbose:
                    print(f"{name}: {what}: {found or how}", flush=True)
                patience = PATIENCE_SECONDS + options.seconds
                faulthandler.dump_traceback_later(patience, exit=True)
                gc.collect()
            faulthandler.cancel_dump_traceback_later()
        wrong += counts["wrong"]
        print(f"{name:10} {dict(counts)} in {time.perf_counter() - started:.0f} s", flush=True)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
