"""Run the steps of ``backstash plan --fake``: find what a script's tensors would take, without their memory."""

from __future__ import annotations

import json
from typing import Any

from ..fake import FakeRun
from ..plan import Plan
from ..report import StepMarks
from ..units import format_bytes
from ._launch import command_of
from ._machine import machine, versions
from ._plan_table import budgets_of
from ._resident import resident_bytes
from ._say import say

__all__ = ["FakeSession"]

_STEPS = 2  # the optimizer's state exists from the second step on


class FakeSession:
    """The fake run. :meth:`end` ends it and prints the table.

    Args:
        plan: the options of ``backstash plan``, as plain values.
    """

    def __init__(self, plan: dict[str, Any]) -> None:
        self._plan = plan
        self._command = command_of(plan)
        self._start_bytes = resident_bytes()
        self._run = FakeRun()
        self._run.__enter__()
        self._marks = StepMarks(then=self._stepped)

    def _stepped(self) -> None:
        self._run.mark()
        if len(self._marks.moments) == _STEPS:
            raise SystemExit(0)  # ends the script after its step, as sys.exit() would

    def end(self, outcome: str) -> None:
        """Print the table on stdout, and write the files that were asked for.

        Args:
            outcome: how the script ended; it is only mentioned.
        """
        self._marks.remove()
        self._run.__exit__(None, None, None)
        if len(self._marks.moments) < _STEPS:
            say(
                "backstash plan --fake: the script ended before its second step was complete "
                f"({outcome}): nothing was predicted. Tensors have no values here: loss.item() returns "
                "1, and code that needs values (lists, NumPy, shapes that depend on values) cannot run"
            )
            return
        values = self._run.trace
        known = Plan.from_trace(values, 1)
        plans = [
            Plan.from_trace(values, each) for each in self._plan["budget"] or budgets_of(known)
        ]
        print(self._table(plans))
        if self._plan["json"] is not None:
            figures = {
                "command": self._command,
                "plans": [plan.as_dict() for plan in plans],
                "asked": self._run.asked,
                "versions": versions(),
                "machine": machine().as_dict(),
            }
            self._write("json", figures)
        if self._plan["trace"] is not None:
            self._write("trace", values)

    def _table(self, plans: list[Plan]) -> str:
        lines = [self._command, f"{'budget':>10} {'peak':>10} {'stays':>10} {'moves':>10}"]
        for plan in plans:
            assert plan.predicted is not None
            stays = plan.resident_bytes
            note = "  everything fits" if plan.state == "left alone" else ""
            if plan.state == "too small":
                note = f"  cannot be kept; {format_bytes(plan.smallest_budget_bytes or 0)} can"
            moves = sum(
                each.nbytes * count // each.blocks
                for each in plan.classes
                for name, count in each.choices
                if name != "keep"
            )
            lines.append(
                f"{format_bytes(plan.budget_bytes):>10} {format_bytes(plan.predicted.peak_bytes):>10} "
                f"{format_bytes(stays):>10} {format_bytes(moves):>10}{note}"
            )
        lines.append(
            "of tensors alone, in a step after the first. The other memory of the process comes in "
            f"addition: here {format_bytes(self._start_bytes)} once torch was imported, and more once "
            "it computes. Nothing was computed: no time is known"
        )
        for where, count in self._run.asked.items():
            lines.append(f"a value was read at {where} ({count} times): it got 1")
        return "\n".join(lines)

    def _write(self, option: str, values: dict[str, Any]) -> None:
        try:
            with open(self._plan[option], "w", encoding="utf-8") as file:
                json.dump(values, file, indent=1)
                file.write("\n")
        except OSError as error:
            say(f"backstash plan: --{option}: {error}")
