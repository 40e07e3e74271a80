"""A directory that the processes of a job on one machine share, each with a file of its own in it.

Nothing is sent, and nobody is waited for but for the moment that another one is under the lock. Each process
rewrites its own file as a whole (``os.replace``), so that a reader finds what it was before or what it is now,
whatever ends the writer. Of a process that ended without a word its file stays, and its number and the moment
of its start tell that it is gone: a later process may have the same number, but not the same start.

The directory's name is made of what the launcher tells all its processes, so that none has to ask another. A
job that is restarted, or has another size, has another directory.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import stat
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ._job import Job

__all__ = ["JobDirectory", "Process"]

_ATTEMPT = (
    "TORCHELASTIC_RESTART_COUNT"  # torchrun's, which ends all processes before it starts others
)
# What the launchers of _job.py set to the same for all processes of a job, and to something else for others.
_NAMES = (
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RUN_ID",
    _ATTEMPT,
    "SLURM_JOB_ID",
    "SLURM_STEP_ID",
    "PMIX_NAMESPACE",
    "OMPI_MCA_ess_base_jobid",
)
_SHARED_MEMORY = "/dev/shm"
_NEW = ".new"
_EXITING = 0x4  # PF_EXITING of Linux: its memory is given back, which may take seconds


@dataclass(frozen=True, slots=True)
class Process:
    """A process, told from a later one that is given the same number.

    >>> Process.now().is_alive()
    True
    """

    pid: int
    """Its number."""
    began: str
    """When it began, in the kernel's unit; empty where the system does not say."""

    @classmethod
    def now(cls) -> Process:
        """Return this process."""
        return cls.of(os.getpid())

    @classmethod
    def of(cls, pid: int) -> Process:
        """Return the process that has this number now."""
        return cls(pid, _state_and_start(pid)[1])

    def is_alive(self) -> bool:
        """Whether it runs still. One that is ending, or has ended and was not waited for, does not."""
        if not os.path.isdir("/proc/self"):
            return _takes_signals(self.pid)
        runs, began = _state_and_start(self.pid)
        return runs and began == self.began


class JobDirectory:
    """The directory, and this process's file in it.

    Args:
        path: of the directory; it need not be there.
        rank: of this process in its job.

    >>> with tempfile.TemporaryDirectory() as parent:
    ...     mine = JobDirectory(Path(parent) / "job", rank=0)
    ...     mine.enter({"step": 1})
    ...     mine.write({"step": 2})
    ...     mine.leave({"step": 3})
    {0: {'step': 3}}
    """

    def __init__(self, path: Path, rank: int) -> None:
        self.path = path
        self._rank = rank
        self._own = {
            "process": asdict(Process.now()),
            "parent": asdict(Process.of(os.getppid())),
            "attempt": _attempt(),
            "ended": False,
        }

    @classmethod
    def of(cls, job: Job, use: str, root: str | None = None) -> JobDirectory:
        """Return the directory of ``job``, as the environment names it now.

        Args:
            job: of this process.
            use: what it is for, in a word: each use has a directory of its own.
            root: the directory around it. Default: ``/dev/shm``, or where Python has temporary files.
        """
        found = [f"{name}={os.environ[name]}" for name in _NAMES if name in os.environ]
        if not found:  # processes of one launcher have one parent
            found = [repr(Process.of(os.getppid()))]
        text = "\n".join([use, str(job.processes), *found])
        name = hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:16]
        return cls(Path(root or _root()) / f"{_prefix()}{name}", job.rank)

    def enter(self, content: Mapping[str, Any]) -> None:
        """Make the directory if it is not there, and this process's file in it.

        What processes left that are all gone is removed first: files of another job in this directory, and
        other directories of this user's jobs.

        Raises:
            OSError: the directory cannot be made or is another user's, or another process that is alive is
                this rank. Then nothing was changed.
        """
        self._remove_others()
        with self._locked(make=True):
            others = self._envelopes()
            if not any(_is_of_a_job_that_runs(each) for each in others.values()):
                self._remove_files()
            there = others.get(self._rank)
            if there is not None and _is_alive(there) and there["process"] != self._own["process"]:
                raise FileExistsError(f"another process is rank {self._rank} of {self.path}")
            self.write(content)

    def write(self, content: Mapping[str, Any]) -> None:
        """Replace what this process's file says. It does not wait for a lock.

        Raises:
            OSError: it could not be written; then it says what it said before.
        """
        own = self._file(self._rank)
        new = own.with_name(own.name + _NEW)
        new.write_text(json.dumps({**self._own, "content": dict(content)}), encoding="utf-8")
        os.replace(new, own)

    def exchange(self, settle: Callable[[dict[int, Any], int], Mapping[str, Any]]) -> None:
        """Replace what this process's file says by what ``settle`` makes of the others', as one step of all.

        Args:
            settle: is called under the lock, with what each other process that runs has written, by its
                process number, and with how many processes have been here, this one and those that are gone
                included.

        Raises:
            OSError: as :meth:`write`, or the directory is not there any more.
        """
        with self._locked(make=False):
            envelopes = self._envelopes()
            others = {
                int(each["process"]["pid"]): each["content"]
                for rank, each in envelopes.items()
                if rank != self._rank and not each["ended"] and _is_alive(each)
            }
            self.write(settle(others, len(envelopes)))

    def leave(self, content: Mapping[str, Any]) -> dict[int, Any] | None:
        """Write this process's last word. The last one to leave removes the directory.

        Returns:
            ``None`` if another process of the job is still running. Else by rank what each had written
            last, also those that are gone without a word.

        Raises:
            OSError: the directory is not there any more, or cannot be written.
        """
        with self._locked(make=False):
            self._own["ended"] = True
            self.write(content)
            others = self._envelopes()
            if any(_is_alive(each) and not each["ended"] for each in others.values()):
                return None
            self._remove_files()
            self.path.rmdir()
        return {rank: each["content"] for rank, each in sorted(others.items())}

    def _is_needed(self, envelope: Any) -> bool:
        """Whether another directory's file is of an attempt that runs, or of which others may begin."""
        is_earlier = envelope["parent"] == self._own["parent"] and envelope["attempt"] < _attempt()
        return _is_alive(envelope) if is_earlier else _is_of_a_job_that_runs(envelope)

    def _file(self, rank: int) -> Path:
        return self.path / f"rank{rank}.json"

    def _envelopes(self) -> dict[int, Any]:
        found = {}
        for file in self.path.glob("rank*.json"):
            with suppress(OSError, ValueError):
                found[int(file.stem[4:])] = json.loads(file.read_text(encoding="utf-8"))
        return found

    def _remove_files(self) -> None:
        for file in self.path.iterdir():
            with suppress(FileNotFoundError):
                file.unlink()

    def _remove_others(self) -> None:
        """Remove directories whose processes are all gone: of jobs that were killed as a whole, and of earlier
        attempts of this one."""
        for path in self.path.parent.glob(f"{_prefix()}*"):
            other = JobDirectory(path, -1)
            if path == self.path:
                continue
            with suppress(OSError), other._locked(make=False, wait=False):
                if not any(map(self._is_needed, other._envelopes().values())):
                    other._remove_files()
                    path.rmdir()

    @contextmanager
    def _locked(self, *, make: bool, wait: bool = True) -> Iterator[None]:
        """Hold the lock of the directory that is at the path: the last to leave one may just remove it."""
        while True:
            if make:
                with suppress(FileExistsError):
                    self.path.mkdir(mode=0o700)
            try:
                held = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            except FileNotFoundError:
                if make:
                    continue
                raise
            try:
                _check_is_own(held, self.path)
                fcntl.flock(held, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
                if not _is_at(held, self.path):
                    if make:
                        continue
                    raise FileNotFoundError(f"{self.path} was removed")
                try:
                    yield
                finally:
                    fcntl.flock(held, fcntl.LOCK_UN)  # a process that was forked has it open, too
                return
            finally:
                os.close(held)


def _root() -> str:
    return _SHARED_MEMORY if os.access(_SHARED_MEMORY, os.W_OK | os.X_OK) else tempfile.gettempdir()


def _prefix() -> str:
    """Of this user's directories, whose processes are numbered as this process sees them."""
    try:
        numbering = f"-{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        numbering = ""
    return f"backstash-{os.getuid()}{numbering}-"


def _check_is_own(held: int, path: Path) -> None:
    found = os.fstat(held)
    if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise PermissionError(f"{path} is another user's, or others may write to it")


def _is_at(held: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(held), os.lstat(path))
    except FileNotFoundError:
        return False


def _attempt() -> int:
    told = os.environ.get(_ATTEMPT, "")
    return int(told) if told.isdecimal() else 0


def _is_alive(envelope: Any) -> bool:
    return Process(**envelope["process"]).is_alive()


def _is_of_a_job_that_runs(envelope: Any) -> bool:
    """Whether the process runs, or the launcher that started it."""
    return _is_alive(envelope) or Process(**envelope["parent"]).is_alive()


def _state_and_start(pid: int) -> tuple[bool, str]:
    """Whether a process runs, and when it began, empty where there is none: proc(5), /proc/pid/stat."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False, ""
    fields = text.rpartition(")")[2].split()  # what is in parentheses is the program's name
    state, flags, began = fields[0], int(fields[6]), fields[19]
    return state not in "ZX" and not flags & _EXITING, began


def _takes_signals(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
