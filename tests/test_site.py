"""The site: it builds strictly, has every public name, asks no network, and its search works from a folder."""

import dataclasses
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import backstash
import test_layout

ROOT = Path(__file__).resolve().parent.parent
pytest.importorskip("mkdocs", reason="no MkDocs here: pip install -e '.[docs]'")
pytest.importorskip("material", reason="no Material for MkDocs here: pip install -e '.[docs]'")
LOADS = {("script", "src"), ("link", "href"), ("img", "src"), ("iframe", "src"), ("source", "src")}


class Page(HTMLParser):
    """What a page loads, where it leads, and the fragments that it answers to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.leads: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        for name, value in attrs:
            if (tag, name) in LOADS and values.get("rel") != "canonical":
                self.loads.append(value or "")
            elif name == "href":
                self.leads.append(value or "")
            elif name in ("id", "name"):
                self.anchors.add(value or "")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built strictly: a warning fails it."""
    built = tmp_path_factory.mktemp("site")
    ran = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", built],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return built


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    return {path: Page(path.read_text(encoding="utf-8")) for path in site.rglob("*.html")}


def test_every_public_name_has_its_place(site: Path, pages: dict[Path, Page]) -> None:
    missing = [
        f"{module}.{name}"
        for module in test_layout.MODULES
        if not test_layout.is_private(module)
        for name in test_layout.listed_names(module) or ()
        if f"{module}.{name}" not in pages[site / "api" / f"{module}.html"].anchors
    ]
    assert missing == []
    assert test_layout.NAMES <= {
        name.removeprefix("backstash.") for name in pages[site / "api/backstash.html"].anchors
    }


def test_every_figure_of_a_stash_is_described(site: Path, pages: dict[Path, Page]) -> None:
    stats = type(backstash.Stash().stats())
    named = {f"{stats.__module__}.Stats.{field.name}" for field in dataclasses.fields(stats)}
    assert named - pages[site / "api/backstash.html"].anchors == set()


def test_every_public_name_is_described(site: Path) -> None:
    """A name's heading and signature are followed by words."""
    empty = []
    for path in sorted((site / "api").glob("*.html")):
        text = path.read_text(encoding="utf-8")
        for part in text.split('<div class="doc doc-object doc-')[1:]:
            named = re.search(r'\bid="(backstash[^"]*)"', part)
            words = re.sub(r"<(h\d|pre)\b.*?</\1>|<[^>]+>", " ", part, flags=re.S)
            if not part.startswith("module") and not words.partition(">")[2].strip():
                empty.append(named[1] if named else part[:80])
    assert empty == []


def test_docstrings_are_markdown(site: Path) -> None:
    """No role, table or session of a docstring is shown as its source."""
    for path in (site / "api").glob("*.html"):
        text = path.read_text(encoding="utf-8")
        prose = re.sub(r"<[^>]+>", "", re.sub(r"<pre\b.*?</pre>", "", text, flags=re.S))
        assert (
            re.findall(r":(?:attr|class|data|func|meth):|={6,}|&gt;&gt;&gt;|\w::$", prose, re.M)
            == []
        )
        assert "<blockquote>" not in text and "BLANKLINE" not in text


def test_no_page_asks_the_network(site: Path, pages: dict[Path, Page]) -> None:
    loaded = {load for page in pages.values() for load in page.loads}
    assert len(loaded) > 5
    assert [load for load in loaded if re.match(r"([a-z]+:)?//", load)] == []
    for path in site.rglob("*.css"):
        assert re.findall(r"(?:url\(|@import)\s*[\"']?(?:https?:)?//[^)]*", path.read_text()) == []


def test_every_link_inside_leads_somewhere(site: Path, pages: dict[Path, Page]) -> None:
    broken = []
    for path, page in pages.items():
        if path.name == "404.html":  # its links begin with /: a server shows it at any depth
            continue
        for link in page.loads + page.leads:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc or not link:
                continue
            there = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            fragment = unquote(parts.fragment)
            if not there.exists():
                broken.append(f"{path.relative_to(site)}: {link}")
            elif fragment and there in pages and fragment not in pages[there].anchors:
                broken.append(f"{path.relative_to(site)}: {link}: no such anchor")
    assert broken == []


def test_links_that_leave_the_docs_lead_to_the_repository(pages: dict[Path, Page]) -> None:
    home = re.search(r'^Repository = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.M)
    assert home
    inside = {link for page in pages.values() for link in page.leads if link.startswith(home[1])}
    paths = [link.removeprefix(f"{home[1]}/").split("/", 2) for link in inside - {home[1]}]
    assert len(paths) > 20
    for kind, branch, path in paths:
        there = ROOT / path.partition("#")[0]
        assert branch == "main" and there.exists(), path
        assert kind == ("tree" if there.is_dir() else "blob"), path


@pytest.fixture
def chromium_home() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="site-", ignore_cleanup_errors=True) as home:
        yield home


def test_search_works_from_a_folder(site: Path, chromium_home: str) -> None:
    names = ("chromium", "chromium-browser", "google-chrome", "chrome")
    chromium = next(filter(None, map(shutil.which, names)), None)
    if chromium is None:
        pytest.skip("no Chromium here; on Debian: apt install chromium")
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-quic"]
    options += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
    options += [f"--user-data-dir={chromium_home}", "--virtual-time-budget=10000", "--dump-dom"]
    ran = subprocess.run(
        [chromium, *options, f"file://{site}/index.html?q=Binomial"],
        capture_output=True,
        text=True,
        timeout=100,
    )
    found = re.search(r'<ol class="md-search-result__list".*?</ol>', ran.stdout, re.S)
    assert found, ran.stderr[-2000:]
    assert "/api/backstash.graph.html" in found[0], found[0]
