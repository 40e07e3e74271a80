"""This process among those of its job on this machine: each has a file, and the last one to end joins them.

No process asks another anything. Each writes its file when it begins, after its steps at most once a second,
and when it ends. The last to end finds all files, also those of processes that are gone without a word.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..launcher import Job, JobDirectory

__all__ = ["DIED", "Ranks", "Record", "join"]

_EVERY_SECONDS = 1.0
_USE = "run"
DIED = "died"
"""The outcome of a process that is gone and has not said how: what its record says while it runs."""
Record = dict[str, Any]
"""``figures`` as the JSON of a run has them, ``outcome``, and perhaps ``page``."""


def join(job: Job) -> dict[str, Any]:
    """Take a place among the ranks of ``job`` on this machine, and return the part of a plan that says so.

    It has ``ranks``, the directory that they share or ``None``, and ``alone``, the reason why there is none.
    """
    part: dict[str, Any] = {"job": asdict(job), "ranks": None, "alone": None}
    if job.processes > 1:
        directory = JobDirectory.of(job, _USE)
        try:
            directory.enter({"figures": None, "outcome": DIED})
        except OSError as error:
            part["alone"] = f"each process tells of itself alone: {error}"
        else:
            part["ranks"] = str(directory.path)
    return part


class Ranks:
    """The place that :func:`join` took, in the process that runs the script.

    Args:
        plan: with the part that :func:`join` returned.
    """

    def __init__(self, plan: dict[str, Any]) -> None:
        self.job = Job(**plan["job"])
        path = plan["ranks"]
        self._directory = None if path is None else JobDirectory(Path(path), self.job.rank)
        self._pid = os.getpid()
        self._noted = -_EVERY_SECONDS
        # SIGTERM is answered on a thread of its own, while a step is being noted.
        self._writing = threading.Lock()
        self._has_left = False

    def note(self, figures: Callable[[], dict[str, Any]]) -> None:
        """Write ``figures()`` if none were written for a second. What cannot be written is left out."""
        now = time.monotonic()
        if self._directory is None or now - self._noted < _EVERY_SECONDS:
            return
        if os.getpid() != self._pid:  # the script has forked, and the new process takes steps, too
            return
        self._noted = now
        with self._writing, suppress(OSError):
            if not self._has_left:
                self._directory.write({"figures": figures(), "outcome": DIED})

    def leave(self, record: Record) -> dict[int, Record] | None:
        """Write the last record, and return all of them by rank; ``None`` if other ranks run on."""
        alone = {self.job.rank: record}
        if self._directory is None:
            return alone
        is_mine = self._writing.acquire(timeout=_EVERY_SECONDS)
        try:
            self._has_left = True
            return self._directory.leave(record)
        except OSError:  # full, or removed by somebody
            return alone
        finally:
            if is_mine:
                self._writing.release()
