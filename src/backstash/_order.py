"""Which block backward wants next: a guess that costs time when it is wrong, and nothing else.

The blocks saved between two backwards form a *round*. The first time, the guess is the reverse of the
saves, which is how autograd's engine mostly goes. Each round also records the order in which its blocks
were really used; the next round with as many blocks is expected to go the same way.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Iterator

from ._blocks import Block

__all__ = ["Order", "Round"]

_REMEMBERED_ROUNDS = 8
_STEPS_LOOKED_AHEAD = 64


class Round:
    """The blocks of one forward, and the order in which they were first used."""

    __slots__ = ("__weakref__", "blocks", "previous", "taught", "used", "wanted")

    def __init__(self, previous: Round | None) -> None:
        self.blocks: list[weakref.ref[Block]] = []
        self.previous = weakref.ref(previous) if previous is not None else None
        self.used: dict[int, None] = {}  # indices, in order of first use
        self.wanted = False  # whether backward has begun on it
        self.taught: tuple[list[int], dict[int, int]] | None = None

    def successors(self, index: int) -> Iterator[Block]:
        """Blocks expected after the one at ``index``, nearest first; dead ones are passed over."""
        yield from self._alive(self._indices_after(index))
        earlier = self.previous() if self.previous is not None else None
        if earlier is not None:
            yield from self._alive_of(earlier)

    def _indices_after(self, index: int) -> Iterator[int]:
        if self.taught is not None:
            order, place = self.taught
            if index in place:
                start = place[index] + 1
                return iter(order[start : start + _STEPS_LOOKED_AHEAD])
        return iter(range(index - 1, max(-1, index - 1 - _STEPS_LOOKED_AHEAD), -1))

    def _alive(self, indices: Iterator[int]) -> Iterator[Block]:
        for index in indices:
            block = self.blocks[index]()
            if block is not None:
                yield block

    @staticmethod
    def _alive_of(other: Round) -> Iterator[Block]:
        count = len(other.blocks)
        return other._alive(iter(range(count - 1, max(-1, count - 1 - _STEPS_LOOKED_AHEAD), -1)))


class Order:
    """Numbers the blocks and learns. The caller holds the stash's lock."""

    def __init__(self) -> None:
        self._current = Round(None)
        self._blocks = 0  # so far
        self._taught: OrderedDict[int, tuple[list[int], dict[int, int]]] = OrderedDict()

    def add(self, block: Block) -> None:
        """A new block; the first one after a backward begins a new round."""
        if self._current.wanted:
            self._conclude(self._current)
            self._current = Round(self._current)
        block.serial = self._blocks
        self._blocks += 1
        block.round = self._current
        block.index = len(self._current.blocks)
        self._current.blocks.append(weakref.ref(block))

    def use(self, block: Block) -> None:
        """Backward wants ``block``."""
        in_round = block.round
        if not in_round.wanted:
            in_round.wanted = True
            in_round.taught = self._taught.get(len(in_round.blocks))
        in_round.used.setdefault(block.index)

    def _conclude(self, finished: Round) -> None:
        order = list(finished.used)
        self._taught[len(finished.blocks)] = order, {index: at for at, index in enumerate(order)}
        self._taught.move_to_end(len(finished.blocks))
        while len(self._taught) > _REMEMBERED_ROUNDS:
            self._taught.popitem(last=False)
