"""Run a program under a memory limit: by a control group, or by RLIMIT_DATA where none can be made."""

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

ENDING = {signal.SIGINT, signal.SIGTERM}


@dataclass(frozen=True)
class Outcome:
    """How a program ended."""

    how: str
    """``finished``, ``killed by the kernel``, or ``refused: `` and the last line on stderr."""
    output: str
    """What it printed."""
    limited_by: str
    """``a control group`` or ``RLIMIT_DATA``."""

    @property
    def finished(self) -> bool:
        return self.how == "finished"


def run_limited(command: list[str], limit_bytes: int) -> Outcome:
    """Run ``command`` to its end, with at most ``limit_bytes`` of memory and no swap."""
    # SIGINT and SIGTERM are blocked except while the program runs, so that cleaning up is not cut off.
    with signals_raise(), signals_wait(True), control_group(limit_bytes) as group:
        with start(command, group, limit_bytes) as process:
            try:
                with signals_wait(False):
                    output, errors = process.communicate()
            finally:
                process.kill()
    how = "finished"
    if process.returncode == -signal.SIGKILL:
        how = "killed by the kernel"
    elif process.returncode != 0:
        how = "refused: " + errors.strip().rpartition("\n")[2]
    return Outcome(how, output, "a control group" if group else "RLIMIT_DATA")


def start(command: list[str], group: Path | None, limit_bytes: int) -> subprocess.Popen[str]:
    """Start this file as a program, which limits itself and then becomes ``command``."""
    # glibc: a tensor of 1 MiB goes back to the system as soon as it is freed.
    environ = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
    limited = [sys.executable, __file__, str(group or ""), str(limit_bytes), *command]
    pipe = subprocess.PIPE
    return subprocess.Popen(limited, stdout=pipe, stderr=pipe, text=True, env=environ)


def become(group: str, limit_bytes: str, *command: str) -> None:
    """Limit this process, then replace it by ``command``."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)
    if group:
        Path(group, "cgroup.procs").write_text(str(os.getpid()))
    else:
        resource.setrlimit(resource.RLIMIT_DATA, (int(limit_bytes), int(limit_bytes)))
    os.execv(command[0], command)


@contextmanager
def control_group(limit_bytes: int) -> Iterator[Path | None]:
    """A control group with that limit, or ``None`` where none can be made. Removed at the end."""
    group = next(filter(None, (make_group(*kind, limit_bytes) for kind in memory_groups())), None)
    try:
        yield group
    finally:
        if group is not None:
            remove_group(group)


def memory_groups() -> Iterator[tuple[Path, str, str, str]]:
    """Places where a group may be made: directory, file of the limit, file of swap's limit, its value."""
    root = Path("/sys/fs/cgroup")
    with suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            own = root / ("memory" if controllers else ".") / path.lstrip("/")
            if "memory" in controllers.split(","):
                for parent in (own, root / "memory"):
                    yield parent, "memory.limit_in_bytes", "memory.memsw.limit_in_bytes", "{}"
            elif not controllers:
                for parent in (own.parent, own) if own != root else (own,):
                    yield parent, "memory.max", "memory.swap.max", "0"


def make_group(parent: Path, limit: str, swap: str, no_swap: str, limit_bytes: int) -> Path | None:
    """A new group with its limits set, or ``None`` where that is not allowed."""
    group = parent / f"backstash-example-{os.getpid()}"
    try:
        group.mkdir()
    except OSError:
        return None
    try:
        with open(group / limit, "r+") as file:  # "r+" makes no file: in a real group it exists.
            file.write(str(limit_bytes))
    except OSError:
        remove_group(group)
        return None
    with suppress(OSError):  # Not every kernel counts swap.
        (group / swap).write_text(no_swap.format(limit_bytes))
    return group


def remove_group(group: Path) -> None:
    """Remove a group whose processes have ended; the kernel may take a moment to notice."""
    for _ in range(100):
        with suppress(OSError):
            group.rmdir()
            return
        time.sleep(0.05)
    print(f"could not remove {group}", file=sys.stderr)


@contextmanager
def signals_raise() -> Iterator[None]:
    """A context in which SIGTERM raises, as SIGINT does, so that what was made is removed."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def signals_wait(wait: bool) -> Iterator[None]:
    """A context in which SIGINT and SIGTERM are blocked (``wait``) or not."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK if wait else signal.SIG_UNBLOCK, ENDING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


if __name__ == "__main__":
    become(*sys.argv[1:])
