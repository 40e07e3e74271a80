"""The planner of one stash: measures steps, has them planned, and says of each block what is done with it.

Step 1 moves everything, so that it fits; step 2 does so again, without what only a first step takes, and tries
on every block whether it can be recomputed or packed, and how long that takes; step 3 moves every other block,
which tells what moving costs beside waiting. Where there is no tier below, what can be recomputed is, instead.
To learn what any budget would cost, more steps are measured (see `_plan/first_steps.py`).
Then a plan is made, in a thread, and followed from the next step on. Its first steps are measured, too: where
the peak is not what was predicted, the plan is made again with the difference added. After three steps that
take more than a tenth longer or shorter than predicted, steps are measured again; where bytes move at another
rate than they did, the plan is made again for that.

What is saved after the last block that a plan lets go of is left alone, as all is where everything fits: it is
no block, and costs what it costs without a stash. From time to time the memory is looked at; a block that is
then admitted may have to go.

Steps may have other shapes. A plan is for the largest step so far: of a smaller one that it does not know, the
oldest blocks go, with as much other memory taken for granted. A larger one moves everything, is measured, and
planned for. By its first block it is known for one. A step whose first block is as large as the plan's may
have later ones of other sizes, as a mixture of experts has: they are held as those of the plan's sizes are.
"""

from __future__ import annotations

import functools
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from ._device.base import Device
from ._plan.choices import Choices, ClassOf
from ._plan.corrections import Corrections
from ._plan.first_steps import FirstSteps, Mode
from ._plan.guard import MemoryGuard
from ._plan.meter import Meter, ProcessMeter, Sample
from ._plan.recorder import Costs, StepRecord, links_of, trace_of
from ._plan.regions import AGAIN, ONCE, TRACED, Forward, Regions, name_of
from ._plan.solve import smallest_budget
from ._plan.solving import Solving, left_alone
from ._plan.table import REGION
from ._plan.trace import Links, Option, Trace
from ._runtime.trace import EventLog
from ._saved.block import Block
from ._tiers.device_tiers import DeviceTiers
from .errors import StashWarning
from .memory import spare_bytes
from .plan import Plan, StepFigures, budget_for, plan_of, usable_bytes
from .units import format_bytes

__all__ = ["Planner", "auto_budget", "held_and_spare"]

_GUARD_BYTES = 1 << 20  # saved between two looks at the process's memory
_ANCHORS = 4  # blocks that each step begins with, whose uses tell when its backward runs
_LOOKS = 4  # the part of the memory left that is saved between two looks at it, where all fits
_MADE_LOOKS = 2  # the same in a second run
_MORE = 8  # the part of the most bytes of a step by which another is larger than it
_OFTEN = 16  # likewise, that is saved between two looks once a step was taken for a larger one
_LEAST_WINDOW_BYTES = 16 << 20
_GIVEN_BACK_BYTES = 64 << 20
_MARGIN = 50  # the part of a budget that it may be exceeded by and nothing is said
_TOLD_AT = 3  # steps that exceeded it: planning again with what was measured did not help
_ALIKE = 0.02  # how much two steps of one shape may differ in what they save
_FREE = Costs()


class Planner:
    """Decides block by block. Its methods want the stash's lock, but for :attr:`plan`.

    Args:
        event_log: of the stash.
        meter: makes what measures the device, from a callable of the bytes that the stash holds there.
        budget: the most bytes of memory at any moment of a step; ``None`` with a loaded plan.
        loaded: a plan to follow as it is.
        tier: the name of the action that moves a block down.
        windows: ``inflight`` and ``prefetch`` where the caller gave them, else ``None``.
        let_go: gives back memory that is free and still the process's.
        device: an accelerator; ``None`` for the CPU.
    """

    def __init__(
        self,
        event_log: EventLog,
        meter: Callable[[Callable[[], int]], Meter] = ProcessMeter,
        *,
        budget: int | None,
        loaded: Plan | None = None,
        tier: str | None = "disk",
        windows: tuple[int | None, int | None] = (None, None),
        let_go: Callable[[], None] = lambda: None,
        device: Device | None = None,
    ) -> None:
        self._event_log = event_log
        self._tier = tier
        self._given_windows = windows
        self._holding: list[DeviceTiers] = []  # the device's, from the first step on
        self._meter = meter(functools.partial(_held_by, self._holding))
        self._budget = loaded.budget_bytes if loaded is not None else budget or 0
        most = usable_bytes(self._budget)
        self._guard = MemoryGuard(self._meter, most, self._budget, let_go)
        self._device = device
        self._device_name = device.name if device is not None else "cpu"
        # An accelerator's allocator takes its time to answer.
        self._guard_bytes = max(_GUARD_BYTES, (budget or 0) >> 9 if device is not None else 0)
        self.regions = Regions() if tier is not None else None
        """Of the modules that may run again; ``None``: they do whatever the plan is."""
        self._recording = False
        self._first_steps = FirstSteps(self._budget)
        self._steps = 0
        self._groups: dict[int, str] = {}
        self._offers: dict[int, dict[str, Option]] = {}
        self._again: dict[int, int] = {}  # how many blocks there were when one was saved again
        self._class_of = ClassOf()
        self._choices: Choices | None = None
        self._counted = 0  # blocks in this step, so far
        self._unlooked_bytes = 0
        self._resident_limit: int | None = None
        self._unplanned_limit = 0  # the same in a step that saves what the plan does not know
        self._windows = self._planned_windows = (0, 0)
        self._windows_before = (0, 0)  # of the device, before the first step
        self._saved_bytes = 0  # in this step, so far
        self._known_first_bytes = self._known_bytes = (
            0  # of the step that was planned for: its first block, all
        )
        # This step's first block is as large as that one's: what differs later does so within a step of this
        # shape. Of a loaded plan that is taken for granted.
        self._begins_as_known = loaded is not None
        self._let_go_bytes = 0  # of these, by regions that run again
        self._most_saved_bytes = sys.maxsize  # beyond it a step is larger than that one
        self._most_other_bytes = 0  # that a step which was planned for held beside
        # Of the storages that were saved in this step, each as often as it was; the most of a step; and how
        # often it was asked whether more may stay.
        self._asked_bytes = self._most_asked_bytes = self._asked = 0
        self._planned_asked_bytes = 0  # of the step that is being planned for
        self._known_asked_bytes = 0  # of the one that was
        # Steps that are yet to be measured for a larger one that was met, and how many there are at most.
        self._awaited, self._most_awaited = 0, 4
        self._looks_often = False  # none of them was as large: it may have been several in turn
        self._is_larger = False  # this step is larger than any that was planned for
        self._is_unknown = False  # it saved what the plan does not know
        # Forwards of this step that were to run again and do not: what they save is to move.
        self._refused: set[tuple[str, int]] = set()
        self._expects_larger = (
            False  # the last one was, which was not known from its first block on
        )
        self._bytes_at_start = 0  # of memory, when the step began that was planned for
        self._links, self._costs = Links(0.0, 0.0), Costs()
        self._corrections = Corrections()
        self._freed_bytes = 0  # since memory was given back in backward
        self._anew_bytes = 0  # that were given back before this step
        self._exceeding = 0  # steps under a plan that exceeded the budget
        self.notes: dict[str, None] = {}
        self._solving = Solving(windows, self.notes)
        if loaded is not None:
            self._plan = _with(loaded, state="loaded")
            self._follow(loaded)
        else:
            self._plan = Plan(self._budget, "measuring", device=self._device_name)

    @property
    def plan(self) -> Plan:
        """What is known now. Waits for a plan that is being made."""
        self._solving.wait()
        return self._plan

    @property
    def trace(self) -> Trace | None:
        """What the plan was made from."""
        found = self._solving.found
        return found[0] if found is not None else None

    @property
    def matches_nothing(self) -> bool:
        """Of a loaded plan, after a step: whether nothing that was saved is of its classes."""
        if self._plan.state != "loaded" or self._choices is None or self._steps == 1:
            return False
        return not self._choices.matched

    def close(self) -> None:
        """Measure no more."""
        self._stop()

    def retire(self) -> None:
        """Measure no more, and leave the device as it was: nobody plans for it from now on."""
        self.close()
        for tiers in self._holding:
            tiers.evictor.resident.is_planned = False
            tiers.prefetcher.has_room = tiers.packer.has_room = None
            inflight, prefetch = self._windows_before
            tiers.evictor.inflight.window_bytes, tiers.prefetcher.window_bytes = inflight, prefetch

    def forked(self) -> None:
        """In a forked process: the threads that sample and plan are the other's, and so is an accelerator."""
        self._solving.forked()
        self._meter.forked()
        if self._device is not None:
            self._stop()
        elif self._recording:
            self._start()

    # At each step.

    def begin_step(self, tiers: DeviceTiers) -> None:
        """The first block of a step is being admitted to ``tiers``; the step before has ended."""
        self._tiers = tiers
        if not self._holding:
            windows = tiers.evictor.inflight.window_bytes, tiers.prefetcher.window_bytes
            self._windows_before = windows
        self._holding[:] = [tiers]
        tiers.evictor.resident.is_planned = True
        tiers.prefetcher.has_room = tiers.packer.has_room = self._guard.has_room
        is_left = self._plan.state == "left alone"
        anew_bytes, self._anew_bytes = self._anew_bytes, 0
        must_give_back = self._guard.must_free_at_start(always=self._recording and not is_left)
        if self._first_steps.mode == "left":
            self._meter.resume(self._meter.pause())  # a host that is ahead would tell its own time
        elif must_give_back:
            paused, before = self._meter.pause(), self._guard.held()
            self._guard.let_go()
            self._anew_bytes = max(0, before - self._guard.held())
            self._meter.resume(paused)
        seconds = self._meter.begin_step()
        self._guard.begin_step()
        record = self._end_record(anew_bytes) if self._recording else None
        first = self._steps == 0
        was_larger, self._is_larger = self._is_larger, False
        self._counted, self._is_unknown = 0, False
        self._refused.clear()
        saved_bytes, self._saved_bytes = self._saved_bytes, 0
        asked_bytes, self._asked_bytes, self._asked = self._asked_bytes, 0, 0
        if not was_larger and not first:
            self._most_asked_bytes = max(self._most_asked_bytes, asked_bytes)
        self._steps += 1
        self._class_of.begin_step()
        if self._choices is not None:
            self._choices.begin_step()
        if self.regions is not None:
            self.regions.begin_step()
        self._groups, self._offers, self._again = {}, {}, {}
        if self._plan.state == "loaded":
            self._apply_loaded()
        elif self._choices is None:
            self._measure(record, seconds, asked_bytes)
        elif not first:
            highest_bytes = self._guard.take_highest()
            self._count_exceeding(highest_bytes)
            if was_larger:
                self._plan_for_larger(record, asked_bytes)
            else:
                told, known, share = (
                    (saved_bytes, self._known_bytes, _ALIKE)
                    if record is not None or self._plan.left_after is None
                    else (asked_bytes, self._known_asked_bytes, 1 / _MORE)
                )
                is_alike = abs(told - known) <= share * known
                self._watch(record, StepFigures(highest_bytes, seconds), is_alike=is_alike)
        if self._recording:
            self._groups, self._offers, self._again = {}, {}, {}

    def _measure(self, record: StepRecord | None, seconds: float, asked_bytes: int) -> None:
        first, solving = self._first_steps, self._solving
        first.add(record, seconds, asked_bytes)
        made = len(first.records)
        if made == 0:
            self._set_windows(self._first_windows())
            self._start()
        elif made == 1:
            self._planned_asked_bytes = asked_bytes
            self._look_at_first()
        elif (mode := first.next_mode(self._spare_bytes)) is not None:
            if record is not None or mode == "left":
                self._begin_mode(mode)
        elif not solving.is_running and solving.found is None:
            self._plan_for_first_steps()
        if solving.found is not None:
            self._adopt()

    def _begin_mode(self, mode: Mode) -> None:
        first = self._first_steps
        first.mode = mode
        last, spare = first.records[-1], self._spare_bytes() // 2
        if first.learns:
            self._guard.raise_to(last.peak_bytes + spare)
        if first.may_exceed:
            self._set_windows((_LEAST_WINDOW_BYTES, _LEAST_WINDOW_BYTES))
        if mode == "left":
            self._stop()
        elif mode == "all":
            return
        if first.may_exceed:
            self._set_limit(spare)
            return
        trace = self._traced(last, links_of(first.records))
        if self._tier is None:
            self._look_whether_it_fits(trace)
        limit = max(0, self._target() - _most_other(trace) - sum(self._windows))
        self._set_limit(spare if first.learns else limit)

    def _plan_for_first_steps(self) -> None:
        first = self._first_steps
        self._stop()
        first.mode = "all"
        self._links, self._costs = first.costs()
        self._planned_asked_bytes = first.told_bytes(first.largest)
        trace, differs = self._traced(first.largest, self._links, self._costs), 0
        if not first.learns:  # where some steps may hold more
            for pair in first.alike():
                held = [_most_other(self._traced(each, self._links, self._costs)) for each in pair]
                differs = abs(held[0] - held[1])  # as they will again
        self._solve(trace, differs)

    def conclude(self) -> None:
        """No more steps will come: plan for what was measured, if that is enough."""
        solving = self._solving
        if self._choices is not None:
            return
        solving.wait()
        if solving.found is None and self._first_steps.are_enough:
            self._plan_for_first_steps()
            solving.wait()
        if solving.found is not None:
            self._adopt()
            self._stop()

    def _traced(self, record: StepRecord, links: Links, costs: Costs = _FREE) -> Trace:
        tier = self._tier or "disk"
        runs_ahead = self._device is not None
        trace = trace_of(record, links, costs, tier, runs_ahead=runs_ahead)
        below = self._tiers.tier
        capacity = below.capacity_bytes if below is not None else None
        if self._tier is None:
            capacity = 0
        return trace if capacity is None else trace.moving_at_most(capacity * 19 // 20, tier)

    def _meet_larger(self, nbytes: int, known_bytes: int) -> None:
        """A step may be larger than those that were planned for: it saves ``nbytes`` where they did
        ``known_bytes``. Then all of it moves; from its first block on it is measured, too."""
        predicted = self._plan.predicted
        is_left = self._plan.state == "left alone" and not self._expects_larger
        if is_left and predicted is not None and known_bytes:
            grown = (predicted.peak_bytes - self._bytes_at_start) * nbytes // known_bytes
            if self._bytes_at_start + grown <= self._target():
                return
        self._is_larger = True
        self._expects_larger = self._saved_bytes > 0  # it is too late to measure this one
        if self._expects_larger:
            self._awaited, self._most_awaited = self._most_awaited, min(64, 2 * self._most_awaited)
        else:
            self._groups, self._offers, self._again = {}, {}, {}
            self._start()
        self._set_windows(self._first_windows())
        self._lower_limit(0)

    def _plan_for_larger(self, record: StepRecord | None, asked_bytes: int) -> None:
        """A step has ended that was larger than those that were planned for, or was expected to be."""
        self._stop()
        self._set_limit(self._resident_limit)
        self._set_windows(self._planned_windows)
        if record is None or self._expects_larger or self._solving.is_running:
            return
        if not self._links.down_rate:  # the very first step fitted, and none was measured after it
            self._links = links_of([record])
        moved_seconds = self._costs.per_moved_byte * record.moved_bytes
        computing = max(0.0, record.computing_seconds - moved_seconds)
        trace = self._traced(record, self._links, replace(self._costs, computing_seconds=computing))
        found = self._solving.found
        if found is not None and self._solving.is_new:
            if _saved_by(found[0]) >= _saved_by(trace):
                self._adopt()
                return
        elif _saved_by(trace) <= self._known_bytes + self._let_go_bytes and (
            self.regions is None or self.regions.can_be_followed(trace.regions)
        ):
            # Steps may take turns of which some are smaller: the next one is measured, too.
            self._expects_larger = self._awaited > 0
            self._awaited -= self._expects_larger
            self._looks_often |= not self._expects_larger
            return
        self._awaited, self._planned_asked_bytes = 0, asked_bytes
        self._solve(trace)

    def _look_at_first(self) -> None:
        """After the first step the memory is known, if not the time."""
        first = self._first_steps.records[0]
        first_trace = self._traced(first, links_of([first]))
        # The optimizer's state is there from the second step on only.
        grown = max(0, _other(self._meter.mark()) - _other(first.samples[0]))
        trace = first_trace.raised(grown)
        left = left_alone(trace)
        target = self._target()
        if left[2] <= target:
            self._stop()
            self._solving.found = left
            return
        room = max(0, target - _most_other(trace))
        self._set_limit(room)
        if self._tier is not None:
            # Half of what is left may be on its way, so that the other half stays in the step that is to keep
            # something; a window below the largest block would hide nothing.
            most = max([room // 4, *(each.nbytes for each in trace.blocks)])
            inflight, prefetch = self._windows
            self._set_windows((min(inflight, most), min(prefetch, most)))
            self._look_whether_it_fits(first_trace)

    def _look_whether_it_fits(self, trace: Trace) -> None:
        """After the first step, where everything can move; else after the second, which tells what else can be
        done."""
        smallest = smallest_budget(trace, allowed=self._allowed(), windows=self._given_windows)
        if smallest > self._budget:
            self._tell(
                f"{self._named} cannot be kept: the smallest that this step can keep is "
                f"{format_bytes(budget_for(smallest))}; everything that can move or be recomputed does"
            )

    @property
    def _named(self) -> str:
        where = f" of {self._device_name}" if self._device is not None else ""
        return f"budget={format_bytes(self._budget)}{where}"

    def _count_exceeding(self, highest_bytes: int) -> None:
        if highest_bytes > self._budget + self._budget // _MARGIN:
            self._exceeding += 1
            if self._exceeding == _TOLD_AT and not self.notes:
                self._tell(
                    f"{self._named} was exceeded in {_TOLD_AT} steps; the last one held "
                    f"{format_bytes(highest_bytes)}. It is planned for what the largest step that was "
                    "measured saves and holds"
                )

    def _watch(self, record: StepRecord | None, found: StepFigures, *, is_alike: bool) -> None:
        """A step under the plan has ended; ``is_alike``: it saved as much as the one that was planned for."""
        solving = self._solving
        if solving.found is not None and not solving.is_running and solving.is_new:
            self._adopt()
            return
        self._set_limit(self._resident_limit)  # the guard may have lowered it
        predicted = self._plan.predicted
        if record is not None:
            if self._corrections.add(record, self._budget, is_alike=is_alike):
                self._stop()
                self._correct()
            return
        if predicted is None:
            return
        if found.peak_bytes > self._budget:
            self._corrections.exceed(found.peak_bytes, found.step_seconds)
            self._correct()
            return
        if not is_alike:
            return  # nothing was predicted
        if self._corrections.time(found.step_seconds):
            self._note_measured()
        if self._plan.state == "left alone":
            return  # nothing is faster
        if self._corrections.is_off(found.step_seconds, predicted.step_seconds):
            self._corrections.begin(again=True)
            self._start()

    def _note_measured(self) -> None:
        measured = self._corrections.measured
        if measured is not None:
            self._plan = _with(self._plan, measured=StepFigures(*measured))

    def _correct(self) -> None:
        """Tell what was measured; where the peak was not what was predicted, plan again."""
        measured = self._corrections.measured
        if measured is None:
            return
        self._note_measured()
        if self._plan.state == "too small" and measured[0] <= self._budget:
            # The steps that were measured first hold more, since more of them moves.
            self._plan = _with(self._plan, state="planned", smallest_budget_bytes=None)
        if self._solving.found is None:
            return  # another plan is being made
        predicted, is_left = self._plan.predicted, self._plan.state == "left alone"
        assert predicted is not None
        # The same trace: under a plan, memory that an allocator keeps when tensors die would count as
        # other memory, although the plan's tensors are what it is for.
        trace, solution, _ = self._solving.found
        blocks = zip(trace.blocks, solution.choices, strict=True)
        moved = sum(block.nbytes for block, name in blocks if name != "keep")
        left, usable = left_alone(trace), usable_bytes(self._budget)
        if not is_left and self._corrections.leave_all(moved, usable, left[2]):
            self._solving.found = left
            return
        saved = _saved_by(trace)
        is_other = self._corrections.correct(
            predicted.peak_bytes, self._budget, saved, is_left=is_left
        )
        links = self._corrections.other_links(trace.links)
        if is_other or links is not trace.links:
            self._links = links
            self._solve(replace(trace, links=links))
            over = measured[0] - self._budget
            if over > 0 and self._resident_limit is not None:  # this step is not to wait for it
                self._lower_limit(max(0, self._resident_limit - over))

    # Per block.

    def count(self, block: Block) -> None:
        """A block is being admitted, by the plan or by a policy: see whether the step is larger than any that
        was planned for."""
        if not self._saved_bytes:
            if self._solving.has_taken:
                self._begins_as_known = block.nbytes == self._known_first_bytes
                if block.nbytes > self._known_first_bytes or self._expects_larger:
                    self._meet_larger(block.nbytes, self._known_first_bytes)
        elif not self._is_larger and self._saved_bytes > self._most_saved_bytes:
            self._meet_larger(self._saved_bytes, self._known_bytes)
        self._saved_bytes += block.nbytes
        self._counted += 1
        if self._recording:
            self._groups[block.cleanup.serial] = ""

    def tell_saved(self, nbytes: int) -> None:
        """Storages of so many bytes were saved in this step, each counted as often as it was."""
        self._asked_bytes += nbytes

    def may_leave_bytes(self, threads: int, *, is_block: bool = True) -> int:
        """How many bytes may be saved and stay in place before this is asked again; -1: none.

        Where everything fits, or all stays that is saved from here on, only the first blocks of a step, and
        then one for a part of the memory that is left, are admitted as blocks: the rest costs what it costs
        without a stash.

        Args:
            threads: that may each save so much.
            is_block: whether what was saved last is one.
        """
        self._asked += is_block
        if not self._leaves_alone(self._counted) or self._asked <= _ANCHORS:
            return -1
        most = self._most_asked_bytes
        if most and self._plan.state != "loaded" and self._asked_bytes > most + most // _MORE:
            self._meet_larger(self._asked_bytes, most)
            if self._is_larger:
                return -1
        nbytes = self._part_of_what_is_left(_LOOKS, threads)
        if nbytes < 0:
            self._asked = -sys.maxsize  # no more in this step: each block has the memory looked at
        # While the first blocks of a step are held by a graph that is used later, only others tell its end.
        return min(nbytes, self._most_asked_bytes // _OFTEN) if self._looks_often else nbytes

    def may_make_bytes(self, threads: int) -> int:
        """The same for what a region saves in its second run, which the plan counts, and backward uses next."""
        return -1 if self._recording else self._part_of_what_is_left(_MADE_LOOKS, threads)

    def _part_of_what_is_left(self, parts: int, threads: int) -> int:
        """So much for each of some threads; -1: none."""
        left, threads = self._guard.left_bytes, max(1, threads)
        nbytes = left // (parts * threads)
        if nbytes >= _GUARD_BYTES:
            return nbytes
        # Plans do not use all of a budget. What is left of that goes little by little, since to look at each of
        # many small blocks is dear.
        left += self._budget // _MARGIN
        return _GUARD_BYTES // threads if left >= 2 * _GUARD_BYTES else -1

    def _leaves_alone(self, counted: int) -> bool:
        """Whether what is saved after so many blocks of this step stays, and nothing is done about it."""
        if self._recording or self._is_larger or self._is_unknown or self._recomputes_unknown:
            return False
        if self._refused or self._guard.is_trying:
            return False
        if self._first_steps.mode == "left":
            return True
        if self._plan.state == "loaded" and self._choices is not None:
            if not self._choices.matched:  # else it would not be known whether it is this model's
                return False
        left_after = self._plan.left_after
        return left_after is not None and counted >= left_after

    def choose(self, block: Block, tensor: Tensor) -> str:
        """The tier that a block goes to at once; ``""``: it stays, as far as the limit allows."""
        self._unlooked_bytes -= block.nbytes
        if self._unlooked_bytes < 0:
            self._unlooked_bytes = self._guard_bytes
            self._keep_less()
        if self._leaves_alone(self._counted - 1):
            return "recompute" if self._must_recompute(block) else ""
        made_by = tensor.grad_fn
        operation = made_by.name() if made_by is not None else "no operation"
        group = self._class_of.next(block.cleanup.module, operation, block.nbytes)
        if self._recording:
            self._groups[block.cleanup.serial] = group
        name = self._choose(group)
        if name == "all" and self._tier is None:
            return "recompute"
        if name in ("recompute", "pack"):
            return name
        if name not in ("keep", ""):
            return self.instead
        return "recompute" if self._must_recompute(block) else ""

    @property
    def _recomputes_unknown(self) -> bool:
        """Whether what the plan does not know is let go: nothing can move when there is too much of it."""
        return self._tier is None and (self._plan.state != "left alone" or self._exceeding > 0)

    def _must_recompute(self, block: Block) -> bool:
        """Whether a block that was to stay is more than the limit, and nothing can move to make room."""
        if self._tier is not None or self._choices is None:
            return False
        resident = self._tiers.evictor.resident
        return resident.limit is not None and resident.nbytes + block.nbytes > resident.limit

    @property
    def instead(self) -> str:
        """The tier of a block that was to be recomputed or packed and cannot be; ``""``: it stays."""
        return self._tier or ""

    @property
    def asks_prices(self) -> bool:
        """Whether it is measured now what recomputing and packing a block take: in the second step, when it is
        known that not everything fits, and in one that is larger than those before."""
        if not self._recording:
            return False
        return self._is_larger or (self._choices is None and len(self._first_steps.records) == 1)

    def pause(self) -> Any:
        """What is done until :meth:`was_priced` or :meth:`resume` is given what this returns is no part of the
        step."""
        return self._meter.pause()

    def was_priced(self, block: Block, paused: Any, prices: Mapping[str, Option | None]) -> None:
        """Codecs and replays were tried on ``block`` since :meth:`pause`.

        ``prices``: what each takes; ``None`` where the block cannot be held so.
        """
        self._meter.resume(paused)
        self._offers[block.cleanup.serial] = {
            name: option for name, option in prices.items() if option is not None
        }

    def beside(self, block: Block, *, again: bool) -> str:
        """The tier of a block that no plan knows: a second run's stays as far as the limit allows (``again``);
        one of a region that is first to be tried, moves."""
        self._unlooked_bytes -= block.nbytes
        if self._unlooked_bytes < 0:
            self._unlooked_bytes = self._guard_bytes
            self._keep_less()
        return "" if again else self.instead

    # Per forward of a module that may run again.

    def begin_forward(self, path: str) -> tuple[str, int]:
        """One begins, of the module at ``path``: its name, and the how many-th of that name it is."""
        assert self.regions is not None
        name = name_of(path)
        index = self.regions.begin(name)
        if self.regions.is_repeated(path):
            self._class_of.begin_again(path)
        follows = self._choices is not None and self._plan.state != "left alone"
        if follows and self.regions.runs_again(name, index):
            self._refused.add((name, index))
        return name, index

    def way_of(self, name: str, index: int) -> str:
        """What is done with it, once it is known what it is given."""
        assert self.regions is not None
        if self._is_larger or self._choices is None:
            self.regions.meet(name)
            return TRACED if self._recording else ONCE
        if self._plan.state == "left alone":
            return ONCE
        self._refused.discard((name, index))
        return AGAIN if self.regions.runs_again(name, index) else ONCE

    def trace_forward(self, name: str, index: int) -> tuple[Forward, int]:
        """It is recorded, and what its saves are; :meth:`tell_forward` needs the number."""
        assert self.regions is not None
        return self.regions.record(name, index)

    def tell_forward(self, kind: str, number: int) -> None:
        """``"enter"`` or ``"leave"``: that one begins or ends now."""
        self._meter.hear((kind, time.perf_counter(), 0.0, 0, number))

    def resume(self, paused: Any) -> float:
        """What a region was tried by since :meth:`pause` is no part of the step. Returns its seconds."""
        return self._meter.resume(paused)

    def may_try(self, name: str) -> bool:
        """Whether a forward of this name may run twice now, to be compared: when it is known that not
        everything fits, and where there is room for what it saves."""
        assert self.regions is not None
        nbytes = self.regions.bytes_of(name)
        if not self.asks_prices or not nbytes:
            return False
        if self._first_steps.learns:
            return nbytes < self._spare_bytes() // 2
        return self._guard.has_room(nbytes)

    def tell_used(self, nbytes: int) -> None:
        """Backward uses so many bytes of a block."""
        if (
            self._device is None
        ):  # an accelerator's allocator keeps what is free, and no tensor's, apart
            self._guard.tell_used(nbytes)

    def saved_again(self, block: Block) -> None:
        """A block that is held was saved once more."""
        if self._recording:
            self._again[block.cleanup.serial] = self._counted
            if self.regions is not None:
                self.regions.saved_again(block.cleanup.serial)

    def _choose(self, group: str) -> str:
        if self._is_larger:
            return "all"
        if self._choices is None:
            is_moved = self._first_steps.mode == "all" or self._counted % 2
            return "all" if is_moved else "keep"
        choice = self._choices.next(group, of_any_size=self._begins_as_known)
        if choice is None:
            if self._recomputes_unknown:
                return "recompute"
            # Nothing is known of when it is needed: the oldest go, with both windows taken to be full.
            self._lower_limit(self._unplanned_limit)
            self._is_unknown = True
            return "keep"
        # A region that was to run again and does not: what it saves moves.
        return self.instead if choice == REGION else choice

    def _keep_less(self) -> None:
        """Where the process comes near the budget, for the rest of the step."""
        over = self._guard.over()
        if over:
            self._lower_limit(max(0, self._tiers.evictor.resident.nbytes - over))

    def _spare_bytes(self) -> int:
        """What can still be taken."""
        return spare_bytes() if self._device is None else self._device.free_bytes()

    def _lower_limit(self, limit: int) -> None:
        """For the rest of the step."""
        resident = self._tiers.evictor.resident
        if resident.limit is None or limit < resident.limit:
            resident.set_limit(limit)

    def hook_took(self, kind: str, began: float) -> None:
        """``"pack hook"`` or ``"unpack hook"``, for a block, from ``began`` to now."""
        if self._recording:
            self._meter.hear((kind, began, time.perf_counter() - began, 0, -1))

    # Making a plan, and following it.

    def _allowed(self) -> list[str]:
        below = [self._tier, REGION] if self._tier is not None else []
        return ["keep", "recompute", "pack", *below]

    def _target(self) -> int:
        return usable_bytes(self._budget) - self._corrections.bias_bytes

    def _solve(self, trace: Trace, spare_bytes: int = 0) -> None:
        """Have a plan made that leaves ``spare_bytes`` of the target, if there is one that does."""
        self._solving.begin(trace, self._target(), allowed=self._allowed(), spare_bytes=spare_bytes)

    def _adopt(self) -> None:
        trace, solution, smallest = self._solving.take()
        stays = self.regions.all_stays if self.regions is not None else {}
        bias_bytes = self._corrections.bias_bytes
        plan = plan_of(self._budget, trace, solution, smallest, bias_bytes, stays)
        self._plan = _with(plan, device=self._device_name, windows=self._given_windows)
        at_start = trace.moments[0].other_bytes if trace.moments else 0
        self._guard.plan_for(solution.forecast.peak_bytes - at_start)
        held = [
            block.nbytes
            for block, name in zip(trace.blocks, solution.choices, strict=True)
            if name != REGION
        ]
        self._bytes_at_start, self._known_bytes = at_start, sum(held)
        self._let_go_bytes = _saved_by(trace) - self._known_bytes
        self._known_first_bytes = held[0] if held else 0
        self._most_saved_bytes = int(self._known_bytes * (1 + _ALIKE))
        self._most_other_bytes = max(self._most_other_bytes, _most_other(trace))
        self._known_asked_bytes = self._planned_asked_bytes
        self._most_asked_bytes = max(self._most_asked_bytes, self._known_asked_bytes)
        if self._plan.state == "left alone":
            self._guard.let_go()  # what moving needed
        self._follow(self._plan)
        self._planned_windows = solution.windows.inflight_bytes, solution.windows.prefetch_bytes
        self._set_windows(self._planned_windows)
        slack = max(0, self._budget - bias_bytes - solution.forecast.peak_bytes)
        self._resident_limit = solution.forecast.resident_peak_bytes + slack
        self._set_limit(self._resident_limit)
        windows = sum(self._windows)
        self._unplanned_limit = max(0, self._target() - self._most_other_bytes - windows)
        self._corrections.begin()
        self._start()

    def _apply_loaded(self) -> None:
        plan = self._plan
        self._set_windows((plan.inflight_bytes, plan.prefetch_bytes))
        self._resident_limit = self._unplanned_limit = plan.resident_bytes
        self._set_limit(plan.resident_bytes)

    def _follow(self, plan: Plan) -> None:
        self._choices = Choices((each.name, each.choices) for each in plan.classes)
        if self.regions is not None:
            self.regions.follow(
                {
                    each.name: [name == REGION for name, n in each.choices for _ in range(n)]
                    for each in plan.regions
                },
                {
                    (each.name, at): frozenset(numbers)
                    for each in plan.regions
                    for at, numbers in enumerate(each.stays)
                },
            )

    def _first_windows(self) -> tuple[int, int]:
        """Before anything is known: an eighth of what the budget leaves for each, 16 to 128 MiB; of a small
        budget at least a sixteenth."""
        left = max(0, self._budget - self._meter.now())
        least = min(_LEAST_WINDOW_BYTES, self._budget // 16)
        size = min(128 << 20, max(least, left // 8))
        return size, size

    def _set_windows(self, windows: tuple[int, int]) -> None:
        inflight, prefetch = (
            given if given is not None else chosen
            for given, chosen in zip(self._given_windows, windows, strict=True)
        )
        self._windows = inflight, prefetch
        self._tiers.evictor.inflight.window_bytes = inflight
        self._tiers.prefetcher.window_bytes = prefetch

    def _set_limit(self, limit: int | None) -> None:
        self._resident_limit = limit
        self._tiers.evictor.resident.set_limit(limit)

    # Measuring.

    def _start(self) -> None:
        self._meter.forget()
        if self.regions is not None:
            self.regions.take()
        if not self._recording:
            self._recording = True
            self._event_log.start(self._hear)
        self._meter.start()

    def _hear(self, told: tuple[Any, ...]) -> None:
        """See :meth:`EventLog.start`.

        Where nothing moves, all that backward frees was in memory, and the allocator keeps it: it is given back
        every so often, or it would be taken for memory that is not the stash's.
        """
        if told[0] in ("save", "use", "free") and told[4] not in self._groups:
            return  # of another device, or of a step before
        self._meter.hear(told)
        if self._tier is not None or self._choices is not None:
            return
        if told[0] == "free":
            self._freed_bytes += told[3]
        elif told[0] == "use" and self._freed_bytes >= _GIVEN_BACK_BYTES:
            self._freed_bytes, paused = 0, self._meter.pause()
            self._guard.let_go()
            self._meter.resume(paused)

    def _stop(self) -> None:
        if self._recording:
            self._recording = False
            self._event_log.stop(self._hear)
        self._meter.stop()

    def _end_record(self, anew_bytes: int) -> StepRecord:
        """Of the step before, in which up to ``anew_bytes`` had to be taken from the system once more."""
        regions = self.regions
        record = StepRecord(
            self._meter.take(),
            self._groups,
            self._offers,
            self._again,
            regions.take() if regions is not None else [],
            regions.all_stays if regions is not None else {},
        )
        grown = record.peak_bytes - record.samples[0][1] if record.samples else 0
        record.anew_seconds = self._meter.anew_seconds(min(anew_bytes, max(0, grown)))
        return record

    def _tell(self, note: str) -> None:
        if note not in self.notes:
            self.notes[note] = None
            warnings.warn(note, StashWarning, stacklevel=2)


def _other(sample: Sample) -> int:
    """Bytes that are not the stash's."""
    _, held, ours = sample
    return held - ours


def _saved_by(trace: Trace) -> int:
    return sum(each.nbytes for each in trace.blocks)


def _most_other(trace: Trace) -> int:
    return max((moment.other_bytes for moment in trace.moments), default=0)


def _held_by(holding: Sequence[DeviceTiers]) -> int:
    """Bytes of the device's memory that the stash holds, with those under way."""
    held = 0
    for each in holding:
        held += each.evictor.resident.nbytes + each.evictor.inflight.nbytes
        held += each.prefetcher.ahead_bytes
        if each.device is not None:
            held += each.device.unfinished_bytes()
    return held


def auto_budget() -> int:
    """What this process holds and can still take, less a twentieth."""
    return held_and_spare(ProcessMeter().now(), spare_bytes())


def held_and_spare(held_bytes: int, spare_bytes: int) -> int:
    """The budget that ``"auto"`` means where so many bytes are held and so many more can be taken."""
    return (held_bytes + spare_bytes) * 19 // 20


def _with(plan: Plan, **changes: Any) -> Plan:
    return replace(plan, **changes)
