"""Write a timeline as a Chrome trace: JSON that Perfetto and ``chrome://tracing`` open."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from typing import Any

from ..units import format_bytes
from ._levels import TIERS
from ._timeline_figures import TimelineFigures

__all__ = ["write_chrome_trace"]

_STEPS, _PHASES, _THREADS = 1, 2, 3  # track numbers; threads have 3 and up
_WORDS = {
    "pack": "packed to",
    "drop": "discarded, to be recomputed:",
    "decode": "rebuilt",
    "land": "memory freed",
    "return": "write failed, kept in memory",
    "lose": "changed in place while it moved",
}


def write_chrome_trace(line: TimelineFigures, path: str | os.PathLike[str]) -> None:
    """Write the timeline ``line`` to ``path``; an existing file is replaced."""
    pid = os.getpid()
    began = line.began_seconds
    events = [*_tracks(line, pid), *_counters(line, pid, began), *_spans(line, pid, began)]
    events.sort(key=lambda event: (event.get("ts", -1.0), -event.get("dur", 0.0)))
    trace = {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"made by": "backstash", "notes": list(line.notes)},
    }
    with open(path, "w", encoding="utf-8") as file:
        json.dump(trace, file, allow_nan=False)


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 3)


def _numbers(line: TimelineFigures) -> dict[int, int]:
    """Return each thread's track number, in the order in which threads first appear."""
    return {
        thread: _THREADS + at
        for at, thread in enumerate(dict.fromkeys(event.thread for event in line.events))
    }


def _tracks(line: TimelineFigures, pid: int) -> Iterator[dict[str, Any]]:
    """Yield the names of the process and of its tracks."""
    names = {_STEPS: "steps", _PHASES: "forward and backward"}
    known = {thread.ident: thread.name for thread in threading.enumerate()}
    computing = {
        event.thread for event in line.events if event.kind in ("save", "use", "stall", "decode")
    }
    for thread, number in _numbers(line).items():
        kind = "computing" if thread in computing else "worker"
        own = known.get(thread, "")
        names[number] = f"{kind} thread {number - _THREADS + 1}" + (f" ({own})" if own else "")
    yield {"ph": "M", "pid": pid, "tid": 0, "name": "process_name", "args": {"name": "backstash"}}
    for number, name in names.items():
        head = {"ph": "M", "pid": pid, "tid": number}
        yield head | {"name": "thread_name", "args": {"name": name}}
        yield head | {"name": "thread_sort_index", "args": {"sort_index": number}}


def _counters(line: TimelineFigures, pid: int, began: float) -> Iterator[dict[str, Any]]:
    last: dict[str, int] = {}
    for level in line.levels:
        for field, name in TIERS.items():
            held = getattr(level, field)
            if last.get(field, 0) != held:
                last[field] = held
                yield {
                    "ph": "C",
                    "pid": pid,
                    "tid": 0,
                    "name": f"bytes {name}",
                    "ts": _microseconds(level.seconds - began),
                    "args": {"bytes": held},
                }


def _spans(line: TimelineFigures, pid: int, began: float) -> Iterator[dict[str, Any]]:
    for step in line.steps:
        args: dict[str, Any] = {"stall_seconds": step.stall_seconds, "peak_bytes": step.peak_bytes}
        yield _span(pid, _STEPS, f"step {step.label}", "step", _from(step, began), args)
    for phase in line.phases:
        yield _span(pid, _PHASES, phase.name, "phase", _from(phase, began), {})
    numbers = _numbers(line)
    for event in line.events:
        path = line.lives.paths.get(event.block, event.module)
        args = {"module": path or "not known", "bytes": event.nbytes, "block": event.block}
        if event.block < 0:
            args["module"] = "several: a segment of small blocks" if event.nbytes else "not known"
        args |= {"cause": event.cause} if event.cause else {}
        name = f"{_name(event)} {path}".rstrip()
        at = (event.seconds - began, event.duration_seconds)
        yield _span(pid, numbers[event.thread], name, event.kind, at, args)


def _name(event: Any) -> str:
    if event.kind == "stall":
        return (
            "stall: forward waits for space" if event.cause == "pack" else "stall: backward waits"
        )
    return f"{_WORDS.get(event.kind, event.kind)} {format_bytes(event.nbytes)}"


def _from(span: Any, began: float) -> tuple[float, float]:
    return span.begin_seconds - began, span.end_seconds - span.begin_seconds


def _span(
    pid: int, tid: int, name: str, kind: str, at: tuple[float, float], args: dict[str, Any]
) -> dict[str, Any]:
    begin, end = _microseconds(at[0]), _microseconds(at[0] + at[1])
    event = {"name": name, "cat": kind, "pid": pid, "tid": tid, "ts": begin}
    event["args"] = args
    if kind in ("save", "pack", "drop", "use", "free", "land", "return", "lose"):
        return event | {"ph": "i", "s": "t"}
    return event | {"ph": "X", "dur": round(end - begin, 3)}
