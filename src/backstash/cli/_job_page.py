"""The page of a job: a table of its ranks on this machine, and the page of each below it, one at a time."""

from __future__ import annotations

from typing import Any

from ..launcher import Job
from ._job_summary import COLUMNS, job_facts, job_rows, slowest

__all__ = ["job_page"]

_OF_ALL = ("title", "command", "made")


def job_page(job: Job, records: dict[int, dict[str, Any]]) -> dict[str, Any]:
    """The page as plain values, for :func:`backstash.report.render_page`; of one rank alone, that rank's.

    Args:
        job: of this process.
        records: by rank, what each has left; one has a ``page`` at least.
    """
    pages = {rank: each["page"] for rank, each in records.items() if "page" in each}
    first = next(iter(pages.values()))
    if len(records) == 1:
        return dict(first)
    known = {rank: each["figures"] for rank, each in records.items() if rank in pages}
    return {
        **{key: first[key] for key in _OF_ALL},
        "subtitle": ". ".join(_capital(line) for line in job_facts(job, records)),
        "ranks": {
            "columns": [{"label": name, "unit": unit} for name, unit in COLUMNS],
            "rows": job_rows(records),
            "pages": [_own(pages.get(rank)) for rank in records],
            "shown": list(records).index(slowest(known)),
        },
    }


def _capital(line: str) -> str:
    return line[:1].upper() + line[1:]


def _own(page: dict[str, Any] | None) -> dict[str, Any] | None:
    if page is None:
        return None
    return {key: value for key, value in page.items() if key not in _OF_ALL}
