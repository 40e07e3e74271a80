"""Report what a script's steps save, from its import of torch to its end or to the last step asked for."""

from __future__ import annotations

import shlex
import threading
import time
from dataclasses import asdict
from typing import Any

import torch

from ..errors import StashError
from ..report import SavedReport, StepMarks, saved_report
from ..scratch import IN_MEMORY, file_system
from ._disk_speed import DiskSpeed, measure
from ._launch import command_of, script_of
from ._machine import machine, versions
from ._profile_text import seconds_of, show
from ._say import say, write

__all__ = ["ProfileSession"]

_MEASURED_BYTES = 256 << 20
_SECONDS = ("write_seconds", "read_seconds")


class ProfileSession:
    """The report of ``backstash profile``, entered. :meth:`end` leaves it and prints it.

    Args:
        plan: the options of ``backstash profile``, as plain values.
    """

    def __init__(self, plan: dict[str, Any]) -> None:
        self._plan = plan
        self._command = command_of(plan)
        self._steps: list[tuple[SavedReport, float]] = []  # with the seconds
        self._notes: list[str] = []
        self._had_enough = False
        if threading.current_thread() is not threading.main_thread():
            self._notes.append(
                "torch was first imported in a thread other than the main one: only that thread is seen"
            )
        self._saved = saved_report()
        self._saved.__enter__()
        self._began = time.perf_counter()
        self._marks = StepMarks(then=self._stepped)

    def _stepped(self) -> None:
        if len(self._steps) < self._plan["steps"]:
            now = time.perf_counter()
            self._steps.append((self._saved.take(), now - self._began))
            self._began = now
        if len(self._steps) >= self._plan["steps"]:
            self._had_enough = True
            raise SystemExit(0)  # ends the script after its last step, as sys.exit() would

    def end(self, outcome: str) -> None:
        """Print the report and the budgets on stdout, and write the files that the plan asks for.

        Args:
            outcome: how the script ended; it is only mentioned in the report.
        """
        self._marks.remove()
        try:
            self._saved.__exit__(None, None, None)
        except StashError as problem:
            self._notes.append(f"the script exited contexts in the wrong order: {problem}")
        report, title = self._choose(outcome)
        if report is None:
            say(f"backstash profile: {title}")
            return
        speed = self._measure()
        budgets = report.budgets(self._plan["disk"])
        script = shlex.join(script_of(self._plan))
        show(report, title, budgets, self._plan["disk"], speed, self._notes, script)
        if self._plan["html"] is not None:
            try:
                report.to_html(self._plan["html"], title=self._command)
            except OSError as error:
                say(f"backstash profile: --html: {error}")
        if self._plan["json"] is not None:
            figures = self._figures(outcome, report, speed)
            write("backstash profile: --json", self._plan["json"], figures)

    def _choose(self, outcome: str) -> tuple[SavedReport | None, str]:
        """Return the report to show, and its title; or ``None``, and why there is no report."""
        ended = "" if self._had_enough else f"; the script ended first: {outcome}"
        if self._steps:
            at = max(range(len(self._steps)), key=lambda i: (self._steps[i][0].peak_bytes, i))
            report, seconds = self._steps[at]
            which = f"step {at + 1} of {len(self._steps)}, which held most"
            return report, f"{which}, {seconds:.2f} s with recording{ended}"
        if self._saved.total_bytes:
            self._notes.append(
                "no optimizer has stepped, so the script was not divided into steps: this is all of it"
            )
            return self._saved, f"the whole script ({outcome})"
        inside = next((note for note in self._saved.notes if note.startswith("torch.func")), "")
        why = inside or (
            "there was no forward with gradients. Give a script that trains, and the arguments that make it "
            "train"
        )
        return None, f"nothing was saved for backward in the main thread ({outcome}): {why}."

    def _measure(self) -> DiskSpeed | None:
        if file_system(self._plan["disk"]) in IN_MEMORY:
            self._notes.append(
                f"{self._plan['disk']} is in memory: give --disk DIR with a directory on a disk"
            )
        try:
            return measure(self._plan["disk"], _MEASURED_BYTES)
        except (
            StashError,
            RuntimeError,
        ) as problem:  # RuntimeError: no thread can start while the interpreter ends
            self._notes.append(f"the disk was not measured: {problem}")
            return None

    def _figures(
        self,
        outcome: str,
        report: SavedReport,
        speed: DiskSpeed | None,
    ) -> dict[str, Any]:
        return {
            "command": self._command,
            "outcome": "enough steps" if self._had_enough else outcome,
            "steps": [
                {
                    "seconds": seconds,
                    "unique_bytes": step.unique_bytes,
                    "peak_bytes": step.peak_bytes,
                }
                for step, seconds in self._steps
            ],
            "report": report.as_dict(),
            "costs": [
                asdict(each) | dict(zip(_SECONDS, seconds_of(each, speed), strict=True))
                for each in report.budgets(self._plan["disk"])
            ],
            "directory": self._plan["disk"],
            "disk": None if speed is None else asdict(speed),
            "notes": self._notes,
            "versions": versions() | {"torch": torch.__version__},
            "machine": machine().as_dict(),
        }
