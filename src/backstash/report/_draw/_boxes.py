"""Measure the text in each box, its position, and the size of the box."""

from __future__ import annotations

from dataclasses import dataclass, field

from ._records import SAVED_ABOVE, DrawnLeaf, DrawnNode, DrawnTensor
from ._text import bytes_of, cells, joined_shape, places_of, shortened

__all__ = ["SMALL_PX", "Band", "BoxText", "Text", "measure", "text_width"]

_COLUMN = 0.61  # width of a monospaced character in em; the widest common font has 0.602
_LABEL_PX = 12.5
SMALL_PX = 10.5
_PAD = 10.0
_LINE = 16.0
_ROW = 17.0
_CHIP = 8.0
_GAP = 10.0
_MOST_LABEL = 44
_MOST_DETAIL = 52
_MOST_CELL = 26
_MOST_PLACE = 34


def text_width(text: str, px: float) -> float:
    """Return the most pixels that ``text`` takes in a monospaced font of this size."""
    return cells(text) * px * _COLUMN


@dataclass(frozen=True, slots=True)
class Text:
    """A piece of text, with its start (or its end, if aligned to the right) relative to the box's corner."""

    x: float
    baseline: float
    text: str
    style: str
    """``"label"``, ``"small"``, ``"row"`` or ``"row of-leaf"``."""
    right: bool = False

    @property
    def px(self) -> float:
        """The size of its font."""
        return _LABEL_PX if self.style == "label" else SMALL_PX


@dataclass(frozen=True, slots=True)
class Band:
    """The band of one saved tensor, or of leaves inside the box."""

    y: float
    height: float
    of: DrawnTensor | DrawnLeaf


@dataclass(slots=True)
class BoxText:
    """A box's content, measured."""

    width: float = 0.0
    height: float = 0.0
    texts: list[Text] = field(default_factory=list)
    rows: list[Band] = field(default_factory=list)


def measure(node: DrawnNode, *, frame_path: str, show_dtype: bool) -> BoxText:
    """Lay out the text of one box.

    Args:
        node: the box.
        frame_path: the module of the frame around the box; the box does not repeat it.
        show_dtype: write every element type; otherwise only those that are not float32.
    """
    found = BoxText()
    times = f"{node.repeats:,} x " if node.repeats > 1 else ""
    label = times + shortened(_relative(node.label, frame_path), _MOST_LABEL)
    size = _size(node.shape, node.dtype, show_dtype)
    if node.kind in ("parameter", "leaf") and node.nbytes:
        size = "  ".join(filter(None, (size, bytes_of(node.nbytes, 0, 1))))
    details = [shortened(node.detail, _MOST_DETAIL)]
    if node.kind == "operation":
        details.append(shortened(_relative(node.module, frame_path), _MOST_DETAIL))
    details = [detail for detail in details if detail and detail != frame_path]
    if node.kind in ("parameter", "leaf", "output"):
        _stacked(found, label, [*details, size] if size else details)
    else:
        _beside(found, label, size, details)
    _rows(found, node, show_dtype=show_dtype)
    return found


def _relative(path: str, frame_path: str) -> str:
    if frame_path and path == frame_path:
        return ""
    return path.removeprefix(f"{frame_path}.") if frame_path else path


def _size(shape: tuple[str, ...] | None, dtype: str, show_dtype: bool) -> str:
    known = [joined_shape(shape)]
    if dtype and (show_dtype or dtype != "float32"):
        known.append(dtype)
    return " ".join(filter(None, known))


def _stacked(found: BoxText, label: str, details: list[str]) -> None:
    """Write the label, and each detail on a line below it."""
    found.texts.append(Text(_PAD, 17.0, label, "label"))
    width = text_width(label, _LABEL_PX)
    found.height = 25.0
    for detail in details:
        found.texts.append(Text(_PAD, found.height + 7.0, detail, "small"))
        width = max(width, text_width(detail, SMALL_PX))
        found.height += _LINE
    found.width = width + 2 * _PAD


def _beside(found: BoxText, label: str, size: str, details: list[str]) -> None:
    """Write the label with the size at the right end of its line, and details below."""
    _stacked(found, label, details)
    if size:
        needed = text_width(label, _LABEL_PX) + text_width(size, SMALL_PX) + 2 * _GAP
        found.width = max(found.width, needed + 2 * _PAD)
        found.texts.append(Text(0.0, 17.0, size, "size"))


def _rows(found: BoxText, node: DrawnNode, *, show_dtype: bool) -> None:
    lines: list[tuple[list[str], DrawnTensor | DrawnLeaf]] = []
    for leaf in node.leaves:
        texts = [
            shortened(leaf.name, _MOST_CELL),
            _known(leaf, show_dtype),
            bytes_of(leaf.nbytes, 0, 1),
            "",
        ]
        lines.append((texts, leaf))
    lines += [(_cells_of(tensor, show_dtype), tensor) for tensor in node.tensors]
    widths = [
        max((text_width(line[column], SMALL_PX) for line, _ in lines), default=0.0)
        for column in range(4)
    ]
    starts = [_PAD + _CHIP + 6.0]
    for width in widths:
        starts.append(starts[-1] + (width + _GAP if width else 0.0))
    if lines:
        found.width = max(found.width, starts[-1] - _GAP + _PAD)
        found.height += 1.0
    for line, of in lines:
        found.rows.append(Band(found.height, _ROW, of))
        style = "row" if isinstance(of, DrawnTensor) else "row of-leaf"
        for column, text in enumerate(line):
            if not text:
                continue
            x = starts[column]
            if column == 2:  # bytes, to the right
                x += widths[column]
            found.texts.append(Text(x, found.height + 12.0, text, style, right=column == 2))
        found.height += _ROW
    if lines:
        found.height += 5.0
    for place, written in enumerate(found.texts):
        if written.style == "size":
            end = found.width - _PAD
            found.texts[place] = Text(end, written.baseline, written.text, "small", True)


def _known(of: DrawnTensor | DrawnLeaf, show_dtype: bool) -> str:
    times = f"{of.count:,} x " if of.count > 1 and of.shape is not None else ""
    return times + _size(of.shape, of.dtype, show_dtype)


def _cells_of(tensor: DrawnTensor, show_dtype: bool) -> list[str]:
    known = _known(tensor, show_dtype)
    where = places_of(tensor)
    if tensor.same_as:
        again = "again" if tensor.same_as == SAVED_ABOVE else tensor.same_as
        where += f" ({shortened(again, _MOST_CELL)})"
    return [
        shortened(tensor.name, _MOST_CELL),
        shortened(known, _MOST_CELL + 8),
        bytes_of(tensor.nbytes, tensor.unknown, tensor.count),
        shortened(where, _MOST_PLACE),
    ]
