"""State shared by all threads of one stash: lock, tiers, thread states, deferred frees.

An interrupt (``KeyboardInterrupt``) can come between any two calls, a ``MemoryError`` in most of them. What is
*true* is changed by single steps that neither can divide: a block's placement, and what a backing or a cleanup
holds. All sums, queues and free lists follow from it. So the next thread that takes the lock after one that
did not leave in good order rebuilds those, from every object that is alive, which Python's collector knows.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch

from .._device.base import Device
from .._runtime.critical_section import CriticalSection
from .._runtime.reclaim import Cleanup, ReclaimQueue
from .._runtime.trace import EventLog
from .._saved.access_order import AccessPredictor
from .._saved.block import Block, BlockCleanup
from .._saved.save_counts import SaveCounts
from .._saved.thread_state import Counts, ThreadState
from .._tiers.backing import DiskCleanup
from .._tiers.device_tiers import DeviceTiers
from .._tiers.host_backing import HostCleanup
from .._tiers.small_steps import SMALL_STEP_BYTES, SmallSteps
from .._torch.engine import sequence_number
from ..errors import UsageError
from ..memory import spare_bytes
from ..policy import MIN_BYTES
from .controller import Controller

__all__ = ["Session"]

_CPU = torch.device("cpu")
_CLEANUPS = (BlockCleanup, DiskCleanup, HostCleanup)


class Session:
    """What one stash holds and counts. Its methods want ``with section.lock, section:`` around them, but for
    ``restart`` and ``tiers_of``.

    Args:
        reclaim_queue: of what died.
        section: the lock.
        event_log: gets the blocks that died, where somebody records.
        make: the tiers of a device, ``(driver, number)``; the driver is ``None`` for the CPU.
        make_of: the tiers of an accelerator by its ``torch.device``, or the reason why it has none.
        keep: bytes that may stay in place on each device; ``None``: no limit; ``"auto"``: half of what its
            memory has free when a step begins.
        min_bytes: tensors with a smaller storage stay in place; ``None``: 64 KiB, or what a planner says.
        controller_for: makes what decides for a device (``None``: the CPU), where somebody does. It sets the
            device's limit, and is told when a step begins. Where an accelerator has one, the CPU has none.
    """

    def __init__(
        self,
        reclaim_queue: ReclaimQueue,
        section: CriticalSection,
        event_log: EventLog,
        make: Callable[[Any, int], DeviceTiers],
        make_of: Callable[[torch.device, int], DeviceTiers | str],
        *,
        keep: int | str | None,
        controller_for: Callable[[Device | None], Controller | None] = lambda device: None,
        min_bytes: int | None = None,
    ) -> None:
        self.section = section
        self._least = min_bytes
        self.min_bytes = MIN_BYTES if min_bytes is None else min_bytes
        """Tensors with a smaller storage stay in place."""
        self._controller_for = controller_for
        self.planners: dict[int, Controller] = {}
        """By the number of the device: what plans for it."""
        self._due: set[int] = set()  # devices whose planner is yet to be told of the step
        self.small_steps: dict[int, SmallSteps] = {}
        """By the number of the device: what leaves its small steps alone, where somebody does."""
        section.rebuilt_by(self.rebuild)
        self._keep = keep  # of the devices that are yet to come, too
        self.thread_states: list[ThreadState] = []
        self.uses = 0
        """Of blocks, in backward, so far; what a thread was told of a step holds as long as it is the same."""
        self.event_log = event_log
        self.restart(reclaim_queue, make, make_of)

    def restart(
        self,
        reclaim_queue: ReclaimQueue,
        make: Callable[[Any, int], DeviceTiers],
        make_of: Callable[[torch.device, int], DeviceTiers | str],
    ) -> None:
        """Hold nothing: at first, and in a forked process, where what was held is the other process's.

        The arguments are the constructor's. Of the threads, those that are alive are known on.
        """
        # Of the planners, the CPU's goes on; an accelerator is not there in a forked process.
        for number in [number for number in self.planners if number]:
            self.planners.pop(number).forked()
        self.device_tiers: list[DeviceTiers] = []
        self.known_tiers: dict[torch.device, DeviceTiers | str] = {}
        """By device; or the reason why a device has none."""
        self._make_of = make_of
        self.reclaim_queue = reclaim_queue
        self.predictor: AccessPredictor[Block] = AccessPredictor()
        self.save_counts = SaveCounts()
        self._has_stepped = False
        self._unfollowed: set[int] = (
            set()
        )  # devices whose free memory is yet to be asked for in this step
        self._followed = 0  # passes that had begun when "auto" last followed the free memory
        self.thread_states = [each for each in self.thread_states if each.is_alive()]
        for thread_state in self.thread_states:
            thread_state.restart()
        self._ended = Counts()  # of the threads that have ended
        self.blocks_alive = 0
        self.put(_CPU, make(None, 0))
        if self.small_steps:
            self.leave_small_steps(self.small_steps[0].most_bytes)

    @property
    def lock(self) -> Any:
        """The stash's lock: a forked process has another one."""
        return self.section.lock

    def tiers_of(self, device: torch.device) -> DeviceTiers | str:
        """The tiers of a device, or the reason why it has none. Takes the lock itself."""
        tiers = self.known_tiers.get(device)
        if tiers is None:
            with self.section.lock:
                if device not in self.known_tiers:
                    made = self._make_of(device, len(self.device_tiers))
                    if not isinstance(made, str):
                        self._begin(made)
                    # Known last: an interrupt leaves tiers that nothing uses, not a device without any.
                    self.known_tiers[device] = made
                tiers = self.known_tiers[device]
        return tiers

    def put(self, device: torch.device, tiers: DeviceTiers) -> None:
        """From now on, tensors of ``device`` go to ``tiers``."""
        self._begin(tiers)
        self.known_tiers[device] = tiers

    def _begin(self, tiers: DeviceTiers) -> None:
        self.device_tiers.append(tiers)
        planner = self.planners.get(tiers.number) or self._controller_for(tiers.device)
        if planner is not None:
            self.planners[tiers.number] = planner
            if self._least is None:
                self.min_bytes = planner.min_bytes
            self._due.add(tiers.number)
            if tiers.device is not None:
                self._retire(0)
        self._limit(tiers)

    def _retire(self, number: int) -> None:
        """Nobody plans for a device any more: its limit follows what is free."""
        planner = self.planners.pop(number, None)
        if planner is not None:
            planner.retire()
            self._limit(self.device_tiers[number])

    def limit(self, keep: int | str | None) -> None:
        """From now on, keep at most so many bytes in place on each device: see the constructor."""
        self._keep = keep
        self.small_steps.clear()
        for tiers in self.device_tiers:
            self._limit(tiers)

    def _limit(self, tiers: DeviceTiers) -> None:
        tiers.evictor.resident.set_limit(0 if isinstance(self._keep, str) else self._keep)
        self._follow(tiers)

    def leave_small_steps(self, nbytes: int = SMALL_STEP_BYTES) -> None:
        """From now on, leave steps of the CPU that save at most ``nbytes`` in place; keep nothing of others."""
        self.small_steps[0] = SmallSteps(self.device_tiers[0].evictor.resident, nbytes)

    def leave_alone(self, tiers: DeviceTiers, thread_state: ThreadState, which: int) -> None:
        """A block was saved by this thread: if its step is small, say how much more may be saved as it is.

        ``which``: the block's storage, as the thread's ``fitting_storages`` has it.
        """
        small_steps = self.small_steps.get(tiers.number)
        if small_steps is not None:
            thread_state.fitting_storages.append(which)
            nbytes = small_steps.may_leave_bytes(len(self.thread_states))
            thread_state.may_leave(nbytes, _CPU, self.uses)

    def _follow(self, tiers: DeviceTiers) -> None:
        """With ``keep="auto"``, keep half of the free and already kept memory, asked again at each step."""
        if tiers.number in self.planners:
            return
        if self._keep != "auto" or (tiers.device is not None and tiers.device.is_capturing()):
            return
        free = tiers.device.free_bytes() if tiers.device is not None else spare_bytes()
        tiers.evictor.resident.follow(free)

    def complete(self, thread_state: ThreadState) -> None:
        """See :meth:`InflightWrites.complete`."""
        for tiers in self.device_tiers:
            inflight = tiers.evictor.inflight
            if inflight.writes:
                inflight.complete(thread_state)

    def settle(self, thread_state: ThreadState, *, ended: bool = False) -> None:
        """Admit the blocks that wait on ``thread_state``, if the operation that saved them has ended.

        Raises ``StashFullError`` with ``on_full="raise"``; the blocks behind wait on.
        """
        if ended:
            thread_state.latest.clear()
        while thread_state.waiting and (ended or thread_state.operation != sequence_number()):
            waiting, at_once = thread_state.waiting.popleft()
            block: Block | None = waiting()
            if block is not None and block.cleanup.resident_bytes:
                self.device_tiers[block.number].evictor.apply(thread_state, block, at_once)

    def review(self, thread_state: ThreadState, most: int) -> None:
        """Admit those of the next ``most`` blocks that are expected again and can hardly be: the program has
        let go of the tensor, or changed it."""
        expecting = thread_state.expecting
        for _ in range(min(most, len(expecting))):
            waiting = expecting.popleft()
            block: Block | None = waiting()
            if block is None or not block.waits:
                continue
            if not block.storage_version.is_held:
                evictor = self.device_tiers[block.number].evictor
                evictor.admit(block, at_once=bool(block.tier), complete=True)
            else:
                expecting.append(waiting)

    def new_thread_state(self) -> ThreadState:
        """The state of this thread. Needs no lock: a list is appended to in one step."""
        thread_state = ThreadState()
        self.thread_states.append(thread_state)
        return thread_state

    def close_ended(self) -> None:
        """The states of threads that have ended need not be kept."""
        for ended in [each for each in self.thread_states if not each.is_alive()]:
            self.thread_states.remove(ended)
            self._ended += ended.counts
            self.adopt(ended)

    def counts(self) -> Counts:
        """What all threads have given to the stash so far."""
        return sum((each.counts for each in self.thread_states.copy()), self._ended)

    def adopt(self, ended: ThreadState) -> None:
        """Of a thread that has ended: the blocks that wait there may go when a budget next asks."""
        for waiting, _ in ended.waiting:
            block: Block | None = waiting()
            if block is not None:
                self.device_tiers[block.number].evictor.resident.queue.append(block)
        ended.waiting.clear()
        for waiting in ended.expecting:
            block = waiting()
            if block is not None and block.waits:
                self.device_tiers[block.number].evictor.adopt(block)
        ended.expecting.clear()

    def ease(self) -> None:
        """See :meth:`Evictor.ease`. Of several accelerators, those where an allocation has failed."""
        several = [tiers for tiers in self.device_tiers if tiers.device is not None]
        failed = []
        for tiers in several if len(several) > 1 else ():
            memory = tiers.evictor.resident.memory
            if memory is not None and memory.has_failed():
                failed.append(tiers)
        for tiers in failed or self.device_tiers:
            tiers.evictor.ease()

    def try_again(self) -> None:
        """See :meth:`TierHealth.try_again`."""
        for tiers in self.device_tiers:
            tiers.evictor.health.try_again()

    def add(self, block: Block, thread_state: ThreadState) -> None:
        """A block that this thread saved, held from now on."""
        small_steps = self.small_steps.get(block.number)
        if small_steps is not None and (left := thread_state.take_used_bytes()):
            small_steps.saved(left, is_block=False)  # in the step that ends here, if one does
        self.predictor.add(block)
        if self._followed != self.predictor.passes:
            self._begin_step()
        if block.number in self._unfollowed:  # a device that saves nothing is not asked
            self._unfollowed.discard(block.number)
            self._follow(self.device_tiers[block.number])
        windows = self.device_tiers[block.number].windows
        if windows is not None and block.number not in self.planners:
            windows.saved(block.nbytes)
        if small_steps is not None:
            small_steps.saved(block.nbytes)
        self.blocks_alive += 1

    def saved_again(self, block: Block) -> None:
        """A block that is held was saved once more."""
        self.save_counts.again(block)
        planner = self.planners.get(block.number)
        if planner is not None:
            planner.saved_again(block)

    def begin_step(self, tiers: DeviceTiers) -> None:
        """A region's forward begins, which may save no block on its device: with it the step, where none has
        begun it."""
        if self.reclaim_queue:
            self.drain()  # what the step before has freed is of that one
        self.uses += 1  # whether what it saves may be left alone is asked anew
        self.predictor.begin()
        if self._followed != self.predictor.passes:
            self._begin_step()
        self.planner_of(tiers)

    def _begin_step(self) -> None:
        self._followed = self.predictor.passes
        if self._keep == "auto":
            self._unfollowed.update(range(len(self.device_tiers)))
        for tiers in self.device_tiers:
            if tiers.windows is not None and tiers.number not in self.planners:
                tiers.windows.begin_step()
            if tiers.number in self.small_steps and not self.blocks_alive:
                self.small_steps[tiers.number].begin_step()
                for thread_state in self.thread_states:
                    thread_state.fitting_storages.clear()
        self._due.update(self.planners)
        if self._has_stepped:
            self._check_loaded()  # that of the CPU, where all tensors are an accelerator's, never begins
        self._has_stepped = True

    def planner_of(
        self, tiers: DeviceTiers, thread_state: ThreadState | None = None
    ) -> Controller | None:
        """What plans for a device of which a block is being admitted, by this thread; ``None``: nobody.

        The device's step begins with its first block: there may be passes in which it has none.
        """
        planner = self.planners.get(tiers.number)
        if planner is not None and thread_state is not None:
            planner.count_saved(thread_state.uncounted_bytes())
        if planner is not None and tiers.number in self._due:
            self._due.discard(tiers.number)
            planner.begin_step(tiers)
            if self._least is None:
                self.min_bytes = planner.min_bytes
            planner.check()
            self._check_loaded()
        return planner

    def planner_at_work(self, tiers: DeviceTiers) -> Controller | None:
        """What plans for a device whose step has begun; ``None``: nobody, or its first block is yet to come."""
        return None if tiers.number in self._due else self.planners.get(tiers.number)

    def hook_begins(self, device: torch.device) -> list[tuple[Controller, Any]]:
        """For :meth:`hook_took`, of a hook for a tensor of ``device``."""
        tiers = self.known_tiers.get(device)
        planner = (
            None if tiers is None or isinstance(tiers, str) else self.planners.get(tiers.number)
        )
        return [] if planner is None else [(planner, planner.hook_begins())]

    def region_hook_begins(self) -> list[tuple[Controller, Any]]:
        """The same, of what a region does before its forward, on whatever device."""
        return [(each, each.region_hook_begins()) for each in list(self.planners.values())]

    def hook_took(self, kind: str, began: list[tuple[Controller, Any]]) -> None:
        """See :meth:`Controller.hook_took`."""
        for planner, at in began:
            planner.hook_took(kind, at)

    def _check_loaded(self) -> None:
        if self.planners and all(each.matches_nothing for each in self.planners.values()):
            raise UsageError(
                "the plan was made for another model, or for a batch of another size: none of its classes was "
                "saved in the first step; allowed: a plan of this model, or budget= to have one made"
            )

    def drain(self) -> None:
        """Settle what died since the last call."""
        queue, busy, before = self.reclaim_queue, 0, self.blocks_alive
        while len(queue) > busy:
            cleanup = queue[0]
            if cleanup.is_busy():
                queue.rotate(-1)
                busy += 1
                continue
            self._settle_death(cleanup, self.device_tiers[cleanup.number])
            queue.popleft()
            # What a thread may leave alone was said of the step that this one was of.
            self.uses += 1
        if before and not self.blocks_alive:
            self.predictor.forget()
            for tiers in self.device_tiers:
                tiers.forget()

    def _settle_death(self, cleanup: Cleanup, tiers: DeviceTiers) -> None:
        # What is settled is struck out first, so that no thread that comes after an interrupt, or rebuilds
        # the counts from all cleanups there are, counts it twice.
        loaded, cleanup.loaded_bytes = cleanup.loaded_bytes, 0
        tiers.prefetcher.ahead.nbytes -= loaded
        facts = cleanup.facts
        cleanup.settle(tiers)
        self.reclaim_queue.leased.discard(cleanup)
        if facts is not None:
            self.blocks_alive -= 1
            if self.event_log.on:
                self.event_log.emit("free", *facts)

    def rebuild(self) -> None:
        """Make all counts and queues anew. The caller holds the lock."""
        # What gc.freeze() has taken out of the collector's sight is not found: nobody freezes a live graph.
        mark = self.reclaim_queue.mark
        found: dict[type, list[Any]] = {kind: [] for kind in (Block, *_CLEANUPS)}
        kinds = tuple(found)  # compared by identity first: another's class may have no hash
        for each in gc.get_objects():
            if type(each) in kinds and _mark_of(each) is mark:
                found[type(each)].append(each)
        blocks: list[Block] = [each for each in found[Block] if each.cleanup.serial >= 0]
        blocks.sort(key=lambda block: block.cleanup.serial)
        waiting = {
            id(block)
            for state in self.thread_states
            for ref, _ in state.waiting
            if (block := ref())
        }
        for tiers in self.device_tiers:
            number = tiers.number
            mine = [block for block in blocks if block.number == number]
            cleanups: dict[type, list[Any]] = {
                kind: [each for each in found[kind] if each.number == number] for kind in _CLEANUPS
            }
            tiers.restore(mine, waiting, cleanups)
        self.blocks_alive = sum(each.facts is not None for each in found[BlockCleanup])


def _mark_of(each: Any) -> Any:
    try:
        return (each.cleanup if type(each) is Block else each).mark
    except AttributeError:  # it was not made to its end
        return None
