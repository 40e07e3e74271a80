"""The measured steps of ``backstash plan``, from the script's import of torch until the plan is made."""

from __future__ import annotations

import json
import shlex
import warnings
from typing import Any

from .. import Stash
from ..errors import StashError, StashWarning
from ..plan import Plan, budget_for
from ..report import StepMarks
from ..units import format_bytes
from ._machine import machine, versions
from ._plan_page import moved_by_choice
from ._recompute import RecomputedModules
from ._say import say

__all__ = ["Session"]

_SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)  # between the smallest budget and everything in place
_UNIT_BYTES = 16 << 20  # budgets that nobody gave are multiples of it


class Session:
    """The stash under which the steps run. :meth:`end` leaves it and prints the table.

    Args:
        plan: the options of ``backstash plan``, as plain values.
    """

    def __init__(self, plan: dict[str, Any]) -> None:
        self._plan = plan
        self._command = " ".join([plan["command"], shlex.join(plan["arguments"])]).rstrip()
        # No step fits in one byte: all are measured, with everything moved that can move, or half of it.
        warnings.filterwarnings("ignore", "budget=1 B cannot be kept", StashWarning)
        self._stash = Stash(budget=1, disk=plan["disk"], name="backstash plan")
        self._stash.__enter__()
        self._recomputed = RecomputedModules(self._stash, plan["recompute"])
        self._marks = StepMarks(then=self._stepped)

    def _stepped(self) -> None:
        if self._planned() is not None:
            raise SystemExit(0)  # ends the script after its step, as sys.exit() would

    def _planned(self) -> Plan | None:
        """The plan, when it has been made."""
        plan = self._stash.plan
        return plan if plan is not None and plan.trace is not None else None

    def end(self, outcome: str) -> None:
        """Print the table on stdout; write the files that were asked for.

        Args:
            outcome: how the script has ended; it is only named.
        """
        self._marks.remove()
        self._recomputed.remove()
        if self._recomputed.note:
            say(f"backstash plan: {self._recomputed.note}")
        try:
            self._stash.__exit__(None, None, None)
        except StashError as problem:
            say(f"backstash plan: the script left contexts in the wrong order: {problem}")
        for planner in self._stash._session.planners.values():
            planner.conclude()
        measured = self._planned()
        if measured is None:
            for note in self._stash.stats().notes:
                if note.startswith("no plan could be made"):
                    say(f"backstash plan: {note}")
            say(
                f"backstash plan: the script ended before its fourth step had begun ({outcome}): nothing was "
                "measured"
            )
            return
        plans = [measured.at(budget) for budget in self._plan["budgets"] or budgets_of(measured)]
        print(table(self._command, plans))
        if self._plan["json"] is not None:
            figures = {
                "command": self._command,
                "plans": [plan.as_dict() for plan in plans],
                "versions": versions(),
                "machine": machine().as_dict(),
            }
            self._write("json", figures)
        if self._plan["trace"] is not None and measured.trace is not None:
            self._write("trace", measured.trace.as_dict())

    def _write(self, option: str, values: dict[str, Any]) -> None:
        try:
            with open(self._plan[option], "w", encoding="utf-8") as file:
                json.dump(values, file, indent=1)
                file.write("\n")
        except OSError as error:
            say(f"backstash plan: --{option}: {error}")


def budgets_of(plan: Plan) -> list[int]:
    """Round budgets from the smallest that can be kept to what everything in place takes."""
    least = plan.smallest_budget_bytes or plan.budget_bytes
    most = budget_for(plan.plain.peak_bytes) if plan.plain is not None else least
    least = min(least, most)
    wanted = (1.01 * (least + share * (most - least)) for share in _SHARES)
    return list(dict.fromkeys(-(-int(each) // _UNIT_BYTES) * _UNIT_BYTES for each in wanted))


def table(command: str, plans: list[Plan]) -> str:
    """A line for each budget."""
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
    return "\n".join(lines)
