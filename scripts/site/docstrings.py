"""Our docstrings as Markdown, which mkdocstrings renders; ``mkdocs.yml`` names this file."""

import re
from typing import Any

from griffe import Extension, Object

__all__ = ["Docstrings", "as_markdown"]

_ROLE = re.compile(r":(?:attr|class|data|func|meth|mod|exc):`(~?)([^`]+)`")
_TABLE = re.compile(r"=+( +=+)+$")


def as_markdown(docstring: str) -> str:
    """``docstring`` with its sessions and tables fenced, roles as code, and no ``::`` before a block."""
    return "\n\n".join(map(_paragraph, re.split(r"\n\s*\n", docstring)))


def _paragraph(text: str) -> str:
    first = text.lstrip("\n").split("\n")[0]
    indent = first[: len(first) - len(first.lstrip())]
    if first.strip().startswith(">>> "):
        text = text.replace("<BLANKLINE>", "")
        return f"{indent}```pycon\n{text}\n{indent}```"
    if _TABLE.match(first.strip()):
        return _table(text.strip().split("\n"), indent)
    if text.strip() == "::":
        return ""
    text = re.sub(r"::$", ":", text)
    return _ROLE.sub(lambda role: f"`{role[2].rpartition('.')[2] if role[1] else role[2]}`", text)


def _table(lines: list[str], indent: str) -> str:
    """A table of two columns; a line whose first cell is empty goes on with the row above it."""
    middle = lines[0].index(" ")
    rows: list[list[str]] = []
    for line in (line.removeprefix(indent) for line in lines[1:-1]):
        cells = [line[:middle].strip(), line[middle:].strip()]
        if cells[0] or not rows:
            rows.append(cells)
        else:
            rows[-1][1] += f" {cells[1]}"
    return "\n".join(indent + f"| {a} | {b} |" for a, b in [["", ""], ["---", "---"], *rows])


class Docstrings(Extension):
    """Gives each object's docstring to the renderer as Markdown."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)

    def on_package(self, *, pkg: Object, **_: Any) -> None:
        self.on_object(obj=pkg)  # which Griffe calls for everything inside it
