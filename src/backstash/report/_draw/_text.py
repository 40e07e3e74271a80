"""Text that is safe to show, and how wide it is."""

from __future__ import annotations

import unicodedata

from ..._text import clean as whole

__all__ = ["cells", "clean", "dot_quoted", "joined_shape", "shortened", "wrapped", "xml"]


def clean(text: str, most: int = 400) -> str:
    r"""``text`` on one line, at most ``most`` of its characters, with nothing in it that is not seen.

    >>> clean("a\nb\u202ec")
    'a\\nb\\u202ec'
    """
    return whole(shortened(text, most))


def shortened(text: str, most: int) -> str:
    """``text`` cut in its middle to at most ``most`` characters.

    >>> shortened("blocks.0.attention.projection", 15)
    'blocks.…jection'
    """
    if len(text) <= most:
        return text
    tail = (most - 1) // 2 if most > 1 else 0
    return f"{text[: most - 1 - tail]}…{text[len(text) - tail :]}"


def cells(text: str) -> int:
    """How many columns of a monospaced font ``text`` takes: wide characters take two.

    >>> cells("abc"), cells("張量")
    (3, 4)
    """
    if text.isascii():
        return len(text)
    return sum(_width(character) for character in text)


def _width(character: str) -> int:
    if unicodedata.combining(character):
        return 0
    # What a monospaced font lacks comes from another one, which may be wide.
    if character >= "\U0001f000":
        return 3
    return 1 if ord(character) < 0x250 or character == "…" else 2


def wrapped(text: str, most: int) -> list[str]:
    """``text`` in lines of at most ``most`` columns, broken between words where there are any.

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
    """Sizes as they are written in a box, as ``torch.Size`` writes them.

    >>> joined_shape(("8", "512")), joined_shape(()), joined_shape(None)
    ('[8, 512]', '[]', '')
    """
    return "" if shape is None else clean(f"[{', '.join(shape)}]", 40)


def xml(text: str) -> str:
    """``text`` within an element or a quoted attribute of XML.

    >>> xml('<a href="x">&')
    '&lt;a href=&quot;x&quot;&gt;&amp;'
    """
    for character, entity in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;"), ('"', "&quot;")):
        text = text.replace(character, entity)
    return text


def dot_quoted(*lines: str) -> str:
    r"""``lines`` as one quoted string of the DOT language, shown as they are, aligned to the left.

    Escapes (``\N`` is a node's name) and character references (``&beta;``) are read inside quotes too.

    >>> print(dot_quoted('say "hi"', "C:\\N &amp;"))
    "say \"hi\"\lC:\\N &amp;amp;\l"
    """
    escaped = [
        line.replace("&", "&amp;").replace("\\", "\\\\").replace('"', '\\"') for line in lines
    ]
    if len(escaped) == 1:
        return f'"{escaped[0]}"'
    return '"' + "".join(f"{line}\\l" for line in escaped) + '"'
