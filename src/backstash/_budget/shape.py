"""Distinguish one planner's steps by how much they save.

A plan is for the largest step so far. A larger step is recognized before it ends, by its first block or by the
total of its saves. If it was recognized too late to be measured, the planner measures the next steps until one
is as large: at most four, then eight. If none was, such a step is no longer taken to be larger: its saves
follow the plan, as far as it knows them, and the memory is read as in any step.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["EndedStep", "StepShape"]

_ALIKE = 0.02  # two steps of one shape differ by at most this part of what they save
_MORE = 8  # a step is larger if it saves 1/8 more than any step before
_OFTEN = 16  # checks come every 1/16 of that once a step was mistaken for a larger one
_MOST_AWAITED = 16  # not reached by the first two times
_STEADY_STEPS = 16


@dataclass(frozen=True, slots=True)
class EndedStep:
    """How much a step saved."""

    was_larger: bool
    """Whether it was taken to be larger than any planned step."""
    saved_bytes: int
    """Bytes of its blocks, without those whose memory had been saved before and had moved."""
    asked_bytes: int
    """Bytes of all saved storages, each counted as often as it was saved."""
    most_asked_bytes: int
    """The most such bytes of any step before it."""
    was_seen: bool
    """Whether all its saves were seen: see :meth:`StepShape.take_rest_as_known`."""

    @property
    def has_grown(self) -> bool:
        """Whether it saved an eighth more than any step before it."""
        return _is_more(self.asked_bytes, self.most_asked_bytes)


class StepShape:
    """Compare the current step with the planned one.

    Args:
        begins_as_known: see :attr:`begins_as_known`; assumed for a loaded plan.
    """

    def __init__(self, *, begins_as_known: bool) -> None:
        self.begins_as_known = begins_as_known
        """Whether this step's first block has the size of the planned step's. Blocks that differ later then
        belong to a step of the same shape."""
        self.is_larger = False
        """Whether this step is larger than any planned one."""
        self.expects_larger = False
        """Whether to expect a larger step, because one was recognized after its first block."""
        self.is_unknown = False
        """Whether this step saved a block that the plan does not know."""
        self.manages_more = False
        """Whether this step has blocks that the plan leaves unmanaged."""
        self.counted = 0
        """Number of blocks of this step so far."""
        self.known_bytes = 0
        """Bytes of the planned step's blocks, without those that recomputed regions discard."""
        self._known_first_bytes = self._discarded_bytes = 0
        # First blocks: this step's, the last step's, and the largest of any step that was not larger.
        self._first_bytes = self._ended_first_bytes = self._most_first_bytes = 0
        self._most_saved_bytes = sys.maxsize  # of the blocks of a step that is not larger
        self.saved_bytes = 0
        """Bytes of this step's blocks so far."""
        # In this step so far: blocks whose memory had moved before, and all saves.
        self._again_bytes = self._asked_bytes = 0
        self.is_seen = True
        """Whether all saves of this step so far were seen: see :meth:`take_rest_as_known`."""
        # Steps in a row that were seen and saved the same, and how much.
        self._steady_steps = self._steady_bytes = 0
        self._known_asked_bytes = self._planned_asked_bytes = self._most_asked_bytes = 0
        # Steps that are still to be measured until one is as large, and the most of them.
        self._awaited, self._most_awaited = 0, 4
        self._looks_often = (
            False  # none of them was as large: several steps may have looked like one
        )
        # Of the step that they were to be as large as.
        self._late_bytes = self._late_asked_bytes = 0

    def begin_step(self, *, is_first: bool) -> EndedStep:
        """Begin a step, and return what the last one saved."""
        ended = EndedStep(
            self.is_larger,
            self.saved_bytes - self._again_bytes,
            # What was not seen is taken to be as much as in the planned step.
            self._asked_bytes if self.is_seen else max(self._asked_bytes, self._known_asked_bytes),
            self._most_asked_bytes,
            self.is_seen,
        )
        self.is_seen = True
        if ended.was_larger and self.expects_larger:
            self._late_bytes, self._late_asked_bytes = ended.saved_bytes, ended.asked_bytes
        if not ended.was_larger and not is_first:
            self._most_asked_bytes = max(self._most_asked_bytes, ended.asked_bytes)
        if ended.was_seen:
            differs = abs(ended.asked_bytes - self._steady_bytes) > _ALIKE * self._steady_bytes
            self._steady_steps = 0 if differs else self._steady_steps + 1
            self._steady_bytes = ended.asked_bytes
        self.is_larger = self.is_unknown = self.manages_more = False
        self._ended_first_bytes = self._first_bytes
        self.counted = self.saved_bytes = self._again_bytes = self._asked_bytes = 0
        return ended

    def count(
        self, nbytes: int, *, is_planned: bool, is_again: bool = False
    ) -> tuple[int, int] | None:
        """Count a block that is saved.

        Args:
            nbytes: its size.
            is_planned: whether there is a planned step.
            is_again: its memory was saved before in this step, and has moved since. How many do so depends on
                the speed of transfers, so they make no step a larger one.

        Returns:
            If this step may be larger than the planned one: bytes of this step, and of that one at the same
                point.
        """
        larger = None
        if not self.saved_bytes:
            if is_planned:
                self.begins_as_known = nbytes == self._known_first_bytes
                if nbytes > self._most_first_bytes or self.expects_larger:
                    larger = nbytes, self._known_first_bytes
            self._first_bytes = nbytes
        elif (
            not (self.is_larger or self.manages_more)
            and self.saved_bytes - self._again_bytes > self._most_saved_bytes
        ):
            larger = self.saved_bytes, self.known_bytes
        self.saved_bytes += nbytes
        self._again_bytes += nbytes * is_again
        self.counted += 1
        return larger

    def count_saved(self, nbytes: int) -> None:
        """Add the bytes of saved storages, each counted as often as it was saved."""
        self._asked_bytes += nbytes

    @property
    def most_held_bytes(self) -> int:
        """An estimate of the most bytes that the saves of a step hold: what the planned step holds, in
        proportion to how much was saved. A storage that is saved several times counts once."""
        planned, most = self._planned_asked_bytes, self._most_asked_bytes
        if not planned:
            return most  # nothing large was saved
        return (self.known_bytes + self._discarded_bytes) * max(planned, most) // planned

    @property
    def is_steady(self) -> bool:
        """Whether the last 16 steps that were seen saved the same."""
        return self._steady_steps >= _STEADY_STEPS

    def take_rest_as_known(self) -> None:
        """Assume that this step saves what the planned step saved: some of its saves are not seen. (Those of a
        later context are: a step may have several.)"""
        self.is_seen = False

    def asked_more(self) -> tuple[int, int] | None:
        """Compare as :meth:`count` does, for all saves of this step, if they are an eighth more than in any
        step before."""
        most = self._most_asked_bytes
        return (self._asked_bytes, most) if _is_more(self._asked_bytes, most) else None

    def bytes_to_next_look(self, nbytes: int) -> int:
        """Return the bytes until the next check: ``nbytes``, or less after a step was mistaken for a larger
        one. If an earlier graph is used late, it holds the first blocks of the next step, and only a check at a
        later block shows that the step has ended."""
        return min(nbytes, self._most_asked_bytes // _OFTEN) if self._looks_often else nbytes

    def begin_larger(self) -> None:
        """Record that this step is larger than the planned one. If that was recognized after its first block,
        it is too late to measure it, so the next steps are measured until one is as large."""
        self.is_larger = True
        self.expects_larger = self.counted > 1
        if self.expects_larger:
            self._await()

    def ended_larger(self) -> None:
        """Record that the ended step was larger than the planned one, which was not recognized during the
        step."""
        self.expects_larger = True
        self._await()

    def _await(self) -> None:
        self._awaited = self._most_awaited
        self._most_awaited = min(_MOST_AWAITED, 2 * self._most_awaited)

    def await_next(self) -> None:
        """Expect a larger step again, a few times: the expected step, or one with a larger first block, was not
        as large, and steps of different sizes may alternate.

        The second time that none of them was as large, it is no longer expected: such steps are too rare to be
        measured, or a measured step saves less for another reason, such as a call that a plan cannot recompute
        although it could be recomputed when it was measured.
        """
        self._most_first_bytes = max(self._most_first_bytes, self._ended_first_bytes)
        self.expects_larger = self._awaited > 0
        self._awaited -= self.expects_larger
        self._looks_often |= not self.expects_larger
        if not self.expects_larger and self._most_awaited == _MOST_AWAITED:
            most_bytes = self._late_bytes + self._differing_bytes
            self._most_saved_bytes = max(self._most_saved_bytes, most_bytes)
            self._most_asked_bytes = max(self._most_asked_bytes, self._late_asked_bytes)

    def await_another(self) -> None:
        """Expect another larger step, to measure it: the expected one has come."""
        self.expects_larger = self._awaited > 0

    def stop_waiting(self) -> None:
        """Expect no other larger step: a plan is being made for one."""
        self._awaited = 0

    @property
    def _differing_bytes(self) -> int:
        """How much the blocks of two steps of one shape differ at most: by a part of all that the step saves,
        with what regions discard. A forward that is compared holds some of that."""
        return int(_ALIKE * (self.known_bytes + self._discarded_bytes))

    def begin_plan(self, asked_bytes: int) -> None:
        """Record the bytes of the step that is being planned for, each storage counted as often as it was
        saved."""
        self._planned_asked_bytes = asked_bytes

    def follow(self, held: Sequence[int], discarded_bytes: int) -> None:
        """Make the step of a new plan the planned one.

        Args:
            held: bytes of its blocks in order, without those that recomputed regions discard.
            discarded_bytes: bytes of the latter.
        """
        self.known_bytes, self._discarded_bytes = sum(held), discarded_bytes
        self._known_first_bytes = held[0] if held else 0
        self._most_first_bytes = max(self._most_first_bytes, self._known_first_bytes)
        self._most_saved_bytes = self.known_bytes + self._differing_bytes
        self._known_asked_bytes = self._planned_asked_bytes
        self._most_asked_bytes = max(self._most_asked_bytes, self._known_asked_bytes)

    def note_alike(self, ended: EndedStep) -> None:
        """Record that this step had the planned step's blocks. Its saves count less often than those of a step
        that is recorded for a plan, where the inputs of calls and what replays read are saved, too."""
        self._known_asked_bytes = ended.asked_bytes

    def holds(self, saved_bytes: int) -> bool:
        """Whether the planned step saves at least this many bytes."""
        return saved_bytes <= self.known_bytes + self._discarded_bytes

    def is_alike(self, ended: EndedStep, *, by_blocks: bool) -> bool:
        """Whether a step saved as much as the planned one; compared by blocks, or by all saves where not every
        tensor that stays is a block."""
        if by_blocks:
            return abs(ended.saved_bytes - self.known_bytes) <= self._differing_bytes
        known = self._known_asked_bytes
        return abs(ended.asked_bytes - known) <= known / _MORE


def _is_more(nbytes: int, most: int) -> bool:
    """Whether ``nbytes`` is more than ``most``, if that is known, by over an eighth."""
    return most > 0 and nbytes > most + most // _MORE
