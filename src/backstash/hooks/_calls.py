"""The calls of a module between the hook at their begin and the hook at their end."""

from __future__ import annotations

import sys
import threading
from typing import Generic, TypeVar

__all__ = ["OpenCalls"]

_T = TypeVar("_T")


class OpenCalls(Generic[_T]):
    """What was recorded at the begin of each call of one module that has not ended.

    Calls on different threads are separate. A module that calls itself ends its innermost call first.
    """

    __slots__ = ("_by_thread",)

    def __init__(self) -> None:
        self._by_thread: dict[int, list[tuple[_T, BaseException | None]]] = {}

    def begin(self, record: _T) -> None:
        """Record that a call begins."""
        handled = sys.exc_info()[1]  # by the program already: not an error of this call
        self._by_thread.setdefault(threading.get_ident(), []).append((record, handled))

    def end(self) -> tuple[_T | None, bool]:
        """Return the record of the call that ends, and whether it raised an error.

        The record is ``None`` if another hook raised before ``begin`` was called. A hook with
        ``always_call=True`` must call this.
        """
        opened = self._by_thread.get(threading.get_ident())
        if not opened:
            return None, False
        record, handled = opened.pop()
        return record, sys.exc_info()[1] is not handled
