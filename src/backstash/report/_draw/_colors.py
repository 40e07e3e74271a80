"""Which colour a box and a saved tensor get, by what the caller wants colours to tell."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...units import format_bytes
from ._records import DrawnNode, DrawnTensor
from ._style import SHADES, place_class
from ._text import shortened
from ._words import place_name

if TYPE_CHECKING:
    from ._drawing import Drawing

__all__ = ["Colors", "Share"]

_CATEGORIES = 8


@dataclass(frozen=True, slots=True)
class Share:
    """A part of a chip."""

    style: str
    """The class of its colour."""
    part: float
    """How much of the chip: 1.0 is all of it."""


class Colors:
    """The colours of one drawing."""

    def __init__(self, drawing: Drawing) -> None:
        self._by = drawing.color_by
        tensors = [tensor for node in drawing.nodes for tensor in node.tensors]
        self._most = max((tensor.nbytes for tensor in tensors), default=0)
        self._places = list(dict.fromkeys(p.where for each in tensors for p in each.places))
        keys: list[str] = []
        if self._by == "dtype":
            keys = [tensor.dtype for tensor in tensors]
        elif self._by == "module":
            self._length = _telling_length(drawing.nodes)
            keys = [self._module_of(node) for node in drawing.nodes]
        self._keys = list(dict.fromkeys(key for key in keys if key))

    def _module_of(self, node: DrawnNode) -> str:
        return ".".join(node.module.split(".")[: self._length]) if node.module else ""

    def box(self, node: DrawnNode) -> str:
        """The class of a box beside its kind; ``""`` where only the kind counts."""
        if self._by == "module" and node.kind in ("operation", "module"):
            return self._category(self._module_of(node))
        return ""

    def chip(self, tensor: DrawnTensor) -> list[Share]:
        """The parts of a saved tensor's chip."""
        if self._by == "dtype":
            return [Share(self._category(tensor.dtype) or "hooks", 1.0)]
        if self._by == "bytes":
            return [Share(f"s{self._shade(tensor.nbytes)}", 1.0)]
        total = sum(place.nbytes for place in tensor.places)
        known = total > 0
        return [
            Share(
                place_class(place.where),
                place.nbytes / total if known else place.count / tensor.count,
            )
            for place in tensor.places
        ]

    def band(self, tensor: DrawnTensor) -> str:
        """The class of a saved tensor's band; ``""`` for plain orange."""
        return f"s{self._shade(tensor.nbytes)}" if self._by == "bytes" else ""

    def _category(self, key: str) -> str:
        return f"c{self._keys.index(key) % _CATEGORIES}" if key in self._keys else ""

    def _shade(self, nbytes: int) -> int:
        """0 for nothing; the last for the most; each a quarter of the next."""
        shade = SHADES - 1 if nbytes else 0
        while shade > 1 and nbytes * 4 ** (SHADES - shade) <= self._most:
            shade -= 1
        return shade

    def legend(self) -> list[list[tuple[str, str]]]:
        """Classes and words for what the colours tell, in rows."""
        places = [
            (style, ", ".join(dict.fromkeys(map(place_name, wheres))))
            for style, wheres in self._by_class().items()
        ]
        if self._by == "where":
            return [places]
        return [self._legend_of_keys(), *([places] if self._by == "module" else [])]

    def _legend_of_keys(self) -> list[tuple[str, str]]:
        if self._by == "bytes":
            if not self._most:
                return []
            limits = [self._most // 4**step for step in range(SHADES - 2, -1, -1)]
            return [
                (f"s{shade}", f"to {format_bytes(limit)}")
                for shade, limit in zip(range(1, SHADES), limits, strict=True)
            ]
        found = [(self._category(key), shortened(key, 30)) for key in self._keys[:_CATEGORIES]]
        more = len(self._keys) - _CATEGORIES
        return (
            [*found, ("none", f"{more:,} more, in the same colours again")] if more > 0 else found
        )

    def _by_class(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for where in self._places:
            found.setdefault(place_class(where), []).append(where)
        return found


def _telling_length(nodes: Sequence[DrawnNode]) -> int:
    """How many names of a path tell modules apart: as many as there are colours for."""
    paths = [node.module.split(".") for node in nodes if node.module]
    longest = max((len(path) for path in paths), default=1)
    for length in range(longest, 1, -1):
        if len({tuple(path[:length]) for path in paths}) <= _CATEGORIES:
            return length
    return 1
