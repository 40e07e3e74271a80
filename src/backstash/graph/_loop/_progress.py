"""A progress line on a terminal while a long backward runs."""

from __future__ import annotations

import sys
import time
from typing import TextIO

__all__ = ["LoopProgress"]

_FIRST_SECONDS = 2.0
_EVERY_SECONDS = 0.5


class LoopProgress:
    """Shows how many of a loop's steps backward has done.

    Args:
        steps: the number of steps.
        wanted: ``None``: only if stderr is a terminal and backward has taken two seconds. ``True``: from the
            first step on, wherever stderr goes. ``False``: never.
    """

    def __init__(self, steps: int, wanted: bool | None) -> None:
        self._steps = steps
        self._stream: TextIO = sys.stderr
        self._on = self._stream.isatty() if wanted is None else wanted
        self._began = self._shown = time.monotonic()
        self._first = 0.0 if wanted else _FIRST_SECONDS
        self._drawn = False

    def done(self, remaining: int, evaluations: int) -> None:
        """Record that a step was reversed and that ``remaining`` steps are left."""
        if not self._on:
            return
        now = time.monotonic()
        passed, done = now - self._began, self._steps - remaining
        if passed < self._first or (
            now - self._shown < _EVERY_SECONDS and remaining and self._drawn
        ):
            return
        self._shown, self._drawn = now, True
        left = passed / max(done, 1) * remaining
        end = "" if remaining and self._stream.isatty() else "\n"
        begin = "\r" if self._stream.isatty() else ""
        self._stream.write(
            f"{begin}checkpoint_loop: backward {done} of {self._steps} steps, {evaluations} evaluations, "
            f"{passed:.0f} s, about {left:.0f} s to go{end}"
        )
        self._stream.flush()
