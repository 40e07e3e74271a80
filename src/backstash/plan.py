"""Plans: what is done with each class of saved tensors within a budget, what that should cost, and did."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ._text import clean
from .errors import UsageError
from .units import format_bytes

__all__ = ["Plan", "PlannedClass", "StepFigures"]

_FORMAT = "backstash plan 1"


@dataclass(frozen=True, slots=True)
class StepFigures:
    """Memory and time of one training step."""

    peak_bytes: int
    """The most memory at any moment of the step: on the CPU the process's resident bytes."""
    step_seconds: float
    """From the first save of one step to the first save of the next."""


@dataclass(frozen=True, slots=True)
class PlannedClass:
    """The saves of one module, by size and by which save of that module it is."""

    name: str
    """``"blocks.*.mlp GeluBackward0 #0 4.00 MiB"``: the module, with ``*`` for a number; the operation that
    made the tensor; ``#0`` for the first of these that the module saves; the size of each."""
    blocks: int
    """How many of it a step saves."""
    nbytes: int
    """Their bytes together."""
    choices: tuple[tuple[str, int], ...]
    """What is done with them in the order of their saves: ``(("disk", 8), ("keep", 4))``."""
    seconds: float
    """What the plan expects these choices to add to the computing thread's time in a step, waits excepted."""
    reason: str
    """Why."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What a stash with a ``budget`` does, and what that was expected to cost beside what it did.

    >>> plan = Plan.load("plan.json")  # doctest: +SKIP
    """

    budget_bytes: int
    """The budget for the peak of the step."""
    state: str
    """``"measuring"``, ``"left alone"`` (everything fits in place), ``"planned"``, ``"too small"`` (no choice
    keeps the budget: everything that can move moves), or ``"loaded"``."""
    classes: tuple[PlannedClass, ...] = ()
    """The largest first."""
    predicted: StepFigures | None = None
    """By the simulation of the step; ``None`` while it is measured."""
    measured: StepFigures | None = None
    """The median of the steps under the plan so far; the peak is the largest of theirs."""
    bound: StepFigures | None = None
    """What no choice can be better than, by the figures that were measured: the budget, and a lower bound of
    the step's time within it."""
    plain: StepFigures | None = None
    """What the simulation gives for the step with everything in place."""
    smallest_budget_bytes: int | None = None
    """The smallest budget that some choice keeps."""
    inflight_bytes: int = 0
    """The window on the way down that the plan chose."""
    prefetch_bytes: int = 0
    """The window on the way up."""
    resident_bytes: int = 0
    """The most bytes of saved tensors in place."""

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {"format": _FORMAT, **asdict(self)}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to a file, for ``Stash(plan=path)``.

        Raises:
            OSError: the file cannot be written.
        """
        with open(path, "w", encoding="utf-8") as file:
            file.write(self.text())

    def text(self) -> str:
        """What :meth:`save` writes."""
        return json.dumps(self.as_dict(), indent=1) + "\n"

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """The plan that :meth:`save` wrote.

        Raises:
            UsageError: the file is no plan.
            OSError: it cannot be read.
        """
        with open(path, encoding="utf-8") as file:
            text = file.read()
        try:
            return cls.from_dict(json.loads(text))
        except ValueError:
            raise UsageError(_no_plan(path)) from None

    @classmethod
    def from_dict(cls, values: Any) -> Plan:
        """The plan that :meth:`as_dict` described.

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
            rest = {
                name: value
                for name, value in given.items()
                if name not in ("format", "classes", *figures)
            }
            return cls(classes=classes, **figures, **rest)
        except (KeyError, TypeError, ValueError) as error:
            if isinstance(error, UsageError):
                raise
            raise UsageError(_no_plan("this")) from error

    def __str__(self) -> str:
        lines = [f"plan within {format_bytes(self.budget_bytes)}: {_STATES[self.state]}"]
        if self.smallest_budget_bytes is not None and self.state == "too small":
            lines[0] += (
                f"; the smallest that can be kept is {format_bytes(self.smallest_budget_bytes)}"
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
        for each in self.classes:
            what = ", ".join(f"{name} {count}" for name, count in each.choices)
            lines.append(
                f"  {format_bytes(each.nbytes):>9}  {clean(each.name)}: {what}"
                f" (+{each.seconds:.3f} s; {each.reason})"
            )
        return "\n".join(lines)


_STATES = {
    "measuring": "the step is being measured, with everything moved that can",
    "left alone": "everything fits in place",
    "planned": "planned",
    "too small": "too small, everything moves that can",
    "loaded": "read from a file",
}


def _no_plan(path: object) -> str:
    return f"{path} is no plan; allowed: a file that Plan.save or `backstash plan` wrote"
