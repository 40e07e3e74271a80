#!/usr/bin/env python
"""A stash under load: many threads, many graphs, a million blocks, thousands of steps, awkward sizes.

    scripts/soak_load.py                       # everything
    scripts/soak_load.py threads graphs        # these parts only
    scripts/soak_load.py steps --steps 1000    # fewer steps

threads: eight on one stash, their own and shared graphs, in every mix of tiers, each gradient against plain
PyTorch's to the bit, budgets watched meanwhile; then a stash that is closed while they work.
graphs: a hundred alive at once, differentiated and dropped in random order.
blocks: up to a million alive, on disk, in place and in host memory; time and memory for each.
steps: shapes change in each; memory, descriptors, threads, the file and the host pool must not grow. That
the criterion finds a leak is shown with leaks that are put there.
extents: how far the file grows beyond what is alive, for sizes that try to fragment it.

A watchdog prints every thread's stack and ends the program where a part takes longer than it may.
"""

from __future__ import annotations

import argparse
import faulthandler
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))

from under_load.blocks import MODES, Alive, many_blocks
from under_load.extents import PATTERNS, SHARE, spread
from under_load.graphs import many_graphs
from under_load.mixes import MIXES
from under_load.steps import LEAKS, TIERS, Moment, changing_steps, growth
from under_load.threads import closed_meanwhile, many_threads

_PATIENCE_SECONDS = 3600
Lines = Iterator[tuple[str, bool]]
"""What to print, and whether it is as it should be."""


def threads(directory: str, args: argparse.Namespace) -> Lines:
    """Eight threads on one stash."""
    for mix in MIXES:
        for seed in range(args.seeds):
            wrong = many_threads(mix, directory, rounds=7, seed=100 * seed)
            wrong += closed_meanwhile(mix, directory, seed=seed)
            yield from _verdict(f"threads {mix}, seed {seed}", wrong)


def graphs(directory: str, args: argparse.Namespace) -> Lines:
    """A hundred graphs alive at once."""
    for mix in MIXES:
        yield from _verdict(f"graphs {mix}", many_graphs(mix, directory, rounds=3, seed=0))


def blocks(directory: str, args: argparse.Namespace) -> Lines:
    """Up to a million blocks alive at once."""
    plain: dict[int, float] = {}
    for mode in MODES:
        most = args.blocks if mode != "host" else min(args.blocks, 100_000)  # of a page each
        counts = [count for count in (1000, 10_000, 100_000, 1_000_000) if count <= most]
        for each in many_blocks(mode, directory, counts=counts):
            if isinstance(each, Alive):
                yield _alive_line(mode, each, plain), True
            else:
                yield f"blocks {mode}: {each}", False


def _alive_line(mode: str, each: Alive, plain: dict[int, float]) -> str:
    nbytes = each.anonymous_bytes / each.blocks
    own = nbytes - plain.setdefault(each.blocks, nbytes)
    return (
        f"blocks {mode:9} {each.blocks:8} alive: an operation and its save {each.pack_seconds * 1e6:.1f} us, "
        f"a use {each.unpack_seconds * 1e6:.1f} us; {nbytes:.0f} bytes each, {own:.0f} more than plain"
    )


def steps(directory: str, args: argparse.Namespace) -> Lines:
    """Steps with changing shapes; then fewer, with leaks that are to be found."""
    for tiers in TIERS:
        looks: list[Moment] = []
        for look in changing_steps(tiers, directory, steps=args.steps, seed=0):
            looks.append(look)
            yield _moment_line(tiers, look), not look.wrong
        yield from _verdict(f"steps {tiers}", growth([look.held for look in looks]))
    for leak in LEAKS:
        few = changing_steps("keep, disk", directory, steps=120, seed=0, leak=leak)
        found = growth([look.held for look in few])
        yield f"steps with a leak of {leak}: {'; '.join(found) or 'not found'}", bool(found)


def _moment_line(tiers: str, look: Moment) -> str:
    held, mib = look.held, 1 << 20
    share = f"{look.end_bytes / look.alive_bytes:.2f}" if look.alive_bytes else "-"
    return (
        f"steps {tiers:10} {look.step:6}: {held.anonymous_bytes / mib:.1f} MiB anonymous, "
        f"{held.descriptors} descriptors, {held.threads} threads, {held.objects} objects, {held.bookkeeping} "
        f"of the stash's, host {held.host_bytes / mib:.0f} MiB, file {held.file_bytes / mib:.0f} MiB (blocks "
        f"{held.file_block_bytes / mib:.0f}), its last extent ended at {share} of the most alive, "
        f"{look.alive_bytes / mib:.1f} MiB {look.wrong}"
    ).rstrip()


def extents(directory: str, args: argparse.Namespace) -> Lines:
    """The file against what is alive in it."""
    for name, pattern in PATTERNS.items():
        found = spread(pattern, steps=args.steps)
        text = f"extents {name:20} alive {found.peak_bytes >> 20:4} MiB, file {found.end_bytes >> 20:4} MiB"
        bounded = found.ratio <= SHARE or name == "Robson's"
        yield f"{text}: {found.ratio:.2f}{'' if bounded else f', more than {SHARE}'}", bounded


PARTS: dict[str, Callable[[str, argparse.Namespace], Lines]] = {
    part.__name__: part for part in (threads, graphs, blocks, steps, extents)
}


def _verdict(what: str, wrong: list[str]) -> Lines:
    yield (
        (f"{what}: as it should be", True) if not wrong else (f"{what}: {'; '.join(wrong)}", False)
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)} (default all)"
    )
    parser.add_argument("--seeds", type=int, default=3, help="of the threads' programs (default 3)")
    parser.add_argument(
        "--blocks", type=int, default=1_000_000, help="most alive (default 1000000)"
    )
    parser.add_argument(
        "--steps", type=int, default=10_000, help="with changing shapes (default 10000)"
    )
    args = parser.parse_args(argv)
    if unknown := set(args.parts) - PARTS.keys():
        parser.error(
            f"no part is named {', '.join(sorted(unknown))}; there are: {', '.join(PARTS)}"
        )
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)  # the same sums on every thread
    faulthandler.enable()
    good = bad = 0
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as directory:
        for part in args.parts or PARTS:
            faulthandler.dump_traceback_later(_PATIENCE_SECONDS, exit=True)
            for text, as_it_should_be in PARTS[part](directory, args):
                good, bad = good + as_it_should_be, bad + (not as_it_should_be)
                print(text, flush=True)
    faulthandler.cancel_dump_traceback_later()
    print(f"{good} as they should be, {bad} not, in {time.perf_counter() - started:.0f} s")
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
