"""Render a drawing as text: frames as indented headings, boxes with their numbers, and saved tensors."""

from __future__ import annotations

from collections.abc import Iterator

from ._records import DrawnGraph, frames_around
from ._text import frame_title, headline, row_lines, size_line
from ._tree import common_path

__all__ = ["to_text"]


def to_text(drawing: DrawnGraph) -> str:
    """Return the size of the graph, its boxes in the order of forward, and the notes."""
    drawn = f"drawn as {len(drawing.nodes):,} box{'es' if len(drawing.nodes) != 1 else ''}"
    first, *rest = headline(drawing)
    parts = [[f"{first}, {drawn}", *rest], _boxes(drawing), drawing.notes]
    return "\n\n".join("\n".join(part) for part in map(list, parts) if part)


def _boxes(drawing: DrawnGraph) -> Iterator[str]:
    inputs: dict[int, list[str]] = {}
    for edge in drawing.edges:
        label = f" ({edge.label})" if edge.label else ""
        inputs.setdefault(edge.target, []).append(f"#{edge.source}{label}")
    chains = _chains(drawing)
    around: tuple[int, ...] = ()
    for index in _order(drawing, chains):
        chain = chains[index]
        for depth in range(len(common_path([chain, around])), len(chain)):
            yield f"{'  ' * depth}{frame_title(drawing.groups[chain[depth]])}:"
        around = chain
        node = drawing.nodes[index]
        used = f"from {', '.join(inputs[index])}" if index in inputs else ""
        times = f"{node.repeats:,} x " if node.repeats > 1 else ""
        size = size_line(node, show_dtype=False)
        texts = [f"#{index}", times + node.label, size, node.detail, used]
        indent = "  " * len(chain)
        yield indent + "  ".join(filter(None, texts))
        for line in row_lines(node, show_dtype=drawing.color_by == "dtype"):
            yield f"{indent}    {line}"


def _chains(drawing: DrawnGraph) -> list[tuple[int, ...]]:
    """Return, for each box, the frames around it, outermost first."""
    found: list[tuple[int, ...]] = [()] * len(drawing.nodes)
    for number, group in enumerate(drawing.groups):
        for node in group.nodes:
            found[node] = frames_around(number, drawing.groups)
    return found


def _order(drawing: DrawnGraph, chains: list[tuple[int, ...]]) -> list[int]:
    """Return the boxes as they are read: each frame in one piece, its leaves first, outputs last."""
    leaves = [i for i, node in enumerate(drawing.nodes) if node.kind in ("parameter", "leaf")]
    first: dict[int, int] = {}
    for index in sorted(set(range(len(drawing.nodes))) - set(leaves), reverse=True):
        first.update(dict.fromkeys(chains[index], index))
    place = {index: first[chains[index][-1]] - 0.5 if chains[index] else -0.5 for index in leaves}
    return sorted(
        range(len(drawing.nodes)), key=lambda index: (place.get(index, index), len(chains[index]))
    )
