"""Colours, light and dark, and what each of them stands for."""

from __future__ import annotations

__all__ = ["CSS", "DARK", "LIGHT", "NAMES", "PLACES", "SHADES", "place_class"]

PLACES = {
    "in place": "keep",
    "keep": "keep",
    "host": "host",
    "disk": "disk",
    "compressed": "packed",
    "recomputed": "again",
    "freed": "freed",
    "hooks": "hooks",
}
SHADES = 5
"""How many shades there are for bytes."""


def place_class(where: str) -> str:
    """The colour's class for a place; of a place that nobody told us of, that of hooks."""
    for name in ("compressed", *PLACES):
        if name in where:
            return PLACES[name]
    return "hooks"


# text, muted text, paper, lines, frames; boxes; the orange band; chips of places; categories; shades
NAMES = (
    *("ink", "muted", "paper", "line", "frame", "edge", "wire"),
    *("op", "module", "parameter", "parameter-edge", "leaf", "leaf-edge", "output", "output-edge"),
    *("saved", "saved-ink", "saved-edge"),
    *("keep", "host", "disk", "packed", "again", "freed", "hooks"),
    *(f"c{number}" for number in range(8)),
    *(f"s{number}" for number in range(SHADES)),
)
LIGHT = (
    *("#1c2430", "#566173", "#ffffff", "#c3cad4", "#f6f8fa", "#a7b0bd", "#7b8696"),
    *("#eef1f5", "#e3e8ef", "#d6e7fc", "#5a93d6", "#e6defb", "#8b6fd0", "#d3efcf", "#4f9a48"),
    *("#ffe2bd", "#4a2800", "#f0a040"),
    *("#e8710a", "#8b3fd1", "#0a7d78", "#c2247c", "#9a8500", "#a7b0bd", "#39424f"),
    *("#f9d3d0", "#cfe6f7", "#d5efd0", "#f5e6ae", "#e2d6f6", "#fbd5ea", "#cdeee9", "#e4dccd"),
    *("#f3f4f6", "#fde3bd", "#fcc37b", "#f9a54f", "#f28c28"),
)
DARK = (
    *("#e7ebf1", "#a3adbb", "#12161c", "#3b4553", "#191f27", "#5b6778", "#7f8b9c"),
    *("#252d38", "#2c3644", "#173a63", "#4f8fdc", "#372a60", "#8d76d6", "#1c4426", "#58a85a"),
    *("#74430e", "#ffe9cc", "#b8741c"),
    *("#ff9233", "#b98aff", "#2fc2b8", "#ff6db5", "#d9c23a", "#6d7888", "#dfe5ec"),
    *("#552826", "#1b3c54", "#1f4222", "#46390f", "#3c2b60", "#532241", "#173f3a", "#3f382b"),
    *("#252d38", "#47300f", "#5f3c10", "#78490e", "#93560a"),
)


def _values(colors: tuple[str, ...]) -> str:
    pairs = zip(NAMES, colors, strict=True)
    return "".join(f"--g-{name}:{color};" for name, color in pairs)


# A page or a notebook may have a theme of its own, which then counts more than the system's.
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
    plain = [*dict.fromkeys(PLACES.values())]
    chips = "".join(f".bs-graph .{name}{{fill:var(--g-{name})}}\n" for name in plain)
    numbered = [f"c{number}" for number in range(8)] + [f"s{number}" for number in range(SHADES)]
    # More specific than .box, whose colour they replace.
    return chips + "".join(
        f".bs-graph .{name},.bs-graph .box.{name}{{fill:var(--g-{name})}}\n" for name in numbered
    )


CSS = (
    f".bs-graph{{{_values(LIGHT)}}}\n"
    f"@media (prefers-color-scheme:dark){{.bs-graph{{{_values(DARK)}}}}}\n"
    f"{_DARK_PLACES}{{{_values(DARK)}}}\n{_LIGHT_PLACES}{{{_values(LIGHT)}}}"
    f"{_RULES}{_chip_rules()}"
)
"""The style sheet of every drawing; all of it applies only inside ``.bs-graph``."""
