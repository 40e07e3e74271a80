"""The books: what is held and what has died, shared by the way down and the way up."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch

from ._runtime.critical_section import CriticalSection
from ._runtime.reclaim import BlockCleanup, DiskCleanup, HostCleanup, ReclaimQueue
from ._runtime.trace import EventLog
from ._saved.access_order import AccessPredictor
from ._saved.block import Block
from ._saved.thread_state import Counts, ThreadState
from ._tiers.device_tiers import DeviceTiers
from ._tiers.eviction import sequence_number
from ._tiers.host_backing import HostBacking
from .memory import spare_bytes

__all__ = ["Session", "rebuild"]


class Session:
    """The lock, the budgets and the queue of what died. Everything but ``is_forked`` wants the lock held.

    Whoever writes in them does so within ``with session.lock, session.guard:``.
    """

    def __init__(
        self,
        cpu: DeviceTiers,
        reclaim_queue: ReclaimQueue,
        lock: Any,
        section: CriticalSection,
        event_log: EventLog,
        make: Callable[..., DeviceTiers | str],
        *,
        keep: int | str | None,
    ) -> None:
        self.section = section
        section.rebuilt_by(self._rebuild)
        self.device_tiers: list[DeviceTiers] = []
        # Of the sides that are yet to come, too; "auto" follows the memory that is free.
        self._keep = keep
        self._followed = 0  # rounds that had begun when it last did
        self.thread_states: list[ThreadState] = []
        self._ended = Counts()  # of the threads that have ended
        self._tiers_of: dict[torch.device, DeviceTiers | str] = {}
        self._make = make
        self.reclaim_queue = reclaim_queue
        self.lock = lock
        self.predictor = AccessPredictor()
        self._event_log = event_log
        self.blocks_alive = 0
        self._pid = self._forked_pid = os.getpid()
        self.put(torch.device("cpu"), cpu)

    def _rebuild(self) -> None:
        rebuild(self, self.thread_states)

    def is_forked(self) -> bool:
        """Whether this is a child process; there the threads are gone, and whoever held the lock."""
        pid = os.getpid()
        if pid != self._forked_pid:
            self._forked_pid = pid
            self.lock = threading.RLock()
            self.section.forget()
            for tiers in self.device_tiers:
                tiers.prefetcher.forked(self.lock)
        return pid != self._pid

    def tiers_of(self, device: torch.device) -> DeviceTiers | str:
        """The side of a device, or the reason why it has none. Takes the lock itself."""
        tiers = self._tiers_of.get(device)
        if tiers is None:
            with self.lock:
                if device not in self._tiers_of:
                    made = self._tiers_of[device] = self._make(device, len(self.device_tiers))
                    if not isinstance(made, str):
                        self._begin(made)
                tiers = self._tiers_of[device]
        return tiers

    def put(self, device: torch.device, tiers: DeviceTiers) -> None:
        """From now on, tensors of ``device`` are of ``side``."""
        self._tiers_of[device] = tiers
        self._begin(tiers)

    def _begin(self, tiers: DeviceTiers) -> None:
        self.device_tiers.append(tiers)
        self._limit(tiers)

    def limit(self, keep: int | str | None) -> None:
        """From now on, keep at most so many bytes in place on each device.

        ``None``: no limit; ``"auto"``: half of what its memory has free when a step begins.
        """
        self._keep = keep
        for tiers in self.device_tiers:
            self._limit(tiers)

    def _limit(self, tiers: DeviceTiers) -> None:
        tiers.evictor.resident.set_limit(0 if isinstance(self._keep, str) else self._keep)
        self._follow(tiers)

    def complete(self, thread_state: ThreadState) -> None:
        """See :meth:`InflightWrites.complete`."""
        for tiers in self.device_tiers:
            tiers.evictor.inflight.complete(thread_state)

    def settle(self, thread_state: ThreadState, *, ended: bool = False) -> None:
        """Bring the budgets in order for what waits on ``thread_state``, if the operation that saved it has ended.

        Raises ``StashFullError`` if the caller wants it; what was not yet looked at waits on.
        """
        while thread_state.waiting and (ended or thread_state.operation != sequence_number()):
            waiting, at_once = thread_state.waiting.popleft()
            block = waiting()
            if block is not None and block.cleanup.resident_bytes:
                block.tiers.evictor.apply(thread_state, block, at_once)

    def new_thread_state(self) -> ThreadState:
        """A lane for this thread. Those of threads that have ended are closed, and need not be kept."""
        for thread_state in [
            thread_state
            for thread_state in self.thread_states
            if not thread_state.thread.is_alive()
        ]:
            self.thread_states.remove(thread_state)
            self._ended += thread_state.counts
            self.adopt(thread_state)
        thread_state = ThreadState()
        self.thread_states.append(thread_state)
        return thread_state

    def counts(self) -> Counts:
        """What all threads have given to the stash so far."""
        return sum((thread_state.counts for thread_state in self.thread_states), self._ended)

    def adopt(self, thread_state: ThreadState) -> None:
        """Of a thread that has ended: what waits there may go when a budget next asks."""
        for waiting, _ in thread_state.waiting:
            block = waiting()
            if block is not None:
                block.tiers.evictor.resident.queue.append(block)
        thread_state.waiting.clear()

    def _follow(self, tiers: DeviceTiers) -> None:
        """With ``keep="auto"``: half of what its memory has free, with what it keeps already."""
        if self._keep != "auto" or (tiers.device is not None and tiers.device.is_capturing()):
            return
        free = tiers.device.free_bytes() if tiers.device is not None else spare_bytes()
        tiers.evictor.resident.follow(free)

    def ease(self) -> None:
        """See :meth:`Evictor.ease`."""
        for tiers in self.device_tiers:
            tiers.evictor.ease()

    def try_again(self) -> None:
        """See :meth:`TierHealth.try_again`."""
        for tiers in self.device_tiers:
            tiers.evictor.health.try_again()

    def add(self, block: Block) -> None:
        """A block that is held from now on."""
        self.predictor.add(block)
        if self._followed != self.predictor.passes:
            self._followed = self.predictor.passes
            for tiers in self.device_tiers:
                self._follow(tiers)
        self.blocks_alive += 1

    def drain(self) -> None:
        """Settle what died since the last call."""
        reclaim_queue, running, before = self.reclaim_queue, 0, self.blocks_alive
        while len(reclaim_queue) > running:
            left = reclaim_queue[0]
            if isinstance(left, DiskCleanup) and _is_written_to(left):
                reclaim_queue.rotate(-1)  # its slot is needed until then
                running += 1
                continue
            self._settle_death(left, self.device_tiers[left.number])
            reclaim_queue.popleft()
        if before and not self.blocks_alive:
            self._forget()

    def _settle_death(self, left: Any, tiers: DeviceTiers) -> None:
        # What is settled is struck out in the same breath, so that nobody who comes after an interrupt, or
        # makes the books anew from all remains there are, counts it twice.
        held, left.loaded_bytes = left.loaded_bytes, 0
        tiers.prefetcher.ahead_bytes -= held
        if isinstance(left, BlockCleanup):
            kept, left.resident_bytes, serial, left.serial = left.resident_bytes, 0, left.serial, -1
            tiers.evictor.resident.nbytes -= kept
            self.blocks_alive -= serial >= 0
            if self._event_log.on:
                self._event_log.emit("free", left.nbytes, serial, left.module)
        elif isinstance(left, HostCleanup):
            assert tiers.host is not None
            tiers.host.buffers.defer(left)
        else:
            inflight_bytes, left.inflight_bytes, slot, left.slot = (
                left.inflight_bytes,
                0,
                left.slot,
                None,
            )
            tiers.evictor.inflight.nbytes -= inflight_bytes
            if slot is not None:
                left.store.release(slot)

    def _forget(self) -> None:
        """No block is alive any more: nothing need be remembered of those that were."""
        self.predictor.forget()
        for tiers in self.device_tiers:
            tiers.evictor.forget()
            tiers.prefetcher.forget()
            if tiers.host is not None:
                tiers.host.writeback.forget()


def _is_written_to(left: DiskCleanup) -> bool:
    writing = left.writing
    return writing is not None and not (writing.done() or writing.cancel())


def rebuild(session: Session, thread_states: Iterable[ThreadState]) -> None:
    """Make the books anew. The caller holds the lock.

    Args:
        lanes: of the threads that have used the stash.
    """
    kinds = (Block, BlockCleanup, DiskCleanup, HostCleanup)
    # What gc.freeze() has taken out of the collector's sight is not found: nobody freezes a live graph.
    mine = [
        each
        for each in gc.get_objects()
        if type(each) in kinds and _mark_of(each) is session.reclaim_queue.mark
    ]
    cleanup = [each for each in mine if not isinstance(each, Block)]
    blocks = [each for each in mine if isinstance(each, Block) and each.cleanup.serial >= 0]
    blocks.sort(key=lambda block: block.cleanup.serial)
    waiting = {
        id(block)
        for thread_state in thread_states
        for ref, _ in thread_state.waiting
        if (block := ref())
    }
    for tiers in session.device_tiers:
        _restore(tiers, [block for block in blocks if block.tiers is tiers], waiting, cleanup)
    session.blocks_alive = sum(_is_counted(each) for each in cleanup)


def _restore(
    tiers: DeviceTiers, blocks: list[Block], waiting: set[int], cleanup: list[Any]
) -> None:
    mine = [each for each in cleanup if each.number == tiers.number]
    backings = list(
        {id(block.backing): block.backing for block in blocks if block.backing}.values()
    )
    tiers.evictor.restore(blocks, waiting, mine)
    tiers.prefetcher.restore([*backings, *blocks])
    tiers.prefetcher.ahead_bytes = sum(each.loaded_bytes for each in mine)
    if tiers.host is not None:
        of_host = [each for each in backings if isinstance(each, HostBacking)]
        tiers.host.restore(of_host, [each for each in mine if isinstance(each, HostCleanup)])


def _mark_of(each: Any) -> Any:
    try:
        return (each.cleanup if isinstance(each, Block) else each).mark
    except AttributeError:  # it was not made to its end
        return None


def _is_counted(each: Any) -> bool:
    return isinstance(each, BlockCleanup) and each.serial >= 0
