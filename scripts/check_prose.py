"""Check how the pages of ``docs`` and the public docstrings are written: short sentences, ordinary words.

    python scripts/check_prose.py

Print the ten worst faults, and exit with status 1 if there are any. A fault is a sentence of more than 40
words, a page of more than 1,500 words, or a word that this project used in a meaning of its own.
``tests/test_docs.py`` runs the same check with a list of exceptions.
"""

import ast
import importlib
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import check_links

__all__ = ["Fault", "docstrings", "faults_of_docstring", "faults_of_page", "pages", "worst"]

ROOT = Path(__file__).resolve().parent.parent
MOST_SENTENCE_WORDS = 40
MOST_PAGE_WORDS = 1_500

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
    words = sum(_count(text) for text in _parts(lines))
    if words > MOST_PAGE_WORDS:
        found.append(
            Fault(words, name, f"{words} words; a page has at most {MOST_PAGE_WORDS:,}: divide it")
        )
    return found


def faults_of_docstring(name: str, text: str) -> list[Fault]:
    """Return the faults of one docstring; sessions are not checked."""
    lines, in_session = [], False
    for line in inspect.cleandoc(text).splitlines():
        in_session = line.lstrip().startswith(">>>") or (in_session and bool(line.strip()))
        lines.append("" if in_session else _ROLE.sub("", line))
    return _faults_of(name, lines)


def docstrings() -> Iterator[tuple[str, str]]:
    """Yield each public name, ``"backstash.Stash"``, with its docstrings and those of its public members."""
    sys.path.insert(0, str(ROOT / "src"))
    seen: set[int] = set()
    for module in _public_modules():
        for name in importlib.import_module(module).__all__:
            made = getattr(importlib.import_module(module), name)
            home = getattr(made, "__module__", None) or type(made).__module__
            if not home.startswith("backstash") or id(made) in seen:
                continue
            seen.add(id(made))
            if inspect.isclass(made):
                texts = list(_docstrings_of_class(made))
            elif callable(made) or type(made).__module__.startswith("backstash"):
                texts = [inspect.getdoc(made) or ""]
            else:
                continue
            for text in filter(None, texts):
                yield f"{module}.{name}", text


def worst(found: list[Fault], most: int = 10) -> str:
    """Return the worst of ``found``, a line each."""
    ranked = sorted(found, key=lambda fault: -fault.weight)
    rest = len(ranked) - most
    lines = [str(fault) for fault in ranked[:most]]
    return "\n".join([*lines, *([f"and {rest} more"] if rest > 0 else [])])


def _public_modules() -> list[str]:
    """The modules whose ``__all__`` is public, the shortest paths first, without the command line."""
    found = []
    package = ROOT / "src/backstash"
    for path in package.rglob("*.py"):
        parts = path.relative_to(package.parent).with_suffix("").parts
        module = ".".join(parts).removesuffix(".__init__")
        is_private = any(part.startswith("_") for part in module.split("."))
        if not is_private and "cli" not in parts and "integrations" not in parts:
            tree = ast.parse(path.read_text(encoding="utf-8"))
            if any("__all__" in ast.unparse(node) for node in tree.body):
                found.append(module)
    return sorted(found, key=lambda module: (module.count("."), module))


def _docstrings_of_class(cls: type) -> Iterator[str]:
    yield cls.__doc__ or ""
    for name, member in vars(cls).items():
        if name.startswith("_") and name != "__call__":
            continue
        member = member.fget if isinstance(member, property) else member
        member = getattr(member, "__func__", member)
        if inspect.isfunction(member):
            yield member.__doc__ or ""
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(body, ast.ClassDef)
    for field, text in zip(body.body, body.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
            yield str(ast.literal_eval(text.value))


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
    found += [fault for each in docstrings() for fault in faults_of_docstring(*each)]
    print(worst(found) or "no faults")
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())
