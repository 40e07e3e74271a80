"""Print the summary of a run that has ended, and write its files."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from ..launcher import Job
from ._job_summary import job_summary
from ._rank_files import of_this_machine, pattern
from ._say import say, write
from ._summary import summary

__all__ = ["undisturbed", "write_results"]


def write_results(
    plan: dict[str, Any],
    job: Job,
    figures: dict[str, Any],
) -> None:
    """Write this process's JSON and print its summary, as the plan says.

    Args:
        plan: the options of ``backstash run``.
        job: this process's.
        figures: this process's figures, as in its JSON.
    """
    if plan["json"] is not None:
        write("backstash run: --json", job.file(plan["json"]), figures)
    if not plan["quiet"]:
        say(_summary(plan, job, figures))


def _summary(plan: dict[str, Any], job: Job, figures: dict[str, Any]) -> str:
    """Return the text for stderr: for all ranks of this machine if their files exist, else for this one.

    A rank checks once it has written its own file, without waiting for others. So the last one finds all files,
    and two that end at the same moment may both find them.
    """
    own = summary(figures, plan["compare"], job.label, verbose=plan["verbose"])
    if job.processes == 1:
        return own
    how = "--json FILE writes the figures of each, and `backstash summary` compares them"
    if plan["json"] is not None:
        how = f"`backstash summary {pattern(plan['json'])}`"
        found = of_this_machine(plan["json"], job, figures)
        if len(found) == job.local_processes > 1:
            return job_summary(found, verbose=plan["verbose"])
        if job.local_processes > 1 and not plan["verbose"]:
            own = own.splitlines()[0]
    return f"{own}\n{job.label}: all ranks: {how}" if job.local_rank == 0 else own


@contextmanager
def undisturbed() -> Iterator[None]:
    """Ignore one SIGINT, and one SIGTERM that the script handles, while the summary is made.

    Launchers send them to ranks that are already ending, and a handler that raises would interrupt the summary.
    A second signal of the same kind is handled as before.
    """
    handlers: dict[int, Any] = {}

    def ignore_once(number: int, frame: FrameType | None) -> None:
        signal.signal(number, handlers[number])

    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            handler = signal.getsignal(number)
            if callable(handler):  # not the default, and not ignored
                handlers[number] = handler
                signal.signal(number, ignore_once)
    try:
        yield
    finally:
        for each, handler in handlers.items():
            if signal.getsignal(each) is ignore_once:
                signal.signal(each, handler)
