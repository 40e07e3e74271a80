"""The memory that a device holds, against a budget: looked at, given back where it is free, and told of."""

from __future__ import annotations

import time
from collections.abc import Callable

from .meter import Meter

__all__ = ["MemoryGuard"]

_RELEASE_REST = 20  # times as long as giving memory back took, it is not done again
_LOOK_BYTES = (
    1 << 20
)  # that backward uses between two looks, and the least that is saved between two
_USED_PART = 32  # the part of the most that backward has used before what it freed is given back


class MemoryGuard:
    """Looks at memory for one planner.

    Args:
        meter: of the device.
        most: the most bytes that are to be held.
        budget: the most that may be held, a little more than ``most``.
        let_go: gives back memory that is free and still the process's.
    """

    def __init__(self, meter: Meter, most: int, budget: int, let_go: Callable[[], None]) -> None:
        self._meter = meter
        self.most = most
        self.let_go = let_go
        self._most_now = most
        self._margin = budget - most
        self._line = most  # beyond it less is kept; it follows what the process holds
        self._release_after = 0.0
        self._highest_bytes = 0
        self._most_at_start = budget
        self._reuses_free: bool | None = None  # no step was tried yet
        self.is_trying = False
        """Whether this step is the one that is tried: see :meth:`must_free_at_start`."""
        # In backward: used since the last look, and since memory was given back; what was held at the last
        # look; and the most that came between two.
        self._unlooked_bytes = self._used_bytes = self._held_before = self._growth = 0

    def plan_for(self, grown_bytes: int) -> None:
        """Steps hold from now on at most so many bytes more than at their beginning."""
        self._most_at_start = self.most + self._margin - grown_bytes

    def must_free_at_start(self, *, always: bool) -> bool:
        """Whether memory that is free is given back as a step begins: where the step would exceed the budget if
        it used none of it again; or ``always``.

        To take that memory again takes time, and most steps use again what is free. So one step is tried: in
        it nothing is given back until the largest growth between two looks would exceed the budget, and the
        memory is looked at as often as the stash does at all. If it held no more than ``most``, the later
        ones do as it, until one of them holds more.
        """
        if self.is_trying or self._reuses_free:
            self._reuses_free = self._highest_bytes <= self.most
        self.is_trying = False
        held = self.held()
        if always or self._reuses_free or held <= self._most_at_start:
            return always
        self.is_trying = self._reuses_free is None and held <= self.most
        return not self.is_trying

    def begin_step(self) -> None:
        """One begins, and the meter knows it: less may have to be kept from now on."""
        self._line = self._most_now = self.most
        self._used_bytes = self._held_before = 0
        self._highest_bytes = max(self._highest_bytes, self._meter.known_peak_bytes)

    def raise_to(self, nbytes: int) -> None:
        """No step could be within ``most``: in this one so much may be held."""
        self._line = self._most_now = nbytes

    @property
    def left_bytes(self) -> int:
        """What may still be taken; below 0: by how much what is held exceeds the most."""
        return self._most_now - self.held()

    def held(self) -> int:
        """What is held now."""
        held = self._meter.now()
        self._highest_bytes = max(self._highest_bytes, held)
        return held

    def part_of_what_is_left(self, parts: int, threads: int) -> int:
        """So much for each of some threads, until this is asked again; -1: none."""
        left, threads = self.left_bytes, max(1, threads)
        nbytes = left // (parts * threads)
        if nbytes >= _LOOK_BYTES:
            return nbytes
        # Plans do not use all of a budget. What is left of that goes little by little, since to look at each of
        # many small blocks is dear.
        return _LOOK_BYTES // threads if left + self._margin >= 2 * _LOOK_BYTES else -1

    def take_highest(self) -> int:
        """The most that was seen since this was asked last."""
        highest, self._highest_bytes = self._highest_bytes, 0
        return highest

    def over(self) -> int:
        """By how many bytes less is to be kept for the rest of the step; 0: by none.

        Once for each byte more: memory that was freed may stay the process's, and is used again.
        """
        self._held_before = 0  # what came since then is no growth of a backward's
        held = self.held()
        if self.is_trying and held + self._growth > self.most + self._margin:
            self.is_trying, self._reuses_free = False, False
            self.release()
            held = self.held()
        over = held - self._line
        if over > 0 and self.release():
            over = self.held() - self._line
        if over <= 0:
            return 0
        self._line += over
        return over

    def has_room(self, nbytes: int) -> bool:
        """Whether there may be so many bytes more, once free memory was given back."""
        if self.held() + nbytes <= self._most_now:
            return True
        return self.release() and self.held() + nbytes <= self._most_now

    def tell_used(self, nbytes: int) -> None:
        """Backward uses so much of a block, and mostly frees it then: an allocator may keep it for the process.

        It is given back where as much as ever came between two looks would exceed the budget. Not before: a
        plan uses nearly all of ``most``, and the next step's forward has to take again what is given back
        here.
        """
        self._used_bytes += nbytes
        self._unlooked_bytes += nbytes
        if self._unlooked_bytes < _LOOK_BYTES:
            return
        self._unlooked_bytes, held = 0, self.held()
        if self._held_before:
            self._growth = max(self._growth, held - self._held_before)
        self._held_before = held
        is_near = held + self._growth > self._most_now + self._margin
        if is_near and self._used_bytes > self.most // _USED_PART and self.release():
            self._used_bytes = self._held_before = 0

    def release(self) -> bool:
        """Give back what is free, but where that took more than a twentieth of the time; whether it did."""
        now = time.perf_counter()
        if now < self._release_after:
            return False
        self.let_go()
        ended = time.perf_counter()
        self._release_after = ended + _RELEASE_REST * (ended - now)
        return True
