"""Make text safe to show, and format sizes, bytes and places for all formats of a drawing."""

from __future__ import annotations

from xml.sax.saxutils import escape

from ..._text import clean as whole
from ...places import label_of
from ...units import format_bytes
from ._records import SAVED_ABOVE, DrawnGraph, DrawnGroup, DrawnLeaf, DrawnNode, DrawnTensor

__all__ = [
    "bytes_of",
    "cells_of",
    "clean",
    "frame_title",
    "headline",
    "joined_shape",
    "relative",
    "row_lines",
    "short_name",
    "shortened",
    "size_line",
    "size_of",
    "xml",
]


def clean(text: str, most: int = 400) -> str:
    r"""Return ``text`` on one line, shortened to ``most`` characters, with invisible characters escaped.

    >>> clean("a\nb\u202ec")
    'a\\nb\\u202ec'
    """
    return whole(shortened(text, most))


def shortened(text: str, most: int) -> str:
    """Return ``text`` cut in its middle to at most ``most`` characters.

    >>> shortened("blocks.0.attention.projection", 15)
    'blocks.…jection'
    """
    if len(text) <= most:
        return text
    tail = (most - 1) // 2 if most > 1 else 0
    return f"{text[: most - 1 - tail]}…{text[len(text) - tail :]}"


def joined_shape(shape: tuple[str, ...] | None) -> str:
    """Return sizes as text, in the form of ``torch.Size``.

    >>> joined_shape(("8", "512")), joined_shape(()), joined_shape(None)
    ('[8, 512]', '[]', '')
    """
    return "" if shape is None else clean(f"[{', '.join(shape)}]", 40)


def xml(text: str) -> str:
    """Return ``text`` escaped for an element or a quoted attribute of XML.

    >>> xml('<a href="x">&')
    '&lt;a href=&quot;x&quot;&gt;&amp;'
    """
    return escape(text, {'"': "&quot;"})


def relative(path: str, around: str) -> str:
    """Return ``path`` without the path ``around`` it; ``""`` if they are the same.

    >>> relative("blocks.0.up", "blocks.0"), relative("blocks.0", "blocks.0"), relative("head", "")
    ('up', '', 'head')
    """
    if path == around:
        return ""
    return path.removeprefix(f"{around}.") if around else path


def short_name(name: str) -> str:
    """Return an operation's name without ``Backward`` and numbers: ``"Mul"`` for ``"MulBackward0"``.

    >>> short_name("MulBackward0"), short_name("MyFunctionBackward"), short_name("torch::x::CopySlices")
    ('Mul', 'MyFunction', 'CopySlices')
    """
    last = name.rpartition("::")[2]
    stem = last.rstrip("0123456789").removesuffix("Backward")
    return stem if stem and last.rstrip("0123456789") != stem else last


def bytes_of(nbytes: int, unknown: int, count: int) -> str:
    """Return bytes as text, with a question mark if some or all of them are unknown.

    >>> bytes_of(2048, 0, 2), bytes_of(2048, 1, 2), bytes_of(0, 2, 2)
    ('2.00 KiB', '2.00 KiB + ?', '? B')
    """
    if unknown == count and count:
        return "? B"
    return format_bytes(nbytes) + (" + ?" if unknown else "")


def size_of(shape: tuple[str, ...] | None, dtype: str, *, show_dtype: bool) -> str:
    """Return sizes and element type as text; float32 is left out unless ``show_dtype``."""
    shown = dtype if show_dtype or dtype != "float32" else ""
    return " ".join(filter(None, (joined_shape(shape), shown)))


def cells_of(of: DrawnTensor | DrawnLeaf, *, show_dtype: bool) -> list[str]:
    """Return the texts in the row of a saved tensor or a leaf: name, sizes, bytes, place."""
    times = f"{of.count:,} x " if of.count > 1 and of.shape is not None else ""
    size = times + size_of(of.shape, of.dtype, show_dtype=show_dtype)
    if isinstance(of, DrawnLeaf):
        return [of.name, size, bytes_of(of.nbytes, 0, 1), ""]
    where = ", ".join(f"{place.count:,} {label_of(place.where)}" for place in of.places)
    if len(of.places) == 1:
        where = label_of(of.places[0].where)
    if of.same_as:
        where += f" ({'again' if of.same_as == SAVED_ABOVE else shortened(of.same_as, 26)})"
    return [of.name, size, bytes_of(of.nbytes, of.unknown, of.count), where]


def size_line(node: DrawnNode, *, show_dtype: bool) -> str:
    """Return the sizes of a box's result; for a leaf, its bytes too."""
    is_leaf = node.kind in ("parameter", "leaf")
    nbytes = bytes_of(node.nbytes, 0, 1) if is_leaf and node.nbytes else ""
    return "  ".join(filter(None, (size_of(node.shape, node.dtype, show_dtype=show_dtype), nbytes)))


def row_lines(node: DrawnNode, *, show_dtype: bool) -> list[str]:
    """Return a line for each leaf and each saved tensor in a box."""
    rows = [["holds", *cells_of(leaf, show_dtype=show_dtype)] for leaf in node.leaves]
    rows += [["saved", *cells_of(tensor, show_dtype=show_dtype)] for tensor in node.tensors]
    return ["  ".join(filter(None, row)) for row in rows]


def frame_title(group: DrawnGroup) -> str:
    """Return a frame's title; for a repeated run, how its copies are connected."""
    how = ", each uses the one before" if group.chained else ", side by side"
    return shortened(group.title, 60) + (how if group.repeats > 1 else "")


def headline(drawing: DrawnGraph) -> list[str]:
    """Return the size of the graph and the bytes that it holds, in at most three lines."""
    nodes = f"{drawing.graph_nodes:,} node{'s' if drawing.graph_nodes != 1 else ''}"
    if not drawing.saved:
        return [f"Autograd graph: {nodes}, nothing saved"]
    tensors = f"{drawing.saved:,} saved tensor{'s' if drawing.saved != 1 else ''}"
    places = [
        f"{format_bytes(place.nbytes) if place.nbytes else f'{place.count:,}'} "
        f"{label_of(place.where)}"
        for place in drawing.places
    ]
    alone = (
        f"Held by the graph alone, shared memory counted once: {format_bytes(drawing.unique_bytes)}"
    )
    if drawing.leaf_bytes:
        alone += f" ({format_bytes(drawing.leaf_bytes)} more are leaves' own)"
    return [f"Autograd graph: {nodes}, {tensors}", f"Saved: {', '.join(places)}", alone]
