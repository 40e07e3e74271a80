"""The window of writes: those that have begun and have not completed.

A large block is written directly from the tensor's memory, which stays alive until then. Its write *completes*
when a thread that may accept the copy (see ``_saved/thread_state``) finds that the write has ended and the
version has not changed. Only then is the memory freed. If the version has changed, it is unknown which bytes
were written: the block is lost, and backward raises if it needs the block. After a failed write the block
stays where it was.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Any

from .._runtime.trace import EventLog
from .._runtime.transfer import Stalls, Transfer
from .._saved.block import Block
from .._saved.placement import Backing, Stored, Writing
from .._saved.thread_state import ThreadState
from .backing import DiskCleanup, SegmentBacking
from .health import TierHealth
from .resident import ResidentSet

__all__ = ["InflightWrites"]


class _InflightWrite(ABC):
    """A write that has begun. It does not own its target: nothing needs to be done for a dead block."""

    __slots__ = ("by_device", "nbytes", "target", "thread_state", "transfer")

    by_device: bool
    """Whether a device makes the copy. Its block owns it, so a dead block's memory is free at once."""
    nbytes: int
    target: weakref.ref[Any]
    """The block or segment."""
    thread_state: ThreadState | None
    """The state of the thread whose tensor is written; ``None`` for the stash's own copy of the bytes."""
    transfer: Transfer | None
    """The transfer of a worker."""

    @abstractmethod
    def running(self, target: Any) -> Transfer | None:
        """Return the transfer of a living ``target``, if it has not completed."""

    @abstractmethod
    def complete(
        self, target: Any, transfer: Transfer, resident: ResidentSet, health: TierHealth
    ) -> None:
        """Complete the write: ``transfer`` is done, and ``target`` is alive."""


class _BlockWrite(_InflightWrite):
    __slots__ = ()

    def __init__(self, block: Block, transfer: Transfer, dies: Callable[[Any], None]) -> None:
        self.by_device = transfer.ends_in_order
        self.target = weakref.ref(block, dies) if self.by_device else weakref.ref(block)
        self.nbytes = block.nbytes
        self.thread_state = block.thread_state
        self.transfer = None if self.by_device else transfer

    def running(self, target: Block) -> Transfer | None:
        return target.placement.transfer  # None if it was found modified in place meanwhile

    def complete(
        self, target: Block, transfer: Transfer, resident: ResidentSet, health: TierHealth
    ) -> None:
        failure = transfer.error
        if target.has_moved or transfer.was_skipped:  # then the written bytes do not matter
            resident.take_back(target)
        elif failure is not None:
            resident.take_back(target)
            health.broke(failure)
        elif target.storage_version.changed:
            resident.lose(target)
        else:
            # Streams that wait for a running copy may use its source; other streams may not.
            running = self.by_device and not transfer.ended()
            target.placement = Stored(target.placement.backing, is_unordered=running)
            if resident.event_log.on:
                resident.event_log.emit("land", *target.facts)


class _SegmentWrite(_InflightWrite):
    __slots__ = ()

    def __init__(self, segment: SegmentBacking, transfer: Transfer) -> None:
        self.by_device = False
        self.target = weakref.ref(segment)
        self.nbytes = segment.cleanup.inflight_bytes
        self.thread_state = None
        self.transfer = transfer
        segment.cleanup.inflight_bytes = 0  # from now on the write counts them

    def running(self, target: SegmentBacking) -> Transfer | None:
        return self.transfer

    def complete(
        self, target: SegmentBacking, transfer: Transfer, resident: ResidentSet, health: TierHealth
    ) -> None:
        if transfer.error is None:
            target.buffer = None
        else:
            health.broke(transfer.error)


class InflightWrites:
    """Keeps the ``inflight`` budget. The caller holds the stash's lock.

    Args:
        resident: the set that a block may return to.
        health: receives the error of a failed write.
        freed: called with the number of bytes that were freed.
        event_log: receives the stalls.
        window_bytes: the budget.
    """

    def __init__(
        self,
        resident: ResidentSet,
        health: TierHealth,
        freed: Callable[[int], None],
        event_log: EventLog,
        *,
        window_bytes: int,
    ) -> None:
        self._resident = resident
        self._health = health
        self._freed = freed
        self.window_bytes = window_bytes
        self.writes: deque[_InflightWrite] = deque()  # oldest first
        self._count_of: dict[ThreadState | None, int] = {}  # the number of writes of each thread
        self._dead: deque[object] = deque()  # blocks, since the last full scan
        self._dies = self._dead.append  # no Python may run when a block dies: see _runtime/reclaim
        # Includes bytes that were copied into a segment whose write has not begun.
        self.nbytes = self.peak_bytes = 0
        self.written_bytes = 0
        self.stalls = Stalls(event_log)

    @property
    def is_one(self) -> bool:
        """Whether there is a window, and exactly one write is in it."""
        return self.window_bytes > 0 and len(self.writes) == 1

    def add(self, block: Block, backing: Backing, transfer: Transfer) -> None:
        """Add a write from a block's own memory. It has begun."""
        block.placement = Writing(block.placement.alias, backing, transfer)
        thread_state, counts, nbytes = block.thread_state, self._count_of, block.nbytes
        self.writes.append(_BlockWrite(block, transfer, self._dies))
        counts[thread_state] = counts.get(thread_state, 0) + 1
        self.written_bytes += nbytes
        self.nbytes += nbytes

    def add_segment(self, segment: SegmentBacking, transfer: Transfer) -> None:
        """Add the write of a segment. Its bytes are already counted."""
        self.writes.append(_SegmentWrite(segment, transfer))
        self._count_of[None] = self._count_of.get(None, 0) + 1

    def make_room(self, nbytes: int, thread_state: ThreadState) -> None:
        """Wait until ``nbytes`` more fit into the window, or no write can be waited for."""
        self._empty_to(self.window_bytes - nbytes, thread_state)

    def free(self, nbytes: int, thread_state: ThreadState) -> None:
        """Free ``nbytes`` now, as far as this thread can wait for writes."""
        self._empty_to(self.nbytes - nbytes, thread_state)

    def _empty_to(self, nbytes: int, thread_state: ThreadState) -> None:
        while self.nbytes > nbytes:
            mine = next((w for w in self.writes if _judged_by(thread_state, w)), None)
            if mine is None:
                return
            transfer = _under_way(mine)
            if transfer is not None:
                self.stalls.wait(transfer)
            self.complete(thread_state, all_that_ended=True)

    def finish(self, thread_state: ThreadState) -> None:
        """Wait for every write, and complete those that this thread may accept."""
        for write in self.writes:
            transfer = _under_way(write)
            if transfer is not None:
                transfer.wait()
        self.complete(thread_state, all_that_ended=True)

    def complete(self, thread_state: ThreadState, *, all_that_ended: bool = False) -> None:
        """Free the memory of every write that has ended and that this thread may accept.

        On an accelerator memory is freed only as far as ``keep`` requires, unless ``all_that_ended``: a block
        that is still in place when backward needs it need not be loaded.
        """
        writes, resident = self.writes, self._resident
        asks_device = resident.memory is not None and not all_that_ended
        looks_at_all = 2 * len(self._dead) >= len(writes)
        if looks_at_all:
            self._dead.clear()
        at = 0
        while at < len(writes):
            write = writes[at]
            target = write.target()
            if target is None:
                if _is_over(write.transfer):
                    self._end(at)
                else:
                    at += 1
                continue
            its_thread = write.thread_state
            is_mine = (
                its_thread is thread_state
                or its_thread is None
                or thread_state.may_judge(its_thread)
            )
            lingers = asks_device and not resident.wants_room(self.nbytes)
            if is_mine and not lingers:
                transfer = write.running(target)
                if transfer is None:  # it was found modified and has left
                    if _is_over(write.transfer):
                        if write.transfer is not None and write.transfer.error is not None:
                            self._health.broke(write.transfer.error)
                        self._end(at)
                    else:
                        at += 1
                    continue
                if transfer.done():
                    write.complete(target, transfer, resident, self._health)
                    self._end(at)
                    continue
                if write.by_device:
                    break  # a device's copies end in order: no later one has ended
            # A thread without writes need not check those of other threads, and no thread those that stay in
            # place. Then only dead targets are removed, whenever they may be half of all.
            elif write.by_device and not (all_that_ended or looks_at_all):
                if lingers or thread_state not in self._count_of:
                    break
            at += 1

    def _end(self, at: int) -> None:
        write = self.writes[at]
        del self.writes[at]
        self.nbytes -= write.nbytes
        left = self._count_of[write.thread_state] - 1
        if left:
            self._count_of[write.thread_state] = left
        else:
            del self._count_of[write.thread_state]
        self._freed(write.nbytes)

    def restore(
        self, blocks: list[Block], segments: list[SegmentBacking], cleanups: list[DiskCleanup]
    ) -> list[Any]:
        """Rebuild the counts and queues from the living blocks: see ``_core/session``.

        Args:
            blocks: the living blocks, oldest first.
            segments: the segments that hold some of them. All have a write, except the open one.
            cleanups: of all backings, including dead ones that are not settled yet.

        Returns the transfers that may not have reached a worker.
        """
        known = {id(target): write for write in self.writes if (target := write.target())}
        writes = deque(write for write in self.writes if write.target() is None)
        for block in blocks:
            transfer = block.placement.transfer
            if transfer is not None:
                writes.append(known.get(id(block)) or _BlockWrite(block, transfer, self._dies))
        for segment in segments:
            transfer, write = segment.cleanup.transfer, known.get(id(segment))
            if segment.buffer is None or transfer is None:
                continue
            if write is None and transfer.error is None:
                write = _SegmentWrite(segment, transfer)
            if write is not None:
                writes.append(write)
                segment.cleanup.inflight_bytes = 0
        self.writes = writes
        self._count_of = {}
        for write in writes:
            self._count_of[write.thread_state] = self._count_of.get(write.thread_state, 0) + 1
        self.nbytes = sum(write.nbytes for write in writes)
        self.nbytes += sum(cleanup.inflight_bytes for cleanup in cleanups)
        begun = [write.transfer for write in writes if write.transfer is not None]
        return [transfer for transfer in begun if not transfer.done()]


def _under_way(write: _InflightWrite) -> Transfer | None:
    """Return the transfer to wait for; for a dead or modified block, the worker's."""
    target = write.target()
    return (write.running(target) if target is not None else None) or write.transfer


def _is_over(transfer: Transfer | None) -> bool:
    """Return whether a dead block's write has left the window. A write that has not begun is cancelled."""
    return transfer is None or transfer.done() or transfer.cancel()


def _judged_by(thread_state: ThreadState, write: _InflightWrite) -> bool:
    its_thread = write.thread_state
    return its_thread is None or thread_state.may_judge(its_thread) or write.target() is None
