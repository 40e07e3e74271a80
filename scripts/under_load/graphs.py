"""A hundred graphs alive at once, differentiated and dropped in random order, some of them again and again."""

from __future__ import annotations

import gc
import random

from torch import Tensor

from backstash import Stash
from oracle import same_bits

from .mixes import MIXES
from .programs import forward, gradients, leaves

__all__ = ["many_graphs"]


def many_graphs(
    mix: str, directory: str, *, rounds: int, seed: int, graphs: int = 100
) -> list[str]:
    """What is wrong after ``graphs`` graphs were alive at once, ``rounds`` times.

    Each graph shares its leaves, and some of its trunk, with others. In random order each is dropped,
    differentiated, or differentiated several times with ``retain_graph``, and new ones come meanwhile.
    """
    order = random.Random(seed)
    made = MIXES[mix]
    stash = made.make(directory)
    want: dict[int, list[Tensor]] = {}
    found: list[str] = []
    most = 0
    for number in range(rounds):
        alive = [_graph(stash, each % 25) for each in range(graphs)]
        most = max(most, stash.stats().blocks)
        while alive:
            kind, inputs, loss = alive.pop(order.randrange(len(alive)))
            if kind not in want:
                want[kind] = _plain(kind)
            for use in range(order.choice((0, 1, 1, 3))):
                got = gradients(loss, inputs, retain=use < 2)
                if not all(map(same_bits, got, want[kind])):
                    found.append(f"round {number}, graph {kind}, use {use}: differs")
            if order.random() < 0.2:
                late = _graph(stash, order.randrange(25))
                if not all(
                    map(
                        same_bits,
                        gradients(*reversed(late[1:])),
                        want.setdefault(late[0], _plain(late[0])),
                    )
                ):
                    found.append(f"round {number}, graph {late[0]} that came late: differs")
                del late
            del loss
    del inputs
    gc.collect()
    stash.close()
    stats = stash.stats()
    if stats.blocks or stats.keep_bytes or stats.inflight_bytes or stats.ahead_bytes:
        found.append(f"left behind: {stats}")
    if most < graphs:
        found.append(f"only {most} blocks were alive at once")
    found.append(made.broken_by(stats, running_bytes=0))
    return [f"{mix}: {text}" for text in found if text]


def _graph(stash: Stash, kind: int) -> tuple[int, tuple[Tensor, Tensor], Tensor]:
    inputs = leaves(kind)
    with stash:
        return kind, inputs, forward(*inputs, kind)


def _plain(kind: int) -> list[Tensor]:
    inputs = leaves(kind)
    return gradients(forward(*inputs, kind), inputs)
