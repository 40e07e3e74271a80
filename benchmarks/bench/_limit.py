"""The benchmarks `limit` and `limits`: training in a control group with less memory than a step saves."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backstash.memory import memory_group

from ._process import Ended, step_process
from ._step import TINY_MIN_BYTES
from ._variants import VARIANTS

__all__ = ["Group", "limit", "limited_group", "limits"]

_LIMIT_FILES = {
    1: ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes"),
    2: ("memory.max", "memory.swap.max"),
}
_MIB = 1 << 20
_SHARES = (3, 4, 5, 6)  # what a step saves, over the limits of `limits`
_ENTER = (
    'echo $$ > "$0" && exec "$@"'  # a shell that moves itself into the group, then becomes "$@"
)


@dataclass(frozen=True, slots=True)
class Group:
    """A control group that limits memory, made for one run."""

    path: Path
    """Its directory; empty where none could be made."""
    reason: str
    """Why there is none; empty where there is one."""

    def __bool__(self) -> bool:
        return not self.reason

    @property
    def prefix(self) -> tuple[str, ...]:
        """The command that runs another command in this group."""
        return ("sh", "-c", _ENTER, str(self.path / "cgroup.procs"))


@contextmanager
def limited_group(limit_bytes: int) -> Iterator[Group]:
    """Make a memory control group below this process's own, and remove it at the end.

    Args:
        limit_bytes: the most memory that the group may use; it has no swap.
    """
    own = memory_group()
    if own is None:
        yield Group(Path(), "this system has no memory control groups")
        return
    path = own.path / f"backstash-bench-{os.getpid()}"
    try:
        path.mkdir()
    except OSError as error:
        yield Group(Path(), f"no control group can be made: {error.strerror}")
        return
    try:
        yield Group(path, _set_limit(own.version, path, limit_bytes))
    finally:
        path.rmdir()


def _set_limit(version: int, path: Path, limit_bytes: int) -> str:
    memory, swap = _LIMIT_FILES[version]
    try:
        (path / memory).write_text(str(limit_bytes))
    except OSError as error:
        return f"the control group takes no memory limit: {error.strerror or error}"
    if (path / swap).exists():
        # Version 1 counts memory and swap together there, version 2 swap alone.
        (path / swap).write_text(str(limit_bytes if version == 1 else 0))
    return ""


def limit(*, directory: str, tiny: bool, say: Callable[[str], None]) -> dict[str, Any]:
    """Train outside, and inside a group that limits memory to half of what is saved.

    Args:
        directory: where ``backstash run`` puts its file.
        tiny: the small workload, for tests.
        say: called with a line of progress before each process.

    Returns:
        The bytes saved by a step, the limit, and how each run ended, with its losses; or why it was
        skipped.
    """
    task: dict[str, Any] = {
        "workload": "gpt-large-tiny" if tiny else "gpt-large",
        "steps": 1,
        "warmup": 1,
        "directory": directory,
        "min_bytes": TINY_MIN_BYTES if tiny else 64 << 10,
    }
    runs: list[dict[str, Any]] = []
    result = {"kind": "limit", "tiny": tiny, "runs": runs, "skipped": ""}
    say("limit: outside, plain")
    outside = step_process(VARIANTS["plain"], task)
    say("limit: outside, backstash run, for the bytes that a step saves")
    measured = step_process(VARIANTS["run"], task)
    runs += [_row("plain", False, outside), _row("run", False, measured)]
    if not measured.result.get("stats"):
        return result | {"skipped": f"the run outside failed: {measured.error}"}
    saved = measured.result["stats"]["eligible_bytes"] // (task["steps"] + task["warmup"])
    # The inflight and prefetch windows are each as large as all that the tiny workload saves.
    most = measured.result["resident_peak_bytes"] if tiny else saved // 2
    limit_bytes = most // _MIB * _MIB
    with limited_group(limit_bytes) as group:
        if not group:
            return result | {"skipped": group.reason}
        for key in ("plain", "run"):
            say(f"limit: inside, {key}")
            ended = step_process(VARIANTS[key], task, group.prefix)
            runs.append(_row(key, True, ended))
    return result | {"saved_bytes": saved, "limit_bytes": limit_bytes}


def _row(key: str, inside: bool, ended: Ended) -> dict[str, Any]:
    return {"variant": key, "inside": inside, "status": ended.status, **ended.result}


def limits(*, directory: str, tiny: bool, say: Callable[[str], None]) -> dict[str, Any]:
    """Train inside groups that limit memory to a third of what a step saves, and to less.

    Args:
        directory: where ``backstash run`` puts its file.
        tiny: the small workload, and one limit that it does not reach, for tests.
        say: called with a line of progress before each process.

    Returns:
        The bytes saved by a step, and for each limit how the run ended, with its losses, its resident peak
        and the most that the group used, page cache included; or why it was skipped.
    """
    task: dict[str, Any] = {
        "workload": "gpt-large-tiny" if tiny else "gpt-long",
        "steps": 1,
        "warmup": 0,
        "directory": directory,
        "min_bytes": TINY_MIN_BYTES if tiny else 64 << 10,
    }
    say("limits: outside, backstash run, for the bytes that a step saves")
    outside = step_process(VARIANTS["run"], task)
    runs = [_row("run", False, outside)]
    result: dict[str, Any] = {"kind": "limits", "tiny": tiny, "runs": runs, "skipped": ""}
    if not outside.result.get("stats"):
        return result | {"skipped": f"the run outside failed: {outside.error}"}
    saved = outside.result["stats"]["eligible_bytes"]
    inside = (
        [("run", 1)] if tiny else [("plain", _SHARES[0]), *(("run", share) for share in _SHARES)]
    )
    for key, share in inside:
        most = outside.result["resident_peak_bytes"] if tiny else saved // share
        limit_bytes = most // _MIB * _MIB
        say(f"limits: {share} times, {key}")
        with limited_group(limit_bytes) as group:
            if not group:
                return result | {"skipped": group.reason}
            row = _row(key, True, step_process(VARIANTS[key], task, group.prefix))
            runs.append(row | {"limit_bytes": limit_bytes, "group_peak_bytes": _peak_of(group)})
    return result | {"saved_bytes": saved}


def _peak_of(group: Group) -> int:
    """The most bytes that the group used; 0 where the system does not count them."""
    for name in ("memory.max_usage_in_bytes", "memory.peak"):
        try:
            return int((group.path / name).read_text())
        except OSError:
            continue
    return 0
