"""The way down: who stays in place, and who goes.

A block that comes is kept (``_keep``); what is then beyond the budget *takes off*, the oldest first, and is
in flight (``_flights``) until it lands. A small one travels in a segment (``_segments``), any other by
itself: to a store (``_disk``) or, on an accelerator, to host memory (``_host``). What finds no room stays
where it is (``_refusals``).
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from ._blocks import Block
from ._disk import DiskTier
from ._flights import Flights
from ._host import HostTier
from ._host_parcels import HostParcel
from ._keep import Keep
from ._lanes import Lane
from ._parcels import Parcel, Segment
from ._refusals import Refusals
from ._remains import BlockRemains, ParcelRemains
from ._segments import Segments
from .errors import StashFullError
from .units import format_bytes

__all__ = ["SMALL_BYTES", "Down", "sequence_number"]

sequence_number = torch.autograd._get_sequence_nr  # type: ignore[attr-defined]

SMALL_BYTES = 512 << 10
"""Blocks below travel in segments."""


class Down:
    """Brings the ``keep`` and ``inflight`` budgets in order. The caller holds the stash's lock.

    Args:
        keep: what is in place.
        refusals: what could not be had.
        flights: what is on its way.
        disk: the tier below the CPU's memory, if there is one; on an accelerator ``None``.
        segments: how small blocks get there.
        host: the tier below an accelerator. A block larger than the window is alone in it, and compute
            goes on meanwhile; on the CPU it is moved within the call.
    """

    def __init__(
        self,
        keep: Keep,
        refusals: Refusals,
        flights: Flights,
        *,
        disk: DiskTier | None = None,
        segments: Segments | None = None,
        host: HostTier | None = None,
    ) -> None:
        self.keep = keep
        self.refusals = refusals
        self.flights = flights
        self.disk = disk
        self._segments = segments
        self._host = host
        self._tier = disk if host is None else host

    def admit(self, block: Block, *, at_once: bool, complete: bool) -> None:
        """Take a new block in place; then bring the budgets in order. ``at_once`` skips ``keep``.

        One that may not be ``complete`` waits until the operation that saves it has ended.
        """
        self.keep.admit(block)
        if complete:
            self.apply(block.lane, block, at_once)
        else:
            block.lane.waiting.append((weakref.ref(block), at_once))
            block.lane.operation = sequence_number()

    def apply(self, lane: Lane, block: Block, at_once: bool) -> None:
        """Bring the budgets in order for a block that is complete."""
        self.flights.land(lane)
        if not (at_once and self._send(block, lane)):
            self.keep.queue.append(block)
            self._press(lane, block)
        self.keep.measure()
        self.flights.measure()

    def _press(self, lane: Lane, newest: Block) -> None:
        keep = self.keep
        most = keep.most(newest.nbytes, self.flights.nbytes)
        while most is not None and keep.nbytes > most and keep.queue:
            block = keep.queue.popleft()
            if block is None:
                continue
            if not lane.may_land(block.lane) and not self._may_leave_unseen(block):
                # Only its own thread may judge a copy of it, and that one may be waiting for us:
                # move ours instead.
                keep.queue.appendleft(block)
                if not newest.remains.kept or not self._send(newest, lane):
                    return
            elif not self._send(block, lane):
                self.refusals.stuck.append(block)  # a smaller one may find room
        if keep.short_bytes:
            self.flights.let_go(keep.short_bytes, lane)
        if keep.ran_out():  # in backward, say, where nobody tells
            self.ease()

    def _may_leave_unseen(self, block: Block) -> bool:
        """Whether another thread's block may go: it is written, not copied, and need not be waited for."""
        return block.nbytes >= SMALL_BYTES and self.flights.has_room(block.nbytes)

    def _send(self, block: Block, lane: Lane) -> bool:
        """Move ``block`` down; whether it left. Raises ``StashFullError`` if the caller wants it."""
        tier, segments, nbytes = self._tier, self._segments, block.nbytes
        if tier is None or self.refusals.refuses(nbytes):
            return False
        if self._host is not None and self._host.device.is_capturing():
            return False
        if block.source.changed:
            self.keep.lose(block)
            return True
        if block.has_moved:
            return True  # stays in place, wherever that is now: what was resized once may be again
        try:
            if segments is not None and nbytes < SMALL_BYTES:
                segments.gather(block, lane)
            else:
                self.flights.make_room(nbytes, lane)
                self._take_off(block, tier.begin(block), lane)
        except StashFullError as error:
            self.refusals.full(error, nbytes)
            return False
        return True

    def _take_off(self, block: Block, parcel: Parcel | HostParcel, lane: Lane) -> None:
        writing, flights = parcel.remains.writing, self.flights
        assert writing is not None
        block.parcel = parcel
        self.keep.leave(block)
        flights.add(block, writing)
        if flights.has_room(0):
            return
        if self._host is not None and flights.is_one:
            return  # larger than the window, and alone in it: compute goes on until the next one
        flights.wait(writing)  # it is moved within this call
        flights.land(lane, all_that_ended=True)

    def ease(self) -> None:
        """The device ran out of memory: from now on keep half of what was kept, at most."""
        limit = self.keep.halve()
        if limit is not None:
            note = f"out of device memory: keep is {format_bytes(limit)} from then on"
            self.refusals.notes[note] = None

    def forget(self) -> None:
        """No block is alive any more."""
        self.keep.queue.clear()
        self.refusals.stuck.clear()

    def restore(self, blocks: list[Block], waiting: set[int], remains: list[Any]) -> None:
        """Make the books anew from what there is: see ``_repair``.

        Args:
            blocks: that are alive, oldest first.
            waiting: the ``id`` of each that waits for its operation's end.
            remains: of all blocks and parcels, the dead ones that are yet to be settled too.
        """
        of_blocks = [left for left in remains if isinstance(left, BlockRemains)]
        of_parcels = [left for left in remains if isinstance(left, ParcelRemains)]
        parcels = {id(block.parcel): block.parcel for block in blocks}.values()
        segments = [parcel for parcel in parcels if isinstance(parcel, Segment)]
        self.refusals.restore()
        self.keep.restore(blocks, waiting, of_blocks)
        if self._segments is not None:
            self._segments.restore(segments)
        for work in self.flights.restore(blocks, segments, of_parcels):
            assert self.disk is not None
            self.disk.begin_work(work)
