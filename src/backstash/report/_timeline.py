"""``timeline``, and the :class:`Timeline` that it returns: what a stash does over time."""

from __future__ import annotations

import os
import time
from typing import Any

from .._text import html_text, show_text
from ..errors import UsageError
from ._chrome_trace import write_chrome_trace
from ._page import render_page
from ._steps import StepMarks
from ._timeline_figures import TimelineFigures
from ._timeline_page import facts_of, sections_of
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


class Timeline(TimelineFigures):
    """The handle that :func:`timeline` returns. It can be read during the recording, and faster after its
    end."""

    def __init__(self, recording: Any, marks: StepMarks, *, owns_marks: bool) -> None:
        super().__init__(recording, marks.moments, began=time.perf_counter(), ended=False)
        self._marks = marks
        self._owns_marks = owns_marks

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
        self._moments = tuple(self._moments)
        self._ended = True

    def __enter__(self) -> Timeline:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def to_chrome_trace(self, path: str | os.PathLike[str]) -> None:
        """Write a Chrome trace to ``path``: JSON that Perfetto and ``chrome://tracing`` open.

        It has a counter for each tier, a track of steps, one of phases, and one for each thread, with stalls on
        the threads that compute, and writes and reads on the threads that made them. Times are microseconds
        since the timeline began. An existing file is replaced.
        """
        write_chrome_trace(self.at_present(), path)

    def sections(self) -> dict[str, Any]:
        """Return the ``curve``, ``modules``, ``stalls`` and ``notes`` for :func:`render_page`."""
        return sections_of(self.at_present())

    def to_html(
        self, path: str | os.PathLike[str], *, title: str = "timeline", graph: str | None = None
    ) -> None:
        """Write the timeline to ``path`` as one HTML file; see :func:`render_page`.

        Args:
            path: an existing file is replaced.
            title: the heading of the page.
            graph: SVG text that the page shows too, such as ``draw(loss).to_svg()``.
        """
        read = self.at_present()
        parts = {"title": title, "facts": facts_of(read), "graph": graph}
        with open(path, "w", encoding="utf-8") as file:
            file.write(render_page(parts | sections_of(read)))

    def __str__(self) -> str:
        return table(self.at_present())

    _repr_pretty_ = show_text

    def _repr_html_(self) -> str:
        return html_text(str(self))

    def __repr__(self) -> str:
        return f"Timeline({len(self.events)} events, {len(self.steps)} steps)"
