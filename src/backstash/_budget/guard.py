"""Compare the memory that a device holds with a budget, and return free memory to the system.

Free memory that the process still holds is returned before a measured step, before the first step under a plan
that begins with more than the plan leaves free, and in backward. There it waits until backward has used a part
of the budget and the largest growth between two looks could exceed the budget. It takes at most a twentieth of
the time. Using that memory again costs page faults, and most steps reuse what is free. So one step under each
plan is tried that begins without returning it (see :meth:`MemoryGuard.must_free_at_start`).

What the process holds between two steps, after an evaluation for example, belongs to no step, unless it
exceeds the budget three times in a row.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from .meter import Meter

__all__ = ["MemoryGuard"]

_RELEASE_REST = 20  # times as long as giving memory back took, it is not done again
_LOOK_BYTES = 1 << 20  # that backward uses between two looks; the least that is saved between two
_SPARE_PART = 10  # of the budget, that a step which nobody looks at leaves free
_LATE_STEPS = 3
_HELD_BACK_PART = 32  # of the most, that a first step leaves free
_USED_PART = 32  # the part of the most that backward has used before what it freed is given back


class MemoryGuard:
    """Looks at memory for one planner.

    Args:
        meter: of the device.
        most: the most bytes that are to be held.
        budget: the most that may be held, a little more than ``most``.
        trim: gives back memory that is free and still the process's.
        tries: whether a step is tried that begins without that: see :meth:`must_free_at_start`.
    """

    def __init__(
        self,
        meter: Meter,
        most: int,
        budget: int,
        trim: Callable[[], None],
        *,
        tries: bool = True,
    ) -> None:
        self._meter = meter
        self.most = most
        self.trim = trim
        self._most_now = most
        self._margin = budget - most
        self._line = most  # beyond it less is kept; it follows what the process holds
        self._release_after = 0.0
        self.highest_bytes = 0
        """The most that was seen since :meth:`take_highest`."""
        self._most_at_start = budget
        # With as much at its beginning a step keeps ``most`` that gives nothing back; None: none was tried.
        self._most_kept_free: int | None = None if tries else 0
        self._start_bytes = 0  # that were held as this step began
        self._late_steps = 0  # in a row, after which more than the budget was held
        self.keeps_free = False
        """Whether this step began with more than fits beside what it adds, and nothing was given back."""
        self.is_trying = False
        """Whether this step is the first of these."""
        # The first release in a step that keeps what is free waits for none before it.
        self._is_due = False
        # In backward: used since the last look, and since memory was given back; what was held at the last
        # look; and the most that came between two.
        self._unlooked_bytes = self._used_bytes = self._held_before = self._growth = 0
        self._sampled_growth = 0  # the most that was sampled between two looks, beyond the first
        self._raised_bytes = (
            0  # the most since the last look in backward, where the process never held as much
        )
        # Of both, the most since all is left in place; None: it is not.
        self._left_growth: int | None = None
        self._has_plan = False

    def plan_for(self, grown_bytes: int, *, is_left: bool = False) -> bool:
        """Steps hold from now on at most so many bytes more than at their beginning.

        Args:
            grown_bytes: these.
            is_left: all stays in place. Then growth that was seen while blocks moved keeps no step from
                beginning with what is free.

        Returns:
            Whether more is held now than a step may begin with.
        """
        self._has_plan = True
        self._most_at_start = self.most + self._margin - grown_bytes
        if self._most_kept_free:
            self._most_kept_free = None  # under the plan before
        self.is_trying = self.keeps_free = self._is_due = False
        self._left_growth = 0 if is_left else None
        return self._meter.now() > self._most_at_start

    def must_free_at_start(self, *, always: bool, may_try: bool) -> bool:
        """Whether memory that is free is given back as a step begins: where the step would exceed the budget if
        it used none of it again; or ``always``.

        To take that memory again takes time, and most steps use again what is free. So one step is tried
        (``may_try``: this one may be it), which begins with so little that the largest growth between two looks
        keeps the budget: in it nothing is given back until a look finds more than ``most``, or so much that
        this growth could exceed the budget. Then none begins so from now on; else :meth:`end_trial` is told
        what it held, and later ones begin so until one has to give memory back. One that begins with more than
        is known to keep ``most`` is tried, too.
        """
        self.is_trying = self.keeps_free = self._is_due = False
        held = self._start_bytes = self._meter.now()  # which is of no step
        if always or held <= self._most_at_start:
            return always
        growth = self._left_growth
        if growth is None:
            growth = max(self._growth, self._sampled_growth)
        is_safe = held <= self.most and held + growth <= self.most + self._margin
        known = self._most_kept_free
        self.is_trying = may_try and is_safe and (known is None or 0 < known < held)
        self.keeps_free = self._is_due = self.is_trying or held <= (known or 0)
        return not self.keeps_free

    def end_trial(self, peak_bytes: int, *, is_alike: bool) -> None:
        """A step that was tried has ended, and held so much at most. If that was no more than ``most``, later
        ones do as it did, where they begin with no more than leaves them as much below it; else none ever does.
        If the step had another shape than the planned one (``is_alike``), only an excess counts."""
        if peak_bytes > self.most:
            self.fail_trial()
        elif is_alike and self._most_kept_free != 0:
            self._most_kept_free = self._start_bytes + self.most - peak_bytes

    def fail_trial(self) -> None:
        """A step that gave nothing back as it began held too much: none does so from now on."""
        self._most_kept_free = 0

    @property
    def kept_free_bytes(self) -> int:
        """With how much more this step began than fits beside all that it adds; 0: memory was given back."""
        return max(0, self._start_bytes - self._most_at_start) if self.keeps_free else 0

    def begin_step(self) -> None:
        """One begins, and the meter knows it: less may have to be kept from now on."""
        self._line = self._most_now = self.most
        self._used_bytes = self._held_before = self._raised_bytes = 0
        self._meter.raised_peak_bytes()  # until now it is of no step

    def raise_to(self, nbytes: int) -> None:
        """In this step ``nbytes`` may be held: it is measured to learn, and no budget is kept."""
        self._line = self._most_now = nbytes

    def hold_back(self, nbytes: int) -> None:
        """In this step ``nbytes`` and a part of the budget are to stay free: how much operations take beside
        what they save is not known."""
        self.raise_to(self.most - nbytes - self.most // _HELD_BACK_PART)

    @property
    def left_bytes(self) -> int:
        """What may still be taken; below 0: by how much what is held exceeds the most."""
        return self._most_now - self.held()

    def held(self) -> int:
        """What is held now."""
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
        """So much for each of some threads, until this is asked again; -1: none."""
        left, threads = self.left_bytes, max(1, threads)
        nbytes = left // (parts * threads)
        if nbytes >= _LOOK_BYTES:
            return nbytes
        # Plans do not use all of a budget. What is left of that goes little by little, since to look at each of
        # many small blocks is dear.
        return _LOOK_BYTES // threads if left + self._margin >= 2 * _LOOK_BYTES else -1

    def fits_unseen(self, saved_bytes: int, peak_bytes: int, *, is_known: bool) -> bool:
        """Whether the rest of a step fits although nobody looks at it.

        Args:
            saved_bytes: the most that a step saved.
            peak_bytes: that steps are predicted to hold.
            is_known: the step began like those before it: then a tenth of the budget is to stay free. Else it
                is to fit if it takes twice as much as any step did so far.
        """
        ever_bytes = self._meter.ever_peak_bytes()
        if ever_bytes is None:
            return False
        held = self.held()
        growth = max(saved_bytes, ever_bytes - held, peak_bytes - held)
        if is_known and held + growth <= self.most - self.most // _SPARE_PART:
            return True
        return held + 2 * growth <= self.most

    def take_highest(self) -> int:
        """The most that was seen since this was asked last, in a step."""
        highest, self.highest_bytes = self.highest_bytes, 0
        return highest

    def late_bytes(self) -> int:
        """What is held as a step begins, where that exceeded the budget before several steps in a row: what the
        steps take at their end is then too much. Once it may be of an evaluation between two steps. Else 0."""
        held = self._meter.now()
        self._late_steps = self._late_steps + 1 if held > self.most + self._margin else 0
        if self._late_steps < _LATE_STEPS:
            return 0
        self._late_steps = 0
        return held

    def over(self) -> int:
        """Bytes by which the stash has to keep less for the rest of the step.

        Each byte of an excess counts once: memory that was freed may stay the process's, and is used again.
        """
        self._held_before = 0  # what came since then is no growth of a backward's
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
        self._line += over
        return over

    @property
    def _growth_now(self) -> int:
        """What may come between two looks. What operations take until they end is in what a plan was made
        from, so that steps under one hold it: it counts before there is one, and in a step that keeps what is
        free."""
        if self.keeps_free and self._left_growth is not None:
            return self._left_growth
        counts = self.keeps_free or not self._has_plan
        return max(self._growth, self._sampled_growth if counts else 0)

    def has_room(self, nbytes: int) -> bool:
        """Whether there may be so many bytes more, once free memory was given back."""
        if self.held() + nbytes <= self._most_now:
            return True
        return self.release() and self.held() + nbytes <= self._most_now

    def note_used(self, nbytes: int) -> None:
        """Backward uses so much of a block, and mostly frees it then: an allocator may keep it for the process.

        It is given back where as much as ever came between two looks would exceed the budget. Not before: a
        plan uses nearly all of ``most``, and the next step's forward has to take again what is given back
        here.
        """
        self._used_bytes += nbytes
        self._unlooked_bytes += nbytes
        if self._unlooked_bytes < _LOOK_BYTES:
            self._look_at_peak()  # this may be the last use of the step
            return
        self._unlooked_bytes, held = 0, self.held()
        # An operation may hold more until it ends.
        sampled, self._raised_bytes = max(self._raised_bytes, self._meter.take_highest()), 0
        if self._held_before:
            growth, sampled_growth = held - self._held_before, sampled - self._held_before
            self._growth = max(self._growth, growth)
            self._sampled_growth = max(self._sampled_growth, sampled_growth)
            if self._left_growth is not None:
                self._left_growth = max(self._left_growth, growth, sampled_growth)
        self._held_before = held
        is_near = held + self._growth_now > self._most_now + self._margin
        if is_near and self._used_bytes > self.most // _USED_PART and self.release():
            self._used_bytes = self._held_before = 0

    def release(self) -> bool:
        """Give free memory back to the system, unless that has taken more than a twentieth of the time so far;
        the first time in a step that began with what is free, in any case. Returns whether it was done."""
        if self.keeps_free:
            self.fail_trial()
        now = time.perf_counter()
        if now < self._release_after and not self._is_due:
            return False
        self._is_due = False
        self.trim()
        ended = time.perf_counter()
        self._release_after = ended + _RELEASE_REST * (ended - now)
        return True
