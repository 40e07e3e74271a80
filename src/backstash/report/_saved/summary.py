"""A saved report at one moment, as plain records: what its table and its page are made from."""

from __future__ import annotations

from dataclasses import dataclass

from .advice import Advice, Budget
from .rows import Row, SavedTensorRow
from .waste import Waste

__all__ = ["Details", "Summary"]


@dataclass(frozen=True, slots=True)
class Summary:
    """What the table shows; each field is the report's property of that name."""

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
    """Empty where the table is to be without."""
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Details:
    """What the values have besides. To know the operations, the graphs of all tensors are walked."""

    by_op: tuple[Row, ...]
    by_dtype: tuple[Row, ...]
    budgets: tuple[Budget, ...]
    tensors: tuple[SavedTensorRow, ...]
