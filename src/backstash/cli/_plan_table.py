"""Print and write the results of ``backstash plan``: a line for each budget."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from typing import Any

from ..plan import Plan, budget_for
from ..units import format_bytes
from ._machine import machine, versions
from ._plan_page import moved_by_choice
from ._say import say

__all__ = ["budgets_of", "figures_of", "plan_for_trace", "table", "write"]

_SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)  # between the smallest budget and everything in place
_UNIT_BYTES = 16 << 20  # budgets that the user did not give are multiples of this


def plan_for_trace(path: str, budgets: Sequence[int] | None, json_path: str | None) -> None:
    """Plan for the measured step in a file, and print the table.

    Args:
        path: a file that ``backstash plan --trace`` wrote.
        budgets: in bytes; ``None``: five, between the smallest that can be kept and everything in place.
        json_path: a file to which the plans are also written; ``None``: none.

    Raises:
        UsageError: the file cannot be read, or is not a trace of a step.
    """
    command = shlex.join(["backstash", "plan", "--trace", path])
    least = Plan.from_trace(path, 1)
    plans = [Plan.from_trace(path, budget) for budget in budgets or budgets_of(least)]
    print(table(command, plans, least))
    say(f"backstash plan: of the step in {path}; no script was given, and nothing was run")
    if json_path is not None:
        write("--json", json_path, figures_of(command, plans))


def figures_of(command: str, plans: Sequence[Plan]) -> dict[str, Any]:
    """Return the values that ``--json`` writes."""
    return {
        "command": command,
        "plans": [plan.as_dict() for plan in plans],
        "versions": versions(),
        "machine": machine().as_dict(),
    }


def write(option: str, path: str, values: dict[str, Any]) -> None:
    """Write ``values`` as JSON; if that fails, print a line on stderr that names the ``option``."""
    try:
        with open(path, "w", encoding="utf-8") as file:
            json.dump(values, file, indent=1)
            file.write("\n")
    except OSError as error:
        say(f"backstash plan: {option}: {error}")


def budgets_of(plan: Plan) -> list[int]:
    """Return round budgets from the smallest that can be kept to the one for everything in place."""
    least = plan.smallest_budget_bytes or plan.budget_bytes
    most = budget_for(plan.plain.peak_bytes) if plan.plain is not None else least
    least = min(least, most)
    wanted = (1.01 * (least + share * (most - least)) for share in _SHARES)
    return list(dict.fromkeys(-(-int(each) // _UNIT_BYTES) * _UNIT_BYTES for each in wanted))


def table(command: str, plans: list[Plan], least: Plan) -> str:
    """Return a line for each budget, and the smallest that can be kept, from ``least``."""
    lines = [
        command,
        f"{'budget':>10} {'peak':>10} {'step':>9} {'bound':>9} {'stays':>10} {'moves':>10} "
        f"{'recomputed':>10} {'packed':>10}",
    ]
    for plan in plans:
        if plan.predicted is None:
            continue
        sums = moved_by_choice(plan.as_dict()["classes"])
        again = sums["recompute"] + sums["region"]
        parts = (sums["keep"], sums["host"] + sums["disk"], again, sums["pack"])
        bound = f"{plan.bound.step_seconds:.3f} s" if plan.bound is not None else "-"
        note = ""
        if plan.state == "too small":
            note = f"  cannot be kept; {format_bytes(plan.smallest_budget_bytes or 0)} can"
        elif plan.state == "left alone":
            note = "  everything fits"
        lines.append(
            f"{format_bytes(plan.budget_bytes):>10} {format_bytes(plan.predicted.peak_bytes):>10} "
            f"{plan.predicted.step_seconds:>7.3f} s {bound:>9} "
            + " ".join(f"{format_bytes(each):>10}" for each in parts)
            + note
        )
    device = plans[0].device if plans else "cpu"
    whose = "the process's resident memory" if device == "cpu" else f"the tensors on {device}"
    lines.append(f"peak: of {whose}; step: its time; both predicted. bound: no choice is faster")
    if least.smallest_budget_bytes:
        lines.append(
            f"the smallest budget that can be kept: {format_bytes(least.smallest_budget_bytes)}"
        )
    return "\n".join(lines)
