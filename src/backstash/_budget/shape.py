"""Distinguish one planner's steps by how much they save.

A plan is for the largest step so far. A step that saves more is recognized before it ends, by its first block
or by all that it has saved. If it was recognized too late to be measured, the next ones are measured, four at
most and twice as many each time, until one of them is as large.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["EndedStep", "StepShape"]

_ALIKE = 0.02  # how much two steps of one shape may differ in the bytes of their blocks
_MORE = 8  # the part of the most bytes that a step saved in all by which another one is larger
_OFTEN = 16  # likewise, that is saved between two looks once a step was taken for a larger one
_MOST_AWAITED = 64


@dataclass(frozen=True, slots=True)
class EndedStep:
    """What a step saved."""

    was_larger: bool
    """Whether it was taken for one that is larger than any that was planned for."""
    saved_bytes: int
    """Of its blocks."""
    asked_bytes: int
    """Of all storages that were saved, as often as each was."""
    most_asked_bytes: int
    """The most of these that a step before it saved."""
    was_seen: bool
    """Whether all that it saved was looked at: see :meth:`StepShape.take_rest_as_known`."""

    @property
    def has_grown(self) -> bool:
        """Whether it saved an eighth more than any step before it."""
        return _is_more(self.asked_bytes, self.most_asked_bytes)


class StepShape:
    """Of this step, and of the one that was planned for.

    Args:
        begins_as_known: see :attr:`begins_as_known`; of a loaded plan it is taken for granted.
    """

    def __init__(self, *, begins_as_known: bool) -> None:
        self.begins_as_known = begins_as_known
        """Whether this step's first block is as large as that one's: what differs later does so within a step
        of this shape."""
        self.is_larger = False
        """Whether this step is larger than any that was planned for."""
        self.expects_larger = False
        """Whether the last one was, and was not known for one from its first block on."""
        self.is_unknown = False
        """Whether this step saved a block that the plan does not know."""
        self.counted = 0
        """Blocks of this step so far."""
        self.known_bytes = 0
        """Of the blocks of the step that was planned for, without what recomputed regions let go."""
        self._known_first_bytes = self._discarded_bytes = 0
        # First blocks: this step's, the last one's, and the largest that a step which is no larger began with.
        self._first_bytes = self._ended_first_bytes = self._most_first_bytes = 0
        self._most_saved_bytes = sys.maxsize  # by the blocks of a step that is no larger
        self._saved_bytes = self._asked_bytes = 0  # in this step so far: by blocks, in all
        self._is_seen = True
        self._known_asked_bytes = self._planned_asked_bytes = self._most_asked_bytes = 0
        # Steps that are yet to be measured for a larger one that was met, and how many there are at most.
        self._awaited, self._most_awaited = 0, 4
        self._looks_often = False  # none of them was as large: it may have been several in turn

    def begin_step(self, *, is_first: bool) -> EndedStep:
        """One begins; what the last one saved."""
        ended = EndedStep(
            self.is_larger,
            self._saved_bytes,
            self._asked_bytes,
            self._most_asked_bytes,
            self._is_seen,
        )
        self._is_seen = True
        if not ended.was_larger and not is_first:
            self._most_asked_bytes = max(self._most_asked_bytes, ended.asked_bytes)
        self.is_larger = self.is_unknown = False
        self._ended_first_bytes = self._first_bytes
        self.counted = self._saved_bytes = self._asked_bytes = 0
        return ended

    def count(self, nbytes: int, *, is_planned: bool) -> tuple[int, int] | None:
        """A block of ``nbytes`` is saved.

        Args:
            nbytes: its size.
            is_planned: whether a step was planned for.

        Returns:
            If this step may be larger than that one: bytes of this step, and of that one at the same place.
        """
        larger = None
        if not self._saved_bytes:
            if is_planned:
                self.begins_as_known = nbytes == self._known_first_bytes
                if nbytes > self._most_first_bytes or self.expects_larger:
                    larger = nbytes, self._known_first_bytes
            self._first_bytes = nbytes
        elif not self.is_larger and self._saved_bytes > self._most_saved_bytes:
            larger = self._saved_bytes, self.known_bytes
        self._saved_bytes += nbytes
        self.counted += 1
        return larger

    def count_saved(self, nbytes: int) -> None:
        """Storages of so many bytes were saved, each counted as often as it was."""
        self._asked_bytes += nbytes

    @property
    def saved_bytes(self) -> int:
        """By the blocks of this step so far."""
        return self._saved_bytes

    @property
    def most_asked_bytes(self) -> int:
        """The most that a step saved in all."""
        return self._most_asked_bytes

    def take_rest_as_known(self) -> None:
        """Nobody looks at the rest of this step: it is taken to save what the planned one did."""
        self._is_seen = False
        self._asked_bytes = max(self._asked_bytes, self._known_asked_bytes)

    def asked_more(self) -> tuple[int, int] | None:
        """As :meth:`count`, of all that this step saved, where it is an eighth more than any before it did."""
        most = self._most_asked_bytes
        return (self._asked_bytes, most) if _is_more(self._asked_bytes, most) else None

    def bytes_to_next_look(self, nbytes: int) -> int:
        """``nbytes``, or less after steps that were taken for one: a graph that is used later held the first
        blocks of the next step, and only a look at a later block tells that the step before has ended."""
        return min(nbytes, self._most_asked_bytes // _OFTEN) if self._looks_often else nbytes

    def begin_larger(self) -> None:
        """This step is larger than the planned one. If that was seen later than at its first block, it is too
        late to measure it: the next ones are measured, until one of them is as large."""
        self.is_larger = True
        self.expects_larger = self.counted > 1
        if self.expects_larger:
            self._await()

    def ended_larger(self) -> None:
        """The step that has ended was larger than the planned one, which was not seen while it went on."""
        self.expects_larger = True
        self._await()

    def _await(self) -> None:
        self._awaited = self._most_awaited
        self._most_awaited = min(_MOST_AWAITED, 2 * self._most_awaited)

    def await_next(self) -> None:
        """The step that was awaited, or began with a larger block, was not as large. Steps may take turns of
        which some are smaller: the next one is measured, too, a few times."""
        self._most_first_bytes = max(self._most_first_bytes, self._ended_first_bytes)
        self.expects_larger = self._awaited > 0
        self._awaited -= self.expects_larger
        self._looks_often |= not self.expects_larger

    def await_another(self) -> None:
        """The step that was awaited has come, and another one like it is to be measured."""
        self.expects_larger = self._awaited > 0

    def stop_waiting(self) -> None:
        """The step that was awaited is planned for."""
        self._awaited = 0

    def begin_plan(self, asked_bytes: int) -> None:
        """A plan is being made for a step that saved so many bytes in all."""
        self._planned_asked_bytes = asked_bytes

    def follow(self, held: Sequence[int], discarded_bytes: int) -> None:
        """It is followed. ``held``: bytes of the blocks of its step in order, without those of regions that run
        again, which are ``discarded_bytes``."""
        self.known_bytes, self._discarded_bytes = sum(held), discarded_bytes
        self._known_first_bytes = held[0] if held else 0
        self._most_first_bytes = max(self._most_first_bytes, self._known_first_bytes)
        self._most_saved_bytes = int(self.known_bytes * (1 + _ALIKE))
        self._known_asked_bytes = self._planned_asked_bytes
        self._most_asked_bytes = max(self._most_asked_bytes, self._known_asked_bytes)

    def holds(self, saved_bytes: int) -> bool:
        """Whether the step that was planned for is no smaller than one that saves so much."""
        return saved_bytes <= self.known_bytes + self._discarded_bytes

    def is_alike(self, ended: EndedStep, *, by_blocks: bool) -> bool:
        """Whether a step saved as much as the one that was planned for: in blocks, or in all, where not all
        that stays is a block."""
        if by_blocks:
            return abs(ended.saved_bytes - self.known_bytes) <= _ALIKE * self.known_bytes
        known = self._known_asked_bytes
        return abs(ended.asked_bytes - known) <= known / _MORE


def _is_more(nbytes: int, most: int) -> bool:
    """Whether ``nbytes`` are an eighth more than ``most``, if that is known."""
    return most > 0 and nbytes > most + most // _MORE
