"""Run the measured steps of ``backstash plan``, from the script's import of torch until the plan is made."""

from __future__ import annotations

import warnings
from typing import Any

from .. import Stash
from ..errors import StashError, StashWarning
from ..plan import Plan
from ..report import StepMarks
from ._launch import command_of
from ._plan_table import budgets_of, notes_of, show
from ._recompute import RecomputedModules, recompute_of
from ._say import say, write

__all__ = ["PlanSession"]


class PlanSession:
    """The stash under which the steps run. :meth:`end` leaves it and prints the table.

    Args:
        plan: the options of ``backstash plan``, as plain values.
    """

    def __init__(self, plan: dict[str, Any]) -> None:
        self._plan = plan
        self._command = command_of(plan)
        # No step fits in one byte, so all steps are measured, moving everything that can move or half of it.
        warnings.filterwarnings("ignore", "budget=1 B cannot be kept", StashWarning)
        again = recompute_of(plan["recompute"])
        self._stash = Stash(budget=1, disk=plan["disk"], name="backstash plan", recompute=again)
        self._stash.__enter__()
        self._recomputed = RecomputedModules(self._stash, plan["recompute"])
        self._marks = StepMarks(then=self._stepped)

    def _stepped(self) -> None:
        if self._planned() is not None:
            raise SystemExit(0)  # ends the script after its step, as sys.exit() would

    def _planned(self) -> Plan | None:
        """Return the plan once it has been made."""
        plan = self._stash.plan
        return plan if plan is not None and plan.trace is not None else None

    def end(self, outcome: str) -> None:
        """Print the table on stdout, and write the files that were asked for.

        Args:
            outcome: how the script ended; it is only mentioned.
        """
        self._marks.remove()
        self._recomputed.remove()
        if self._recomputed.note:
            say(f"backstash plan: {self._recomputed.note}")
        try:
            self._stash.__exit__(None, None, None)
        except StashError as problem:
            say(f"backstash plan: the script exited contexts in the wrong order: {problem}")
        self._stash.close()
        measured = self._planned()
        if measured is None:
            for note in self._stash.stats().notes:
                if note.startswith("planning failed"):
                    say(f"backstash plan: {note}")
            say(
                f"backstash plan: the script ended before its fourth step had begun ({outcome}): nothing was "
                "measured"
            )
            return
        plans = [measured.at(budget) for budget in self._plan["budget"] or budgets_of(measured)]
        show(self._plan, self._command, plans, notes_of(plans[0], measured))
        if self._plan["trace"] is not None and measured.trace is not None:
            write("backstash plan: --trace", self._plan["trace"], measured.trace.as_dict())
