"""Draw the live line of ``backstash run``: bytes per tier, waits and step time, while a script trains.

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

__all__ = ["Live", "live_parts", "live_text"]

_EVERY_SECONDS = 0.5
_RECENT_STEPS = 20
_LOOKS = 10
_TIERS = ("keep", "inflight", "ahead", "host", "disk")
_STYLES = {PLACES[key].label: PLACES[key].dark for key in _TIERS}
_FIRST_TO_GO = (
    *(PLACES[key].label for key in ("ahead", "inflight")),
    "waited",
    *(PLACES[key].label for key in ("keep", "host", "disk")),
    "",
    "step",
)


class Live:
    """A thread that draws the line twice a second while the figures change, until :meth:`stop`.

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
        """Whether stderr is a terminal that can clear a line and that the script and the line can share."""
        stream = sys.stderr
        if not _is_terminal(stream) or os.environ.get("TERM", "dumb") == "dumb":
            return False
        return hasattr(stream, "__dict__") and (
            sys.stdout is None or hasattr(sys.stdout, "__dict__")
        )

    def stop(self) -> None:
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
            parts = live_parts(looks, list(self._moments[-_RECENT_STEPS - 1 :]), len(self._moments))
            self._line.show(live_text(parts, shutil.get_terminal_size().columns))


def _is_terminal(stream: Any) -> bool:
    try:
        return bool(stream.isatty())
    except (AttributeError, ValueError):  # no stream, one of the script's own, or a closed one
        return False


def live_parts(
    looks: Sequence[Any], recent: Sequence[tuple[float, str]], steps: int
) -> list[tuple[str, str]]:
    """Return the names and values of the line; a tier's value is the most bytes that it held in ``looks``.

    Args:
        looks: the stash's ``stats()`` of the last seconds, newest last.
        recent: when the last steps ended.
        steps: total number of ended steps.
    """
    parts = []
    if steps:
        parts.append(("step", str(steps)))
    if len(recent) > 1:
        ends = [moment for moment, _ in recent]
        parts.append(("", _seconds(statistics.median(b - a for a, b in pairwise(ends)))))
    for key in _TIERS:
        most = max(getattr(each, f"{key}_bytes") for each in looks)
        if most or key != "host":
            parts.append((PLACES[key].label, format_bytes(most)))
    waited = looks[-1].stall_seconds / max(1, steps)
    return [*parts, ("waited", _seconds(waited) + (" a step" if steps else ""))]


def live_text(parts: Sequence[tuple[str, str]], columns: int) -> str:
    """Return the line, in colour if rich is installed; parts that do not fit into ``columns`` are omitted."""
    shown = list(parts)
    for name in _FIRST_TO_GO:
        if len(_plain(shown)) < columns:
            break
        shown = [part for part in shown if part[0] != name]
    if len(_plain(shown)) >= columns:
        return ""
    try:
        from rich.console import Console
        from rich.text import Text
    except ImportError:
        return _plain(shown)
    text = Text()
    text.append("backstash", style="bold")
    for name, value in shown:
        text.append("  ")
        text.append(f"{name} ".lstrip(), style=_STYLES.get(name, "dim"))
        text.append(value)
    file = io.StringIO()
    Console(file=file, force_terminal=True, width=columns).print(text, end="", soft_wrap=True)
    return file.getvalue()


def _plain(parts: Sequence[tuple[str, str]]) -> str:
    return "  ".join(["backstash", *(f"{name} {value}".lstrip() for name, value in parts)])


def _seconds(seconds: float) -> str:
    if seconds and seconds < 0.0995:
        return f"{seconds * 1e3:.3g} ms" if seconds >= 0.001 else "< 1 ms"
    return f"{seconds:.2f} s"
