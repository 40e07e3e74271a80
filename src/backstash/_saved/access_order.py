"""Which block backward wants next: a guess that costs time when it is wrong, and nothing else.

The blocks saved between two backwards form a *round*. The first time, the guess is the reverse of the
saves, which is how autograd's engine mostly goes. Each round also records the order in which its blocks
were really used; the next round with as many blocks is expected to go the same way.

A round may have a million blocks, so all that is kept of each is a few integers without an object.
"""

from __future__ import annotations

import weakref
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from .block import Block

__all__ = ["AccessPredictor", "ForwardPass"]

_REMEMBERED_ROUNDS = 8
_REMEMBERED_BLOCKS = 1 << 20  # of all remembered rounds; the last one is remembered however large
_STEPS_LOOKED_AHEAD = 64
_LEAST_BLOCKS = 1024  # in a round, below which dead ones are not looked for


@dataclass(frozen=True, slots=True)
class AccessHistory:
    """The order in which a round's blocks were used."""

    order: array[int]
    """Indices, in order of first use."""
    place: array[int]
    """Where in ``order`` each index is, or -1."""

    def after(self, index: int) -> Iterable[int] | None:
        """What followed ``index``; ``None`` when it was not used."""
        start = self.place[index] + 1 if index < len(self.place) else 0
        return self.order[start : start + _STEPS_LOOKED_AHEAD] if start else None


class ForwardPass:
    """The blocks of one forward, and the order in which they were first used."""

    __slots__ = ("__weakref__", "blocks", "learned", "previous", "seen", "sweep_at", "used")

    def __init__(self, previous: ForwardPass | None) -> None:
        self.blocks: list[weakref.ref[Block]] = []
        self.previous = weakref.ref(previous) if previous is not None else None
        self.sweep_at = _LEAST_BLOCKS
        self.used = array("q")  # indices, in order of first use
        self.seen = bytearray()  # which those are, once backward has begun on it
        self.learned: AccessHistory | None = None

    @property
    def wanted(self) -> bool:
        """Whether backward has begun on it: then no block is added any more."""
        return bool(self.seen)

    def add(self, block: Block) -> None:
        """A new block, the youngest."""
        if len(self.blocks) >= self.sweep_at:
            self._forget_dead()
        block.forward_pass = self
        block.index = len(self.blocks)
        self.blocks.append(weakref.ref(block))

    def _forget_dead(self) -> None:
        """Number the living anew: without a backward a round never ends, whatever dies meanwhile."""
        # Set aside first: a finalizer that the collector runs meanwhile may add.
        blocks, self.blocks = self.blocks, []
        alive = [block for ref in blocks if (block := ref()) is not None]
        for index, block in enumerate(alive):
            block.index = index
        self.blocks = [*map(weakref.ref, alive), *self.blocks]
        self.sweep_at = max(_LEAST_BLOCKS, 2 * len(alive))

    def use(self, index: int) -> None:
        """Backward wants the block at ``index``."""
        self.seen.extend(bytes(len(self.blocks) - len(self.seen)))
        if not self.seen[index]:
            self.seen[index] = True
            self.used.append(index)

    def history(self) -> AccessHistory:
        """The order so far."""
        place = array("q", [-1]) * len(self.blocks)
        for at, index in enumerate(self.used):
            place[index] = at
        return AccessHistory(self.used[:], place)

    def successors(self, index: int) -> Iterator[Block]:
        """Blocks expected after the one at ``index``, nearest first; dead ones are passed over."""
        following = self.learned.after(index) if self.learned is not None else None
        yield from self._alive(_before(index) if following is None else following)
        earlier = self.previous() if self.previous is not None else None
        if earlier is not None:
            yield from earlier._alive(_before(len(earlier.blocks)))

    def _alive(self, indices: Iterable[int]) -> Iterator[Block]:
        for index in indices:
            block = self.blocks[index]()
            if block is not None:
                yield block


def _before(index: int) -> Iterable[int]:
    return range(index - 1, max(-1, index - 1 - _STEPS_LOOKED_AHEAD), -1)


class AccessPredictor:
    """Numbers the blocks and learns. The caller holds the stash's lock."""

    def __init__(self) -> None:
        self._current = ForwardPass(None)
        self._blocks = 0  # so far
        self.passes = 0
        """How many have begun."""
        self._learned: OrderedDict[int, AccessHistory] = OrderedDict()

    def add(self, block: Block) -> None:
        """A new block; the first one after a backward begins a new round."""
        if self._current.wanted:
            self._conclude(self._current)
            self._current = ForwardPass(self._current)
        if not self._current.blocks:
            self.passes += 1
        block.cleanup.serial = self._blocks
        self._blocks += 1
        self._current.add(block)

    def forget(self) -> None:
        """No block is alive any more."""
        if self._current.wanted:
            self._conclude(self._current)
        if self._current.blocks:
            self._current = ForwardPass(None)

    def use(self, block: Block) -> None:
        """Backward wants ``block``."""
        in_pass = block.forward_pass
        if not in_pass.wanted:
            in_pass.learned = self._learned.get(len(in_pass.blocks))
        in_pass.use(block.index)

    def _conclude(self, finished: ForwardPass) -> None:
        learned = self._learned
        learned[len(finished.blocks)] = finished.history()
        learned.move_to_end(len(finished.blocks))
        while len(learned) > 1 and (
            len(learned) > _REMEMBERED_ROUNDS or sum(learned) > _REMEMBERED_BLOCKS
        ):
            learned.popitem(last=False)
