"""What colours stand for, in rows above the drawing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ._boxes import SMALL_PX, text_width
from ._colors import Colors

if TYPE_CHECKING:
    from ._drawing import Drawing

__all__ = ["Entry", "Legend", "legend_of"]

_KINDS = {
    "operation": ("box operation", "operation"),
    "module": ("box module", "module"),
    "folded": ("box folded", "left out"),
    "parameter": ("box parameter", "parameter"),
    "leaf": ("box leaf", "other leaf"),
    "output": ("box output", "output"),
}
_LINE = 20.0


@dataclass(frozen=True, slots=True)
class Entry:
    """A swatch and its words; places in pixels from the legend's corner."""

    x: float
    y: float
    style: str
    text: str


@dataclass(frozen=True, slots=True)
class Legend:
    """All entries, in rows."""

    entries: tuple[Entry, ...]
    height: float


def legend_of(drawing: Drawing, colors: Colors, width: float) -> Legend:
    """The kinds of boxes that there are, then, on rows of their own, what colours tell."""
    kinds = {node.kind for node in drawing.nodes}
    inside = [leaf for node in drawing.nodes for leaf in node.leaves]
    kinds |= {"parameter" if leaf.is_parameter else "leaf" for leaf in inside}
    boxes = [words for kind, words in _KINDS.items() if kind in kinds]
    if "parameter" not in kinds:
        boxes = [(style, "leaf" if style == "box leaf" else text) for style, text in boxes]
    if any(node.tensors for node in drawing.nodes):
        boxes.append(("band", "saved tensor"))
    entries: list[Entry] = []
    y = 0.0
    for row in (boxes, *colors.legend()):
        x = 0.0
        for style, text in row:
            needed = 18.0 + text_width(text, SMALL_PX)
            if x and x + needed > width:
                x, y = 0.0, y + _LINE
            entries.append(Entry(x, y, style, text))
            x += needed + 18.0
        y += _LINE if row else 0.0
    return Legend(tuple(entries), y)
