"""Check how the pages of ``docs`` and the public docstrings are written: short sentences, ordinary words.

    python scripts/check_prose.py

Print the ten worst faults, and exit with status 1 if there are any. A fault is a sentence of more than 40
words, a page of more than 1,500 words, more than 24,000 words in all pages together, or a word that this
project used in a meaning of its own. ``tests/test_docs.py`` runs the same check.
"""

import ast
import functools
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import check_links

__all__ = [
    "Fault",
    "docstrings",
    "faults_of_all",
    "faults_of_docstring",
    "faults_of_page",
    "pages",
    "words_of",
    "worst",
]

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src"
MOST_SENTENCE_WORDS = 40
MOST_PAGE_WORDS = 1_500
MOST_WORDS = 24_000  # of all pages together

# Each pattern, and what to write instead. Code is not searched.
PRIVATE_WORDS = {
    r"told|tells|hears": "reports, records, notifies, detects, raises",
    r"lets? go|letting go": "frees, discards, recomputes",
    r"left alone|leaves? alone": "kept in memory (unmanaged)",
    r"besides?": "compared with, next to, in addition to",
    r"anew|made again|goes on": "again, recomputed, rebuilt, continues",
    r"apart|by itself|by themselves": "separately",
    r"on (?:its|their) way": "in flight",
    r"room": "space, capacity",
    r"meets|comes to": "encounters, reaches",
    r"of which nothing is known": "unknown",
    r"nor|whoever|what there is|that of": "(rewrite the sentence)",
}
_PRIVATE = re.compile(rf"\b(?:{'|'.join(PRIVATE_WORDS)})\b", re.I)
# A full stop ends a sentence where a space and the beginning of another one follow.
_END = re.compile(r"(?<=[.!?])[\"')\]*]*\s+(?=[\"'(\[*]*(?:[A-Z0-9\x00]|backstash\b))")
_CODE = re.compile(r"(`+)(?:(?!\1).)+\1", re.S)
_ROLE = re.compile(r":[a-z]+:(?=`)")
_LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
_TAG = re.compile(r"<[^>\n]+>")
_ITEM = re.compile(r"\A\s*(?:[-*] |\d+\. |#+ |\|)")
_ARGUMENT = re.compile(r"\A\s+[\w*, ]{1,40}: ")


class Fault(NamedTuple):
    """One fault of a page or a docstring."""

    weight: int
    """The number of words of a sentence or page; 0 for a private word."""
    where: str
    """The page, or the public name."""
    what: str
    """The fault and its text."""

    def __str__(self) -> str:
        return f"{self.where}: {self.what}"


def pages() -> list[Path]:
    """Return the pages of ``docs``."""
    return sorted((ROOT / "docs").rglob("*.md"))


def faults_of_page(page: Path) -> list[Fault]:
    """Return the faults of one page; examples and inline code are not checked."""
    name = str(page.relative_to(ROOT)) if page.is_relative_to(ROOT) else page.name
    lines = [line for _, line in check_links.prose(page)]
    found = _faults_of(name, lines)
    words = words_of(page)
    if words > MOST_PAGE_WORDS:
        found.append(
            Fault(words, name, f"{words} words; a page has at most {MOST_PAGE_WORDS:,}: divide it")
        )
    return found


def words_of(page: Path) -> int:
    """Return how many words a page has, without its examples."""
    return sum(_count(text) for text in _parts([line for _, line in check_links.prose(page)]))


def faults_of_all(pages: list[Path]) -> list[Fault]:
    """Return what is wrong with all pages together: there are too many words."""
    words = sum(map(words_of, pages))
    what = f"{words} words; all pages together have at most {MOST_WORDS:,}: shorten some"
    return [Fault(words, "docs", what)] if words > MOST_WORDS else []


def faults_of_docstring(name: str, text: str) -> list[Fault]:
    """Return the faults of one docstring; sessions are not checked."""
    lines, in_session = [], False
    for line in inspect.cleandoc(text).splitlines():
        in_session = line.lstrip().startswith(">>>") or (in_session and bool(line.strip()))
        lines.append("" if in_session else _ROLE.sub("", line))
    return _faults_of(name, lines)


def docstrings() -> Iterator[tuple[str, str]]:
    """Yield each public name, ``"backstash.Stash"``, with its docstrings and those of its public members.

    The source is parsed and not imported. A name that several modules list is of the first one.
    """
    seen = set()
    for module in _public_modules():
        for name in _listed(_parsed(module)):
            found = [each for each in _definitions(module, name) if each not in seen]
            seen.update(found)
            for _, node, text in found:
                texts = [*_docstrings_of(node), text]
                yield from ((f"{module}.{name}", each) for each in texts if each)


def worst(found: list[Fault], most: int = 10) -> str:
    """Return the worst of ``found``, a line each."""
    ranked = sorted(found, key=lambda fault: -fault.weight)
    rest = len(ranked) - most
    lines = [str(fault) for fault in ranked[:most]]
    return "\n".join([*lines, *([f"and {rest} more"] if rest > 0 else [])])


def _public_modules() -> list[str]:
    """The modules whose path is public, the shortest paths first, without the command line."""
    found = []
    for path in (PACKAGE / "backstash").rglob("*.py"):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        module = ".".join(parts).removesuffix(".__init__")
        if "cli" not in parts and not any(part.startswith("_") for part in module.split(".")):
            found.append(module)
    return sorted(found, key=lambda module: (module.count("."), module))


@functools.cache
def _parsed(module: str) -> ast.Module:
    place = PACKAGE / Path(*module.split("."))
    path = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
    return ast.parse(path.read_text(encoding="utf-8"))


def _listed(tree: ast.Module) -> list[str]:
    """What the module's ``__all__`` holds, as it is first assigned."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    return []


def _definitions(module: str, name: str) -> Iterator[tuple[str, ast.AST, str]]:
    """Each definition of a name: its module, what defines it, and the text below an assignment."""
    tree = _parsed(module)
    for node, below in zip(tree.body, [*tree.body[1:], None], strict=True):
        if getattr(node, "name", None) == name or name in _assigned(node):
            yield module, node, _text_of(below)
            made = re.fullmatch(r"(_\w+)\(\)", ast.unparse(getattr(node, "value", None) or node))
            if made:  # the one object of a private class, whose methods are its documentation
                yield from _definitions(module, made[1])
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (
            node.level or (node.module or "")[:9] == "backstash"
        ):
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    yield from _definitions(_imported(module, node), alias.name)


def _imported(module: str, node: ast.ImportFrom) -> str:
    is_package = (PACKAGE / Path(*module.split("."))).is_dir()
    parts = module.split(".")
    above = parts[: len(parts) - node.level + is_package] if node.level else []
    return ".".join([*above, *filter(None, [node.module])])


def _assigned(node: ast.AST) -> list[str]:
    targets = getattr(node, "targets", [getattr(node, "target", None)])
    return [ast.unparse(target) for target in targets if target is not None]


def _text_of(node: ast.AST | None) -> str:
    """The text, if the node is nothing but a string."""
    is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return node.value.value if is_text and isinstance(node.value.value, str) else ""


def _docstrings_of(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        yield ast.get_docstring(node) or ""
    if isinstance(node, ast.ClassDef):
        for member, below in zip(node.body, [*node.body[1:], None], strict=True):
            name = getattr(member, "name", "") or "".join(_assigned(member))
            if not name.startswith("_") or name == "__call__":
                yield from _docstrings_of(member)
                yield _text_of(below) if _assigned(member) else ""


def _faults_of(name: str, lines: list[str]) -> list[Fault]:
    found = []
    for part in _parts(lines):
        for sentence in _END.split(part):
            words = _count(sentence)
            if words > MOST_SENTENCE_WORDS:
                shown = sentence.replace("\0", "`…`")
                found.append(Fault(words, name, f"a sentence of {words} words: {shown}"))
        for match in _PRIVATE.finditer(part):
            around = part[max(0, match.start() - 30) : match.end() + 30].replace("\0", "`…`")
            found.append(Fault(0, name, f"{match[0]!r}: write {_instead(match[0])}: …{around}…"))
    return found


def _instead(word: str) -> str:
    return next(
        to for pattern, to in PRIVATE_WORDS.items() if re.fullmatch(pattern, word, flags=re.I)
    )


def _parts(lines: list[str]) -> Iterator[str]:
    """What sentences do not reach across: paragraphs, list items, headings, cells of tables, arguments."""
    text = _CODE.sub(lambda match: "\0" + "\n" * match[0].count("\n"), "\n".join(lines))
    part: list[str] = []
    is_heading = False
    for line in [*text.splitlines(), ""]:
        begins = _ITEM.match(line) or _ARGUMENT.match(line)
        if (begins or is_heading or not line.strip()) and part:
            yield from _cells(" ".join(part))
            part = []
        is_heading = line.startswith("#")
        if line.strip():
            part.append(_ITEM.sub("|" if line.lstrip().startswith("|") else "", line).strip())


def _cells(text: str) -> Iterator[str]:
    text = _TAG.sub("", _LINK.sub(r"\1", text))
    yield from (text.strip("|").split("|") if text.startswith("|") else [text])


def _count(text: str) -> int:
    return len(re.findall(r"[\w\0][^\s]*", text))


def main() -> int:
    found = [fault for page in pages() for fault in faults_of_page(page)]
    found += faults_of_all(pages())
    found += [fault for each in docstrings() for fault in faults_of_docstring(*each)]
    print(worst(found) or "no faults")
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())
