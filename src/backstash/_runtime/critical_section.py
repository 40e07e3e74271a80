"""The lock of a stash, and whether the last thread that held it left the stash in a consistent state."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

from .._torch.modules import is_running
from ..errors import StashError
from ..stores._base import is_mine

__all__ = ["CriticalSection", "moving"]


class _Moving(threading.local):
    calls = 0
    """The number of moves that this thread makes, or waits for another thread to make."""

    def __init__(self) -> None:
        self.waits: list[Any] = []
        """The moves whose lock this thread is about to take. A forked process frees them: see `workers`."""


moving = _Moving()
"""Covers all stashes of the process."""


class CriticalSection:
    """A context for all code that changes the counts and queues of a stash: ``with section.lock, section:``.

    If an error or an interrupt ends a thread inside it, the section is *dirty*, and the next thread that
    enters rebuilds all counts and queues first. This also covers an interrupt inside these methods:
    ``__enter__`` records the caller's frame before anything changes, and ``__exit__`` removes it at the end,
    so a recorded frame that no longer runs was interrupted. The lock is implemented in C and taken by
    ``with``, so no interrupt can come between taking the lock and entering the block.

    A signal handler, or a finalizer that the garbage collector runs, may call the stash while the same thread
    is already inside the section, inside the store, or in a move that other threads may wait for. Such a call
    is *nested* (:meth:`is_nested`). It may see half-changed state, and it cannot wait for another thread. So
    it takes no lock and writes nothing that is shared: it saves in place, loads to new memory, and counts in
    its thread's counters. The lock is still re-entrant, so that a handler that runs between taking the lock
    and the first line inside does not wait for itself.

    Every object of a stash that needs the lock gets it from here. So a forked process, which gets a new lock,
    replaces it everywhere.
    """

    __slots__ = ("_dirty", "_rebuild", "_store", "_writer", "lock")

    def __init__(self, store: Any = None) -> None:
        self._store = store  # its lock is taken inside, and perhaps by another stash
        self.lock: Any = threading.RLock()
        self._rebuild: weakref.WeakMethod[Callable[[], None]] | None = None
        self._writer: FrameType | None = None  # the frame that is inside, or was interrupted there
        self._dirty = False

    def rebuilt_by(self, rebuild: Callable[[], None]) -> None:
        """Use ``rebuild``, a bound method whose object is not kept alive, to restore a dirty section."""
        self._rebuild = weakref.WeakMethod(rebuild)

    def forked(self) -> None:
        """Reset the lock in a forked child, where the thread that held it may not exist.

        A call that was inside may belong to this very thread, if a signal handler forked. What that call then
        counts belongs to the parent process, so the section is marked dirty and rebuilt afterwards.
        """
        self.lock = threading.RLock()
        self._dirty, self._writer = self._writer is not None, None

    def is_nested(self) -> bool:
        """Return whether this thread is already inside the stash, its store, or a move."""
        if moving.calls or is_mine(self.lock):
            return True
        if self._store is None:
            return False
        lock = self._store.lock
        return lock is not None and bool(is_mine(lock))

    def __enter__(self) -> None:
        frame, writer = sys._getframe(1), self._writer
        if writer is not None or self._dirty:
            if writer is not None and writer is not frame and is_running(writer):
                return  # this call is a finalizer that interrupted the other frame
            self._dirty, self._writer = True, None
            rebuild = self._rebuild() if self._rebuild is not None else None
            if rebuild is not None:
                rebuild()
            self._dirty = False
        self._writer = frame

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # A StashError is only raised where all counts are consistent.
        if kind is not None and not issubclass(kind, StashError):
            self._dirty = True
        if self._writer is sys._getframe(1):
            self._writer = None
