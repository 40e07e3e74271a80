"""Writeback from host memory to disk, the oldest buffer first. The terms are those of the page cache.

The bytes of a *dirty* buffer are nowhere else. When the buffers come close to the ``host`` budget, the oldest
dirty ones are written to disk directly. The bytes of a *clean* buffer are also on disk; it still serves reads
until its memory is needed.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable

from torch import Tensor

from .._device.base import Completion
from .._device.pinned_pool import PinnedBuffer, PinnedPool
from .._runtime.reclaim import ReclaimQueue
from .._runtime.trace import profiled
from .._runtime.weak import WeakQueue
from .._runtime.workers import Work
from ..errors import StashIOError
from ..stores import Slot, Store
from .host_backing import HostBacking, HostCleanup

__all__ = ["HostWriteback"]


class HostWriteback:
    """Tracks which backings are dirty, being written, or clean. The caller holds the stash's lock.

    Args:
        pool: the buffers, and their budget.
        disk: the store to write to, or ``None``.
        begin_work: hands a :class:`Work` to a worker.
        reclaim_queue: the queue whose mark the cleanups have.
        number: the number of the device in the stash.
        early: how many bytes below the budget writing begins.
    """

    def __init__(
        self,
        pool: PinnedPool,
        disk: Store | None,
        begin_work: Callable[[Work], None],
        reclaim_queue: ReclaimQueue,
        *,
        number: int,
        early: int,
    ) -> None:
        self._pool = pool
        self.disk = disk
        self._begin_work = begin_work
        self._reclaim_queue = reclaim_queue
        self._number = number
        self._early = early
        self._dirty = WeakQueue[HostBacking](_is_dirty)  # oldest first
        self._writing: deque[weakref.ref[HostBacking]] = deque()  # being written to disk
        self._clean = WeakQueue[HostBacking](_has_buffer)  # their buffers may be evicted
        self._bytes_on_the_way_out = 0  # of buffers that are clean or being written
        self.refusal = ""  # why the disk refused the last write, or how one failed
        self._has_failed = False
        self.disk_peak_bytes = 0

    def add(self, backing: HostBacking, *, at_once: bool) -> None:
        """Add a new, dirty backing. With ``at_once`` it is written immediately, even if the host has space."""
        if not (at_once and self._begin_write(backing)):
            self._dirty.append(backing)
            self._write_early()

    def _write_early(self) -> None:
        budget = self._pool.budget
        if budget is None or self.disk is None:
            return
        while self._pool.used_bytes - self._bytes_on_the_way_out > max(0, budget - self._early):
            if not self.write_oldest():
                return

    def write_oldest(self) -> bool:
        """Begin to write the oldest dirty backing. Return whether one was found and the disk had space."""
        while self._dirty.refs:
            backing = self._dirty.popleft()
            if backing is not None:
                if self._begin_write(backing):
                    return True
                self._dirty.appendleft(backing)
                return False
        return False

    def _begin_write(self, backing: HostBacking) -> bool:
        """Begin to write a dirty backing. Return whether the disk had space for it."""
        disk, left = self.disk, backing.cleanup
        if disk is None or self._has_failed or left.buffer is None:
            return False
        assert left.written is not None
        left.written.begin()  # a worker waits for it
        try:
            slot = disk.reserve(backing.nbytes)
        except StashIOError as error:
            self.refusal = f", and {error.strerror}"
            return False
        work = Work(_write_down, left.written, disk, slot, left.buffer.memory)
        left.work, left.slot = work, slot
        self._begin_work(work)
        self.disk_peak_bytes = max(self.disk_peak_bytes, disk.used_bytes)
        self._bytes_on_the_way_out += backing.nbytes
        self._writing.append(weakref.ref(backing))
        return True

    def sweep(self) -> bool:
        """Handle the writes that have ended. Return whether there was one."""
        found = False
        while self._writing:
            backing = self._writing[0]()
            work = backing.cleanup.work if backing is not None else None
            if work is not None and not work.done():
                break
            self._writing.popleft()
            if backing is not None:
                self._ended(backing)
                found = True
        return found

    def _ended(self, backing: HostBacking) -> None:
        left = backing.cleanup
        assert left.work is not None and left.slot is not None and self.disk is not None
        failure = left.work.exception()
        if failure is None:
            left.work = None
            self._clean.append(backing)
            return
        self.refusal = f", and the disk failed: {failure}"
        self._has_failed = True
        slot, left.slot, left.work = left.slot, None, None
        self._bytes_on_the_way_out -= backing.nbytes
        self.disk.release(slot)
        self._dirty.appendleft(backing)

    def wait(self) -> bool:
        """Wait for the oldest write. Return whether there was one."""
        while self._writing:
            backing = self._writing[0]()
            if backing is None or backing.cleanup.work is None:
                self._writing.popleft()
                continue
            backing.cleanup.work.exception()
            return True
        return False

    def evict(self) -> HostCleanup | None:
        """Detach the oldest clean buffer and return its cleanup; ``None`` if no buffer is clean."""
        while self._clean.refs:
            backing = self._clean.popleft()
            if backing is None:
                continue
            left = HostCleanup(self._reclaim_queue, self._number, backing.cleanup.buffer)
            left.brought = backing.cleanup.brought
            backing.cleanup.buffer = backing.cleanup.brought = None
            self._bytes_on_the_way_out -= backing.nbytes
            return left
        return None

    def release(self, slot: Slot, buffer: PinnedBuffer | None) -> None:
        """Release a dead backing's slot. ``buffer`` is the buffer that it still had, or ``None``."""
        if buffer is not None:
            self._bytes_on_the_way_out -= buffer.memory.numel()
        if self.disk is not None:
            self.disk.release(slot)

    def forget(self) -> None:
        """Forget all blocks, since none is alive."""
        self._dirty.clear()
        self._clean.clear()

    def restore(self, backings: list[HostBacking], cleanup: list[HostCleanup]) -> None:
        """Rebuild the counts and queues from the living backings: see ``_core/session``.

        Args:
            backings: the living backings, oldest first.
            cleanups: of all objects with a buffer or a slot.
        """
        self._bytes_on_the_way_out = 0
        for left in cleanup:
            if left.buffer is not None and left.slot is not None:
                self._bytes_on_the_way_out += left.buffer.memory.numel()
        self._dirty = WeakQueue[HostBacking](_is_dirty)
        self._clean = WeakQueue[HostBacking](_has_buffer)
        self._writing.clear()
        for backing in backings:
            left = backing.cleanup
            if left.work is not None:
                self._writing.append(weakref.ref(backing))
                if not left.work.done():
                    self._begin_work(left.work)
            elif left.buffer is not None:
                (self._dirty if left.slot is None else self._clean).append(backing)


def _is_dirty(backing: HostBacking) -> bool:
    return backing.cleanup.slot is None


def _has_buffer(backing: HostBacking) -> bool:
    return backing.cleanup.buffer is not None


def _write_down(copy: Completion, disk: Store, slot: Slot, memory: Tensor) -> None:
    """Write a buffer to disk, on a worker, after its copy from the device has ended."""
    copy.wait()
    with profiled("write"):
        disk.write(slot, memory.data_ptr())
