"""Allocation of host buffers, and their release once no transfer uses them.

A buffer outlives everything that reads or writes it. The buffer of a dead backing or load is *deferred*: it is
released when its copies and its write have ended. A *clean* buffer, whose bytes are also on disk, is given to
the next block that needs one. Until then it still serves reads.
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

_LOOKED_AT = 4  # transfers, mostly the next to end, that are asked for before more memory is pinned


class HostBuffers:
    """Finds free buffers, and waits for one if necessary. The caller holds the stash's lock.

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
        )  # loads with a buffer whose bytes are also on disk
        self.stall_seconds = 0.0

    def take(self, nbytes: int) -> PinnedBuffer:
        """Return a buffer, and wait for one if necessary.

        Raises ``StashFullError`` if no buffer is free and none can be allocated.
        """
        buffer = self._pool.take(nbytes, may_grow=False)
        if buffer is not None:  # the common case
            return buffer
        if not self._pool.could_hold(nbytes):  # not even without all other buffers
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
            f"host memory has no space for {format_bytes(nbytes)} in addition to the "
            f"{format_bytes(pool.used_bytes)} it holds{writeback.refusal or remedy}",
        )

    def take_idle(self, nbytes: int) -> PinnedBuffer | None:
        """Return a buffer that is free or can be freed without waiting; ``None`` if there is none."""
        buffer = self._pool.take(nbytes, may_grow=False)
        if buffer is None:
            self.sweep(most=_LOOKED_AT)  # before pinning more memory
            buffer = self._pool.take(nbytes)
        while buffer is None and (self.sweep() or self._evict()):
            buffer = self._pool.take(nbytes)
        return buffer

    def lend(self, load: HostLoad) -> None:
        """Take back the buffer of ``load`` when its copy to the device has ended."""
        self._staging.append(weakref.ref(load))

    def defer(self, cleanup: HostCleanup) -> None:
        """Take the cleanup of a dead backing or load, and release its buffer when nothing uses it."""
        self._deferred.append(cleanup)
        # Transfers mostly end in this order, so only the first are checked here. The others are checked when a
        # buffer is needed: a host that runs ahead of its device may have deferred hundreds, and each check
        # calls the driver.
        while self._deferred and self._deferred[0].at_rest():
            self._give_back(self._deferred.popleft())

    def sweep(self, most: int | None = None) -> bool:
        """Free buffers whose transfers completed. Return whether a buffer became free or evictable.

        Args:
            most: how many of the deferred cleanups whose transfers have not ended are looked at; ``None``: all.
        """
        self._pool.settle()
        found, waiting = False, 0
        most = len(self._deferred) if most is None else most
        while waiting < min(most, len(self._deferred)):
            if self._deferred[waiting].at_rest():
                cleanup = self._deferred[waiting]
                del self._deferred[waiting]
                self._give_back(cleanup)
                found = True
            else:
                waiting += 1
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
        """Wait for the oldest transfer that frees a buffer when it ends. Return whether there was one."""
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
        """Release the unused buffers. Living graphs keep theirs until they are freed."""
        for cleanup in self._deferred:
            cleanup.wait()
        self.sweep()
        self._pool.trim()
