"""The way through host memory: from a device to a pinned room, from there to disk, and back.

A block's copy down begins early and costs nobody a wait; its parcel has the room. When what the rooms hold
comes near the ``host`` budget, the oldest are written to disk from where they lie; a room whose bytes are
on disk too is given to whoever needs one next, and not before: until then it still serves reads.

A room outlives everything that reads or writes it. What a parcel leaves behind when it dies, or a reading
that nobody waits for, is *buried*: swept when its copies and its write have ended.
"""

from __future__ import annotations

import errno
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ._blocks import Block
from ._events import profiled
from ._queue import WeakQueue
from ._remains import Grave, HostRemains, at_death
from ._streams import Copy, Device
from ._workers import Work
from .errors import StashFullError, StashIOError
from .stores import Slot, Store
from .stores._host import HostPool, Room
from .stores._memory import mapped
from .units import format_bytes

_RESERVE_BYTES = 256 << 20  # of the device, not used for reading ahead

__all__ = ["HostParcel", "HostReading", "HostTier"]


class HostParcel:
    """A block's bytes below its device: in a room of host memory, on disk, or in both."""

    __slots__ = (
        "__del__",
        "__weakref__",
        "ahead",
        "blocks",
        "host",
        "nbytes",
        "reading",
        "remains",
        "skew",
        "wanted",
        "writing",
    )
    __del__: Callable[[], None]

    def __init__(self, host: HostTier, room: Room, copy: Copy) -> None:
        self.remains = HostRemains(host.grave, host.number, room)
        self.remains.down = copy
        self.__del__ = at_death(host.grave, self.remains)
        self.host = host
        self.nbytes = room.memory.numel()
        self.writing = copy  # down, into the room
        self.reading: HostReading | None = None
        self.skew = 0
        self.ahead = False
        self.blocks = 1
        self.wanted = 0

    @property
    def room(self) -> Room | None:
        """Where its bytes lie in host memory; ``None`` once they are on disk alone."""
        return self.remains.room

    @property
    def slot(self) -> Slot | None:
        """Where they lie on disk, or will when :attr:`spilling` has ended."""
        return self.remains.slot

    @property
    def spilling(self) -> Work | None:
        """The write to disk, from its beginning until somebody has looked at its end."""
        return self.remains.work

    @property
    def held(self) -> int:
        """Bytes that the read-ahead budget counts for it."""
        return self.remains.held

    @held.setter
    def held(self, nbytes: int) -> None:
        self.remains.held = nbytes

    @property
    def tier(self) -> str:
        """Where its bytes are."""
        return "host" if self.room is not None else "disk"

    def let_go(self) -> None:
        """Drop the memory that was brought back; the room or the disk still has the bytes."""
        self.reading = None
        self.ahead = False


class HostReading:
    """Bytes on their way back to the device: from a room at once, or first from disk to one.

    ``room`` is given back when it is no longer needed.
    """

    __slots__ = (
        "__del__",
        "__weakref__",
        "_ahead",
        "_read",
        "_staged",
        "host",
        "needs_worker",
        "remains",
    )
    __del__: Callable[[], None]

    def __init__(
        self,
        host: HostTier,
        slot: Slot | None,
        staged: Tensor,
        room: Room | None,
        *,
        ahead: bool = False,
    ) -> None:
        self.remains = HostRemains(host.grave, host.number, room)
        self.__del__ = at_death(host.grave, self.remains)
        self._read = self.remains.work = Work(_read_up, host.disk, slot, staged)
        self.host = host
        self._ahead = ahead  # a worker reads it
        self._staged = staged
        self.needs_worker = slot is not None

    @property
    def arrival(self) -> Copy | None:
        """The copy to the device, once it has begun."""
        return self.remains.brought

    @property
    def memory(self) -> Tensor:
        """The bytes on the device, once :meth:`exception` has answered ``None``."""
        assert self.arrival is not None
        return self.arrival.memory

    def run(self) -> bool:
        """Read from disk, on whichever thread comes first; whether it was this one."""
        return self._read.run()

    def send(self, after: Copy | None = None) -> None:
        """Begin the copy to the device, if it has not begun. The caller holds the lock."""
        if self.arrival is None:
            self.remains.brought = self.host.device.up(self._staged, after)

    def arrive(self) -> bool:
        """Wait until it is on the device, where that can be waited for. The caller holds the lock.

        Not for a read that another thread makes itself, which may be waiting for the caller.
        """
        if self.arrival is None:
            if not self._ahead or self._read.exception() is not None:
                return False
            try:
                self.send()
            except torch.OutOfMemoryError:
                return False
            assert self.arrival is not None
        self.arrival.wait()
        return True

    def take_room(self) -> Room | None:
        """The room that it read to, once its copy to the device has ended: it is not needed any more."""
        room = self.remains.room
        if room is None or self.arrival is None or not self.arrival.ended():
            return None
        self.remains.room = None
        return room

    def has_come(self) -> bool:
        """Whether the disk has been read, without an error."""
        return self._read.done() and self._read.exception() is None

    def exception(self) -> BaseException | None:
        """Wait for the disk and begin the copy; the error, if there was one. The host waits for no copy."""
        error = self._read.exception()
        if error is None:
            with self.host.lock:
                self.send()
        return error


class HostTier:
    """Carries the blocks of one device through host memory. The caller holds the stash's lock.

    Args:
        device: whose blocks.
        pool: the rooms.
        disk: what is below, or ``None``.
        begin: hands a piece of work to a worker.
        grave: where what dies is appended.
        lock: the stash's.
        number: of its side.
        early: how many bytes below the budget the writing to disk begins.
    """

    def __init__(
        self,
        device: Device,
        pool: HostPool,
        disk: Store | None,
        begin: Callable[[Work], None],
        grave: Grave,
        lock: Any,
        *,
        number: int,
        early: int,
    ) -> None:
        self.number = number
        self.device = device
        self.pool = pool
        self.disk = disk
        self.grave = grave
        self.lock = lock
        self._begin = begin
        self._early = early
        self._held = WeakQueue[HostParcel](_is_in_a_room_only)  # oldest first
        self._spilling: deque[weakref.ref[HostParcel]] = deque()  # being written to disk
        self._spilled = WeakQueue[HostParcel](_has_a_room)  # in both: the room may go
        self._buried: deque[HostRemains] = deque()
        self._staging: deque[weakref.ref[HostReading]] = deque()  # with a room that is on disk too
        self._coming: deque[weakref.ref[HostReading]] = deque()  # from disk, ahead of need
        self._disk_refuses = ""
        self._disk_has_failed = False
        self._unasked_bytes = 0  # that may be taken on the device before it is asked again
        self._largest_bytes = 0  # of all blocks so far
        self._unlooked_bytes = (
            0  # that may be saved before the device is asked whether it runs short
        )
        self._bytes_on_the_way_out = 0  # of rooms that are being written or are on disk too
        self.stall_seconds = 0.0
        self.disk_peak_bytes = 0

    reads_one_beyond = True
    """A layer's tensors may be larger than any window that is sensible for others; the device hides their
    copies only if the next begins while one is used."""

    # What the way down looks at.

    @property
    def used_bytes(self) -> int:
        """Bytes of rooms and of the disk."""
        return self.pool.used_bytes + (self.disk.used_bytes if self.disk is not None else 0)

    def begin(self, block: Block) -> HostParcel:
        """Begin to copy ``block`` to a room of its own.

        Raises ``StashFullError`` where there is none and none can be made; nothing has begun then.
        """
        assert block.alias is not None
        room = self._room(block.nbytes)
        try:
            copy = self.device.down(_bytes_of(block.alias), room.memory, block.stream)
        except Exception:  # after an interrupt the copy may have begun, and fills the room
            self.pool.give(room)
            raise
        parcel = HostParcel(self, room, copy)
        if not (block.goes_on and self._spill(parcel)):
            self._held.append(parcel)
            self._spill_early()
        return parcel

    # What the way up asks for.

    def fetch(self, parcel: HostParcel, *, ahead: bool) -> HostReading:
        """Begin to bring a parcel's bytes back.

        Raises ``MemoryError`` (ahead of need only) where no room is to be had, and
        ``torch.OutOfMemoryError``; nothing has begun then.
        """
        if parcel.room is not None:
            reading = HostReading(self, None, parcel.room.memory, None)
            reading.run()
            reading.send(after=parcel.writing)
            parcel.remains.brought = reading.arrival
            return reading
        room = self._idle_room(parcel.nbytes)
        if room is None and ahead:
            raise MemoryError("no room in host memory to read ahead")
        # Not pinned, so its copy does not run beside compute; but what is needed now is needed.
        staged = room.memory if room is not None else mapped(parcel.nbytes)[: parcel.nbytes]
        reading = HostReading(self, parcel.slot, staged, room, ahead=ahead)
        if room is not None:
            self._staging.append(weakref.ref(reading))
        if ahead:
            self._coming.append(weakref.ref(reading))
        return reading

    def poll(self) -> None:
        """Send on to the device what has come from disk."""
        for _ in range(len(self._coming)):
            ref = self._coming.popleft()
            reading = ref()
            if reading is None or reading.arrival is not None:
                continue
            if not reading.has_come():
                self._coming.append(ref)
                continue
            try:
                reading.send()
            except torch.OutOfMemoryError:
                return  # whoever needs it will try again

    def has_memory(self, nbytes: int) -> bool:
        """Whether the device can spare ``nbytes`` for bytes that are not needed yet."""
        self._unasked_bytes -= nbytes
        if self._unasked_bytes < 0:  # not asked each time: the driver takes its time
            self._unasked_bytes = (self.device.free_bytes() - _RESERVE_BYTES) // 2 - nbytes
        return self._unasked_bytes >= 0

    def shortage(self, nbytes: int, leaving: int) -> int:
        """How many bytes the device lacks for what comes next, beside those that are ``leaving`` it.

        What comes next is taken to need four times the largest block so far: an operation's inputs and
        outputs, and what it works with. Asked when half of what was free has been saved since.
        """
        self._largest_bytes = max(self._largest_bytes, nbytes)
        self._unlooked_bytes -= nbytes
        if self._unlooked_bytes >= 0:
            return 0
        spare = self.device.free_bytes() + leaving - 4 * self._largest_bytes
        self._unlooked_bytes = max(0, spare) // 2
        return max(0, -spare)

    # Rooms.

    def bury(self, remains: HostRemains) -> None:
        """Take what died; its room is given back when nothing uses it."""
        self._buried.append(remains)
        # Mostly they come to rest in this order. The others are looked at when a room is needed: a host
        # that runs ahead of its device may have buried hundreds, and each look asks the driver.
        while self._buried and self._buried[0].at_rest():
            self._give_back(self._buried.popleft())

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
        self.device.finish()  # so that no copy runs into a room that nobody has any more
        self.pool.settle()
        self._bytes_on_the_way_out = 0
        for left in remains:
            if left.room is not None and left.slot is not None:
                self._bytes_on_the_way_out += left.room.memory.numel()
        self._held = WeakQueue[HostParcel](_is_in_a_room_only)
        self._spilled = WeakQueue[HostParcel](_has_a_room)
        self._spilling.clear()
        for parcel in parcels:
            if parcel.spilling is not None:
                self._spilling.append(weakref.ref(parcel))
                if not parcel.spilling.done():
                    self._begin(parcel.spilling)
            elif parcel.room is not None:
                (self._held if parcel.slot is None else self._spilled).append(parcel)

    def close(self) -> None:
        """Give back what is at rest. What live graphs hold stays until they go."""
        for remains in self._buried:
            remains.wait()
        self.sweep()
        self.pool.trim()

    def _room(self, nbytes: int) -> Room:
        if not self.pool.could_hold(nbytes):  # not even if all others went
            raise self._full(nbytes)
        while True:
            room = self._idle_room(nbytes)
            if room is not None:
                return room
            if not (self._wait_for_one() or self._spill_oldest()):
                raise self._full(nbytes)

    def _full(self, nbytes: int) -> StashFullError:
        remedy = ": raise host=" if self.disk is not None else ": raise host=, or give disk="
        if self.pool.refusal:
            remedy = f" ({self.pool.refusal}): free memory, or lower host="
        return StashFullError(
            errno.ENOSPC,
            f"host memory has no room for {format_bytes(nbytes)} beside the "
            f"{format_bytes(self.pool.used_bytes)} it holds{self._disk_refuses or remedy}",
        )

    def _idle_room(self, nbytes: int) -> Room | None:
        """A room that is free, or can be freed without a wait."""
        room = self.pool.take(nbytes, may_grow=False)
        if room is None:
            self.sweep()  # before more memory is pinned
            room = self.pool.take(nbytes)
        while room is None and (self.sweep() or self._evict()):
            room = self.pool.take(nbytes)
        return room

    def sweep(self) -> bool:
        """Look at what has ended; whether a room or a choice came of it."""
        self.pool.settle()
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
                self.pool.give(room)
                found = True
            elif reading is not None:
                self._staging.append(ref)
        while self._spilling:
            parcel = self._spilling[0]()
            if parcel is not None and parcel.spilling is not None and not parcel.spilling.done():
                break
            self._spilling.popleft()
            if parcel is not None:
                self._spill_ended(parcel)
                found = True
        return found

    def _give_back(self, remains: HostRemains) -> None:
        room, slot, remains.room, remains.slot = remains.room, remains.slot, None, None
        if room is not None:
            self.pool.give(room)
            if slot is not None:
                self._bytes_on_the_way_out -= room.memory.numel()
        if slot is not None and self.disk is not None:
            self.disk.release(slot)

    def _spill_ended(self, parcel: HostParcel) -> None:
        assert parcel.spilling is not None and parcel.slot is not None and self.disk is not None
        failure = parcel.spilling.exception()
        if failure is None:
            parcel.remains.work = None
            self._spilled.append(parcel)
            return
        self._disk_refuses = f", and the disk failed: {failure}"
        self._disk_has_failed = True
        slot, parcel.remains.slot, parcel.remains.work = parcel.slot, None, None
        self._bytes_on_the_way_out -= parcel.nbytes
        self.disk.release(slot)
        self._held.appendleft(parcel)

    def _evict(self) -> bool:
        """Take the room of the oldest parcel that is on disk too."""
        while self._spilled:
            parcel = self._spilled.popleft()
            if parcel is None or parcel.room is None:
                continue
            left = HostRemains(self.grave, self.number, parcel.room)
            left.brought = parcel.remains.brought
            parcel.remains.room = parcel.remains.brought = None
            self._buried.append(left)
            self._bytes_on_the_way_out -= parcel.nbytes
            return True
        return False

    def _wait_for_one(self) -> bool:
        """Wait for the oldest thing that will free a room, if there is one."""
        began = time.perf_counter()
        try:
            while self._spilling:
                parcel = self._spilling[0]()
                if parcel is None or parcel.spilling is None:
                    self._spilling.popleft()
                    continue
                parcel.spilling.exception()
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

    # Onward to disk.

    def _spill_early(self) -> None:
        budget = self.pool.budget
        if budget is None:
            return
        while self.pool.used_bytes - self._bytes_on_the_way_out > max(0, budget - self._early):
            if not self._spill_oldest():
                return

    def _spill_oldest(self) -> bool:
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
        disk, room = self.disk, parcel.room
        if disk is None or self._disk_has_failed or room is None:
            return False
        try:
            slot = disk.reserve(parcel.nbytes)
        except StashIOError as error:
            self._disk_refuses = f", and {error.strerror}"
            return False
        work = Work(_write_down, parcel.writing, disk, slot, room.memory)
        parcel.remains.work, parcel.remains.slot = work, slot
        self._begin(work)
        self.disk_peak_bytes = max(self.disk_peak_bytes, disk.used_bytes)
        self._bytes_on_the_way_out += parcel.nbytes
        self._spilling.append(weakref.ref(parcel))
        return True


def _read_up(disk: Store | None, slot: Slot | None, memory: Tensor) -> None:
    """Read from disk; nothing to do for what is in host memory."""
    if disk is not None and slot is not None:
        with profiled("read"):
            disk.read(slot, memory.data_ptr())


def _is_in_a_room_only(parcel: HostParcel) -> bool:
    return parcel.slot is None


def _has_a_room(parcel: HostParcel) -> bool:
    return parcel.room is not None


def _bytes_of(alias: Tensor) -> Tensor:
    """The whole storage of ``alias`` as a flat tensor of bytes."""
    flat = torch.empty(0, dtype=torch.uint8, device=alias.device)
    return flat.set_(alias.untyped_storage())


def _write_down(copy: Copy, disk: Store, slot: Slot, memory: Tensor) -> None:
    """On a worker, which alone waits for the device: ``memory`` is the room's."""
    copy.wait()
    with profiled("write"):
        disk.write(slot, memory.data_ptr())
