"""What is printed and written when a run has ended: of one process, or of all ranks of its machine at once."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any

from ..launcher import Job
from ._job_page import job_page
from ._job_summary import job_summary
from ._ranks import DIED, Record
from ._say import say
from ._summary import summary

__all__ = ["as_json", "tell", "write"]


def tell(plan: dict[str, Any], job: Job, records: dict[int, Record]) -> None:
    """Print the summary, and write what is about all of ``records``, as far as the plan says.

    Args:
        plan: the options of ``backstash run``.
        job: of this process.
        records: by rank, what each has left, as :meth:`Ranks.leave` returns it.
    """
    known = {rank: each for rank, each in records.items() if each["figures"] is not None}
    if len(records) > 1:
        _tell_all(plan, job, records, known)
    elif known and not plan["quiet"]:
        figures, verbose = known[job.rank]["figures"], plan["verbose"]
        say(summary(figures, plan["compare"], job.label, verbose=verbose))
    if plan["report"] is not None and any("page" in each for each in known.values()):
        from ..report import render_page

        page = job_page(job, records)
        path = job.common_file(plan["report"], list(records))
        write("report", path, lambda: render_page(page))


def _tell_all(
    plan: dict[str, Any],
    job: Job,
    records: dict[int, Record],
    known: dict[int, Record],
) -> None:
    if not plan["quiet"]:
        say(job_summary(job, records, verbose=plan["verbose"]))
    if plan["json"] is None or not known:
        return
    for rank, record in known.items():
        if record["outcome"] == DIED:  # else it has written its own
            write(
                "json", job.file(plan["json"], rank), functools.partial(as_json, record["figures"])
            )
    everything = {
        "processes": job.processes,
        "ranks": [
            {"rank": rank, "outcome": record["outcome"], **(record["figures"] or {})}
            for rank, record in records.items()
        ],
    }
    write("json", job.common_file(plan["json"], list(records)), lambda: as_json(everything))


def as_json(figures: dict[str, Any]) -> str:
    """``figures`` as the text of a file."""
    return json.dumps(figures, indent=2) + "\n"


def write(option: str, path: str, text: Callable[[], str]) -> None:
    """Write ``text()`` to ``path``; where that cannot be, a line names ``option``."""
    try:
        with open(path, "w", encoding="utf-8") as file:
            file.write(text())
    except OSError as error:
        say(f"backstash run: --{option.replace('_', '-')}: {error}")
