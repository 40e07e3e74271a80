"""The page, in a real browser: what it shows, what keys do, and that nothing in a name can do harm."""

import base64
import hashlib
import json
import re

import pytest

from backstash.places import PLACES
from backstash.report import render_page
from backstash.report._bounds import bounded
from backstash.report._draw._colors import CSS
from backstash.report._levels import TIERS

HOSTILE = (
    "</script><script>window.hacked=1</script><img src=x onerror=window.hacked=1>\u2028'\"`${1}&lt;"
)
MIB = 1 << 20
GRAPH = '<svg xmlns="http://www.w3.org/2000/svg" width="40" height="20"><rect width="9" height="9"/></svg>'


def report(**parts):
    """A report of two steps and four modules."""
    seconds = [0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75]
    whole = {
        "title": "train.py",
        "subtitle": "A subtitle",
        "command": "backstash run --disk /scratch train.py",
        "made": "a machine",
        "facts": [
            {"label": "Peak memory", "value": 300 * MIB, "unit": "bytes", "note": "over the start"},
            {"label": "Peak without", "value": None, "unit": "bytes", "how": "backstash run plain"},
            {"label": "Slowdown", "value": 1.0412, "unit": "ratio"},
        ],
        "split": {
            "label": "Where the bytes went",
            "parts": [
                {"name": "went down", "bytes": 900 * MIB, "key": "disk"},
                {"name": "stayed", "bytes": 100 * MIB, "key": "keep"},
            ],
        },
        "curve": {
            "seconds": seconds,
            "tiers": [
                {
                    "key": "keep",
                    "name": "in place",
                    "below": False,
                    "bytes": _mib(0, 8, 16, 8, 0, 8, 12, 0),
                },
                {
                    "key": "ahead",
                    "name": "read back",
                    "below": False,
                    "bytes": _mib(0, 0, 0, 8, 0, 0, 0, 8),
                },
                {
                    "key": "disk",
                    "name": "on disk",
                    "below": True,
                    "bytes": _mib(0, 0, 64, 32, 0, 16, 64, 32),
                },
            ],
            "marks": [
                {"label": "1", "begin": 0.0, "end": 1.0},
                {"label": "2", "begin": 1.0, "end": 1.75},
            ],
            "phases": [
                {"label": "forward", "begin": 0.0, "end": 0.5},
                {"label": "backward", "begin": 0.5, "end": 1.0},
            ],
        },
        "modules": {
            "columns": [
                {"label": "module", "unit": "text"},
                {"label": "saved", "unit": "bytes"},
                {"label": "blocks", "unit": "count"},
            ],
            "rows": [
                ["blocks.0.mlp", 48 * MIB, 4],
                ["blocks.0.attention", 16 * MIB, 4],
                ["blocks.1.mlp", 64 * MIB, 4],
                ["head", 2 * MIB, 1],
            ],
            "note": "over two steps",
            "lives": {
                "paths": ["blocks.0.mlp", "blocks.0.mlp", "blocks.1.mlp", "blocks.1.mlp", "head"],
                "seconds": [0.25, 0.5, 0.5, 1.0, 1.25],
                "memory": [8 * MIB, -8 * MIB, 16 * MIB, -16 * MIB, 2 * MIB],
                "down": [0, 8 * MIB, 0, 0, 0],
            },
        },
        "stalls": [
            {"seconds": 0.75, "duration": 0.02, "module": "blocks.1.mlp", "what": "backward"},
            {"seconds": 1.5, "duration": 0.001, "module": "space for more", "what": "forward"},
        ],
        "advice": [{"text": "Keep more.", "code": "--keep 32MiB"}],
        "graph": GRAPH,
        "notes": ["A note."],
    }
    return {key: value for key, value in (whole | parts).items() if value is not None}


def _mib(*values):
    return [value * MIB for value in values]


def data_of(page):
    found = re.search(r'<script type="application/json" id="report">(.*?)</script>', page, re.S)
    return json.loads(found[1])


@pytest.fixture
def shown(chromium, tmp_path):
    """Opens the page of a report; at the end it has asked for nothing and complained of nothing."""
    path = tmp_path / "page.html"

    def show(**parts):
        options = {name: parts.pop(name) for name in ("width", "height", "dark") if name in parts}
        path.write_text(render_page(report(**parts)), encoding="utf-8")
        chromium.open(path, **options)
        return chromium

    yield show
    assert chromium.problems == []
    assert [url for url in chromium.requests if not url.startswith("data:")] == [path.as_uri()]


def text(page, selector):
    return page.run(f"document.querySelector({json.dumps(selector)}).innerText")


def focus(page, selector, most=40):
    """Press Tab until the element has the focus."""
    page.run("document.activeElement.blur()")
    for _ in range(most):
        page.press("Tab")
        if page.run(f"document.activeElement.matches({json.dumps(selector)})"):
            return
    raise AssertionError(f"{selector} is not reached by Tab")


# What it shows.


def test_page_and_picture_know_every_place() -> None:
    page = render_page(report())
    for key, place in PLACES.items():
        assert page.count(f"--{key}:{place.light};") == page.count(f"--{key}:{place.dark};") == 1
        assert f"i.{key}{{background:var(--{key})}}.tier.{key}{{fill:var(--{key})}}" in page
        assert f'"{key}": "{place.label}"' in page
        assert f'.bs-graph [fill="{place.light}"]{{fill:var(--g-{key})}}' in CSS
        assert f"--g-{key}:{place.light};" in CSS and f"--g-{key}:{place.dark};" in CSS
    assert {name.removesuffix("_bytes") for name in TIERS} <= PLACES.keys()


def test_every_part_is_there(shown):
    page = shown()
    assert page.run("document.title") == "train.py \u2013 backstash"
    assert text(page, "h1") == "train.py"
    assert [
        heading.strip()
        for heading in page.run("[...document.querySelectorAll('h2')].map(e => e.innerText)")
    ] == [
        "Where the bytes went",
        "What was held, over time",
        "By module",
        "The longest waits",
        "Advice",
        "The autograd graph",
        "What to know about these figures",
    ]
    assert text(page, ".subtitle") == "A subtitle"
    assert text(page, "header code") == "backstash run --disk /scratch train.py"
    facts = page.run("[...document.querySelectorAll('.fact')].map(e => e.innerText.split('\\n'))")
    assert facts[0][:3] == ["Peak memory", "300 MiB", "over the start"]
    assert facts[1][:2] == ["Peak without", "not measured"]
    assert facts[2][:2] == ["Slowdown", "1.04 \u00d7"]
    assert (
        page.run("document.querySelector('.fact details code').textContent")
        == "backstash run plain"
    )
    assert "900 MiB 90 % went down" in text(page, "#split")
    assert page.run("document.querySelector('#graph img').naturalWidth") == 40
    assert "20.0 ms" in text(page, "#stalls") and "1.0 ms" in text(page, "#stalls")
    assert "--keep 32MiB" in text(page, "#advice") and "A note." in text(page, "#notes")


def test_a_graph_without_a_picture_is_text(shown):
    page = shown(graph=None, graph_text=f"#0  Mul\n    saved{HOSTILE}")
    assert (
        page.run("document.querySelector('#graph pre').textContent")
        == f"#0  Mul\n    saved{HOSTILE}"
    )
    assert not page.run("document.querySelector('#graph img')")


def test_what_is_not_known_is_not_there(shown):
    nothing = dict.fromkeys(report().keys() - {"title"})
    page = shown(**nothing)
    assert text(page, "main").split("\n\n") == ["BACKSTASH REPORT", "train.py"]
    page = shown(
        **nothing
        | {"modules": {"columns": report()["modules"]["columns"], "rows": [["a", None, 1]]}}
    )
    assert page.run("document.querySelectorAll('.rows .row').length") == 1
    page = shown(curve=None)
    focus(page, "#modules .grid")
    page.press("Enter")
    page.run("document.querySelector('#stalls tbody tr').click()")


def test_the_curve_has_its_tiers_on_their_side_of_the_line(shown):
    page = shown()
    boxes = page.run(
        "Object.fromEntries([...document.querySelectorAll('.tier')].map(e => "
        "[e.classList[1], [e.getBBox().y, e.getBBox().y + e.getBBox().height]]))"
    )
    zero = page.run("document.querySelector('.zero').getBBox().y")
    assert boxes["keep"][1] == pytest.approx(zero, abs=0.2)
    assert boxes["ahead"][1] <= zero + 0.2
    assert boxes["disk"][0] == pytest.approx(zero, abs=0.2) and boxes["disk"][1] > zero + 100


# Keys and pointer.


def cursor(page):
    return page.run("document.querySelector('.chart').getAttribute('aria-valuetext')")


def test_arrows_move_the_cursor_and_p_finds_the_peak(shown):
    page = shown()
    assert cursor(page).startswith("at 500 ms: in memory 16 MiB")
    focus(page, ".chart")
    page.press("ArrowRight")
    assert (
        cursor(page)
        == "at 750 ms: in memory 16 MiB; in place 8 MiB, read back 8 MiB, on disk 32 MiB"
    )
    page.press("Home")
    assert cursor(page).startswith("at 0 s")
    page.press("ArrowLeft")
    assert cursor(page).startswith("at 0 s")
    page.press("End")
    assert cursor(page).startswith("at 1.75 s")
    page.press("p")
    assert cursor(page).startswith("at 500 ms")
    assert "at 500 ms" in text(page, ".readout") and "64 MiB" in text(page, ".readout")


def test_the_pointer_moves_the_cursor(shown):
    page = shown()
    box = page.run(
        "(b => [b.left, b.top, b.width, b.height])(document.querySelector('.chart').getBoundingClientRect())"
    )
    page.click(box[0] + box[2] * 0.98, box[1] + box[3] / 2)
    assert cursor(page).startswith("at 1.50 s")


def test_a_step_can_be_looked_at_alone(shown):
    page = shown()
    page.run(
        "{ const s = document.querySelector('#range'); s.value = 2; s.dispatchEvent(new Event('change')); }"
    )
    assert cursor(page).startswith("at 1.50 s: in memory 12 MiB")
    focus(page, ".chart")
    page.press("Home")
    assert cursor(page).startswith("at 1.00 s")


def test_enter_shows_one_module_in_the_curve_and_escape_all(shown):
    page = shown()
    assert page.run("document.querySelector('#filter').hidden")
    focus(page, "#modules .grid")
    page.press("ArrowDown")
    page.press("Enter")  # the second largest
    assert text(page, "#filter") == "only blocks.0.mlp \u2715"
    assert page.run("document.querySelector('.row.chosen').innerText").startswith("blocks.0.mlp")
    page.run("chart.move(1)")
    assert cursor(page) == "at 250 ms: in memory 8 MiB; in memory 8 MiB, went down 0 B"
    page.run("chart.move(2)")
    assert cursor(page) == "at 500 ms: in memory 0 B; in memory 0 B, went down 8 MiB"
    page.press("Escape")
    assert page.run("document.querySelector('#filter').hidden")
    assert "read back" in cursor(page)


def test_what_was_freed_has_colours_and_a_place_in_a_module_s_curve(shown):
    lives = {
        "paths": ["head", "head", "head", "blocks.1.mlp"],
        "seconds": [0.25, 0.5, 0.5, 0.5],
        "memory": [8 * MIB, -2 * MIB, -5 * MIB, 3 * MIB],
        "down": [0, 0, 0, 0],
        "packed": [0, 2 * MIB, 0, 0],
        "recomputed": [0, 0, 5 * MIB, 0],
    }
    tiers = [
        {"key": "keep", "name": "in place", "below": False, "bytes": _mib(0, 8, 4, 4, 0, 0, 0, 0)},
        {"key": "packed", "name": "packed", "below": True, "bytes": _mib(0, 0, 2, 2, 0, 0, 0, 0)},
        {
            "key": "recomputed",
            "name": "again",
            "below": True,
            "bytes": _mib(0, 0, 5, 5, 0, 0, 0, 0),
        },
    ]
    whole = report()
    page = shown(
        curve=whole["curve"] | {"tiers": tiers}, modules=whole["modules"] | {"lives": lives}
    )
    fills = [
        page.run(f"getComputedStyle(document.querySelector('.tier.{key}')).fill")
        for key in ("keep", "packed", "recomputed")
    ]
    swatches = [
        page.run(f"getComputedStyle(document.querySelector('.readout i.{key}')).backgroundColor")
        for key in ("keep", "packed", "recomputed")
    ]
    assert len(set(fills)) == 3 and fills == swatches
    page.run("{ choose('head'); chart.move(2); }")
    assert cursor(page) == (
        "at 500 ms: in memory 1 MiB; in memory 1 MiB, went down 0 B, freed by packing 2 MiB, "
        "to be recomputed 5 MiB"
    )
    page.run("{ choose('blocks.1.mlp'); chart.move(2); }")
    assert cursor(page).endswith("in memory 3 MiB, went down 0 B")  # nothing of it was freed


def test_the_plan_is_shown_next_to_its_outcome(shown):
    columns = [{"label": "", "unit": "text"}, {"label": "peak of a step", "unit": "bytes"}]
    classes = {
        "columns": [{"label": "class", "unit": "text"}, {"label": "adds", "unit": "seconds"}],
        "rows": [[HOSTILE, 0.012], *[[f"blocks.{at}", 0.0] for at in range(300)]],
    }
    page = shown(
        plan={
            "note": "Within a budget of 540 MiB.",
            "figures": {
                "columns": columns,
                "rows": [["predicted", 64 * MIB], ["measured", 65 * MIB]],
            },
            "parts": [
                {"name": "on disk", "bytes": 3 * MIB, "key": "disk"},
                {"name": "recomputed", "bytes": MIB, "key": "recomputed"},
            ],
            "classes": classes,
        }
    )
    found = text(page, "#plan")
    assert "Within a budget of 540 MiB." in found
    assert "predicted\t64 MiB" in found and "measured\t65 MiB" in found
    assert "3 MiB 75 % on disk" in found and "1 MiB 25 % recomputed" in found
    assert "12.0 ms" in found and HOSTILE.replace("\u2028", "") in found.replace("\u2028", "")
    assert page.run("document.querySelectorAll('#plan tbody tr').length") == 2 + 200
    assert "Of 301 classes of the plan, the first 200 are shown." in text(page, "#notes")


def test_levels_add_up_and_filter_whole_parts(shown):
    page = shown()
    page.run(
        "{ const s = document.querySelector('#depth'); s.value = 1; s.dispatchEvent(new Event('change')); }"
    )
    rows = page.run(
        "[...document.querySelectorAll('.rows .row')].map(e => e.innerText.split('\\n'))"
    )
    assert rows == [["blocks", "128 MiB", "12"], ["head", "2 MiB", "1"]]
    focus(page, "#modules .grid")
    page.press("Enter")
    page.run("chart.move(2)")
    assert cursor(page) == "at 500 ms: in memory 16 MiB; in memory 16 MiB, went down 8 MiB"


def test_a_head_sorts_and_the_search_finds(shown):
    page = shown()
    focus(page, ".head button")
    page.press("Enter")
    first = "document.querySelector('.rows .row').innerText.split('\\n')[0]"
    assert page.run(first) == "blocks.0.attention"
    assert page.run("document.querySelector('[aria-sort=ascending]').innerText").startswith(
        "module"
    )
    page.press("Enter")
    assert page.run(first) == "head"
    focus(page, "#search")
    for letter in "attent":
        page.press(letter)
    assert page.run("[...document.querySelectorAll('.rows .row')].length") == 1
    assert text(page, "#modules .bar-of-controls").endswith("1 row")


def test_a_wait_leads_to_its_moment(shown):
    page = shown()
    page.run("document.querySelector('#stalls button').click()")
    assert cursor(page).startswith("at 750 ms")
    assert page.run("document.activeElement.matches('.chart')")


# Looks.


CONTRAST = """(selector) => {
    const numbers = (color) => color.match(/[\\d.]+/g).map(Number);
    const linear = (v) => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
    const light = (color) => numbers(color).slice(0, 3).map((v) => linear(v / 255))
        .reduce((sum, v, at) => sum + v * [0.2126, 0.7152, 0.0722][at], 0);
    const paper = (of) => getComputedStyle(of).backgroundColor;
    const element = document.querySelector(selector);
    let behind = element;
    while ((numbers(paper(behind))[3] ?? 1) === 0) behind = behind.parentElement;
    const pair = [light(getComputedStyle(element).color), light(paper(behind))];
    return (Math.max(...pair) + 0.05) / (Math.min(...pair) + 0.05);
}"""


def contrast(page, selector):
    """Of an element's text with what is behind it, by WCAG's formula."""
    return page.run(f"({CONTRAST})({json.dumps(selector)})")


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_text_can_be_read_in_light_and_dark(shown, dark):
    page = shown(dark=dark)
    paper = page.run("getComputedStyle(document.body).backgroundColor")
    assert (paper == "rgb(255, 255, 255)") is not dark
    for selector in (
        "h1",
        ".faint",
        ".fact .note",
        ".fact.unknown .value",
        ".row.head button",
        "td button",
        "code",
    ):
        assert contrast(page, selector) >= 4.5, selector


@pytest.mark.parametrize("width", [360, 1600])
def test_nothing_sticks_out(shown, width):
    page = shown(width=width, title="a_script_with_a_name_that_is_really_quite_long_" * 3)
    assert page.run("document.documentElement.scrollWidth") <= width
    page.size(480, 800)
    page.run("new Promise(then => requestAnimationFrame(() => requestAnimationFrame(then)))")
    assert page.run("document.querySelector('.chart').getBoundingClientRect().right") <= 480


# Names that would like to be markup.


def hostile(value):
    if isinstance(value, dict):
        return {
            key: each if key in ("key", "unit", "graph") else hostile(each)
            for key, each in value.items()
        }
    if isinstance(value, list):
        return [hostile(each) for each in value]
    return value + HOSTILE if isinstance(value, str) else value


def test_hostile_names_are_text(shown):
    before = shown().run("[document.scripts.length, document.images.length]")
    script = "<script>window.hacked=1</script>"
    svg = (
        f"<svg xmlns='http://www.w3.org/2000/svg' onload='window.hacked=1'>{script}</svg>{HOSTILE}"
    )
    page = shown(**hostile(report()) | {"graph": svg})
    assert page.run("window.hacked === undefined")
    assert page.run("[document.scripts.length, document.images.length]") == before
    assert page.run("document.querySelector('h1').textContent") == "train.py" + HOSTILE
    assert (
        page.run("document.querySelector('.rows .row [role=gridcell]').textContent")
        == "blocks.1.mlp" + HOSTILE
    )
    focus(page, "#modules .grid")
    page.press("Enter")
    page.run("chart.move(2)")
    assert (
        page.run("document.querySelector('#filter').textContent")
        == f"only blocks.1.mlp{HOSTILE} \u2715"
    )
    assert page.run("window.hacked === undefined")


def test_a_script_that_gets_in_is_refused(chromium, tmp_path):
    path = tmp_path / "page.html"
    page = render_page(report()).replace("</body>", "<script>window.hacked = 1</script></body>")
    path.write_text(page.replace("</body>", "<img src='https://example.org/x.png'></body>"))
    chromium.open(path)
    assert chromium.run("window.hacked === undefined")
    assert any("Content Security Policy" in str(problem) for problem in chromium.problems)


def test_the_file_s_data_has_nothing_that_ends_it():
    page = render_page(hostile(report()))
    raw = page.split('id="report">', 1)[1].split("</script>", 1)[0]
    assert not set("<>&\u2028\u2029") & set(raw)
    assert data_of(page)["title"] == "train.py" + HOSTILE
    script = page.rsplit("<script>", 1)[1].split("</script>", 1)[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in page
    assert "http" not in page.replace("http-equiv", "").replace(
        "http://www.w3.org/2000/svg", ""
    ).replace(base64.b64encode(report()["graph"].encode()).decode(), "")


def test_what_is_no_plain_value_is_refused():
    with pytest.raises(ValueError, match="not JSON compliant"):
        render_page({"title": "x", "facts": [{"label": "a", "value": float("nan")}]})


# Large reports.


def large(rows, points):
    """A report with that many modules, and a curve of that many points with one move in each."""
    columns = report()["modules"]["columns"]
    paths = [f"blocks.{at // 100}.part.{at % 100}" for at in range(rows)]
    seconds = [at / 1000 for at in range(points)]
    lives = {
        "paths": [paths[at % rows] for at in range(points)],
        "seconds": seconds,
        "memory": [1 if at < points // 2 else -1 for at in range(points)],
        "down": [0] * points,
    }
    memory = [min(at, points - at) for at in range(points)]
    memory[points // 3] = 10 * points  # a peak of one moment
    tiers = [{"key": "keep", "name": "in place", "below": False, "bytes": memory}]
    table = {
        "columns": columns,
        "rows": [[path, at, 1] for at, path in enumerate(paths)],
        "lives": lives,
    }
    return {"title": "large", "curve": {"seconds": seconds, "tiers": tiers}, "modules": table}


def test_a_million_rows_are_bounded_and_usable(chromium, tmp_path):
    rows = 1_000_000
    given = large(rows, 200_000)
    page = render_page(given)
    assert len(page) < 10_000_000
    path = tmp_path / "large.html"
    path.write_text(page, encoding="utf-8")
    chromium.open(path)
    assert chromium.run("document.querySelectorAll('*').length") < 2000
    assert "20,001 rows" in text(chromium, "#modules .bar-of-controls")
    assert "Of 1,000,000 rows the first 20,000 are shown" in text(chromium, "#notes")
    assert "Of 200,000 changes of the curve" in text(chromium, "#notes")
    assert cursor(chromium).startswith("at 66.67 s: in memory 1.91 MiB")
    focus(chromium, "#modules .grid")
    last = "document.querySelector('.row.active').innerText.split('\\n')"
    chromium.press("End")
    assert chromium.run(last) == ["blocks.9800.part.0", "957 KiB", "1"]
    chromium.press("Home")
    assert chromium.run(last)[0] == "(980,000 more rows)"
    chromium.press("ArrowDown", times=3)
    assert chromium.run(last)[0] == "blocks.9999.part.97"
    chromium.press("Enter")
    assert not chromium.run("document.querySelector('#filter').hidden")
    assert chromium.problems == []


def test_bounds_keep_peaks_and_sums():
    given = large(30_000, 50_000)
    given["curve"]["tiers"].append(
        {"key": "disk", "name": "on disk", "below": True, "bytes": [7] * 50_000}
    )
    given["curve"]["tiers"][1]["bytes"][123] = 10**9
    given["stalls"] = [
        {"seconds": 0.0, "duration": 1.0, "module": "m" * 10**6, "what": "forward"}
    ] * 1000
    cut = bounded(given)
    assert len(cut["curve"]["seconds"]) <= 2_500
    for before, after in zip(given["curve"]["tiers"], cut["curve"]["tiers"], strict=True):
        assert max(before["bytes"]) == max(after["bytes"])
        assert before["bytes"][-1] == after["bytes"][-1]
    for column in (1, 2):
        assert sum(row[column] for row in cut["modules"]["rows"]) == sum(
            row[column] for row in given["modules"]["rows"]
        )
    lives = cut["modules"]["lives"]
    assert len(lives["path"]) <= 60_000
    assert sum(lives["memory"]) == 0 and max(lives["point"]) < len(cut["curve"]["seconds"])
    assert len(cut["stalls"]) == 200 and len(cut["notes"]) == 3
    assert bounded(report())["notes"] == ["A note."]


def test_curves_of_deep_modules_become_their_parents(monkeypatch):
    monkeypatch.setattr("backstash.report._bounds._MOVES", 500)
    cut = bounded(large(1000, 2000))
    assert set(cut["modules"]["lives"]["paths"]) == {"blocks"}
    assert "Curves are kept for modules down to level 1" in " ".join(cut["notes"])
