"""Events that a stash emits, and recordings of them.

Without a recording an event costs one attribute check. With one, the acting thread appends a plain tuple, and
the recording turns the tuples into :class:`Event` objects when it is read. While a ``torch.profiler`` runs,
``profiled`` adds moves and stalls to its trace.
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
    """Return a context that adds a span ``what`` to a running ``torch.profiler``'s trace, or does nothing."""
    if is_profiling():
        return profiler.record_function(f"backstash: {what} {module}".rstrip())
    return _NOTHING


@dataclass(frozen=True, slots=True)
class Event:
    """One action of a stash, and how many bytes each tier held right after it."""

    kind: Kind
    """``"save"``: a new block, in place. ``"write"``: the write of a block or segment to a lower tier.
    ``"land"``: the memory of a written block was freed. ``"return"``: a write failed and the block stays in
    place. ``"lose"``: the block was modified in place before its write completed. ``"read"``: a block or
    segment was loaded. ``"use"``: backward received one of the block's views. ``"free"``: the block's last
    user is gone. ``"stall"``: the computing thread waited. ``"pack"``: the block was packed to ``nbytes``.
    ``"drop"``: the block was freed, to be recomputed. ``"decode"``: the block was decoded or recomputed.
    """
    seconds: float
    """The start time, by ``time.perf_counter()``."""
    duration_seconds: float
    """The duration in seconds; 0 for an instant."""
    nbytes: int
    """The bytes that the event is about."""
    block: int
    """The number of the block, in the order of the saves; -1 for a segment of several small blocks."""
    module: str
    """The path of the module that saved the block; ``""`` if unknown."""
    cause: str
    """For ``"read"``: ``"ahead"`` or ``"demand"``. For ``"stall"``: ``"pack"`` or ``"unpack"``. For
    ``"decode"``: ``"packed"`` or ``"recomputed"``. For a ``"save"`` while a backward runs on this thread
    (recomputation, ``create_graph``): ``"backward"``, and the module path begins where the recomputation does.
    Otherwise ``""``.
    """
    thread: int
    """``threading.get_ident()`` of the acting thread."""
    keep_bytes: int
    """Bytes in place after the event."""
    inflight_bytes: int
    """Bytes being written to a lower tier after the event."""
    host_bytes: int
    """Bytes in host memory after the event, for accelerators."""
    disk_bytes: int
    """Bytes on disk after the event."""
    ahead_bytes: int
    """Bytes loaded and held after the event."""


class Recording:
    """A handle that collects the stash's events until ``remove()`` or the end of the context."""

    def __init__(self, event_log: EventLog, limit: int | None = None) -> None:
        self._event_log = event_log
        self._limit = limit
        self._raw: deque[tuple[Any, ...]] = deque()
        event_log.start(self._note_event)

    def _note_event(self, event: tuple[Any, ...]) -> None:
        if not self.full:
            self._raw.append(event)
        if self.full:
            self.remove()

    @property
    def full(self) -> bool:
        """Whether the recording ended because it reached its limit of events."""
        return self._limit is not None and len(self._raw) >= self._limit

    @property
    def events(self) -> tuple[Event, ...]:
        """All events so far, in the order in which they were emitted."""
        return tuple(Event(*each) for each in self._raw.copy())

    def take(self) -> tuple[Event, ...]:
        """Return the events since the last call, and remove them from the recording."""
        taken = []
        while self._raw:
            taken.append(Event(*self._raw.popleft()))
        return tuple(taken)

    def remove(self) -> None:
        """End the recording and keep its events. A second call does nothing."""
        self._event_log.stop(self._note_event)

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
    """Passes the events of the parts of a stash to its recordings.

    Args:
        levels: returns the bytes in place, in flight, in host memory, on disk, and read ahead.
    """

    def __init__(self, levels: Callable[[], Levels]) -> None:
        self.levels = levels
        self._listeners: list[Callable[[tuple[Any, ...]], None]] = []
        self.on = False

    def start(self, listener: Callable[[tuple[Any, ...]], None]) -> None:
        """Call ``listener`` with each event from now on."""
        self._listeners.append(listener)  # atomic: a signal handler may add another listener
        self.on = True

    def stop(self, listener: Callable[[tuple[Any, ...]], None]) -> None:
        """Stop calling ``listener``."""
        with suppress(ValueError):
            self._listeners.remove(listener)
        self.on = bool(self._listeners)

    @property
    def listeners(self) -> int:
        """How many are called with each event."""
        return len(self._listeners)

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
        """Emit an event that happens now, or that lasted from ``began`` to now. Call it only if ``on``."""
        now = time.perf_counter()
        start = now if began is None else began
        thread = threading.get_ident()
        event = (kind, start, now - start, nbytes, block, module, cause, thread, *self.levels())
        for listener in self._listeners.copy():
            listener(event)
