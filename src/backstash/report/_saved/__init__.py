"""What a forward saved for backward: seen at each save, deduplicated by storage, told by module."""

from __future__ import annotations

from .report import SavedReport, saved_report

__all__ = ["SavedReport", "saved_report"]
