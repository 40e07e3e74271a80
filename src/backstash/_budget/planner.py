"""The planner of one device: measures steps, and has them planned; a :class:`Follower` does what the plan says.

Step 1 keeps what fits. If that is everything, nothing else is measured. Otherwise step 2 moves everything, and
tries on every block whether it can be recomputed or packed, and how long that takes; step 3 moves every other
block, which tells what moving costs beside waiting. Where there is no tier below, what can be recomputed is,
instead, from step 1 on; on an accelerator step 1 moves everything.
To learn what any budget would cost, more steps are measured (see `_budget/first_steps.py`).
Then a plan is made, in a thread, and followed from the next step on. Its first steps are measured, too: where
the peak is not what was predicted, the plan is made again with the difference added. After three steps that
take more than a tenth longer or shorter than predicted, steps are measured again; where bytes move at another
rate than they did, or the step computes for another time, the plan is made again for that.

What is saved after the last block that a plan lets go of is left alone, as all is where everything fits: it is
no block, and costs what it costs without a stash.

Steps may have other shapes. A plan is for the largest step so far: of a smaller one that it does not know, the
oldest blocks go, with as much other memory taken for granted. A larger one moves everything, is measured, and
planned for. By its first block it is known for one. A step whose first block is as large as the plan's may
have later ones of other sizes, as a mixture of experts has: they are held as those of the plan's sizes are.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from .._core.controller import Controller, Prices
from .._device.base import Device
from .._plan.regions import Forward, Regions
from .._plan.simulate import Windows
from .._plan.solve import smallest_budget
from .._plan.table import REGION
from .._plan.trace import Links, Option, Trace
from .._runtime.trace import EventLog
from .._saved.block import Block
from .._text import level_of_program
from .._tiers.device_tiers import DeviceTiers
from .._tiers.packing import Price
from .._torch.dynamo import leave_untraced
from ..errors import BudgetError, StashWarning
from ..memory import spare_bytes
from ..plan import Plan, StepFigures, plan_of, usable_bytes
from ..policy import MIN_BYTES
from ..units import format_bytes
from .corrections import Corrections
from .first_steps import FirstSteps, Mode
from .follower import Follower
from .guard import MemoryGuard
from .limits import Limits
from .meter import Meter, ProcessMeter, Sample
from .planned import Planned, RecomputedRegion
from .record import Costs, StepRecord, beside_left, links_of, trace_of
from .recording import StepRecording
from .shape import EndedStep, StepShape
from .solving import Beside, Kept, Solving, left_alone

__all__ = ["Planner", "auto_budget", "held_and_spare"]

_GUARD_BYTES = 1 << 20  # saved between two looks at the process's memory
_LEAST_WINDOW_BYTES = 16 << 20
_MARGIN = 50  # the part of a budget that it may be exceeded by and nothing is said
_WARNED_AT = 3  # steps that exceeded it: planning again with what was measured did not help
_SHORT_PART = (
    16  # the part of a budget that less is used where the device ran out of memory within it
)
_LEAST_BYTES = 16 << 10  # of a block, which itself takes 2 KiB and 0.1 ms of a step
_FREE = Costs()


class Planner(Controller):
    """Has steps measured, and planned for. Its methods want the stash's lock, but for :attr:`plan`.

    Args:
        event_log: of the stash.
        meter: makes what measures the device, from a callable of the bytes that the stash holds there.
        budget: the most bytes of memory at any moment of a step; ``None`` with a loaded plan.
        loaded: a plan to follow as it is.
        tier: the name of the action that moves a block down.
        windows: ``inflight`` and ``prefetch`` where the caller gave them, else ``None``.
        trim: gives back memory that is free and still the process's.
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
        trim: Callable[[], None] = lambda: None,
        device: Device | None = None,
        strict: bool = False,
    ) -> None:
        self._strict = strict
        self._refusal: str | None = None  # what is yet to be raised
        self.min_bytes = _LEAST_BYTES if loaded is None and budget != 1 else MIN_BYTES
        """The smallest storage that moves, where the caller does not say. In the first step small ones do, too,
        and after it where the budget cannot be kept otherwise."""
        self._smallest_bytes = 0  # the largest budget of which was said that it is the smallest
        self._tier = tier
        self._limits = Limits(windows)
        self._meter = meter(self._limits.held_bytes)
        self._budget = loaded.budget_bytes if loaded is not None else budget or 0
        most = usable_bytes(self._budget)
        self._guard = MemoryGuard(self._meter, most, self._budget, trim, tries=device is None)
        self._device = device
        self._device_name = device.name if device is not None else "cpu"
        self.regions = Regions() if tier is not None else None
        """Of the modules that may be recomputed; ``None``: they are whatever the plan is."""
        self._recording = StepRecording(
            event_log, self._meter, self.regions, self._guard, gives_back=tier is None
        )
        self._first_steps = FirstSteps(
            self._budget,
            copies_aside=device is not None,
            keeps_first=device is None and tier is not None,
        )
        self._steps = 0
        self._has_failed = False  # this step, as far as is known
        self._is_in_backward = False
        self._shape = StepShape(begins_as_known=loaded is not None)
        self._most_other_bytes = 0  # that a step which was planned for held beside
        self._bytes_at_start = 0  # of memory, when the step began that was planned for
        self._links, self._costs = Links(0.0, 0.0), Costs()
        self._corrections = Corrections()
        self._anew_bytes = 0  # that were given back before this step
        self._recording_seconds = 0.0  # of operations, which is in the price of no block yet
        self._exceeding = 0  # steps under a plan that exceeded the budget
        self.notes: dict[str, None] = {}
        self._too_small: str | None = None  # of these, that the budget cannot be kept
        self._solving = Solving(windows, self.notes)
        self.follower = Follower(
            Plan(self._budget, "measuring", device=self._device_name),
            tier=tier,
            regions=self.regions,
            limits=self._limits,
            guard=self._guard,
            # An accelerator's allocator takes its time to answer.
            look_bytes=max(_GUARD_BYTES, self._budget >> 9 if device is not None else 0),
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
            self.follower.follow(_with(loaded, state="loaded", measured=None))

    @property
    def latest_plan(self) -> Plan:
        """See :attr:`Controller.latest_plan`."""
        return self.follower.plan

    @property
    def plan(self) -> Plan:
        """What is known now. Waits for a plan that is being made."""
        self._solving.wait()
        return self.follower.plan

    @property
    def trace(self) -> Trace | None:
        """What the plan was made from."""
        found = self._solving.found
        return found[0] if found is not None else None

    @property
    def matches_nothing(self) -> bool:
        """Of a loaded plan, after a step: whether nothing that was saved is of its classes."""
        if (
            self.follower.plan.state != "loaded"
            or self.follower.choices is None
            or self._steps == 1
        ):
            return False
        regions = [each.name for each in self.follower.plan.regions]
        if regions and self.regions is not None:  # which may let go of all that is saved
            if self._steps == 2 or self.regions.has_begun(regions):
                return False  # modules that nobody named are attached to after the first step
        return not self.follower.choices.matched

    def close(self) -> None:
        """Measure no more. Where it was to be learnt what any budget would cost, that is planned for now."""
        if self._first_steps.learns:
            self.conclude()
        self._recording.end()

    def retire(self) -> None:
        """Measure no more, and leave the device as it was: nobody plans for it from now on."""
        self._recording.end()
        self._limits.end()

    def forked(self) -> None:
        """In a forked process: the threads that sample and plan are the other's, and so is an accelerator."""
        self._solving.forked()
        self._meter.forked()
        if self._device is not None:
            self._recording.stop()
        # Else it goes on with the next step here, if there is one: most such processes load data.

    # At each step.

    def begin_step(self, tiers: DeviceTiers) -> None:
        """The first block of a step is being admitted to ``tiers``; the step before has ended."""
        self._limits.begin_step(tiers, self._guard.has_room, self._ran_out)
        recording, first = self._recording, self._steps == 0
        ended = self._shape.begin_step(is_first=first)
        kept_free_bytes = self._guard.kept_free_bytes
        if self._guard.keeps_free:
            self._end_kept_free(ended)
        looked_bytes = self._guard.take_highest()
        highest_bytes = max(looked_bytes, self._guard.late_bytes())
        is_left = self.follower.plan.state == "left alone"
        anew_bytes, self._anew_bytes = self._anew_bytes, 0
        must_give_back = self._guard.must_free_at_start(
            always=recording.is_on and not is_left,
            may_try=self.follower.choices is not None and not recording.is_on,
        )
        if self._first_steps.mode == "left":
            self._meter.resume(self._meter.pause())  # a host that is ahead would tell its own time
        elif must_give_back and self._device is None:
            self._give_back()
        seconds = self._meter.begin_step()
        self._guard.begin_step()
        record = recording.end_step(anew_bytes) if recording.is_on else None
        if recording.is_on and not self._meter.is_sampling:  # the first step of a forked process
            record = None
            recording.start()
        if self._has_failed:  # what it would have taken is not known
            record, self._has_failed = None, False
        self._steps += 1
        self._is_in_backward = False
        self.follower.begin_step()
        if self.regions is not None:
            self.regions.begin_step()
        recording.begin_step()
        if self.follower.plan.state == "loaded":
            self.follower.apply_loaded()
            if not first:
                self._count_exceeding(max(highest_bytes, self._meter.known_peak_bytes))
        elif self.follower.choices is None:
            self._measure(record, seconds, ended.asked_bytes)
        elif not first:
            highest_bytes = max(highest_bytes, self._meter.known_peak_bytes)
            # What this step began with is no reason for another plan.
            highest_bytes = max(min(highest_bytes, self._budget), highest_bytes - kept_free_bytes)
            if not ended.was_seen:  # it saved more than it was taken for; the next one is looked at
                highest_bytes = min(highest_bytes, self._budget)
            self._count_exceeding(highest_bytes)
            if ended.was_larger:
                self._plan_for_larger(record, ended.asked_bytes)
            else:
                by_blocks = record is not None or self.follower.plan.left_after is None
                is_alike = self._shape.is_alike(ended, by_blocks=by_blocks)
                if is_left and ended.has_grown:
                    # Its growth seemed to fit at each look; the last blocks had to go all the same.
                    if not self._fits_grown(ended.asked_bytes, ended.most_asked_bytes):
                        self._shape.ended_larger()
                found = StepFigures(highest_bytes, seconds)
                self._watch(record, found, looked_bytes, is_alike=is_alike)
        if self._guard.is_trying:
            self._guard.is_trying = not recording.is_on  # else it is measured for something else
            if self._guard.is_trying:
                recording.start()

    def _give_back(self) -> None:
        """Have free memory given back as a step begins.

        What is held then is of what came since the last backward, an evaluation perhaps, and of no step.
        """
        paused, before = self._meter.pause(), self._meter.now()
        self._guard.trim()
        self._anew_bytes = max(0, before - self._meter.now())
        self._meter.resume(paused)

    def _end_kept_free(self, ended: EndedStep) -> None:
        """A step has ended that gave nothing back as it began: see :meth:`MemoryGuard.must_free_at_start`."""
        guard = self._guard
        if guard.is_trying:
            peak_bytes = max(guard.highest_bytes, self._meter.sampled_peak_bytes())
            is_alike = self._shape.is_alike(ended, by_blocks=True) and not ended.was_larger
            guard.end_trial(peak_bytes, is_alike=is_alike)
            if not ended.was_larger:  # else it is planned for
                self._recording.stop()
        elif guard.highest_bytes > guard.most:
            guard.fail_trial()

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
            self._limits.set_windows((_LEAST_WINDOW_BYTES, _LEAST_WINDOW_BYTES))
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
        if self._tier is None or self._first_steps.keeps_first:
            self._look_whether_it_fits(trace)
        limit = max(0, self._target() - _most_other(trace) - sum(self._limits.windows))
        self._limits.set_resident(spare if first.learns else limit)

    def _plan_for_first_steps(self) -> None:
        first = self._first_steps
        self._recording.stop()
        first.mode = "all"
        self._links, self._costs = first.costs()
        self._shape.begin_plan(first.told_bytes(first.largest))
        costs = beside_left(self._costs, first.largest.blocks, first.left_seconds)
        trace = self._traced(first.traced, self._links, costs, priced=first.largest)
        differs = 0
        if first.left_peak_bytes:
            beside = first.left_peak_bytes - left_alone(trace)[1].forecast.peak_bytes
            # More than all that is saved is of something else: an evaluation, perhaps.
            if 0 < beside <= _saved_by(trace):
                trace = replace(trace, beside_left_bytes=beside)
        if not first.learns:  # where some steps may hold more
            for pair in first.alike():
                held = [_most_other(self._traced(each, self._links, self._costs)) for each in pair]
                differs = abs(held[0] - held[1])  # as they will again
            if self._tier is not None and first.largest_moved_all:
                tier = self._tier
                everything = [tier if tier in each.options else "keep" for each in trace.blocks]
                windows = Windows(*self._limits.windows)
                self._keep_if_it_fits(trace, everything, windows, first.largest.peak_bytes)
        self._solve(trace, differs)

    def _keep_if_it_fits(
        self,
        trace: Trace,
        choices: Sequence[str],
        windows: Windows,
        peak_bytes: int,
        level: int = 0,
    ) -> None:
        """Steps with these choices were measured: if they kept the budget, they may be planned again, whatever
        is predicted of them then."""
        short_bytes = self._corrections.short_bytes
        if peak_bytes <= self._budget - short_bytes:
            is_near = peak_bytes > usable_bytes(self._budget) - short_bytes
            kept = Kept(trace.blocks, tuple(choices), windows, peak_bytes, is_near, level)
            self._solving.keep(kept)
        else:
            self._solving.give_up(tuple(choices))

    def conclude(self) -> None:
        """No more steps will come: plan for what was measured, if that is enough."""
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
        """A step may be larger than those that were planned for: it saves ``nbytes`` where they did
        ``known_bytes``. Then it keeps what fits, as the first step did, or moves all of it. It is measured if
        that is known at its first block."""
        is_left = self.follower.plan.state == "left alone" and not self._shape.expects_larger
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
        """Whether the step that is left in place would fit if what it adds grew from ``known_bytes`` to
        ``nbytes``."""
        predicted = self.follower.plan.predicted
        if predicted is None or not known_bytes:
            return False
        grown = (predicted.peak_bytes - self._bytes_at_start) * nbytes // known_bytes
        return self._bytes_at_start + grown <= self._target()

    def _plan_for_larger(self, record: StepRecord | None, asked_bytes: int) -> None:
        """A step has ended that was larger than those that were planned for, or was expected to be."""
        self._recording.stop()
        self._limits.set_resident(self._limits.resident)
        self._limits.set_windows(self._limits.planned_windows)
        if record is None or self._shape.expects_larger or self._solving.is_running:
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
        elif self._shape.holds(_saved_by(trace)) and (
            self.regions is None or self.regions.can_be_followed(trace.regions)
        ):
            self._shape.await_next()
            return
        left = left_alone(trace)
        fits = left[2] <= self._target()
        if self._first_steps.keeps_larger and not fits:
            self._first_steps.keeps_larger = (
                False  # what moving takes is measured in the next such step
            )
            self._shape.await_another()
            return
        self._shape.stop_waiting()
        self._shape.begin_plan(asked_bytes)
        self._corrections.begin_larger()
        if self._first_steps.keeps_larger:
            self._solving.found = left
            self._adopt()
        else:
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
            self._recording.stop()
            self._solving.found = left
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
                self._first_steps.forget()  # the next step is measured as the first, with fewer blocks
                return
        room = max(0, target - _most_other(trace))
        self._limits.set_resident(room)
        if self._tier is not None:
            # Half of what is left may be on its way, so that the other half stays in the step that is to keep
            # something; a window below the largest block would hide nothing.
            most = max([room // 4, *(each.nbytes for each in trace.blocks)])
            inflight, prefetch = self._limits.windows
            self._limits.set_windows((min(inflight, most), min(prefetch, most)))
        if self._tier is not None and not self._first_steps.keeps_first:
            self._look_whether_it_fits(first_trace)
        elif (other := _most_other(first_trace)) > self._budget:
            self._warn_too_small(
                f"{self._named} cannot be kept: beside the tensors that are saved for backward this step holds "
                f"{format_bytes(other)}; the second step tells which budget is the smallest that can be kept"
            )

    def _look_whether_it_fits(self, trace: Trace) -> None:
        """After the first step that moves everything; where nothing can move, after the second, which tells
        what can be recomputed and packed."""
        if self._smallest_of(trace) > self._budget:
            self._warn_too_small(
                f"{self._named} cannot be kept: a step takes more, although everything moves that can; the "
                "smallest budget that can be kept is known after three steps"
            )

    def _smallest_of(self, trace: Trace) -> int:
        return smallest_budget(trace, allowed=self._allowed(), windows=self._limits.given_windows)

    def _warn_too_small(self, note: str) -> None:
        """In the place of what was said of it before. A step may keep the budget all the same."""
        if note not in self.notes:
            self._forget_too_small()
            self._too_small = note
            self._tell(note)

    def _forget_too_small(self) -> None:
        if self._too_small is not None:
            self.notes.pop(self._too_small, None)
            self._too_small = None

    def check(self) -> None:
        """Raise what a step that has ended was found to be, where the caller wants it.

        Raises:
            BudgetError: a step exceeded a budget that cannot be kept, or three steps one that can.
        """
        if self._refusal is not None:
            refusal, self._refusal = self._refusal, None
            raise BudgetError(refusal)

    def _ran_out(self, *, earlier: bool) -> str:
        """The device ran out of memory, within the budget. Less is held from now on if possible.

        Args:
            earlier: not in this step, but in one before it, in backward.

        Returns:
            What is said of it: that a later step may fit, or that none can.
        """
        step = f"{'a step before ' * earlier}step {self._steps} within {self._named} ran out of device memory"
        windows, limit = self._limits.windows, self._limits.tiers.evictor.resident.limit
        if not earlier:
            self._has_failed = True
            self._limits.lower_resident(0)
        if self.follower.plan.state == "loaded":
            return f"{step}: a loaded plan is followed as it is; allowed: budget= to have one made"
        if (
            self.follower.choices is not None
            and self.follower.plan.state != "too small"
            and not self._shape.is_larger
        ):
            least = self._budget // _SHORT_PART
            self._corrections.run_short(least)
            self._solving.forget_kept()
            if self._solving.found is not None and not self._solving.is_running:
                self._solve(self._solving.found[0])
            return (
                f"{step}: plans use {format_bytes(least)} less of it from now on, so run it again"
            )
        if self.follower.plan.state != "too small":
            self._limits.set_windows((windows[0] // 2, windows[1] // 2))
            is_less = self._limits.windows != windows and max(windows) > _GUARD_BYTES
            keeps = self._first_steps.mode != "all" and not self._shape.is_larger and limit != 0
            if self._tier is not None and (is_less or keeps):
                return f"{step} with no plan for it: less is held from now on, so run it again"
        return f"{step} with everything moved that can move: no plan makes it fit"

    @property
    def _named(self) -> str:
        where = f" of {self._device_name}" if self._device is not None else ""
        return f"budget={format_bytes(self._budget)}{where}"

    def _count_exceeding(self, highest_bytes: int) -> None:
        margin = 0 if self._strict else self._budget // _MARGIN
        if highest_bytes > self._budget + margin:
            self._exceeding += 1
            self.follower.has_exceeded = True
            if self._strict and self._too_small is not None:
                self._refusal = self._too_small
            elif self._exceeding == _WARNED_AT and (self._strict or not self.notes):
                why = "It is planned for what the largest step that was measured saves and holds"
                if self.follower.plan.state == "loaded":
                    why = "A loaded plan is followed as it is; allowed: budget= to have one made"
                self._refuse(
                    f"{self._named} was exceeded in {_WARNED_AT} steps; the last one held "
                    f"{format_bytes(highest_bytes)}. {why}"
                )

    def _watch(
        self, record: StepRecord | None, found: StepFigures, looked_bytes: int, *, is_alike: bool
    ) -> None:
        """A step under the plan has ended; ``is_alike``: it saved as much as the one that was planned for."""
        solving = self._solving
        if solving.found is not None and not solving.is_running and solving.is_new:
            self._adopt()
            return
        self._limits.set_resident(self._limits.resident)  # the guard may have lowered it
        predicted = self.follower.plan.predicted
        if record is not None:
            if self._corrections.add(record, self._budget, looked_bytes, is_alike=is_alike):
                self._recording.stop()
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
        if self.follower.plan.state == "left alone":
            return  # nothing is faster
        if self._corrections.is_off(found.step_seconds, predicted.step_seconds):
            self._corrections.begin(again=True)
            self._recording.start()

    def _note_measured(self) -> None:
        measured = self._corrections.measured
        if measured is not None:
            self.follower.plan = _with(self.follower.plan, measured=StepFigures(*measured))

    def _note_kept(self) -> None:
        """Steps under the plan kept the budget. Those that were measured first hold more, since more of them
        moves."""
        if self.follower.plan.state == "too small":
            self.follower.plan = _with(
                self.follower.plan, state="planned", smallest_budget_bytes=None
            )
            self._forget_too_small()

    def _correct(self) -> None:
        """Tell what was measured; where the peak was not what was predicted, plan again."""
        measured = self._corrections.measured
        if measured is None:
            self._corrections.forget_followed()
            return
        self._note_measured()
        if measured[0] <= self._budget:
            self._note_kept()
        if self._solving.found is None or self._solving.is_running:
            return  # another plan is being made
        is_left = self.follower.plan.state == "left alone"
        # The same trace: under a plan, memory that an allocator keeps when tensors die would count as
        # other memory, although the plan's tensors are what it is for.
        trace, solution, _ = self._solving.found
        blocks = zip(trace.blocks, solution.choices, strict=True)
        moved = sum(block.nbytes for block, name in blocks if name != "keep")
        left, usable = left_alone(trace), usable_bytes(self._budget)
        if not is_left and self._corrections.leave_all(moved, usable, left[2]):
            self._solving.found = left
            return
        if not is_left:
            choices, windows = solution.choices, solution.windows
            self._keep_if_it_fits(trace, choices, windows, measured[0], solution.level)
        is_other = self._corrections.correct(self._budget, usable, can_hold_less=solution.fits)
        now = self._corrections.as_now(
            trace, self._costs.per_moved_byte, runs_again=REGION in solution.choices
        )
        if is_other or now is not trace:
            self._links = now.links
            self._solve(now)
            over = measured[0] - self._budget
            if over > 0 and self._limits.resident is not None:  # this step is not to wait for it
                self._limits.lower_resident(max(0, self._limits.resident - over))

    @property
    def counts_modules(self) -> bool:
        """Whether it is counted what each module saves: in the first step that is measured."""
        if self.regions is None or self._first_steps.records:
            return False
        plan = self.follower.plan
        if plan.state == "loaded":
            return bool(plan.regions) and self._steps == 1
        return self.follower.choices is None

    def _seems_to_fit(self) -> bool:
        """Whether this step's forward, which has ended, held no more than it may, had it kept everything."""
        if self.follower.plan.state == "loaded":
            return False
        limits = self._limits
        resident = limits.tiers.evictor.resident
        moved = self._shape.saved_bytes - resident.nbytes
        return self._guard.held() + moved <= self._target()

    # What the core asks: see :class:`Controller`.

    def count(self, block: Block) -> None:
        """See :meth:`Controller.count`."""
        self.follower.count(block)

    def choose(self, block: Block, tensor: Tensor, prices: Prices) -> str:
        """See :meth:`Controller.choose`."""
        self.follower.count(block)
        tier = self.follower.choose(block, tensor)
        if self.asks_prices:
            paused = self.pause()
            self._was_priced(block, paused, prices())
        return tier

    @property
    def instead(self) -> str:
        """See :attr:`Controller.instead`."""
        return self.follower.instead

    def may_leave_bytes(self, threads: int, *, is_block: bool = True) -> int:
        """See :meth:`Controller.may_leave_bytes`."""
        return self.follower.may_leave_bytes(threads, is_block=is_block)

    def fits_unseen(self) -> bool:
        """See :meth:`Controller.fits_unseen`."""
        return self.follower.fits_unseen()

    def take_rest_as_known(self) -> None:
        """See :meth:`Controller.take_rest_as_known`."""
        self._shape.take_rest_as_known()

    def plan_forward(
        self, region: RecomputedRegion, modules: Sequence[nn.Module], tiers: DeviceTiers
    ) -> Planned | None:
        """See :meth:`Controller.plan_forward`: ``None`` where nothing can move when less is let go."""
        return Planned(region, self, tiers, modules) if self.regions is not None else None

    # What is told of blocks.

    def count_saved(self, nbytes: int) -> None:
        """Storages of so many bytes were saved in this step, each counted as often as it was."""
        self._shape.count_saved(nbytes)

    @property
    def asks_prices(self) -> bool:
        """Whether it is measured now what recomputing and packing a block take: in the second step, when it is
        known that not everything fits, and in one that is larger than those before."""
        if not self._recording.is_on:
            return False
        return self._shape.is_larger or (
            self.follower.choices is None and len(self._first_steps.records) == 1
        )

    def may_recompute(self, *, has_ended: bool) -> bool:
        """Whether something may be recomputed of what is saved now; ``has_ended``: of the step that begins with
        the next block."""
        if self.asks_prices or self.follower.recomputes:
            return True
        measured = self._recording.is_on and self.follower.choices is None
        return has_ended and measured and not self._first_steps.records

    def pause(self) -> Any:
        """What is done until :meth:`_was_priced` or :meth:`resume` is given what this returns is no part of the
        step."""
        return self._meter.pause()

    def _was_priced(self, block: Block, paused: Any, found: Mapping[str, Any]) -> None:
        """Codecs and replays were tried on ``block`` since :meth:`pause`.

        ``found``: what each takes; ``None`` where the block cannot be held so.
        """
        prices = {name: None if each is None else _option(each) for name, each in found.items()}
        self._meter.resume(paused)
        again = prices.get("recompute")
        if again is not None:  # what is recomputed has to be recorded
            seconds, self._recording_seconds = self._recording_seconds, 0.0
            again = replace(again, save_seconds=again.save_seconds + seconds)
            prices = {**prices, "recompute": again}
        self._recording.note_prices(block.cleanup.serial, prices)

    def recording_took(self, seconds: float) -> None:
        """So long operations were recorded since the last block: in a measured step, that is no computing."""
        if self._device is None and self.asks_prices:
            self._recording_seconds += seconds
            self._meter.resume(time.perf_counter() - seconds)

    # And of forwards of modules that may be recomputed.

    def trace_forward(self, name: str, index: int) -> tuple[Forward, int]:
        """It is recorded, and what its saves are; :meth:`note_forward` needs the number."""
        assert self.regions is not None
        return self.regions.record(name, index)

    def note_forward(self, kind: str, forward: Forward, number: int) -> bool:
        """``"enter"`` or ``"leave"``: that one begins or ends now.

        Returns:
            Whether the step in which it began is still the one that is measured: a backward in the middle of a
            forward begins another.
        """
        assert self.regions is not None
        if not self.regions.is_recorded(forward, number):
            return False
        self._meter.hear((kind, time.perf_counter(), 0.0, 0, number))
        return True

    def region_hook_begins(self) -> Any:
        """For :meth:`hook_took` of a ``"region hook"``, for which an accelerator may have to wait."""
        return self._meter.hook_begins() if self._device is not None else None

    def resume(self, paused: Any) -> float:
        """What a region was tried by since :meth:`pause` is no part of the step. Returns its seconds."""
        return self._meter.resume(paused)

    def end_trial(self, paused: Any) -> float:
        """As :meth:`resume`, of a replay that was compared. What it has freed is given back to the
        system: later moments of the step would hold it, too, and it would be taken for their own.

        Returns:
            What the replay took; 0: that is not known.
        """
        seconds = self._meter.resume(paused)
        if self._device is not None:
            return 0.0  # the host, which compares, takes longer than the device
        given_back_before = self._anew_bytes
        self._give_back()
        self._anew_bytes += given_back_before
        return seconds

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

    def note_used(self, nbytes: int) -> bool:
        """Backward uses so many bytes of a block. Returns whether fewer blocks may stay than do."""
        if not self._is_in_backward:
            self._is_in_backward = True
            if self.counts_modules and not self._seems_to_fit():
                self.modules_wanted = True
        if (
            self._device is None
        ):  # an accelerator's allocator keeps what is free, and no tensor's, apart
            self._guard.note_used(nbytes)
        return self.follower.looks_in_backward(nbytes)

    def saved_again(self, block: Block) -> None:
        """A block that is held was saved once more."""
        self._recording.note_saved_again(block.cleanup.serial, self._shape.counted)

    def _spare_bytes(self) -> int:
        """What can still be taken."""
        return spare_bytes() if self._device is None else self._device.free_bytes()

    def hook_begins(self) -> Any:
        """For :meth:`hook_took`."""
        return self._meter.hook_begins()

    def hook_took(self, kind: str, began: Any) -> None:
        """``"pack hook"`` or ``"unpack hook"``, for a block, or ``"region hook"``, from ``began`` to now."""
        if self._recording.is_on and began is not None:
            self._meter.hook_took(kind, began)

    # Making a plan, and following it.

    def _allowed(self) -> list[str]:
        below = [self._tier, REGION] if self._tier is not None else []
        return ["keep", "recompute", "pack", *below]

    def _target(self) -> int:
        return usable_bytes(self._budget) - self._corrections.bias_bytes

    def _solve(self, trace: Trace, spare_bytes: int = 0) -> None:
        """Have a plan made that leaves ``spare_bytes`` of the target, if there is one that does."""
        self._solving.begin(
            trace,
            self._target(),
            allowed=self._allowed(),
            spare_bytes=spare_bytes,
            beside=self._beside(),
        )

    def _beside(self) -> Beside | None:
        nbytes = self._corrections.beside_bytes
        return Beside(nbytes, usable_bytes(self._budget) - nbytes) if nbytes is not None else None

    def _adopt(self, *, begins_step: bool = True) -> None:
        before, (trace, solution, smallest) = self._solving.taken, self._solving.take()
        found = self.follower.plan.measured
        is_same = (  # as the one before, which was measured and kept the budget
            found is not None
            and found.peak_bytes <= self._budget
            and before is not None
            and before[0].blocks is trace.blocks
            and before[1].choices == solution.choices
            and before[1].windows == solution.windows
            and before[1].level == solution.level
        )
        stays = self.regions.all_stays if self.regions is not None else {}
        bias_bytes = self._corrections.bias_bytes
        plan = plan_of(self._budget, trace, solution, smallest, bias_bytes, stays)
        windows = self._limits.given_windows
        plan = _with(plan, device=self._device_name, windows=windows)
        if plan.state == "too small":  # what was said to be kept is kept: a larger one is, too
            self._smallest_bytes = max(self._smallest_bytes, plan.smallest_budget_bytes or 0)
            plan = _with(plan, smallest_budget_bytes=self._smallest_bytes)
        self.follower.follow(_with(plan, measured=found) if is_same else plan)
        if is_same:
            self._note_kept()
        elif plan.state == "too small" and (before is None or self._too_small is not None):
            note = (
                f"{self._named} cannot be kept: the smallest that this step can keep is "
                f"{format_bytes(self._smallest_bytes)}; everything that can move or be recomputed does"
            )
            self._warn_too_small(note)
        at_start = trace.moments[0].other_bytes if trace.moments else 0
        is_left = self.follower.plan.state == "left alone"
        grown_bytes = max(solution.forecast.peak_bytes, solution.measured_bytes or 0) - at_start
        holds_too_much = not is_same and self._guard.plan_for(grown_bytes, is_left=is_left)
        held = [
            block.nbytes
            for block, name in zip(trace.blocks, solution.choices, strict=True)
            if name != REGION
        ]
        self._bytes_at_start = at_start
        self._shape.follow(held, _saved_by(trace) - sum(held))
        self._most_other_bytes = max(self._most_other_bytes, _most_other(trace))
        self._limits.planned_windows = (
            solution.windows.inflight_bytes,
            solution.windows.prefetch_bytes,
        )
        self._limits.set_windows(self._limits.planned_windows)
        predicted_bytes = solution.predicted_bytes(bias_bytes)
        slack = max(0, self._budget - predicted_bytes)
        self._limits.resident = solution.forecast.resident_peak_bytes + slack
        self._limits.set_resident(self._limits.resident)
        under_way = sum(self._limits.windows)
        self._limits.unplanned = max(0, self._target() - self._most_other_bytes - under_way)
        if self.regions is not None and self.follower.plan.state != "loaded":
            self.modules_wanted = REGION in solution.choices
        self._corrections.follow(
            predicted_bytes,
            _saved_by(trace),
            is_left=is_left,
            is_measured=is_same,
            simulated_peak_bytes=solution.forecast.peak_bytes,
            resident_peak_bytes=solution.forecast.resident_peak_bytes,
        )
        if not self._first_steps.learns:
            self._first_steps.forget()
        if begins_step and is_left:
            self._guard.trim()  # what moving needed
        elif begins_step and holds_too_much and self._device is None:
            self._give_back()
        if is_same:
            self._correct()  # for the peak that is predicted now
        else:
            self._recording.start()

    def _first_windows(self) -> tuple[int, int]:
        """Before anything is known: an eighth of what the budget leaves for each, 16 to 128 MiB; of a small
        budget at least a sixteenth."""
        left = max(0, self._budget - self._meter.now())
        least = min(_LEAST_WINDOW_BYTES, self._budget // 16)
        size = min(128 << 20, max(least, left // 8))
        return size, size

    def _refuse(self, note: str) -> None:
        """Tell it, or have :meth:`check` raise it."""
        if self._strict:
            self.notes[note], self._refusal = None, note
        else:
            self._tell(note)

    def _tell(self, note: str) -> None:
        if note not in self.notes:
            self.notes[note] = None
            warnings.warn(note, StashWarning, stacklevel=level_of_program())


def _option(price: Price) -> Option:
    return Option(*price[:3], made_bytes=price.made_bytes)


def _other(sample: Sample) -> int:
    """Bytes that are not the stash's."""
    _, held, ours = sample
    return held - ours


def _saved_by(trace: Trace) -> int:
    return sum(each.nbytes for each in trace.blocks)


def _most_other(trace: Trace) -> int:
    return max((moment.other_bytes for moment in trace.moments), default=0)


def auto_budget() -> int:
    """What this process holds and can still take, less a twentieth."""
    return held_and_spare(ProcessMeter().now(), spare_bytes())


def held_and_spare(held_bytes: int, spare_bytes: int) -> int:
    """The budget that ``"auto"`` means where so many bytes are held and so many more can be taken."""
    return (held_bytes + spare_bytes) * 19 // 20


def _with(plan: Plan, **changes: Any) -> Plan:
    return replace(plan, **changes)


leave_untraced(__name__)  # with what was imported by it
