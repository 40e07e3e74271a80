"""``draw`` as SVG, HTML and DOT: nothing overlaps, everything fits, no name does harm."""

import dataclasses
import functools
import itertools
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from torch import Tensor

from backstash.graph import label_modules
from backstash.report import Drawing, draw
from backstash.report._draw import _colors
from backstash.report._draw._boxes import BoxText, text_width
from backstash.report._draw._layout import Rectangle
from backstash.report._draw._svg import placed
from backstash.units import format_bytes
from draw_models import HOSTILE, Gpt, random_graph

SVG = "{http://www.w3.org/2000/svg}"


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
    found += [draw(random_graph(seed, 50), collapse_repeated=False) for seed in range(6)]
    return found


def overlap(one: Rectangle, other: Rectangle, by: float = 0.0) -> bool:
    across = min(one.x + one.width, other.x + other.width) - max(one.x, other.x)
    down = min(one.y + one.height, other.y + other.height) - max(one.y, other.y)
    return across > by and down > by


def contains(outer: Rectangle, inner: Rectangle) -> bool:
    return (
        outer.x <= inner.x
        and outer.y <= inner.y
        and inner.x + inner.width <= outer.x + outer.width
        and inner.y + inner.height <= outer.y + outer.height
    )


def around(drawing: Drawing, group: int | None) -> set[int]:
    found = set()
    while group is not None:
        found.add(group)
        group = drawing.groups[group].parent
    return found


@pytest.mark.parametrize("number", range(12))
def test_boxes_and_frames_do_not_overlap(number: int) -> None:
    drawing = drawings()[number]
    _, layout = placed(drawing)
    whole = Rectangle(-0.01, -0.01, layout.width + 0.02, layout.height + 0.02)
    assert all(contains(whole, each) for each in [*layout.boxes, *layout.frames])
    for one, other in itertools.combinations(layout.boxes, 2):
        assert not overlap(one, other)
    home = {box: number for number, group in enumerate(drawing.groups) for box in group.nodes}
    for number, frame in enumerate(layout.frames):
        for box, rectangle in enumerate(layout.boxes):
            inside = number in around(drawing, home.get(box))
            assert contains(frame, rectangle) if inside else not overlap(frame, rectangle)
        for other, rectangle in enumerate(layout.frames):
            if number not in around(drawing, other) and other not in around(drawing, number):
                assert not overlap(frame, rectangle)


@pytest.mark.parametrize("number", range(12))
def test_edges_go_down_around_boxes_to_where_they_lead(number: int) -> None:
    drawing = drawings()[number]
    _, layout = placed(drawing)
    ends = {wire.points[-1] for wire in layout.wires if wire.arrow}
    assert len(ends) == len(drawing.edges)
    for wire in layout.wires:
        heights = [y for _, y in wire.points]
        assert heights == sorted(heights)
        for x, y in curve(wire.points):
            inside = [box for box in layout.boxes if overlap(box, Rectangle(x, y, 0.4, 0.4), 0.2)]
            assert not inside
    for edge in drawing.edges:
        assert layout.boxes[edge.source].y < layout.boxes[edge.target].y


def curve(points: tuple[tuple[float, float], ...]) -> list[tuple[float, float]]:
    """Points along what is drawn: vertical pieces, and curves that begin and end vertically."""
    found = []
    for (x, y), (to_x, to_y) in itertools.pairwise(points):
        for step in range(1, 12):
            t = step / 12
            bend = 3 * t**2 * (1 - t) + t**3
            found.append((x + (to_x - x) * bend, y + (to_y - y) * (1.5 * t * (1 - t) + t**3)))
    return found


def test_text_fits_into_boxes() -> None:
    for drawing in drawings():
        boxes = placed(drawing)[0]
        assert len(boxes) == len(drawing.nodes)
        for box in boxes:
            assert box.texts
            for baseline, left, right in spans(box):
                assert left >= 4.0 and right <= box.width - 4.0
                assert 8.0 <= baseline <= box.height - 3.0
            for (line, start, end), (other, begin, stop) in itertools.combinations(spans(box), 2):
                assert line != other or end <= begin or stop <= start, box.texts


def spans(box: BoxText) -> list[tuple[float, float, float]]:
    """Of each text: its baseline, and from where to where it goes."""
    found = []
    for each in box.texts:
        width = text_width(each.text, each.px)
        left = each.x - width if each.right else each.x
        found.append((each.baseline, left, left + width))
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


@pytest.mark.parametrize("color_by", ["where", "module", "dtype", "bytes"])
def test_no_name_breaks_out_of_svg_or_html(color_by: Any) -> None:
    for plain in (hostile_drawing(), *drawings()[:3]):
        drawing = dataclasses.replace(plain, color_by=color_by)
        texts = [drawing.to_svg(), drawing._repr_html_()]
        page = drawing.to_html().removeprefix("<!doctype html>\n")
        texts.append(re.sub(r"<meta [^>]*>", "", page))
        for text in texts:
            assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\ud800-\udfff]", text)
            tree = ElementTree.fromstring(text)
            tags = {element.tag.removeprefix(SVG) for element in tree.iter()}
            drawn = {"svg", "style", "rect", "path", "text", "g", "title"}
            assert tags <= drawn | {"html", "head", "meta", "body", "main", "div"}
            for element in tree.iter():
                assert not {name for name in element.attrib if name.startswith("on")}
                assert not {"href", "src"} & set(element.attrib)
            assert "url(" not in text and "@import" not in text


def test_what_was_hostile_can_still_be_read() -> None:
    drawing = hostile_drawing()
    texts = [e.text or "" for e in ElementTree.fromstring(drawing.to_svg()).iter(f"{SVG}title")]
    assert any("<script>alert(1)</script>\\n\\u202e\\x00{|}%s\\ud800" in text for text in texts)
    labels = [e.text or "" for e in ElementTree.fromstring(drawing.to_svg()).iter(f"{SVG}text")]
    assert any(re.fullmatch("y+…y+", label) and len(label) < 60 for label in labels)


TOKEN = re.compile(r'"(?:[^"\\\n]|\\.)*"|->|[A-Za-z_][\w]*|#?[\d.]+|[{}\[\];,=]|\s+')


def dot_tokens(text: str) -> list[str]:
    """The tokens of a DOT text; fails on what is none."""
    found, place = [], 0
    while place < len(text):
        match = TOKEN.match(text, place)
        assert match is not None, text[place : place + 60]
        place = match.end()
        found.append(match.group())
    return [token for token in found if not token.isspace()]


def test_dot_has_one_statement_for_each_thing() -> None:
    for drawing in (*drawings(), hostile_drawing()):
        tokens = dot_tokens(drawing.to_dot())
        assert tokens.count("{") == tokens.count("}") == 1 + len(drawing.groups)
        rows = sum(len(node.tensors) for node in drawing.nodes)
        assert tokens.count("->") == len(drawing.edges) + rows
        declared = {
            name
            for before, name, after in zip(tokens, tokens[1:], tokens[2:], strict=False)
            if after == "[" and before != "->" and re.fullmatch(r"n\d+|s\d+_\d+", name)
        }
        assert len(declared) == len(drawing.nodes) + rows
        for token in tokens:  # escapes and character references are read within quotes too
            inside = token[1:-1] if token.startswith('"') else ""
            assert re.fullmatch(r"(?:[^\\&]|\\[\\\"nl]|&amp;)*", inside), token
        assert "evil" not in tokens and "script" not in tokens


def test_dot_has_the_colours_too() -> None:
    drawing = drawings()[0]
    assert drawing.to_dot().count('fillcolor="orange"') == sum(
        len(n.tensors) for n in drawing.nodes
    )
    colored = {
        by: set(
            re.findall(r'[^l]color="(#\w+)"', dataclasses.replace(drawing, color_by=by).to_dot())
        )
        for by in ("where", "module", "dtype", "bytes")
    }
    assert len(colored["where"]) == 1 and len(colored["dtype"]) == 2 and len(colored["bytes"]) > 2
    modules = dataclasses.replace(drawing, color_by="module").to_dot()
    assert len(set(re.findall(r'fillcolor="(#\w+)"', modules))) > 5


@pytest.mark.skipif(shutil.which("dot") is None, reason="no dot here; nothing else needs it")
def test_graphviz_reads_it(tmp_path: Path) -> None:
    for number, drawing in enumerate([hostile_drawing(), *drawings()[:2]]):
        file = drawing.save(tmp_path / f"{number}.dot")
        ended = subprocess.run(["dot", "-Tsvg", file], capture_output=True, text=True)
        assert ended.returncode == 0 and ended.stderr == ""
        tree = ElementTree.fromstring(ended.stdout)
        shown = [e for e in tree.iter(f"{SVG}g") if e.get("class") == "node"]
        assert len(shown) == len(drawing.nodes) + sum(len(n.tensors) for n in drawing.nodes)
        texts = "".join(e.text or "" for e in tree.iter(f"{SVG}text"))
        if not number:
            assert "&beta;" in texts.replace("\xa0", " ") and "\\N" in texts


def brightness(color: str) -> float:
    parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    dark, light = sorted((brightness(one), brightness(other)))
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("colors", [_colors.LIGHT, _colors.DARK])
def test_text_can_be_read_on_every_colour(colors: tuple[str, ...]) -> None:
    color = dict(zip(_colors.NAMES, colors, strict=True))
    grounds = ["paper", "frame", "op", "module", "parameter", "leaf", "output"]
    for ground in grounds + [f"c{number}" for number in range(8)]:
        assert contrast(color["ink"], color[ground]) >= 7, ground
        assert contrast(color["muted"], color[ground]) >= 4.5, ground
    for ground in ["saved"] + [f"s{number}" for number in range(_colors.SHADES)]:
        assert contrast(color["saved-ink"], color[ground]) >= 4.5, ground


def test_every_colour_that_is_used_is_in_the_legend() -> None:
    model = Gpt(3)
    with label_modules(model):
        loss = model.loss()
    rows = [tensor for node in draw(loss, model).nodes for tensor in node.tensors]
    most = max(tensor.nbytes for tensor in rows)
    for color_by, words in (
        ("where", {"in place"}),
        ("dtype", {"float32", "int64"}),
        ("module", {"table", "head", "blocks.0", "blocks.0.up"}),
        ("bytes", {f"to {format_bytes(most)}"}),
    ):
        drawing = draw(loss, model, color_by=color_by)  # type: ignore[arg-type]
        tree = ElementTree.fromstring(drawing.to_svg())
        texts = {element.text for element in tree.iter(f"{SVG}text")}
        assert words <= texts, color_by
        used = {
            style for rect in tree.iter(f"{SVG}rect") for style in rect.get("class", "").split()
        }
        swatches = {
            style
            for rect in tree.iter(f"{SVG}rect")
            if "swatch" in rect.get("class", "")
            for style in rect.get("class", "").split()
        }
        telling = {style for style in used if re.fullmatch("[cs][0-9]|keep|disk|host", style)}
        assert telling and telling <= swatches


def test_a_browser_shows_it_as_measured(chromium: Any, tmp_path: Path) -> None:
    code = """[...document.querySelectorAll('svg g > g')].flatMap(box => {
        const frame = box.querySelector('rect.box:last-of-type') || box.querySelector('rect.box')
        const rect = [...box.querySelectorAll('rect.box')].pop().getBoundingClientRect()
        return [...box.querySelectorAll('text')].filter(text => {
            const at = text.getBoundingClientRect()
            return at.left < rect.left || at.right > rect.right || at.top < rect.top - 1
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
        paper = chromium.run("getComputedStyle(document.querySelector('.paper')).fill")
        assert paper == ("rgb(18, 22, 28)" if number % 2 else "rgb(255, 255, 255)")


def test_edge_labels_do_not_meet() -> None:
    x = torch.rand(6, 6, requires_grad=True)
    parts: list[Tensor] = [*torch.linalg.svd(x), *x.chunk(3)]
    outputs = [a.sum() + b.sum() for a, b in itertools.pairwise(parts)]
    outputs += [a + b for a, b in zip(x.unbind(), x.t().unbind(), strict=True)]
    drawing = draw(outputs, {"x": x}, collapse_repeated=False)
    tree = ElementTree.fromstring(drawing.to_svg())
    labels = [e for e in tree.iter(f"{SVG}text") if e.get("class") == "on-wire"]
    assert len(labels) >= 15
    boxes = []
    for label in labels:
        width = text_width(label.text or "", 9.5)
        left = float(label.get("x", 0)) - (width if label.get("text-anchor") == "end" else 0)
        boxes.append(Rectangle(left, float(label.get("y", 0)) - 8, width, 9))
    assert not any(overlap(one, other) for one, other in itertools.combinations(boxes, 2))
    assert not any(overlap(one, box) for one in boxes for box in placed(drawing)[1].boxes)


def test_colours_are_there_without_a_style_sheet() -> None:
    """As librsvg, Inkscape and converters see it, which know no variables, or no style sheet."""
    x = torch.ones(4, requires_grad=True)
    svg = ElementTree.fromstring(draw(x.exp().sum()).to_svg())
    seen = {}
    for each in svg.iter():
        element = each.tag.rpartition("}")[2]
        if element in ("rect", "text", "path"):
            assert each.get("fill") is not None, each.attrib
            seen[each.get("class")] = each.get("fill")
    assert seen["paper"] == "#ffffff" and seen["wire"] == "none" and seen["label"] == "#1c2430"
    assert seen["chip keep"] == "#3b6fb6" and "var(" not in "".join(seen.values())


@pytest.mark.parametrize("name", ["graph-gpt.svg", "graph-product.svg"])
def test_drawings_in_the_docs_have_them_too(name: str) -> None:
    path = Path(__file__).resolve().parents[2] / "docs" / name
    for each in ElementTree.parse(path).iter():
        if each.tag.rpartition("}")[2] in ("rect", "text", "path"):
            assert each.get("fill") is not None, f"examples/draw_graph.py makes {name} anew"
