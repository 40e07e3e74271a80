"""The state shared by all threads of one stash: lock, tiers, thread states, deferred cleanups.

An interrupt (``KeyboardInterrupt``) can come between any two calls, and a ``MemoryError`` in most of them. So
the primary state changes only by single steps that neither can divide: a block's placement, and what a backing
or a cleanup holds. All counts, queues and free lists can be rebuilt from it. If a thread left the section
dirty, the next thread that takes the lock rebuilds them from all living objects, which it gets from Python's
garbage collector.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from .._device.base import Device
from .._runtime.reclaim import Cleanup
from .._saved.access_order import AccessPredictor
from .._saved.block import Block, BlockCleanup
from .._saved.save_counts import SaveCounts
from .._saved.thread_state import Counts, ThreadState
from .._tiers.backing import DiskCleanup
from .._tiers.device_tiers import DeviceTiers, TierConfig
from .._tiers.host_backing import HostCleanup
from .._tiers.small_steps import SMALL_STEP_BYTES, SmallSteps
from .._torch.engine import sequence_number
from ..errors import UsageError
from ..memory import spare_bytes
from ..policy import MIN_BYTES

if TYPE_CHECKING:
    from .controller import Controller, StepClock

__all__ = ["Session"]

_CPU = torch.device("cpu")
_CLEANUPS = (BlockCleanup, DiskCleanup, HostCleanup)


class Session:
    """What one stash holds and counts. Call its methods inside ``with section.lock, section:``, except
    ``restart``, ``thread_state`` and ``tiers_of``.

    Args:
        config: builds the tiers of each device.
        keep: bytes that may stay in place on each device; ``None``: no limit; ``"auto"``: half of the memory
            that is free when a step begins.
        min_bytes: tensors with a smaller storage stay in place; ``None``: 64 KiB, or the planner's value.
        controller_for: returns the controller of a device (``None``: the CPU), or ``None``. It sets the
            device's limit and is notified when a step begins. If an accelerator has one, the CPU has none.
    """

    def __init__(
        self,
        config: TierConfig,
        *,
        keep: int | str | None,
        controller_for: Callable[[Device | None], Controller | None] | None = None,
        min_bytes: int | None = None,
    ) -> None:
        self.section = config.section
        self._least = min_bytes
        self.min_bytes = MIN_BYTES if min_bytes is None else min_bytes
        """Tensors with a smaller storage stay in place."""
        self._controller_for = controller_for or (lambda device: None)
        self.planners: dict[int, Controller] = {}
        """The controllers, by the number of the device."""
        self._due: set[int] = set()  # devices whose planner was not notified of the step yet
        self.small_steps: SmallSteps | None = None
        """Keeps small steps of the CPU in memory, if that is enabled."""
        self.section.rebuilt_by(self.rebuild)
        self._keep = keep  # also for devices that are added later
        self.local = threading.local()
        """Has this thread's state, if there is one: see :meth:`thread_state`."""
        self.thread_states: list[ThreadState] = []
        self.uses = 0
        """Uses of blocks by backward so far. A thread's allowance is valid while this does not change."""
        self.event_log = config.event_log
        self.restart(config)

    def restart(self, config: TierConfig) -> None:
        """Hold nothing. Called at construction and in a forked child, where the blocks belong to the parent.

        Threads that are alive keep their states.
        """
        # The CPU's planner continues. An accelerator does not exist in a forked process.
        for number in [number for number in self.planners if number]:
            self.planners.pop(number).forked()
        self.device_tiers: list[DeviceTiers] = []
        self.known_tiers: dict[torch.device, DeviceTiers | str] = {}
        """By device: its tiers, or the reason why it has none."""
        self._config = config
        self.reclaim_queue = config.reclaim_queue
        self.predictor: AccessPredictor[Block] = AccessPredictor()
        self.save_counts = SaveCounts()
        # With keep="auto": devices whose free memory is not read yet in this step.
        self._unfollowed: set[int] = set()
        self._followed = 0  # the number of passes when "auto" last followed the free memory
        self.thread_states = [each for each in self.thread_states if each.is_alive()]
        for thread_state in self.thread_states:
            thread_state.restart()
        self._ended = Counts()  # of threads that have ended
        self.blocks_alive = 0
        self.put(_CPU, config.tiers(None, 0))
        if self.small_steps is not None:
            self.leave_small_steps(self.small_steps.most_bytes)

    @property
    def lock(self) -> Any:
        """The stash's lock. A forked process gets a new one."""
        return self.section.lock

    def tiers_of(self, device: torch.device) -> DeviceTiers | str:
        """Return the tiers of a device, or the reason why it has none. Takes the lock itself."""
        tiers = self.known_tiers.get(device)
        if tiers is None:
            with self.section.lock:
                if device not in self.known_tiers:
                    made = self._config.tiers_of(device, len(self.device_tiers))
                    if not isinstance(made, str):
                        self._begin(made)
                    # Stored last: an interrupt leaves unused tiers, not a device without any.
                    self.known_tiers[device] = made
                tiers = self.known_tiers[device]
        return tiers

    def put(self, device: torch.device, tiers: DeviceTiers) -> None:
        """Use ``tiers`` for tensors of ``device`` from now on."""
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
                self._retire_cpu()
        self._limit(tiers)

    def _retire_cpu(self) -> None:
        """Remove the planner of the CPU. From now on its limit follows the free memory."""
        planner = self.planners.pop(0, None)
        if planner is not None:
            planner.close(is_replaced=True)
            self._limit(self.device_tiers[0])

    def limit(self, keep: int | str | None) -> None:
        """Set how many bytes may stay in place on each device: see the constructor."""
        self._keep = keep
        self.small_steps = None
        for tiers in self.device_tiers:
            self._limit(tiers)

    def _limit(self, tiers: DeviceTiers) -> None:
        tiers.evictor.resident.set_limit(0 if isinstance(self._keep, str) else self._keep)
        self._follow(tiers)

    def leave_small_steps(self, nbytes: int = SMALL_STEP_BYTES) -> None:
        """Keep steps of the CPU in memory that save at most ``nbytes``; keep nothing of larger steps."""
        self.small_steps = SmallSteps(self.device_tiers[0].evictor.resident, nbytes)

    def leave_alone(self, tiers: DeviceTiers, thread_state: ThreadState, which: int) -> None:
        """After this thread saved a block: if its step is small, set how much more it may save without blocks.

        ``which`` identifies the block's storage, as in the thread's ``fitting_storages``.
        """
        small_steps = self.small_steps  # a signal handler may set it to None
        if small_steps is not None and tiers.device is None:
            thread_state.fitting_storages.append(which)
            nbytes = small_steps.may_leave_bytes(len(self.thread_states))
            thread_state.may_leave(nbytes, _CPU, self.uses)

    def _follow(self, tiers: DeviceTiers) -> None:
        """With ``keep="auto"``, keep half of the free and already kept memory, queried at each step."""
        if tiers.number in self.planners:
            return
        if self._keep != "auto" or (tiers.device is not None and tiers.device.is_capturing()):
            return
        free = tiers.device.free_bytes() if tiers.device is not None else spare_bytes()
        tiers.evictor.resident.follow(free)

    def complete(self, thread_state: ThreadState) -> None:
        """Begin what waits to be written, and see :meth:`InflightWrites.complete`."""
        for tiers in self.device_tiers:
            if tiers.tier is not None:
                tiers.tier.begin_waiting()
            inflight = tiers.evictor.inflight
            if inflight.writes:
                inflight.complete(thread_state)

    def settle(self, thread_state: ThreadState, *, ended: bool = False) -> None:
        """Admit the blocks that wait in ``thread_state``, if the operation that saved them has ended.

        Raises ``StashFullError`` with ``on_full="raise"``; the remaining blocks continue to wait.
        """
        if ended:
            thread_state.latest.clear()
        while thread_state.waiting and (ended or thread_state.operation != sequence_number()):
            waiting, at_once = thread_state.waiting.popleft()
            block: Block | None = waiting()
            if block is not None and block.cleanup.resident_bytes:
                self.device_tiers[block.number].evictor.apply(thread_state, block, at_once)

    def review(self, thread_state: ThreadState, most: int) -> None:
        """Check the next ``most`` blocks that wait for another save. Admit those for which it is unlikely,
        because the program has freed or modified the tensor."""
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

    def thread_state(self) -> ThreadState:
        """Return the state of this thread, which its first call creates. Takes the lock itself."""
        thread_state: ThreadState | None = getattr(self.local, "thread_state", None)
        if thread_state is None:
            thread_state = ThreadState()
            self.thread_states.append(thread_state)  # without the lock: it is atomic
            self.local.thread_state = thread_state
            if not self.section.is_nested():
                with self.section.lock, self.section:
                    self._close_ended()
        return thread_state

    def _close_ended(self) -> None:
        """Discard the states of threads that have ended."""
        for ended in [each for each in self.thread_states if not each.is_alive()]:
            self.thread_states.remove(ended)
            self._ended += ended.counts
            self.adopt(ended)

    def counts(self) -> Counts:
        """Return the counts of all threads so far."""
        return sum((each.counts for each in self.thread_states.copy()), self._ended)

    def adopt(self, ended: ThreadState) -> None:
        """Take over the waiting blocks of a thread that has ended, so that they can be evicted."""
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
        """See :meth:`Evictor.ease`. With several accelerators: those on which an allocation has failed."""
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
        """Add a block that this thread saved."""
        small_steps = None if block.number else self.small_steps
        if small_steps is not None and (left := thread_state.take_used_bytes()):
            small_steps.saved(left, is_block=False)  # for the step that may end here
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
        """Record that a held block was saved once more."""
        self.save_counts.again(block)
        planner = self.planners.get(block.number)
        if planner is not None:
            planner.saved_again(block)

    def begin_step(self, tiers: DeviceTiers) -> None:
        """Begin a step, if none has begun, for a region's forward, which may save no block on its device."""
        if self.reclaim_queue:
            self.drain()  # bytes that were freed before belong to the step before
        self.uses += 1  # invalidates the threads' allowances
        self.predictor.begin()
        if self._followed != self.predictor.passes:
            self._begin_step()
        self.planner_of(tiers)

    def _begin_step(self) -> None:
        is_first, self._followed = not self._followed, self.predictor.passes
        if self._keep == "auto":
            self._unfollowed.update(range(len(self.device_tiers)))
        for tiers in self.device_tiers:
            if tiers.windows is not None and tiers.number not in self.planners:
                tiers.windows.begin_step()
        small_steps = self.small_steps
        if small_steps is not None and not self.blocks_alive:
            small_steps.begin_step()
            for thread_state in self.thread_states:
                thread_state.fitting_storages.clear()
        self._due.update(self.planners)
        if not is_first:
            self._check_loaded()  # the CPU's step never begins if all tensors are on an accelerator

    def planner_of(
        self, tiers: DeviceTiers, thread_state: ThreadState | None = None
    ) -> Controller | None:
        """Return the controller of a device of which this thread is adding a block; ``None`` if it has none.

        The device's step begins with its first block, since a pass may have none on this device.
        """
        planner = self.planners.get(tiers.number)
        if planner is not None and thread_state is not None:
            planner.count_saved(thread_state.uncounted_bytes())
        if planner is not None and tiers.number in self._due:
            self._due.discard(tiers.number)
            try:
                planner.begin_step(tiers)
            finally:
                if self._least is None:
                    self.min_bytes = planner.min_bytes
            self._check_loaded()
        return planner

    def planner_at_work(self, tiers: DeviceTiers) -> Controller | None:
        """Return the controller of a device whose step has begun; ``None`` if it has none or no block yet."""
        return None if tiers.number in self._due else self.planners.get(tiers.number)

    def hook_begins(self, device: torch.device) -> list[tuple[StepClock, Any]]:
        """Return the starting point for :meth:`hook_took` of a hook for a tensor of ``device``."""
        tiers = self.known_tiers.get(device)
        planner = (
            None if tiers is None or isinstance(tiers, str) else self.planners.get(tiers.number)
        )
        return [] if planner is None else [(planner.clock, planner.clock.hook_begins())]

    def region_hook_begins(self) -> list[tuple[StepClock, Any]]:
        """Return the starting point for :meth:`hook_took` of a region's hook, for all devices."""
        clocks = [each.clock for each in list(self.planners.values())]
        return [(each, each.region_hook_begins()) for each in clocks]

    def hook_took(self, kind: str, began: list[tuple[StepClock, Any]]) -> None:
        """See :meth:`StepClock.hook_took`."""
        for clock, at in began:
            clock.hook_took(kind, at)

    def _check_loaded(self) -> None:
        if self.planners and all(each.matches_nothing for each in self.planners.values()):
            raise UsageError(
                "the plan does not match this model or this batch size: the first step saved none of "
                "its tensor classes; allowed: a plan of this model, or budget= to make one"
            )

    def drain(self) -> None:
        """Settle the cleanups of objects that died since the last call."""
        queue, busy, before = self.reclaim_queue, 0, self.blocks_alive
        while len(queue) > busy:
            cleanup = queue[0]
            if cleanup.may_be_busy and cleanup.is_busy():
                queue.rotate(-1)
                busy += 1
                continue
            self._settle_death(cleanup, self.device_tiers[cleanup.number])
            queue.popleft()
            # The allowances of threads were computed for the state before.
            self.uses += 1
        if before and not self.blocks_alive:
            self.predictor.forget()
            for tiers in self.device_tiers:
                tiers.forget()

    def _settle_death(self, cleanup: Cleanup, tiers: DeviceTiers) -> None:
        # Counts are reset before they are subtracted, so that after an interrupt no thread counts them twice,
        # even if it rebuilds the counts from all cleanups.
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
        """Rebuild all counts and queues. The caller holds the lock."""
        # Objects that gc.freeze() hides from the collector are not found. A living graph is normally not
        # frozen.
        mark = self.reclaim_queue.mark
        found: dict[type, list[Any]] = {kind: [] for kind in (Block, *_CLEANUPS)}
        kinds = tuple(found)  # compared by identity: a class may be unhashable
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
    except AttributeError:  # its constructor did not finish
        return None
