"""Render a drawing in the DOT language, with every name quoted."""

from __future__ import annotations

from collections.abc import Iterator

from ._colors import LIGHT, NAMES, Colors
from ._records import DrawnGraph, DrawnNode, DrawnTensor
from ._text import bytes_of, dot_quoted, headline, joined_shape, places_of, same_words, shortened

__all__ = ["to_dot"]

_FILLS = {
    "operation": "#eceff3",
    "module": "#dde3ea",
    "folded": "#ffffff",
    "parameter": "#cfe3fb",
    "leaf": "#e0d7fa",
    "output": "#cdecc8",
}
_MOST = 60
_PALETTE = dict(zip(NAMES, LIGHT, strict=True))


def to_dot(drawing: DrawnGraph) -> str:
    """Return the text of one ``digraph``."""
    colors = Colors(drawing)
    caption = dot_quoted(*headline(drawing), *drawing.notes)
    lines = [
        "digraph autograd {",
        f"  graph [label={caption}, labelloc=b, labeljust=l, rankdir=TB, fontname=Helvetica];",
        '  node [shape=box, style=filled, fontname=Helvetica, fontsize=11, margin="0.12,0.06"];',
        "  edge [fontname=Helvetica, fontsize=9, color=gray40];",
        *_group_lines(drawing, colors),
    ]
    for edge in drawing.edges:
        label = f" [label={dot_quoted(edge.label)}]" if edge.label else ""
        lines.append(f"  n{edge.source} -> n{edge.target}{label};")
    return "\n".join([*lines, "}", ""])


def _group_lines(drawing: DrawnGraph, colors: Colors) -> Iterator[str]:
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
        yield f"    label={dot_quoted(shortened(group.title, _MOST))}; labelloc=t; labeljust=l; color=gray60;"
        for node in group.nodes:
            yield from _node_lines(node, drawing.nodes[node], colors)
        ahead.append((index, True))
        ahead += [(each, False) for each in reversed(inside.get(index, []))]
    for number, free in enumerate(drawing.nodes):
        if number not in framed:
            yield from _node_lines(number, free, colors)


def _node_lines(index: int, node: DrawnNode, colors: Colors) -> Iterator[str]:
    times = f"{node.repeats:,} x " if node.repeats > 1 else ""
    size = joined_shape(node.shape)
    if node.kind in ("parameter", "leaf", "output") and node.nbytes:
        size = f"{size}  {bytes_of(node.nbytes, 0, 1)}".strip()
    texts = [times + shortened(node.label, _MOST), shortened(node.detail, _MOST), size]
    texts += [
        "  ".join(filter(None, (leaf.name, joined_shape(leaf.shape), bytes_of(leaf.nbytes, 0, 1))))
        for leaf in node.leaves
    ]
    label = "\\n".join(dot_quoted(text)[1:-1] for text in texts if text)
    dashed = ', style="filled,dashed"' if node.kind == "folded" else ""
    fill = _PALETTE.get(colors.box(node), _FILLS[node.kind])
    yield f'    n{index} [label="{label}", fillcolor="{fill}"{dashed}];'
    for place, tensor in enumerate(node.tensors):
        fill = _PALETTE.get(colors.band(tensor), "orange")
        edge = _PALETTE[max(colors.chip(tensor), key=lambda share: share.part).style]
        look = f'fillcolor="{fill}", color="{edge}", penwidth=2'
        yield f"    s{index}_{place} [label={_tensor_label(tensor)}, {look}];"
        yield f"    n{index} -> s{index}_{place} [dir=none, style=dotted];"


def _tensor_label(tensor: DrawnTensor) -> str:
    times = f"{tensor.count:,} x" if tensor.count > 1 and tensor.shape is not None else ""
    known = " ".join(filter(None, (times, joined_shape(tensor.shape), tensor.dtype)))
    size = bytes_of(tensor.nbytes, tensor.unknown, tensor.count)
    same = same_words(tensor)
    return dot_quoted(*filter(None, (tensor.name, known, size, places_of(tensor), same)))
