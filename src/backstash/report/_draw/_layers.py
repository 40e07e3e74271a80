"""A layered layout of boxes: what is made above, what uses it below.

The steps are those of Sugiyama, Tagawa and Toda (1981): each cell gets a rank below all it uses; a link over
several ranks gets a bend in each; the cells of a rank are ordered so that few links cross; then they are
moved below and above what they are linked to.
"""

from __future__ import annotations

from itertools import pairwise

from ._cells import Cell, Link, Step
from ._columns import place_x, shift, straighten
from ._order import ordered

__all__ = ["arrange"]

_RANK_GAP = 34.0
_PORT_GAP = 20.0


def arrange(
    cells: list[Cell], links: list[Link], header: float, title: float
) -> tuple[float, float]:
    """Place cells and route links. Returns the width and height that they take.

    Args:
        cells: get ``x`` and ``y``. Bends are added to the list.
        links: get ``route``. They make no cycle.
        header: room above the first rank that is no port.
        title: ports in the first rank stay right of this.
    """
    if not cells:
        return title, header
    _rank(cells, links)
    chains = _bend(cells, links)
    steps = _steps(cells, links, chains)
    ranks = ordered(cells, steps)
    place_x(cells, ranks, steps)
    straighten(cells, ranks, links, chains)
    width = shift(cells, ranks, title)
    height = _place_y(cells, ranks, links, header)
    _route(cells, ranks, links, chains, header)
    return width, height


def _rank(cells: list[Cell], links: list[Link]) -> None:
    below: list[list[int]] = [[] for _ in cells]
    waiting = [0] * len(cells)
    for link in links:
        below[link.source].append(link.target)
        waiting[link.target] += 1
    first = int(any(cell.kind == "top" for cell in cells))
    order = [index for index, count in enumerate(waiting) if not count]
    free = [
        cell.kind == "box" for cell in cells
    ]  # made of leaves only, which come when they are used
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


def _bend(cells: list[Cell], links: list[Link]) -> list[list[int]]:
    """A bend in each rank that a link passes; links that leave from one point share theirs."""
    shared: dict[tuple[int, float | None, int], int] = {}
    chains = []
    for link in links:
        chain = []
        for rank in range(cells[link.source].rank + 1, cells[link.target].rank):
            key = (link.source, link.leaves, rank)
            if key not in shared:
                shared[key] = len(cells)
                cells.append(Cell(0.0, 0.0, "bend", rank))
            chain.append(shared[key])
        chains.append(chain)
    return chains


def _steps(cells: list[Cell], links: list[Link], chains: list[list[int]]) -> list[Step]:
    found: dict[tuple[int, int, float], Step] = {}
    for link, chain in zip(links, chains, strict=True):
        path = [link.source, *chain, link.target]
        for upper, lower in pairwise(path):
            leaves = link.leaves if upper == link.source else None
            enters = link.enters if lower == link.target else None
            step = Step(
                upper,
                lower,
                cells[upper].width / 2 if leaves is None else leaves,
                cells[lower].width / 2 if enters is None else enters,
            )
            found[upper, lower, step.leaves] = step
    return list(found.values())


def _place_y(cells: list[Cell], ranks: list[list[int]], links: list[Link], header: float) -> float:
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
    cells: list[Cell],
    ranks: list[list[int]],
    links: list[Link],
    chains: list[list[int]],
    header: float,
) -> None:
    floor = [max(cells[i].y + cells[i].height for i in rank) for rank in ranks]
    if all(cells[index].kind == "top" for index in ranks[0]):
        floor[0] = header  # straight past the title
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
