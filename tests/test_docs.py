"""The pages: links lead somewhere, examples in them run, the change log knows the version."""

import builtins
import doctest
import re
import sys
from pathlib import Path

import pytest

import backstash

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

import check_links  # noqa: E402

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
def test_every_file_of_a_floor_is_in_the_house_s_tables(part: str) -> None:
    """And each that a table names is there."""
    page = (ROOT / "docs/design.md").read_text()
    table = page.partition(f"#### `{part}`\n")[2].partition("\n#### ")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    named = [name for row in rows for name in re.findall(r"`(\w+\.py)`", row)]
    files = {path.name for path in (ROOT / "src/backstash" / part).glob("*.py")}
    assert sorted(named) == sorted(files - {"__init__.py"})


def test_every_page_is_in_the_navigation_of_the_site() -> None:
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    listed = re.findall(r"^\s+- (?:[^#\n]*: )?([\w.-]+\.md)(?: # (generated))?$", nav, re.M)
    written = [name for name, generated in listed if not generated]
    assert sorted(written) == sorted(path.name for path in (ROOT / "docs").glob("*.md"))
