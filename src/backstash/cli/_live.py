"""Draw the live line of ``backstash run``: step time, bytes per tier and waits, while a script trains.

For each tier the line shows the most bytes in the last ten readings, which are five seconds. The latest reading
alone would flicker, since it depends on whether forward or backward runs.
"""

from __future__ import annotations

import io
import os
import shutil
import statistics
import sys
import threading
from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from ..places import PLACES
from ..units import format_bytes
from ._status_line import StatusLine

__all__ = ["Live", "live_text"]

_EVERY_SECONDS = 0.5
_RECENT_STEPS = 20
_LOOKS = 10
_TIERS = ("keep", "host", "disk")


class Live:
    """A thread that draws the line twice a second while the figures change, until :meth:`remove`.

    Args:
        stash: the stash whose ``stats()`` are shown.
        moments: when each step ended, from :class:`backstash.report.StepMarks`.
    """

    def __init__(self, stash: Any, moments: Sequence[tuple[float, str]]) -> None:
        self._stash = stash
        self._moments = moments
        self._last: Any = None
        streams = [sys.stderr, *([sys.stdout] if _is_terminal(sys.stdout) else [])]
        self._line = StatusLine(sys.stderr, streams)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="backstash live line", daemon=True)
        self._thread.start()

    @staticmethod
    def suits() -> bool:
        """Whether stderr is a terminal that can clear a line."""
        return _is_terminal(sys.stderr) and os.environ.get("TERM", "dumb") != "dumb"

    def remove(self) -> None:
        """Clear the line and end the thread."""
        self._ended.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()
        self._line.remove()

    def _run(self) -> None:
        looks: deque[Any] = deque(maxlen=_LOOKS)
        while not self._ended.wait(_EVERY_SECONDS):
            stats = self._stash.stats()
            now = (stats.saves, stats.read_bytes, stats.blocks, len(self._moments))
            if now == self._last or not stats.saves:
                continue  # the script waits or asks for input: leave the terminal to it
            self._last = now
            looks.append(stats)
            recent, columns = (
                self._moments[-_RECENT_STEPS - 1 :],
                shutil.get_terminal_size().columns,
            )
            self._line.show(live_text(looks, recent, len(self._moments), columns))


def _is_terminal(stream: Any) -> bool:
    return type(stream) is io.TextIOWrapper and not stream.closed and stream.isatty()


def live_text(
    looks: Sequence[Any], recent: Sequence[tuple[float, str]], steps: int, columns: int
) -> str:
    """Return the line, without the last parts if they do not fit into ``columns``. The waits are of a step.

    Args:
        looks: the stash's ``stats()`` of the last seconds, newest last. Of a tier the line has the most bytes.
        recent: when the last steps ended.
        steps: total number of ended steps.
        columns: width of the terminal.
    """
    shown = ["backstash"]
    if steps:
        shown.append(f"step {steps}")
    if len(recent) > 1:
        ends = [moment for moment, _ in recent]
        shown.append(_seconds(statistics.median(b - a for a, b in pairwise(ends))))
    for key in _TIERS:
        most = max(getattr(each, f"{key}_bytes") for each in looks)
        if most or key != "host":
            shown.append(f"{PLACES[key].label} {format_bytes(most)}")
    shown.append(f"waits {_seconds(looks[-1].stall_seconds / max(1, steps))}")
    while shown and len("  ".join(shown)) >= columns:
        shown.pop()
    return "  ".join(shown)


def _seconds(seconds: float) -> str:
    if seconds and seconds < 0.0995:
        return f"{seconds * 1e3:.3g} ms" if seconds >= 0.001 else "< 1 ms"
    return f"{seconds:.2f} s"
