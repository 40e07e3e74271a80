"""From the CPU's memory to a store: slots, the writes that fill them, and the reads that bring them back.

A slot is taken when a block goes, and given back when its backing has died and nothing writes to it any more.
A store without room is asked once more, when the slots of dead backings have been taken back.
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
        store: where the bytes go.
        begin_work: hands a piece of work to a worker.
        reclaim_queue: gets the cleanups of its backings.
        event_log: gets each write, where somebody records.
        pool: the memory that bytes are read back to.
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
        """What is being filled, with a slot that is reserved for all of it."""
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
        """See :meth:`LowerTier.begin`. To a slot of the block's own."""
        slot = self.reserve(block.nbytes)
        backing = DiskBacking(self.store, slot, block.address % PAGE_BYTES, self.reclaim_queue)
        self.store.stage(slot, block.address)
        # The work owns the alias until it is done: the memory outlives the write, whatever dies.
        work = self.write_of(backing, block.address, block.placement.alias, block)
        self.begin_work(work)
        return backing, work

    def write_of(
        self, backing: DiskBacking, address: int, owner: object, block: Block | None = None
    ) -> Work:
        """The write of the bytes at ``address``, which the caller has to begin.

        The backing knows of it before a worker does: else its slot might be given away and written later.

        Args:
            backing: whose slot it fills.
            address: of the first byte.
            owner: keeps the memory alive until the write has ended.
            block: whose bytes they are, if they are of one.
        """
        write: Callable[..., None] = _write
        if self._event_log.on:
            facts = block.facts if block is not None else (backing.nbytes,)
            write = functools.partial(_write_and_emit, self._event_log, facts)
        work = Work(write, self.store, backing.slot, address, owner)
        backing.cleanup.transfer = work
        return work

    def reserve(self, nbytes: int, *, is_open: bool = False) -> Slot:
        """A slot for ``nbytes``. Raises ``StashFullError`` where there is none.

        ``is_open``: it is filled bit by bit, and counted as it is.
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
        """More is on disk, or will be when it is written."""
        used = self.store.used_bytes
        if used > self.disk_peak_bytes:
            unfilled = self.unfilled_bytes() if self.open_segment is not None else 0
            self.disk_peak_bytes = max(used - unfilled, self.disk_peak_bytes)

    def _reclaim(self) -> bool:
        """Take back the slots of dead backings, waiting for the writes that still run into them."""
        found = False
        for cleanup in list(self.reclaim_queue):
            found |= cleanup.free_slot(self.store, self.stalls.wait)
        return found

    def fetch(self, backing: Any, *, ahead: bool) -> Load:
        """See :meth:`LowerTier.fetch`. To memory of the pool; a worker or the thread that waits reads it."""
        return DiskLoad(backing, self._pool.take(backing.skew + backing.nbytes))

    def resume(self, transfer: Any) -> None:
        """See :meth:`LowerTier.resume`."""
        self.begin_work(transfer)

    def restore(self, blocks: list[Block], cleanups: list[Any]) -> None:
        """See :meth:`LowerTier.restore`."""
        self._pool.restore()


def _write(store: Store, slot: Slot, address: int, owner: object) -> None:
    """On a worker: ``owner`` keeps the memory at ``address`` alive until the write has ended."""
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
