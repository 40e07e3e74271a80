#!/usr/bin/env python
"""Measure the pictures that Graphviz makes of ``backstash.report.draw``'s graphs of models.

    python benchmarks/draw_layouts.py [--out DIR] [NAME ...]

Prints one row for each graph. Needs Graphviz's command ``dot``. "crossings" counts the points where two edges
cross, "over" the edges that run over a box, "length" adds up all edges. ``--out`` writes the pictures.
``results/draw_layouts.txt`` also has the package's former layout.
"""

from __future__ import annotations

import argparse
import json
import runpy
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations, pairwise
from math import dist
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from backstash.graph import label_modules
from backstash.report import Drawing, draw
from bench._markdown import markdown
from bench._workloads import BlockStack, ResNet, UNet

Curve = list[tuple[float, float]]
HEAD = ("graph", "boxes", "width x height", "crossings", "over", "length", "ms")


class Box(NamedTuple):
    """A rectangle in points, from the top left."""

    x: float
    y: float
    width: float
    height: float


class Picture(NamedTuple):
    """Where a layout puts the boxes and edges of one drawing."""

    width: float
    height: float
    boxes: list[Box]
    curves: list[Curve]
    ms: float


def labelled(model: nn.Module, *inputs: Tensor, **options: Any) -> Drawing:
    """Draw the graph of a model's output, with its modules."""
    with label_modules(model):
        out = model(*inputs)
    return draw(out if isinstance(out, Tensor) else out[0], model, **options)


class Unrolled(nn.Module):
    """An LSTM cell over six steps, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTMCell(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = c = x.new_zeros(x.shape[1], 16)
        for step in x:
            h, c = self.cell(step, (h, c))
        return F.cross_entropy(self.head(h), torch.zeros(x.shape[1], dtype=torch.long))


class Gan(nn.Module):
    """A generator and a discriminator that sees real and generated samples."""

    def __init__(self) -> None:
        super().__init__()
        self.make = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8), nn.Tanh())
        self.judge = nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))

    def forward(self, real: Tensor) -> Tensor:
        fake = self.judge(self.make(torch.randn(len(real), 4)))
        return F.softplus(fake).mean() + F.softplus(-self.judge(real)).mean()


def product() -> Drawing:
    """Draw ``a * b``."""
    a, b = torch.ones(5, requires_grad=True), torch.ones(5, requires_grad=True)
    return draw(a * b, {"a": a, "b": b})


def mlp() -> Drawing:
    """Draw two Linears and a GELU."""
    return labelled(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)), torch.ones(2, 8))


def gpt(blocks: int, **options: Any) -> Drawing:
    """Draw transformer blocks."""
    return labelled(BlockStack(blocks, 64, 4), torch.randn(2, 16, 64), **options)


def resnet(*depths: int) -> Drawing:
    """Draw Bottlenecks in stages."""
    images, labels = torch.randn(2, 3, 64, 64), torch.zeros(2, dtype=torch.long)
    return labelled(ResNet(depths, 8), images, labels)


def unet() -> Drawing:
    """Draw a U-Net of three levels."""
    return labelled(UNet(3, 8), torch.randn(1, 3, 32, 32), torch.ones(1, 1, 32, 32))


def ising() -> Drawing:
    """Draw three steps of tensor renormalization."""
    names = runpy.run_path(str(Path(__file__).parents[1] / "examples/ising_trg.py"))
    beta = torch.tensor(0.4, dtype=torch.float64, requires_grad=True)
    return draw(names["log_z_per_site"](beta, 4, 3), {"beta": beta})


def double_backward() -> Drawing:
    """Draw a graph that a backward with ``create_graph=True`` made."""
    x, w = torch.ones(4, 4, requires_grad=True), torch.ones(4, 4, requires_grad=True)
    (slope,) = torch.autograd.grad((x @ w).tanh().pow(3).sum(), x, create_graph=True)
    return draw(slope.pow(2).sum(), {"x": x, "w": w})


def outputs() -> Drawing:
    """Draw operations of several outputs, used by several outputs."""
    x = torch.rand(4, 4, requires_grad=True)
    u, s, v = torch.linalg.svd(x)
    one, other = x.chunk(2)
    return draw([u.sum() + v.sum(), s.log().sum(), one * other, (u * s) @ v], {"x": x})


GRAPHS: dict[str, Callable[[], Drawing]] = {
    "product": product,
    "mlp": mlp,
    "transformer block": lambda: gpt(1, depth=9),
    "gpt": lambda: gpt(12),
    "gpt unfolded": lambda: gpt(3, depth=9, collapse_repeated=False),
    "resnet": lambda: resnet(3, 4, 6, 3),
    "lstm": lambda: labelled(Unrolled(), torch.randn(6, 2, 8)),
    "gan": lambda: labelled(Gan(), torch.randn(4, 8)),
    "unet": unet,
    "ising": ising,
    "double backward": double_backward,
    "several outputs": outputs,
}


def bezier(points: Sequence[tuple[float, float]], steps: int = 12) -> Iterator[tuple[float, float]]:
    """Points along a cubic curve after its first point."""
    (ax, ay), (bx, by), (cx, cy), (dx, dy) = points
    for step in range(1, steps + 1):
        t = step / steps
        a, b, c, d = (1 - t) ** 3, 3 * t * (1 - t) ** 2, 3 * t * t * (1 - t), t**3
        yield a * ax + b * bx + c * cx + d * dx, a * ay + b * by + c * cy + d * dy


def measured(drawing: Drawing) -> Picture:
    """Return where Graphviz places a drawing, without the caption."""
    started = time.perf_counter()
    done = subprocess.run(
        ["dot", "-Tjson"], input=drawing.to_dot().encode(), capture_output=True, check=True
    )
    ms = (time.perf_counter() - started) * 1e3
    found = json.loads(done.stdout)
    boxes, frames = [], []
    for each in found["objects"]:
        if each["name"].startswith("cluster"):
            left, low, right, high = map(float, each["bb"].split(","))
            frames.append(Box(left, -high, right - left, high - low))
        elif "pos" in each:
            x, y = map(float, each["pos"].split(","))
            width, height = float(each["width"]) * 72, float(each["height"]) * 72
            boxes.append(Box(x - width / 2, -y - height / 2, width, height))
    curves = [spline(edge["pos"]) for edge in found["edges"]]
    xs = [x for curve in curves for x, _ in curve]
    ys = [y for curve in curves for _, y in curve]
    for box in (*boxes, *frames):
        xs += [box.x, box.x + box.width]
        ys += [box.y, box.y + box.height]
    return Picture(max(xs) - min(xs), max(ys) - min(ys), boxes, curves, ms)


def spline(pos: str) -> Curve:
    """Points along an edge of Graphviz, and its arrowhead's end."""
    tip: Curve = []
    points: Curve = []
    for part in pos.split():
        x, y = (float(each) for each in part.removeprefix("e,").split(","))
        (tip if part.startswith("e,") else points).append((x, -y))
    curve = points[:1]
    for start in range(0, len(points) - 1, 3):
        curve += bezier(points[start : start + 4])
    return curve + tip


def crossings(curves: list[Curve]) -> int:
    """Count the points where two curves cross."""
    return sum(
        crosses(*one, *other)
        for first, second in combinations(curves, 2)
        if overlapping(first, second)
        for one in pairwise(first)
        for other in pairwise(second)
    )


def overlapping(one: Curve, other: Curve) -> bool:
    """Whether the rectangles around two curves overlap."""
    return all(
        min(p[axis] for p in one) <= max(p[axis] for p in other)
        and min(p[axis] for p in other) <= max(p[axis] for p in one)
        for axis in (0, 1)
    )


def crosses(a: Any, b: Any, c: Any, d: Any) -> bool:
    """Whether the straight line from a to b crosses the one from c to d."""

    def side(p: Any, q: Any, r: Any) -> float:
        return float((q[0] - p[0]) * (r[1] - p[1]) - (q[1] - p[1]) * (r[0] - p[0]))

    return side(a, b, c) * side(a, b, d) < -1e-6 and side(c, d, a) * side(c, d, b) < -1e-6


def over_boxes(picture: Picture) -> int:
    """Count the edges that have a point inside a box."""
    return sum(
        any(
            box.x + 1 < x < box.x + box.width - 1 and box.y + 1 < y < box.y + box.height - 1
            for x, y in curve
            for box in picture.boxes
        )
        for curve in picture.curves
    )


def row(name: str, picture: Picture) -> tuple[str, ...]:
    """Return one line of the table."""
    length = sum(dist(*pair) for curve in picture.curves for pair in pairwise(curve))
    return (
        name,
        str(len(picture.boxes)),
        f"{picture.width:,.0f} x {picture.height:,.0f}",
        str(crossings(picture.curves)),
        str(over_boxes(picture)),
        f"{length:,.0f}",
        f"{picture.ms:.0f}",
    )


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(GRAPHS)}")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where to write the pictures")
    options = parser.parse_args()
    lines = []
    for name in options.names or GRAPHS:
        torch.manual_seed(0)
        drawing = GRAPHS[name]()
        lines.append(row(name, measured(drawing)))
        if options.out:
            drawing.save(options.out / f"{name.replace(' ', '-')}.svg")
    print(markdown(HEAD, lines))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
