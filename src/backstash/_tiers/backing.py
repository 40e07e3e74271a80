"""The backings of blocks on disk: one slot of a store for a large block, or for a segment of small blocks.

A large block has a backing of its own, written directly from the tensor's memory. Small blocks are copied into
a *segment* when they are evicted, so their memory is free at once, and the segment is written when it is full.
A write of 64 KiB costs nearly as much as one of 4 MiB.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .._runtime.reclaim import Cleanup, Ledger, ReclaimQueue
from .._runtime.trace import profiled
from .._runtime.workers import Work
from .._saved.placement import Backing, Load
from .._saved.view import ALIGNMENT_BYTES
from ..stores import Slot, Store
from ..stores._buffer_pool import own_memory

__all__ = ["DiskBacking", "DiskCleanup", "DiskLoad", "SegmentBacking"]


class DiskLoad(Load):
    """A read from a store to memory. It is done when :meth:`exception` returns."""

    __slots__ = ("memory", "work")

    arrival = None
    work: Work

    def __init__(self, backing: DiskBacking, memory: Tensor) -> None:
        self.memory = memory
        # The work must not refer to the backing, which owns this load.
        address = memory.data_ptr() + backing.skew
        self.work = Work(_read, backing.store, backing.slot, address, memory)

    @property
    def is_ready(self) -> bool:
        """See :attr:`Load.is_ready`."""
        return self.work.finished and self.work.error is None

    def exception(self) -> BaseException | None:
        """See :meth:`Load.exception`."""
        return self.work.exception()


def _read(store: Store, slot: Slot, address: int, owner: Tensor) -> None:
    """Read a slot. ``owner`` keeps the memory at ``address`` alive until the read has ended."""
    with profiled("read"):
        store.read(slot, address)


class DiskCleanup(Cleanup):
    """What remains of a dead backing: its slot in the store, and the write that may still fill it."""

    __slots__ = ("inflight_bytes", "slot", "store", "transfer")

    def __init__(self, reclaim_queue: ReclaimQueue, store: Store, slot: Slot) -> None:
        self.mark = reclaim_queue.mark
        self.number = 0  # the CPU: only its blocks have a DiskCleanup
        self.loaded_bytes = 0
        self.store = store
        self.slot: Slot | None = slot
        self.transfer: Work | None = None
        self.inflight_bytes = 0  # bytes counted as in flight although their write has not begun

    may_be_busy = True

    def is_busy(self) -> bool:
        """See :meth:`Cleanup.is_busy`: the write needs the slot until it has ended."""
        transfer = self.transfer
        return transfer is not None and not (transfer.finished or transfer.cancel())

    def free_slot(self, store: object, wait: Callable[[Any], object]) -> bool:
        """See :meth:`Cleanup.free_slot`."""
        if self.store is not store or self.slot is None:
            return False
        if self.transfer is not None and not self.transfer.cancel():
            wait(self.transfer)
        slot, self.slot = self.slot, None
        if slot is not None:
            self.store.release(slot)
        return slot is not None

    def settle(self, ledger: Ledger) -> None:
        """See :meth:`Cleanup.settle`."""
        inflight, self.inflight_bytes, slot, self.slot = self.inflight_bytes, 0, self.slot, None
        if inflight:
            ledger.subtract(inflight_bytes=inflight)
        if slot is not None:
            self.store.release(slot)


class DiskBacking(Backing):
    """A slot in a store, the write that fills it and, while needed, the memory that it was loaded to."""

    __slots__ = ("__del__", "cleanup", "slot", "store")
    __del__: Callable[[], None]

    tier = "disk"

    def __init__(self, store: Store, slot: Slot, skew: int, reclaim_queue: ReclaimQueue) -> None:
        self.cleanup: DiskCleanup = DiskCleanup(reclaim_queue, store, slot)
        self.__del__ = functools.partial(reclaim_queue.append, self.cleanup)
        reclaim_queue.leased.add(self.cleanup)
        self.store = store
        self.slot = slot
        # The block's address modulo a page; the memory that it is loaded to has the same alignment.
        self.skew = skew
        self.nbytes = slot.nbytes
        self.load: Load | None = None
        self.ahead = False
        self.blocks = 1
        self.wanted = 0

    def storage_for(
        self, offset: int, address: int, nbytes: int, memory: Tensor
    ) -> tuple[Tensor, int]:
        """See :meth:`Backing.storage_for`: returns the memory itself."""
        self.wanted = 0
        return memory, self.skew

    def read_separately(
        self, offset: int, address: int, nbytes: int, device: torch.device
    ) -> tuple[Tensor, int]:
        """See :meth:`Backing.read_separately`."""
        memory, low = own_memory(self.nbytes, self.skew)
        self.store.read(self.slot, memory.data_ptr() + low)
        return memory, low


class SegmentBacking(DiskBacking):
    """Many small blocks in one slot. ``buffer`` holds their bytes until the write has completed."""

    __slots__ = ("address", "buffer", "filled")

    is_shared = True

    def __init__(
        self, store: Store, slot: Slot, buffer: Tensor, reclaim_queue: ReclaimQueue
    ) -> None:
        super().__init__(store, slot, 0, reclaim_queue)
        self.buffer: Tensor | None = buffer
        self.address = buffer.data_ptr()
        self.blocks = 0
        self.filled = 0

    def place(self, address: int, nbytes: int) -> int | None:
        """Return the offset where ``nbytes`` fit, aligned as ``address`` is; ``None`` if they do not fit."""
        start = -(-self.filled // ALIGNMENT_BYTES) * ALIGNMENT_BYTES + address % ALIGNMENT_BYTES
        return start if start + nbytes <= self.nbytes else None

    def storage_for(
        self, offset: int, address: int, nbytes: int, memory: Tensor
    ) -> tuple[Tensor, int]:
        """See :meth:`Backing.storage_for`.

        Returns a copy: the caller may modify it, and the segment holds other blocks, too.
        """
        self.wanted -= 1
        return self.cut(offset, address, nbytes, memory)

    def cut(self, offset: int, address: int, nbytes: int, memory: Tensor) -> tuple[Tensor, int]:
        """Like :meth:`storage_for`, but do not count the block as taken."""
        low = address % ALIGNMENT_BYTES
        size = -(-(low + nbytes) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        root = torch.empty(size, dtype=torch.uint8, device="cpu")
        ctypes.memmove(root.data_ptr() + low, memory.data_ptr() + offset, nbytes)
        return root, low

    def read_separately(
        self, offset: int, address: int, nbytes: int, device: torch.device
    ) -> tuple[Tensor, int]:
        """See :meth:`Backing.read_separately`: reads the whole segment."""
        memory, low = self.buffer, 0  # read once: another thread may complete the write
        if memory is None:
            memory, low = super().read_separately(offset, address, nbytes, device)
        return self.cut(low + offset, address, nbytes, memory)
