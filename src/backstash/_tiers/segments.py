"""Segments: small blocks that are copied into one buffer and written together.

A small block is copied into the open segment when it is evicted, so its own memory is free at once. The
segment is written when the next block does not fit or the window is full. At most one segment is open. Its
blocks own it: if they have all died, it is never written.
"""

from __future__ import annotations

import ctypes
import weakref

from .._runtime.trace import EventLog
from .._saved.block import Block
from .._saved.placement import Stored
from .._saved.thread_state import ThreadState
from .._saved.view import ALIGNMENT_BYTES
from ..stores._base import PAGE_BYTES
from ..stores._buffer_pool import BufferPool
from .backing import SegmentBacking
from .disk import DiskTier
from .inflight import InflightWrites
from .resident import ResidentSet

__all__ = ["SEGMENT_BYTES", "SMALL_BYTES", "Segments"]

SMALL_BYTES = 512 << 10
"""Smaller blocks are written in segments."""

SEGMENT_BYTES = 4 << 20
"""The size of a segment, unless the window is too small for it."""


class Segments:
    """Fills one segment after another. The caller holds the stash's lock.

    Args:
        disk: the tier that the segments are written to.
        pool: provides the memory of the segments.
        resident: the set that small blocks leave.
        inflight: the window that counts them.
        event_log: receives events of blocks that have left, while there is a recording.
    """

    def __init__(
        self,
        disk: DiskTier,
        pool: BufferPool,
        resident: ResidentSet,
        inflight: InflightWrites,
        event_log: EventLog,
    ) -> None:
        self._disk = disk
        self._pool = pool
        self._resident = resident
        self._inflight = inflight
        self._event_log = event_log
        self._open: weakref.ref[SegmentBacking] | None = None  # the open one; dies with its blocks

    def gather(self, block: Block, thread_state: ThreadState) -> None:
        """Copy ``block`` into the open segment. Raises ``StashFullError``; then the block stays in place."""
        segment = self._open() if self._open is not None else None
        at = segment.place(block.address, block.nbytes) if segment is not None else None
        if segment is None or at is None:
            self._close()
            segment = self._open_one(block.nbytes + 2 * ALIGNMENT_BYTES)
            at = segment.place(block.address, block.nbytes)
            assert at is not None
        inflight = self._inflight
        if inflight.nbytes + block.nbytes > inflight.window_bytes:
            inflight.make_room(block.nbytes, thread_state)
        ctypes.memmove(segment.address + at, block.address, block.nbytes)
        segment.filled = at + block.nbytes
        segment.cleanup.inflight_bytes += block.nbytes
        segment.blocks += 1
        block.offset = at
        block.placement = Stored(segment)
        self._disk.count_peak()
        self._resident.leave(block)
        inflight.written_bytes += block.nbytes
        inflight.nbytes += block.nbytes
        if self._event_log.on:
            self._event_log.emit("land", *block.facts)
        if inflight.nbytes > inflight.window_bytes:
            self._close()
            inflight.make_room(0, thread_state)

    def _open_one(self, at_least: int) -> SegmentBacking:
        nbytes = max(min(SEGMENT_BYTES, self._inflight.window_bytes // 8), at_least)
        nbytes = -(-nbytes // PAGE_BYTES) * PAGE_BYTES
        disk = self._disk
        slot = disk.reserve(nbytes, is_open=True)
        segment = SegmentBacking(disk.store, slot, self._pool.take(nbytes), disk.reclaim_queue)
        self._open = disk.open_segment = weakref.ref(segment)
        return segment

    def _close(self) -> None:
        """Begin to write the open segment, full or not."""
        segment = self._open() if self._open is not None else None
        self._open = self._disk.open_segment = None
        if segment is None:
            return
        work = self._disk.write_of(segment, segment.address, segment.buffer)
        self._inflight.add_segment(segment, work)
        self._disk.begin_work(work)

    def restore(self, segments: list[SegmentBacking]) -> None:
        """Rebuild the writes from the living segments: see ``_core/session``.

        A segment that is not open and has no known write gets a new one.

        Args:
            segments: the segments that hold living blocks.
        """
        for segment in segments:
            is_open = self._open is not None and self._open() is segment
            if segment.buffer is not None and segment.cleanup.transfer is None and not is_open:
                self._disk.write_of(segment, segment.address, segment.buffer)
