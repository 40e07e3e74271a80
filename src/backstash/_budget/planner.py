"""The planner of one device: it measures steps and has them planned; a :class:`Follower` carries out the plan.

Step 1 keeps what fits. If that is everything, no other step is measured. Otherwise step 2 moves everything, and
tries on every block whether it can be recomputed or packed, and how long that takes. Step 3 moves every other
block, which shows what moving costs in addition to waiting. Two exceptions: where there is no tier below, what
can be recomputed is recomputed from step 1 on, instead of moved; and on an accelerator step 1 moves everything.
To find the cost of any budget, more steps are measured (see `_budget/first_steps.py`).

A thread then makes a plan, and the stash follows it from the next step on. The plan's first steps are measured,
too; if the peak differs from the prediction, the planner plans again with the difference added. After three
steps that take over a tenth longer or shorter than predicted, it measures steps again; if the transfer rate or
the computing time has changed, it plans again.

Saves after the last block that a plan moves or discards are unmanaged: they are not blocks, and cost what they
cost without a stash. If everything fits, that is true of all saves.

Steps may differ in shape. A plan is for the largest step so far. In a smaller step that the plan does not know,
the oldest blocks move, and other memory is assumed to be as large as in the planned step. A larger step,
recognized by its first block, moves everything, is measured, and is planned for. A step whose first block is as
large as the plan's may have later blocks of other sizes, as with a mixture of experts; the choices for the
plan's sizes apply to them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from .._core.controller import Controller, Ways
from .._device.base import Device
from .._plan.regions import Forward, Regions
from .._plan.simulate import Windows
from .._plan.solve import left_alone, smallest_budget
from .._plan.table import REGION, Problem, absent_operands, left_blocks
from .._plan.trace import Links, Option, Trace
from .._runtime.trace import EventLog
from .._saved.block import Block
from .._tiers.device_tiers import DeviceTiers
from .._tiers.packing import Price
from .._torch.dynamo import leave_untraced
from ..memory import spare_bytes
from ..plan import Plan, StepFigures, plan_of, usable_bytes
from ..policy import MIN_BYTES
from ..units import format_bytes
from .budget_reports import BudgetReports
from .corrections import Corrections
from .first_steps import FirstSteps, Mode
from .follower import Follower
from .guard import MemoryGuard
from .limits import Limits
from .meter import Meter, ProcessMeter, Sample
from .planned import Planned, RecomputedRegion
from .record import Costs, StepRecord, compared_with_unmanaged, links_of, trace_of
from .recording import StepRecording
from .shape import EndedStep, StepShape
from .solving import Kept, Solving

__all__ = ["Planner", "auto_budget", "held_and_spare"]

_GUARD_BYTES = 1 << 20  # bytes saved between two readings of the process's memory
_LEAST_WINDOW_BYTES = 16 << 20
_SHORT_PART = 16  # plans use 1/16 of the budget less after the device ran out of memory within it
_LEAST_BYTES = 16 << 10  # smallest block; a block itself takes 2 KiB and 0.1 ms of a step
_TRIED_FORWARDS = 2  # of a name, of which an accelerator times a replay
_FREE = Costs()


class Planner(Controller):
    """Measure steps and have them planned. Call its methods with the stash's lock held, except :attr:`plan`.

    Args:
        event_log: of the stash.
        meter: make the device's meter from a callable that returns the bytes that the stash holds there.
        budget: the most bytes of memory at any moment of a step; ``None`` with a loaded plan.
        loaded: a plan to follow as it is.
        tier: the name of the action that moves a block down.
        windows: ``inflight`` and ``prefetch`` if the caller gave them, else ``None``.
        trim: return free memory of the process to the system.
        device: an accelerator; ``None`` for the CPU.
        strict: whether exceeding the budget is an error.
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
        trim: Callable[[], None] = lambda: None,
        device: Device | None = None,
        strict: bool = False,
    ) -> None:
        self.min_bytes = _LEAST_BYTES if loaded is None and budget != 1 else MIN_BYTES
        """The smallest storage that moves, if the caller does not say. In the first step smaller ones do, too,
        and after it if the budget cannot be kept otherwise."""
        self._tier = tier
        self._limits = Limits(windows)
        self._meter = meter(self._limits.held_bytes)
        self._budget = loaded.budget_bytes if loaded is not None else budget or 0
        most = usable_bytes(self._budget)
        self._guard = MemoryGuard(self._meter, most, self._budget, trim, is_process=device is None)
        self._device = device
        self._device_name = device.name if device is not None else "cpu"
        self.regions = Regions() if tier is not None else None
        """The forwards of modules that may be recomputed; ``None``: such modules are recomputed whatever the
        plan is."""
        self.clock = self._recording = StepRecording(
            event_log, self._meter, self.regions, is_process=device is None
        )
        self._first_steps = FirstSteps(
            self._budget,
            copies_aside=device is not None,
            keeps_first=device is None and tier is not None,
        )
        self._steps = 0
        self._has_failed = False  # whether this step ran out of memory
        self._is_in_backward = False
        self._shape = StepShape(begins_as_known=loaded is not None)
        self._most_other_bytes = 0  # largest other memory of any planned step
        self._bytes_at_start = 0  # held at the start of the planned step
        self._links, self._costs = Links(0.0, 0.0), Costs()
        self._corrections = Corrections()
        self._plain: StepFigures | None = None  # as the plan's trace says
        self._returned_bytes = 0  # returned to the system before this step
        self._reports = BudgetReports(self._budget, self._named, strict=strict)
        self.notes = self._reports.notes
        self._solving = Solving(windows, self.notes)
        self.follower = Follower(
            Plan(self._budget, "measuring", device=self._device_name),
            tier=tier,
            regions=self.regions,
            limits=self._limits,
            guard=self._guard,
            # Reading an accelerator's allocator is slow. A plan leaves more of the budget free than this.
            look_bytes=max(_GUARD_BYTES, self._budget >> 6 if device is not None else 0),
            shape=self._shape,
            recording=self._recording,
            first_steps=self._first_steps,
            begin_larger=self._begin_larger,
        )
        """Decides block by block."""
        if loaded is not None:
            self.min_bytes = min(
                [MIN_BYTES, *(each.nbytes // each.blocks for each in loaded.classes)]
            )
            self.follower.follow(replace(loaded, state="loaded", measured=None))

    @property
    def latest_plan(self) -> Plan:
        """See :attr:`Controller.latest_plan`."""
        return self.follower.plan

    @property
    def plan(self) -> Plan:
        """The current plan. Waits for one that is being made."""
        self._solving.wait()
        return self.follower.plan

    @property
    def matches_nothing(self) -> bool:
        """Whether a loaded plan knows none of the classes that the program saved, after a step."""
        if not self.follower.is_loaded or self.follower.choices is None or self._steps == 1:
            return False
        regions = [each.name for each in self.follower.plan.regions]
        if regions and self.regions is not None:  # regions may discard all that is saved
            if self._steps == 2 or self.regions.has_begun(regions):
                return False  # unnamed modules are attached to after the first step
        return not self.follower.choices.matched

    def close(self, *, is_replaced: bool = False) -> None:
        """See :meth:`Controller.close`. If the steps were to measure the cost of any budget, make that plan
        now."""
        if self._first_steps.learns and not is_replaced:
            self.conclude()
        self._recording.end()
        if is_replaced:
            self._limits.end()

    def forked(self) -> None:
        """Reset in a forked process: it lacks the threads that sample and plan, and cannot use an
        accelerator."""
        self._solving.forked()
        self._meter.forked()
        if self._device is not None:
            self._recording.stop()
        # On the CPU, measuring continues with the next step here. Most such processes only load data.

    # At each step.

    def begin_step(self, tiers: DeviceTiers) -> None:
        """Begin a step: its first block is being admitted to ``tiers``, and the step before has ended."""
        self._limits.begin_step(tiers, self._guard.has_room, self._ran_out)
        recording, first = self._recording, self._steps == 0
        ended = self._shape.begin_step(is_first=first)
        kept_free_bytes = self._guard.kept_free_bytes
        looked_bytes = self._guard.take_highest()
        highest_bytes = max(looked_bytes, self._guard.late_bytes())
        is_left = self.follower.is_left
        returned_bytes, self._returned_bytes = self._returned_bytes, 0
        must_give_back = self._guard.must_free_at_start(always=recording.is_on and not is_left)
        if self._first_steps.mode == "left":
            self._meter.resume(
                self._meter.pause()
            )  # wait for the device: a host that is ahead has another time
        elif must_give_back and self._device is None:
            self._give_back()
        seconds = self._meter.begin_step()
        self._guard.begin_step()
        record = recording.end_step(returned_bytes) if recording.is_on else None
        if recording.is_on and not self._meter.is_sampling:  # the first step of a forked process
            record = None
            recording.start()
        if self._has_failed:  # the memory that it would have taken is unknown
            record, self._has_failed = None, False
        self._steps += 1
        self._is_in_backward = False
        self.follower.begin_step()
        if self.regions is not None:
            self.regions.begin_step()
        recording.begin_step()
        highest_bytes = max(highest_bytes, self._meter.known_peak_bytes)
        if self.follower.is_loaded:
            self.follower.apply_loaded()
            if not first:
                self._reports.count(highest_bytes, is_loaded=True)
        elif self.follower.choices is None:
            self._measure(record, seconds, ended.asked_bytes)
        elif not first:
            # Free memory that this step began with is no reason to plan again.
            highest_bytes = max(min(highest_bytes, self._budget), highest_bytes - kept_free_bytes)
            self._end_planned(ended, record, StepFigures(highest_bytes, seconds), looked_bytes)
        self._reports.check()

    def _end_planned(
        self, ended: EndedStep, record: StepRecord | None, found: StepFigures, looked_bytes: int
    ) -> None:
        """Handle an ended step under a plan that may change.

        Args:
            ended: what it saved.
            record: of the step, if it was measured.
            found: its highest known memory and its time.
            looked_bytes: the most held at the guard's readings.
        """
        if ended.was_seen:
            self._guard.note_peak(max(looked_bytes, self._meter.known_peak_bytes))
        else:  # it may have saved more than assumed; the next step is checked
            self._reports.note_unseen(found.peak_bytes)
            found = replace(found, peak_bytes=min(found.peak_bytes, self._budget))
        self._reports.count(found.peak_bytes, is_loaded=False)
        if ended.was_larger:
            self._plan_for_larger(record, ended.asked_bytes)
            return
        by_blocks = record is not None or self.follower.plan.left_after is None
        is_alike = self._shape.is_alike(ended, by_blocks=by_blocks)
        if self._corrections.begins_timing or (is_alike and record is not None):
            self._shape.note_alike(ended)
        if self.follower.is_left and ended.has_grown:
            # Its growth seemed to fit at each reading, but the last blocks had to move.
            if not self._fits_grown(ended.asked_bytes, ended.most_asked_bytes):
                self._shape.ended_larger()
        self._watch(record, found, looked_bytes, is_alike=is_alike)

    def _give_back(self) -> None:
        """Return free memory to the system as a step begins.

        The memory held then comes from after the last backward, for example an evaluation, and belongs to no
        step.
        """
        paused, before = self._meter.pause(), self._meter.now()
        self._guard.trim()
        self._returned_bytes += max(0, before - self._meter.now())
        self._meter.resume(paused)

    def _measure(self, record: StepRecord | None, seconds: float, asked_bytes: int) -> None:
        first, solving = self._first_steps, self._solving
        first.add(record, seconds, asked_bytes, self._meter.sampled_peak_bytes())
        made = len(first.records)
        if made == 0:
            if self._steps == 1:
                self._limits.set_windows(self._first_windows())
            self._begin_first()
        elif made == 1:
            self._shape.begin_plan(asked_bytes)
            self._look_at_first()
        elif (mode := first.next_mode(self._spare_bytes)) is not None:
            if record is not None or mode in ("left", "sampled"):
                self._begin_mode(mode)
        elif not solving.is_running and solving.found is None and not solving.has_failed:
            self._plan_for_first_steps()
        if solving.found is not None:
            self._adopt()

    def _begin_first(self) -> None:
        self._recording.start()
        if self._first_steps.mode == "fits":
            self._limits.set_resident(None)
            self.follower.begin_first()

    def _begin_mode(self, mode: Mode) -> None:
        first = self._first_steps
        first.mode = mode
        last, spare = first.records[-1], self._spare_bytes() // 2
        if first.learns:
            self._guard.raise_to(last.peak_bytes + spare)
        if first.may_exceed:
            self._limits.set_windows(Windows(_LEAST_WINDOW_BYTES, _LEAST_WINDOW_BYTES))
        if mode == "all":
            return
        if mode in ("left", "sampled"):
            self._recording.stop()
        if mode == "sampled":
            self._meter.start()
        if first.may_exceed:
            self._limits.set_resident(spare)
            return
        trace = self._traced(last, links_of(first.records))
        limit = max(0, self._target() - _most_other(trace) - sum(self._limits.windows))
        self._limits.set_resident(spare if first.learns else limit)

    def _plan_for_first_steps(self) -> None:
        first = self._first_steps
        self._recording.stop()
        first.mode = "all"
        self._links, self._costs = first.costs()
        self._shape.begin_plan(first.asked_bytes(first.largest))
        costs = compared_with_unmanaged(self._costs, first.largest.blocks, first.left_seconds)
        trace = self._traced(first.traced, self._links, costs, priced=first.largest)
        differs = 0
        if first.left_peak_bytes:
            cached_bytes = first.left_peak_bytes - left_alone(trace).forecast.peak_bytes
            # More than all saved bytes has another cause, for example an evaluation.
            if abs(cached_bytes) <= _saved_by(trace):
                trace = replace(trace, beside_left_bytes=cached_bytes)
        if not first.learns:  # in that case some steps may hold more
            # On an accelerator the first of a pair held more for what it tried.
            for pair in first.alike() if self._device is None else ():
                held = [_most_other(self._traced(each, self._links, self._costs)) for each in pair]
                differs = abs(held[0] - held[1])  # later steps will differ as much
            if self._tier is not None and first.largest_moved_all:
                tier = self._tier
                everything = [tier if tier in each.options else "keep" for each in trace.blocks]
                windows, peak_bytes = self._limits.windows, first.largest.peak_bytes
                self._keep_if_it_fits(trace, everything, windows, peak_bytes)
        self._solve(trace, differs)

    def _keep_if_it_fits(
        self,
        trace: Trace,
        choices: Sequence[str],
        windows: Windows,
        peak_bytes: int,
        levels: tuple[int, ...] = (),
    ) -> None:
        """Allow the choices of a measured step to be planned again, whatever is predicted of them, if the step
        kept the budget."""
        short_bytes = self._corrections.short_bytes
        if peak_bytes <= self._budget - short_bytes:
            is_near = peak_bytes > usable_bytes(self._budget) - short_bytes
            kept = Kept(trace.blocks, tuple(choices), windows, peak_bytes, is_near, levels)
            self._solving.keep(kept)
        else:
            self._solving.give_up(tuple(choices))

    def conclude(self) -> None:
        """Plan for what was measured, if that is enough: no more steps will come."""
        solving = self._solving
        if self.follower.choices is not None:
            return
        solving.wait()
        if solving.found is None and self._first_steps.are_enough:
            self._plan_for_first_steps()
            solving.wait()
        if solving.found is not None:
            self._adopt(begins_step=False)
            self._recording.stop()

    def _traced(
        self,
        record: StepRecord,
        links: Links,
        costs: Costs = _FREE,
        *,
        priced: StepRecord | None = None,
    ) -> Trace:
        tier = self._tier or "disk"
        runs_ahead = self._device is not None
        trace = trace_of(record, links, costs, tier, runs_ahead=runs_ahead, priced=priced)
        below = self._limits.tiers.tier
        capacity = below.capacity_bytes if below is not None else None
        if self._tier is None:
            capacity = 0
        return trace if capacity is None else trace.moving_at_most(capacity * 19 // 20, tier)

    def _begin_larger(self, nbytes: int, known_bytes: int) -> None:
        """Handle a step that may be larger than the planned one: it saves ``nbytes`` where that one saved
        ``known_bytes``.

        The step then keeps what fits, as the first step did, or moves everything. It is measured if its first
        block showed that it is larger.
        """
        is_left = self.follower.is_left and not self._shape.expects_larger
        if is_left and self._fits_grown(nbytes, known_bytes):
            return
        self._shape.begin_larger()
        if not self._shape.expects_larger:
            self._recording.begin_step()
            self._recording.start()
        self._limits.set_windows(self._first_windows())
        if self._first_steps.keeps_larger:
            self._limits.lift_resident()
            self.follower.begin_first()
        else:
            self._limits.lower_resident(0)

    def _fits_grown(self, nbytes: int, known_bytes: int) -> bool:
        """Whether an unmanaged step would still fit if what it adds grew from ``known_bytes`` to ``nbytes``."""
        predicted = self.follower.plan.predicted
        if predicted is None or not known_bytes:
            return False
        grown = (predicted.peak_bytes - self._bytes_at_start) * nbytes // known_bytes
        return self._bytes_at_start + grown <= self._target()

    def _plan_for_larger(self, record: StepRecord | None, asked_bytes: int) -> None:
        """Plan for an ended step that was larger than the planned one, or was expected to be."""
        self._recording.stop()
        self._limits.set_resident(self._limits.resident)
        self._limits.set_windows(self.follower.windows)
        if record is None or self._shape.expects_larger or self._solving.is_running:
            return
        if not self._links.down_rate:  # the first step fit, so no other was measured
            self._links = links_of([record])
        moved_seconds = self._costs.per_moved_byte * record.moved_bytes
        computing = max(0.0, record.computing_seconds - moved_seconds)
        trace = self._traced(record, self._links, replace(self._costs, computing_seconds=computing))
        found = self._solving.found
        if found is not None and self._solving.is_new:
            if _saved_by(found[0]) >= _saved_by(trace):
                self._adopt()
                return
        elif self._shape.holds(_saved_by(trace)) and (
            self.regions is None or self.regions.can_be_followed(trace.regions)
        ):
            self._shape.await_next()
            return
        left = left_alone(trace)
        fits = left.forecast.peak_bytes <= self._target()
        if self._first_steps.keeps_larger and not fits:
            self._first_steps.keeps_larger = False  # the next such step measures what moving costs
            self._shape.await_another()
            return
        self._shape.stop_waiting()
        self._shape.begin_plan(asked_bytes)
        self._corrections.begin_larger()
        if self._first_steps.keeps_larger:
            self._solving.found = trace, left
            self._adopt()
        else:
            self._solve(trace)

    def _look_at_first(self) -> None:
        """Decide after the first step, which shows the memory but not the time."""
        first = self._first_steps.records[0]
        # The optimizer's state exists only from the second step on.
        grown = max(0, _other(self._meter.mark()) - _other(first.samples[0]))
        trace = self._traced(first, links_of([first])).raised(grown)
        left = left_alone(trace)
        target = self._target()
        if left.forecast.peak_bytes <= target:
            self._recording.stop()
            self._solving.found = trace, left
            return
        if self._first_steps.tries_again():
            self._begin_first()
            return
        if self.regions is not None:
            self.modules_wanted = True
        self._first_steps.mode = "all"
        if self.min_bytes < MIN_BYTES:
            large = trace.keeping_below(MIN_BYTES)
            if large is trace or self._smallest_of(large) <= self._budget:
                self.min_bytes = MIN_BYTES
            if large is not trace and self.min_bytes == MIN_BYTES:
                self._first_steps.forget()  # measure the next step as the first, with fewer blocks
                return
        room = max(0, target - _most_other(trace))
        self._limits.set_resident(room)
        if self._tier is not None:
            # Half of the space is for the windows, so that the other half stays in the step that is to keep
            # something. A window smaller than the largest block would hide no transfer.
            most = max([room // 4, *(each.nbytes for each in trace.blocks)])
            inflight, prefetch = self._limits.windows
            self._limits.set_windows(Windows(min(inflight, most), min(prefetch, most)))

    def _smallest_of(self, trace: Trace) -> int:
        return smallest_budget(trace, windows=self._limits.given_windows)

    def _ran_out(self, *, earlier: bool) -> str:
        """Hold less from now on, if possible: the device ran out of memory within the budget.

        Args:
            earlier: it happened in the backward of an earlier step.

        Returns:
            A text for reports: that a later step may fit, or that none can.
        """
        step = f"{'a step before ' * earlier}step {self._steps} within {self._named} ran out of device memory"
        windows, limit = self._limits.windows, self._limits.tiers.evictor.resident.limit
        if not earlier:
            self._has_failed = True
            self._limits.lower_resident(0)
        if self.follower.is_loaded:
            return (
                f"{step}: a loaded plan is never changed; give budget= instead to have a plan made"
            )
        if (
            self.follower.choices is not None
            and not self.follower.is_too_small
            and not self._shape.is_larger
        ):
            least = self._budget // _SHORT_PART
            self._corrections.run_short(least)
            self._solving.forget_kept()
            if self._solving.found is not None and not self._solving.is_running:
                self._solve(self._solving.found[0])
            return f"{step}: plans use {format_bytes(least)} less of it from now on, so run the step again"
        if not self.follower.is_too_small:
            self._limits.set_windows(Windows(*(each // 2 for each in windows)))
            is_less = self._limits.windows != windows and max(windows) > _GUARD_BYTES
            keeps = self._first_steps.mode != "all" and not self._shape.is_larger and limit != 0
            if self._tier is not None and (is_less or keeps):
                return (
                    f"{step} before it had a plan: the stash holds less from now on, so run the step "
                    "again"
                )
        return f"{step} with everything moved that can move: no plan makes it fit"

    @property
    def _named(self) -> str:
        where = f" of {self._device_name}" if self._device is not None else ""
        return f"budget={format_bytes(self._budget)}{where}"

    def _watch(
        self, record: StepRecord | None, found: StepFigures, looked_bytes: int, *, is_alike: bool
    ) -> None:
        """Handle an ended step under the plan; ``is_alike``: it saved as much as the planned one."""
        solving = self._solving
        if solving.found is not None and not solving.is_running and solving.is_new:
            self._adopt()
            return
        self._limits.set_resident(self._limits.resident)  # the guard may have lowered it
        predicted = self.follower.plan.predicted
        if record is not None:
            avoided = self._guard.avoided_bytes
            if self._corrections.add(
                record, self._budget, looked_bytes, avoided, is_alike=is_alike
            ):
                self._recording.stop()
                self._correct()
            return
        if predicted is None:
            return
        if found.peak_bytes > self._budget:
            self._corrections.exceed(found.peak_bytes, found.step_seconds)
            self._correct()
            return
        if not is_alike:  # the prediction is for another step
            if self._corrections.unlike():
                solving.end_trial()
            return
        is_used = self._corrections.time(found)
        if is_used:
            self._note_measured()
        if self.follower.is_left:
            return  # no plan is faster
        if is_used and self._corrections.is_timed and not solving.is_running:
            self._compare_times()
            return
        if self._corrections.is_off(found.step_seconds, predicted.step_seconds):
            self._corrections.begin(again=True)
            self._recording.start()

    def _compare_times(self) -> None:
        """Follow the plan whose steps took the least time, once those of this one were timed.

        On an accelerator the host may be the limit, which no prediction knows: a plan that asks little of it is
        timed, too.
        """
        measured, solving = self._corrections.measured, self._solving
        if measured is None or measured[0] > self._budget or self.follower.plan.state != "planned":
            return
        solving.timed(StepFigures(*measured))
        if self._device is not None and self.regions is not None and not solving.is_new:
            solving.try_whole_calls(self._target())

    def _note_measured(self) -> None:
        """Record the figures of the plan's steps. If they take less time than predicted, so does a plain step:
        an accelerator that waits for the host while a step is recorded seems to compute for longer."""
        if self._corrections.measured is None:
            return
        measured, plan, plain = (
            StepFigures(*self._corrections.measured),
            self.follower.plan,
            self._plain,
        )
        if plain is not None and plan.predicted is not None and self._device is not None:
            part = min(1.0, measured.step_seconds / plan.predicted.step_seconds)
            plain = replace(plain, step_seconds=plain.step_seconds * part)
        bound = plan.bound
        if bound is not None and measured.step_seconds < bound.step_seconds:
            # The steps that it was computed from took longer.
            bound = replace(bound, step_seconds=measured.step_seconds)
        self.follower.plan = replace(plan, measured=measured, plain=plain, bound=bound)

    def _note_kept(self) -> None:
        """Record that steps kept the budget, although the plan was said to be too small: the first measured
        steps hold more, since they move more."""
        if self.follower.is_too_small:
            self.follower.plan = replace(
                self.follower.plan, state="planned", smallest_budget_bytes=None
            )
            self._reports.forget_too_small()

    def _correct(self) -> None:
        """Report what was measured, and plan again if the peak differs from the prediction."""
        measured = self._corrections.measured
        if measured is None:
            self._corrections.forget_followed()
            return
        self._note_measured()
        if measured[0] <= self._budget:
            self._note_kept()
        solving, found = self._solving, self._solving.found
        if found is None or solving.is_running:
            return  # another plan is being made
        is_left = self.follower.is_left
        # The same trace as before: under a plan, memory that the allocator caches when the plan's own tensors
        # die would count as other memory.
        trace, solution = found
        blocks = zip(trace.blocks, solution.choices, strict=True)
        moved = sum(block.nbytes for block, name in blocks if name != "keep")
        left, usable = left_alone(trace), usable_bytes(self._budget)
        if not is_left and self._corrections.leave_all(moved, usable, left.forecast.peak_bytes):
            solving.found = trace, left
            return
        if solving.is_trying:
            if measured[0] > self._budget:
                solving.end_trial()
            self._corrections.forget_followed()
            return
        if not is_left:
            choices, windows = solution.choices, solution.windows
            self._keep_if_it_fits(trace, choices, windows, measured[0], solution.levels)
        is_other = self._corrections.correct(self._budget, can_hold_less=solution.fits)
        now = self._corrections.as_now(
            trace, self._costs.per_moved_byte, runs_again=REGION in solution.choices
        )
        if is_other or now is not trace:
            self._links = now.links
            self._solve(now)
            over = measured[0] - self._budget
            if (
                over > 0 and self._limits.resident is not None
            ):  # do not wait for the new plan in this step
                self._limits.lower_resident(max(0, self._limits.resident - over))

    @property
    def counts_modules(self) -> bool:
        """Whether to count what each module saves: in the first measured step."""
        if self.regions is None or self._first_steps.records:
            return False
        plan = self.follower.plan
        if self.follower.is_loaded:
            return bool(plan.regions) and self._steps == 1
        return self.follower.choices is None

    def _seems_to_fit(self) -> bool:
        """Whether this step's ended forward would have kept the limit if it had kept everything."""
        if self.follower.is_loaded:
            return False
        limits = self._limits
        resident = limits.tiers.evictor.resident
        moved = self._shape.saved_bytes - resident.nbytes
        return self._guard.held() + moved <= self._target()

    # Called by the core: see :class:`Controller`.

    def choose(
        self, block: Block, tensor: Tensor, modules: Sequence[nn.Module], ways: Ways | None
    ) -> str:
        """See :meth:`Controller.choose`."""
        follower = self.follower
        follower.count(block)
        if ways is None:
            return ""
        tier = follower.choose(block, tensor, modules)
        if self.asks_prices:
            paused = self.pause()
            prices = ways.prices()
            self._meter.resume(paused)
            options = {name: _option(price) for name, price in prices.items() if price is not None}
            self._recording.note_options(block.cleanup.serial, options)
        if tier == "recompute" and not ways.can_recompute():
            return follower.instead
        return tier

    def may_leave_bytes(self, threads: int) -> int:
        """See :meth:`Controller.may_leave_bytes`."""
        return self.follower.may_leave_bytes(threads)

    def fits_unseen(self) -> bool:
        """See :meth:`Controller.fits_unseen`."""
        return self.follower.fits_unseen()

    def take_rest_as_known(self) -> None:
        """See :meth:`Controller.take_rest_as_known`."""
        self._shape.take_rest_as_known()

    def plan_forward(
        self, region: RecomputedRegion, modules: Sequence[nn.Module], tiers: DeviceTiers
    ) -> Planned | None:
        """See :meth:`Controller.plan_forward`: ``None`` if nothing can move, so that regions are always
        recomputed."""
        return Planned(region, self, tiers, modules) if self.regions is not None else None

    # Events of blocks.

    def count_saved(self, nbytes: int) -> None:
        """Add the bytes of storages saved in this step, each counted as often as it was saved."""
        self._shape.count_saved(nbytes)

    @property
    def asks_prices(self) -> bool:
        """Whether to measure now what recomputing and packing a block cost: in the second step, once not
        everything fits, and in a step that is larger than those before."""
        if not self._recording.is_on:
            return False
        return self._shape.is_larger or (
            self.follower.choices is None and len(self._first_steps.records) == 1
        )

    def may_recompute(self, *, has_ended: bool) -> bool:
        """Whether a tensor that is saved now may be recomputed; ``has_ended``: it is the first of the next
        step."""
        if self.asks_prices or self.follower.recomputes:
            return True
        if self._tier is None and self.follower.choices is None:
            return True  # nothing moves: what is to go before there is a plan is recomputed
        measured = self._recording.is_on and self.follower.choices is None
        return has_ended and measured and not self._first_steps.records

    def pause(self) -> Any:
        """Exclude what follows from the step, until :meth:`resume` gets what this returns."""
        return self._meter.pause()

    # Events of forwards of modules that may be recomputed.

    def note_forward(self, kind: str, forward: Forward) -> bool:
        """Record that a forward begins (``"enter"``) or ends (``"leave"``) now.

        Returns:
            Whether the step in which it began is still being measured: a backward within a forward begins
                another.
        """
        assert self.regions is not None
        if not self.regions.is_recorded(forward):
            return False
        self._meter.note((kind, time.perf_counter(), 0.0, 0, forward.number))
        return True

    def resume(self, paused: Any) -> float:
        """Exclude the trial of a region since :meth:`pause` from the step. Return its seconds."""
        return self._meter.resume(paused)

    def end_trial(self, paused: Any) -> None:
        """Exclude a compared replay from the step, as :meth:`resume` does. Memory that it freed is returned to
        the system; otherwise it would count as memory of later moments of the step."""
        self._meter.resume(paused)
        if self._device is None:
            self._give_back()

    def may_try(self, name: str) -> bool:
        """Whether a forward of this name may run twice now, to compare: once not everything fits, and if there
        is space for what it saves."""
        assert self.regions is not None
        nbytes = self.regions.bytes_of(name)
        if not self.asks_prices or not nbytes:
            return False
        if self._first_steps.learns:
            has_room = nbytes < self._spare_bytes() // 2
        else:
            has_room = self._guard.has_room(nbytes)
        # The host waits for an accelerator that compares, which changes what is measured.
        return has_room and (self._device is None or self.regions.may_try(name, _TRIED_FORWARDS))

    def note_used(self, nbytes: int) -> bool:
        """Record that backward uses ``nbytes`` of a block. Return whether more blocks are in place than may
        be."""
        if not self._is_in_backward:
            self._is_in_backward = True
            if self.counts_modules and not self._seems_to_fit():
                self.modules_wanted = True
        if self._device is None:  # an accelerator's allocator counts cached memory separately
            self._guard.note_used(nbytes)
        elif not self._shape.is_seen:
            self._guard.held()  # the program may reset the peak before the next step
        return self.follower.looks_in_backward(nbytes)

    def saved_again(self, block: Block) -> None:
        """Record that a block that is held was saved once more."""
        self._recording.note_saved_again(block.cleanup.serial, self._shape.counted)

    def _spare_bytes(self) -> int:
        """Return the bytes that can still be allocated."""
        return spare_bytes() if self._device is None else self._device.free_bytes()

    # Making and following a plan.

    def _target(self) -> int:
        return usable_bytes(self._budget) - self._corrections.bias_bytes

    def _solve(self, trace: Trace, spare_bytes: int = 0) -> None:
        """Have a plan made that leaves ``spare_bytes`` of the target free, if there is one."""
        target = self._target()
        most = self._budget - self._corrections.bias_bytes
        if self._device is not None:
            # What the optimizer holds, for example: no plan changes it, and an allocator counts it exactly.
            least = max(_most_other(trace), trace.tail_other_bytes)
            if least < most:
                target = max(target, (least + most) // 2)
        self._solving.begin(trace, target, spare_bytes=spare_bytes, most=most)

    def _adopt(self, *, begins_step: bool = True) -> None:
        is_first = self._solving.taken is None
        trace, solution = self._solving.take()
        stays = self.regions.all_stays if self.regions is not None else {}
        bias_bytes = self._corrections.bias_bytes
        plan = plan_of(self._budget, trace, solution, bias_bytes, stays)
        windows = self._limits.given_windows
        plan = replace(plan, device=self._device_name, windows=windows)
        self.follower.follow(plan)
        self._plain = plan.plain
        if plan.state == "too small" and (is_first or self._reports.is_too_small):
            smallest = format_bytes(plan.smallest_budget_bytes or 0)
            self._reports.warn_too_small(
                f"the smallest that this step can keep is {smallest}, by an estimate with everything moved "
                "or recomputed that can be"
            )
        at_start = trace.moments[0].other_bytes if trace.moments else 0
        is_left = self.follower.is_left
        grown_bytes = max(solution.forecast.peak_bytes, solution.measured_bytes or 0) - at_start
        predicted_bytes = solution.predicted_bytes(bias_bytes)
        holds_too_much = self._guard.plan_for(grown_bytes, predicted_bytes, is_left=is_left)
        problem = Problem(trace.cut_at(solution.levels), self._budget)
        absent = absent_operands(trace.regions, problem.running_again(solution.choices))
        left = set() if is_left else left_blocks(trace, solution.choices)
        held = [
            block.nbytes
            for at, (block, name) in enumerate(zip(trace.blocks, solution.choices, strict=True))
            if name != REGION and at not in absent and at not in left
        ]
        self._bytes_at_start = at_start
        self._shape.follow(held, _saved_by(trace) - sum(held))
        self._most_other_bytes = max(self._most_other_bytes, _most_other(trace))
        self._limits.set_windows(solution.windows)
        slack = max(0, self._budget - predicted_bytes)
        left_bytes = sum(trace.blocks[at].nbytes for at in left)
        managed_bytes = max(0, solution.forecast.resident_peak_bytes - left_bytes)
        self._limits.set_resident(managed_bytes + slack)
        under_way = sum(self._limits.windows)
        self._limits.unplanned = max(0, self._target() - self._most_other_bytes - under_way)
        if self.regions is not None and not self.follower.is_loaded:
            self.modules_wanted = REGION in solution.choices
        self._corrections.follow(
            predicted_bytes,
            _saved_by(trace),
            is_left=is_left,
            simulated_peak_bytes=solution.forecast.peak_bytes,
            window_bytes=sum(solution.windows) if solution.forecast.moved_bytes else 0,
        )
        if not self._first_steps.learns:
            self._first_steps.forget()
        if begins_step and holds_too_much and self._device is None:
            self._give_back()
        self._begin_measuring()

    def _begin_measuring(self) -> None:
        """Record the next steps under a new plan, unless its figures are known or are found without that."""
        if (measured := self._solving.measured) is not None:
            self._corrections.take_as_known(measured)
            self._note_measured()
            self._recording.stop()
        elif self._solving.is_trying:
            self._corrections.begin_timing()
            self._recording.stop()
        else:
            self._recording.start()

    def _first_windows(self) -> Windows:
        """Return the windows before anything is measured: each an eighth of what the budget leaves, 16 to 128
        MiB; with a small budget at least a sixteenth of it."""
        left = max(0, self._budget - self._meter.now())
        least = min(_LEAST_WINDOW_BYTES, self._budget // 16)
        size = min(128 << 20, max(least, left // 8))
        return Windows(size, size)


def _option(price: Price) -> Option:
    return Option(*price[:3], made_bytes=price.made_bytes)


def _other(sample: Sample) -> int:
    """Return the bytes of a sample that are not the stash's."""
    _, held, ours = sample
    return held - ours


def _saved_by(trace: Trace) -> int:
    return sum(each.nbytes for each in trace.blocks)


def _most_other(trace: Trace) -> int:
    return max((moment.other_bytes for moment in trace.moments), default=0)


def auto_budget() -> int:
    """Return the bytes that this process holds and can still allocate, less a twentieth."""
    return held_and_spare(ProcessMeter().now(), spare_bytes())


def held_and_spare(held_bytes: int, spare_bytes: int) -> int:
    """Return the budget that ``"auto"`` means, given the bytes held and the bytes that can still be
    allocated."""
    return (held_bytes + spare_bytes) * 19 // 20


leave_untraced(__name__)  # including what this module imports
