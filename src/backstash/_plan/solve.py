"""Find the cheapest choice for each block within a budget, by prices, and a lower bound of the time.

The problem, in seconds added to a step::

    minimise   sum of the options' own seconds + stalls
    such that  at each moment: other bytes + resident bytes + windows <= budget
               bytes written / down rate <= computing time up to the last save + window + stall
               bytes read / up rate      <= computing time from the first use on + stall

The solver puts a price on a resident byte at each moment that binds, and on a byte of each direction of the
link. Prices make the choices independent of each other. Every block takes the option that is cheapest. A
region is recomputed if that costs less than its members' options, given the memory they need in backward.
Raising the prices where a constraint is violated (a subgradient method) gives a lower bound for any choice
(Lagrangian duality: Everett 1963, Held and Karp 1971). The solver repairs the choices at good prices until they
fit, fills the space that is left, and simulates them. In the best solutions it then undoes single changes and
makes others in their place, and for the best it tries other windows.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import replace

from .mixed import mixed
from .prices import by_prices, earliest, holding_least
from .search import Search
from .simulate import NO_WINDOWS, Forecast, Windows, simulate
from .solution import Solution, best_of, rank
from .table import REGION, Problem
from .trace import Option, Trace

__all__ = ["follow", "left_alone", "smallest_budget", "solve", "solve_with_cuts", "whole_calls"]

_FILLED = 4  # so many of the best candidates are filled
_MIXTURES = 16  # tried between recomputing nothing and everything; fewer in a step of many blocks
_SWAPPED = 2  # so many of the best filled ones have changes swapped; more in a step of few blocks
_SWAPS = 40  # swaps tried in each
_SWAPPED_BLOCKS = 8_000  # tries times blocks, at most
_CHANGED_BLOCKS = 400  # with at most so many blocks, more windows are tried
_FEW_BLOCKS = 16  # with at most so many blocks, all swapped solutions do
_MIB = 1 << 20


def solve(
    trace: Trace,
    budget: int,
    *,
    windows: tuple[int | None, int | None] = (None, None),
) -> Solution:
    """Return the cheapest choices found whose simulated peak is within ``budget`` bytes.

    If nothing fits, return the choices with the smallest peak found, with ``fits=False``.

    Args:
        trace: the step.
        budget: the most bytes of memory at any moment.
        windows: bytes of the windows down and up; ``None``: try several sizes.
    """
    left = left_alone(trace)
    plain = left.forecast
    if plain.peak_bytes <= budget:
        return left
    tried, repaired = _windows(trace, windows), list[tuple[Solution, Search]]()
    for each in tried:
        problem = Problem(trace, budget, each)
        candidates = by_prices(problem, each.inflight_bytes, plain.peak_moment)[1]
        if problem.leaves:
            candidates += earliest(problem)
        different = {tuple(candidate.choices): candidate for candidate in candidates}
        for candidate in different.values():
            search = Search(problem, candidate.link_seconds)
            repaired.append((search.repair(candidate.choices), search))
    repaired.sort(key=lambda each: rank(each[0]))
    found = [(search.fill(one), search) for one, search in repaired[:_FILLED]]
    found.sort(key=lambda each: rank(each[0]))
    best = best_of([*(one for one, _ in found), *_swapped(found, len(trace.blocks), windows)])
    if not best.fits:
        best = best_of([best, _of_smallest_peak(trace, budget, windows)])
    widest = max(tried[-1].inflight_bytes, best.windows.inflight_bytes)
    bound, _ = by_prices(Problem(_left(trace), budget), widest, plain.peak_moment)
    forecast = _with_cached_memory(trace, best.forecast, plain, budget)
    left_after = problem.left_after(best.choices)
    return replace(best, forecast=forecast, bound_seconds=bound, left_after=left_after)


def left_alone(trace: Trace) -> Solution:
    """Return the solution in which every block stays in place, unmanaged."""
    plain = simulate(trace, trace.left_alone(), NO_WINDOWS)
    kept = ("keep",) * len(trace.blocks)
    return Solution(kept, NO_WINDOWS, plain, plain.step_seconds, fits=True, left_after=0)


def solve_with_cuts(
    trace: Trace,
    budget: int,
    *,
    windows: tuple[int | None, int | None] = (None, None),
) -> Solution:
    """As :func:`solve`, where also a part of a region may be recomputed: a cut of it. See :mod:`.mixed`."""
    found = [solve(trace, budget, windows=windows)]
    if trace.regions and any(name != "keep" for name in found[0].choices):
        tries = _SWAPPED_BLOCKS // max(1, len(trace.blocks))
        is_long = len(trace.blocks) > _CHANGED_BLOCKS
        tried = [found[0].windows] if is_long else _windows(trace, windows)
        mixtures = [
            each
            for sizes in tried
            for each in mixed(Problem(trace, budget, sizes), min(_MIXTURES, max(2, tries)))
        ]
        mixtures.sort(key=lambda each: rank(each[0]))
        for one, search in mixtures[:_FILLED]:
            better = search.swap(search.fill(one), min(_SWAPS, max(2, tries)))
            if not is_long:
                better = search.change_windows(better, windows)
            left_after = search.problem.left_after(better.choices)
            found.append(replace(better, left_after=left_after, levels=one.levels))
    return replace(best_of(found), bound_seconds=found[0].bound_seconds)


def whole_calls(trace: Trace, budget: int, windows: Windows) -> Solution | None:
    """Return the choices that recompute as few whole calls as the budget allows, the first of the step, and
    keep everything else, as ``torch.utils.checkpoint`` does; ``None`` if all of them are not enough.

    No choices ask less of the host, which no prediction knows on an accelerator.
    """
    problem = Problem(trace, budget, windows)
    regions = sorted(problem.regions, key=lambda each: problem.saves[each.members[0]])

    def up_to(count: int) -> tuple[str, ...]:
        again = {member for each in regions[:count] for member in each.members}
        return tuple(REGION if at in again else "keep" for at in range(len(trace.blocks)))

    count = bisect.bisect_left(
        range(len(regions) + 1),
        True,
        key=lambda at: problem.forecast(up_to(at)).peak_bytes <= budget,
    )
    if count > len(regions):
        return None
    return follow(trace, up_to(count), windows)


def _swapped(
    found: Sequence[tuple[Solution, Search]], blocks: int, windows: tuple[int | None, int | None]
) -> list[Solution]:
    """Swap changes in the best solutions, and try other windows for the first of them."""
    tries = _SWAPPED_BLOCKS // max(1, blocks)
    swapped: list[Solution] = []
    for one, search in found[: max(_SWAPPED, tries // _SWAPS)]:
        better = search.swap(one, min(_SWAPS, max(2, tries)))
        if blocks <= _FEW_BLOCKS or (not swapped and blocks <= _CHANGED_BLOCKS):
            better = search.change_windows(better, windows)
        swapped.append(better)
    return swapped


def _with_cached_memory(trace: Trace, forecast: Forecast, plain: Forecast, budget: int) -> Forecast:
    """Add the memory that the allocator caches, in proportion to the tensors that stay, up to the budget. It
    rules out no choice: near the budget the allocator frees it."""
    if not trace.beside_left_bytes:
        return forecast
    of_all = max(1, plain.resident_peak_bytes)
    cached_bytes = trace.beside_left_bytes * forecast.resident_peak_bytes // of_all
    peak_bytes = max(forecast.peak_bytes, min(budget, forecast.peak_bytes + cached_bytes))
    return replace(forecast, peak_bytes=peak_bytes)


def follow(trace: Trace, choices: Sequence[str], windows: Windows) -> Solution:
    """Simulate these choices for a step. The result says ``fits=True`` whatever the peak."""
    problem = Problem(trace, 0, windows)
    forecast = problem.forecast(choices)
    left_after = problem.left_after(choices)
    return Solution(tuple(choices), windows, forecast, 0.0, fits=True, left_after=left_after)


def smallest_budget(
    trace: Trace,
    *,
    windows: tuple[int | None, int | None] = (None, None),
) -> int:
    """Return the smallest budget in bytes that :func:`solve` can keep, to about a hundredth; it can keep this
    one."""
    found = _of_smallest_peak(trace, 0, windows)
    return min(found.forecast.peak_bytes, left_alone(trace).forecast.peak_bytes)


def _of_smallest_peak(trace: Trace, budget: int, given: tuple[int | None, int | None]) -> Solution:
    """Return the choices with the smallest peak found, with the smallest windows. The search starts from the
    options that hold the least, with no region recomputed and with all."""
    windows = _windows(trace, given)[0]
    problem = Problem(trace, budget, windows)
    search = Search(problem, 1 / trace.links.down_rate + 1 / trace.links.up_rate)
    starts = (False, True) if problem.regions else (False,)
    found = [search.lower(holding_least(problem, again=again)) for again in starts]
    return min(found, key=lambda each: each.forecast.peak_bytes)


def _left(trace: Trace) -> Trace:
    """Return the step for a lower bound: keeping a block costs nothing, since any block may be unmanaged, and
    neither does using a block that backward does not use."""
    used = trace.span("use")
    blocks = (
        replace(each, options={**options, "keep": Option(each.nbytes)})
        for at, each in enumerate(trace.blocks)
        for options in [each.options if at in used else _unused(each.options)]
    )
    regions = (
        each if any(at in used for at in each.members) else replace(each, use_seconds=0.0)
        for each in trace.regions
    )
    return replace(trace, blocks=tuple(blocks), regions=tuple(regions))


def _unused(options: Mapping[str, Option]) -> dict[str, Option]:
    return {name: Option(each.resident_bytes, each.save_seconds) for name, each in options.items()}


def _windows(trace: Trace, given: tuple[int | None, int | None]) -> list[Windows]:
    """Return the windows to try: smaller ones leave more memory for blocks, larger ones hide more transfers."""
    of_blocks = sorted(block.nbytes for block in trace.blocks) or [0]
    largest, half, passed = of_blocks[-1], sum(of_blocks) / 2, 0
    for usual in of_blocks:  # half of the bytes are in blocks of at most this size
        passed += usual
        if passed >= half:
            break
    # Pairs of MiB and bytes. With the first, larger blocks are waited for, and take no memory in flight.
    ladder = ((1, 0), (1, usual), (1, largest), (16, 2 * largest), (64, 3 * largest))
    sizes = sorted({max(least * _MIB, nbytes) for least, nbytes in ladder})
    if None not in given:
        sizes = sizes[:1]
    down, up = given
    return [Windows(size if down is None else down, size if up is None else up) for size in sizes]
