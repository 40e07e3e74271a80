"""What backward holds, who saved it, where it lives: as table, picture, timeline and page.

It imports nothing of the stash: it reads descriptions and events by their attributes.
"""

from __future__ import annotations

from .._torch.dynamo import leave_untraced as _leave_untraced
from ._draw import Drawing, draw
from ._page import render_page
from ._saved import SavedReport, saved_report
from ._steps import StepMarks
from ._timeline import Timeline, timeline

__all__ = [
    "Drawing",
    "SavedReport",
    "StepMarks",
    "Timeline",
    "draw",
    "render_page",
    "saved_report",
    "timeline",
]

_leave_untraced("backstash")
