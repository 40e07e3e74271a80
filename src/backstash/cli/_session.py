"""The stash that a script runs under, from the script's import of torch to the script's end."""

from __future__ import annotations

import signal
import statistics
import threading
import time
from contextlib import suppress
from dataclasses import asdict
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

from .. import Disk, Stash, StashError
from ..errors import UsageError
from ..launcher import Job
from ..report import StepMarks
from ..units import in_bytes
from ._ending import undisturbed, write_results
from ._launch import command_of, script_of
from ._live import Live
from ._machine import machine, versions
from ._recompute import RecomputedModules, recompute_of
from ._resident import resident_bytes, resident_peak_bytes
from ._say import write
from ._selective import SelectiveCheckpoints
from ._sigterm import BeforeTermination
from ._threads import Threads
from ._verdict import CHILDREN

if TYPE_CHECKING:
    from ..report import Timeline
    from ._first_backward import FirstBackward

__all__ = ["RunSession"]

_RECORDED_STEPS = 5
_RECORDED_EVENTS = 100_000  # 286 bytes of memory each, measured
_SETTINGS = (
    "budget",
    "plan",
    "keep",
    "host",
    "disk",
    "max_bytes",
    "min_bytes",
    "inflight",
    "prefetch",
)


class RunSession:
    """The stash of ``backstash run``, entered. :meth:`end` leaves it, and prints and writes its figures.

    Args:
        plan: the options of ``backstash run``, as plain values.

    Raises:
        StashError: the directory or a size cannot be used.
    """

    def __init__(self, plan: dict[str, Any]) -> None:
        if plan["disk"] is None and plan["keep"] is not None and plan["budget"] is None:
            # This asks how torch was built. Querying devices now could change what the script does later.
            if torch.accelerator.current_accelerator() is None:
                raise UsageError(
                    "--host is for the tensors of an accelerator, and this PyTorch was built without one; give "
                    "--disk DIR, for example `--disk /scratch`"
                )
        self._plan = plan
        self._job = Job(**plan["job"])
        self._notes: list[str] = [plan["scratch"]] if plan["scratch"] is not None else []
        if threading.current_thread() is not threading.main_thread():
            self._notes.append(
                "torch was first imported in a thread other than the main one: the main thread is not held"
            )
        self._versions = versions() | {"torch": torch.__version__}
        self._started = time.perf_counter()
        self._resident_start_bytes = resident_bytes()
        disk = plan["disk"]
        self._stash = Stash(
            keep=in_bytes(plan["keep"]),
            host=plan["host"],
            disk=None if disk is None else Disk(disk, max_bytes=plan["max_bytes"]),
            min_bytes=plan["min_bytes"],
            inflight=plan["inflight"],
            prefetch=plan["prefetch"],
            name="backstash run",
            budget=in_bytes(plan["budget"]),
            plan=plan["plan"],
            strict=plan["strict"],
            recompute=recompute_of(plan["recompute"]),
        )
        self._stash._trimmer.may_tune = plan["allocator"]["kind"] == "own"
        self._leaves_small = plan["leaves_small"] and not (plan["budget"] or plan["plan"])
        if self._leaves_small:
            self._stash._session.leave_small_steps()
        self._stash.__enter__()
        self._recomputed = RecomputedModules(self._stash, plan["recompute"])
        self._selective = SelectiveCheckpoints()
        self._marks = StepMarks(then=self._stepped)
        self._parts: list[Any] = [self._marks, self._selective, self._recomputed]
        self._recorded: tuple[Timeline, FirstBackward] | None = None
        if plan["report"] is not None:
            from ..report import timeline
            from ._first_backward import FirstBackward  # imported late: it loads the drawing code

            line = timeline(self._stash.record(limit=_RECORDED_EVENTS), steps=self._marks)
            self._recorded = line, FirstBackward()
            self._parts += self._recorded
        # One line for all processes that share the terminal.
        if not plan["quiet"] and self._job.local_rank == 0 and Live.suits():
            self._parts.append(Live(self._stash, self._marks.moments))
        self._ended = False
        self._ending = threading.Lock()
        self._before_termination = BeforeTermination(self._terminated)
        self._parts.append(Threads(self._stash))  # last: our own threads do not enter the stash

    def _stepped(self) -> None:
        if self._recorded is not None and len(self._marks.moments) >= _RECORDED_STEPS:
            self._recorded[0].remove()

    def end(self, outcome: str) -> None:
        """Leave the stash, print the summary on stderr and write the JSON, as the plan says.

        Args:
            outcome: how the script ended; it only appears in the figures.
        """
        try:
            with undisturbed(), self._ending:
                if not self._ended:
                    self._ended = True
                    with suppress(StashError):  # the script left its own contexts in another order
                        self._stash.__exit__(None, None, None)
                    self._report(outcome)
        finally:  # SIGTERM waits until here: a launcher sends it to ranks that end because another died
            self._before_termination.remove()

    def _terminated(self) -> None:
        """Report before SIGTERM ends the process, while the other threads continue."""
        with self._ending:
            if not self._ended:
                self._ended = True
                self._report(signal.SIGTERM.name)

    def _report(self, outcome: str) -> None:
        seconds = time.perf_counter() - self._started
        for part in reversed(self._parts):
            part.remove()
        self._notes += filter(None, (self._recomputed.note, self._selective.note))
        figures = self._figures(outcome, seconds)
        planned, saves = self._stash.plan, figures["stats"]["saves"]
        if saves == 0:
            self._notes.append("nothing was saved for backward")
        if saves == 0 or Job.now().processes > self._job.processes:
            self._notes.append(CHILDREN)
        if planned is not None:
            figures["plan"] = planned.as_dict()
            if self._plan["save_plan"] is not None:
                path = self._job.file(self._plan["save_plan"])
                write("backstash run: --save-plan", path, planned.text())
        write_results(self._plan, self._job, figures)
        if self._recorded is not None:
            from ..report import render_page

            page = render_page(self._page(figures, *self._recorded))
            write("backstash run: --report", self._job.file(self._plan["report"]), page)

    def _figures(self, outcome: str, seconds: float) -> dict[str, Any]:
        """Return the values of this process's JSON."""
        start, peak = self._resident_start_bytes, resident_peak_bytes()
        return {
            "command": command_of(self._plan),
            "outcome": outcome,
            "seconds": seconds,
            "ended_unix_seconds": time.time(),
            "job": asdict(self._job),
            "steps": _steps(self._marks),
            "stats": self._stash.stats().as_json(),
            "resident": {
                "start_bytes": start,
                "peak_bytes": peak,
                "over_start_bytes": max(0, peak - start),
            },
            "devices": _device_peaks(),
            "allocator": self._plan["allocator"],
            "leaves_small": self._leaves_small,
            "notes": self._notes,
            "versions": self._versions,
            "machine": machine().as_dict(),
            "settings": {name: self._plan[name] for name in _SETTINGS},
            "script": script_of(self._plan),
        }

    def _page(
        self, figures: dict[str, Any], line: Timeline, graph: FirstBackward
    ) -> dict[str, Any]:
        from ._run_page import run_page

        page = run_page(figures, line, self._plan["compare"]) | graph.section
        page["notes"] = [*page.get("notes", ()), *filter(None, [graph.note])]
        return page


def _steps(marks: StepMarks) -> dict[str, Any]:
    """Return the number of steps, and the median time from the end of one to the end of the next."""
    seconds = [after - before for (before, _), (after, _) in pairwise(marks.moments)]
    median = statistics.median(seconds) if seconds else None
    return {"count": len(marks.moments), "median_seconds": median}


def _device_peaks() -> dict[str, int]:
    """Return the peak bytes of tensors on each accelerator that was used and whose allocator counts them."""
    kind = torch.accelerator.current_accelerator()
    if kind is None:
        return {}
    peaks = {}
    for index in range(torch.accelerator.device_count()):
        try:
            counted = torch.accelerator.memory_stats(index)
        except (RuntimeError, NotImplementedError):  # not every accelerator's allocator counts
            continue
        peaks[f"{kind.type}:{index}"] = counted.get("allocated_bytes.all.peak", 0)
    return {name: peak for name, peak in peaks.items() if peak}
