"""Choose the colours of boxes and saved tensors, and make the legend and the style sheet."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass

from ...places import PLACES, key_of, label_of
from ...units import format_bytes
from ._boxes import SMALL_PX, text_width
from ._records import DrawnGraph, DrawnNode, DrawnTensor
from ._text import shortened

__all__ = [
    "CSS",
    "DARK",
    "LIGHT",
    "NAMES",
    "SHADES",
    "Colors",
    "Legend",
    "LegendEntry",
    "Share",
    "attributes",
    "legend_of",
]

_CATEGORIES = 8
_KINDS = {
    "operation": ("box operation", "operation"),
    "module": ("box module", "module"),
    "folded": ("box folded", "left out"),
    "parameter": ("box parameter", "parameter"),
    "leaf": ("box leaf", "other leaf"),
    "output": ("box output", "output"),
}
_LINE = 20.0
SHADES = 5
"""Number of shades for bytes."""


@dataclass(frozen=True, slots=True)
class Share:
    """A part of a chip."""

    style: str
    """The class of its colour."""
    part: float
    """Its share of the chip, from 0 to 1."""


class Colors:
    """The colours of one drawing."""

    def __init__(self, drawing: DrawnGraph) -> None:
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
        """Return the class of a box in addition to its kind; ``""`` if only the kind counts."""
        if self._by == "module" and node.kind in ("operation", "module"):
            return self._category(self._module_of(node))
        return ""

    def chip(self, tensor: DrawnTensor) -> list[Share]:
        """Return the parts of a saved tensor's chip."""
        if self._by == "dtype":
            return [Share(self._category(tensor.dtype) or "hooks", 1.0)]
        if self._by == "bytes":
            return [Share(f"s{self._shade(tensor.nbytes)}", 1.0)]
        total = sum(place.nbytes for place in tensor.places)
        known = total > 0
        return [
            Share(
                key_of(place.where),
                place.nbytes / total if known else place.count / tensor.count,
            )
            for place in tensor.places
        ]

    def band(self, tensor: DrawnTensor) -> str:
        """Return the class of a saved tensor's band; ``""`` for plain orange."""
        return f"s{self._shade(tensor.nbytes)}" if self._by == "bytes" else ""

    def _category(self, key: str) -> str:
        return f"c{self._keys.index(key) % _CATEGORIES}" if key in self._keys else ""

    def _shade(self, nbytes: int) -> int:
        """Return 0 for no bytes, the last shade for the most; each shade's limit is a quarter of the next
        one's."""
        shade = SHADES - 1 if nbytes else 0
        while shade > 1 and nbytes * 4 ** (SHADES - shade) <= self._most:
            shade -= 1
        return shade

    def legend(self) -> list[list[tuple[str, str]]]:
        """Return classes and texts for what the colours show, in rows."""
        places = [
            (style, ", ".join(dict.fromkeys(map(label_of, wheres))))
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
            found.setdefault(key_of(where), []).append(where)
        return found


def _telling_length(nodes: Sequence[DrawnNode]) -> int:
    """Return how many names to keep of each path so that there are no more modules than colours."""
    paths = [node.module.split(".") for node in nodes if node.module]
    longest = max((len(path) for path in paths), default=1)
    for length in range(longest, 1, -1):
        if len({tuple(path[:length]) for path in paths}) <= _CATEGORIES:
            return length
    return 1


@dataclass(frozen=True, slots=True)
class LegendEntry:
    """A swatch and its text, in pixels from the legend's corner."""

    x: float
    y: float
    style: str
    text: str


@dataclass(frozen=True, slots=True)
class Legend:
    """All entries, in rows."""

    entries: tuple[LegendEntry, ...]
    height: float


def legend_of(drawing: DrawnGraph, colors: Colors, width: float) -> Legend:
    """Return the legend: the kinds of boxes in the drawing, then, on separate rows, what the colours show."""
    kinds = {node.kind for node in drawing.nodes}
    inside = [leaf for node in drawing.nodes for leaf in node.leaves]
    kinds |= {"parameter" if leaf.is_parameter else "leaf" for leaf in inside}
    boxes = [words for kind, words in _KINDS.items() if kind in kinds]
    if "parameter" not in kinds:
        boxes = [(style, "leaf" if style == "box leaf" else text) for style, text in boxes]
    if any(node.tensors for node in drawing.nodes):
        boxes.append(("band", "saved tensor"))
    entries: list[LegendEntry] = []
    y = 0.0
    for row in (boxes, *colors.legend()):
        x = 0.0
        for style, text in row:
            needed = 18.0 + text_width(text, SMALL_PX)
            if x and x + needed > width:
                x, y = 0.0, y + _LINE
            entries.append(LegendEntry(x, y, style, text))
            x += needed + 18.0
        y += _LINE if row else 0.0
    return Legend(tuple(entries), y)


# text, muted text, paper, lines, frames; boxes; the orange band; chips of places; categories; shades
NAMES = (
    *("ink", "muted", "paper", "line", "frame", "edge", "wire"),
    *("op", "module", "parameter", "parameter-edge", "leaf", "leaf-edge", "output", "output-edge"),
    *("saved", "saved-ink", "saved-edge"),
    *PLACES,
    *(f"c{number}" for number in range(8)),
    *(f"s{number}" for number in range(SHADES)),
)
LIGHT = (
    *("#1c2430", "#566173", "#ffffff", "#c3cad4", "#f6f8fa", "#a7b0bd", "#7b8696"),
    *("#eef1f5", "#e3e8ef", "#d6e7fc", "#5a93d6", "#e6defb", "#8b6fd0", "#d3efcf", "#4f9a48"),
    *("#ffe2bd", "#4a2800", "#f0a040"),
    *(place.light for place in PLACES.values()),
    *("#f9d3d0", "#cfe6f7", "#d5efd0", "#f5e6ae", "#e2d6f6", "#fbd5ea", "#cdeee9", "#e4dccd"),
    *("#f3f4f6", "#fde3bd", "#fcc37b", "#f9a54f", "#f28c28"),
)
DARK = (
    *("#e7ebf1", "#a3adbb", "#12161c", "#3b4553", "#191f27", "#5b6778", "#7f8b9c"),
    *("#252d38", "#2c3644", "#173a63", "#4f8fdc", "#372a60", "#8d76d6", "#1c4426", "#58a85a"),
    *("#74430e", "#ffe9cc", "#b8741c"),
    *(place.dark for place in PLACES.values()),
    *("#552826", "#1b3c54", "#1f4222", "#46390f", "#3c2b60", "#532241", "#173f3a", "#3f382b"),
    *("#252d38", "#47300f", "#5f3c10", "#78490e", "#93560a"),
)


def _values(colors: tuple[str, ...]) -> str:
    pairs = zip(NAMES, colors, strict=True)
    return "".join(f"--g-{name}:{color};" for name, color in pairs)


# The theme of a page or a notebook takes precedence over the system's.
_DARK_PLACES = (
    '[data-theme="dark"] .bs-graph,[data-jp-theme-light="false"] .bs-graph,.vscode-dark .bs-graph'
)
_LIGHT_PLACES = (
    '[data-theme="light"] .bs-graph,[data-jp-theme-light="true"] .bs-graph,.vscode-light .bs-graph'
)
_RULES = """
.bs-graph{font-family:ui-monospace,"SF Mono",Menlo,Consolas,"DejaVu Sans Mono","Liberation Mono",monospace}
.bs-graph text{fill:var(--g-ink);white-space:pre}
.bs-graph .paper{fill:var(--g-paper)}
.bs-graph .label{font-size:12.5px;font-weight:600}
.bs-graph .head{font-size:14px;font-weight:600}
.bs-graph .small,.bs-graph .row{font-size:10.5px}
.bs-graph .note{font-size:11.5px}
.bs-graph text.small,.bs-graph text.note{fill:var(--g-muted)}
.bs-graph text.row{fill:var(--g-saved-ink)}
.bs-graph text.row.of-leaf{fill:var(--g-ink)}
.bs-graph .frame{fill:var(--g-frame);stroke:var(--g-line)}
.bs-graph .title{font-size:11.5px;font-weight:600}
.bs-graph .box{fill:var(--g-op);stroke:var(--g-edge)}
.bs-graph .box.module{fill:var(--g-module)}
.bs-graph .box.folded{fill:var(--g-paper);stroke-dasharray:4 3}
.bs-graph .box.parameter,.bs-graph .band.parameter{fill:var(--g-parameter);stroke:var(--g-parameter-edge)}
.bs-graph .box.leaf,.bs-graph .band.leaf{fill:var(--g-leaf);stroke:var(--g-leaf-edge)}
.bs-graph .box.output{fill:var(--g-output);stroke:var(--g-output-edge)}
.bs-graph .band{fill:var(--g-saved);stroke:none}
.bs-graph .band.parameter,.bs-graph .band.leaf{stroke:none}
.bs-graph .chip{stroke:var(--g-saved-ink);stroke-width:.6}
.bs-graph .swatch{stroke:var(--g-edge)}
.bs-graph .none{fill:none;stroke:none}
.bs-graph .wire{fill:none;stroke:var(--g-wire);stroke-width:1.2}
.bs-graph .arrow{fill:var(--g-wire)}
.bs-graph .on-wire{font-size:9.5px;paint-order:stroke;stroke:var(--g-paper);stroke-width:4px}
.bs-graph text.on-wire{fill:var(--g-muted)}
"""


def _chip_rules() -> str:
    chips = "".join(f".bs-graph .{key}{{fill:var(--g-{key})}}\n" for key in PLACES)
    numbered = [f"c{number}" for number in range(8)] + [f"s{number}" for number in range(SHADES)]
    # These selectors are more specific than .box, whose colour they replace.
    return chips + "".join(
        f".bs-graph .{name},.bs-graph .box.{name}{{fill:var(--g-{name})}}\n" for name in numbered
    )


CSS = (
    f".bs-graph{{{_values(LIGHT)}}}\n"
    f"@media (prefers-color-scheme:dark){{.bs-graph{{{_values(DARK)}}}}}\n"
    f"{_DARK_PLACES}{{{_values(DARK)}}}\n{_LIGHT_PLACES}{{{_values(LIGHT)}}}"
    f"{_RULES}{_chip_rules()}"
)
"""The style sheet of every drawing; it applies only inside ``.bs-graph``."""


def _parsed() -> list[tuple[tuple[int, int, int], str, frozenset[str], dict[str, str]]]:
    """Return the rules' specificity, element, classes and declarations, with the light theme's colours."""
    light = dict(zip(NAMES, LIGHT, strict=True))
    found = []
    for order, (selectors, body) in enumerate(
        re.findall(r"([^{}]+){([^{}]*)}", _RULES + _chip_rules())
    ):
        plain = re.sub(r"var\(--g-([\w-]+)\)", lambda match: light[match[1]], body)
        given = dict(each.split(":", 1) for each in plain.split(";"))
        given.pop("white-space", None)
        if given.pop("paint-order", None):  # without paint-order the halo would hide the text
            given = {name: value for name, value in given.items() if "stroke" not in name}
        for selector in selectors.strip().split(","):
            element, *classes = selector.removeprefix(".bs-graph").strip().split(".")
            found.append(((len(classes), bool(element), order), element, frozenset(classes), given))
    return sorted(found, key=lambda rule: rule[0])


@functools.cache
def attributes(element: str, classes: str) -> str:
    """Return an element's style as attributes, in the light theme's colours.

    Programs without support for CSS variables or style sheets (librsvg, Inkscape, converters) use them. In a
    browser the style sheet, which has both themes, takes precedence.
    """
    names = set(classes.split())
    given: dict[str, str] = {}
    for _, wanted, needed, declared in _PARSED:
        if wanted in ("", element) and needed <= names:
            given |= declared
    family = given.pop("font-family", None)
    shown = {
        name: value for name, value in given.items() if element == "text" or "font" not in name
    }
    if element == "text" and family is not None:
        shown["font-family"] = family.replace('"', "'")
    return "".join(f' {name}="{value}"' for name, value in sorted(shown.items()))


_PARSED = _parsed()
