"""Which block backward wants next: a guess that costs time when it is wrong, and nothing else.

The blocks saved between two backwards form a *forward pass*. The first time, the guess is the reverse of the
saves, which is how autograd's engine mostly goes. Each pass also records the order in which its blocks were
really used, its *access history*; the next pass with as many blocks is expected to go the same way.

A pass may have a million blocks, so all that is kept of each is a few integers without an object.
"""

from __future__ import annotations

import weakref
from array import array
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

__all__ = ["AccessPredictor", "ForwardPass", "Numbered"]

_REMEMBERED_PASSES = 8
_REMEMBERED_BLOCKS = 1 << 20  # of all remembered passes; the last one is remembered however large
_STEPS_LOOKED_AHEAD = 64
_LEAST_BLOCKS = 1024  # in a pass, below which dead ones are not looked for


class Numbered(Protocol):
    """A block, as far as its place in a pass goes."""

    forward_pass: Any
    index: int
    cleanup: Any


_B = TypeVar("_B", bound=Numbered)


@dataclass(frozen=True, slots=True)
class AccessHistory:
    """The order in which the blocks of one pass were used."""

    order: array[int]
    """Indices, in order of first use."""
    place: array[int]
    """Where in ``order`` each index is, or -1."""


class ForwardPass(Generic[_B]):
    """The blocks of one forward, and the order in which they were first used."""

    __slots__ = ("__weakref__", "blocks", "learned", "previous", "seen", "sweep_at", "used")

    def __init__(self, previous: ForwardPass[_B] | None) -> None:
        self.blocks: list[weakref.ref[_B]] = []
        self.previous = weakref.ref(previous) if previous is not None else None
        self.sweep_at = _LEAST_BLOCKS
        self.used = array("q")  # indices, in order of first use
        # Which those are; empty until backward has begun on it, and then no block is added any more.
        self.seen = bytearray()
        self.learned: AccessHistory | None = None

    def forget_dead(self) -> None:
        """Number the living anew: without a backward a pass never ends, whatever dies meanwhile."""
        # Set aside first: a finalizer that the collector runs meanwhile may add.
        blocks, self.blocks = self.blocks, []
        alive = [block for ref in blocks if (block := ref()) is not None]
        for index, block in enumerate(alive):
            block.index = index
        self.blocks = [*map(weakref.ref, alive), *self.blocks]
        self.sweep_at = max(_LEAST_BLOCKS, 2 * len(alive))

    def history(self) -> AccessHistory:
        """The order so far."""
        place = array("q", [-1]) * len(self.blocks)
        for at, index in enumerate(self.used):
            place[index] = at
        return AccessHistory(self.used[:], place)

    def successors(self, index: int) -> list[weakref.ref[_B]]:
        """Blocks expected after the one at ``index``, nearest first; some may be dead."""
        blocks, learned = self.blocks, self.learned
        start = (
            learned.place[index] + 1 if learned is not None and index < len(learned.place) else 0
        )
        if learned is not None and start:
            indices = learned.order[start : start + _STEPS_LOOKED_AHEAD]
            expected = [*map(blocks.__getitem__, indices)]
        else:
            expected = blocks[max(0, index - _STEPS_LOOKED_AHEAD) : index][::-1]
        earlier = self.previous() if self.previous is not None else None
        if earlier is not None:
            expected += earlier.blocks[-_STEPS_LOOKED_AHEAD:][::-1]
        return expected


class AccessPredictor(Generic[_B]):
    """Numbers the blocks and learns. The caller holds the stash's lock."""

    def __init__(self) -> None:
        self._current: ForwardPass[_B] = ForwardPass(None)
        self._blocks = 0  # so far
        self.passes = 0
        """How many have begun."""
        self._is_begun = False  # the current one, before its first block
        self._learned: OrderedDict[int, AccessHistory] = OrderedDict()

    def add(self, block: _B) -> None:
        """A new block; the first one after a backward begins a new pass."""
        if self._current.seen:
            self._conclude(self._current)
            self._current = ForwardPass(self._current)
        current = self._current
        blocks = current.blocks
        if not blocks:
            if not self._is_begun:
                self.passes += 1
            self._is_begun = False
        block.cleanup.serial = self._blocks
        self._blocks += 1
        if len(blocks) >= current.sweep_at:
            current.forget_dead()
            blocks = current.blocks
        block.forward_pass = current
        block.index = len(blocks)
        blocks.append(weakref.ref(block))

    @property
    def is_used(self) -> bool:
        """Whether backward has used a block of the current pass: the next block begins another."""
        return bool(self._current.seen)

    @property
    def next_pass(self) -> int:
        """The number of the pass that the next block is of."""
        current = self._current
        is_on = (current.blocks or self._is_begun) and not current.seen
        return self.passes if is_on else self.passes + 1

    @property
    def blocks(self) -> int:
        """How many there were, so far: the number of the next one."""
        return self._blocks

    def begin(self) -> None:
        """Begin a new pass now, where the next block would."""
        if self._current.seen:
            self._conclude(self._current)
            self._current = ForwardPass(self._current)
        if not self._current.blocks and not self._is_begun:
            self.passes += 1
            self._is_begun = True

    def forget(self) -> None:
        """No block is alive any more."""
        if self._current.seen:
            self._conclude(self._current)
        if self._current.blocks:
            self._current = ForwardPass(None)

    def use(self, block: _B) -> None:
        """Backward wants ``block``."""
        its_pass, index = block.forward_pass, block.index
        seen, blocks = its_pass.seen, its_pass.blocks
        if not seen:
            its_pass.learned = self._learned.get(len(blocks))
        if len(seen) < len(blocks):
            seen.extend(bytes(len(blocks) - len(seen)))
        # An interrupt in forget_dead may have lost the list that the index was of: then nothing is learned.
        if index < len(seen) and not seen[index]:
            seen[index] = True
            its_pass.used.append(index)

    def _conclude(self, finished: ForwardPass[_B]) -> None:
        learned = self._learned
        learned[len(finished.blocks)] = finished.history()
        learned.move_to_end(len(finished.blocks))
        while len(learned) > 1 and (
            len(learned) > _REMEMBERED_PASSES or sum(learned) > _REMEMBERED_BLOCKS
        ):
            learned.popitem(last=False)
