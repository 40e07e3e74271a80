"""Eviction: which blocks stay in place, and which are written to the tier below.

A new block is resident. If the budget is exceeded, the oldest blocks are written, and are in flight until
their writes complete. Small blocks are written in segments. Others are written separately, to a store or, on
an accelerator, to host memory. A block that finds no space stays where it is.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from .._saved.block import Block, BlockCleanup
from .._saved.thread_state import ThreadState
from .._torch.engine import sequence_number
from ..errors import StashFullError
from ..units import format_bytes
from . import segments as _segments
from .backing import DiskCleanup
from .base import LowerTier
from .health import TierHealth
from .inflight import InflightWrites
from .resident import ResidentSet
from .segments import Segments

__all__ = ["Evictor"]


class Evictor:
    """Keeps the ``keep`` and ``inflight`` budgets. The caller holds the stash's lock.

    Args:
        resident: the blocks in place.
        health: the health of the tier below.
        inflight: the writes that have begun.
        tier: the tier below the device's memory, if there is one. If it ``runs_ahead``, computation continues
            while a block larger than the window is alone in it. Otherwise the call waits for such a block.
        segments: writes small blocks; ``None``: they are written like others.
    """

    def __init__(
        self,
        resident: ResidentSet,
        health: TierHealth,
        inflight: InflightWrites,
        *,
        tier: LowerTier | None = None,
        segments: Segments | None = None,
    ) -> None:
        self.resident = resident
        self.health = health
        self.inflight = inflight
        self._tier = tier
        self._segments = segments
        self.ran_out: Callable[..., str] | None = None
        """Set by a planner: called when the device ran out of memory, in an ``earlier`` step or in this one.
        Returns the note for reports."""

    def admit(self, block: Block, *, at_once: bool, complete: bool) -> None:
        """Add a new block in place, then enforce the budgets. ``at_once`` ignores ``keep``.

        A block that may not be ``complete`` waits until the operation that saves it has ended.
        """
        self.resident.admit(block)
        if complete:
            self.apply(block.thread_state, block, at_once)
        else:
            block.thread_state.waiting.append((weakref.ref(block), at_once))
            block.thread_state.operation = sequence_number()

    def expect(self, block: Block) -> None:
        """Add a new block that is expected to be saved again. Until then its memory is the program's and
        counts toward no budget."""
        if self.resident.event_log.on:
            self.resident.saved(block)
        block.thread_state.expecting.append(weakref.ref(block))

    def adopt(self, block: Block) -> None:
        """Add a block in place of another thread, or of one that has ended. It may be evicted later."""
        self.resident.admit(block)
        self.resident.queue.append(block)

    def apply(self, thread_state: ThreadState, block: Block, at_once: bool) -> None:
        """Enforce the budgets for a block that is complete."""
        resident, inflight = self.resident, self.inflight
        if inflight.writes:
            inflight.complete(thread_state)
        reduction = block.reduction
        if reduction is not None and reduction.apply is not None:
            reduce, reduction.apply = reduction.apply, None
            payload = reduce(block)
            if payload is None:
                return
            block = payload
        # If nothing is kept, waits or was refused, this block is the next to be evicted.
        is_next = at_once or (
            resident.limit == 0 and self.health.is_well and not resident.queue.refs
        )
        memory = resident.memory
        if is_next and memory is not None and memory.device.is_capturing():
            is_next = False  # no copy may begin now
        if not (is_next and self._send(block, thread_state)):
            resident.queue.append(block)
            if resident.limit is not None or memory is not None:
                self._press(thread_state, block)
        # Peaks are taken between operations: the tensors of a running one belong to the caller.
        if resident.nbytes > resident.peak_bytes:
            resident.peak_bytes = resident.nbytes
        if inflight.nbytes > inflight.peak_bytes:
            inflight.peak_bytes = inflight.nbytes

    def shrink(self, thread_state: ThreadState) -> None:
        """Evict the oldest blocks until the rest fits the budget."""
        self._press(thread_state, None)

    def _press(self, thread_state: ThreadState, newest: Block | None) -> None:
        resident = self.resident
        most = resident.most(newest.nbytes if newest is not None else 0, self.inflight.nbytes)
        while most is not None and resident.nbytes > most and resident.queue.refs:
            block = resident.queue.popleft()
            if block is None:
                continue
            if block.thread_state is not thread_state and not (
                thread_state.may_judge(block.thread_state) or self._may_leave_unseen(block)
            ):
                # Only the block's own thread may accept a copy of it, and that thread may be waiting for this
                # one. Evict this thread's block instead.
                resident.queue.appendleft(block)
                if newest is None:
                    return
                if not newest.cleanup.resident_bytes or not self._send(newest, thread_state):
                    return
                if newest.cleanup.resident_bytes:
                    return  # it stays in place, for example because its storage was resized
            elif not self._send(block, thread_state):
                self.health.deferred.append(block)  # a smaller block may find space
        if resident.short_bytes:
            self.inflight.free(resident.short_bytes, thread_state)
        if resident.memory is not None and resident.memory.failed:
            self.ease(earlier=True)  # e.g. in a backward, which calls no stash

    def _may_leave_unseen(self, block: Block) -> bool:
        """Return whether another thread's block may be evicted: its write need not be waited for."""
        inflight = self.inflight
        fits = inflight.nbytes + block.nbytes <= inflight.window_bytes
        return fits and block.nbytes >= _segments.SMALL_BYTES

    def _send(self, block: Block, thread_state: ThreadState) -> bool:
        """Evict ``block``. Return whether it left. Raises ``StashFullError`` with ``on_full="raise"``."""
        tier, segments, nbytes = self._tier, self._segments, block.nbytes
        if tier is None or (not self.health.is_well and self.health.refuses(nbytes)):
            return False
        memory, source = self.resident.memory, block.storage_version
        if source.probe._version != source.version and not source.is_parted:  # `changed`, inlined
            self.resident.lose(block)
            return True
        if block.has_moved:
            return True  # stays in place: a storage that was resized may be resized again
        inflight, is_gathered = self.inflight, nbytes < _segments.SMALL_BYTES
        try:
            if segments is None or not is_gathered:
                if inflight.nbytes + nbytes > inflight.window_bytes:
                    inflight.make_room(nbytes, thread_state)
                if source.is_parted and not block.copy_out():
                    return False
            if block.saves.done != block.saves.expected:
                block.take_fingerprint(memory.device if memory is not None else None)
            if segments is not None and is_gathered:
                segments.gather(block, thread_state)
                return True
            backing, transfer = tier.begin(block)
            inflight.add(
                block, backing, transfer
            )  # first: all counts are derived from the placement
            self.resident.leave(block)
            # What is larger than the window is waited for in this call. If it is alone there and the tier runs
            # ahead, the next write waits.
            if inflight.nbytes > inflight.window_bytes and not (
                tier.runs_ahead and inflight.is_one
            ):
                inflight.stalls.wait(transfer)
                inflight.complete(thread_state, all_that_ended=True)
        except StashFullError as error:
            self.health.full(error, nbytes)
            return False
        return True

    def ease(self, *, earlier: bool = False) -> None:
        """Handle that the device ran out of memory: keep at most half of what was kept from now on. A planner
        decides this for itself."""
        memory = self.resident.memory
        if memory is not None and self.ran_out is not None:
            memory.forget_failures()
            self.health.notes.add("out of memory", self.ran_out(earlier=earlier))
            return
        limit = self.resident.halve()
        if limit is not None:
            note = f"out of device memory: keep is lowered to {format_bytes(limit)}"
            self.health.notes.add("out of memory", note)

    def forget(self) -> None:
        """Forget all blocks, since none is alive."""
        self.resident.queue.clear()
        self.health.deferred.clear()

    def restore(
        self, blocks: list[Block], waiting: set[int], cleanups: dict[type, list[Any]]
    ) -> list[Any]:
        """Rebuild the counts and queues from the living blocks: see ``_core/session``.

        Args:
            blocks: the living blocks, oldest first.
            waiting: the ``id`` of each block that waits for its operation to end.
            cleanups: of all blocks and backings by class, including those not settled yet.

        Returns the transfers that may not have reached a worker.
        """
        backings = {id(block.placement.backing): block.placement.backing for block in blocks}
        segments: list[Any] = [each for each in backings.values() if each and each.is_shared]
        self.health.restore()
        self.resident.restore(blocks, waiting, cleanups[BlockCleanup])
        if self._segments is not None:
            self._segments.restore(segments)
        return self.inflight.restore(blocks, segments, cleanups[DiskCleanup])
