"""Make text safe to show, as HTML too, and find the program's line for a warning.

Names come from other programs, and may contain escapes that a terminal would execute.
"""

from __future__ import annotations

import sys
import unicodedata
from collections.abc import Iterable, Sequence
from typing import Any

__all__ = ["clean", "html_table", "html_text", "level_of_program", "show_text", "shown"]

_HIDDEN = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}


def clean(text: str) -> str:
    r"""Return ``text`` on one line, with line ends, invisible characters and changes of direction escaped.

    >>> clean("layer\x1b[2J\n\u202ebackstash: 0 B")
    'layer\\x1b[2J\\n\\u202ebackstash: 0 B'
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(_visible(c) if unicodedata.category(c) in _HIDDEN else c for c in text)


def _visible(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


def shown(given: object) -> str:
    """Return a value for an error message, on one line; of a tensor or array only the shape.

    >>> shown("2GiB"), shown(memoryview(b"abc"))
    ("'2GiB'", 'a memoryview of shape (3,)')
    """
    shape = getattr(given, "shape", None)
    if isinstance(shape, tuple):
        return f"a {type(given).__name__} of shape {tuple(shape)}"
    text = clean(repr(given))
    return text if len(text) <= 200 else f"{text[:200]}..."


# HTML for notebooks. It sets no colours: text and lines use the page's, light or dark.

_FONT = "font-family:ui-monospace,monospace;font-size:0.85em;line-height:1.35"
_LINE = "border:0;border-bottom:1px solid currentColor;padding:1px 10px 1px 0;background:none"


def html_text(text: str, *, folded_after: int = 40) -> str:
    r"""Return lines of text as HTML, with those after the first ``folded_after`` folded.

    >>> html_text("a < b")[-14:]
    'a &lt; b</pre>'
    """
    lines = [_escaped(clean(line)) for line in text.splitlines()]
    shown, folded = lines[:folded_after], lines[folded_after:]
    parts = [f'<pre style="{_FONT};background:none;color:inherit">' + "\n".join(shown) + "</pre>"]
    if folded:
        parts.append(
            f"<details><summary>{len(folded)} more lines</summary>"
            f'<pre style="{_FONT};background:none;color:inherit">'
            + "\n".join(folded)
            + "</pre></details>"
        )
    return "".join(parts)


def html_table(
    title: str, head: Sequence[str], rows: Iterable[Sequence[str]], rest: Sequence[str] = ()
) -> str:
    """Return a heading, a table whose first column is text and whose others are numbers, and lines below it."""

    def row(cells: Sequence[str], tag: str) -> str:
        sides = ("left", *["right"] * (len(cells) - 1))
        return "".join(
            f'<{tag} style="{_LINE};text-align:{side}">{_escaped(clean(cell))}</{tag}>'
            for cell, side in zip(cells, sides, strict=True)
        )

    body = "".join(f"<tr>{row(cells, 'td')}</tr>" for cells in rows)
    table = (
        f'<table style="{_FONT};border-collapse:collapse"><tr>{row(head, "th")}</tr>{body}</table>'
    )
    below = html_text("\n".join(rest), folded_after=8) if rest else ""
    return f"<div><b>{_escaped(clean(title))}</b>{table if body else ''}{below}</div>"


def level_of_program() -> int:
    """Return the ``stacklevel`` for a warning that names the program's line, not one of backstash or
    PyTorch."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and _is_ours(frame.f_globals.get("__name__")):
        level, frame = level + 1, frame.f_back
    return level


def _is_ours(module: object) -> bool:
    return str(module).partition(".")[0] in (__name__.partition(".")[0], "torch")


def _escaped(text: str) -> str:
    import html  # imported late: its table takes half a MiB, and few programs show HTML

    return html.escape(text)


def show_text(thing: object, printer: Any, cycle: bool) -> None:
    """Print ``str(thing)``. As a class's ``_repr_pretty_`` it makes IPython show text in a terminal, and HTML
    in a notebook."""
    printer.text(str(thing))
