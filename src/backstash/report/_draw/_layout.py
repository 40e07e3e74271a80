"""Position boxes, frames and edges: arrange each frame, which is then one cell of the frame around it.

So boxes cannot overlap, and a frame cannot cover a box outside it. An edge leaves its frame through a port in
the frame's lower border, and enters another frame through a port in its upper border.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ._layers import LayoutCell, Link, arrange
from ._records import DrawnEdge, DrawnGroup

__all__ = ["Layout", "Rectangle", "Wire", "lay_out"]

_PAD = 16.0
_HEADER = 30.0

_Key = tuple[str, int, int]


@dataclass(frozen=True, slots=True)
class Rectangle:
    """A rectangle in pixels, from the top left."""

    x: float
    y: float
    width: float
    height: float


@dataclass(frozen=True, slots=True)
class Wire:
    """The part of one or several edges that lies within one frame."""

    points: tuple[tuple[float, float], ...]
    arrow: bool
    """Whether it ends at a box."""
    label: str


@dataclass(slots=True)
class Layout:
    """The positions of everything in a drawing."""

    boxes: list[Rectangle]
    frames: list[Rectangle]
    wires: list[Wire]
    width: float
    height: float


@dataclass(slots=True)
class _Frame:
    """The inside of one frame, or of the whole drawing."""

    keys: dict[_Key, int] = field(default_factory=dict)
    cells: list[LayoutCell] = field(default_factory=list)
    links: dict[tuple[_Key, _Key], DrawnEdge] = field(default_factory=dict)
    routed: list[Link] = field(default_factory=list)


def lay_out(
    sizes: Sequence[tuple[float, float]],
    edges: Sequence[DrawnEdge],
    groups: Sequence[DrawnGroup],
    title_widths: Sequence[float],
) -> Layout:
    """Place boxes of these sizes in these frames.

    Args:
        sizes: the width and height of each box.
        edges: from box to box, without cycles, also between frames.
        groups: outer ones before inner ones.
        title_widths: the width of each frame's title.
    """
    group_of: list[int | None] = [None] * len(sizes)
    for number, group in enumerate(groups):
        for box in group.nodes:
            group_of[box] = number
    frames = [_Frame() for _ in range(len(groups) + 1)]
    for edge in edges:
        for frame, source, target in _stretches(edge, group_of, groups):
            frames[frame].links.setdefault((source, target), edge)
    spans = [(0.0, 0.0)] * len(frames)
    contents: list[list[_Key]] = [[] for _ in frames]
    for box, home in enumerate(group_of):
        contents[_index(home)].append(("box", box, 0))
    for number, group in enumerate(groups):
        contents[_index(group.parent)].append(("group", number, 0))
    for number in [*range(len(groups), 0, -1), 0]:
        title = title_widths[number - 1] if number else 0.0
        spans[number] = _arranged(number, frames, contents[number], sizes, spans, title)
    return _absolute(frames, contents, spans, len(sizes))


def _index(group: int | None) -> int:
    return 0 if group is None else group + 1


def _chain(group: int | None, groups: Sequence[DrawnGroup]) -> list[int]:
    found = []
    while group is not None:
        found.append(group)
        group = groups[group].parent
    return found[::-1]


def _stretches(
    edge: DrawnEdge, group_of: Sequence[int | None], groups: Sequence[DrawnGroup]
) -> Iterator[tuple[int, _Key, _Key]]:
    """Yield the frames that an edge passes through: the frame, where the edge starts in it, and where it
    ends."""
    up, down = (_chain(group_of[box], groups) for box in (edge.source, edge.target))
    shared = 0
    while shared < min(len(up), len(down)) and up[shared] == down[shared]:
        shared += 1
    here: _Key = ("box", edge.source, 0)
    for group in reversed(up[shared:]):
        yield group + 1, here, ("bottom", edge.source, 0)
        here = ("out", group, edge.source)
    frame = _index(up[shared - 1] if shared else None)
    for group in down[shared:]:
        yield frame, here, ("in", group, edge.source)
        frame, here = group + 1, ("top", edge.source, 0)
    yield frame, here, ("box", edge.target, 0)


def _arranged(
    number: int,
    frames: list[_Frame],
    contents: list[_Key],
    sizes: Sequence[tuple[float, float]],
    spans: list[tuple[float, float]],
    title: float,
) -> tuple[float, float]:
    """Arrange one frame's inside; return the size of the frame."""
    frame = frames[number]
    for key in contents:
        width, height = sizes[key[1]] if key[0] == "box" else spans[key[1] + 1]
        _add(frame, key, LayoutCell(width, height))
    for ends in frame.links:
        for key in ends:
            if key[0] in ("top", "bottom"):
                _add(frame, key, LayoutCell(0.0, 0.0, key[0]))
    for source, target in frame.links:
        leaves = _port(frames, source, "bottom") if source[0] == "out" else None
        enters = _port(frames, target, "top") if target[0] == "in" else None
        link = Link(_cell_of(frame, source), _cell_of(frame, target), leaves, enters)
        frame.routed.append(link)
    width, height = arrange(frame.cells, frame.routed, _HEADER if number else 0.0, title)
    if not number:
        return width, height
    has_exit = any(cell.kind == "bottom" for cell in frame.cells)
    return width + 2 * _PAD, height + (0.0 if has_exit else _PAD)


def _add(frame: _Frame, key: _Key, cell: LayoutCell) -> None:
    if key not in frame.keys:
        frame.keys[key] = len(frame.cells)
        frame.cells.append(cell)


def _cell_of(frame: _Frame, key: _Key) -> int:
    return frame.keys["group", key[1], 0] if key[0] in ("in", "out") else frame.keys[key]


def _port(frames: list[_Frame], key: _Key, side: str) -> float:
    """Return the position of a frame's port, from the frame's left border."""
    inner = frames[key[1] + 1]
    return inner.cells[inner.keys[side, key[2], 0]].x + _PAD


def _absolute(
    frames: list[_Frame], contents: list[list[_Key]], spans: list[tuple[float, float]], boxes: int
) -> Layout:
    nothing = Rectangle(0.0, 0.0, 0.0, 0.0)
    found = Layout([nothing] * boxes, [nothing] * (len(frames) - 1), [], *spans[0])
    origins = [(0.0, 0.0)] * len(frames)
    for number, frame in enumerate(frames):
        x, y = origins[number]
        for kind, index, _ in contents[number]:
            cell = frame.cells[frame.keys[kind, index, 0]]
            rectangle = Rectangle(x + cell.x, y + cell.y, cell.width, cell.height)
            if kind == "box":
                found.boxes[index] = rectangle
            else:
                found.frames[index] = rectangle
                origins[index + 1] = (rectangle.x + _PAD, rectangle.y)
        for (ends, edge), link in zip(frame.links.items(), frame.routed, strict=True):
            points = tuple((x + across, y + down) for across, down in link.route)
            is_last = ends[1][0] == "box"
            found.wires.append(Wire(points, is_last, edge.label if is_last else ""))
    return found
