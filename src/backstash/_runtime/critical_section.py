"""The lock of a stash, and whether the last thread that had it left everything in good order."""

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
    """Moves that this thread makes, or waits for another thread to have made."""

    def __init__(self) -> None:
        self.waits: list[Any] = []
        """The moves whose lock this thread is about to take: a forked process frees it, see `workers`."""


moving = _Moving()
"""Of all stashes of the process."""


class CriticalSection:
    """A context around everything that changes what a stash counts: ``with section.lock, section:``.

    A thread that was ended inside it by an error or an interrupt leaves it *dirty*; then the next thread
    rebuilds all counts and queues before it begins. That works for an interrupt inside these methods too:
    the frame that entered is written down before it changes anything and struck out when it has left in good
    order, so that a frame which no longer runs shows what happened. The lock is one of C, taken by ``with``:
    no interrupt can come between its taking and the block.

    A signal's handler, or a finalizer that the garbage collector runs, may call the stash in the middle of a
    call that this very thread makes: inside the section, inside the store, or in a move that others may wait
    for. Such a call is *nested* (:meth:`is_nested`). What it finds may be half changed, and it can wait for
    nobody, so it takes no lock and writes nothing that is shared: it saves in place, loads to memory of its
    own, and counts in its thread's counters. The lock is re-entrant all the same, so that a handler that
    comes between its taking and the first line inside does not wait for itself.

    Every object of a stash that needs the lock asks this one for it, so that a forked process, which gets a
    new lock, gets it everywhere.
    """

    __slots__ = ("_dirty", "_rebuild", "_store", "_writer", "lock")

    def __init__(self, store: Any = None) -> None:
        self._store = store  # whose lock is taken inside, and perhaps by another stash
        self.lock: Any = threading.RLock()
        self._rebuild: weakref.WeakMethod[Callable[[], None]] | None = None
        self._writer: FrameType | None = (
            None  # the function that is inside, or was interrupted there
        )
        self._dirty = False

    def rebuilt_by(self, rebuild: Callable[[], None]) -> None:
        """A dirty section is put in order by ``rebuild``, a method whose object is not kept alive."""
        self._rebuild = weakref.WeakMethod(rebuild)

    def forked(self) -> None:
        """In a forked process, which holds nothing yet: the thread that held the lock may not be here.

        If a call was inside, it may be this thread's own, forked by a signal's handler: what it goes on to
        count is the other process's, and put in order after it.
        """
        self.lock = threading.RLock()
        self._dirty, self._writer = self._writer is not None, None

    def is_nested(self) -> bool:
        """Whether this thread is in the middle of the stash, its store or a move already."""
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
                return  # a finalizer, in the middle of that one
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
        # Errors of our own are raised where all counts are in order.
        if kind is not None and not issubclass(kind, StashError):
            self._dirty = True
        if self._writer is sys._getframe(1):
            self._writer = None
