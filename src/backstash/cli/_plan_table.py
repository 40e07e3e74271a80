"""Print and write the results of ``backstash plan``: a line for each budget."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from ..plan import Plan, budget_for
from ..units import format_bytes
from ._machine import machine, versions
from ._plan_page import moved_by_choice
from ._say import say, write

__all__ = ["budgets_of", "notes_of", "plan_for_trace", "show", "table"]

_SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)  # between the smallest budget and everything in place
_UNIT_BYTES = 16 << 20  # budgets that the user did not give are multiples of this
_WIDTH = 10
_TIMES = {"step": 9, "bound": 9}  # the columns that a fake run lacks, and their widths


def plan_for_trace(options: Mapping[str, Any]) -> None:
    """Plan for the measured step in a file, and print the table.

    Args:
        options: those of ``backstash plan``; ``trace`` is a file that ``backstash plan --trace`` wrote.

    Raises:
        UsageError: the file cannot be read, or is not a trace of a step.
    """
    path = options["trace"]
    command = shlex.join(["backstash", "plan", "--trace", path])
    least = Plan.from_trace(path, 1)
    plans = [Plan.from_trace(path, budget) for budget in options["budget"] or budgets_of(least)]
    show(options, command, plans, notes_of(plans[0], least))
    say(f"backstash plan: of the step in {path}; no script was given, and nothing was run")


def show(
    options: Mapping[str, Any],
    command: str,
    plans: Sequence[Plan],
    notes: Sequence[str],
    asked: Mapping[str, int] | None = None,
) -> None:
    """Print the table and the notes, and write the plans to the file of ``--json``.

    Args:
        options: those of ``backstash plan``.
        command: the whole command line.
        plans: one for each budget.
        notes: lines below the table.
        asked: where a fake run was asked for values, and how often; ``None`` for measured steps, which have
            times.
    """
    print("\n".join([command, *table(plans, has_times=asked is None), *notes]))
    if options["json"] is not None:
        values = {
            "command": command,
            "plans": [plan.as_dict() for plan in plans],
            **({} if asked is None else {"asked": asked}),
            "versions": versions(),
            "machine": machine().as_dict(),
        }
        write("backstash plan: --json", options["json"], values)


def budgets_of(plan: Plan) -> list[int]:
    """Return round budgets from the smallest that can be kept to the one for everything in place."""
    least = plan.smallest_budget_bytes or plan.budget_bytes
    most = budget_for(plan.plain.peak_bytes) if plan.plain is not None else least
    least = min(least, most)
    wanted = (1.01 * (least + share * (most - least)) for share in _SHARES)
    return list(dict.fromkeys(-(-int(each) // _UNIT_BYTES) * _UNIT_BYTES for each in wanted))


def table(plans: Sequence[Plan], *, has_times: bool = True) -> list[str]:
    """Return a line for each budget, and the head."""
    rows = [(_cells(plan), _note(plan)) for plan in plans if plan.predicted is not None]
    head = {name: name for cells, _ in rows for name in cells}
    return [
        " ".join(
            cell.rjust(_TIMES.get(name, _WIDTH))
            for name, cell in cells.items()
            if has_times or name not in _TIMES
        )
        + note
        for cells, note in [(head, ""), *rows]
    ]


def _cells(plan: Plan) -> dict[str, str]:
    assert plan.predicted is not None
    sums = moved_by_choice(plan.as_dict()["classes"])
    parts = {
        "stays": sums["keep"],
        "moves": sums["host"] + sums["disk"],
        "recomputed": sums["recompute"] + sums["region"],
        "packed": sums["pack"],
    }
    return {
        "budget": format_bytes(plan.budget_bytes),
        "peak": format_bytes(plan.predicted.peak_bytes),
        "step": f"{plan.predicted.step_seconds:.3f} s",
        "bound": "-" if plan.bound is None else f"{plan.bound.step_seconds:.3f} s",
        **{name: format_bytes(nbytes) for name, nbytes in parts.items()},
    }


def _note(plan: Plan) -> str:
    return {
        "too small": f"  cannot be kept; {format_bytes(plan.smallest_budget_bytes or 0)} can",
        "left alone": "  everything fits",
    }.get(plan.state, "")


def notes_of(plan: Plan, least: Plan) -> list[str]:
    """Return what the figures mean, and the smallest budget that can be kept, from ``least``."""
    whose = (
        "the process's resident memory" if plan.device == "cpu" else f"the tensors on {plan.device}"
    )
    smallest = least.smallest_budget_bytes
    return [
        f"peak: of {whose}; step: its time; both predicted. bound: no choice is faster",
        *([f"the smallest budget that can be kept: {format_bytes(smallest)}"] if smallest else []),
    ]
