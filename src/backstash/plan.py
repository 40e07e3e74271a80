"""Plans: the choices for each class of saved tensors within a budget, with their predicted and measured
cost."""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ._plan.regions import LEFT, ONCE, Stays
from ._plan.solution import Solution
from ._plan.solve import left_alone, solve_with_cuts
from ._plan.table import REGION, held_blocks, left_blocks
from ._plan.trace import Trace, TracedRegion
from ._text import clean, html_table, show_text
from .errors import UsageError
from .units import format_bytes, parse_bytes

__all__ = [
    "Plan",
    "PlannedClass",
    "PlannedRegion",
    "StepFigures",
    "budget_for",
    "plan_of",
    "usable_bytes",
]

_FORMAT = "backstash plan 1"
_CHOICES = frozenset(("keep", "host", "disk", "recompute", "pack", LEFT, REGION))
_RUNS = frozenset((REGION, LEFT, ONCE))
_MOST = 10_000_000  # blocks of a class: no step has more
_TO_SPARE = 1 / 16  # of the smallest budget reported: the next run may hold more than this one
_MARGIN = 0.02  # of a budget, unused by plans: measurements vary by about as much


def usable_bytes(budget_bytes: int) -> int:
    """Return the part of a budget that plans use, in bytes."""
    return int(budget_bytes * (1 - _MARGIN))


def budget_for(peak_bytes: int) -> int:
    """Return the smallest budget of which plans use this many bytes."""
    return math.ceil(peak_bytes / (1 - _MARGIN)) + 1


@dataclass(frozen=True, slots=True)
class StepFigures:
    """Memory and time of one training step."""

    peak_bytes: int
    """The most memory at any moment of the step: on the CPU the process's resident bytes, on an accelerator the
    bytes that its tensors take."""
    step_seconds: float
    """Seconds from the first save of one step to the first save of the next."""


@dataclass(frozen=True, slots=True)
class PlannedClass:
    """The saves of one module that have the same operation, ordinal and size."""

    name: str
    """``"blocks.*.mlp GeluBackward0 #0 4.00 MiB"``: the module, with ``*`` for a number; the operation that
    made the tensor; ``#0`` for the first of these that the module saves; the size of each."""
    blocks: int
    """Number of such blocks that a step saves."""
    nbytes: int
    """Their total size in bytes."""
    choices: tuple[tuple[str, int], ...]
    """The choices in the order of their saves: ``(("disk", 8), ("keep", 4))``. ``"region"``: their module is
    recomputed; ``"left"``: a call that is not managed holds them (see :class:`PlannedRegion`)."""
    seconds: float
    """Seconds that these choices are predicted to add to the computing thread in a step, without waits."""
    reason: str
    """The reason for these choices."""


@dataclass(frozen=True, slots=True)
class PlannedRegion:
    """The forwards of similar modules that may be recomputed: named modules, or ones that backstash chose."""

    name: str
    """The module's path, with ``*`` for a number."""
    forwards: int
    """Number of such forwards in a step."""
    nbytes: int
    """Bytes of the blocks that recomputing discards. The classes count them, too."""
    choices: tuple[tuple[str, int], ...]
    """The choices in the order of the forwards: ``(("region", 8), ("once", 4))``. The classes say how the saved
    tensors of a forward that runs ``"once"`` are held. All those of one that is ``"left"`` stay in place, and
    none of them is a block."""
    seconds: float
    """Seconds that the replays are predicted to add to a step."""
    reason: str
    """The reason for these choices."""
    stays: tuple[tuple[int, ...], ...] = ()
    """For each forward, the numbers of the saves that are held, because something else saves the same
    tensor."""
    left_bytes: tuple[int, ...] = ()
    """For each forward, if it is left, the bytes of what it saved when it was measured; otherwise 0."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The choices of a stash with a ``budget``, with their predicted and measured cost.

    >>> plan = Plan.load("plan.json")  # doctest: +SKIP
    """

    budget_bytes: int
    """The budget for the peak of the step."""
    state: str
    """``"measuring"``, ``"left alone"`` (everything fits in place), ``"planned"``, ``"too small"`` (no choice
    keeps the budget: everything that can move moves), or ``"loaded"``."""
    classes: tuple[PlannedClass, ...] = ()
    """The classes of saved tensors, largest first."""
    predicted: StepFigures | None = None
    """Simulated figures of a step under the plan; ``None`` while steps are measured."""
    measured: StepFigures | None = None
    """The median time and the highest peak of the steps under the plan so far."""
    bound: StepFigures | None = None
    """Lower bounds: the budget, and a step time that no choice within it can beat, by the measured figures."""
    plain: StepFigures | None = None
    """Simulated figures of a step with everything in place."""
    smallest_budget_bytes: int | None = None
    """The smallest budget that some choice keeps, plus a sixteenth, because another run may hold a few per cent
    more than the measured one."""
    inflight_bytes: int = 0
    """Most bytes in flight to a lower tier, chosen by the plan."""
    prefetch_bytes: int = 0
    """Most bytes read back ahead of their use, chosen by the plan."""
    resident_bytes: int = 0
    """Most bytes of saved tensors in place."""
    device: str = "cpu"
    """The device of the budget: ``"cpu"``, for the process's resident memory, or an accelerator's name, for the
    memory of its tensors."""
    regions: tuple[PlannedRegion, ...] = ()
    """The modules whose calls may be recomputed."""
    left_after: int | None = None
    """The number of blocks of a step after which all stay in memory, unmanaged while there is space. Saving and
    using them costs nothing. ``None``: every block is managed."""

    trace: Trace | None = field(default=None, compare=False, repr=False)
    """The measured step, for :meth:`at`; :meth:`save` does not write it."""
    bias_bytes: int = field(default=0, compare=False, repr=False)
    """Bytes added to all simulated peaks, because a measured peak differed from the simulated one."""
    windows: tuple[int | None, int | None] = field(default=(None, None), compare=False, repr=False)
    """``inflight`` and ``prefetch`` in bytes, if the stash was given them, for :meth:`at`."""

    def at(self, budget: int | str) -> Plan:
        """Return the plan for another budget, from the same measured step. Nothing runs.

        Raises:
            UsageError: the plan was read from a file, which has no measured step.
            SizeError: the budget is not a size.
        """
        if self.trace is None:
            raise UsageError(
                "this plan has no measured step: use stash.plan after the stash has planned, or read a "
                "trace with Plan.from_trace"
            )
        plan = self.from_trace(
            self.trace.as_dict(), budget, bias_bytes=self.bias_bytes, windows=self.windows
        )
        return replace(plan, device=self.device, windows=self.windows)

    @classmethod
    def from_trace(
        cls,
        trace: Any,
        budget: int | str,
        *,
        bias_bytes: int = 0,
        windows: tuple[int | None, int | None] = (None, None),
    ) -> Plan:
        """Return the plan for a measured step of this or another machine.

        Args:
            trace: what ``plan.trace.as_dict()`` returned, or the path of a JSON file with it, which ``backstash
                plan --trace FILE`` writes.
            budget: the most bytes at any moment of the step.
            bias_bytes: added to all simulated peaks.
            windows: bytes of the windows to and from the lower tier; ``None``: chosen.

        Raises:
            UsageError: ``trace`` is not a measured step, or the file cannot be read.
            SizeError: the budget is not a size.
        """
        budget_bytes = parse_bytes(budget, name="budget")
        is_file = isinstance(trace, (str, os.PathLike))
        step = Trace.read(trace) if is_file else Trace.from_dict(trace)
        target = usable_bytes(budget_bytes) - bias_bytes
        solution = solve_with_cuts(step, target, windows=windows)
        plan = plan_of(budget_bytes, step, solution, bias_bytes)
        # Only the host of an accelerator runs ahead of the device.
        return replace(plan, device="accelerator") if step.runs_ahead else plan

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        values = asdict(replace(self, trace=None))
        del values["trace"], values["bias_bytes"], values["windows"]
        return {"format": _FORMAT, **values}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to a file, for ``Stash(plan=path)``.

        Raises:
            OSError: the file cannot be written.
            UsageError: there is no plan yet: steps are being measured.
        """
        if self.state == "measuring":
            raise UsageError(
                "the plan is not ready: the first three steps are measured; allowed: to save it after "
                "them"
            )
        with open(path, "w", encoding="utf-8") as file:
            file.write(self.text())

    def text(self) -> str:
        """Return the text that :meth:`save` writes."""
        return json.dumps(self.as_dict(), indent=1) + "\n"

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Return the plan in a file that :meth:`save` wrote.

        Raises:
            UsageError: the file is not a plan, or cannot be read.
        """
        try:
            with open(path, encoding="utf-8") as file:
                return cls.from_dict(json.load(file))
        except OSError as error:
            raise UsageError(f"{_no_plan(path)} ({error.strerror})") from error
        except ValueError:  # also bytes that are no text
            raise UsageError(_no_plan(path)) from None

    @classmethod
    def from_dict(cls, values: Any) -> Plan:
        """Return the plan that :meth:`as_dict` described.

        Raises:
            UsageError: the values are not those of a plan.
        """
        try:
            given: Mapping[str, Any] = dict(values)
            if given.get("format") != _FORMAT:
                raise UsageError(_no_plan("this"))
            figures: dict[str, Any] = {
                name: StepFigures(**given[name]) if given[name] is not None else None
                for name in ("predicted", "measured", "bound", "plain")
            }
            classes = tuple(
                PlannedClass(
                    **{**each, "choices": tuple((name, int(n)) for name, n in each["choices"])}
                )
                for each in given["classes"]
            )
            regions = tuple(
                PlannedRegion(
                    **{
                        **each,
                        "choices": tuple((name, int(n)) for name, n in each["choices"]),
                        "stays": tuple(tuple(map(int, numbers)) for numbers in each["stays"]),
                        "left_bytes": tuple(map(int, each.get("left_bytes", ()))),
                    }
                )
                for each in given.get("regions", ())
            )
            rest = {
                name: value
                for name, value in given.items()
                if name not in ("format", "classes", "regions", *figures)
            }
            numbers = [
                value
                for name, value in rest.items()
                if name in _NUMBERS and not (value is None and name in _OPTIONAL)
            ]
            if rest["state"] not in _STATES or any(type(n) is not int or n < 0 for n in numbers):
                raise UsageError(_no_plan("this"))
            plan = cls(classes=classes, regions=regions, **figures, **rest)
            plan._check()
            return plan
        except (KeyError, TypeError, ValueError) as error:
            if isinstance(error, UsageError):
                raise
            raise UsageError(_no_plan("this")) from error

    def _check(self) -> None:
        """Raise ``ValueError`` if no plan can have these values, for example one that was read from a file."""
        if type(self.budget_bytes) is not int or self.budget_bytes <= 0:
            raise ValueError("the budget is not a positive number of bytes")
        held: list[PlannedClass | PlannedRegion] = [*self.classes, *self.regions]
        figures = [self.predicted, self.measured, self.bound, self.plain]
        numbers: list[Any] = [each.seconds for each in held] + [each.nbytes for each in held]
        for known in filter(None, figures):
            numbers += [known.peak_bytes, known.step_seconds]
        if any(type(each) not in (int, float) or not 0 <= each < math.inf for each in numbers):
            raise ValueError("a time or a size is not a number, or negative")
        if type(self.device) is not str:
            raise ValueError("the device is not text")
        if any(type(each.name) is not str or type(each.reason) is not str for each in held):
            raise ValueError("a name or a reason is not text")
        for each in self.classes:
            _check_choices(each.choices, each.blocks, _CHOICES)
        for region in self.regions:
            _check_choices(region.choices, region.forwards, _RUNS)

    def __str__(self) -> str:
        of = "" if self.device == "cpu" else f" of {self.device}"
        lines = [f"plan within {format_bytes(self.budget_bytes)}{of}: {_STATES[self.state]}"]
        if self.smallest_budget_bytes is not None and self.state == "too small":
            lines[0] += (
                "; the smallest that can be kept is, by an estimate, "
                f"{format_bytes(self.smallest_budget_bytes)}"
            )
        for name in ("predicted", "measured"):
            figures: StepFigures | None = getattr(self, name)
            if figures is not None:
                lines.append(
                    f"  {name:<10} peak {format_bytes(figures.peak_bytes):>9}, step "
                    f"{figures.step_seconds:.3f} s"
                )
        if self.bound is not None:
            lines.append(f"  {'bound':<10} {'':>14}  step {self.bound.step_seconds:.3f} s at least")
        for region in self.regions:
            runs = ", ".join(f"{_WAYS[name]} {count}" for name, count in region.choices)
            lines.append(
                f"  {format_bytes(region.nbytes):>9}  {clean(region.name)}, as a whole: {runs}"
                f" (+{_took(region.seconds)}; {region.reason})"
            )
        for each in self.classes:
            what = ", ".join(f"{name} {count}" for name, count in each.choices)
            lines.append(
                f"  {format_bytes(each.nbytes):>9}  {clean(each.name)}: {what}"
                f" (+{_took(each.seconds)}; {each.reason})"
            )
        return "\n".join(lines)

    _repr_pretty_ = show_text

    def _repr_html_(self) -> str:
        title, *lines = str(self).splitlines()
        rows = [
            (name, format_bytes(figures.peak_bytes), f"{figures.step_seconds:.3f} s")
            for name in ("plain", "predicted", "measured", "bound")
            if (figures := getattr(self, name)) is not None
        ]
        listed = len(self.classes) + len(self.regions)
        classes = [each.strip() for each in lines[-listed:]] if listed else []
        return html_table(title, ("", "peak", "step"), rows, classes)


_WAYS = {REGION: "recomputed", ONCE: "held", LEFT: "left"}
_STATES = {
    "measuring": "the step is being measured, with everything moved that can",
    "left alone": "everything fits in place",
    "planned": "planned",
    "too small": "too small, everything that can is moved, recomputed or packed",
    "loaded": "read from a file",
}


_NUMBERS = (
    "budget_bytes",
    "smallest_budget_bytes",
    "inflight_bytes",
    "prefetch_bytes",
    "resident_bytes",
    "left_after",
)
_OPTIONAL = ("smallest_budget_bytes", "left_after")


def _took(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 0.9995 else f"{seconds * 1e3:.3g} ms"


def _no_plan(path: object) -> str:
    return (
        f"{path} is not a plan; allowed: a file that Plan.save or `backstash run --save-plan` wrote"
    )


def plan_of(
    budget_bytes: int,
    trace: Trace,
    solution: Solution,
    bias_bytes: int,
    stays: Stays | None = None,
) -> Plan:
    """Return the record of a solution; ``bias_bytes`` are added to each simulated peak.

    ``stays``: see :attr:`PlannedRegion.stays`.
    """
    kept = all(name == "keep" for name in solution.choices)
    left = set() if kept else left_blocks(trace, solution.choices)
    choices = [LEFT if at in left else name for at, name in enumerate(solution.choices)]
    left_after = solution.left_after
    if left_after is not None:  # these will not be blocks
        left_after -= sum(name in (REGION, LEFT) for name in choices[:left_after])
    state = "too small" if not solution.fits else "left alone" if kept else "planned"
    by_group: dict[str, list[int]] = {}
    for index, block in enumerate(trace.blocks):
        by_group.setdefault(block.group, []).append(index)
    classes = []
    for name, indices in by_group.items():
        runs: list[tuple[str, int]] = []
        seconds = 0.0
        for index in indices:
            choice = choices[index]
            is_left = solution.left_after is not None and index >= solution.left_after
            if choice not in (REGION, LEFT) and not is_left:
                option = trace.blocks[index].options[choice]
                seconds += option.save_seconds + option.use_seconds
            if runs and runs[-1][0] == choice:
                runs[-1] = choice, runs[-1][1] + 1
            else:
                runs.append((choice, 1))
        nbytes = sum(trace.blocks[index].nbytes for index in indices)
        classes.append(
            PlannedClass(name, len(indices), nbytes, tuple(runs), seconds, _reason(runs, state))
        )
    classes.sort(key=lambda each: -each.nbytes)
    forecast = solution.forecast
    plain = left_alone(trace).forecast
    return Plan(
        budget_bytes,
        state,
        tuple(classes),
        StepFigures(solution.predicted_bytes(bias_bytes), forecast.step_seconds),
        None,
        StepFigures(budget_bytes, solution.bound_seconds) if solution.fits else None,
        StepFigures(plain.peak_bytes + bias_bytes, plain.step_seconds),
        budget_for(int((forecast.peak_bytes + bias_bytes) * (1 + _TO_SPARE)))
        if not solution.fits
        else None,
        *solution.windows,
        forecast.resident_peak_bytes,
        regions=_planned_regions(trace.cut_at(solution.levels), choices, stays or {}),
        left_after=left_after,
        trace=trace,
        bias_bytes=bias_bytes,
    )


def _planned_regions(
    trace: Trace, choices: Sequence[str], stays: Stays
) -> tuple[PlannedRegion, ...]:
    by_name: dict[str, dict[int, TracedRegion]] = {}
    for each in trace.regions:
        by_name.setdefault(each.name, {})[each.index] = each
    planned = []
    for name, of in by_name.items():
        firsts = {at: choices[each.members[0]] for at, each in of.items()}
        flags = [firsts.get(at, ONCE) for at in range(max(of) + 1)]
        flags = [each if each in _RUNS else ONCE for each in flags]
        again = {at for at, each in enumerate(flags) if each == REGION}
        free = sum(trace.blocks[block].nbytes for at in again for block in of[at].members)
        planned.append(
            PlannedRegion(
                name,
                len(flags),
                free,
                tuple((flag, len([*run])) for flag, run in itertools.groupby(flags)),
                sum(of[at].save_seconds + of[at].use_seconds for at in again),
                "cheaper than other ways to free memory"
                if again
                else "keeping what it saves costs less",
                tuple(
                    tuple(
                        sorted({*stays.get((name, at), ()), *(of[at].stays if at in again else ())})
                    )
                    for at in range(len(flags))
                ),
                tuple(
                    _left_bytes(trace, of[at], choices) if flag in (LEFT, REGION) else 0
                    for at, flag in enumerate(flags)
                ),
            )
        )
    return tuple(sorted(planned, key=lambda each: -each.nbytes))


def _left_bytes(trace: Trace, call: TracedRegion, choices: Sequence[str]) -> int:
    """Return the bytes of all that a call holds unmanaged, also of what was saved before it; 0: it is managed.

    ``choices`` are those with :data:`LEFT`.
    """
    held = held_blocks(call, choices)
    if any(choices[each] != LEFT for each in held):
        return 0
    before = *call.inputs, *call.others
    if any(choices[each] not in ("keep", LEFT) for each in before):
        return 0  # the call saves these, too, and would hold memory that has moved
    return sum(trace.blocks[each].nbytes for each in {*held, *before}) + call.small_bytes


def _check_choices(runs: Sequence[tuple[str, int]], whole: int, names: Collection[str]) -> None:
    if type(whole) is not int or not 0 < whole <= _MOST:
        raise ValueError("the number of blocks or forwards is not valid")
    if any(name not in names or n < 1 for name, n in runs) or sum(n for _, n in runs) != whole:
        raise ValueError(
            "a choice is unknown, or the choices do not add up to all blocks or forwards"
        )


def _reason(runs: Sequence[tuple[str, int]], state: str) -> str:
    if state == "left alone":
        return "everything fits"
    names = {name for name, _ in runs}
    if names == {"keep"}:
        return "freeing a byte of it would take more time than elsewhere"
    if "keep" in names:
        return "as many as fit are kept"
    return "cheapest at the plan's price for a byte of memory"
