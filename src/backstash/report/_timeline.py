"""What a stash did over time: bytes per tier, moves and stalls, by step and by module."""

from __future__ import annotations

import os
import time
from types import TracebackType
from typing import Any

from ..errors import UsageError
from ._chrome_trace import write_chrome_trace
from ._levels import Level, Phase, Step
from ._lives import Lives, ModuleUse
from ._page import render_page
from ._steps import StepMarks
from ._timeline_page import facts_of, sections_of
from ._timeline_snapshot import Snapshot
from ._timeline_text import table

__all__ = ["Timeline", "timeline"]


def timeline(source: Any, *, steps: StepMarks | None = None) -> Timeline:
    """Follow what a stash does: a handle that records until ``remove()``, or the end of its context.

    Args:
        source: a stash, or what its ``record()`` returned, also one that has ended: anything with ``events``.
        steps: where steps end. ``None``: where an optimizer has stepped (the first that is seen, where there
            are several), and where ``mark()`` says so. Marks that are given here stay the caller's to remove.

    Recording costs some hundred bytes of memory an event; see ``benchmarks/recording_overhead.py`` for its
    time. While ``torch.profiler`` runs, stalls and moves are in its trace too, with a timeline or without.

    Raises:
        UsageError: ``source`` has neither ``record()`` nor ``events``.

    >>> import tempfile, torch
    >>> from backstash import Stash
    >>> x = torch.randn(300, 300, requires_grad=True)
    >>> with tempfile.TemporaryDirectory() as directory, Stash(disk=directory) as stash:
    ...     with timeline(stash) as line:
    ...         x.exp().sum().backward()
    ...         line.mark("the only step")
    >>> line.saved_peak_bytes, [step.label for step in line.steps]
    (360000, ['the only step'])
    """
    recording = source.record() if hasattr(source, "record") else source
    if not hasattr(recording, "events"):
        raise UsageError(
            f"timeline({source!r}): allowed is a stash, or what stash.record() returned"
        )
    return Timeline(recording, StepMarks() if steps is None else steps, owns_marks=steps is None)


class Timeline:
    """What :func:`timeline` returns; it can be read while it records, and is cheapest after its end."""

    def __init__(self, recording: Any, marks: StepMarks, *, owns_marks: bool) -> None:
        self._recording = recording
        self._marks = marks
        self._owns_marks = owns_marks
        self._began = time.perf_counter()
        self._ended = False

    def mark(self, label: str = "") -> None:
        """A step ends now; ``label`` names it, and its number does where there is none."""
        self._marks.mark(label)

    def remove(self) -> None:
        """End the recording. A second call does nothing."""
        if self._ended:
            return
        if self._owns_marks:
            self._marks.remove()
        if hasattr(self._recording, "remove"):
            self._recording.remove()
        self._ended = True
        self._last = self._at_present()

    def __enter__(self) -> Timeline:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.remove()

    # What was recorded.

    @property
    def events(self) -> tuple[Any, ...]:
        """Every event, in the order in which they ended; ``seconds`` are those of ``time.perf_counter()``."""
        return self._read.events

    @property
    def levels(self) -> tuple[Level, ...]:
        """What the tiers held, whenever that changed."""
        return self._read.levels

    @property
    def steps(self) -> tuple[Step, ...]:
        """The steps whose end is known."""
        return self._read.steps

    @property
    def phases(self) -> tuple[Phase, ...]:
        """Forward and backward, as saves and uses tell them apart."""
        return self._read.phases

    @property
    def modules(self) -> tuple[ModuleUse, ...]:
        """What each module saved; the one that saved most is first."""
        return self._read.modules

    @property
    def lives(self) -> Lives:
        """The life of each block."""
        return self._read.lives

    @property
    def stalls(self) -> tuple[Any, ...]:
        """The events in which a computing thread waited, the longest first."""
        return self._read.stalls

    @property
    def began_seconds(self) -> float:
        """When it began, or its first event where that is earlier."""
        return self._read.began_seconds

    @property
    def memory_peak_bytes(self) -> int:
        """The most that the stash held in the tensors' own memory."""
        return self._read.memory_peak_bytes

    @property
    def saved_peak_bytes(self) -> int:
        """The most that was saved and still needed at once, wherever it was."""
        return self._read.saved_peak_bytes

    @property
    def reads_ahead(self) -> int:
        """Reads that were asked for before backward needed them."""
        return self._read.reads_ahead

    @property
    def reads_on_demand(self) -> int:
        """Reads that backward had to ask for itself."""
        return self._read.reads_on_demand

    @property
    def notes(self) -> tuple[str, ...]:
        """What could not be known, in sentences."""
        return self._read.notes

    @property
    def full(self) -> bool:
        """Whether the recording ended by itself, at its limit."""
        return self._read.full

    @property
    def _read(self) -> Snapshot:
        return self._last if self._ended else self._at_present()

    def _at_present(self) -> Snapshot:
        return Snapshot(self._recording, tuple(self._marks.moments), self._began)

    # What is made of it.

    def to_chrome_trace(self, path: str | os.PathLike[str]) -> None:
        """Write a Chrome trace, JSON that Perfetto and ``chrome://tracing`` open.

        It has a counter for each tier, a track of steps and one of phases, and a track for each thread: stalls
        on the computing ones, writes and reads where they ran. Times are microseconds from the beginning.
        """
        write_chrome_trace(self._read, path)

    def plot(self) -> Any:
        """One picture, as a ``matplotlib.figure.Figure``. In a notebook it shows itself.

        Raises ``ImportError`` with the line that installs matplotlib, where there is none.
        """
        from ._timeline_plot import plot

        return plot(self._read)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write :meth:`plot`'s picture to ``path``, whose name ends in ``.png``, ``.svg`` or ``.pdf``.

        Raises:
            UsageError: the name ends otherwise.
            ImportError: matplotlib is not installed; the message says how.
        """
        suffix = os.path.splitext(path)[1].lower()
        if suffix not in (".png", ".svg", ".pdf"):
            raise UsageError(
                f"save({os.fspath(path)!r}): allowed are names that end in .png, .svg or .pdf; "
                "to_chrome_trace(path) writes JSON"
            )
        self.plot().savefig(path, format=suffix[1:], dpi=150)

    def sections(self) -> dict[str, Any]:
        """``curve``, ``modules``, ``stalls`` and ``notes``, as plain values for :func:`render_page`."""
        return sections_of(self._read)

    def to_html(
        self, path: str | os.PathLike[str], *, title: str = "timeline", graph: str | None = None
    ) -> None:
        """Write the page of this timeline: one HTML file that needs nothing else. See :func:`render_page`.

        Args:
            title: the page's heading.
            graph: SVG text to show too, such as ``draw(loss).to_svg()``.
        """
        read = self._read
        parts = {"title": title, "facts": facts_of(read), "graph": graph}
        with open(path, "w", encoding="utf-8") as file:
            file.write(render_page(parts | sections_of(read)))

    def __str__(self) -> str:
        return table(self._read)

    def __repr__(self) -> str:
        return f"Timeline({len(self.events)} events, {len(self.steps)} steps)"
