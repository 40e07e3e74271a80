"""``draw`` as text, DOT, SVG and HTML: everything is in each of them, and no name does harm."""

import dataclasses
import functools
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

from backstash.errors import UsageError
from backstash.graph import label_modules
from backstash.report import Drawing, draw
from backstash.report._draw._colors import DARK, LIGHT
from backstash.units import format_bytes
from draw_models import HOSTILE, Gpt, random_graph
from long_tests import takes_long

SVG = "{http://www.w3.org/2000/svg}"
needs_dot = pytest.mark.skipif(
    shutil.which("dot") is None, reason="no dot here: apt install graphviz"
)


@functools.cache
def drawings() -> list[Drawing]:
    """Small and large, with frames and without, wide and deep."""
    model = Gpt(6)
    with label_modules(model):
        loss = model.loss()
    x = torch.rand(4, requires_grad=True)
    (slope,) = torch.autograd.grad(x.tanh().pow(3).sum(), x, create_graph=True)
    found = [draw(loss, model), draw(loss, model, depth=9), draw(loss, color_by="dtype")]
    found += [draw(loss, model, depth=9, collapse_repeated=False), draw(slope.sum())]
    found += [draw([*torch.linalg.svd(torch.rand(3, 3, requires_grad=True))])]
    found += [draw(random_graph(seed, 50), collapse_repeated=False) for seed in range(3)]
    return found


def hostile_drawing() -> Drawing:
    x = torch.rand(4, requires_grad=True)
    y = torch.rand(4, requires_grad=True)

    class Elsewhere:
        where, shape, dtype, device = HOSTILE, torch.Size([4]), torch.float32, "cpu"

    with torch.autograd.graph.saved_tensors_hooks(lambda t: Elsewhere(), lambda p: x):
        a = x.exp()
    hostile = type(HOSTILE.replace("\x00", "").replace("\ud800", ""), (torch.autograd.Function,), {
        "forward": staticmethod(lambda ctx, t: t.clone()),
        "backward": staticmethod(lambda ctx, grad: grad),
    })  # fmt: skip
    b = hostile.apply(a) * y
    for node in (a.grad_fn, b.grad_fn):
        node.metadata["backstash.module"] = HOSTILE
    return draw([b.sum(), b], {HOSTILE: x, "y" * 1000: y, "gone " + HOSTILE: x.new_ones(1)})


@functools.cache
def parsed(drawing: Drawing) -> ElementTree.Element:
    """The picture of a drawing."""
    return ElementTree.fromstring(drawing.to_svg())


@needs_dot
@pytest.mark.parametrize("color_by", ["where", "module", "dtype", "bytes"])
def test_no_name_breaks_out_of_svg_or_html(color_by: Any) -> None:
    for plain in (hostile_drawing(), *drawings()[:2]):
        drawing = dataclasses.replace(plain, color_by=color_by)
        texts = [drawing.to_svg(), drawing._repr_html_() or ""]
        page = drawing.to_html().removeprefix("<!doctype html>\n")
        texts.append(re.sub(r"<meta [^>]*>", "", page))
        for text in texts:
            assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\ud800-\udfff]", text)
            tree = ElementTree.fromstring(text)
            tags = {element.tag.removeprefix(SVG) for element in tree.iter()}
            drawn = {"svg", "style", "polygon", "polyline", "path", "text", "g", "title"}
            assert tags <= drawn | {"html", "head", "meta", "body", "main", "div"}
            for element in tree.iter():
                assert not {name for name in element.attrib if name.startswith("on")}
                assert not {"href", "src"} & {name.rpartition("}")[2] for name in element.attrib}
            assert "url(" not in text and "@import" not in text


@needs_dot
def test_what_was_hostile_can_still_be_read() -> None:
    tree = parsed(hostile_drawing())
    texts = [e.text or "" for e in tree.iter(f"{SVG}title")]
    assert any("<script>alert(1)</script>\\n\\u202e\\x00{|}%s\\ud800" in text for text in texts)
    labels = [(e.text or "").replace("\xa0", " ").strip() for e in tree.iter(f"{SVG}text")]
    assert any(re.fullmatch("y+…y+", label) and len(label) < 60 for label in labels)
    assert any("&beta;" in label for label in labels) and any("\\N" in label for label in labels)


STATEMENT = re.compile(
    r"  (subgraph cluster_\d+ \{|\}|(?:graph|node|edge|n\d+|n\d+ -> n\d+)( \[.*\])?;)"
)

LABEL = re.compile(r"label=<(.*?)>(?=, \w+=|\];)")


def test_dot_has_one_statement_a_line_and_labels_are_well_formed() -> None:
    for drawing in (*drawings(), hostile_drawing()):
        first, *lines, last = drawing.to_dot().splitlines()
        assert (first, last) == ("digraph autograd {", "}")
        matches = [STATEMENT.fullmatch(f"  {line.strip()}") for line in lines]
        assert all(matches), [line for line, found in zip(lines, matches, strict=True) if not found]
        starts = [line.split()[0] for line in lines if " -> " not in line]
        assert sum(" -> n" in line.split("[")[0] for line in lines) == len(drawing.edges)
        assert sum(bool(re.fullmatch(r"n\d+", start)) for start in starts) == len(drawing.nodes)
        assert starts.count("subgraph") == starts.count("}") == len(drawing.groups)
        labels = [each for line in lines for each in LABEL.findall(line)]
        assert len(labels) >= 1 + len(drawing.nodes) + len(drawing.groups)
        for label in labels:
            ElementTree.fromstring(f"<x>{label}</x>")


def test_boxes_are_in_their_frames() -> None:
    for drawing in drawings():
        around: list[int | None] = [None]
        inside: dict[int | None, list[int]] = {}
        for line in map(str.strip, drawing.to_dot().splitlines()[1:-1]):
            if found := re.match(r"subgraph cluster_(\d+)", line):
                assert drawing.groups[int(found[1])].parent == around[-1]
                around.append(int(found[1]))
            elif found := re.match(r"n(\d+) \[", line):
                inside.setdefault(around[-1], []).append(int(found[1]))
            elif line == "}":
                around.pop()
        assert around == [None]
        for number, group in enumerate(drawing.groups):
            assert tuple(inside.get(number, [])) == group.nodes


@needs_dot
@pytest.mark.parametrize("number", range(9))
def test_the_picture_has_every_box_frame_edge_and_row(number: int) -> None:
    drawing = drawings()[number]
    tree = parsed(drawing)
    kinds = [e.get("class") for e in tree.iter(f"{SVG}g")]
    assert kinds.count("node") == len(drawing.nodes) and kinds.count("edge") == len(drawing.edges)
    assert kinds.count("cluster") == len(drawing.groups)
    heads = [e.text or "" for e in tree.iter(f"{SVG}title")]
    assert sorted(head.splitlines()[0] for head in heads) == sorted(
        [node.name or node.label for node in drawing.nodes]
        + [group.title for group in drawing.groups]
    )
    texts = Counter((e.text or "").replace("\xa0", " ").strip() for e in tree.iter(f"{SVG}text"))
    rows = Counter(tensor.name for node in drawing.nodes for tensor in node.tensors)
    assert rows <= texts and (texts["■"] >= rows.total() or drawing.color_by == "dtype")


def test_the_text_has_every_box_once_with_its_frames_inputs_and_rows() -> None:
    for drawing in drawings():
        lines = str(drawing).splitlines()
        numbers = [int(m[1]) for line in lines if (m := re.match(r" *#(\d+)  ", line))]
        assert sorted(numbers) == list(range(len(drawing.nodes)))
        assert sum(line.endswith(":") for line in lines) == len(drawing.groups)
        rows = [line.split()[:2] for line in lines if line.split()[:1] == ["saved"]]
        saved = [tensor.name for node in drawing.nodes for tensor in node.tensors]
        assert sorted(name for _, name in rows) == sorted(name.split()[0] for name in saved)
        used = sum(len(re.findall(r"#\d+", line.partition("  from ")[2])) for line in lines)
        assert used == len(drawing.edges)
        place = {number: i for i, number in enumerate(numbers)}
        for edge in drawing.edges:
            assert place[edge.source] < place[edge.target]


def test_without_graphviz_there_is_the_text(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    x = torch.ones(4, requires_grad=True)
    drawing = draw(x.exp().sum(), {"x": x})
    for make in (drawing.to_svg, drawing.to_html, lambda: drawing.save(tmp_path / "x.svg")):
        with pytest.raises(
            UsageError, match=r"needs Graphviz \(apt, brew or conda install graphviz\)"
        ):
            make()
    assert list(tmp_path.iterdir()) == [] and drawing._repr_html_() is None
    text = drawing.save(tmp_path / "x.txt").read_text("utf-8")
    assert text == str(drawing) == drawing.to_text() and "saved  result  [4]  16 B" in text
    assert drawing.save(tmp_path / "x.dot").exists()


def test_a_dot_that_fails_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    command = tmp_path / "dot"
    command.write_text("#!/bin/sh\necho broken >&2\nexit 3\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    with pytest.raises(UsageError, match="dot failed with 3: broken"):
        draw(torch.ones(2, requires_grad=True).exp()).to_svg()


def brightness(color: str) -> float:
    parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    dark, light = sorted((brightness(one), brightness(other)))
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("color", [LIGHT, DARK])
def test_text_can_be_read_on_every_colour(color: dict[str, str]) -> None:
    grounds = ["paper", "frame", "op", "module", "parameter", "leaf", "output"]
    for ground in grounds + [f"c{number}" for number in range(8)]:
        assert contrast(color["ink"], color[ground]) >= 7, ground
        assert contrast(color["muted"], color[ground]) >= 4.5, ground
    for ground in ["saved"] + [f"s{number}" for number in range(5)]:
        assert contrast(color["saved-ink"], color[ground]) >= 4.5, ground


def test_each_colour_has_one_in_the_dark() -> None:
    """The style sheet finds a colour by its value on a light page."""
    assert len(set(LIGHT.values())) == len({(LIGHT[name], DARK[name]) for name in LIGHT})


@pytest.mark.parametrize(
    ("color_by", "words"),
    [
        ("where", {"in place", "parameter", "saved tensor"}),
        ("dtype", {"float32", "int64"}),
        ("module", {"table", "head", "blocks.0", "blocks.0.up"}),
        ("bytes", set()),
    ],
)
def test_every_colour_that_is_used_is_in_the_legend(color_by: Any, words: set[str]) -> None:
    model = Gpt(3)
    with label_modules(model):
        loss = model.loss()
    drawing = draw(loss, model, color_by=color_by)
    if color_by == "bytes":
        words = {
            f"to {format_bytes(max(t.nbytes for node in drawing.nodes for t in node.tensors))}"
        }
    caption, _, boxes = drawing.to_dot().partition("node [")
    assert all(f">\u00a0{word}\u00a0</FONT>" in caption for word in words)
    used = set(re.findall(r'(?:BGCOLOR|fillcolor|<FONT COLOR)="(#\w+)"', boxes))
    used -= {LIGHT[name] for name in ("ink", "muted", "saved-ink", "frame", "paper")}
    shown = set(re.findall(r'COLOR="(#\w+)"', caption))
    assert len(used) > 2 and used <= shown, [name for name in LIGHT if LIGHT[name] in used - shown]


@needs_dot
def test_a_browser_shows_it_as_measured(chromium: Any, tmp_path: Path) -> None:
    code = """[...document.querySelectorAll('g.node')].flatMap(box => {
        const rect = box.querySelector('path').getBoundingClientRect()
        return [...box.querySelectorAll('text')].filter(text => {
            const at = text.getBoundingClientRect()
            return at.left < rect.left || at.right > rect.right + 1 || at.top < rect.top - 1
                || at.bottom > rect.bottom + 1
        }).map(text => text.textContent)
    })"""
    wide = {
        name: torch.ones(2, requires_grad=True)
        for name in ("张量张量张量", "тензор", "🙂" * 9, "W" * 30)
    }
    drawn = [*drawings()[:3], hostile_drawing(), draw(sum(wide.values()), wide)]
    for number, drawing in enumerate(drawn):
        path = drawing.save(tmp_path / f"{number}.html")
        chromium.open(path, dark=bool(number % 2))
        assert chromium.run(code) == []
        assert chromium.problems == [] and chromium.requests == [path.as_uri()]
        paper = chromium.run("getComputedStyle(document.querySelector('svg polygon')).fill")
        assert paper == ("rgb(18, 22, 28)" if number % 2 else "rgb(255, 255, 255)")


ROOT = Path(__file__).resolve().parents[2]


@takes_long
@needs_dot
def test_the_benchmark_of_layouts_runs() -> None:
    command = [sys.executable, "benchmarks/draw_layouts.py", "product", "gan"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    product, gan = done.stdout.splitlines()[2:]
    assert product.startswith("| product | 4 |") and " | 0 | 0 |" in product
    assert gan.startswith("| gan | 21 |")


@pytest.mark.parametrize("name", ["graph-gpt.svg", "graph-product.svg"])
def test_pictures_in_the_docs_have_their_colours_without_a_style_sheet(name: str) -> None:
    """As librsvg, Inkscape and converters see them, which know no variables, or no style sheet."""
    seen = set()
    for each in ElementTree.parse(ROOT / "docs" / name).iter():
        if each.tag.rpartition("}")[2] in ("polygon", "text", "path"):
            seen.add(each.get("fill", "black"))
    assert {LIGHT["paper"], LIGHT["op"], LIGHT["saved"], LIGHT["ink"]} <= seen, (
        f"examples/draw_graph.py makes {name} again"
    )
    assert seen <= {*LIGHT.values(), "none"}
