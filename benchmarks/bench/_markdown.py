"""A table in markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

__all__ = ["markdown"]


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table whose first column is text and whose others are figures."""
    rule = ["---", *("---:" for _ in head[1:])]
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, rule, *rows))
