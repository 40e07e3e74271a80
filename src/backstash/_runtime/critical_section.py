"""Who writes in the books, and whether the last one left them in good order."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from types import FrameType, TracebackType

from .._torch.modules import is_running
from ..errors import StashError

__all__ = ["CriticalSection"]


class CriticalSection:
    """A context around everything that writes in the books: ``with lock, guard:``.

    A writer that was ended by an error or an interrupt leaves them *torn*; then they are made anew for the
    next one, before it begins. That works for an interrupt that comes in here too: a writer is put down
    before it writes and struck out when it has left in good order, so whoever finds one that runs no more
    knows. The lock itself must be one of C, which no interrupt can come between.
    """

    __slots__ = ("_dirty", "_rebuild", "_writer")

    def __init__(self) -> None:
        self._rebuild: weakref.WeakMethod[Callable[[], None]] | None = None
        self._writer: FrameType | None = None  # the function that writes now, or was interrupted
        self._dirty = False

    def rebuilt_by(self, rebuild: Callable[[], None]) -> None:
        """Books that are torn are made anew by ``rebuild``, a method whose object is not kept alive."""
        self._rebuild = weakref.WeakMethod(rebuild)

    def forget(self) -> None:
        """In a forked process: whoever was writing is not here, and nothing will be written."""
        self._dirty, self._writer = False, None

    def __enter__(self) -> None:
        frame, writer = sys._getframe(1), self._writer
        if writer is not None and writer is not frame and is_running(writer):
            return  # a finalizer, in the middle of that one
        if self._dirty or writer is not None:
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
        # Errors of our own are raised where the books are in order.
        self._dirty = self._dirty or not (kind is None or issubclass(kind, StashError))
        if self._writer is sys._getframe(1):
            self._writer = None
