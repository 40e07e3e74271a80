"""Check the links of Markdown pages without a network: files that exist, headings that exist.

    python scripts/check_links.py [PAGE_OR_DIRECTORY ...]

Prints each broken link as ``page:line: target: what is wrong``, and then exits with status 1.
"""

import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

__all__ = ["anchors", "broken_links", "links", "pages"]

ROOT = Path(__file__).resolve().parent.parent

FENCE = re.compile(r"\s*(```|~~~)")
INLINE_CODE = re.compile(r"(`+)(?:(?!\1).)+\1")
TARGETS = (
    re.compile(r"\]\(\s*<?([^)\s>]+)>?(?:\s+[\"'][^)]*)?\)"),
    re.compile(r"^\s*\[[^\]^]+\]:\s*<?([^\s>]+)"),
    re.compile(r"<(?:a|img)\b[^>]*?\b(?:href|src)=[\"']([^\"']+)"),
)
HEADING = re.compile(r"#{1,6}\s+(.*?)\s*#*\s*$")
NAMED = re.compile(r"<a\b[^>]*?\b(?:id|name)=[\"']([^\"']+)")
EXTERNAL = re.compile(r"[a-z][a-z0-9+.-]*:", re.IGNORECASE)


def prose(page: Path) -> Iterator[tuple[int, str]]:
    """The numbered lines of ``page`` outside its fenced blocks."""
    fence = None
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), start=1):
        mark = FENCE.match(line)
        if mark and fence in (None, mark[1]):
            fence = None if fence else mark[1]
        elif fence is None:
            yield number, line


def links(page: Path) -> Iterator[tuple[int, str]]:
    """The line and target of every link and image in ``page``."""
    for number, line in prose(page):
        text = INLINE_CODE.sub("``", line)
        for pattern in TARGETS:
            for match in pattern.finditer(text):
                yield number, match[1]


def anchors(page: Path) -> set[str]:
    """The fragments that ``page`` answers to: headings, as GitHub names them, and named anchors."""
    found: set[str] = set()
    seen: Counter[str] = Counter()
    for _, line in prose(page):
        found.update(NAMED.findall(line))
        if heading := HEADING.match(line):
            text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", heading[1]).lower()
            slug = re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
            found.add(f"{slug}-{seen[slug]}" if seen[slug] else slug)
            seen[slug] += 1
    return found


def problem(page: Path, target: str) -> str | None:
    """What is wrong with one link of ``page``; ``None`` if nothing is, or if it leads elsewhere."""
    if EXTERNAL.match(target):
        return None
    path, _, fragment = unquote(target).partition("#")
    there = (ROOT / path.lstrip("/") if path.startswith("/") else page.parent / path).resolve()
    if not path:
        there = page
    if not there.exists():
        return "no such file"
    if fragment and there.suffix == ".md" and fragment not in anchors(there):
        return f"no such heading; there are: {', '.join(sorted(anchors(there)))}"
    return None


def broken_links(page: Path) -> list[str]:
    """One line for each broken link of ``page``."""
    checked = ((line, target, problem(page, target)) for line, target in links(page))
    return [f"{page}:{line}: {target}: {why}" for line, target, why in checked if why]


def pages(root: Path = ROOT) -> list[Path]:
    """The pages of the checkout: those at its top, and all under ``docs`` and ``benchmarks``."""
    nested = (page for folder in ("docs", "benchmarks") for page in (root / folder).rglob("*.md"))
    return sorted([*root.glob("*.md"), *nested])


def main(arguments: list[str]) -> int:
    chosen = [Path(argument) for argument in arguments]
    found = [
        page for path in chosen for page in (path.rglob("*.md") if path.is_dir() else [path])
    ] or pages()
    broken = [line for page in found for line in broken_links(page)]
    print(*broken, sep="\n", end="\n" if broken else "")
    return 1 if broken else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
