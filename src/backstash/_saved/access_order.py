"""Predict which block backward needs next. A wrong prediction costs time; results do not change.

The blocks that are saved between two backwards form a *forward pass*. The first prediction is the reverse
order of the saves, which autograd's engine mostly follows. Each pass also records the order in which backward
used its blocks, its *access history*. The prediction for the next pass with as many blocks is that order.

A pass may have a million blocks, so the records of a block are a few integers in arrays, without an object.
"""

from __future__ import annotations

import weakref
from array import array
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

__all__ = ["AccessPredictor", "ForwardPass", "Numbered"]

_REMEMBERED_PASSES = 8
_REMEMBERED_BLOCKS = 1 << 20  # of all remembered passes; the last pass is remembered at any size
_STEPS_LOOKED_AHEAD = 64
_LEAST_BLOCKS = 1024  # in a pass; with fewer blocks, dead ones are not removed


class Numbered(Protocol):
    """The attributes of a block that say where it is in a pass."""

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
    """The position of each index in ``order``, or -1."""


class ForwardPass(Generic[_B]):
    """The blocks of one forward, and the order in which they were first used."""

    __slots__ = ("__weakref__", "blocks", "learned", "previous", "seen", "sweep_at", "used")

    def __init__(self, previous: ForwardPass[_B] | None) -> None:
        self.blocks: list[weakref.ref[_B]] = []
        self.previous = weakref.ref(previous) if previous is not None else None
        self.sweep_at = _LEAST_BLOCKS
        self.used = array("q")  # indices, in order of first use
        # Whether each index is in `used`. Empty until backward uses a block; after that no block is added.
        self.seen = bytearray()
        self.learned: AccessHistory | None = None

    def forget_dead(self) -> None:
        """Remove dead blocks and renumber the others, since a pass without a backward never ends."""
        # The list is set aside first: a finalizer that the garbage collector runs now may add a block.
        blocks, self.blocks = self.blocks, []
        alive = [block for ref in blocks if (block := ref()) is not None]
        for index, block in enumerate(alive):
            block.index = index
        self.blocks = [*map(weakref.ref, alive), *self.blocks]
        self.sweep_at = max(_LEAST_BLOCKS, 2 * len(alive))

    def history(self) -> AccessHistory:
        """Return the order so far."""
        place = array("q", [-1]) * len(self.blocks)
        for at, index in enumerate(self.used):
            place[index] = at
        return AccessHistory(self.used[:], place)

    def successors(self, index: int) -> list[weakref.ref[_B]]:
        """Return the blocks expected after the one at ``index``, the next one first. Some may be dead."""
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
    """Number the blocks and learn the order of their use. The caller holds the stash's lock."""

    def __init__(self) -> None:
        self._current: ForwardPass[_B] = ForwardPass(None)
        self._blocks = 0  # so far
        self.passes = 0
        """How many passes have begun."""
        self._is_begun = False  # whether the current pass has begun although it has no block yet
        self._learned: OrderedDict[int, AccessHistory] = OrderedDict()

    def add(self, block: _B) -> None:
        """Add a new block to the current pass. The first block after a backward begins a new pass."""
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
        """Whether backward has used a block of the current pass; then the next block begins another pass."""
        return bool(self._current.seen)

    @property
    def next_pass(self) -> int:
        """The number of the pass that the next block will belong to."""
        current = self._current
        is_on = (current.blocks or self._is_begun) and not current.seen
        return self.passes if is_on else self.passes + 1

    @property
    def blocks(self) -> int:
        """How many blocks were added so far; this is the number of the next block."""
        return self._blocks

    def begin(self) -> None:
        """Begin a new pass now, if the next block would begin one."""
        if self._current.seen:
            self._conclude(self._current)
            self._current = ForwardPass(self._current)
        if not self._current.blocks and not self._is_begun:
            self.passes += 1
            self._is_begun = True

    def forget(self) -> None:
        """Forget the current pass, since no block is alive any more."""
        if self._current.seen:
            self._conclude(self._current)
        if self._current.blocks:
            self._current = ForwardPass(None)

    def use(self, block: _B, *, builds_graph: bool = False) -> None:
        """Record that backward needs ``block``.

        A backward that builds a graph itself (``create_graph``) is a part of the forward that goes on after it.
        """
        its_pass, index = block.forward_pass, block.index
        if builds_graph and its_pass is self._current:
            return
        seen, blocks = its_pass.seen, its_pass.blocks
        if not seen:
            its_pass.learned = self._learned.get(len(blocks))
        if len(seen) < len(blocks):
            seen.extend(bytes(len(blocks) - len(seen)))
        # An interrupt in forget_dead may have lost the list that `index` refers to; then nothing is learned.
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
