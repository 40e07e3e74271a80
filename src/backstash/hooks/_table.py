"""The facts of a summary, and their table."""

from __future__ import annotations

from dataclasses import dataclass

from .._text import clean
from ..units import format_bytes

__all__ = ["Summary", "SummaryRow"]


@dataclass(frozen=True, slots=True)
class SummaryRow:
    """One module."""

    path: str
    """The module's path; the model itself is ``""``."""
    kind: str
    """The module's class."""
    depth: int
    """How many modules the path goes through; 0 for the model."""
    calls: int
    """How often one forward calls it."""
    inputs: str
    """The shapes of its inputs, in the last call."""
    output: str
    """The shapes of its output, in the last call."""
    parameters: int
    """Elements of its own parameters, without its children's."""
    trainable: int
    """Of these, the elements that require a gradient."""
    saved_bytes: int
    """Bytes that its own operations save for backward, without its children's; each storage is counted
    once, where it is first saved; parameters and buffers are not counted."""


@dataclass(frozen=True, slots=True)
class Summary:
    """A model's modules in the order of ``named_modules()``; ``str()`` is the table."""

    rows: tuple[SummaryRow, ...]
    """Every module, once."""

    @property
    def parameters(self) -> int:
        """Elements of all parameters."""
        return sum(row.parameters for row in self.rows)

    @property
    def trainable(self) -> int:
        """Elements of all parameters that require a gradient."""
        return sum(row.trainable for row in self.rows)

    @property
    def saved_bytes(self) -> int:
        """Bytes saved for backward by one forward."""
        return sum(row.saved_bytes for row in self.rows)

    def __str__(self) -> str:
        head = ("module", "class", "input", "output", "parameters", "saved")
        body = [_cells(row) for row in self.rows]
        total = ("total", "", "", "", f"{self.parameters:,}", format_bytes(self.saved_bytes))
        widths = [max(map(len, column)) for column in zip(head, *body, total, strict=True)]
        rule = "  ".join("-" * width for width in widths)
        lines = [_line(head, widths), rule, *(_line(cells, widths) for cells in body), rule]
        return "\n".join([*lines, _line(total, widths)])


def _cells(row: SummaryRow) -> tuple[str, ...]:
    name = "  " * row.depth + (clean(row.path.rpartition(".")[2]) or "(model)")
    times = f" x{row.calls}" if row.calls != 1 else ""
    saved = format_bytes(row.saved_bytes) if row.saved_bytes else ""
    count = f"{row.parameters:,}" if row.parameters else ""
    return (name, row.kind + times, row.inputs, row.output, count, saved)


def _line(cells: tuple[str, ...], widths: list[int]) -> str:
    pairs = list(zip(cells, widths, strict=True))
    left = [cell.ljust(width) for cell, width in pairs[:4]]
    return "  ".join([*left, *(cell.rjust(width) for cell, width in pairs[4:])]).rstrip()
