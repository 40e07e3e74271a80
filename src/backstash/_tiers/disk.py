"""From the CPU's memory to a store: slots, and the writes that fill them.

A slot is taken when a block goes, and given back when its parcel has died and nothing writes to it any more.
A store without room is asked once more, when what the dead still hold has been taken back.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

from .._runtime.reclaim import DiskCleanup, ReclaimQueue
from .._runtime.trace import EventLog, profiled
from .._runtime.workers import Work
from .._saved.block import Block
from ..errors import StashFullError
from ..stores import Slot, Store
from .backing import DiskBacking
from .inflight import InflightWrites

__all__ = ["DiskTier"]


class DiskTier:
    """Begins the writes to one store. The caller holds the stash's lock.

    Args:
        store: where the bytes go.
        begin_work: hands a piece of work to a worker.
        grave: where what dies is appended.
        flights: who waits for a write.
        tape: is told what was written, where somebody records.
    """

    def __init__(
        self,
        store: Store,
        begin_work: Callable[[Work], None],
        reclaim_queue: ReclaimQueue,
        inflight: InflightWrites,
        event_log: EventLog,
    ) -> None:
        self.store = store
        self.begin_work = begin_work
        self.reclaim_queue = reclaim_queue
        self._inflight = inflight
        self._event_log = event_log
        self.peak_bytes = 0  # of the store

    def begin(self, block: Block) -> DiskBacking:
        """Begin to write ``block`` from its own memory to a slot of its own.

        Raises ``StashFullError`` where there is none; nothing has begun then.
        """
        slot = self.reserve(block.nbytes)
        backing = DiskBacking(self.store, slot, block.address % 4096, self.reclaim_queue)
        self.store.stage(slot, block.address)
        # The work owns the alias until it is done: the memory outlives the write, whoever dies.
        self.begin_work(self.write_of(backing, block.address, block.alias, block))
        return backing

    def write_of(
        self, backing: DiskBacking, address: int, owner: object, block: Block | None = None
    ) -> Work:
        """The write of what lies at ``address``, which somebody has to begin.

        The parcel knows of it before a worker does: else its slot might be given away and written later.

        Args:
            parcel: whose slot it fills.
            address: of the first byte.
            owner: keeps the memory alive until the write has ended.
            block: whose bytes they are, if they are of one.
        """
        write: Callable[..., None] = _write
        if self._event_log.on:
            facts = block.facts if block is not None else (backing.nbytes,)
            write = functools.partial(_write_and_emit, self._event_log, facts)
        work = Work(write, self.store, backing.slot, address, owner)
        backing.cleanup.writing = work
        return work

    def reserve(self, nbytes: int) -> Slot:
        """A slot for ``nbytes``. Raises ``StashFullError`` where there is none."""
        try:
            slot = self.store.reserve(nbytes)
        except StashFullError:
            if not self._reclaim():
                raise
            slot = self.store.reserve(nbytes)
        self.peak_bytes = max(self.peak_bytes, self.store.used_bytes)
        return slot

    def _reclaim(self) -> bool:
        """Take back the slots of dead parcels, waiting for the writes that still run into them."""
        found = False
        for left in list(self.reclaim_queue):
            if type(left) is DiskCleanup and left.store is self.store and left.slot is not None:
                if left.writing is not None and not left.writing.cancel():
                    self._inflight.wait(left.writing)
                slot, left.slot = left.slot, None
                self.store.release(slot)
                found = True
        return found


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
