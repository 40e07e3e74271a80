"""The disk tier of the CPU: slots in a store, the writes that fill them, and the reads.

A slot is reserved when a block is evicted. It is released when its backing is dead and nothing writes to it
any more. If the store is full, the slots of dead backings are released, and the reservation is tried once
more.
"""

from __future__ import annotations

import functools
import time
import weakref
from collections.abc import Callable
from typing import Any

from .._runtime.reclaim import ReclaimQueue
from .._runtime.trace import EventLog, profiled
from .._runtime.transfer import Stalls
from .._runtime.workers import Work
from .._saved.block import Block
from .._saved.placement import Load
from ..errors import StashFullError
from ..stores import Slot, Store
from ..stores._base import PAGE_BYTES
from ..stores._buffer_pool import BufferPool
from .backing import DiskBacking, DiskLoad, SegmentBacking
from .base import LowerTier

__all__ = ["DiskTier"]


class DiskTier(LowerTier):
    """Begins the writes to one store, and the reads. The caller holds the stash's lock.

    Args:
        store: holds the bytes.
        begin_work: hands a :class:`Work` to a worker.
        reclaim_queue: receives the cleanups of its backings.
        event_log: receives an event for each write, while there is a recording.
        pool: provides the memory for reads.
    """

    runs_ahead = False

    def __init__(
        self,
        store: Store,
        begin_work: Callable[[Work], None],
        reclaim_queue: ReclaimQueue,
        event_log: EventLog,
        pool: BufferPool,
    ) -> None:
        self.store = store
        self.begin_work = begin_work
        self.reclaim_queue = reclaim_queue
        self._event_log = event_log
        self._pool = pool
        self.disk_peak_bytes = 0
        self.open_segment: weakref.ref[SegmentBacking] | None = None
        """The segment that is being filled; its slot is reserved in full."""
        self.stalls = Stalls(event_log)

    @property
    def stall_seconds(self) -> float:  # type: ignore[override]
        """See :attr:`LowerTier.stall_seconds`."""
        return self.stalls.seconds

    @property
    def capacity_bytes(self) -> int | None:  # type: ignore[override]
        """See :attr:`LowerTier.capacity_bytes`."""
        return self.store.max_bytes

    def unfilled_bytes(self) -> int:
        """See :meth:`LowerTier.unfilled_bytes`."""
        segment = self.open_segment() if self.open_segment is not None else None
        return segment.nbytes - segment.filled if segment is not None else 0

    @property
    def used_bytes(self) -> int:
        """See :attr:`LowerTier.used_bytes`."""
        return self.store.used_bytes

    def begin(self, block: Block) -> tuple[DiskBacking, Work]:
        """See :meth:`LowerTier.begin`. The block gets a slot of its own."""
        slot = self.reserve(block.nbytes)
        backing = DiskBacking(self.store, slot, block.address % PAGE_BYTES, self.reclaim_queue)
        self.store.stage(slot, block.address)
        # The work owns the alias until it is done, so the memory outlives the write in any case.
        work = self.write_of(backing, block.address, block.placement.alias, block)
        self.begin_work(work)
        return backing, work

    def write_of(
        self, backing: DiskBacking, address: int, owner: object, block: Block | None = None
    ) -> Work:
        """Return the write of the bytes at ``address``. The caller has to begin it.

        The backing refers to the write before a worker gets it. Otherwise its slot might be released and
        reserved again while the write is still to come.

        Args:
            backing: the backing whose slot it fills.
            address: the address of the first byte.
            owner: keeps the memory alive until the write has ended.
            block: the block, if the bytes belong to a single one.
        """
        write: Callable[..., None] = _write
        if self._event_log.on:
            facts = block.facts if block is not None else (backing.nbytes,)
            write = functools.partial(_write_and_emit, self._event_log, facts)
        work = Work(write, self.store, backing.slot, address, owner)
        backing.cleanup.transfer = work
        return work

    def reserve(self, nbytes: int, *, is_open: bool = False) -> Slot:
        """Return a slot for ``nbytes``. Raises ``StashFullError`` if the store has no space.

        ``is_open``: the slot is filled in pieces, which are counted as they come.
        """
        try:
            slot = self.store.reserve(nbytes)
        except StashFullError:
            if not self._reclaim():
                raise
            slot = self.store.reserve(nbytes)
        if not is_open:
            self.count_peak()
        return slot

    def count_peak(self) -> None:
        """Update the peak of bytes on disk, including bytes that are still to be written."""
        used = self.store.used_bytes
        if used > self.disk_peak_bytes:
            unfilled = self.unfilled_bytes() if self.open_segment is not None else 0
            self.disk_peak_bytes = max(used - unfilled, self.disk_peak_bytes)

    def _reclaim(self) -> bool:
        """Release the slots of dead backings, and wait for writes to them. Return whether there was one."""
        found = False
        for cleanup in list(self.reclaim_queue):
            found |= cleanup.free_slot(self.store, self.stalls.wait)
        return found

    def fetch(self, backing: Any, *, ahead: bool) -> Load:
        """See :meth:`LowerTier.fetch`. A worker or the waiting thread reads the bytes to the pool's memory."""
        return DiskLoad(backing, self._pool.take(backing.skew + backing.nbytes))

    def resume(self, transfer: Any) -> None:
        """See :meth:`LowerTier.resume`."""
        self.begin_work(transfer)

    def restore(self, blocks: list[Block], cleanups: list[Any]) -> None:
        """See :meth:`LowerTier.restore`."""
        self._pool.restore()


def _write(store: Store, slot: Slot, address: int, owner: object) -> None:
    """Write a slot, on a worker. ``owner`` keeps the memory at ``address`` alive until the write has ended."""
    with profiled("write"):
        store.write(slot, address)


def _write_and_emit(
    event_log: EventLog,
    facts: tuple[int, int, str] | tuple[int],
    store: Store,
    slot: Slot,
    address: int,
    owner: object,
) -> None:
    began = time.perf_counter()
    _write(store, slot, address, owner)
    event_log.emit("write", *facts, began=began)
