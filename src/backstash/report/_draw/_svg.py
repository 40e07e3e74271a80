"""Render a drawing as SVG, one self-contained element with its own style sheet; and as a page."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from ._boxes import BoxText, Text, measure, text_width
from ._colors import CSS, Colors, Legend, attributes, legend_of
from ._layout import Layout, Rectangle, Wire, lay_out
from ._records import DrawnGraph, DrawnGroup, DrawnLeaf, DrawnNode, DrawnTensor
from ._text import bytes_of, headline, joined_shape, places_of, same_words, shortened, wrapped, xml

__all__ = ["placed", "to_page", "to_svg"]

_MARGIN = 20.0
_LEAST_WIDTH = 460.0
_TITLE_PX = 11.5
_HEAD_PX = 14.0
_WIRE_PX = 9.5
_NOTE_LINE = 16.0
_MOST_TITLE = 60
_CLASSES = re.compile(r'<(rect|text|path) class="([^"]*)"')


def to_svg(drawing: DrawnGraph) -> str:
    """Return the text of one ``<svg>`` element."""
    texts, layout = placed(drawing)
    colors = Colors(drawing)
    width = max(layout.width, _LEAST_WIDTH)
    legend = legend_of(drawing, colors, width)
    head = _head(drawing, width)
    top = _MARGIN + len(head) * 20.0 + legend.height + 24.0
    notes = _notes(drawing, width)
    height = top + layout.height + 18.0 + len(notes) * _NOTE_LINE + _MARGIN
    full = width + 2 * _MARGIN
    left = _MARGIN + (width - layout.width) / 2
    lines = "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" class="bs-graph" width="{_n(full)}" '
            f'height="{_n(height)}" viewBox="0 0 {_n(full)} {_n(height)}" role="img" '
            f'aria-label="{xml(headline(drawing)[0])}" xml:space="preserve">',
            f"<style>{CSS}</style>",
            f'<rect class="paper" width="{_n(full)}" height="{_n(height)}" rx="8"/>',
            *_head_lines(head),
            *_legend_lines(legend, _MARGIN + len(head) * 20.0 + 8.0),
            f'<g transform="translate({_n(left)} {_n(top)})">',
            *_frame_lines(drawing.groups, layout),
            *(line for wire in layout.wires for line in _wire_lines(wire)),
            *_label_lines(layout),
            *_box_lines(drawing.nodes, texts, layout, colors),
            "</g>",
            *_note_lines(notes, top + layout.height + 18.0),
            "</svg>",
            "",
        ]
    )
    return _CLASSES.sub(lambda tag: tag[0] + attributes(tag[1], tag[2]), lines)


def to_page(drawing: DrawnGraph) -> str:
    """Return the text of one HTML file without scripts and without requests."""
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{xml(headline(drawing)[0])}</title>
<style>
body{{margin:0;background:#eef1f5}}
main{{padding:16px;overflow:auto}}
svg{{display:block;margin:0 auto}}
@media (prefers-color-scheme:dark){{body{{background:#0b0e12}}}}
</style>
</head>
<body>
<main>
{to_svg(drawing)}</main>
</body>
</html>
"""


def placed(drawing: DrawnGraph) -> tuple[list[BoxText], Layout]:
    """Return the text in each box, and the positions of everything."""
    paths = _frame_paths(drawing)
    show_dtype = drawing.color_by == "dtype"
    texts = [
        measure(node, frame_path=path, show_dtype=show_dtype)
        for node, path in zip(drawing.nodes, paths, strict=True)
    ]
    titles = [text_width(_title(group), _TITLE_PX) + 4.0 for group in drawing.groups]
    sizes = [(text.width, text.height) for text in texts]
    return texts, lay_out(sizes, drawing.edges, drawing.groups, titles)


def _frame_paths(drawing: DrawnGraph) -> list[str]:
    """Return, for each box, the module of the innermost frame around it that has one."""
    found = [""] * len(drawing.nodes)
    paths: list[str] = []
    for group in drawing.groups:
        around = paths[group.parent] if group.parent is not None else ""
        paths.append(group.module or around)
        for node in group.nodes:
            found[node] = paths[-1]
    return found


def _title(group: DrawnGroup) -> str:
    how = ", each uses the one before" if group.chained else ", side by side"
    return shortened(group.title, _MOST_TITLE) + (how if group.repeats > 1 else "")


def _n(value: float) -> str:
    """Return a number as short text."""
    return f"{value:.1f}".removesuffix(".0")


def _head(drawing: DrawnGraph, width: float) -> list[tuple[str, str]]:
    first, *rest = headline(drawing)
    columns = int(width / text_width("m", _HEAD_PX))
    lines = [("head", line) for line in wrapped(first, columns)]
    columns = int(width / text_width("m", _TITLE_PX))
    return lines + [("note", line) for text in rest for line in wrapped(text, columns)]


def _head_lines(head: Sequence[tuple[str, str]]) -> Iterator[str]:
    for number, (style, line) in enumerate(head):
        y = _MARGIN + 12.0 + number * 20.0
        yield f'<text class="{style}" x="{_n(_MARGIN)}" y="{_n(y)}">{xml(line)}</text>'


def _legend_lines(legend: Legend, top: float) -> Iterator[str]:
    for entry in legend.entries:
        x, y = _MARGIN + entry.x, top + entry.y
        yield f'<rect class="swatch {entry.style}" x="{_n(x)}" y="{_n(y)}" width="12" height="12" rx="3"/>'
        yield f'<text class="small" x="{_n(x + 18)}" y="{_n(y + 10)}">{xml(entry.text)}</text>'


def _notes(drawing: DrawnGraph, width: float) -> list[str]:
    columns = int(width / text_width("m", _TITLE_PX))
    return [line for note in drawing.notes for line in wrapped(note, columns)]


def _note_lines(notes: Sequence[str], top: float) -> Iterator[str]:
    for number, line in enumerate(notes):
        y = top + 12.0 + number * _NOTE_LINE
        yield f'<text class="note" x="{_n(_MARGIN)}" y="{_n(y)}">{xml(line)}</text>'


def _rect(style: str, at: Rectangle, radius: int) -> str:
    return (
        f'<rect class="{style}" x="{_n(at.x)}" y="{_n(at.y)}" width="{_n(at.width)}" '
        f'height="{_n(at.height)}" rx="{radius}"/>'
    )


def _frame_lines(groups: Sequence[DrawnGroup], layout: Layout) -> Iterator[str]:
    for group, frame in zip(groups, layout.frames, strict=True):
        if group.repeats > 1:
            yield _rect("frame", Rectangle(frame.x + 5, frame.y + 5, frame.width, frame.height), 8)
        yield _rect("frame", frame, 8)
        x, y = frame.x + 12.0, frame.y + 18.0
        title = xml(_title(group))
        yield f'<text class="title" x="{_n(x)}" y="{_n(y)}">{title}<title>{xml(group.title)}</title></text>'


def _wire_lines(wire: Wire) -> Iterator[str]:
    (x, y), *rest = wire.points
    path = [f"M{_n(x)} {_n(y)}"]
    end_x, end_y = wire.points[-1]
    for number, (to_x, to_y) in enumerate(rest):
        if wire.arrow and number == len(rest) - 1:
            to_y -= 6.0
        if abs(to_x - x) < 0.05:
            path.append(f"V{_n(to_y)}")
        else:
            middle = (y + to_y) / 2
            path.append(f"C{_n(x)} {_n(middle)} {_n(to_x)} {_n(middle)} {_n(to_x)} {_n(to_y)}")
        x, y = to_x, to_y
    yield f'<path class="wire" d="{"".join(path)}"/>'
    if wire.arrow:
        yield f'<path class="arrow" d="M{_n(end_x)} {_n(end_y)}l-3.5 -7h7z"/>'


def _label_lines(layout: Layout) -> Iterator[str]:
    """Yield labels at the ends of edges, on the outer side; a label moves up if another one is in its place."""
    taken: list[tuple[float, float, float]] = []
    for wire in sorted(layout.wires, key=lambda each: each.points[-1]):
        if not wire.label:
            continue
        x, y = wire.points[-1]
        box = next(box for box in layout.boxes if box.y == y and box.x <= x <= box.x + box.width)
        left = x < box.x + box.width / 2 - 1
        width = text_width(wire.label, _WIRE_PX)
        start = x - 5 - width if left else x + 5
        baseline = y - 4
        while any(
            line == baseline and start < end + 4 and begin < start + width + 4
            for line, begin, end in taken
        ):
            baseline -= 10
        taken.append((baseline, start, start + width))
        anchor = ' text-anchor="end"' if left else ""
        at = f'x="{_n(x - 5 if left else x + 5)}" y="{_n(baseline)}"{anchor}'
        yield f'<text class="on-wire" {at}>{xml(wire.label)}</text>'


def _box_lines(
    nodes: Sequence[DrawnNode], texts: Sequence[BoxText], layout: Layout, colors: Colors
) -> Iterator[str]:
    for node, text, at in zip(nodes, texts, layout.boxes, strict=True):
        yield f"<g><title>{xml(_tooltip(node))}</title>"
        style = f"box {node.kind} {colors.box(node)}".strip()
        if node.repeats > 1:
            yield _rect(style, Rectangle(at.x + 4, at.y + 4, at.width, at.height), 5)
        yield _rect(style, at, 5)
        for row in text.rows:
            band = Rectangle(at.x + 1, at.y + row.y, at.width - 2, row.height - 1)
            if isinstance(row.of, DrawnLeaf):
                yield _rect(f"band {'parameter' if row.of.is_parameter else 'leaf'}", band, 3)
                continue
            yield _rect(f"band {colors.band(row.of)}".strip(), band, 3)
            yield from _chip(row.of, at.x + 10.0, at.y + row.y + 4.0, colors)
        for each in text.texts:
            yield _text(each, at)
        yield "</g>"


def _chip(tensor: DrawnTensor, x: float, y: float, colors: Colors) -> Iterator[str]:
    for share in colors.chip(tensor):
        width = 8.0 * share.part
        yield f'<rect class="chip {share.style}" x="{x:.2f}" y="{_n(y)}" width="{width:.2f}" height="8"/>'
        x += width


def _text(text: Text, at: Rectangle) -> str:
    anchor = ' text-anchor="end"' if text.right else ""
    x, y = at.x + text.x, at.y + text.baseline
    return f'<text class="{text.style}" x="{_n(x)}" y="{_n(y)}"{anchor}>{xml(text.text)}</text>'


def _tooltip(node: DrawnNode) -> str:
    lines = [node.name or node.label]
    if node.module and node.module != node.label:
        lines.append(f"module {node.module}")
    if node.shape is not None:
        lines.append(" ".join(filter(None, (joined_shape(node.shape), node.dtype))))
    lines += [node.detail] if node.detail else []
    if node.nodes > 1:
        lines.append(f"{node.nodes:,} nodes of the graph")
    for leaf in node.leaves:
        known = [leaf.name, joined_shape(leaf.shape), leaf.dtype, bytes_of(leaf.nbytes, 0, 1)]
        lines.append("  ".join(filter(None, known)))
    for tensor in node.tensors:
        known = [tensor.name, joined_shape(tensor.shape), tensor.dtype]
        known += [bytes_of(tensor.nbytes, tensor.unknown, tensor.count), places_of(tensor)]
        known.append(same_words(tensor))
        lines.append("  ".join(filter(None, known)))
    return "\n".join(lines)
