"""Small blocks on their way down: gathered in memory, and written together.

A small block is copied into the open segment when it leaves, so its own memory is free at once. The segment
is written when the next block does not fit, or when the window is full. One at most is open, and its blocks
own it: one whose blocks have all died is never written.
"""

from __future__ import annotations

import ctypes
import weakref

from ._blocks import Block
from ._disk import DiskTier
from ._events import Tape
from ._flights import Flights
from ._keep import Keep
from ._lanes import Lane
from ._parcels import Segment
from .stores._memory import PAGE_BYTES, Pool

__all__ = ["SEGMENT_BYTES", "Segments"]

SEGMENT_BYTES = 4 << 20
"""What one segment holds, where the window is not smaller."""


class Segments:
    """Fills one segment after the other. The caller holds the stash's lock.

    Args:
        disk: where they are written.
        pool: the memory that they are filled in.
        keep: what small blocks leave.
        flights: the window that counts them.
        tape: is told of blocks that have left, where somebody records.
    """

    def __init__(
        self, disk: DiskTier, pool: Pool, keep: Keep, flights: Flights, tape: Tape
    ) -> None:
        self._disk = disk
        self._pool = pool
        self._keep = keep
        self._flights = flights
        self._tape = tape
        self._open: weakref.ref[Segment] | None = None  # being filled; dies with its blocks

    def gather(self, block: Block, lane: Lane) -> None:
        """Copy ``block`` into the open segment. Raises ``StashFullError``; the block has not left then."""
        segment = self._open() if self._open is not None else None
        at = segment.place(block.address, block.nbytes) if segment is not None else None
        if segment is None or at is None:
            self._close()
            segment = self._open_one(block.nbytes + 128)
            at = segment.place(block.address, block.nbytes)
            assert at is not None
        flights = self._flights
        flights.make_room(block.nbytes, lane)
        ctypes.memmove(segment.address + at, block.address, block.nbytes)
        segment.filled = at + block.nbytes
        segment.remains.flown += block.nbytes
        segment.blocks += 1
        block.parcel, block.offset, block.alias = segment, at, None
        self._keep.leave(block)
        flights.count(block.nbytes)
        if self._tape.on:
            self._tape.tell("land", *block.facts)
        if not flights.has_room(0):
            self._close()
            flights.make_room(0, lane)

    def _open_one(self, at_least: int) -> Segment:
        nbytes = max(min(SEGMENT_BYTES, self._flights.window_bytes // 8), at_least)
        nbytes = -(-nbytes // PAGE_BYTES) * PAGE_BYTES
        disk = self._disk
        slot = disk.reserve(nbytes)
        segment = Segment(disk.store, slot, self._pool.take(nbytes), disk.grave)
        self._open = weakref.ref(segment)
        return segment

    def _close(self) -> None:
        """Send the open segment on its way, full or not."""
        segment = self._open() if self._open is not None else None
        self._open = None
        if segment is None:
            return
        work = self._disk.write_of(segment, segment.address, segment.buffer)
        self._flights.add_segment(segment, work)
        self._disk.begin_work(work)

    def restore(self, segments: list[Segment]) -> None:
        """Make the books anew from what there is: see ``_repair``.

        What was neither open any more nor known to have a write is given one.

        Args:
            segments: that carry living blocks.
        """
        self._pool.restore()
        for segment in segments:
            is_open = self._open is not None and self._open() is segment
            if segment.buffer is not None and segment.remains.writing is None and not is_open:
                self._disk.write_of(segment, segment.address, segment.buffer)
