"""A drawing: records, and the texts that show them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from ...errors import UsageError
from ._dot import to_dot
from ._page import to_page
from ._records import DrawnEdge, DrawnGroup, DrawnNode, Place
from ._svg import to_svg
from ._words import headline

__all__ = ["Drawing"]


@dataclass(frozen=True, slots=True, repr=False)
class Drawing:
    """A graph as it is drawn. It holds no tensor and no node, so it keeps no memory of the graph alive.

    A notebook shows it as a picture.
    """

    nodes: tuple[DrawnNode, ...]
    """The boxes: those of nodes in the order of forward, then leaves, then outputs."""
    edges: tuple[DrawnEdge, ...]
    """From what makes something to what uses it."""
    groups: tuple[DrawnGroup, ...]
    """The frames, outer ones first."""
    notes: tuple[str, ...]
    """What was folded, inferred, or cannot be known, in sentences."""
    color_by: str
    """What colours tell: ``"where"``, ``"module"``, ``"dtype"`` or ``"bytes"``."""
    graph_nodes: int
    """How many nodes the graph has, leaves included."""
    saved: int
    """How many tensors are saved in it."""
    saved_bytes: int
    """Bytes of their elements, as often as they are saved, where they are known."""
    unique_bytes: int
    """The same with shared memory counted once and leaves' memory left out."""
    leaf_bytes: int
    """Memory of leaves that is saved: it would be there without a graph too."""
    places: tuple[Place, ...]
    """Where the saved tensors live now, most bytes first."""

    def to_dot(self) -> str:
        """The drawing in the DOT language, saved tensors as boxes of their own; for ``dot -Tpdf``."""
        return to_dot(self)

    def to_svg(self) -> str:
        """The drawing as SVG text that needs nothing else: no font, no network, no ``dot``."""
        return to_svg(self)

    def to_html(self) -> str:
        """The drawing as a page of HTML that needs nothing else."""
        return to_page(self)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the drawing to a file, as what its name ends in says: ``.svg``, ``.html`` or ``.dot``.

        Returns:
            The path.

        Raises:
            UsageError: the name ends in something else; nothing was written.
        """
        file = Path(path)
        make = {".svg": self.to_svg, ".html": self.to_html, ".htm": self.to_html}
        make |= {".dot": self.to_dot, ".gv": self.to_dot}
        if file.suffix.lower() not in make:
            raise UsageError(
                f"save({os.fspath(path)!r}): allowed are names that end in .svg, .html or .dot; other "
                "formats come from the .dot by graphviz"
            )
        file.write_text(make[file.suffix.lower()](), encoding="utf-8")
        return file

    def _repr_html_(self) -> str:
        return f'<div style="overflow:auto;max-height:80vh">{self.to_svg()}</div>'

    def __repr__(self) -> str:
        return (
            f"<Drawing of {self.graph_nodes:,} nodes as {len(self.nodes):,} boxes; save() shows it>"
        )

    def __str__(self) -> str:
        drawn = f"drawn as {len(self.nodes):,} box{'es' if len(self.nodes) != 1 else ''}"
        first, *rest = headline(self)
        return "\n".join([f"{first}, {drawn}", *rest, *self.notes])
