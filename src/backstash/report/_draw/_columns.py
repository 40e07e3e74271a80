"""How far to the right each cell is: below and above what it is linked to, as far as its neighbours let it.

Each rank by itself is solved exactly, as an isotonic regression (weighted least squares under the order and
the distances), by pooling adjacent violators; ranks take turns, down and up.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import inf

from ._cells import Cell, Link, Step, neighbours

__all__ = ["place_x", "shift", "straighten"]

_MOVES = 40
_CELL_GAP = 22.0
_BEND_GAP = 13.0
_STRAIGHT = 6.0  # how much a bend wants to be in line, against a box


def _gap(cells: list[Cell], left: int, right: int) -> float:
    """The least distance between the left edges of two neighbours."""
    both = cells[left].kind != "box" and cells[right].kind != "box"
    return cells[left].width + (_BEND_GAP if both else _CELL_GAP)


def place_x(cells: list[Cell], ranks: list[list[int]], steps: list[Step]) -> None:
    """Give every cell its left edge."""
    above, below = neighbours(cells, steps)
    for rank in ranks:
        x = 0.0
        for left, index in zip([None, *rank], rank, strict=False):
            x += _gap(cells, left, index) if left is not None else 0.0
            cells[index].x = x
    for move in range(_MOVES):
        down = move % 2 == 0
        both = move >= _MOVES - 2
        for rank in ranks if down else reversed(ranks):
            _align(
                cells, rank, above if down or both else None, below if not down or both else None
            )


def _align(
    cells: list[Cell],
    rank: list[int],
    above: list[list[Step]] | None,
    below: list[list[Step]] | None,
) -> None:
    """Move a rank's cells to where their links are straight, as far as their order lets them."""
    wanted, weights = [], []
    for index in rank:
        pulls = [(0.001, cells[index].x)]
        for step in above[index] if above is not None else ():
            pull = _pull(cells, step)
            pulls.append((pull, cells[step.upper].x + step.leaves - step.enters))
        for step in below[index] if below is not None else ():
            pull = _pull(cells, step)
            pulls.append((pull, cells[step.lower].x + step.enters - step.leaves))
        weight = sum(each for each, _ in pulls)
        wanted.append(sum(each * x for each, x in pulls) / weight)
        weights.append(weight)
    gaps = [_gap(cells, left, right) for left, right in pairwise(rank)]
    for index, x in zip(rank, _spread(wanted, weights, gaps), strict=True):
        cells[index].x = x


def _pull(cells: list[Cell], step: Step) -> float:
    bends = (cells[step.upper].kind == "bend") + (cells[step.lower].kind == "bend")
    return (1.0, _STRAIGHT / 2, _STRAIGHT)[bends]


def _spread(
    wanted: Sequence[float], weights: Sequence[float], gaps: Sequence[float]
) -> list[float]:
    """The places nearest to ``wanted`` that keep the order and the gaps (pool adjacent violators)."""
    offsets = [0.0]
    for gap in gaps:
        offsets.append(offsets[-1] + gap)
    blocks: list[tuple[float, float, int]] = []  # mean, weight, members
    for want, weight, offset in zip(wanted, weights, offsets, strict=True):
        block = (want - offset, weight, 1)
        while blocks and blocks[-1][0] > block[0]:
            mean, heavy, members = blocks.pop()
            total = heavy + block[1]
            block = ((mean * heavy + block[0] * block[1]) / total, total, members + block[2])
        blocks.append(block)
    means = [mean for mean, _, members in blocks for _ in range(members)]
    return [mean + offset for mean, offset in zip(means, offsets, strict=True)]


def straighten(
    cells: list[Cell], ranks: list[list[int]], links: list[Link], chains: list[list[int]]
) -> None:
    """Put as many bends of a link as there is room for on one vertical line."""
    left: dict[int, int | None] = {}
    right: dict[int, int | None] = {}
    for rank in ranks:
        for before, index, after in zip([None, *rank], rank, [*rank[1:], None], strict=False):
            left[index], right[index] = before, after
    done: set[int] = set()
    for link, chain in sorted(zip(links, chains, strict=True), key=lambda pair: -len(pair[1])):
        run: list[int] = []
        low, high = -inf, inf
        for index in chain:
            if index in done:
                continue
            done.add(index)
            before, after = left[index], right[index]
            least = cells[before].x + _gap(cells, before, index) if before is not None else -inf
            most = cells[after].x - _gap(cells, index, after) if after is not None else inf
            if max(low, least) > min(high, most):
                _settle(cells, run, low, high, link)
                run, low, high = [], -inf, inf
            run.append(index)
            low, high = max(low, least), min(high, most)
        _settle(cells, run, low, high, link)


def _settle(cells: list[Cell], run: list[int], low: float, high: float, link: Link) -> None:
    if run:
        target = cells[link.target]
        end = target.x + (target.width / 2 if link.enters is None else link.enters)
        wanted = sorted([*(cells[index].x for index in run), end])[len(run) // 2]
        for index in run:
            cells[index].x = min(max(wanted, low), high)


def shift(cells: list[Cell], ranks: list[list[int]], title: float) -> float:
    """Move all to begin at 0, and ports out of the title's way. Returns the width."""
    least = min(cell.x for cell in cells)
    for cell in cells:
        cell.x -= least
    x = title
    for index in ranks[0]:
        if cells[index].kind == "top":
            cells[index].x = x = max(x, cells[index].x)
            x += _BEND_GAP
    return max(title, *(cell.x + cell.width for cell in cells))
