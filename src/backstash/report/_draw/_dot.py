"""Render a drawing in the DOT language. Every text is escaped, and each box is a table of texts."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from ._colors import LIGHT, Colors, LegendEntry
from ._records import DrawnGraph, DrawnNode, path_around
from ._text import cells_of, frame_title, headline, relative, shortened, size_line, xml

__all__ = ["FONT", "to_dot"]

FONT = "Courier"
"""The font of all texts. Graphviz knows the width of its characters without any font installed."""

_SMALL = 10
_SPACE = "\u00a0"  # Graphviz drops a plain space at the start of a text
_MOST_LABEL = 44
_MOST_DETAIL = 52
_MOST_CELL = 38
_CAPTION_COLUMNS = 76
_TABLE = '<TABLE BORDER="0" CELLBORDER="0" CELLSPACING="0" CELLPADDING="2">'


def to_dot(drawing: DrawnGraph) -> str:
    """Return the text of one ``digraph``."""
    colors = Colors(drawing)
    text = f"fontname={FONT}"
    lines = [
        "digraph autograd {",
        f"  graph [label=<{_caption(drawing, colors)}>, labelloc=t, labeljust=l];",
        f'  graph [{text}, fontcolor="{LIGHT["ink"]}", bgcolor="{LIGHT["paper"]}", ranksep=0.3];',
        f'  node [{text}, fontcolor="{LIGHT["ink"]}", fontsize=12, shape=box, margin="0.06,0.05"];',
        "  node [height=0];",
        f'  edge [{text}, fontcolor="{LIGHT["muted"]}", fontsize=9, arrowsize=0.6];',
        f'  edge [color="{LIGHT["wire"]}"];',
        *_frames(drawing, colors),
    ]
    for edge in drawing.edges:
        label = f" [label=<{xml(edge.label)}>]" if edge.label else ""
        lines.append(f"  n{edge.source} -> n{edge.target}{label};")
    return "\n".join([*lines, "}", ""])


def _caption(drawing: DrawnGraph, colors: Colors) -> str:
    """Return a table with the size of the graph, the legend, and the notes."""
    first, *rest = headline(drawing)
    rows = [f'<TR><TD ALIGN="LEFT"><FONT POINT-SIZE="14"><B>{xml(first)}</B></FONT></TD></TR>']
    rows += [_note(line) for text in rest for line in textwrap.wrap(text, _CAPTION_COLUMNS)]
    for entries in colors.legend():
        table = f"{_TABLE}<TR>{''.join(map(_legend_entry, entries))}</TR></TABLE>"
        rows.append(f'<TR><TD ALIGN="LEFT">{table}</TD></TR>')
    rows += [
        _note(line) for note in drawing.notes for line in textwrap.wrap(note, _CAPTION_COLUMNS)
    ]
    return f"{_TABLE}{''.join(rows)}</TABLE>"


def _legend_entry(entry: LegendEntry) -> str:
    words = _small(_SPACE + entry.text + _SPACE, entry.ink)
    if entry.is_chip:
        return f'<TD ALIGN="LEFT">{_small("■", entry.color)}{words}</TD>'
    return f'<TD BGCOLOR="{entry.color}" BORDER="1" COLOR="{LIGHT["edge"]}">{words}</TD>'


def _note(line: str) -> str:
    return f'<TR><TD ALIGN="LEFT">{_small(line)}</TD></TR>'


def _frames(drawing: DrawnGraph, colors: Colors) -> Iterator[str]:
    """Yield frames as nested clusters with their boxes, then the boxes outside frames."""
    inside: dict[int | None, list[int]] = {}
    for index, group in enumerate(drawing.groups):
        inside.setdefault(group.parent, []).append(index)
    framed = {node for group in drawing.groups for node in group.nodes}
    ahead = [(index, False) for index in reversed(inside.get(None, []))]
    while ahead:
        index, is_end = ahead.pop()
        if is_end:
            yield "  }"
            continue
        group = drawing.groups[index]
        yield f"  subgraph cluster_{index} {{"
        yield f'    graph [label=<<B>{xml(frame_title(group))}</B>>, fontsize=11, style="rounded,filled"];'
        yield f'    graph [color="{LIGHT["line"]}", fillcolor="{LIGHT["frame"]}", margin=12];'
        for node in group.nodes:
            yield _box(node, drawing, colors, path_around(index, drawing.groups))
        ahead.append((index, True))
        ahead += [(each, False) for each in reversed(inside.get(index, []))]
    for number in range(len(drawing.nodes)):
        if number not in framed:
            yield _box(number, drawing, colors, "")


def _box(index: int, drawing: DrawnGraph, colors: Colors, frame_path: str) -> str:
    node = drawing.nodes[index]
    fill, edge = colors.box(node)
    style = "filled,rounded,dashed" if node.kind == "folded" else "filled,rounded"
    rows = "".join(_rows(node, drawing.color_by == "dtype", colors, frame_path))
    look = f'style="{style}", fillcolor="{fill.color}", color="{edge}"'
    return f"    n{index} [label=<{_TABLE}{rows}</TABLE>>, {look}];"


def _rows(node: DrawnNode, show_dtype: bool, colors: Colors, frame_path: str) -> Iterator[str]:
    """Yield the rows of a box: the heading and size, details, leaves, saved tensors."""
    times = f"{node.repeats:,} x " if node.repeats > 1 else ""
    label = times + shortened(relative(node.label, frame_path), _MOST_LABEL)
    size = size_line(node, show_dtype=show_dtype)
    yield f'<TR><TD ALIGN="LEFT" COLSPAN="3"><B>{xml(label) or " "}</B></TD>'
    yield f'<TD ALIGN="RIGHT">{_small(size)}</TD></TR>'
    details = [node.detail]
    if node.kind == "operation":
        details.append(relative(node.module, frame_path))
    for detail in details:
        if detail and detail != frame_path:
            words = _small(shortened(detail, _MOST_DETAIL))
            yield f'<TR><TD ALIGN="LEFT" COLSPAN="4">{words}</TD></TR>'
    for leaf in node.leaves:
        yield _row("", cells_of(leaf, show_dtype=show_dtype), colors.leaf(leaf))
    for tensor in node.tensors:
        marks = dict.fromkeys(chip.color for chip in colors.chips(tensor))
        chips = "".join(_small("■", color) for color in marks)
        yield _row(chips, cells_of(tensor, show_dtype=show_dtype), colors.band(tensor))


def _row(chips: str, texts: Sequence[str], look: LegendEntry) -> str:
    words = [_small(shortened(text, _MOST_CELL), look.ink) for text in texts]
    if chips:
        words[0] = chips + _small(_SPACE + shortened(texts[0], _MOST_CELL), look.ink)
    aligns = ("LEFT", "LEFT", "RIGHT", "LEFT")
    cells = [
        f'<TD ALIGN="{align}" BGCOLOR="{look.color}">{word}</TD>'
        for align, word in zip(aligns, words, strict=True)
    ]
    return f"<TR>{''.join(cells)}</TR>"


def _small(text: str, color: str = LIGHT["muted"]) -> str:
    return f'<FONT COLOR="{color}" POINT-SIZE="{_SMALL}">{xml(text)}</FONT>' if text else ""
