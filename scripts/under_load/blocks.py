"""A million blocks alive at once: what a pack and an unpack take then, and what counting each of them takes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from backstash import Stash
from backstash.testing import TwinDevice, stash_on
from bench._small_worker import seconds_of_unpacks

from .footprint import footprint
from .resident import anonymous_bytes

__all__ = ["MODES", "Alive", "many_blocks"]

_ELEMENTS = 16  # of each tensor: 64 bytes

MODES: dict[str, Callable[[str], AbstractContextManager[Any]]] = {
    "plain": lambda where: nullcontext(),
    "in place": lambda where: Stash(keep=None, disk=where, min_bytes=1),
    "disk": lambda where: Stash(disk=where, min_bytes=1),
    "host": lambda where: stash_on(TwinDevice(chance=1.0), host="8GiB", min_bytes=1),
}


@dataclass(frozen=True, slots=True)
class Alive:
    """One moment on the way to the full number."""

    blocks: int
    """How many are alive."""
    pack_seconds: float
    """Of each operation since the moment before, its save included."""
    unpack_seconds: float
    """Of a use of one of them, over a sample."""
    anonymous_bytes: int
    """Resident, more than before the first; the tensors' own included where they are in place."""


def many_blocks(mode: str, directory: str, *, counts: list[int]) -> Iterator[Alive | str]:
    """Moments with so many blocks alive, then what was found wrong, in words.

    One node for each, all from one leaf: torch overflows its stack when it frees a chain of 100,000 nodes that
    Python has walked, with hooks or without.
    """
    leaf = torch.zeros(_ELEMENTS, requires_grad=True)
    hold = MODES[mode](directory)
    with hold:
        warm = [leaf.exp() for _ in range(2000)]
    torch.autograd.backward(warm, [torch.ones_like(y) for y in warm])
    del warm
    bookkeeping = _bookkeeping(hold)
    start = anonymous_bytes()
    saved: list[Tensor] = []
    for count in counts:
        began, before = time.perf_counter(), len(saved)
        with hold:
            saved.extend(leaf.exp() for _ in range(count - before))
        packed = (time.perf_counter() - began) / (count - before)
        yield Alive(count, packed, seconds_of_unpacks(saved), anonymous_bytes() - start)
    most = anonymous_bytes() - start
    if isinstance(hold, Stash) and hold.stats().blocks != len(saved):
        yield f"{hold.stats().blocks} blocks are alive, not {len(saved)}"
    leaf.grad = None
    torch.autograd.backward(saved[:: max(1, len(saved) // 10_000)], _ones(saved))
    saved.clear()
    if isinstance(hold, Stash):
        with hold:  # the next save clears away what only waits for it
            leaf.exp().sum().backward()
        yield from _left_behind(hold, bookkeeping)
        hold.close()  # which unpins slabs
    rest = anonymous_bytes() - start
    if rest > 0.1 * most + (16 << 20):
        yield f"{rest >> 20} MiB of {most >> 20} MiB did not come back"


def _ones(saved: list[Tensor]) -> list[Tensor]:
    return [torch.ones(_ELEMENTS)] * len(saved[:: max(1, len(saved) // 10_000)])


def _bookkeeping(hold: Any) -> int:
    if not isinstance(hold, Stash):
        return 0
    hold.stats()
    return footprint(hold)[0]


def _left_behind(stash: Stash, bookkeeping: int) -> Iterator[str]:
    stats = stash.stats()
    if (
        stats.blocks
        or stats.keep_bytes
        or stats.inflight_bytes
        or stats.disk_bytes
        or stats.host_bytes
    ):
        yield f"left behind: {stats}"
    more = _bookkeeping(stash) - bookkeeping
    if more > 5_000:
        yield f"the stash still reaches {more} objects more than before"
