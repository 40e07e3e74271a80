"""The pages: links lead somewhere, examples run, sentences are short, lists of fields are complete."""

import builtins
import dataclasses
import doctest
import importlib
import inspect
import re
import sys
from pathlib import Path

import pytest

import backstash
import backstash.plan
from backstash.errors import StashError, StashWarning

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

import check_links  # noqa: E402
import check_prose  # noqa: E402

PAGES = check_links.pages()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    assert check_links.broken_links(page) == []


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("see [this](missing.md)", "no such file"),
        ("![chart](missing.svg 'a title')", "no such file"),
        ("[this]: missing.md", "no such file"),
        ('<a href="missing.md">', "no such file"),
        ("# One heading\n[here](#another-heading)", "no such heading; there are: one-heading"),
    ],
)
def test_broken_link_is_found(tmp_path: Path, text: str, why: str) -> None:
    page = tmp_path / "page.md"
    page.write_text(text)
    (found,) = check_links.broken_links(page)
    assert found.startswith(f"{page}:") and why in found


def test_good_links_are_not_reported(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# `Stash`: a *heading*\n# Twice\n# Twice\n"
        "[a](#stash-a-heading) [b](#twice-1) [c](page.md#twice) [d](https://example.org/x#y)\n"
        "`[code](missing.md)`\n```\n[code](missing.md)\n```\n[folder](.)\n"
    )
    assert check_links.broken_links(page) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_sessions_in_the_page_run(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = doctest.testfile(
        str(page), module_relative=False, optionflags=doctest.ELLIPSIS, encoding="utf-8"
    )
    vars(builtins).pop("_", None)  # which the session's last value is
    assert result.failed == 0


def test_change_log_begins_with_the_version() -> None:
    logged = re.search(r"^## (?:\[?)([\d.]+)", (ROOT / "CHANGELOG.md").read_text(), re.M)
    cited = re.search(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(), re.M)
    assert logged and cited
    assert logged[1] == cited[1] == backstash.__version__


@pytest.mark.parametrize(
    "part",
    [
        *("_plan", "_torch", "stores", "_runtime", "_device", "_saved", "_tiers"),
        *("_budget", "_core", "_recompute"),
    ],
)
def test_every_file_of_a_layer_is_in_its_list(part: str) -> None:
    """And each that a list names is there."""
    page = (ROOT / "docs/explanation/files.md").read_text(encoding="utf-8")
    items = page.partition(f"## `{part}`\n")[2].partition("\n## ")[0]
    rows = [line.partition(":")[0] for line in items.splitlines() if line.startswith("- `")]
    named = [name for row in rows for name in re.findall(r"`(\w+\.py)`", row)]
    files = {path.name for path in (ROOT / "src/backstash" / part).glob("*.py")}
    assert sorted(named) == sorted(files - {"__init__.py"})


def test_every_page_is_in_the_navigation_of_the_site() -> None:
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    listed = re.findall(r"^\s+- (?:[^#\n]*: )?([\w./-]+\.md)$", nav, re.M)
    docs = ROOT / "docs"
    assert sorted(listed) == sorted(str(path.relative_to(docs)) for path in docs.rglob("*.md"))


def prose_faults() -> dict[str, list[check_prose.Fault]]:
    """The faults of each page of docs and of each public name that has any."""
    found = {
        str(page.relative_to(ROOT)): check_prose.faults_of_page(page)
        for page in check_prose.pages()
    }
    found["docs"] = check_prose.faults_of_all(check_prose.pages())
    for name, text in check_prose.docstrings():
        found.setdefault(name, []).extend(check_prose.faults_of_docstring(name, text))
    return {where: faults for where, faults in found.items() if faults}


def test_too_many_words_in_all_are_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not check_prose.faults_of_all(check_prose.pages())
    monkeypatch.setattr(check_prose, "MOST_WORDS", 10)
    (fault,) = check_prose.faults_of_all(check_prose.pages())
    assert "words; all pages together have at most 10" in fault.what


def test_pages_and_public_docstrings_are_plain() -> None:
    """No sentence of over 40 words, no page of over 1,500, no word in a meaning of this project's own."""
    found = [each for of in prose_faults().values() for each in of]
    assert not found, f"\n{check_prose.worst(found)}"


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("word " * 41, "a sentence of 41 words"),
        ("One. Word " + "word " * 38 + "[two words](there.md) end.", "a sentence of 42 words"),
        ("| " + "word " * 41 + "| two |", "a sentence of 41 words"),
        ("The stash\ntells it.", "'tells': write reports"),
        ("It is left\nalone.", "'left alone': write kept in memory"),
        ("- What stays.\n- Beside it.", "'Beside': write compared with"),
        ("Short. " * 1501, "1506 words; a page has at most 1,500"),
    ],
)
def test_a_fault_of_a_page_is_found(tmp_path: Path, text: str, what: str) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"# A page\n\nThis is fine.\n\n{text}\n")
    (fault,) = check_prose.faults_of_page(page)
    assert fault.where == "page.md" and what in fault.what


@pytest.mark.parametrize(
    "text",
    [
        "word " * 40,
        "word " * 30 + "end. " + "Word " * 30,
        "- " + "word " * 30 + "\n- " + "word " * 30,
        "# " + "word " * 30 + "\n" + "word " * 30,
        '`plan.state` may be `"left alone"`.',
        "```\nIt tells what it is beside.\n```",
        "backstash reads. " * 30,
    ],
)
def test_what_is_fine_is_no_fault(tmp_path: Path, text: str) -> None:
    page = tmp_path / "page.md"
    page.write_text(text)
    assert check_prose.faults_of_page(page) == []


def test_faults_of_docstrings_are_found() -> None:
    text = """Summary.

    Args:
        first: a size.
        second: what is %s.

    >>> "beside"
    'nor'
    """
    assert check_prose.faults_of_docstring("name", text % "kept in :attr:`beside`") == []
    (fault,) = check_prose.faults_of_docstring("name", text % "let go")
    assert (fault.where, fault.weight) == ("name", 0) and "'let go'" in fault.what


def test_every_public_name_s_docstring_is_looked_at() -> None:
    named = {}
    for name, text in check_prose.docstrings():
        named.setdefault(name, []).append(text)
    assert {
        "backstash.Stash",
        "backstash.graph.checkpoint_loop",
        "backstash.errors.SizeError",
    } <= set(named)
    assert inspect.getdoc(backstash.Stash.recompute) in named["backstash.Stash"]
    assert inspect.getdoc(backstash.Stash.plan) in named["backstash.Stash"]
    assert "Its element type." in named["backstash.SavedTensor"]
    assert any(
        text.startswith("A value for ``Stash(policy=)``")
        for text in named["backstash.policy.Policy"]
    )


def first_column(page: str, heading: str = "") -> list[str]:
    """The names in the first column of the tables of a page, below ``heading``, up to the next one."""
    text = (ROOT / "docs/reference" / page).read_text(encoding="utf-8")
    if heading:
        text = text.partition(f"\n{heading}\n")[2].partition("\n## ")[0]
    return re.findall(r"^\| `\"?(\w+)\"?` \|", text, re.M)


def names_of(record: type) -> list[str]:
    return [field.name for field in dataclasses.fields(record)]


def test_the_list_of_statistics_is_complete() -> None:
    stats = type(backstash.Stash().stats())
    assert first_column("statistics.md") == names_of(stats)


def test_the_list_of_a_plan_s_fields_and_states_is_complete() -> None:
    for name in ("Plan", "StepFigures", "PlannedClass", "PlannedRegion"):
        record = getattr(backstash.plan, name)
        assert first_column("plan.md", f"## Fields of `{name}`") == names_of(record)
    text = (ROOT / "docs/reference/plan.md").read_text(encoding="utf-8")
    states = re.findall(r'^\| `"([\w ]+)"` \|', text, re.M)
    assert states == list(backstash.plan._STATES)


def test_the_list_of_errors_is_complete() -> None:
    for module in ("graph", "hooks", "integrations.transformers", "stores"):
        importlib.import_module(f"backstash.{module}")
    found, todo = set(), [StashError, StashWarning]
    while todo:
        cls = todo.pop()
        if cls.__module__.startswith("backstash"):
            found.add(cls.__name__)
            todo += cls.__subclasses__()
    listed = first_column("errors.md")
    assert sorted(listed) == sorted(found)
