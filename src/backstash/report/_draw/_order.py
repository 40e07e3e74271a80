"""The order of cells within each rank: few links cross when each cell is near what it is linked to."""

from __future__ import annotations

from bisect import bisect_right, insort

from ._cells import Cell, Step, neighbours

__all__ = ["ordered"]

_SWEEPS = 12


def ordered(cells: list[Cell], steps: list[Step]) -> list[list[int]]:
    """The cells of each rank from left to right, with few crossings."""
    ranks: list[list[int]] = [[] for _ in range(max(cell.rank for cell in cells) + 1)]
    for index, cell in enumerate(cells):
        ranks[cell.rank].append(index)
    above, below = neighbours(cells, steps)
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
    rank: list[int], ranks: list[list[int]], cells: list[Cell], steps_of: list[list[Step]]
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


def _crossings(cells: list[Cell], ranks: list[list[int]], steps: list[Step]) -> int:
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
