"""Compute a layered layout: each box lies below those whose results it uses.

The steps are those of Sugiyama, Tagawa and Toda (1981). Each cell gets a rank below all that it uses. A link
over several ranks gets a bend in each. The cells of a rank are ordered so that few links cross. Then cells move
toward the cells that they are linked to, as far as their neighbours allow. That last step solves each rank
exactly, as an isotonic regression (weighted least squares under the order and the distances), by pooling
adjacent violators; it visits the ranks down and up in turn.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf

__all__ = [
    "LayoutCell",
    "Link",
    "arrange",
]

_RANK_GAP = 34.0
_PORT_GAP = 20.0
_SWEEPS = 12
_MOVES = 40
_CELL_GAP = 22.0
_BEND_GAP = 13.0
_STRAIGHT = 6.0  # weight of a straight line through bends; between boxes it is 1


@dataclass(slots=True)
class LayoutCell:
    """A box, a frame, a port where links enter or leave a frame, or a bend of a link."""

    width: float
    height: float
    kind: str = "box"
    """``"box"``, ``"top"`` for a port in the first rank, ``"bottom"`` for one in the last, ``"bend"``."""
    rank: int = 0
    x: float = 0.0
    """Its left edge, once arranged."""
    y: float = 0.0
    """Its top edge."""


@dataclass(slots=True)
class Link:
    """A link from the bottom of one cell to the top of another."""

    source: int
    target: int
    leaves: float | None = None
    """Where it leaves, from the source's left edge; ``None``: the middle."""
    enters: float | None = None
    """Where it enters, from the target's left edge; ``None``: links share the edge evenly."""
    route: list[tuple[float, float]] = field(default_factory=list)
    """Its points, once arranged: vertical through ranks, to be curved between them."""


@dataclass(slots=True)
class _Step:
    """A part of a link, from one rank to the next."""

    upper: int
    lower: int
    leaves: float
    enters: float


def _neighbours(
    cells: list[LayoutCell], steps: list[_Step]
) -> tuple[list[list[_Step]], list[list[_Step]]]:
    """Return, for each cell, the steps that reach it from above and those that continue below."""
    above: list[list[_Step]] = [[] for _ in cells]
    below: list[list[_Step]] = [[] for _ in cells]
    for step in steps:
        above[step.lower].append(step)
        below[step.upper].append(step)
    return above, below


def arrange(
    cells: list[LayoutCell], links: list[Link], header: float, title: float
) -> tuple[float, float]:
    """Place cells and route links. Return the width and height that they take.

    Args:
        cells: get ``x`` and ``y``. Bends are added to the list.
        links: get ``route``. They make no cycle.
        header: space above the first rank of cells that are not ports.
        title: width of the title; ports in the first rank are placed right of it.
    """
    if not cells:
        return title, header
    _rank(cells, links)
    chains = _bend(cells, links)
    steps = _steps(cells, links, chains)
    ranks = _ordered(cells, steps)
    _place_x(cells, ranks, steps)
    _straighten(cells, ranks, links, chains)
    width = _shift(cells, ranks, title)
    height = _place_y(cells, ranks, links, header)
    _route(cells, ranks, links, chains, header)
    return width, height


def _rank(cells: list[LayoutCell], links: list[Link]) -> None:
    below: list[list[int]] = [[] for _ in cells]
    waiting = [0] * len(cells)
    for link in links:
        below[link.source].append(link.target)
        waiting[link.target] += 1
    first = int(any(cell.kind == "top" for cell in cells))
    order = [index for index, count in enumerate(waiting) if not count]
    # Whether a cell uses only leaves: it may move down to just above its users.
    free = [cell.kind == "box" for cell in cells]
    for index in order:
        if cells[index].kind != "top":
            cells[index].rank = max(cells[index].rank, first)
        for target in below[index]:
            cells[target].rank = max(cells[target].rank, cells[index].rank + 1)
            free[target] = free[target] and free[index]
            waiting[target] -= 1
            if not waiting[target]:
                order.append(target)
    for index in reversed(order):
        if free[index] and below[index]:
            cells[index].rank = min(cells[target].rank for target in below[index]) - 1
    last = max(cell.rank for cell in cells if cell.kind != "bottom") + 1
    for cell in cells:
        if cell.kind == "bottom":
            cell.rank = last


def _bend(cells: list[LayoutCell], links: list[Link]) -> list[list[int]]:
    """Return a bend for each rank that a link passes; links that leave from one point share theirs."""
    shared: dict[tuple[int, float | None, int], int] = {}
    chains = []
    for link in links:
        chain = []
        for rank in range(cells[link.source].rank + 1, cells[link.target].rank):
            key = (link.source, link.leaves, rank)
            if key not in shared:
                shared[key] = len(cells)
                cells.append(LayoutCell(0.0, 0.0, "bend", rank))
            chain.append(shared[key])
        chains.append(chain)
    return chains


def _steps(cells: list[LayoutCell], links: list[Link], chains: list[list[int]]) -> list[_Step]:
    found: dict[tuple[int, int, float], _Step] = {}
    for link, chain in zip(links, chains, strict=True):
        path = [link.source, *chain, link.target]
        for upper, lower in pairwise(path):
            leaves = link.leaves if upper == link.source else None
            enters = link.enters if lower == link.target else None
            step = _Step(
                upper,
                lower,
                cells[upper].width / 2 if leaves is None else leaves,
                cells[lower].width / 2 if enters is None else enters,
            )
            found[upper, lower, step.leaves] = step
    return list(found.values())


def _place_y(
    cells: list[LayoutCell], ranks: list[list[int]], links: list[Link], header: float
) -> float:
    used = {link.target for link in links}
    y = 0.0
    for number, rank in enumerate(ranks):
        ports = all(cells[index].kind in ("top", "bottom") for index in rank)
        if number == 0 and not ports:
            y = header
        height = max(cells[index].height for index in rank)
        for index in rank:
            low = cells[index].kind == "box" and index not in used
            cells[index].y = y + (height - cells[index].height if low else 0.0)
        if number == len(ranks) - 1:
            return y + height
        y += height + (header + _PORT_GAP if number == 0 and ports else _RANK_GAP)
    return y


def _route(
    cells: list[LayoutCell],
    ranks: list[list[int]],
    links: list[Link],
    chains: list[list[int]],
    header: float,
) -> None:
    floor = [max(cells[i].y + cells[i].height for i in rank) for rank in ranks]
    if all(cells[index].kind == "top" for index in ranks[0]):
        floor[0] = header  # links go straight past the title
    entering: dict[int, list[tuple[float, int]]] = {}
    for number, (link, chain) in enumerate(zip(links, chains, strict=True)):
        source = cells[link.source]
        x = source.x + (source.width / 2 if link.leaves is None else link.leaves)
        link.route = [(x, source.y + source.height), (x, floor[source.rank])]
        for index in chain:
            bend = cells[index]
            link.route += [(bend.x, bend.y), (bend.x, floor[bend.rank])]
        entering.setdefault(link.target, []).append((link.route[-1][0], number))
    for target, arriving in entering.items():
        cell = cells[target]
        for place, (_, number) in enumerate(sorted(arriving)):
            link = links[number]
            enters = cell.width * (place + 1) / (len(arriving) + 1)
            link.route.append((cell.x + (enters if link.enters is None else link.enters), cell.y))


def _ordered(cells: list[LayoutCell], steps: list[_Step]) -> list[list[int]]:
    """Return the cells of each rank from left to right, with few crossings."""
    ranks: list[list[int]] = [[] for _ in range(max(cell.rank for cell in cells) + 1)]
    for index, cell in enumerate(cells):
        ranks[cell.rank].append(index)
    above, below = _neighbours(cells, steps)
    best, fewest = [list(rank) for rank in ranks], _crossings(cells, ranks, steps)
    for sweep in range(_SWEEPS):
        if not fewest:
            break
        down = sweep % 2 == 0
        for rank in ranks[1:] if down else ranks[-2::-1]:
            _by_neighbours(rank, ranks, cells, above if down else below)
        crossings = _crossings(cells, ranks, steps)
        if crossings < fewest:
            best, fewest = [list(rank) for rank in ranks], crossings
    return best


def _by_neighbours(
    rank: list[int], ranks: list[list[int]], cells: list[LayoutCell], steps_of: list[list[_Step]]
) -> None:
    place = {cell: index for row in ranks for index, cell in enumerate(row)}

    def center(index: int) -> float:
        ends = []
        for step in steps_of[index]:
            other = step.upper if step.lower == index else step.lower
            offset = step.leaves if other == step.upper else step.enters
            ends.append(place[other] + offset / (cells[other].width + 1))
        return sum(ends) / len(ends) if ends else place[index] + 0.5

    rank.sort(key=center)


def _crossings(cells: list[LayoutCell], ranks: list[list[int]], steps: list[_Step]) -> int:
    place = {cell: index for row in ranks for index, cell in enumerate(row)}
    of_rank: dict[int, list[tuple[float, float]]] = {}
    for step in steps:
        upper = place[step.upper] + step.leaves / (cells[step.upper].width + 1)
        lower = place[step.lower] + step.enters / (cells[step.lower].width + 1)
        of_rank.setdefault(cells[step.upper].rank, []).append((upper, lower))
    count = 0
    for ends in of_rank.values():
        seen: list[float] = []
        for _, lower in sorted(ends):
            count += len(seen) - bisect_right(seen, lower)
            insort(seen, lower)
    return count


def _gap(cells: list[LayoutCell], left: int, right: int) -> float:
    """Return the least distance between the left edges of two neighbours."""
    both = cells[left].kind != "box" and cells[right].kind != "box"
    return cells[left].width + (_BEND_GAP if both else _CELL_GAP)


def _place_x(cells: list[LayoutCell], ranks: list[list[int]], steps: list[_Step]) -> None:
    """Give every cell its left edge."""
    above, below = _neighbours(cells, steps)
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
    cells: list[LayoutCell],
    rank: list[int],
    above: list[list[_Step]] | None,
    below: list[list[_Step]] | None,
) -> None:
    """Move a rank's cells so that their links are straight, as far as their order allows."""
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


def _pull(cells: list[LayoutCell], step: _Step) -> float:
    bends = (cells[step.upper].kind == "bend") + (cells[step.lower].kind == "bend")
    return (1.0, _STRAIGHT / 2, _STRAIGHT)[bends]


def _spread(
    wanted: Sequence[float], weights: Sequence[float], gaps: Sequence[float]
) -> list[float]:
    """Return the places nearest to ``wanted`` that keep the order and the gaps (pool adjacent violators)."""
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


def _straighten(
    cells: list[LayoutCell], ranks: list[list[int]], links: list[Link], chains: list[list[int]]
) -> None:
    """Put as many bends of a link as possible on one vertical line."""
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


def _settle(cells: list[LayoutCell], run: list[int], low: float, high: float, link: Link) -> None:
    if run:
        target = cells[link.target]
        end = target.x + (target.width / 2 if link.enters is None else link.enters)
        wanted = sorted([*(cells[index].x for index in run), end])[len(run) // 2]
        for index in run:
            cells[index].x = min(max(wanted, low), high)


def _shift(cells: list[LayoutCell], ranks: list[list[int]], title: float) -> float:
    """Shift all cells to begin at 0, and move ports right of the title. Return the width."""
    least = min(cell.x for cell in cells)
    for cell in cells:
        cell.x -= least
    x = title
    for index in ranks[0]:
        if cells[index].kind == "top":
            cells[index].x = x = max(x, cells[index].x)
            x += _BEND_GAP
    return max(title, *(cell.x + cell.width for cell in cells))
