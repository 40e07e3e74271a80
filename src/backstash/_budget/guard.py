"""Compare the memory that a device holds with a budget, and return free memory to the system.

A process keeps memory that its tensors freed, and most of a step's tensors reuse it. Where they do not, what
the process holds would exceed the budget although less is in use. So free memory is returned when a reading
finds so much that the largest growth between two readings could exceed the budget. That takes at most a
twentieth of the time, except for the first time in a step and as long as the budget is exceeded. Using returned
memory again costs page faults, so it is not returned earlier than that: as a step begins only before a measured
one, or if nothing else keeps the budget (see :meth:`MemoryGuard.must_free_at_start`).

What the process holds between two steps, after an evaluation for example, belongs to no step, unless it exceeds
the budget three times in a row.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from .meter import Meter

__all__ = ["MemoryGuard"]

_RELEASE_REST = 20  # times as long as giving memory back took, it is not done again
_LOOK_BYTES = 1 << 20  # that backward uses between two looks; the least that is saved between two
_SPARE_PART = 10  # of the budget, that a step which nobody looks at leaves free
_COMPARED_STEPS = 4  # whose peaks show how much less is enough
_LATE_STEPS = 3
_HELD_BACK_PART = 32  # a first step leaves 1/32 of the most bytes free
_USED_PART = 32  # backward uses 1/32 of the most bytes before freed memory is returned


class MemoryGuard:
    """Read the memory for one planner, and return free memory to the system.

    Args:
        meter: of the device.
        most: the most bytes that should be held.
        budget: the most bytes that may be held, slightly more than ``most``.
        trim: return free memory of the process to the system.
        is_process: whether the device's memory is the process's, whose allocator keeps what is freed and does
            not always use it again. Then a step may begin with it: see :meth:`must_free_at_start`.
    """

    def __init__(
        self,
        meter: Meter,
        most: int,
        budget: int,
        trim: Callable[[], None],
        *,
        is_process: bool = True,
    ) -> None:
        self._meter = meter
        self.most = most
        self.trim = trim
        self._most_now = most
        self._margin = budget - most
        self._line = (
            most  # if more is held, fewer blocks stay; it rises with each excess that was handled
        )
        self._release_after = 0.0
        # Whether the last release returned at least what backward has to use before one.
        self._has_returned_much = False
        self.highest_bytes = 0
        """The most bytes seen since :meth:`take_highest`."""
        self._most_at_start = budget
        self._is_process = is_process
        self._frees_at_start = not is_process  # each step with more than its plan leaves free
        self._start_bytes = 0  # bytes held as this step began
        # In this step, see avoided_bytes; and by how much the last excess lowered what is in place.
        self._avoided_bytes = self._lowered_bytes = 0
        self.avoided_bytes = 0
        """By how much the step before would have held more than the most, if it had not held fewer blocks than
        planned."""
        self._late_steps = 0  # in a row, after which the budget was exceeded
        self.keeps_free = False
        """Whether this step began with more than the plan leaves free: nothing was returned as it began."""
        # The first release in a step that keeps free memory does not wait for the interval.
        self._is_due = False
        # In backward: bytes used since the last reading, and since memory was returned; bytes held at the last
        # reading; and the largest growth between two readings.
        self._unlooked_bytes = self._used_bytes = self._held_before = self._growth = 0
        self._sampled_growth = 0  # largest sample between two readings, less the first reading
        self._raised_bytes = 0  # a new peak of the process since the last reading in backward
        # The larger of both since all blocks are unmanaged; None: they are not.
        self._left_growth: int | None = None
        self._has_plan = False
        self._expected_bytes = most  # what is in use, at most; what is held beyond that is free
        # Bytes held where this step and the one before first asked whether the rest may be unseen.
        self._asked_at: int | None = None
        self._asked_before: int | None = None
        # Of the last steps that were seen.
        self._peaks: deque[int] = deque(maxlen=2 * _COMPARED_STEPS)

    def plan_for(self, grown_bytes: int, peak_bytes: int, *, is_left: bool = False) -> bool:
        """Follow a plan.

        Args:
            grown_bytes: the most that its steps hold beyond what they began with.
            peak_bytes: the most that they hold.
            is_left: all blocks stay in place. Then growth that was seen while blocks moved does not keep a step
                from beginning with free memory.

        Returns:
            Whether the process now holds more than a step may begin with.
        """
        self._has_plan = True
        self._expected_bytes = peak_bytes
        self._most_at_start = self.most + self._margin - grown_bytes
        self.keeps_free = self._is_due = False
        self._left_growth = 0 if is_left else None
        return self._meter.now() > self._most_at_start

    def must_free_at_start(self, *, always: bool) -> bool:
        """Return whether to return free memory to the system as a step begins.

        If the step's plan leaves that much free, that is so only with ``always``. If the plan does not, the
        step could exceed the budget without reusing any of it. Most steps reuse it, and in them nothing is
        returned until a reading requires it. But what is held must leave room for the largest growth between
        two readings; and once a step that began this way has exceeded the budget, no later one does.
        """
        self.keeps_free = self._is_due = False
        held = self._start_bytes = self._meter.now()  # this belongs to no step
        if always or held <= self._most_at_start:
            return always
        growth = self._left_growth
        if growth is None:
            growth = max(self._growth, self._sampled_growth)
        is_safe = held <= self.most and held + growth <= self.most + self._margin
        self.keeps_free = self._is_due = is_safe and not self._frees_at_start
        return not self.keeps_free

    @property
    def kept_free_bytes(self) -> int:
        """Bytes held at the start of this step beyond what the plan leaves free; 0 if free memory was
        returned."""
        return max(0, self._start_bytes - self._most_at_start) if self.keeps_free else 0

    def begin_step(self) -> None:
        """Begin a step. The meter must have begun it already, since this may lower what is kept."""
        self._line = self._most_now = self.most
        if self._asked_at is not None:
            self._asked_before, self._asked_at = self._asked_at, None
        self.avoided_bytes, self._avoided_bytes = self._avoided_bytes, 0
        self._lowered_bytes = 0
        self._used_bytes = self._held_before = self._raised_bytes = 0
        self._meter.raised_peak_bytes()  # discard what rose before the step

    def raise_to(self, nbytes: int) -> None:
        """Let this step hold ``nbytes``: it is measured to learn costs, and keeps no budget."""
        self._line = self._most_now = nbytes

    def hold_back(self, nbytes: int) -> None:
        """Leave ``nbytes`` and a part of the budget free in this step, since the memory that operations need in
        addition to what they save is unknown."""
        self.raise_to(self.most - nbytes - self.most // _HELD_BACK_PART)

    @property
    def left_bytes(self) -> int:
        """Bytes that may still be allocated; negative if more than the most is held."""
        return self._most_now - self.held()

    def held(self) -> int:
        """Return the bytes held now, and record the highest."""
        held = self._meter.now()
        self._look_at_peak()
        self.highest_bytes = max(self.highest_bytes, held)
        return held

    def _look_at_peak(self) -> None:
        raised = self._meter.raised_peak_bytes()
        if raised:
            self._raised_bytes = max(self._raised_bytes, raised)
            self.highest_bytes = max(self.highest_bytes, raised)

    def part_of_what_is_left(self, parts: int, threads: int) -> int:
        """Return the bytes that each of some threads may allocate until the next call; -1: none."""
        if self._is_process and self._next_peak_bytes > self._most_now + self._margin:
            return -1  # backward has to be looked at more often
        left, threads = self.left_bytes, max(1, threads)
        nbytes = left // (parts * threads)
        if nbytes >= _LOOK_BYTES:
            return nbytes
        # Plans do not use all of a budget. Hand out what is left of it in small parts: reading the memory for
        # each of many small blocks is expensive.
        return _LOOK_BYTES // threads if left + self._margin >= 2 * _LOOK_BYTES else -1

    def fits_unseen(
        self, saved_bytes: int, peak_bytes: int, *, is_known: bool, is_steady: bool
    ) -> bool:
        """Whether the rest of a step fits although nobody looks at it.

        It is expected to grow by as much as the highest step did from the same point, which need not be what
        it saves: a process may still hold the free memory of the step before.

        Args:
            saved_bytes: the most that the saves of a step hold.
            peak_bytes: that steps are predicted to hold.
            is_known: the step began like those before it: then a tenth of the budget is to stay free. Else it
                is to fit if it takes twice as much as any step did so far.
            is_steady: the last steps saved the same: then a known one need not leave that tenth free, but only
                as much as their peaks differed by. (glibc's heap may grow from step to step although what it
                holds does not.)
        """
        held = self.held()
        if self._asked_at is None:
            self._asked_at = held
        if self._asked_before is None:
            return False
        highest = max(self._meter.ever_peak_bytes(), peak_bytes)
        growth = max(0, highest - self._asked_before)
        expected = max(highest, held + growth)
        spare = self.most // _SPARE_PART
        last = list(self._peaks)[-_COMPARED_STEPS:]
        if is_steady and len(last) == _COMPARED_STEPS:
            spare = min(spare, max(last) - min(last))
        if is_known and expected <= self.most - spare:
            return True
        return expected + max(growth, saved_bytes) <= self.most

    def note_peak(self, nbytes: int) -> None:
        """Record the peak of a step that was seen to its end."""
        self._peaks.append(nbytes)

    @property
    def _next_peak_bytes(self) -> int:
        """The peak that the next step may have: the highest of the last few, and as much more as these are
        above the ones before, or as memory grows between two readings. 0 if no peak is known."""
        if not self._peaks:
            return 0
        peaks = list(self._peaks)
        highest, before = max(peaks[-_COMPARED_STEPS:]), max(peaks[:-_COMPARED_STEPS] or peaks[:1])
        return highest + max(highest - before, self._growth_now)

    def take_highest(self) -> int:
        """Return the most bytes seen in a step since the last call."""
        highest, self.highest_bytes = self.highest_bytes, 0
        if self.keeps_free and highest > self.most + self._margin:
            self._frees_at_start = True
        return highest

    def late_bytes(self) -> int:
        """Return the bytes held as a step begins if they exceeded the budget before several steps in a row:
        then the end of a step takes too much. A single time may be an evaluation between two steps. Else return
        0."""
        held = self._meter.now()
        self._late_steps = self._late_steps + 1 if held > self.most + self._margin else 0
        if self._late_steps < _LATE_STEPS:
            return 0
        self._late_steps = 0
        return held

    def over(self) -> int:
        """Return the bytes by which the stash has to hold less for the rest of the step.

        Each byte of an excess counts once: the process may keep freed memory and reuse it.
        """
        self._held_before = 0  # growth since then is not backward's
        held = self.held()
        if (
            self.keeps_free
            and held + self._growth_now > self.most + self._margin
            and self.release()
        ):
            held = self.held()
        over = held - self._line
        if over > 0 and self.release():
            over = self.held() - self._line
        if over <= 0:
            return 0
        # What it held less since; this peak shows the rest.
        self._avoided_bytes += self._lowered_bytes
        self._lowered_bytes = 0
        self._line += over
        return over

    def note_lowered(self, nbytes: int) -> None:
        """Record by how many bytes fewer blocks stay in place, after :meth:`over`."""
        self._lowered_bytes = nbytes

    @property
    def _growth_now(self) -> int:
        """The largest growth expected between two readings. Memory that operations hold until they end is part
        of a plan's trace, so steps under a plan include it. It counts before there is a plan, and in a step
        that keeps free memory."""
        if self.keeps_free and self._left_growth is not None:
            return self._left_growth
        counts = self.keeps_free or not self._has_plan
        return max(self._growth, self._sampled_growth if counts else 0)

    def has_room(self, nbytes: int) -> bool:
        """Whether this many bytes more fit, if need be after returning free memory."""
        if self.held() + nbytes <= self._most_now:
            return True
        return self.release() and self.held() + nbytes <= self._most_now

    def note_used(self, nbytes: int) -> None:
        """Count bytes of a block that backward uses, and usually frees then: the allocator may keep them for
        the process.

        Free memory is returned to the system only if the largest growth between two readings could exceed the
        budget: the next forward has to allocate again what is returned here. And only after backward has used a
        part of it, or if more is held than the plan's steps do: that is free memory.
        """
        self._used_bytes += nbytes
        self._unlooked_bytes += nbytes
        if self._unlooked_bytes < _LOOK_BYTES:
            self._look_at_peak()  # this may be the last use of the step
            return
        self._unlooked_bytes, held = 0, self.held()
        # An operation may hold more while it runs.
        sampled, self._raised_bytes = max(self._raised_bytes, self._meter.take_highest()), 0
        if self._held_before:
            growth, sampled_growth = held - self._held_before, sampled - self._held_before
            self._growth = max(self._growth, growth)
            self._sampled_growth = max(self._sampled_growth, sampled_growth)
            if self._left_growth is not None:
                self._left_growth = max(self._left_growth, growth, sampled_growth)
        self._held_before = held
        is_near = held + self._growth_now > self._most_now + self._margin
        is_due = self._used_bytes > self.most // _USED_PART or held > self._expected_bytes
        if is_near and is_due and self.release():
            self._used_bytes = self._held_before = 0

    def release(self) -> bool:
        """Return free memory to the system, unless that has taken more than a twentieth of the time so far. The
        first time in a step that began with free memory, do so in any case; likewise if the budget is exceeded
        and the last time returned much. Return whether it was done."""
        held, now = self._meter.now(), time.perf_counter()
        is_urgent = self._has_returned_much and held > self.most + self._margin
        if now < self._release_after and not self._is_due and not is_urgent:
            return False
        self._is_due = False
        self.trim()
        ended = time.perf_counter()
        self._release_after = ended + _RELEASE_REST * (ended - now)
        self._has_returned_much = held - self._meter.now() > self.most // _USED_PART
        return True
