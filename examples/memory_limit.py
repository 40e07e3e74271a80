"""Run a program under a memory limit: a control group where one can be made, else RLIMIT_DATA."""

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Outcome:
    """How a program ended."""

    how: str
    """``finished``, ``killed by the kernel`` or ``refused: `` and the last line on stderr."""
    output: str
    """What it printed."""

    @property
    def finished(self) -> bool:
        return self.how == "finished"


def run_limited(command: list[str], limit_bytes: int) -> Outcome:
    """Run ``command`` to its end, with at most ``limit_bytes`` of memory and no swap."""
    with terminable(), control_group(limit_bytes) as enter:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=enter
        )
        try:
            output, errors = process.communicate()
        finally:
            process.kill()
            process.wait()
    if process.returncode == -signal.SIGKILL:
        return Outcome("killed by the kernel", output)
    if process.returncode != 0:
        return Outcome("refused: " + errors.strip().rpartition("\n")[2], output)
    return Outcome("finished", output)


@contextmanager
def control_group(limit_bytes: int) -> Iterator[Callable[[], None]]:
    """What a child calls to be limited. The group, if one could be made, is removed at the end."""
    group = next(filter(None, (make_group(*kind, limit_bytes) for kind in memory_groups())), None)
    if group is None:
        yield lambda: resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, limit_bytes))
        return
    try:
        yield lambda: (group / "cgroup.procs").write_text("0") and None
    finally:
        remove_group(group)


def memory_groups() -> Iterator[tuple[Path, str, str, str]]:
    """Where a group may be made: directory, file of the limit, file of swap's limit, its value."""
    root = Path("/sys/fs/cgroup")
    with suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if "memory" in controllers.split(","):
                for parent in (root / "memory" / path.lstrip("/"), root / "memory"):
                    yield parent, "memory.limit_in_bytes", "memory.memsw.limit_in_bytes", "limit"
            elif not controllers:
                own = root / path.lstrip("/")
                for parent in (own.parent, own):
                    if parent.is_relative_to(root):
                        yield parent, "memory.max", "memory.swap.max", "0"


def make_group(parent: Path, limit: str, swap: str, no_swap: str, limit_bytes: int) -> Path | None:
    """A new group with its limits set, or ``None`` where that is not allowed."""
    group = parent / f"backstash-example-{os.getpid()}"
    try:
        group.mkdir()
    except OSError:
        return None
    try:
        if not (group / limit).exists() or not os.access(group / "cgroup.procs", os.W_OK):
            raise PermissionError(group)
        (group / limit).write_text(str(limit_bytes))
    except OSError:
        remove_group(group)
        return None
    with suppress(OSError):  # Not every kernel counts swap.
        (group / swap).write_text(no_swap.replace("limit", str(limit_bytes)))
    return group


def remove_group(group: Path) -> None:
    """Remove a group whose processes have ended. The kernel may take a moment to notice."""
    for _ in range(100):
        with suppress(OSError):
            group.rmdir()
            return
        time.sleep(0.05)
    print(f"could not remove {group}", file=sys.stderr)


@contextmanager
def terminable() -> Iterator[None]:
    """Within it SIGTERM raises, as SIGINT does, so that what was made is removed."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
