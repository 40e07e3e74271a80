"""The way through host memory: from a device to a pinned room, from there to disk, and back.

A block's copy down begins early and costs nobody a wait; its parcel has the room (``_buffers``). The oldest
go on to disk (``_writeback``). What is needed again is copied up from its room, or read to one first.
"""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any

import torch
from torch import Tensor

from .._device.base import Device
from .._device.pinned_pool import PinnedPool
from .._runtime.reclaim import HostCleanup, ReclaimQueue
from .._saved.block import Block
from ..stores import Store
from ..stores._buffer_pool import mapped
from .host_backing import HostBacking, HostLoad
from .host_buffers import HostBuffers
from .host_writeback import HostWriteback

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
        pool: PinnedPool,
        writeback: HostWriteback,
        reclaim_queue: ReclaimQueue,
        lock: Any,
        *,
        number: int,
    ) -> None:
        self.number = number
        self.device = device
        self.pool = pool
        self.writeback = writeback
        self.buffers = HostBuffers(pool, writeback)
        self.reclaim_queue = reclaim_queue
        self.lock = lock
        self._coming: deque[weakref.ref[HostLoad]] = deque()  # from disk, ahead of need

    reads_one_beyond = True
    """A layer's tensors may be larger than any window that is sensible for others; the device hides their
    copies only if the next begins while one is used."""

    @property
    def disk(self) -> Store | None:
        """What is below."""
        return self.writeback.disk

    @property
    def used_bytes(self) -> int:
        """Bytes of rooms and of the disk."""
        return self.pool.used_bytes + (self.disk.used_bytes if self.disk is not None else 0)

    def begin(self, block: Block) -> HostBacking:
        """Begin to copy ``block`` to a room of its own.

        Raises ``StashFullError`` where there is none and none can be made; nothing has begun then.
        """
        assert block.alias is not None
        buffer = self.buffers.take(block.nbytes)
        try:
            copy = self.device.down(_bytes_of(block.alias), buffer.memory, block.stream)
        except Exception:  # after an interrupt the copy may have begun, and fills the room
            self.pool.give(buffer)
            raise
        backing = HostBacking(self.reclaim_queue, self.number, buffer, copy)
        self.writeback.add(backing, at_once=block.goes_on)
        return backing

    def fetch(self, backing: HostBacking, *, ahead: bool) -> HostLoad:
        """Begin to bring a parcel's bytes back.

        Raises ``MemoryError`` (ahead of need only) where no room is to be had, and
        ``torch.OutOfMemoryError``; nothing has begun then.
        """
        left = backing.cleanup
        if left.buffer is not None:
            load = HostLoad(self, None, left.buffer.memory, None, ahead=ahead)
            load.run()
            load.send(after=left.writing)
            left.brought = load.arrival
            return load
        buffer = self.buffers.take_idle(backing.nbytes)
        if buffer is None and ahead:
            raise MemoryError("no room in host memory to read ahead")
        # Not pinned, so its copy does not run beside compute; but what is needed now is needed.
        staged = buffer.memory if buffer is not None else mapped(backing.nbytes)[: backing.nbytes]
        load = HostLoad(self, left.slot, staged, buffer, ahead=ahead)
        if buffer is not None:
            self.buffers.lend(load)
        if ahead:
            self._coming.append(weakref.ref(load))
        return load

    def poll(self) -> None:
        """Send on to the device what has come from disk."""
        for _ in range(len(self._coming)):
            ref = self._coming.popleft()
            load = ref()
            if load is None:
                continue
            if not load.has_come():
                self._coming.append(ref)
                continue
            try:
                load.send()
            except torch.OutOfMemoryError:
                return  # whoever needs it will try again

    def restore(self, backings: list[HostBacking], cleanup: list[HostCleanup]) -> None:
        """Make the books anew from what there is: see ``_session``.

        Args:
            parcels: that are alive, oldest first.
            remains: of all that has a room or a slot.
        """
        self.device.finish()  # so that no copy runs into a room that nobody has any more
        self.pool.settle()
        self.writeback.restore(backings, cleanup)


def _bytes_of(alias: Tensor) -> Tensor:
    """The whole storage of ``alias`` as a flat tensor of bytes."""
    flat = torch.empty(0, dtype=torch.uint8, device=alias.device)
    return flat.set_(alias.untyped_storage())
