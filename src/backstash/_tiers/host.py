"""The tier of pinned host memory: from a device to a pinned buffer, from there to disk, and back.

A block's copy to host memory begins early, and no thread waits for it; its backing owns the buffer
(``host_buffers``). The oldest buffers are written to disk (``host_writeback``). A block that is needed again
is copied from its buffer to the device. If it is on disk only, it is first read to a buffer.
"""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any

import torch
from torch import Tensor

from .._device.base import Copy, Device
from .._device.pinned_pool import PinnedPool
from .._runtime.critical_section import CriticalSection
from .._runtime.reclaim import ReclaimQueue
from .._runtime.trace import profiled
from .._runtime.workers import Work
from .._saved.block import Block
from .._saved.placement import Load
from ..stores import Slot, Store
from ..stores._buffer_pool import mapped
from .base import LowerTier
from .host_backing import BufferLoad, HostBacking, HostCleanup, HostLoad
from .host_buffers import HostBuffers
from .host_writeback import HostWriteback

__all__ = ["HostTier"]


class HostTier(LowerTier):
    """Moves the blocks of one device through host memory. The caller holds the stash's lock.

    Args:
        device: the device of the blocks.
        pool: the pinned memory.
        writeback: writes buffers to disk.
        reclaim_queue: receives the cleanups of backings and loads.
        section: the critical section of the stash.
        number: the number of the device in the stash.
    """

    runs_ahead = True
    # A layer's tensors may be larger than a window that suits the others. The device overlaps their copies
    # with computation only if the next copy begins while one block is in use.

    def __init__(
        self,
        device: Device,
        pool: PinnedPool,
        writeback: HostWriteback,
        reclaim_queue: ReclaimQueue,
        section: CriticalSection,
        *,
        number: int,
    ) -> None:
        self.device = device
        self.pool = pool
        self.writeback = writeback
        self.buffers = HostBuffers(pool, writeback)
        self._number = number
        self._reclaim_queue = reclaim_queue
        self._section = section
        self._coming: deque[weakref.ref[HostLoad]] = deque()  # reads from disk, ahead of need

    @property
    def capacity_bytes(self) -> int | None:  # type: ignore[override]
        """See :attr:`LowerTier.capacity_bytes`: pinned memory plus disk."""
        disk, pinned = self.writeback.disk, self.pool.budget
        if disk is None or pinned is None:
            return pinned
        return None if disk.max_bytes is None else pinned + disk.max_bytes

    @property
    def used_bytes(self) -> int:
        """See :attr:`LowerTier.used_bytes`: buffers plus disk."""
        disk = self.writeback.disk
        return self.pool.used_bytes + (disk.used_bytes if disk is not None else 0)

    @property
    def host_bytes(self) -> int:  # type: ignore[override]
        """See :attr:`LowerTier.host_bytes`."""
        return self.pool.used_bytes

    @property
    def host_peak_bytes(self) -> int:  # type: ignore[override]
        """See :attr:`LowerTier.host_peak_bytes`."""
        return self.pool.slab_peak_bytes

    @property
    def disk_peak_bytes(self) -> int:  # type: ignore[override]
        """See :attr:`LowerTier.disk_peak_bytes`."""
        return self.writeback.disk_peak_bytes

    @property
    def stall_seconds(self) -> float:  # type: ignore[override]
        """See :attr:`LowerTier.stall_seconds`."""
        return self.buffers.stall_seconds

    @property
    def note(self) -> str:  # type: ignore[override]
        """See :attr:`LowerTier.note`."""
        return self.pool.note

    def begin(self, block: Block) -> tuple[HostBacking, Copy]:
        """See :meth:`LowerTier.begin`. The block gets a buffer of its own."""
        alias = block.placement.alias
        assert alias is not None
        buffer = self.buffers.take(block.nbytes)
        try:
            copy = self.device.down(_bytes_of(alias), buffer.memory, block.stream)
        except Exception:  # an interrupted copy may have begun to fill the buffer
            self.pool.give(buffer)
            raise
        backing = HostBacking(
            self._reclaim_queue, self._number, buffer, copy.completion, self.writeback.disk
        )
        self.writeback.add(backing, at_once=block.tier == "disk")
        return backing, copy

    def fetch(self, backing: Any, *, ahead: bool) -> Load:
        """See :meth:`LowerTier.fetch`. A load ahead of need requires a free pinned buffer."""
        below: HostCleanup = backing.cleanup
        if below.buffer is not None:
            copy = self.device.up(below.buffer.memory, below.written)
            below.brought = copy.completion
            return BufferLoad(copy)
        buffer = self.buffers.take_idle(backing.nbytes)
        if buffer is None and ahead:
            raise MemoryError("no space in host memory to read ahead")
        # This memory is not pinned, so its copy does not overlap computation, but the bytes are needed now.
        staged = buffer.memory if buffer is not None else mapped(backing.nbytes)[: backing.nbytes]
        load = HostLoad(
            self.device,
            self._section,
            self._reclaim_queue,
            HostCleanup(self._reclaim_queue, self._number, buffer),
            Work(_read_up, self.writeback.disk, below.slot, staged),
            staged,
            ahead=ahead,
        )
        if buffer is not None:
            self.buffers.lend(load)
        else:
            load.cleanup.staged = staged
        if ahead:
            self._coming.append(weakref.ref(load))
        return load

    def poll(self) -> None:
        """See :meth:`LowerTier.poll`: copy to the device what has been read from disk."""
        self.device.sweep()
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
                return  # the thread that needs the block will try again

    def begin_waiting(self) -> None:
        """See :meth:`LowerTier.begin_waiting`."""
        self.device.begin()

    def sweep(self) -> None:
        """See :meth:`LowerTier.sweep`."""
        self.device.sweep()
        self.buffers.sweep()

    def defer(self, cleanup: HostCleanup) -> None:
        """See :meth:`LowerTier.defer`."""
        self.buffers.defer(cleanup)

    def forget(self) -> None:
        """See :meth:`LowerTier.forget`."""
        self.writeback.forget()

    def close(self) -> None:
        """See :meth:`LowerTier.close`."""
        self.buffers.close()
        self.device.sweep()

    def restore(self, blocks: list[Block], cleanups: list[Any]) -> None:
        """See :meth:`LowerTier.restore`."""
        self.device.finish()  # so that no copy writes to a buffer whose owner has died
        self.pool.restore()
        found = {id(block.placement.backing): block.placement.backing for block in blocks}
        backings: list[Any] = [each for each in found.values() if each is not None]
        self.writeback.restore(backings, cleanups)


def _bytes_of(alias: Tensor) -> Tensor:
    """Return the whole storage of ``alias`` as a flat tensor of bytes."""
    flat = torch.empty(0, dtype=torch.uint8, device=alias.device)
    return flat.set_(alias.untyped_storage())


def _read_up(disk: Store, slot: Slot, memory: Tensor) -> None:
    with profiled("read"):
        disk.read(slot, memory.data_ptr())
