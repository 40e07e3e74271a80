"""Text that is safe to show: names come from other programs, and may hold escapes that a terminal obeys."""

from __future__ import annotations

import unicodedata

__all__ = ["clean"]

_HIDDEN = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}


def clean(text: str) -> str:
    r"""``text`` on one line: characters without a glyph, line ends and changes of direction become escapes.

    >>> clean("layer\x1b[2J\n\u202ebackstash: 0 B")
    'layer\\x1b[2J\\n\\u202ebackstash: 0 B'
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(_visible(c) if unicodedata.category(c) in _HIDDEN else c for c in text)


def _visible(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")
