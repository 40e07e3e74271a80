"""Show a line at the bottom of a terminal that a script also writes to.

The script's own output has priority. Any output of the script clears the line. The line is drawn again only
when the script's last output ended with a newline, so that it never overwrites a progress bar or half a line.
To see that, this module wraps ``write`` and ``flush`` of the terminal's streams meanwhile. It does not
see the output of programs that the script starts, which may appear next to the line. ``input()`` begins with a
flush without output: after such a flush, the next call does not draw the line, and the one after does.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from typing import Any, TextIO

__all__ = ["StatusLine"]

_CLEAR = "\r\x1b[K"


class StatusLine:
    """Show one line of text on ``stream``, until :meth:`remove`.

    Args:
        stream: a terminal.
        shared: all streams of the same terminal, including ``stream``.
    """

    def __init__(self, stream: TextIO, shared: Sequence[TextIO]) -> None:
        self._write, self._flush = stream.write, stream.flush
        self._lock = threading.RLock()
        self._pid = os.getpid()
        self._shown = False
        self._free = True  # the script's last output ended a line
        self._asked = False  # the script may be about to ask for input
        self._shared: list[tuple[Any, Any, Any]] = []
        for each in dict.fromkeys(shared):
            self._share(each)

    def show(self, text: str) -> None:
        """Draw ``text``, which fits into the terminal's width, unless the script is in the middle of a line."""
        with self._lock:
            asked, self._asked = self._asked, False
            if self._free and not asked:
                self._write(_CLEAR + text)
                self._flush()
                self._shown = True

    def remove(self) -> None:
        """Clear the line and unwrap the streams. A second call does nothing."""
        with self._lock:
            self._clear()
            for stream, write, flush in self._shared:
                for name, own in (("write", write), ("flush", flush)):
                    if vars(stream).get(name) is own:
                        delattr(stream, name)
            self._shared = []

    def _clear(self) -> None:
        if self._shown and os.getpid() == self._pid:
            self._write(_CLEAR)
            self._flush()
        self._shown = False

    def _share(self, stream: Any) -> None:
        write, flush = stream.write, stream.flush
        written = False

        def shared_write(text: str) -> Any:
            nonlocal written
            if os.getpid() != self._pid:
                return write(text)
            with self._lock:
                self._clear()
                written = True
                if text:
                    self._free = text.endswith("\n")
                return write(text)

        def shared_flush() -> Any:
            nonlocal written
            if os.getpid() == self._pid:
                with self._lock:
                    self._clear()
                    self._asked = self._asked or not written
                    written = False
            return flush()

        vars(stream).update(write=shared_write, flush=shared_flush)
        self._shared.append((stream, shared_write, shared_flush))
