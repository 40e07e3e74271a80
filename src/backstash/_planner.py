"""The planner of one stash: measures steps, has them planned, and says of each block what is done with it.

Step 1 moves everything, so that it fits; step 2 does so again, without what only a first step takes, and tries
on every block whether it can be recomputed or packed, and how long that takes; step 3 moves every other block,
which tells what moving costs beside waiting. Where there is no tier below, what can be recomputed is, instead.
Then a plan is made, in a thread, and followed from the next step on. Its first steps are measured, too: where
the peak is not what was predicted, the plan is made again with the difference added. After three steps that
take more than a tenth longer or shorter than predicted, a step is measured again.

Steps may have other shapes. A plan is for the largest step so far: of a smaller one that it does not know, the
oldest blocks go, with as much other memory taken for granted. A larger one moves everything, is measured, and
planned for. By its first block it is known for one.
"""

from __future__ import annotations

import functools
import re
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from ._device.base import Device
from ._plan.meter import Meter, ProcessMeter, Sample
from ._plan.recorder import StepRecord, interference, links_of, trace_of, typical
from ._plan.regions import AGAIN, ONCE, TRACED, Forward, Regions, name_of
from ._plan.simulate import Windows, simulate
from ._plan.solve import Solution, smallest_budget, solve
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

_ORDINALS = 64  # saves of one module that are told apart
_GUARD_BYTES = 1 << 20  # saved between two looks at the process's memory
_LEAST_WINDOW_BYTES = 16 << 20
_GIVEN_BACK_BYTES = 64 << 20
_VALIDATED_STEPS = 3
_MARGIN = 50  # the part of a budget that it may be exceeded by and nothing is said
_TOLD_AT = 3  # steps that exceeded it: planning again with what was measured did not help
_OFF = 0.10
_ALIKE = 0.02  # how much two steps of one shape may differ in what they save
_MOST_FOLLOWED = 12  # steps that are measured under a plan, where few of them are of its shape
_CORRECTIONS = 3
_RELEASE_REST = 20  # times as long as giving memory back took, it is not done again
_NUMBER = re.compile(r"\d+")


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
        self._let_go = let_go
        self._tier = tier
        self._given_windows = windows
        self._holding: list[DeviceTiers] = []  # the device's, from the first step on
        self._meter = meter(functools.partial(_held_by, self._holding))
        self._device = device
        self._device_name = device.name if device is not None else "cpu"
        # An accelerator's allocator takes its time to answer.
        self._guard_bytes = max(_GUARD_BYTES, (budget or 0) >> 9 if device is not None else 0)
        self.regions = Regions() if tier is not None else None
        """Of the modules that may run again; ``None``: they do whatever the plan is."""
        self._recording = False
        self._records: list[StepRecord] = []
        self._steps = 0
        self._groups: dict[int, str] = {}
        self._offers: dict[int, dict[str, Option]] = {}
        self._ordinals: Counter[tuple[str, str]] = Counter()
        self._instances: Counter[str] = Counter()
        self._names: dict[tuple[str, str], str] = {}
        self._choices: dict[str, list[str]] | None = None
        self._partly: set[str] = set()  # classes of which regions that run again let go
        self._mode = "all"
        self._admitted = 0
        self._unlooked_bytes = 0
        self._resident_limit: int | None = None
        self._unplanned_limit = 0  # the same in a step that saves what the plan does not know
        self._windows = self._planned_windows = (0, 0)
        self._windows_before = (0, 0)  # of the device, before the first step
        self._followed_steps = 0
        self._matched = 0
        self._saved_bytes = 0  # in this step, so far
        self._known_first_bytes = self._known_bytes = (
            0  # of the step that was planned for: its first block, all
        )
        self._let_go_bytes = 0  # of these, by regions that run again
        self._most_saved_bytes = sys.maxsize  # beyond it a step is larger than that one
        self._most_other_bytes = 0  # that a step which was planned for held beside
        self._is_larger = False  # this step is larger than any that was planned for
        self._expects_larger = (
            False  # the last one was, which was not known from its first block on
        )
        self._bytes_at_start = 0  # of memory, when the step began that was planned for
        self._links, self._interference = Links(0.0, 0.0), 0.0
        self._solving: threading.Thread | None = None
        self._solved: tuple[Trace, Solution, int] | None = None
        self._off_steps = self._replans = 0
        self._wait_steps = 0
        self._bias_bytes = 0
        self._least_bias_bytes: int | None = None  # with less the budget was exceeded
        self._release_after = 0.0
        self._freed_bytes = 0  # since memory was given back in backward
        self._highest_bytes = 0  # that was seen in this step
        self._exceeding = 0  # steps under a plan that exceeded the budget
        self._line = 0  # beyond it less is kept; it follows what the process holds
        self._most_at_start = 0  # beyond it a step would exceed the budget; what is free counts
        self._measured: list[StepFigures] = []
        self.notes: dict[str, None] = {}
        if loaded is not None:
            self._budget = loaded.budget_bytes
            self._plan = _with(loaded, state="loaded")
            self._follow(loaded)
        else:
            assert budget is not None
            self._budget = budget
            self._plan = Plan(budget, "measuring", device=self._device_name)
        self._most_at_start = self._budget

    @property
    def plan(self) -> Plan:
        """What is known now. Waits for a plan that is being made."""
        solving = self._solving
        if solving is not None:
            solving.join()
        return self._plan

    @property
    def trace(self) -> Trace | None:
        """What the plan was made from."""
        return self._solved[0] if self._solved is not None else None

    @property
    def matches_nothing(self) -> bool:
        """Of a loaded plan, after a step: whether nothing that was saved is of its classes."""
        return self._plan.state == "loaded" and self._steps != 1 and not self._matched

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
        self._solving = None
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
        self._line = usable_bytes(self._budget)
        tiers.prefetcher.has_room = tiers.packer.has_room = self._has_room
        if self._recording or self._held() > self._most_at_start:
            self._let_go()
        seconds = self._meter.begin_step()
        self._highest_bytes = max(self._highest_bytes, self._meter.known_peak_bytes)
        record = self._end_record() if self._recording else None
        first = self._steps == 0
        was_larger, self._is_larger = self._is_larger, False
        saved_bytes, self._saved_bytes = self._saved_bytes, 0
        self._steps += 1
        self._ordinals.clear()
        self._instances.clear()
        if self.regions is not None:
            self.regions.begin_step()
        self._groups, self._offers = {}, {}
        if self._plan.state == "loaded":
            if first:
                self._apply_loaded()
        elif self._choices is None:
            self._measure(record)
        elif not first:
            highest_bytes, self._highest_bytes = self._highest_bytes, 0
            self._count_exceeding(highest_bytes)
            if was_larger:
                self._plan_for_larger(record)
            else:
                is_alike = abs(saved_bytes - self._known_bytes) <= _ALIKE * self._known_bytes
                self._watch(record, StepFigures(highest_bytes, seconds), is_alike=is_alike)
        if self._recording:
            self._groups, self._offers = {}, {}

    def _measure(self, record: StepRecord | None) -> None:
        if record is not None:
            self._records.append(record)
        made = len(self._records)
        if made == 0:
            self._set_windows(self._first_windows())
            self._start()
        elif made == 1:
            self._look_at_first()
        elif made == 2:
            self._mode = "half"
            second = self._traced(self._records[1], links_of(self._records))
            if self._tier is None:
                self._look_whether_it_fits(second)
            limit = max(0, self._target() - _most_other(second) - sum(self._windows))
            if self._budget < self._records[0].samples[0][1]:
                # No step could be within it, as `backstash plan` wants it: what moving costs is to be learnt.
                limit = self._spare_bytes() // 2
                self._line = self._records[1].peak_bytes + limit
            self._set_limit(limit)
        elif self._solving is None and self._solved is None:
            self._stop()
            self._mode = "all"
            full, part = self._records[1], self._records[2]
            self._links, self._interference = links_of(self._records[1:]), interference(full, part)
            trace, other = map(self._trace_of, (full, part))
            # Steps that differ in what else they hold will do so again.
            self._solve(trace, abs(_most_other(trace) - _most_other(other)))
        if self._solved is not None:
            self._adopt()

    def _trace_of(self, record: StepRecord) -> Trace:
        return self._traced(record, self._links, self._interference)

    def _traced(self, record: StepRecord, links: Links, seconds_per_byte: float = 0.0) -> Trace:
        tier = self._tier or "disk"
        runs_ahead = self._device is not None
        trace = trace_of(record, links, seconds_per_byte, tier, runs_ahead=runs_ahead)
        below = self._tiers.tier
        capacity = below.capacity_bytes if below is not None else None
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
        if not self._expects_larger:
            self._groups, self._offers = {}, {}
            self._start()
        self._set_windows(self._first_windows())
        self._lower_limit(0)

    def _plan_for_larger(self, record: StepRecord | None) -> None:
        """A step has ended that was larger than those that were planned for."""
        self._stop()
        self._set_limit(self._resident_limit)
        self._set_windows(self._planned_windows)
        if record is None or self._expects_larger or self._solving is not None:
            return
        if not self._links.down_rate:  # the very first step fitted, and none was measured after it
            self._links = links_of([record])
        trace = self._trace_of(record)
        if self._solved is not None and self._choices_are_old():
            if _saved_by(self._solved[0]) >= _saved_by(trace):
                self._adopt()
                return
        elif _saved_by(trace) <= self._known_bytes + self._let_go_bytes and (
            self.regions is None or self.regions.can_be_followed(trace.regions)
        ):
            return
        self._solve(trace)

    def _look_at_first(self) -> None:
        """After the first step the memory is known, if not the time."""
        first = self._records[0]
        first_trace = self._traced(first, links_of(self._records))
        # The optimizer's state is there from the second step on only.
        grown = max(0, _other(self._meter.mark()) - _other(first.samples[0]))
        trace = first_trace.raised(grown)
        keep = [block.options["keep"] for block in trace.blocks]
        plain = simulate(trace, keep, Windows(0, 0))
        target = self._target()
        if plain.peak_bytes <= target:
            self._stop()
            solution = Solution(
                ("keep",) * len(keep), Windows(0, 0), plain, plain.step_seconds, fits=True
            )
            self._solved = trace, solution, plain.peak_bytes
            return
        self._set_limit(max(0, target - _most_other(trace)))
        if self._tier is not None:
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
        if self._solved is not None and self._solving is None and self._choices_are_old():
            self._adopt()
            return
        self._set_limit(self._resident_limit)  # the guard may have lowered it
        predicted = self._plan.predicted
        if record is not None:
            self._followed_steps += 1
            if self._followed_steps > 1 and is_alike:  # the first still holds what was moved before
                self._measured.append(StepFigures(record.peak_bytes, record.seconds))
            is_enough = len(self._measured) >= _VALIDATED_STEPS
            if is_enough or self._followed_steps >= _MOST_FOLLOWED:
                self._stop()
                if self._measured:
                    self._tell_measured()
                    self._correct()
            return
        if predicted is None:
            return
        if found.peak_bytes > self._budget:
            self._measured.append(found)
            self._tell_measured()
            self._correct()
            return
        if self._plan.state == "left alone" or not is_alike:
            return  # nothing is faster; or nothing was predicted
        off = abs(found.step_seconds - predicted.step_seconds) > _OFF * predicted.step_seconds
        self._off_steps = self._off_steps + 1 if off else 0
        self._wait_steps -= 1
        if self._off_steps >= 3 and self._wait_steps <= 0:
            self._remeasure()

    def _correct(self) -> None:
        """Where the peak was not what was predicted, plan again with the difference added to all memory."""
        predicted = self._plan.predicted
        if self._solved is None:
            return  # another plan is being made
        assert predicted is not None
        peak = max(each.peak_bytes for each in self._measured)
        off = peak - predicted.peak_bytes
        # What was over is taken off whole, and never given back; what was spared is given back by half.
        bias_bytes = self._bias_bytes + (off if off > 0 else off // 2)
        if self._least_bias_bytes is not None:
            bias_bytes = max(bias_bytes, self._least_bias_bytes)
        if peak > self._budget:
            self._least_bias_bytes = bias_bytes
        elif self._replans >= _CORRECTIONS or abs(off) <= _OFF / 2 * predicted.peak_bytes:
            return
        if bias_bytes != self._bias_bytes:
            # The same trace: under a plan, memory that an allocator keeps when tensors die would count as
            # other memory, although the plan's tensors are what it is for.
            self._replans += 1
            self._bias_bytes = bias_bytes
            self._solve(self._solved[0])

    def _remeasure(self) -> None:
        self._off_steps = 0
        self._replans += 1
        self._wait_steps = 3 * 2 ** min(self._replans, 16)
        self._measured.clear()
        self._followed_steps = 0
        self._start()

    # Per block.

    def count(self, block: Block) -> None:
        """A block is being admitted, by the plan or by a policy: see whether the step is larger than any that
        was planned for."""
        if not self._saved_bytes:
            if self._adopted is not None and (
                block.nbytes > self._known_first_bytes or self._expects_larger
            ):
                self._meet_larger(block.nbytes, self._known_first_bytes)
        elif not self._is_larger and self._saved_bytes > self._most_saved_bytes:
            self._meet_larger(self._saved_bytes, self._known_bytes)
        self._saved_bytes += block.nbytes
        if self._recording:
            self._groups[block.cleanup.serial] = ""

    def choose(self, block: Block, tensor: Tensor) -> str:
        """The tier that a block goes to at once; ``""``: it stays, as far as the limit allows."""
        self._unlooked_bytes -= block.nbytes
        if self._unlooked_bytes < 0:
            self._unlooked_bytes = self._guard_bytes
            self._guard()
        if self._plan.state == "left alone" and not (
            self._recording or self._is_larger or self._recomputes_unknown
        ):
            return "recompute" if self._must_recompute(block) else ""
        made_by = tensor.grad_fn
        operation = made_by.name() if made_by is not None else "no operation"
        where = block.cleanup.module, operation
        name = self._choose(where, block.nbytes, block.cleanup.serial)
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
        return self._is_larger or (self._choices is None and len(self._records) == 1)

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
            self._guard()
        return "" if again else self.instead

    # Per forward of a module that may run again.

    def begin_forward(self, path: str) -> tuple[str, int]:
        """One begins, of the module at ``path``: its name, and the how many-th of that name it is."""
        assert self.regions is not None
        name = name_of(path)
        index = self.regions.begin(name)
        if self.regions.is_repeated(path):
            # What each forward of a module saves is told apart from its own beginning on.
            for where in [each for each in self._ordinals if f"{each[0]}.".startswith(f"{path}.")]:
                del self._ordinals[where]
        return name, index

    def way_of(self, name: str, index: int) -> str:
        """What is done with it, once it is known what it is given."""
        assert self.regions is not None
        if self._is_larger or self._choices is None:
            self.regions.meet(name)
            return TRACED if self._recording else ONCE
        if self._plan.state == "left alone":
            return ONCE
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
        if self._budget < self._records[0].samples[0][1]:  # no step could be within it
            return nbytes < self._spare_bytes() // 2
        return self._has_room(nbytes)

    def saved_again(self, block: Block) -> None:
        """A block that is held was saved once more."""
        if self._recording and self.regions is not None:
            self.regions.saved_again(block.cleanup.serial)

    def _choose(
        self,
        where: tuple[str, str],
        nbytes: int,
        serial: int,
    ) -> str:
        name = self._names.get(where)
        if name is None:
            name = self._names[where] = f"{_NUMBER.sub('*', where[0])} {where[1]}".lstrip()
        ordinal = self._ordinals[where]
        self._ordinals[where] = min(ordinal + 1, _ORDINALS)
        group = f"{name} #{ordinal} {format_bytes(nbytes)}"
        if self._recording:
            self._groups[serial] = group
        self._admitted += 1
        if self._is_larger:
            return "all"
        if self._choices is None:
            return "all" if self._mode == "all" or self._admitted % 2 else "keep"
        instance = self._instances[group]
        self._instances[group] = instance + 1
        choices = self._choices.get(group)
        if choices is None:
            if self._recomputes_unknown:
                return "recompute"
            # Nothing is known of when it is needed: the oldest go, with both windows taken to be full.
            self._lower_limit(self._unplanned_limit)
            return "keep"
        self._matched += 1
        if instance < len(choices):
            return choices[instance]
        # A region that was to run again and does not: what it saves moves.
        return self.instead if group in self._partly else choices[0]

    def _guard(self) -> None:
        """Where the process comes near the budget, keep less for the rest of the step.

        Once for each byte more: memory that was freed may stay the process's, and is used again.
        """
        over = self._held() - self._line
        if over > 0 and self._release():
            over = self._held() - self._line
        if over > 0:
            self._line += over
            self._lower_limit(max(0, self._tiers.evictor.resident.nbytes - over))

    def _has_room(self, nbytes: int) -> bool:
        """Whether there may be so many bytes more within the budget, once free memory was given back."""
        most = usable_bytes(self._budget)
        if self._held() + nbytes <= most:
            return True
        return self._release() and self._held() + nbytes <= most

    def _held(self) -> int:
        """What the process holds now."""
        held = self._meter.now()
        self._highest_bytes = max(self._highest_bytes, held)
        return held

    def _spare_bytes(self) -> int:
        """What can still be taken."""
        return spare_bytes() if self._device is None else self._device.free_bytes()

    def _release(self) -> bool:
        """Give back what is free, but where that took more than a twentieth of the time; whether it did."""
        now = time.perf_counter()
        if now < self._release_after:
            return False
        self._let_go()
        ended = time.perf_counter()
        self._release_after = ended + _RELEASE_REST * (ended - now)
        return True

    def _lower_limit(self, limit: int) -> None:
        """For the rest of the step."""
        resident = self._tiers.evictor.resident
        if resident.limit is None or limit < resident.limit:
            resident.set_limit(limit)

    # Making a plan, and following it.

    def _allowed(self) -> list[str]:
        below = [self._tier, REGION] if self._tier is not None else []
        return ["keep", "recompute", "pack", *below]

    def _target(self) -> int:
        return usable_bytes(self._budget) - self._bias_bytes

    def _solve(self, trace: Trace, spare_bytes: int = 0) -> None:
        """Have a plan made that leaves ``spare_bytes`` of the target, if there is one that does."""
        target, allowed, windows = self._target(), self._allowed(), self._given_windows
        self._solved = None

        def work() -> None:
            try:
                planned_for = trace.raised(spare_bytes)
                solution = solve(planned_for, target, allowed=allowed, windows=windows)
                if not solution.fits and spare_bytes:
                    planned_for = trace
                    solution = solve(trace, target, allowed=allowed, windows=windows)
                smallest = solution.forecast.peak_bytes
                if not solution.fits:
                    smallest = smallest_budget(trace, allowed=allowed, windows=windows)
                self._solved = planned_for, solution, smallest
            except Exception as error:  # the step is worth more than the plan
                self.notes[f"no plan could be made ({error!r}): everything that can move moves"] = (
                    None
                )
            finally:
                self._solving = None

        self._solving = threading.Thread(target=work, name="backstash plan", daemon=True)
        self._solving.start()

    def _choices_are_old(self) -> bool:
        return self._adopted is not self._solved

    _adopted: Any = None

    def _adopt(self) -> None:
        assert self._solved is not None
        trace, solution, smallest = self._adopted = self._solved
        stays = self.regions.all_stays if self.regions is not None else {}
        plan = plan_of(self._budget, trace, solution, smallest, self._bias_bytes, stays)
        self._plan = _with(plan, device=self._device_name)
        at_start = trace.moments[0].other_bytes if trace.moments else 0
        self._most_at_start = self._budget - (solution.forecast.peak_bytes - at_start)
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
        if self._plan.state == "left alone":
            self._let_go()  # what moving needed
        self._follow(self._plan)
        self._planned_windows = solution.windows.inflight_bytes, solution.windows.prefetch_bytes
        self._set_windows(self._planned_windows)
        slack = max(0, self._budget - self._bias_bytes - solution.forecast.peak_bytes)
        self._resident_limit = solution.forecast.resident_peak_bytes + slack
        self._set_limit(self._resident_limit)
        windows = sum(self._windows)
        self._unplanned_limit = max(0, self._target() - self._most_other_bytes - windows)
        self._measured.clear()
        self._followed_steps = 0
        self._start()

    def _apply_loaded(self) -> None:
        plan = self._plan
        self._set_windows((plan.inflight_bytes, plan.prefetch_bytes))
        self._resident_limit = self._unplanned_limit = plan.resident_bytes
        self._set_limit(plan.resident_bytes)

    def _follow(self, plan: Plan) -> None:
        """Those of a class that are let go by regions are not chosen for."""
        self._choices = {
            each.name: [name for name, n in each.choices for _ in range(n) if name != REGION]
            for each in plan.classes
        }
        self._partly = {
            each.name for each in plan.classes if any(name == REGION for name, _ in each.choices)
        }
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
            self._let_go()
            self._meter.resume(paused)

    def _stop(self) -> None:
        if self._recording:
            self._recording = False
            self._event_log.stop(self._hear)
        self._meter.stop()

    def _end_record(self) -> StepRecord:
        regions = self.regions
        return StepRecord(
            self._meter.take(),
            self._groups,
            self._offers,
            regions.take() if regions is not None else [],
            regions.all_stays if regions is not None else {},
        )

    def _tell_measured(self) -> None:
        seconds = typical([each.step_seconds for each in self._measured])
        peak = max(each.peak_bytes for each in self._measured)
        self._plan = _with(self._plan, measured=StepFigures(peak, seconds))

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
