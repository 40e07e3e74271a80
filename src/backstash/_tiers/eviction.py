"""The way down: who stays in place, and who goes.

A block that comes is kept (``_keep``); what is then beyond the budget *takes off*, the oldest first, and is
in flight (``_inflight``) until it lands. A small one travels in a segment (``_tiers/segments``), any other by
itself: to a store (``_disk``) or, on an accelerator, to host memory (``_host``). What finds no room stays
where it is (``_health``).
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from .._runtime.reclaim import BlockCleanup, DiskCleanup
from .._saved.block import Block
from .._saved.thread_state import ThreadState
from ..errors import StashFullError
from ..units import format_bytes
from .backing import DiskBacking, SegmentBacking
from .disk import DiskTier
from .health import TierHealth
from .host import HostTier
from .host_backing import HostBacking
from .inflight import InflightWrites
from .resident import ResidentSet
from .segments import Segments

__all__ = ["SMALL_BYTES", "Evictor", "sequence_number"]

sequence_number = torch.autograd._get_sequence_nr  # type: ignore[attr-defined]

SMALL_BYTES = 512 << 10
"""Blocks below travel in segments."""


class Evictor:
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
        resident: ResidentSet,
        health: TierHealth,
        inflight: InflightWrites,
        *,
        disk: DiskTier | None = None,
        segments: Segments | None = None,
        host: HostTier | None = None,
    ) -> None:
        self.resident = resident
        self.health = health
        self.inflight = inflight
        self.disk = disk
        self._segments = segments
        self._host = host
        self._tier = disk if host is None else host

    def admit(self, block: Block, *, at_once: bool, complete: bool) -> None:
        """Take a new block in place; then bring the budgets in order. ``at_once`` skips ``keep``.

        One that may not be ``complete`` waits until the operation that saves it has ended.
        """
        self.resident.admit(block)
        if complete:
            self.apply(block.thread_state, block, at_once)
        else:
            block.thread_state.waiting.append((weakref.ref(block), at_once))
            block.thread_state.operation = sequence_number()

    def apply(self, thread_state: ThreadState, block: Block, at_once: bool) -> None:
        """Bring the budgets in order for a block that is complete."""
        self.inflight.complete(thread_state)
        if not (at_once and self._send(block, thread_state)):
            self.resident.queue.append(block)
            self._press(thread_state, block)
        self.resident.measure()
        self.inflight.measure()

    def _press(self, thread_state: ThreadState, newest: Block) -> None:
        resident = self.resident
        most = resident.most(newest.nbytes, self.inflight.nbytes)
        while most is not None and resident.nbytes > most and resident.queue:
            block = resident.queue.popleft()
            if block is None:
                continue
            if not thread_state.may_judge(block.thread_state) and not self._may_leave_unseen(block):
                # Only its own thread may judge a copy of it, and that one may be waiting for us:
                # move ours instead.
                resident.queue.appendleft(block)
                if not newest.cleanup.resident_bytes or not self._send(newest, thread_state):
                    return
            elif not self._send(block, thread_state):
                self.health.deferred.append(block)  # a smaller one may find room
        if resident.short_bytes:
            self.inflight.let_go(resident.short_bytes, thread_state)
        if resident.ran_out():  # in backward, say, where nobody tells
            self.ease()

    def _may_leave_unseen(self, block: Block) -> bool:
        """Whether another thread's block may go: it is written, not copied, and need not be waited for."""
        return block.nbytes >= SMALL_BYTES and self.inflight.has_room(block.nbytes)

    def _send(self, block: Block, thread_state: ThreadState) -> bool:
        """Move ``block`` down; whether it left. Raises ``StashFullError`` if the caller wants it."""
        tier, segments, nbytes = self._tier, self._segments, block.nbytes
        if tier is None or self.health.refuses(nbytes):
            return False
        if self._host is not None and self._host.device.is_capturing():
            return False
        if block.storage_version.changed:
            self.resident.lose(block)
            return True
        if block.has_moved:
            return True  # stays in place, wherever that is now: what was resized once may be again
        try:
            if segments is not None and nbytes < SMALL_BYTES:
                segments.gather(block, thread_state)
            else:
                self.inflight.make_room(nbytes, thread_state)
                self._begin_write(block, tier.begin(block), thread_state)
        except StashFullError as error:
            self.health.full(error, nbytes)
            return False
        return True

    def _begin_write(
        self, block: Block, backing: DiskBacking | HostBacking, thread_state: ThreadState
    ) -> None:
        writing, inflight = backing.cleanup.writing, self.inflight
        assert writing is not None
        block.backing = backing
        self.resident.leave(block)
        inflight.add(block, writing)
        if inflight.has_room(0):
            return
        if self._host is not None and inflight.is_one:
            return  # larger than the window, and alone in it: compute goes on until the next one
        inflight.wait(writing)  # it is moved within this call
        inflight.complete(thread_state, all_that_ended=True)

    def ease(self) -> None:
        """The device ran out of memory: from now on keep half of what was kept, at most."""
        limit = self.resident.halve()
        if limit is not None:
            note = f"out of device memory: keep is {format_bytes(limit)} from then on"
            self.health.notes[note] = None

    def forget(self) -> None:
        """No block is alive any more."""
        self.resident.queue.clear()
        self.health.deferred.clear()

    def restore(self, blocks: list[Block], waiting: set[int], cleanup: list[Any]) -> None:
        """Make the books anew from what there is: see ``_session``.

        Args:
            blocks: that are alive, oldest first.
            waiting: the ``id`` of each that waits for its operation's end.
            remains: of all blocks and parcels, the dead ones that are yet to be settled too.
        """
        of_blocks = [left for left in cleanup if isinstance(left, BlockCleanup)]
        of_parcels = [left for left in cleanup if isinstance(left, DiskCleanup)]
        backings = {id(block.backing): block.backing for block in blocks}.values()
        segments = [backing for backing in backings if isinstance(backing, SegmentBacking)]
        self.health.restore()
        self.resident.restore(blocks, waiting, of_blocks)
        if self._segments is not None:
            self._segments.restore(segments)
        for work in self.inflight.restore(blocks, segments, of_parcels):
            assert self.disk is not None
            self.disk.begin_work(work)
