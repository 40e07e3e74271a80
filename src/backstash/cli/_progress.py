"""Show what a long command is doing, in one line on a terminal."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import TextIO

__all__ = ["ProgressLine"]

_CLEAR_LINE = "\r\x1b[K"


class ProgressLine:
    """Show the latest message on a terminal, over the one before; print nothing elsewhere.

    Args:
        stream: the stream to write to; ``None``: stderr.
        lines: print each message as a line of its own if the stream is not a terminal.
    """

    def __init__(self, stream: TextIO | None = None, *, lines: bool = False) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._terminal = self._stream.isatty()
        self._lines = lines and not self._terminal

    def __enter__(self) -> ProgressLine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._terminal:
            self._stream.write(_CLEAR_LINE)
            self._stream.flush()

    def say(self, message: str) -> None:
        """Show ``message``."""
        if self._terminal:
            self._stream.write(_CLEAR_LINE + message)
        elif self._lines:
            self._stream.write(message + "\n")
        self._stream.flush()
