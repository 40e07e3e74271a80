"""The window on the way down: writes that have begun and have not completed.

A large block is written straight from the tensor's memory, which stays alive until then. Its write *completes*
when a thread that may judge the copy (see ``_saved/thread_state``) finds that it has ended and the version has
not changed: only then is the memory let go. Where the version has changed, it cannot be known which bytes
were written: the block is lost, and backward raises if it ever asks for it. A write that failed leaves the
block where it was.
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
    """A write that has begun. It does not own what it is of: for a dead block nothing is left to do."""

    __slots__ = ("by_device", "nbytes", "target", "thread_state", "transfer")

    by_device: bool
    """Whether it is a device's copy. Its block owns that, so that a dead block's memory is free at once."""
    nbytes: int
    target: weakref.ref[Any]
    """The block or segment."""
    thread_state: ThreadState | None
    """Of the thread whose tensor it is; ``None`` for bytes that are the stash's own copy."""
    transfer: Transfer | None
    """Of a worker."""

    @abstractmethod
    def running(self, target: Any) -> Transfer | None:
        """The transfer that has not completed, of a ``target`` that is alive."""

    @abstractmethod
    def complete(
        self, target: Any, transfer: Transfer, resident: ResidentSet, health: TierHealth
    ) -> None:
        """Its ``transfer`` is done, and ``target`` is alive."""


class _BlockWrite(_InflightWrite):
    __slots__ = ()

    def __init__(self, block: Block, transfer: Transfer, dies: Callable[[Any], None]) -> None:
        self.by_device = transfer.ends_in_order
        self.target = weakref.ref(block, dies) if self.by_device else weakref.ref(block)
        self.nbytes = block.nbytes
        self.thread_state = block.thread_state
        self.transfer = None if self.by_device else transfer

    def running(self, target: Block) -> Transfer | None:
        return target.placement.transfer  # None where it was found to be changed in place meanwhile

    def complete(
        self, target: Block, transfer: Transfer, resident: ResidentSet, health: TierHealth
    ) -> None:
        failure = transfer.error
        if target.has_moved:  # then it matters not what was written
            resident.take_back(target)
        elif failure is not None:
            resident.take_back(target)
            health.broke(failure)
        elif target.storage_version.changed:
            resident.lose(target)
        else:
            # A copy that still runs is safe from the streams that wait for it, not from any other.
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
        segment.cleanup.inflight_bytes = 0  # the write counts them now

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
        resident: what is in place, where a block may return to.
        health: is given the error of a write that failed.
        freed: is given the number of bytes that were let go.
        event_log: gets the stalls.
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
        self._count_of: dict[ThreadState | None, int] = {}  # how many of them are of which thread
        self._dead: deque[object] = deque()  # of a device's, since all of them were looked at
        self._dies = self._dead.append  # where a block dies no Python may run: see _runtime/reclaim
        # Also what was copied into a segment whose write has not begun.
        self.nbytes = self.peak_bytes = 0
        self.written_bytes = 0
        self.stalls = Stalls(event_log)

    @property
    def is_one(self) -> bool:
        """Whether there is a window, and one write alone is in it."""
        return self.window_bytes > 0 and len(self.writes) == 1

    def add(self, block: Block, backing: Backing, transfer: Transfer) -> None:
        """The write from a block's own memory has begun."""
        block.placement = Writing(block.placement.alias, backing, transfer)
        thread_state, counts, nbytes = block.thread_state, self._count_of, block.nbytes
        self.writes.append(_BlockWrite(block, transfer, self._dies))
        counts[thread_state] = counts.get(thread_state, 0) + 1
        self.written_bytes += nbytes
        self.nbytes += nbytes

    def add_segment(self, segment: SegmentBacking, transfer: Transfer) -> None:
        """The write of a segment, whose bytes are counted, begins."""
        self.writes.append(_SegmentWrite(segment, transfer))
        self._count_of[None] = self._count_of.get(None, 0) + 1

    def make_room(self, nbytes: int, thread_state: ThreadState) -> None:
        """Wait until ``nbytes`` more fit into the window, or nothing in it can be waited for."""
        self._empty_to(self.window_bytes - nbytes, thread_state)

    def free(self, nbytes: int, thread_state: ThreadState) -> None:
        """Let the memory of so many bytes go now, as far as that can be waited for."""
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
        """Wait for every write that has begun, and complete what this thread may judge."""
        for write in self.writes:
            transfer = _under_way(write)
            if transfer is not None:
                transfer.wait()
        self.complete(thread_state, all_that_ended=True)

    def complete(self, thread_state: ThreadState, *, all_that_ended: bool = False) -> None:
        """Let go of the memory of every write that has ended, as far as this thread may judge it.

        On an accelerator only as far as ``keep`` asks for it, unless ``all_that_ended``: a block that is
        still in place when backward comes need not be brought back.
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
                if transfer is None:  # it was found to be changed, and has left
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
                    break  # a device's copies end in order: after one that has not ended, none has
            # Nor need a thread that has none of its own look at those of others, or anybody at those that
            # stay. Only the dead among them are let go, each time that they may be half of all.
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
        """Rebuild what follows from what there is: see ``_session``.

        Args:
            blocks: that are alive, oldest first.
            segments: that carry some of them; all have a write but the one that is being filled.
            cleanups: of all backings, the dead ones that are yet to be settled too.

        Returns the workers' transfers that perhaps no worker was given.
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
    """What a write waits for; of a dead block's, or one that was found to be changed, a worker's."""
    target = write.target()
    return (write.running(target) if target is not None else None) or write.transfer


def _is_over(transfer: Transfer | None) -> bool:
    """Whether a dead block's write needs no room in the window; one that has not begun is not made."""
    return transfer is None or transfer.done() or transfer.cancel()


def _judged_by(thread_state: ThreadState, write: _InflightWrite) -> bool:
    its_thread = write.thread_state
    return its_thread is None or thread_state.may_judge(its_thread) or write.target() is None
