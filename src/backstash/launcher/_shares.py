"""One sum of memory among the processes of a job on one machine: who needs less than its part lends the rest.

The stages of a pipeline hold different numbers of microbatches, so that equal parts leave memory unused on one
rank while another one moves tensors to a disk. Each process writes what it was granted and what it wants to a
file of its own, and reads the others' (:class:`JobDirectory`). Nobody is told anything: a process that lent
something and needs it has it back when the one that borrowed it asks the next time, which is at its next step.

A process asks under a lock, so that two that ask at the same moment are not both given what is left. What one
that is gone was granted is nobody's.
"""

from __future__ import annotations

import atexit
import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from ._directory import JobDirectory
from ._job import Job

__all__ = ["Shares"]

_ENTERED: list[Shares] = []
"""Those of this process that its end has to leave."""


class Shares:
    """This process's part of the sum.

    Args:
        directory: where the processes' files are; it is entered.
        processes: how many there are on the machine. Of each that is not there yet a whole part is kept.
        resident_bytes: returns the resident bytes of a process, by its number. Default: as Linux has them.

    Raises:
        OSError: see :meth:`JobDirectory.enter`.
    """

    def __init__(
        self,
        directory: JobDirectory,
        processes: int,
        resident_bytes: Callable[[int], int] | None = None,
    ) -> None:
        self._directory = directory
        self._processes = processes
        self._resident_bytes = resident_bytes or _resident_bytes
        self._pid = os.getpid()
        self._holders: WeakKeyDictionary[Any, dict[str, int | None]] = WeakKeyDictionary()
        self._has_asked = False
        directory.enter(self._content())

    @classmethod
    def of_this_process(cls) -> Shares | None:
        """Return those of the job that this process is of, always the same ones.

        ``None`` where it is the only process of its machine, was forked from another one, or can share no
        directory: then its part is what the machine has, divided by the processes.
        """
        shares = _of_job(Job.now())
        return shares if shares is not None and shares._pid == os.getpid() else None

    def ask(self, holder: object, *, held: int, wanted: int | None, spare: int) -> int:
        """Return how many bytes ``holder`` may have from now on, what it has included.

        The sum is half of what all such holders of the machine have and what it can spare beside them. All
        that is granted is no more than that, as of now. What it does not want of its part is lent where
        another process wants more than it has.

        Args:
            holder: what holds the bytes. When it has died, its grant ends with its process's next call.
            held: the bytes that it has.
            wanted: the most that it can use; ``None``: as much as there is.
            spare: bytes that the machine can still take.

        Raises:
            OSError: the others' files cannot be read, or its own cannot be written. Then nothing was changed.
        """
        granted = 0

        def settle(others: dict[int, Any], here: int) -> dict[str, Any]:
            nonlocal granted
            self._has_asked = True
            self._holders[holder] = {"granted": 0, "wanted": wanted, "held": held}
            own = self._content()
            has = sum(self._has(pid, each) for pid, each in others.items())
            common = (spare + own["held"] + has) // 2
            part = common // self._processes
            reserved = sum(_reserved(each, part) for each in others.values())
            absent = max(0, self._processes - here) * part
            left = max(0, common - reserved - absent - own["granted"])
            most = left
            if wanted is not None:
                lends = any(each["wanted"] is None for each in others.values())
                most = wanted if lends else max(wanted, part)
            granted = min(left, most)
            self._holders[holder]["granted"] = granted
            return self._content()

        self._directory.exchange(settle)
        return granted

    def leave(self) -> None:
        """What this process was granted is the others'."""
        if os.getpid() == self._pid:
            self._directory.leave(self._content())

    @staticmethod
    def leave_all() -> None:
        """End the part of this process in all jobs, as its end does; for an end that calls nothing else."""
        for shares in list(_ENTERED):
            _leave(shares)

    def _content(self) -> dict[str, Any]:
        parts = list(self._holders.values())
        wanted = [each["wanted"] for each in parts]
        return {
            "granted": sum(each["granted"] or 0 for each in parts),
            "held": sum(each["held"] or 0 for each in parts),
            "wanted": sum(filter(None, wanted)) if self._has_asked and None not in wanted else None,
            "resident": self._resident_bytes(os.getpid()),
        }

    def _has(self, pid: int, content: dict[str, Any]) -> int:
        """What a process holds now of what it was granted, by what its memory has grown since it asked."""
        grown = self._resident_bytes(pid) - content["resident"]
        return int(min(content["granted"], max(0, content["held"] + grown)))


def _reserved(content: dict[str, Any], part: int) -> int:
    """What a process has been granted, and what it may ask for up to its part."""
    wanted = part if content["wanted"] is None else min(part, content["wanted"])
    return int(max(content["granted"], wanted))


def _resident_bytes(pid: int) -> int:
    """proc(5), /proc/pid/statm; 0 where the system does not tell."""
    try:
        pages = Path(f"/proc/{pid}/statm").read_text().split()[1]
    except OSError:
        return 0
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


@functools.cache
def _of_job(job: Job) -> Shares | None:
    if job.local_processes == 1:
        return None
    try:
        shares = Shares(JobDirectory.of(job, "memory"), job.local_processes)
    except OSError:
        return None
    _ENTERED.append(shares)
    atexit.register(_leave, shares)
    return shares


def _leave(shares: Shares) -> None:
    try:
        shares.leave()
    except OSError:  # it was removed
        pass
