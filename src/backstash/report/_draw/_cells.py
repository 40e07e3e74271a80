"""What is arranged: cells, and links between them."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["Cell", "Link", "Step", "neighbours"]


@dataclass(slots=True)
class Cell:
    """A box, a frame, or a port where links come in or go out."""

    width: float
    height: float
    kind: str = "box"
    """``"box"``, ``"top"`` for a port in the first rank, ``"bottom"`` for one in the last, ``"bend"``."""
    rank: int = 0
    x: float = 0.0
    """Its left edge, when arranged."""
    y: float = 0.0
    """Its top edge."""


@dataclass(slots=True)
class Link:
    """From the bottom of one cell to the top of another."""

    source: int
    target: int
    leaves: float | None = None
    """Where it leaves, from the source's left edge; ``None``: the middle."""
    enters: float | None = None
    """Where it enters, from the target's left edge; ``None``: links share the edge evenly."""
    route: list[tuple[float, float]] = field(default_factory=list)
    """Its points, when arranged: vertical through ranks, to be curved between them."""


@dataclass(slots=True)
class Step:
    """A part of a link, from one rank to the next."""

    upper: int
    lower: int
    leaves: float
    enters: float


def neighbours(cells: list[Cell], steps: list[Step]) -> tuple[list[list[Step]], list[list[Step]]]:
    """For each cell, the steps that come to it from above, and those that go on below."""
    above: list[list[Step]] = [[] for _ in cells]
    below: list[list[Step]] = [[] for _ in cells]
    for step in steps:
        above[step.lower].append(step)
        below[step.upper].append(step)
    return above, below
