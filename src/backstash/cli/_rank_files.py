"""Read the files that ``backstash run --json`` writes: one for each rank of a job."""

from __future__ import annotations

import json
import shlex
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..launcher import Job

__all__ = ["of_this_machine", "pattern", "ran_together", "read"]

_KEYS = {
    "allocator",
    "command",
    "devices",
    "ended_unix_seconds",
    "job",
    "notes",
    "outcome",
    "resident",
    "seconds",
    "stats",
    "steps",
}


def read(path: str) -> dict[str, Any]:
    """Return the figures in a file that ``backstash run --json`` wrote.

    Raises:
        OSError: the file cannot be read.
        ValueError: it has other contents.
    """
    content = Path(path).read_bytes()
    try:
        found = json.loads(content)
    except ValueError:  # not JSON, or not text
        found = None
    if not isinstance(found, dict) or not found.keys() >= _KEYS:
        raise ValueError("is not the figures of a run")
    return found


def of_this_machine(path: str, job: Job, own: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """Return, by rank, the figures that ranks of this machine have written in this run.

    Args:
        path: the file of ``--json``, without a rank in its name.
        job: this process's.
        own: this process's figures.
    """
    first = (
        job.rank - job.local_rank
    )  # torchrun's and mpirun's numbering; with others, some are missed
    found = {}
    for rank in range(first, first + job.local_processes):
        with suppress(OSError, ValueError):
            figures = own if rank == job.rank else read(job.file(path, rank))
            if figures["job"]["processes"] == job.processes and ran_together(figures, own):
                found[rank] = figures
    return found


def ran_together(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two processes ran at the same time: if a rank wrote no file, an earlier run's may still exist."""
    return all(
        a["ended_unix_seconds"] - a["seconds"] <= b["ended_unix_seconds"]
        for a, b in ((one, other), (other, one))
    )


def pattern(path: str) -> str:
    """Return a shell pattern for the files of all ranks.

    >>> pattern("my runs/run.json")
    "'my runs/run'.rank*.json"
    """
    whole = Path(path)
    return f"{shlex.quote(str(whole.with_suffix('')))}.rank*{whole.suffix}"
