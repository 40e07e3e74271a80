"""docs/how-to/capture-and-edit.md: every block runs, in order, and prints what the page says."""

import contextlib
import io
import re
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parents[2] / "docs/how-to/capture-and-edit.md"
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(text: str) -> list[tuple[int, str, str | None]]:
    """The python blocks: the line each begins at, its code, and the text block right after it."""
    found: list[tuple[int, str, str | None]] = []
    for match in FENCE.finditer(text):
        kind, body = match.groups()
        line = text.count("\n", 0, match.start(2))
        if kind == "python":
            found.append((line, body, None))
        elif kind == "text":
            begun, code, _ = found.pop()
            found.append((begun, code, body))
    return found


def run(page: list[tuple[int, str, str | None]], name: str) -> list[str]:
    """Runs the blocks in one namespace; returns where what was printed is not what is written."""
    wrong = []
    namespace: dict[str, Any] = {"__name__": "page"}
    for line, code, expected in page:
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(compile("\n" * line + code, name, "exec"), namespace)
        if out.getvalue() != (expected or ""):
            wrong.append(f"{name}:{line}: printed\n{out.getvalue()}")
    return wrong


def test_the_page_runs() -> None:
    page = blocks(PAGE.read_text(encoding="utf-8"))
    assert len(page) > 10
    assert run(page, str(PAGE)) == []


def test_a_wrong_page_is_noticed() -> None:
    page = blocks(
        "```python\nx = 1\nprint(x)\n```\n\n```text\n2\n```\n```python\nprint(x + 1)\n```\n"
    )
    assert [line for line, _, _ in page] == [1, 9]
    assert run(page, "page") == ["page:1: printed\n1\n", "page:9: printed\n2\n"]
