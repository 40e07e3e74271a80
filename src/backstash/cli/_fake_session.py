"""Run the steps of ``backstash plan --fake``: find what a script's tensors would take, without their memory."""

from __future__ import annotations

from typing import Any

from ..fake import FakeRun
from ..plan import Plan
from ..report import StepMarks
from ..units import format_bytes
from ._launch import command_of
from ._plan_table import budgets_of, show
from ._resident import resident_bytes
from ._say import say, write

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
        notes = [
            "The figures are of tensors alone, in a step after the first. The process holds other memory in "
            f"addition: here {format_bytes(self._start_bytes)} once torch was imported, and more once "
            "it computes. Nothing was computed: no time is known",
            *(
                f"a value was read at {where} ({count} times): it got 1"
                for where, count in self._run.asked.items()
            ),
        ]
        show(self._plan, self._command, plans, notes, asked=self._run.asked)
        if self._plan["trace"] is not None:
            write("backstash plan: --trace", self._plan["trace"], values)
