"""What a stash does, as events for the recordings of it.

Without a recording nothing is paid: each place that could emit an event looks at one attribute first. A
recording gets plain tuples, appended by the thread that acts, and makes records of them when it is read. While
a ``torch.profiler`` runs, ``profiled`` adds moves and stalls to its trace.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal

from torch.autograd import profiler

from .._torch.profiling import is_profiling

__all__ = ["Event", "EventLog", "Recording", "profiled"]

Kind = Literal[
    "save",
    "write",
    "land",
    "return",
    "lose",
    "read",
    "use",
    "free",
    "stall",
    "pack",
    "drop",
    "decode",
]
Levels = tuple[int, int, int, int, int]

_NOTHING: AbstractContextManager[Any] = nullcontext()


def profiled(what: str, module: str = "") -> AbstractContextManager[Any]:
    """A span ``what`` in the trace of ``torch.profiler`` while one runs; else nothing, for one attribute."""
    if is_profiling():
        return profiler.record_function(f"backstash: {what} {module}".rstrip())
    return _NOTHING


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that a stash did, and what its tiers held right after."""

    kind: Kind
    """``"save"``: a new block, in place. ``"write"``: its bytes, or a segment's, went down. ``"land"``: its
    memory was let go. ``"return"``: its write failed and it stays in place. ``"lose"``: it was changed in
    place while on its way. ``"read"``: its bytes came back. ``"use"``: backward was given one of its views.
    ``"free"``: the last that needed it is gone. ``"stall"``: the computing thread waited.
    ``"pack"``: it was made smaller, to ``nbytes``. ``"drop"``: it was let go, to be computed again.
    ``"decode"``: its bytes were made again, from what it was packed to or by its operations."""
    seconds: float
    """When it began, by ``time.perf_counter()``."""
    duration_seconds: float
    """How long it took; 0 for what takes no time."""
    nbytes: int
    """The bytes it is about."""
    block: int
    """Which block, numbered in the order of the saves; -1 for a segment of several small ones."""
    module: str
    """The path of the module that saved the block; ``""`` where it is not known."""
    cause: str
    """For ``"read"``: ``"ahead"`` or ``"demand"``; for ``"stall"``: ``"pack"`` or ``"unpack"``; for a
    ``"save"`` while a backward runs on this thread (recomputation, ``create_graph``): ``"backward"``, and
    its module's path begins where the recomputation does; for ``"decode"``: ``"packed"`` or
    ``"recomputed"``; else ``""``."""
    thread: int
    """``threading.get_ident()`` of the thread that did it."""
    keep_bytes: int
    """In place after it."""
    inflight_bytes: int
    """On the way down after it."""
    host_bytes: int
    """In host memory after it, for accelerators."""
    disk_bytes: int
    """On disk after it."""
    ahead_bytes: int
    """Read back and held after it."""


class Recording:
    """A handle: what happens until ``remove()``, or the end of the context, is in ``events``."""

    def __init__(self, event_log: EventLog, limit: int | None = None) -> None:
        self._event_log = event_log
        self._limit = limit
        self._raw: deque[tuple[Any, ...]] = deque()
        event_log.start(self._hear)

    def _hear(self, told: tuple[Any, ...]) -> None:
        if not self.full:
            self._raw.append(told)
        if self.full:
            self.remove()

    @property
    def full(self) -> bool:
        """Whether it ended by itself, having as many events as it was limited to."""
        return self._limit is not None and len(self._raw) >= self._limit

    @property
    def events(self) -> tuple[Event, ...]:
        """Everything so far, in the order in which it was told."""
        return tuple(Event(*each) for each in self._raw.copy())

    def take(self) -> tuple[Event, ...]:
        """What was recorded since the last call, which is then forgotten."""
        taken = []
        while self._raw:
            taken.append(Event(*self._raw.popleft()))
        return tuple(taken)

    def remove(self) -> None:
        """End the recording; what is recorded stays. A second call does nothing."""
        self._event_log.stop(self._hear)

    def __enter__(self) -> Recording:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.remove()


class EventLog:
    """Where the parts of a stash tell what they do.

    Args:
        levels: gives the bytes in place, in flight, in host memory, on disk and read ahead.
    """

    def __init__(self, levels: Callable[[], Levels]) -> None:
        self.levels = levels
        self._listeners: list[Callable[[tuple[Any, ...]], None]] = []
        self.on = False

    def start(self, listener: Callable[[tuple[Any, ...]], None]) -> None:
        """Call ``listener`` with what happens from now on."""
        self._listeners.append(listener)  # in one step: a signal's handler may begin another
        self.on = True

    def stop(self, listener: Callable[[tuple[Any, ...]], None]) -> None:
        """No longer call ``listener``."""
        with suppress(ValueError):
            self._listeners.remove(listener)
        self.on = bool(self._listeners)

    def emit(
        self,
        kind: Kind,
        nbytes: int,
        block: int = -1,
        module: str = "",
        *,
        cause: str = "",
        began: float | None = None,
    ) -> None:
        """Something happened: now, or from ``began`` to now. Called where ``on`` is true."""
        now = time.perf_counter()
        start = now if began is None else began
        thread = threading.get_ident()
        told = (kind, start, now - start, nbytes, block, module, cause, thread, *self.levels())
        for listener in self._listeners.copy():
            listener(told)
