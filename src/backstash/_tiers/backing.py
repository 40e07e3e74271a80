"""Parcels: what a store moves in one piece.

A large block is a parcel of its own, written straight from the tensor's memory. Small blocks travel
together in a *segment*: they are copied into it one after another when they leave, so their sources are
free at once, and the segment is written when it is full. A 64 KiB write costs nearly what a 4 MiB one does.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from .._runtime.reclaim import DiskCleanup, ReclaimQueue, on_death
from .._runtime.trace import profiled
from .._runtime.workers import Work
from ..stores import Slot, Store

__all__ = ["DiskBacking", "DiskLoad", "SegmentBacking"]


class DiskLoad:
    """A parcel's bytes on their way back to memory; done when :meth:`exception` answers."""

    __slots__ = ("_address", "_slot", "_store", "_work", "memory")

    arrival = None  # no stream has to be told to wait for it
    needs_worker = True

    def __init__(self, backing: DiskBacking, memory: Tensor) -> None:
        # Not the parcel itself, which owns this.
        self._store = backing.store
        self._slot = backing.slot
        self._address = memory.data_ptr() + backing.skew
        self.memory = memory
        self._work = Work(_read, self._store, self._slot, self._address, memory)

    def run(self) -> bool:
        """Read, on whichever thread comes first; whether it was this one."""
        return self._work.run()

    def exception(self) -> BaseException | None:
        """Wait for the end; the error, if there was one."""
        return self._work.exception()


def _read(store: Store, slot: Slot, address: int, owner: Tensor) -> None:
    """``owner`` keeps the memory at ``address`` alive until the read has ended."""
    with profiled("read"):
        store.read(slot, address)


class DiskBacking:
    """A slot in a store, the write that fills it and, while needed, the memory it was read back to."""

    __slots__ = (
        "__del__",
        "__weakref__",
        "ahead",
        "blocks",
        "cleanup",
        "load",
        "nbytes",
        "skew",
        "slot",
        "store",
        "wanted",
    )
    __del__: Callable[[], None]

    tier = "disk"

    def __init__(self, store: Store, slot: Slot, skew: int, reclaim_queue: ReclaimQueue) -> None:
        self.cleanup = DiskCleanup(reclaim_queue, store, slot)
        self.__del__ = on_death(reclaim_queue, self.cleanup)
        self.store = store
        self.slot = slot
        self.skew = (
            skew  # the source's address modulo 4096: the memory it comes back to has the same
        )
        self.nbytes = slot.nbytes
        self.load: DiskLoad | None = None  # while what was read is wanted
        self.ahead = False  # whether it was asked for before anyone needed it
        self.blocks = 1  # how many blocks it carries
        self.wanted = 0  # how many of them have not come for what was read

    def let_go(self) -> None:
        """Drop the memory that was read back; the store still has the bytes."""
        self.load = None
        self.ahead = False


class SegmentBacking(DiskBacking):
    """Many small blocks in one parcel; ``buffer`` has their bytes until they have landed."""

    __slots__ = ("address", "buffer", "filled")

    def __init__(
        self, store: Store, slot: Slot, buffer: Tensor, reclaim_queue: ReclaimQueue
    ) -> None:
        super().__init__(store, slot, 0, reclaim_queue)
        self.buffer: Tensor | None = buffer
        self.address = buffer.data_ptr()
        self.blocks = 0
        self.filled = 0

    def place(self, address: int, nbytes: int) -> int | None:
        """Where ``nbytes`` from ``address`` fit, with the same residue modulo 64; ``None`` when they do not."""
        start = -(-self.filled // 64) * 64 + address % 64
        return start if start + nbytes <= self.nbytes else None
