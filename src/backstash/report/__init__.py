"""Reports on saved tensors: what backward holds, which module saved it, and where it is stored.

A report is a table, a picture of the graph, a timeline, or an HTML page. This package does not import the
stash: it reads packed objects and events by their attributes. Its names are loaded on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from .._torch.dynamo import leave_untraced as _leave_untraced

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

if TYPE_CHECKING:
    from ._draw import Drawing, draw
    from ._gradient_errors import GradientError, GradientErrors, gradient_errors
    from ._page import render_page
    from ._saved import SavedReport, saved_report
    from ._steps import StepMarks
    from ._timeline import Timeline, timeline
else:
    _WHERE = {
        "Drawing": "_draw",
        "GradientError": "_gradient_errors",
        "GradientErrors": "_gradient_errors",
        "SavedReport": "_saved",
        "StepMarks": "_steps",
        "Timeline": "_timeline",
        "draw": "_draw",
        "gradient_errors": "_gradient_errors",
        "render_page": "_page",
        "saved_report": "_saved",
        "timeline": "_timeline",
    }

    def __getattr__(name):
        if name not in _WHERE:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(import_module(f".{_WHERE[name]}", __name__), name)
        _leave_untraced(__name__)
        globals()[name] = value
        return value

    def __dir__():
        return sorted({*globals(), *__all__})
