"""Small blocks on their way down: gathered in memory, and written together.

A small block is copied into the open segment when it leaves, so its own memory is free at once. The segment
is written when the next block does not fit, or when the window is full. One at most is open, and its blocks
own it: one whose blocks have all died is never written.
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
"""Blocks below travel in segments."""

SEGMENT_BYTES = 4 << 20
"""What one segment holds, where the window is not smaller."""


class Segments:
    """Fills one segment after the other. The caller holds the stash's lock.

    Args:
        disk: where they are written.
        pool: the memory that they are filled in.
        resident: the set that small blocks leave.
        inflight: the window that counts them.
        event_log: gets the blocks that have left, where somebody records.
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
        self._open: weakref.ref[SegmentBacking] | None = None  # being filled; dies with its blocks

    def gather(self, block: Block, thread_state: ThreadState) -> None:
        """Copy ``block`` into the open segment. Raises ``StashFullError``; the block has not left then."""
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
        """Send the open segment on its way, full or not."""
        segment = self._open() if self._open is not None else None
        self._open = self._disk.open_segment = None
        if segment is None:
            return
        work = self._disk.write_of(segment, segment.address, segment.buffer)
        self._inflight.add_segment(segment, work)
        self._disk.begin_work(work)

    def restore(self, segments: list[SegmentBacking]) -> None:
        """Rebuild what follows from what there is: see ``_session``.

        A segment that is neither open any more nor known to have a write is given one.

        Args:
            segments: that carry living blocks.
        """
        for segment in segments:
            is_open = self._open is not None and self._open() is segment
            if segment.buffer is not None and segment.cleanup.transfer is None and not is_open:
                self._disk.write_of(segment, segment.address, segment.buffer)
