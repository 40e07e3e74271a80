"""The way through host memory: from a device to a pinned room, from there to disk, and back.

A block's copy down begins early and costs nobody a wait; its parcel has the room (``_rooms``). The oldest
go on to disk (``_spills``). What is needed again is copied up from its room, or read to one first.
"""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any

import torch
from torch import Tensor

from ._blocks import Block
from ._host_parcels import HostParcel, HostReading
from ._remains import Grave, HostRemains
from ._rooms import Rooms
from ._spills import Spills
from ._streams import Device
from .stores import Store
from .stores._host import HostPool
from .stores._memory import mapped

__all__ = ["HostTier"]


class HostTier:
    """Carries the blocks of one device through host memory. The caller holds the stash's lock.

    Args:
        device: whose blocks.
        pool: the memory.
        spills: what goes on to disk.
        grave: where what dies is appended.
        lock: the stash's.
        number: of its side.
    """

    def __init__(
        self,
        device: Device,
        pool: HostPool,
        spills: Spills,
        grave: Grave,
        lock: Any,
        *,
        number: int,
    ) -> None:
        self.number = number
        self.device = device
        self.pool = pool
        self.spills = spills
        self.rooms = Rooms(pool, spills)
        self.grave = grave
        self.lock = lock
        self._coming: deque[weakref.ref[HostReading]] = deque()  # from disk, ahead of need

    reads_one_beyond = True
    """A layer's tensors may be larger than any window that is sensible for others; the device hides their
    copies only if the next begins while one is used."""

    @property
    def disk(self) -> Store | None:
        """What is below."""
        return self.spills.disk

    @property
    def used_bytes(self) -> int:
        """Bytes of rooms and of the disk."""
        return self.pool.used_bytes + (self.disk.used_bytes if self.disk is not None else 0)

    def begin(self, block: Block) -> HostParcel:
        """Begin to copy ``block`` to a room of its own.

        Raises ``StashFullError`` where there is none and none can be made; nothing has begun then.
        """
        assert block.alias is not None
        room = self.rooms.take(block.nbytes)
        try:
            copy = self.device.down(_bytes_of(block.alias), room.memory, block.stream)
        except Exception:  # after an interrupt the copy may have begun, and fills the room
            self.pool.give(room)
            raise
        parcel = HostParcel(self.grave, self.number, room, copy)
        self.spills.add(parcel, at_once=block.goes_on)
        return parcel

    def fetch(self, parcel: HostParcel, *, ahead: bool) -> HostReading:
        """Begin to bring a parcel's bytes back.

        Raises ``MemoryError`` (ahead of need only) where no room is to be had, and
        ``torch.OutOfMemoryError``; nothing has begun then.
        """
        left = parcel.remains
        if left.room is not None:
            reading = HostReading(self, None, left.room.memory, None, ahead=ahead)
            reading.run()
            reading.send(after=left.writing)
            left.brought = reading.arrival
            return reading
        room = self.rooms.take_idle(parcel.nbytes)
        if room is None and ahead:
            raise MemoryError("no room in host memory to read ahead")
        # Not pinned, so its copy does not run beside compute; but what is needed now is needed.
        staged = room.memory if room is not None else mapped(parcel.nbytes)[: parcel.nbytes]
        reading = HostReading(self, left.slot, staged, room, ahead=ahead)
        if room is not None:
            self.rooms.lend(reading)
        if ahead:
            self._coming.append(weakref.ref(reading))
        return reading

    def poll(self) -> None:
        """Send on to the device what has come from disk."""
        for _ in range(len(self._coming)):
            ref = self._coming.popleft()
            reading = ref()
            if reading is None:
                continue
            if not reading.has_come():
                self._coming.append(ref)
                continue
            try:
                reading.send()
            except torch.OutOfMemoryError:
                return  # whoever needs it will try again

    def restore(self, parcels: list[HostParcel], remains: list[HostRemains]) -> None:
        """Make the books anew from what there is: see ``_repair``.

        Args:
            parcels: that are alive, oldest first.
            remains: of all that has a room or a slot.
        """
        self.device.finish()  # so that no copy runs into a room that nobody has any more
        self.pool.settle()
        self.spills.restore(parcels, remains)


def _bytes_of(alias: Tensor) -> Tensor:
    """The whole storage of ``alias`` as a flat tensor of bytes."""
    flat = torch.empty(0, dtype=torch.uint8, device=alias.device)
    return flat.set_(alias.untyped_storage())
