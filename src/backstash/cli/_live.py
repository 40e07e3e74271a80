"""The live line of ``backstash run``: bytes per tier, waits and step time, while a script trains."""

from __future__ import annotations

import io
import os
import shutil
import statistics
import sys
import threading
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from ..units import format_bytes
from ._status_line import StatusLine

__all__ = ["Live", "live_parts", "live_text"]

_EVERY_SECONDS = 0.5
_RECENT_STEPS = 20
_STYLES = {"in place": "blue", "on the way": "yellow", "read back": "green", "host": "magenta"}
_FIRST_TO_GO = ("read back", "on the way", "waited", "in place", "host")


class Live:
    """Draws the line twice a second while the figures change; a thread that ends with :meth:`stop`.

    Args:
        stash: whose ``stats()`` are shown.
        moments: of steps, as :class:`backstash.report.StepMarks` has them.
    """

    def __init__(self, stash: Any, moments: Sequence[tuple[float, str]]) -> None:
        self._stash = stash
        self._moments = moments
        self._began = time.perf_counter()
        self._last: Any = None
        streams = [each for each in (sys.stdout, sys.stderr) if each is not None and each.isatty()]
        self._line = StatusLine(sys.stderr, streams)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="backstash live line", daemon=True)
        self._thread.start()

    @staticmethod
    def suits() -> bool:
        """Whether stderr is a terminal that can clear a line, and can be shared with the script."""
        stream = sys.stderr
        if stream is None or not stream.isatty() or os.environ.get("TERM", "dumb") == "dumb":
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
        while not self._ended.wait(_EVERY_SECONDS):
            stats = self._stash.stats()
            now = (stats.saves, stats.read_bytes, stats.blocks, len(self._moments))
            if now == self._last or not stats.saves:
                continue  # the script waits, or asks: the terminal is its own
            self._last = now
            parts = live_parts(stats, list(self._moments[-_RECENT_STEPS - 1 :]), len(self._moments))
            self._line.show(live_text(parts, shutil.get_terminal_size().columns))


def live_parts(
    stats: Any, recent: Sequence[tuple[float, str]], steps: int
) -> list[tuple[str, str]]:
    """What the line says: names and values.

    Args:
        stats: the stash's.
        recent: the ends of the last steps.
        steps: how many there were in all.
    """
    parts = []
    if steps:
        parts.append(("step", str(steps)))
    if len(recent) > 1:
        ends = [moment for moment, _ in recent]
        parts.append(("", _seconds(statistics.median(b - a for a, b in pairwise(ends)))))
    tiers = {
        "in place": stats.keep_bytes,
        "on the way": stats.inflight_bytes,
        "read back": stats.ahead_bytes,
        "host": stats.host_bytes,
        "on disk": stats.disk_bytes,
    }
    parts += [(name, format_bytes(held)) for name, held in tiers.items() if held or name != "host"]
    waited = stats.stall_seconds / max(1, steps)
    return [*parts, ("waited", _seconds(waited) + (" a step" if steps else ""))]


def live_text(parts: Sequence[tuple[str, str]], columns: int) -> str:
    """The line, in colour where rich is installed; what does not fit into ``columns`` is left out."""
    shown = list(parts)
    for name in _FIRST_TO_GO:
        if len(_plain(shown)) < columns:
            break
        shown = [part for part in shown if part[0] != name]
    if len(_plain(shown)) >= columns:
        return _plain(shown)[: max(0, columns - 1)]
    try:
        from rich.console import Console
        from rich.text import Text
    except ImportError:
        return _plain(shown)
    text = Text("backstash", style="bold")
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
