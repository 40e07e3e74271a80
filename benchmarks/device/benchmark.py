"""The accelerator's benchmark: the link, every model in every way, the largest that trains, many steps.

Each task is a process of its own. It reports each figure as soon as it has it, and the figure is written to the
result file at once, so a run that is cut off leaves what it measured. A process that hangs is ended at its
deadline; the row it was measuring says so, and the next task begins.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from backstash.memory import spare_bytes

from .plan import Task, plan
from .process import run_reporting
from .sanitizer import sanitized

__all__ = ["device_benchmark"]

_WORKER = Path(__file__).resolve().parent  # this folder: Python runs its __main__.py
_GRACE_SECONDS = 10  # a worker ends by itself when its time is over; beyond this it is ended
_BROKEN = 3  # a worker's status when its device may be broken; a new process does the rest


def device_benchmark(
    device: str,
    *,
    repeats: int,
    steps: int,
    directory: str,
    tiny: bool,
    say: Callable[[str], None],
    seconds: float = 590.0,
    host: int | None = None,
    save: Callable[[dict[str, Any]], None] = lambda section: None,
) -> dict[str, Any]:
    """Run all tasks within ``seconds``; a task that no time was left for says so in the result.

    Args:
        device: ``"cuda"``, or another accelerator; ``"cpu"``, with ``tiny``, for tests.
        repeats: how often each way runs, in turn with the others.
        steps: how many steps are timed each time.
        directory: where the disk tier puts its file.
        tiny: small models, for tests; the figures mean nothing.
        say: called with a line of progress before each part.
        seconds: the time limit of all tasks together.
        host: bytes of pinned host memory for the stashes; ``None``: three quarters of the memory to spare.
        save: called with the section whenever a figure was added to it.

    Returns:
        The section of the result file, which ``table.device_table`` draws.
    """
    until = time.monotonic() + seconds
    section: dict[str, Any] = {
        "kind": "device",
        "tiny": tiny,
        "device": _name(device),
        "cuda": torch.version.cuda,
        "device_bytes": _total_bytes(device),
        "repeats": repeats,
        "steps": steps,
        "seconds": seconds,
        "host_bytes": spare_bytes() * 3 // 4 if host is None else host,
    }
    common = {
        "device": device,
        "directory": directory,
        "repeats": repeats,
        "steps": steps,
        "host_bytes": section["host_bytes"],
    }
    for task in plan(tiny):
        left = until - time.monotonic()
        say(f"{device}: {task.title} ({left:.0f} s left)")
        if left < task.least_seconds:
            _put(section, [*task.path, "failed"], "no time was left")
        else:
            _run(task, common, min(left, task.seconds), section, save)
        save(section)
    left = until - time.monotonic()
    say(f"{device}: compute-sanitizer ({left:.0f} s left)")
    section["sanitizer"] = sanitized(_WORKER, common, min(left, 120.0))
    save(section)
    return section


def _run(
    task: Task,
    common: dict[str, Any],
    seconds: float,
    section: dict[str, Any],
    save: Callable[[dict[str, Any]], None],
) -> None:
    """Run a task; where its process ended early and rows are left, go on in a new process, twice at most."""
    ends = time.monotonic() + seconds

    def record(figure: dict[str, Any]) -> None:
        _put(section, [*task.path, *figure["put"]], figure["value"])
        save(section)

    for _ in range(3):
        left = ends - time.monotonic()
        known = list(_get(section, [*task.path, "rows"]))
        words = common | task.arguments | {"seconds": left - _GRACE_SECONDS, "known": known}
        command = [sys.executable, str(_WORKER), json.dumps(words)]
        status, error = run_reporting(command, record, left)
        if status == 0:
            return
        section.setdefault("ended", []).append(
            {"task": task.title, "status": status, "error": error}
        )
        goes_on = status == _BROKEN or len(_get(section, [*task.path, "rows"])) > len(known)
        if not goes_on or task.arguments["kind"] != "rows":
            _put(section, [*task.path, "failed"], f"status {status}: {error}")
            return
        if ends - time.monotonic() < task.least_seconds:
            return


def _get(section: dict[str, Any], path: list[str]) -> dict[str, Any]:
    found = section
    for name in path:
        found = found.get(name, {})
    return found


def _put(section: dict[str, Any], path: list[str], value: Any) -> None:
    inner = section
    for name in path[:-1]:
        inner = inner.setdefault(name, {})
    inner[path[-1]] = value


def _total_bytes(device: str) -> int:
    if not device.startswith("cuda"):
        return 0
    return int(torch.cuda.get_device_properties(torch.device(device)).total_memory)


def _name(device: str) -> str:
    return torch.cuda.get_device_name(device) if device.startswith("cuda") else device
