"""Make text safe to show, measure it, and format bytes and places for all formats of a drawing."""

from __future__ import annotations

import unicodedata

from ..._text import clean as whole
from ...places import label_of
from ...units import format_bytes
from ._records import SAVED_ABOVE, DrawnGraph, DrawnTensor

__all__ = [
    "bytes_of",
    "cells",
    "clean",
    "dot_quoted",
    "headline",
    "joined_shape",
    "places_of",
    "same_words",
    "short_name",
    "shortened",
    "wrapped",
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


def cells(text: str) -> int:
    """Return how many columns of a monospaced font ``text`` takes: wide characters take two.

    >>> cells("abc"), cells("張量")
    (3, 4)
    """
    if text.isascii():
        return len(text)
    return sum(_width(character) for character in text)


def _width(character: str) -> int:
    if unicodedata.combining(character):
        return 0
    # Characters that a monospaced font lacks come from another font, which may be wide.
    if character >= "\U0001f000":
        return 3
    return 1 if ord(character) < 0x250 or character == "…" else 2


def wrapped(text: str, most: int) -> list[str]:
    """Return ``text`` in lines of at most ``most`` columns, broken between words if possible.

    >>> wrapped("a graph that is long", 9)
    ['a graph', 'that is', 'long']
    """
    lines, line = [], ""
    for word in text.split(" "):
        while cells(word) > most:
            word, rest = _split(word, most)
            lines += [each for each in (line, word) if each]
            line, word = "", rest
        if line and cells(line) + 1 + cells(word) > most:
            lines.append(line)
            line = word
        else:
            line = f"{line} {word}" if line else word
    return [*lines, line] if line else lines


def _split(word: str, most: int) -> tuple[str, str]:
    end, used = 0, 0
    while end < len(word) and (end == 0 or used + _width(word[end]) <= most):
        used += _width(word[end])
        end += 1
    return word[:end], word[end:]


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
    for character, entity in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;"), ('"', "&quot;")):
        text = text.replace(character, entity)
    return text


def dot_quoted(*lines: str) -> str:
    r"""Return ``lines`` as one quoted string of the DOT language, shown literally and aligned to the left.

    DOT also interprets escapes (``\N`` is a node's name) and character references (``&beta;``) inside quotes.

    >>> print(dot_quoted('say "hi"', "C:\\N &amp;"))
    "say \"hi\"\lC:\\N &amp;amp;\l"
    """
    escaped = [
        line.replace("&", "&amp;").replace("\\", "\\\\").replace('"', '\\"') for line in lines
    ]
    if len(escaped) == 1:
        return f'"{escaped[0]}"'
    return '"' + "".join(f"{line}\\l" for line in escaped) + '"'


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


def places_of(tensor: DrawnTensor) -> str:
    """Return the place of a saved tensor; for several, how many are at which place."""
    if len(tensor.places) == 1:
        return label_of(tensor.places[0].where)
    return ", ".join(f"{place.count:,} {label_of(place.where)}" for place in tensor.places)


def same_words(tensor: DrawnTensor) -> str:
    """Return whose memory a saved tensor is in, if not its own; else ``""``."""
    if tensor.same_as == SAVED_ABOVE:
        return "memory that is saved above too"
    if tensor.same_as == "leaves'":
        return "memory of leaves"
    return f"memory of {shortened(tensor.same_as, 60)}" if tensor.same_as else ""


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
