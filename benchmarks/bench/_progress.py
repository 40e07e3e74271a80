"""Show what a long benchmark is doing: in one line on a terminal, elsewhere in a line for each message."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

__all__ = ["progress"]

_CLEAR_LINE = "\r\x1b[K"


@contextmanager
def progress(stream: TextIO | None = None) -> Iterator[Callable[[str], None]]:
    """Yield a function that shows a message on ``stream`` (``None``: stderr), over the one before."""
    out = sys.stderr if stream is None else stream
    before, after = (_CLEAR_LINE, "") if out.isatty() else ("", "\n")

    def say(message: str) -> None:
        out.write(before + message + after)
        out.flush()

    try:
        yield say
    finally:
        out.write(before)
