"""Rooms of host memory, given back when they are at rest.

A room outlives everything that reads or writes it. What a parcel leaves behind when it dies, or a reading
that nobody waits for, is *buried*: swept when its copies and its write have ended. A room whose bytes are
on disk too is given to whoever needs one next, and not before: until then it still serves reads.
"""

from __future__ import annotations

import errno
import time
import weakref
from collections import deque

from ._host_parcels import HostReading
from ._remains import HostRemains
from ._spills import Spills
from .errors import StashFullError
from .stores._host import HostPool, Room
from .units import format_bytes

__all__ = ["Rooms"]


class Rooms:
    """Finds rooms, and waits for one where it must. The caller holds the stash's lock.

    Args:
        pool: the rooms.
        spills: what makes room by writing to disk.
    """

    def __init__(self, pool: HostPool, spills: Spills) -> None:
        self._pool = pool
        self._spills = spills
        self._buried: deque[HostRemains] = deque()
        self._staging: deque[weakref.ref[HostReading]] = deque()  # with a room that is on disk too
        self.stall_seconds = 0.0

    def take(self, nbytes: int) -> Room:
        """A room, waited for if need be.

        Raises ``StashFullError`` where there is none and none can be made.
        """
        if not self._pool.could_hold(nbytes):  # not even if all others went
            raise self._full(nbytes)
        while True:
            room = self.take_idle(nbytes)
            if room is not None:
                return room
            if not (self._wait_for_one() or self._spills.spill_oldest()):
                raise self._full(nbytes)

    def _full(self, nbytes: int) -> StashFullError:
        spills, pool = self._spills, self._pool
        remedy = ": raise host=" if spills.disk is not None else ": raise host=, or give disk="
        if pool.refusal:
            remedy = f" ({pool.refusal}): free memory, or lower host="
        return StashFullError(
            errno.ENOSPC,
            f"host memory has no room for {format_bytes(nbytes)} beside the "
            f"{format_bytes(pool.used_bytes)} it holds{spills.refusal or remedy}",
        )

    def take_idle(self, nbytes: int) -> Room | None:
        """A room that is free, or can be freed without a wait."""
        room = self._pool.take(nbytes, may_grow=False)
        if room is None:
            self.sweep()  # before more memory is pinned
            room = self._pool.take(nbytes)
        while room is None and (self.sweep() or self._evict()):
            room = self._pool.take(nbytes)
        return room

    def lend(self, reading: HostReading) -> None:
        """Its room is taken back when its copy to the device has ended."""
        self._staging.append(weakref.ref(reading))

    def bury(self, remains: HostRemains) -> None:
        """Take what died; its room is given back when nothing uses it."""
        self._buried.append(remains)
        # Mostly they come to rest in this order. The others are looked at when a room is needed: a host
        # that runs ahead of its device may have buried hundreds, and each look asks the driver.
        while self._buried and self._buried[0].at_rest():
            self._give_back(self._buried.popleft())

    def sweep(self) -> bool:
        """Look at what has ended; whether a room or a choice came of it."""
        self._pool.settle()
        found = False
        for _ in range(len(self._buried)):
            if self._buried[0].at_rest():
                self._give_back(self._buried.popleft())
                found = True
            else:
                self._buried.rotate(-1)
        for _ in range(len(self._staging)):
            ref = self._staging.popleft()
            reading = ref()
            room = reading.take_room() if reading is not None else None
            if room is not None:
                self._pool.give(room)
                found = True
            elif reading is not None:
                self._staging.append(ref)
        return self._spills.sweep() or found

    def _give_back(self, remains: HostRemains) -> None:
        room, slot, remains.room, remains.slot = remains.room, remains.slot, None, None
        if room is not None:
            self._pool.give(room)
        if slot is not None:
            self._spills.release(slot, room)

    def _evict(self) -> bool:
        left = self._spills.evict()
        if left is None:
            return False
        self._buried.append(left)
        return True

    def _wait_for_one(self) -> bool:
        """Wait for the oldest thing that will free a room, if there is one."""
        began = time.perf_counter()
        try:
            if self._spills.wait():
                return True
            if self._buried:
                self._buried[0].wait()
                return True
            return self._wait_for_staging()
        finally:
            self.stall_seconds += time.perf_counter() - began

    def _wait_for_staging(self) -> bool:
        for ref in tuple(self._staging):
            reading = ref()
            if reading is not None and reading.arrive():
                return True
        return False

    def close(self) -> None:
        """Give back what is at rest. What live graphs hold stays until they go."""
        for remains in self._buried:
            remains.wait()
        self.sweep()
        self._pool.trim()
