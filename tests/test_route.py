"""Count the calls of the package's functions on one block's way down and up.

``python tests/test_route.py`` prints both routes, and how many of Python's instructions they take: unlike
seconds the same on every machine, and so to be compared on a shared one. The numbers of calls stand in
docs/explanation/one-tensors-way.md.
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch

import backstash
from backstash import Stash

PACKAGE = Path(backstash.__file__).parent
BLOCKS = 16
ELEMENTS = 1 << 18  # 1 MiB: a block that is written by itself
MOST_DOWN, MOST_UP = 60, 45


def route_of(call: Callable[[], Any]) -> tuple[Any, list[str]]:
    """What ``call`` returns, and each call of a Python function on its way, as ``file:line function``."""
    route: list[str] = []

    def profile(frame: Any, event: str, argument: Any) -> None:
        if event == "call":
            code = frame.f_code
            path = Path(code.co_filename)
            inside = path.is_relative_to(PACKAGE)
            where = path.relative_to(PACKAGE).as_posix() if inside else path.name
            name = getattr(code, "co_qualname", code.co_name)
            route.append(f"{where}:{code.co_firstlineno} {name}")

    sys.setprofile(profile)
    try:
        value = call()
    finally:
        sys.setprofile(None)
    return value, [each for each in route if "route_of" not in each and "<lambda>" not in each]


def instructions_of(call: Callable[[], Any]) -> tuple[Any, int]:
    """What ``call`` returns, and how many instructions of Python run on its way."""
    count = 0

    def trace(frame: Any, event: str, argument: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode" and Path(frame.f_code.co_filename).is_relative_to(PACKAGE)
        return trace

    sys.settrace(trace)
    try:
        value = call()
    finally:
        sys.settrace(None)
    return value, count


def instructions(directory: str, **budgets: Any) -> tuple[float, float]:
    """The medians for blocks of a second step, down and up, by a stash with ``budgets``."""
    stash = Stash(disk=directory, **budgets)
    pack = stash._admission.hook(stash._session.thread_state())
    x = torch.ones(ELEMENTS, requires_grad=True)
    for _ in range(2):
        saved, downs, ups = [], [], []
        for _ in range(BLOCKS):
            value = x.exp()
            packed, count = instructions_of(lambda value=value: pack(value))
            saved.append(packed)
            downs.append(count)
            for write in stash._session.device_tiers[0].evictor.inflight.writes:
                write.transfer.exception()  # so that the next one completes it
        del value
        for packed in reversed(saved):
            ups.append(instructions_of(lambda packed=packed: stash.unpack(packed))[1])
        del packed
    stash.close()
    return median(downs), median(ups)


def routes(directory: str) -> tuple[list[list[str]], list[list[str]]]:
    """The ways down and up of some blocks to disk, one after the other, as hooks give them to a stash.

    Those of a second step: in the first, of which nothing is expected, each block's bytes are looked at.
    """
    stash = Stash(disk=directory)
    pack = stash._admission.hook(stash._session.thread_state())
    x = torch.ones(ELEMENTS, requires_grad=True)
    kept = []  # so that no slot is free, and none is looked for
    for step in range(2):
        saved, downs, ups = [], [], []
        kept.append(saved)
        for _ in range(BLOCKS):
            value = (x * 2).exp()
            packed, route = route_of(lambda value=value: pack(value))
            saved.append((packed, value.detach().clone()))
            downs.append(route)
            for work in [
                write.transfer for write in stash._session.device_tiers[0].evictor.inflight.writes
            ]:
                work.exception()  # so that the next one completes it
        del value
        for packed, expected in reversed(saved):
            view, route = route_of(lambda packed=packed: stash.unpack(packed))
            assert torch.equal(view, expected)
            ups.append(route)
            tiers = stash._session.device_tiers[0]
            for each, _ in saved:  # what was begun ahead of need comes in time
                load = each.block.placement.backing and each.block.placement.backing.load
                if load:
                    load.exception()
            assert tiers.prefetcher.misses == step + 1
        del view
    del saved, packed
    kept.clear()
    stash.close()
    return downs, ups


def test_a_block_that_stays_takes_fewer_instructions_than_one_that_goes(tmp_path):
    stays, goes = instructions(str(tmp_path), keep=None), instructions(str(tmp_path))
    assert 0 < stays[0] < goes[0] and 0 < stays[1] < goes[1]


def test_one_block_s_way_is_short(tmp_path):
    downs, ups = routes(str(tmp_path))
    shown = "\n".join(["down:", *downs[-1], "up:", *ups[-1]])
    print(shown)
    # A thread's first block starts workers, and the first one up begins the loads of all the others.
    assert median(map(len, downs)) <= MOST_DOWN, shown
    assert sum(map(len, ups)) / len(ups) <= MOST_UP, shown


def without_lines(route: list[str]) -> list[str]:
    """The route through the package's own files, without line numbers."""
    found = [each.partition(":")[0] + " " + each.rpartition(" ")[2] for each in route]
    return [each for each in found if (PACKAGE / each.partition(" ")[0]).exists()]


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="other Pythons count calls otherwise")
def test_the_docs_have_the_number_of_calls(tmp_path):
    text = (PACKAGE.parents[1] / "docs/explanation/one-tensors-way.md").read_text(encoding="utf-8")
    counts = re.findall(r"takes (\d+) calls (down|up)", text)
    most = re.search(r"more than (\d+) calls down or (\d+) up", text)
    assert most and (int(most[1]), int(most[2])) == (MOST_DOWN, MOST_UP)
    downs, ups = (list(map(without_lines, each)) for each in routes(str(tmp_path)))
    found = [(str(len(downs[-1])), "down"), (str(len(ups[-2])), "up")]
    assert counts == found, "\n".join(["down:", *downs[-1], "up:", *ups[-2]])


def test_the_ways_pass_their_named_stops_in_order(tmp_path):
    downs, ups = routes(str(tmp_path))
    down = (
        "_pack_untaped",
        "_identify",
        "ResidentSet.admit",
        "_send",
        "DiskTier.begin",
        "Disk.reserve",
    )
    for route, stops in (
        (downs[-1], down),
        (ups[-1], ("WayBack.tensor_of", "Prefetcher.load", "Entry.view_of")),
    ):
        places = [
            next(at for at, each in enumerate(route) if each.endswith(stop)) for stop in stops
        ]
        assert places == sorted(places)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as at:
        for name, found in zip(("down", "up"), routes(at), strict=True):
            print(f"{name}: {[len(route) for route in found]} calls")
            print(*(f"    {each}" for each in found[-1]), sep="\n")
        for name, budgets in (("stays", {"keep": None}), ("goes", {})):
            print(f"a block that {name}:", *instructions(at, **budgets), "instructions down and up")
