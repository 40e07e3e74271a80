"""Signals that come while a run is being told of: their handlers are called when that has ended.

The last rank to end tells of all, and launchers and schedulers send signals just then. A handler that raises
(Python's own for Ctrl-C, or one of the script's that calls ``sys.exit``) would end the summary in its middle.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

__all__ = ["SignalsLater"]


class SignalsLater:
    """A context in which the handlers for SIGINT and SIGTERM that are Python's wait for its end.

    A second signal of a kind does not wait: whoever sends it does not want to. Ctrl-C that nobody handles is
    dropped at the end, since the process ends there anyway. Outside the main thread, where no handler is
    called, it does nothing.
    """

    def __init__(self) -> None:
        self._handlers: dict[int, Any] = {}
        self._came: dict[int, FrameType | None] = {}

    def __enter__(self) -> SignalsLater:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                handler = signal.getsignal(number)
                if callable(handler):  # neither the system's nor ignored
                    self._handlers[number] = handler
                    signal.signal(number, self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, handler in self._handlers.items():
            if signal.getsignal(number) == self._note:
                signal.signal(number, handler)
        for number, frame in self._came.items():
            handler = self._handlers[number]
            if handler is not signal.default_int_handler:
                handler(number, frame)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number in self._came:
            self._handlers[number](number, frame)
        else:
            self._came[number] = frame
