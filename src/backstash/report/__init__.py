"""Reports on saved tensors: what backward holds, which module saved it, and where it is stored.

A report is a table, a picture of the graph, a timeline, or an HTML page. This package imports nothing of the
stash: it reads packed objects and events by their attributes.
"""

from __future__ import annotations

from .._torch.dynamo import leave_untraced as _leave_untraced
from ._draw import Drawing, draw
from ._gradient_errors import GradientError, GradientErrors, gradient_errors
from ._page import render_page
from ._saved import SavedReport, saved_report
from ._steps import StepMarks
from ._timeline import Timeline, timeline

__all__ = [
    "Drawing",
    "GradientError",
    "GradientErrors",
    "SavedReport",
    "StepMarks",
    "Timeline",
    "draw",
    "gradient_errors",
    "render_page",
    "saved_report",
    "timeline",
]

_leave_untraced(__name__)
