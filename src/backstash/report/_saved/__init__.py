"""Report what forward saved for backward: recorded at each save, each storage counted once, summed by
module."""

from __future__ import annotations

from .report import SavedReport, saved_report

__all__ = ["SavedReport", "saved_report"]
