"""Host buffers, given back when no transfer uses them any more.

A buffer outlives everything that reads or writes it. What a dead backing or load leaves is *deferred*: its
buffer is given back when its copies and its write have ended. A *clean* buffer, whose bytes are on disk too,
is given to the next block that needs one, and not before: until then it still serves reads.
"""

from __future__ import annotations

import errno
import time
import weakref
from collections import deque

from .._device.pinned_pool import PinnedBuffer, PinnedPool
from ..errors import StashFullError
from ..units import format_bytes
from .host_backing import HostCleanup, HostLoad
from .host_writeback import HostWriteback

__all__ = ["HostBuffers"]


class HostBuffers:
    """Finds buffers, and waits for one where it must. The caller holds the stash's lock.

    Args:
        pool: the buffers.
        writeback: frees buffers by writing them to disk.
    """

    def __init__(self, pool: PinnedPool, writeback: HostWriteback) -> None:
        self._pool = pool
        self._writeback = writeback
        self._deferred: deque[HostCleanup] = deque()
        self._staging: deque[weakref.ref[HostLoad]] = (
            deque()
        )  # with a buffer whose bytes are on disk too
        self.stall_seconds = 0.0

    def take(self, nbytes: int) -> PinnedBuffer:
        """A buffer, waited for if need be.

        Raises ``StashFullError`` where there is none and none can be made.
        """
        buffer = self._pool.take(nbytes, may_grow=False)
        if buffer is not None:  # nearly always
            return buffer
        if not self._pool.could_hold(nbytes):  # not even if all others went
            raise self._full(nbytes)
        while True:
            buffer = self.take_idle(nbytes)
            if buffer is not None:
                return buffer
            if not (self._wait_for_one() or self._writeback.write_oldest()):
                raise self._full(nbytes)

    def _full(self, nbytes: int) -> StashFullError:
        writeback, pool = self._writeback, self._pool
        remedy = ": raise host=" if writeback.disk is not None else ": raise host=, or give disk="
        if pool.refusal:
            remedy = f" ({pool.refusal}): free memory, or lower host="
        return StashFullError(
            errno.ENOSPC,
            f"host memory has no room for {format_bytes(nbytes)} beside the "
            f"{format_bytes(pool.used_bytes)} it holds{writeback.refusal or remedy}",
        )

    def take_idle(self, nbytes: int) -> PinnedBuffer | None:
        """A buffer that is free, or can be freed without a wait."""
        buffer = self._pool.take(nbytes, may_grow=False)
        if buffer is None:
            self.sweep()  # before more memory is pinned
            buffer = self._pool.take(nbytes)
        while buffer is None and (self.sweep() or self._evict()):
            buffer = self._pool.take(nbytes)
        return buffer

    def lend(self, load: HostLoad) -> None:
        """Its buffer is taken back when its copy to the device has ended."""
        self._staging.append(weakref.ref(load))

    def defer(self, cleanup: HostCleanup) -> None:
        """Take what a dead backing or load left; its buffer is given back when nothing uses it."""
        self._deferred.append(cleanup)
        # Mostly their transfers end in this order. The others are looked at when a buffer is needed: a host
        # that runs ahead of its device may have deferred hundreds, and each look asks the driver.
        while self._deferred and self._deferred[0].at_rest():
            self._give_back(self._deferred.popleft())

    def sweep(self) -> bool:
        """Free buffers whose transfers completed. Returns True if a buffer became free or evictable."""
        self._pool.settle()
        found = False
        for _ in range(len(self._deferred)):
            if self._deferred[0].at_rest():
                self._give_back(self._deferred.popleft())
                found = True
            else:
                self._deferred.rotate(-1)
        for _ in range(len(self._staging)):
            ref = self._staging.popleft()
            load = ref()
            buffer = load.take_buffer() if load is not None else None
            if buffer is not None:
                self._pool.give(buffer)
                found = True
            elif load is not None:
                self._staging.append(ref)
        return self._writeback.sweep() or found

    def _give_back(self, cleanup: HostCleanup) -> None:
        buffer, slot, cleanup.buffer, cleanup.slot = cleanup.buffer, cleanup.slot, None, None
        if buffer is not None:
            self._pool.give(buffer)
        if slot is not None:
            self._writeback.release(slot, buffer)

    def _evict(self) -> bool:
        left = self._writeback.evict()
        if left is None:
            return False
        self._deferred.append(left)
        return True

    def _wait_for_one(self) -> bool:
        """Wait for the oldest transfer whose end frees a buffer, if there is one."""
        began = time.perf_counter()
        try:
            if self._writeback.wait():
                return True
            if self._deferred:
                self._deferred[0].wait()
                return True
            return self._wait_for_staging()
        finally:
            self.stall_seconds += time.perf_counter() - began

    def _wait_for_staging(self) -> bool:
        for ref in tuple(self._staging):
            load = ref()
            if load is not None and load.arrive():
                return True
        return False

    def close(self) -> None:
        """Give back the buffers that nothing uses. What live graphs hold stays until they go."""
        for cleanup in self._deferred:
            cleanup.wait()
        self.sweep()
        self._pool.trim()
