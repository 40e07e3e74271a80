"""``timeline``, and the :class:`Timeline` that it returns: what a stash does over time."""

from __future__ import annotations

import os
import time
from types import TracebackType
from typing import Any

from .._text import html_text, show_text
from ..errors import UsageError
from ._chrome_trace import write_chrome_trace
from ._levels import Level, Phase, Step
from ._lives import Lives, ModuleUse
from ._page import render_page
from ._steps import StepMarks
from ._timeline_page import facts_of, sections_of
from ._timeline_snapshot import TimelineSnapshot
from ._timeline_text import table

__all__ = ["Timeline", "timeline"]


def timeline(source: Any, *, steps: StepMarks | None = None) -> Timeline:
    """Record what a stash does over time, until ``remove()`` or the end of the context.

    Args:
        source: a stash; or the recording that its ``record()`` returned, which may have ended; or any object
            with ``events``.
        steps: marks of where training steps end, which the caller removes. Default ``None``: a step ends when
            an optimizer has stepped (if there are several, the one seen first) and at ``mark()``.

    Recording takes a few hundred bytes of memory for each event; ``benchmarks/recording_overhead.py`` measures
    its time. While ``torch.profiler`` runs, its trace shows stalls and moves too, with or without a timeline.
    It shows what the stash's own threads write and read only with the profiler's ``experimental_config=``
    ``torch._C._profiler._ExperimentalConfig(profile_all_threads=True)``.

    Raises:
        UsageError: ``source`` has no ``record()`` and no ``events``.

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
    """The handle that :func:`timeline` returns. It can be read during the recording, and faster after its
    end."""

    def __init__(self, recording: Any, marks: StepMarks, *, owns_marks: bool) -> None:
        self._recording = recording
        self._marks = marks
        self._owns_marks = owns_marks
        self._began = time.perf_counter()
        self._ended = False

    def mark(self, label: str = "") -> None:
        """End a step now. ``label`` is its name; the default is its number."""
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
        """All events, in the order of their ends; times are those of ``time.perf_counter()``."""
        return self._read.events

    @property
    def levels(self) -> tuple[Level, ...]:
        """The bytes in each tier after every change."""
        return self._read.levels

    @property
    def steps(self) -> tuple[Step, ...]:
        """The training steps whose end is known."""
        return self._read.steps

    @property
    def phases(self) -> tuple[Phase, ...]:
        """Forward and backward, inferred from saves and uses."""
        return self._read.phases

    @property
    def modules(self) -> tuple[ModuleUse, ...]:
        """What the operations of each module saved, the module that saved most first.

        What a recomputation saves is marked ``(in backward)``; its path begins at the recomputed part. What is
        saved outside any module, or on a thread that runs none, is ``(no module known)``.
        """
        return self._read.modules

    @property
    def lives(self) -> Lives:
        """Where the bytes of each block were over time, with sums by module."""
        return self._read.lives

    @property
    def stalls(self) -> tuple[Any, ...]:
        """The events in which a computing thread waited for the stash, the longest first."""
        return self._read.stalls

    @property
    def began_seconds(self) -> float:
        """When the timeline began, or its first event if that is earlier, by ``time.perf_counter()``."""
        return self._read.began_seconds

    @property
    def memory_peak_bytes(self) -> int:
        """Most bytes that the stash held in the memory of the tensors' own device."""
        return self._read.memory_peak_bytes

    @property
    def saved_peak_bytes(self) -> int:
        """Most bytes that were saved and not yet freed at the same time, on any tier."""
        return self._read.saved_peak_bytes

    @property
    def reads_ahead(self) -> int:
        """Number of reads that the stash began before backward needed them."""
        return self._read.reads_ahead

    @property
    def reads_on_demand(self) -> int:
        """Number of reads that began only when backward needed them."""
        return self._read.reads_on_demand

    @property
    def recomputed_blocks(self) -> int:
        """Number of times that backward recomputed a block."""
        return self._read.made_again("recomputed")

    @property
    def unpacked_blocks(self) -> int:
        """Number of times that backward unpacked a block."""
        return self._read.made_again("packed")

    @property
    def made_again_seconds(self) -> float:
        """Seconds of recomputing and unpacking, without reads and waits."""
        return self._read.made_again_seconds

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences on what is unknown."""
        return self._read.notes

    @property
    def full(self) -> bool:
        """Whether the recording has ended because it reached its limit of events."""
        return self._read.full

    @property
    def _read(self) -> TimelineSnapshot:
        return self._last if self._ended else self._at_present()

    def _at_present(self) -> TimelineSnapshot:
        return TimelineSnapshot(self._recording, tuple(self._marks.moments), self._began)

    # Output.

    def to_chrome_trace(self, path: str | os.PathLike[str]) -> None:
        """Write a Chrome trace to ``path``: JSON that Perfetto and ``chrome://tracing`` open.

        It has a counter for each tier, a track of steps, one of phases, and one for each thread, with stalls on
        the threads that compute, and writes and reads on the threads that made them. Times are microseconds
        since the timeline began. An existing file is replaced.
        """
        write_chrome_trace(self._read, path)

    def sections(self) -> dict[str, Any]:
        """Return the ``curve``, ``modules``, ``stalls`` and ``notes`` for :func:`render_page`."""
        return sections_of(self._read)

    def to_html(
        self, path: str | os.PathLike[str], *, title: str = "timeline", graph: str | None = None
    ) -> None:
        """Write the timeline to ``path`` as one HTML file; see :func:`render_page`.

        Args:
            path: an existing file is replaced.
            title: the heading of the page.
            graph: SVG text that the page shows too, such as ``draw(loss).to_svg()``.
        """
        read = self._read
        parts = {"title": title, "facts": facts_of(read), "graph": graph}
        with open(path, "w", encoding="utf-8") as file:
            file.write(render_page(parts | sections_of(read)))

    def __str__(self) -> str:
        return table(self._read)

    _repr_pretty_ = show_text

    def _repr_html_(self) -> str:
        return html_text(str(self))

    def __repr__(self) -> str:
        return f"Timeline({len(self.events)} events, {len(self.steps)} steps)"
