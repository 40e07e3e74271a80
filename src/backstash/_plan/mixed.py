"""Plans that recompute more and more of the regions, and move the first blocks.

A region can be recomputed as a whole, or a cut of it, which frees less and takes less time. The cheapest bytes
come first: of all regions the cuts whose bytes cost the least, then the next ones, and the first regions before
the last, which backward needs first. With so many of these changes as one likes, the first of the blocks that
are left move, since their transfers have the most time: as few as the budget allows. Between recomputing
nothing and everything a few such mixtures are simulated, and the first of them in which nothing has to move.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

from .prices import least_prefix
from .search import Search
from .solution import Solution
from .table import REGION, Problem
from .trace import Trace

__all__ = ["mixed"]

_LEAST_PART = 64  # blocks smaller than 1/64 of the largest one do not move


class _Upgrade(NamedTuple):
    """More of a region is recomputed."""

    seconds_per_byte: float
    region: int
    level: int
    """See :meth:`TracedRegion.cut_at`."""


def mixed(problem: Problem, count: int) -> list[tuple[Solution, Search]]:
    """Return the mixtures, each with the search that may improve it.

    Args:
        problem: of a step with regions.
        count: how many mixtures, without the one that recomputes nothing.
    """
    trace = problem.trace
    changes = sorted(each for at in range(len(trace.regions)) for each in _upgrades(trace, at))
    ends = {len(changes) * at // count for at in range(count + 1)}
    ends.add(_fewest_that_fit(problem, changes))
    return [_mixture(problem, changes[:end]) for end in sorted(ends)]


def _fewest_that_fit(problem: Problem, changes: Sequence[_Upgrade]) -> int:
    """Return how many of the changes the budget needs if nothing moves; all of them if they are too few."""

    def fits(end: int) -> bool:
        of, start, _ = _start(problem, changes[:end])
        return of.forecast(start).peak_bytes <= of.budget

    return bisect.bisect_left(range(len(changes)), True, key=fits)


def _upgrades(trace: Trace, at: int) -> list[_Upgrade]:
    """Return the changes of one region: the lower convex hull of its seconds over the bytes that it frees."""
    region = trace.regions[at]
    points = [(0, 0.0, 0)]
    for level in (*range(len(region.cuts), 0, -1), 0):  # the whole is the last
        cut = region.cut_at(level)
        freed = sum(trace.blocks[each].nbytes for each in cut.members) + cut.small_bytes
        seconds = cut.save_seconds + cut.use_seconds
        while points[1:] and _slope(points[-2], points[-1]) >= _slope(
            points[-1], (freed, seconds, level)
        ):
            points.pop()
        if freed > points[-1][0]:
            points.append((freed, seconds, level))
    return [_Upgrade(_slope(one, other), at, other[2]) for one, other in pairwise(points)]


def _slope(one: tuple[int, float, int], other: tuple[int, float, int]) -> float:
    return (other[1] - one[1]) / max(1, other[0] - one[0])


def _start(
    problem: Problem, changes: Sequence[_Upgrade]
) -> tuple[Problem, list[str], tuple[int, ...]]:
    """Return the problem, the choices and the levels with these changes, if nothing moves."""
    trace, level_of = problem.trace, {each.region: each.level for each in changes}
    levels = tuple(level_of.get(at, 0) for at in range(len(trace.regions)))
    problem = replace(problem, trace=trace.cut_at(levels))
    start = ["keep"] * len(trace.blocks)
    for at in level_of:
        for member in problem.regions[at].members:
            start[member] = REGION
    return problem, start, levels


def _mixture(problem: Problem, changes: Sequence[_Upgrade]) -> tuple[Solution, Search]:
    problem, start, levels = _start(problem, changes)
    least_bytes = max(each.nbytes for each in problem.trace.blocks) // _LEAST_PART
    moves: dict[int, str] = {}
    for block, name in enumerate(start):
        for other, option in problem.options(block) if name != REGION else ():
            if option.moved_bytes > least_bytes:
                moves[block] = other

    def up_to(count: int) -> list[str]:
        return [moves.get(at, name) if at < count else name for at, name in enumerate(start)]

    counts = [0, *(block + 1 for block in moves)]
    choices = tuple(up_to(least_prefix(problem, up_to, counts)))
    forecast = problem.forecast(choices)
    fits = forecast.peak_bytes <= problem.budget
    solution = Solution(choices, problem.windows, forecast, 0.0, fits=fits, levels=levels)
    return solution, Search(problem, 0.0)
