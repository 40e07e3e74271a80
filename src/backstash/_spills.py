"""Onward from host memory to disk, the oldest first.

When what the rooms hold comes near the ``host`` budget, the oldest parcels are written to disk from where
they lie. A room whose bytes are on disk too still serves reads, until somebody needs it.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable

from torch import Tensor

from ._events import profiled
from ._host_parcels import HostParcel
from ._queue import WeakQueue
from ._remains import Grave, HostRemains
from ._streams import Copy
from ._workers import Work
from .errors import StashIOError
from .stores import Slot, Store
from .stores._host import HostPool, Room

__all__ = ["Spills"]


class Spills:
    """Knows which parcels are in host memory alone, on their way out of it, or on disk too.

    The caller holds the stash's lock.

    Args:
        pool: the rooms, and their budget.
        disk: what is below, or ``None``.
        begin_work: hands a piece of work to a worker.
        grave: where what dies is appended.
        number: of the side.
        early: how many bytes below the budget the writing begins.
    """

    def __init__(
        self,
        pool: HostPool,
        disk: Store | None,
        begin_work: Callable[[Work], None],
        grave: Grave,
        *,
        number: int,
        early: int,
    ) -> None:
        self._pool = pool
        self.disk = disk
        self._begin_work = begin_work
        self._grave = grave
        self._number = number
        self._early = early
        self._held = WeakQueue[HostParcel](_is_in_a_room_only)  # oldest first
        self._spilling: deque[weakref.ref[HostParcel]] = deque()  # being written to disk
        self._spilled = WeakQueue[HostParcel](_has_a_room)  # in both: the room may go
        self._bytes_on_the_way_out = 0  # of rooms that are being written or are on disk too
        self.refusal = (
            ""  # why the disk took nothing when it was last asked, or had a write that failed
        )
        self._has_failed = False
        self.disk_peak_bytes = 0

    def add(self, parcel: HostParcel, *, at_once: bool) -> None:
        """A new parcel, in host memory alone. ``at_once``: it is to go on whatever room there is."""
        if not (at_once and self._spill(parcel)):
            self._held.append(parcel)
            self._spill_early()

    def _spill_early(self) -> None:
        budget = self._pool.budget
        if budget is None:
            return
        while self._pool.used_bytes - self._bytes_on_the_way_out > max(0, budget - self._early):
            if not self.spill_oldest():
                return

    def spill_oldest(self) -> bool:
        """Begin to write the oldest parcel that is in host memory alone."""
        while self._held:
            parcel = self._held.popleft()
            if parcel is not None:
                if self._spill(parcel):
                    return True
                self._held.appendleft(parcel)
                return False
        return False

    def _spill(self, parcel: HostParcel) -> bool:
        """Begin to write a parcel that is in host memory alone; whether there was room for it."""
        disk, left = self.disk, parcel.remains
        if disk is None or self._has_failed or left.room is None:
            return False
        try:
            slot = disk.reserve(parcel.nbytes)
        except StashIOError as error:
            self.refusal = f", and {error.strerror}"
            return False
        assert left.writing is not None
        work = Work(_write_down, left.writing, disk, slot, left.room.memory)
        left.work, left.slot = work, slot
        self._begin_work(work)
        self.disk_peak_bytes = max(self.disk_peak_bytes, disk.used_bytes)
        self._bytes_on_the_way_out += parcel.nbytes
        self._spilling.append(weakref.ref(parcel))
        return True

    def sweep(self) -> bool:
        """Look at the writes that have ended; whether there was one."""
        found = False
        while self._spilling:
            parcel = self._spilling[0]()
            work = parcel.remains.work if parcel is not None else None
            if work is not None and not work.done():
                break
            self._spilling.popleft()
            if parcel is not None:
                self._ended(parcel)
                found = True
        return found

    def _ended(self, parcel: HostParcel) -> None:
        left = parcel.remains
        assert left.work is not None and left.slot is not None and self.disk is not None
        failure = left.work.exception()
        if failure is None:
            left.work = None
            self._spilled.append(parcel)
            return
        self.refusal = f", and the disk failed: {failure}"
        self._has_failed = True
        slot, left.slot, left.work = left.slot, None, None
        self._bytes_on_the_way_out -= parcel.nbytes
        self.disk.release(slot)
        self._held.appendleft(parcel)

    def wait(self) -> bool:
        """Wait for the oldest write, if there is one."""
        while self._spilling:
            parcel = self._spilling[0]()
            if parcel is None or parcel.remains.work is None:
                self._spilling.popleft()
                continue
            parcel.remains.work.exception()
            return True
        return False

    def evict(self) -> HostRemains | None:
        """Take the room of the oldest parcel that is on disk too; to be buried."""
        while self._spilled:
            parcel = self._spilled.popleft()
            if parcel is None:
                continue
            left = HostRemains(self._grave, self._number, parcel.remains.room)
            left.brought = parcel.remains.brought
            parcel.remains.room = parcel.remains.brought = None
            self._bytes_on_the_way_out -= parcel.nbytes
            return left
        return None

    def release(self, slot: Slot, room: Room | None) -> None:
        """Give back a dead parcel's slot; ``room`` is what it had besides."""
        if room is not None:
            self._bytes_on_the_way_out -= room.memory.numel()
        if self.disk is not None:
            self.disk.release(slot)

    def forget(self) -> None:
        """No block is alive any more."""
        self._held.clear()
        self._spilled.clear()

    def restore(self, parcels: list[HostParcel], remains: list[HostRemains]) -> None:
        """Make the books anew from what there is: see ``_repair``.

        Args:
            parcels: that are alive, oldest first.
            remains: of all that has a room or a slot.
        """
        self._bytes_on_the_way_out = 0
        for left in remains:
            if left.room is not None and left.slot is not None:
                self._bytes_on_the_way_out += left.room.memory.numel()
        self._held = WeakQueue[HostParcel](_is_in_a_room_only)
        self._spilled = WeakQueue[HostParcel](_has_a_room)
        self._spilling.clear()
        for parcel in parcels:
            left = parcel.remains
            if left.work is not None:
                self._spilling.append(weakref.ref(parcel))
                if not left.work.done():
                    self._begin_work(left.work)
            elif left.room is not None:
                (self._held if left.slot is None else self._spilled).append(parcel)


def _is_in_a_room_only(parcel: HostParcel) -> bool:
    return parcel.remains.slot is None


def _has_a_room(parcel: HostParcel) -> bool:
    return parcel.remains.room is not None


def _write_down(copy: Copy, disk: Store, slot: Slot, memory: Tensor) -> None:
    """On a worker, which alone waits for the device: ``memory`` is the room's."""
    copy.wait()
    with profiled("write"):
        disk.write(slot, memory.data_ptr())
