"""Eviction: which blocks stay in place, and which go to the tier below.

A block that comes is resident; what is then beyond the budget is written down, the oldest block first, and is
in flight until its write completes. A small one travels in a segment, any other by itself: to a store or, on
an accelerator, to host memory. A block that finds no room stays where it is.
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
        resident: what is in place.
        health: of the tier below.
        inflight: what is on its way.
        tier: below the device's memory, if there is one. Where it ``runs_ahead``, compute goes on while a
            block larger than the window is alone in it; else such a block is moved within the call.
        segments: how small blocks get there; ``None``: as any other.
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
        """A planner's: called when the device has run out of memory, ``earlier`` than in this step or in it;
        returns what is said of it."""

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

    def expect(self, block: Block) -> None:
        """Take a new block that is expected to be saved again: until then its memory is the program's, in no
        budget."""
        if self.resident.event_log.on:
            self.resident.saved(block)
        block.thread_state.expecting.append(weakref.ref(block))

    def adopt(self, block: Block) -> None:
        """Take a block in place whose thread is another or has ended: it goes when a budget next asks."""
        self.resident.admit(block)
        self.resident.queue.append(block)

    def apply(self, thread_state: ThreadState, block: Block, at_once: bool) -> None:
        """Bring the budgets in order for a block that is complete."""
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
        # Where nothing is kept, nothing waits, and nothing was refused, it is the next to go.
        is_next = at_once or (
            resident.limit == 0 and self.health.is_well and not resident.queue.refs
        )
        memory = resident.memory
        is_captured = memory is not None and memory.device.is_capturing()  # then nothing may move
        if is_captured or not (is_next and self._send(block, thread_state)):
            resident.queue.append(block)
            if resident.limit is not None or resident.memory is not None:
                self._press(thread_state, block)
        # Between operations: while one runs, its tensors are the caller's.
        if resident.nbytes > resident.peak_bytes:
            resident.peak_bytes = resident.nbytes
        if inflight.nbytes > inflight.peak_bytes:
            inflight.peak_bytes = inflight.nbytes

    def shrink(self, thread_state: ThreadState) -> None:
        """Move the oldest blocks until no more stay than may."""
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
                # Only its own thread may judge a copy of it, and that one may be waiting for us:
                # move ours instead.
                resident.queue.appendleft(block)
                if newest is None:
                    return
                if not newest.cleanup.resident_bytes or not self._send(newest, thread_state):
                    return
                if newest.cleanup.resident_bytes:
                    return  # it stays, as memory that was resized does
            elif not self._send(block, thread_state):
                self.health.deferred.append(block)  # a smaller one may find room
        if resident.short_bytes:
            self.inflight.free(resident.short_bytes, thread_state)
        if resident.memory is not None and resident.memory.failed:
            self.ease(earlier=True)  # in backward, say, which calls no stash

    def _may_leave_unseen(self, block: Block) -> bool:
        """Whether another thread's block may go: it is written, not copied, and need not be waited for."""
        inflight = self.inflight
        fits = inflight.nbytes + block.nbytes <= inflight.window_bytes
        return fits and block.nbytes >= _segments.SMALL_BYTES

    def _send(self, block: Block, thread_state: ThreadState) -> bool:
        """Move ``block`` down; whether it left. Raises ``StashFullError`` with ``on_full="raise"``."""
        tier, segments, nbytes = self._tier, self._segments, block.nbytes
        if tier is None or (not self.health.is_well and self.health.refuses(nbytes)):
            return False
        memory, source = self.resident.memory, block.storage_version
        if source.probe._version != source.version and not source.is_parted:  # no call: see changed
            self.resident.lose(block)
            return True
        if block.has_moved:
            return True  # stays in place, wherever that is now: what was resized once may be again
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
            else:
                self._begin_write(block, tier, thread_state)
        except StashFullError as error:
            self.health.full(error, nbytes)
            return False
        return True

    def _begin_write(self, block: Block, tier: LowerTier, thread_state: ThreadState) -> None:
        inflight = self.inflight
        backing, transfer = tier.begin(block)
        inflight.add(block, backing, transfer)  # first, since all counts follow from the placement
        self.resident.leave(block)
        if inflight.nbytes <= inflight.window_bytes:
            return
        if tier.runs_ahead and inflight.is_one:
            return  # larger than the window, and alone in it: compute goes on until the next one
        inflight.stalls.wait(transfer)  # it is moved within this call
        inflight.complete(thread_state, all_that_ended=True)

    def ease(self, *, earlier: bool = False) -> None:
        """The device ran out of memory: from now on keep half of what was kept, at most. A planner decides that
        itself."""
        memory = self.resident.memory
        if memory is not None and self.ran_out is not None:
            memory.forget_failures()
            self.health.notes.add("out of memory", self.ran_out(earlier=earlier))
            return
        limit = self.resident.halve()
        if limit is not None:
            note = f"out of device memory: keep is {format_bytes(limit)} from then on"
            self.health.notes.add("out of memory", note)

    def forget(self) -> None:
        """No block is alive any more."""
        self.resident.queue.clear()
        self.health.deferred.clear()

    def restore(
        self, blocks: list[Block], waiting: set[int], cleanups: dict[type, list[Any]]
    ) -> list[Any]:
        """Rebuild what follows from what there is: see ``_session``.

        Args:
            blocks: that are alive, oldest first.
            waiting: the ``id`` of each that waits for its operation's end.
            cleanups: of all blocks and backings by their class, those yet to be settled too.

        Returns the workers' transfers that perhaps no worker was given.
        """
        backings = {id(block.placement.backing): block.placement.backing for block in blocks}
        segments: list[Any] = [each for each in backings.values() if each and each.is_shared]
        self.health.restore()
        self.resident.restore(blocks, waiting, cleanups[BlockCleanup])
        if self._segments is not None:
            self._segments.restore(segments)
        return self.inflight.restore(blocks, segments, cleanups[DiskCleanup])
