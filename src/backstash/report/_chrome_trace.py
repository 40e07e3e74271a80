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


_MOMENTS = (
    "save",
    "pack",
    "drop",
    "use",
    "free",
    "land",
    "return",
    "lose",
)  # kinds without a length


def write_chrome_trace(line: TimelineFigures, path: str | os.PathLike[str]) -> None:
    """Write the timeline ``line`` to ``path``; an existing file is replaced."""
    threads = dict.fromkeys(event.thread for event in line.events)
    tracks = {thread: _THREADS + at for at, thread in enumerate(threads)}
    events = [*_names(line, tracks), *_counters(line), *_spans(line, tracks)]
    events.sort(key=lambda event: (event.get("ts", -1.0), -event.get("dur", 0.0)))
    trace = {
        "traceEvents": [{"pid": os.getpid()} | event for event in events],
        "displayTimeUnit": "ms",
        "otherData": {"made by": "backstash", "notes": list(line.notes)},
    }
    with open(path, "w", encoding="utf-8") as file:
        json.dump(trace, file, allow_nan=False)


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 3)


def _names(line: TimelineFigures, tracks: dict[int, int]) -> Iterator[dict[str, Any]]:
    """Yield the names of the process and of its tracks."""
    names = {_STEPS: "steps", _PHASES: "forward and backward"}
    known = {thread.ident: thread.name for thread in threading.enumerate()}
    computing = {
        event.thread for event in line.events if event.kind in ("save", "use", "stall", "decode")
    }
    for thread, number in tracks.items():
        kind = "computing" if thread in computing else "worker"
        own = known.get(thread, "")
        names[number] = f"{kind} thread {number - _THREADS + 1}" + (f" ({own})" if own else "")
    yield {"ph": "M", "tid": 0, "name": "process_name", "args": {"name": "backstash"}}
    for number, name in names.items():
        yield {"ph": "M", "tid": number, "name": "thread_name", "args": {"name": name}}
        order = {"sort_index": number}
        yield {"ph": "M", "tid": number, "name": "thread_sort_index", "args": order}


def _counters(line: TimelineFigures) -> Iterator[dict[str, Any]]:
    last, began = dict.fromkeys(TIERS, 0), line.began_seconds
    for level in line.levels:
        at = _microseconds(level.seconds - began)
        for field, name in TIERS.items():
            held = getattr(level, field)
            if last[field] != held:
                last[field] = held
                args = {"bytes": held}
                yield {"ph": "C", "tid": 0, "name": f"bytes {name}", "ts": at, "args": args}


def _spans(line: TimelineFigures, tracks: dict[int, int]) -> Iterator[dict[str, Any]]:
    began = line.began_seconds
    for step in line.steps:
        args: dict[str, Any] = {"stall_seconds": step.stall_seconds, "peak_bytes": step.peak_bytes}
        begin, end = step.begin_seconds - began, step.end_seconds - began
        yield _span(_STEPS, f"step {step.label}", "step", begin, end, args)
    for phase in line.phases:
        begin, end = phase.begin_seconds - began, phase.end_seconds - began
        yield _span(_PHASES, phase.name, "phase", begin, end, {})
    for event in line.events:
        path = line.lives.paths.get(event.block, event.module)
        args = {"module": path or "not known", "bytes": event.nbytes, "block": event.block}
        if event.block < 0:
            args["module"] = "several: a segment of small blocks" if event.nbytes else "not known"
        args |= {"cause": event.cause} if event.cause else {}
        name, begin = f"{_name(event)} {path}".rstrip(), event.seconds - began
        end = begin + event.duration_seconds
        yield _span(tracks[event.thread], name, event.kind, begin, end, args)


def _name(event: Any) -> str:
    if event.kind == "stall":
        return (
            "stall: forward waits for space" if event.cause == "pack" else "stall: backward waits"
        )
    return f"{_WORDS.get(event.kind, event.kind)} {format_bytes(event.nbytes)}"


def _span(
    tid: int, name: str, kind: str, begin: float, end: float, args: dict[str, Any]
) -> dict[str, Any]:
    at = _microseconds(begin)
    event = {"name": name, "cat": kind, "tid": tid, "ts": at, "args": args}
    if kind in _MOMENTS:
        return event | {"ph": "i", "s": "t"}
    return event | {"ph": "X", "dur": round(_microseconds(end) - at, 3)}
