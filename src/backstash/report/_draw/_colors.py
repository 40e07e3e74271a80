"""Choose the colours of boxes and saved tensors, and make the legend and the style sheet."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ...places import PLACES, key_of, label_of
from ...units import format_bytes
from ._records import DrawnGraph, DrawnLeaf, DrawnNode, DrawnTensor
from ._text import shortened

__all__ = ["CSS", "DARK", "LIGHT", "Colors", "LegendEntry"]

_CATEGORIES = 8
_SHADES = 5
_ENTRIES = 4  # in one row of the legend
_KINDS = {
    "operation": ("op", "edge", "operation"),
    "module": ("module", "edge", "module"),
    "folded": ("paper", "edge", "left out"),
    "parameter": ("parameter", "parameter-edge", "parameter"),
    "leaf": ("leaf", "leaf-edge", "leaf"),
    "output": ("output", "output-edge", "output"),
}

# text, muted text, paper, lines, frames; boxes; the orange band; chips of places; categories; shades
_NAMES = (
    *("ink", "muted", "paper", "line", "frame", "edge", "wire"),
    *("op", "module", "parameter", "parameter-edge", "leaf", "leaf-edge", "output", "output-edge"),
    *("saved", "saved-ink", "saved-edge"),
    *PLACES,
    *(f"c{number}" for number in range(_CATEGORIES)),
    *(f"s{number}" for number in range(_SHADES)),
)
_LIGHT = (
    *("#1c2430", "#566173", "#ffffff", "#c3cad4", "#f6f8fa", "#a7b0bd", "#7b8696"),
    *("#eef1f5", "#e3e8ef", "#d6e7fc", "#5a93d6", "#e6defb", "#8b6fd0", "#d3efcf", "#4f9a48"),
    *("#ffe2bd", "#4a2800", "#f0a040"),
    *(place.light for place in PLACES.values()),
    *("#f9d3d0", "#cfe6f7", "#d5efd0", "#f5e6ae", "#e2d6f6", "#fbd5ea", "#cdeee9", "#e4dccd"),
    *("#f3f4f6", "#fde3bd", "#fcc37b", "#f9a54f", "#f28c28"),
)
_DARK = (
    *("#e7ebf1", "#a3adbb", "#12161c", "#3b4553", "#191f27", "#5b6778", "#7f8b9c"),
    *("#252d38", "#2c3644", "#173a63", "#4f8fdc", "#372a60", "#8d76d6", "#1c4426", "#58a85a"),
    *("#74430e", "#ffe9cc", "#b8741c"),
    *(place.dark for place in PLACES.values()),
    *("#552826", "#1b3c54", "#1f4222", "#46390f", "#3c2b60", "#532241", "#173f3a", "#3f382b"),
    *("#252d38", "#47300f", "#5f3c10", "#78490e", "#93560a"),
)


LIGHT = dict(zip(_NAMES, _LIGHT, strict=True))
"""The colours on a light page, by name. The style sheet goes by their values, so equal ones are equal in
``DARK`` too."""
DARK = dict(zip(_NAMES, _DARK, strict=True))
"""The colours on a dark page."""


class LegendEntry(NamedTuple):
    """A colour and what it means."""

    color: str
    text: str
    ink: str = LIGHT["ink"]
    """The colour of the text."""
    is_chip: bool = False
    """Whether the colour is a chip's before the text, and not the one behind it."""


class Colors:
    """The colours of one drawing, as on a light page."""

    def __init__(self, drawing: DrawnGraph) -> None:
        self._by = drawing.color_by
        self._nodes = drawing.nodes
        self._tensors = [tensor for node in drawing.nodes for tensor in node.tensors]
        self._most = max((tensor.nbytes for tensor in self._tensors), default=0)
        self._length = _telling_length(drawing.nodes)
        keys: list[str] = []
        if self._by == "dtype":
            keys = [tensor.dtype for tensor in self._tensors if tensor.dtype]
        elif self._by == "module":
            keys = [self._module_of(node) for node in drawing.nodes if node.module]
        self._categories = {
            key: LIGHT[f"c{number % _CATEGORIES}"] for number, key in enumerate(dict.fromkeys(keys))
        }

    def _module_of(self, node: DrawnNode) -> str:
        return ".".join(node.module.split(".")[: self._length])

    def box(self, node: DrawnNode) -> tuple[LegendEntry, str]:
        """Return the colour of a box with its meaning, and the colour of its border."""
        fill, edge, kind = _KINDS[node.kind]
        entry = LegendEntry(LIGHT[fill], kind)
        if self._by == "module" and node.kind in ("operation", "module") and node.module:
            module = self._module_of(node)
            entry = LegendEntry(self._categories[module], module)
        return entry, LIGHT[edge]

    def leaf(self, leaf: DrawnLeaf) -> LegendEntry:
        """Return the colour of a leaf's row in a box, with its meaning."""
        fill, _, kind = _KINDS["parameter" if leaf.is_parameter else "leaf"]
        return LegendEntry(LIGHT[fill], kind)

    def band(self, tensor: DrawnTensor) -> LegendEntry:
        """Return the colours of a saved tensor's row and of its text, with their meaning."""
        if self._by == "dtype" and tensor.dtype:
            return LegendEntry(self._categories[tensor.dtype], tensor.dtype)
        if self._by == "bytes":
            shade, limit = self._shade(tensor.nbytes)
            text = f"to {format_bytes(limit)}"
            return LegendEntry(LIGHT[f"s{shade}"], text, LIGHT["saved-ink"])
        return LegendEntry(LIGHT["saved"], "saved tensor", LIGHT["saved-ink"])

    def chips(self, tensor: DrawnTensor) -> list[LegendEntry]:
        """Return the places of a saved tensor, unless colours show something else."""
        if self._by in ("dtype", "bytes"):
            return []
        return [
            LegendEntry(LIGHT[key_of(place.where)], label_of(place.where), is_chip=True)
            for place in tensor.places
        ]

    def _shade(self, nbytes: int) -> tuple[int, int]:
        """Return 0 for no bytes, the last shade for the most, and the shade's limit: a quarter of the next
        one's."""
        shade, limit = (_SHADES - 1, self._most) if nbytes else (0, 0)
        while shade > 1 and nbytes <= limit // 4:
            shade, limit = shade - 1, limit // 4
        return shade, limit

    def legend(self) -> list[list[LegendEntry]]:
        """Return short rows with every colour in the drawing: boxes and saved tensors, then places."""
        boxes = [self.box(node)[0] for node in self._nodes]
        boxes += [self.leaf(leaf) for node in self._nodes for leaf in node.leaves]
        tensors = sorted(self._tensors, key=lambda tensor: tensor.nbytes)
        boxes += [self.band(tensor) for tensor in tensors]
        chips = [chip for tensor in tensors for chip in self.chips(tensor)]
        rows = [_by_color(boxes), _by_color(chips)]
        return [row[i : i + _ENTRIES] for row in rows for i in range(0, len(row), _ENTRIES)]


def _by_color(entries: Iterable[LegendEntry]) -> list[LegendEntry]:
    """Return one entry for each colour, with all that it means."""
    texts: dict[LegendEntry, list[str]] = {}
    for entry in dict.fromkeys(entries):
        texts.setdefault(entry._replace(text=""), []).append(entry.text)
    return [entry._replace(text=shortened(", ".join(all_), 40)) for entry, all_ in texts.items()]


def _telling_length(nodes: Sequence[DrawnNode]) -> int:
    """Return how many names to keep of each path so that there are no more modules than colours."""
    paths = [node.module.split(".") for node in nodes if node.module]
    longest = max((len(path) for path in paths), default=1)
    for length in range(longest, 1, -1):
        if len({tuple(path[:length]) for path in paths}) <= _CATEGORIES:
            return length
    return 1


# The theme of a page or a notebook takes precedence over the system's.
_DARK_PLACES = (
    '[data-theme="dark"] .bs-graph,[data-jp-theme-light="false"] .bs-graph,.vscode-dark .bs-graph'
)
_LIGHT_PLACES = (
    '[data-theme="light"] .bs-graph,[data-jp-theme-light="true"] .bs-graph,.vscode-light .bs-graph'
)


def _values(colors: dict[str, str]) -> str:
    return "".join(f"--g-{name}:{color};" for name, color in colors.items())


def _rules() -> str:
    """Return a rule for each colour. A program without support for variables keeps the attribute's colour."""
    return "".join(
        f'.bs-graph [{what}="{color}"]{{{what}:var(--g-{name})}}\n'
        for name, color in LIGHT.items()
        for what in ("fill", "stroke")
    )


CSS = (
    f".bs-graph{{{_values(LIGHT)}}}\n"
    f"@media (prefers-color-scheme:dark){{.bs-graph{{{_values(DARK)}}}}}\n"
    f"{_DARK_PLACES}{{{_values(DARK)}}}\n{_LIGHT_PLACES}{{{_values(LIGHT)}}}\n"
    f"{_rules()}"
)
"""The style sheet of every drawing; it applies only inside ``.bs-graph``."""
