"""The records of a saved report at one moment, from which its table, page and JSON are made."""

from __future__ import annotations

from dataclasses import dataclass

from ...advice import Advice
from .budgets import Budget
from .rows import Row, SavedTensorRow
from .waste import Waste

__all__ = ["Details", "SavedSummary"]


@dataclass(frozen=True, slots=True)
class SavedSummary:
    """The content of the table and the page; each field is the property of ``SavedReport`` with that name."""

    total_bytes: int
    unique_bytes: int
    peak_bytes: int
    activation_bytes: int
    recomputed_bytes: int
    rows: tuple[Row, ...]
    folded_rows: tuple[Row, ...]
    by_kind: tuple[Row, ...]
    waste: tuple[Waste, ...]
    advice: tuple[Advice, ...]
    """Empty for a table without advice."""
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Details:
    """Additional content of the JSON. It is slow to make: naming operations walks the graphs of all tensors."""

    by_op: tuple[Row, ...]
    by_dtype: tuple[Row, ...]
    budgets: tuple[Budget, ...]
    tensors: tuple[SavedTensorRow, ...]
