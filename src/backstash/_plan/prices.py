"""Put prices on memory and on the link: find the cheapest choices at them, and a lower bound for any
choices."""

from __future__ import annotations

import bisect
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .table import REGION, Group, Problem, Table, added_seconds
from .trace import Option

__all__ = ["Candidate", "by_prices", "earliest", "holding_least", "least_prefix"]

_ROUNDS = 40  # of the subgradient method
_MOMENTS = 6  # most moments that bind


@dataclass(frozen=True, slots=True)
class Candidate:
    """Choices for all blocks, which may not fit yet."""

    choices: list[str]
    link_seconds: float
    """Price of a byte that moves both ways, in seconds."""


@dataclass(slots=True)
class _Turn:
    """The cheapest choices at some prices."""

    chosen: list[tuple[str, Option]]
    """Of each group."""
    again: list[bool]
    """Of each composite, whether it is recomputed."""
    cost: float
    used: list[float]
    """Bytes at each moment."""
    moved: float
    """Bytes that move."""


def _cheapest(table: Table, memory_prices: list[float], per_moved_byte: float) -> _Turn:
    """Return the cheapest choice of each group and composite (see ``solve``)."""
    turn = _Turn([], [], 0.0, [0.0] * len(memory_prices), 0.0)
    prices = []

    def take(group: Group, option: Option, count: int) -> None:
        turn.moved += count * option.moved_bytes
        for index in group.at:
            turn.used[index] += count * option.resident_bytes

    for group in table.groups:
        held = sum([memory_prices[index] for index in group.at])
        cheapest, least = group.options[0], float("inf")
        for name, option in group.options:
            price = option.save_seconds + option.use_seconds
            price += option.moved_bytes * per_moved_byte + option.resident_bytes * held
            if price < least:
                cheapest, least = (name, option), price
        turn.chosen.append(cheapest)
        prices.append(least)
        if group.count:
            turn.cost += group.count * least
            take(group, cheapest[1], group.count)
    for composite in table.composites:
        count = len(composite.regions)
        separately = sum(number * prices[group] for group, number in composite.parts)
        as_one = composite.seconds + sum(
            price * nbytes for price, nbytes in zip(memory_prices, composite.returned, strict=True)
        )
        turn.again.append(as_one < separately)
        turn.cost += count * min(as_one, separately)
        if as_one < separately:
            for index, nbytes in enumerate(composite.returned):
                turn.used[index] += count * nbytes
        else:
            for at, number in composite.parts:
                take(table.groups[at], turn.chosen[at][1], count * number)
    return turn


def by_prices(problem: Problem, inflight_bytes: int, first: int) -> tuple[float, list[Candidate]]:
    """Return a lower bound of the step's seconds, and the choices at the best prices tried.

    Args:
        problem: the problem.
        inflight_bytes: bytes that may still be in flight after the last save.
        first: the moment at which memory gets a price first.
    """
    trace, links = problem.trace, problem.trace.links
    moments = [first]
    # Writes have the time up to the last save, plus the window; reads have the time from the first use on. With
    # several graphs these overlap. A block that is used while it is being written is not read back, but it was
    # in memory all the time, so keeping it costs no more.
    last_save = max(problem.saves.values(), default=0)
    spare_down = sum(moment.seconds for moment in trace.moments[: last_save + 1])
    spare_down += inflight_bytes / links.down_rate
    before_use = sum(moment.seconds for moment in trace.moments[: problem.first_use])
    spare_up = trace.compute_seconds - before_use
    computing = max(trace.compute_seconds, 1e-9)
    best_bound, candidates = float("-inf"), list[Candidate]()
    link_seconds = 0.0
    for _ in range(_MOMENTS):
        table = Table(problem, moments)
        capacity = [problem.capacity(at) for at in moments]
        scale = max(1, *(abs(each) for each in capacity))
        memory_prices = [0.0] * len(moments)
        down_price = up_price = 0.0
        value_before = float("-inf")
        best_here: _Turn | None = None
        for number in range(_ROUNDS):
            per_moved_byte = down_price / links.down_rate + up_price / links.up_rate
            turn = _cheapest(table, memory_prices, per_moved_byte)
            value = turn.cost - sum(p * c for p, c in zip(memory_prices, capacity, strict=True))
            value -= down_price * spare_down + up_price * spare_up
            best_bound = max(best_bound, value)
            if best_here is None or value > value_before:
                value_before, best_here = value, turn
                link_seconds = per_moved_byte
            # Seconds per byte: what moving everything costs, over all bytes, is the right order of price.
            step = 1.0 / (1 + number) ** 0.75
            unit = computing / scale
            for index in range(len(moments)):
                excess = (turn.used[index] - capacity[index]) / scale
                memory_prices[index] = max(0.0, memory_prices[index] + step * unit * excess)
            down_excess = (turn.moved / links.down_rate - spare_down) / max(spare_down, 1e-9)
            up_excess = (turn.moved / links.up_rate - spare_up) / max(spare_up, 1e-9)
            down_price = min(1.0, max(0.0, down_price + 0.5 * step * down_excess))
            up_price = min(1.0, max(0.0, up_price + 0.5 * step * up_excess))
        assert best_here is not None
        names = [name for name, _option in best_here.chosen]
        choices = _assigned(problem, table, names, best_here.again)
        candidates.append(Candidate(choices, link_seconds))
        outcome = problem.forecast(choices)
        if outcome.peak_bytes <= problem.budget or outcome.peak_moment in moments:
            break
        moments.append(outcome.peak_moment)
    for runs in (False, True) if problem.regions else (False,):
        candidates.append(Candidate(holding_least(problem, again=runs), link_seconds))
    return trace.compute_seconds + trace.extra_seconds(all_stay=False) + max(
        0.0, best_bound
    ), candidates


def _assigned(
    problem: Problem, table: Table, names: Sequence[str], again: Sequence[bool]
) -> list[str]:
    """Return the choices of all blocks, given those of each group and whether each composite is recomputed."""
    choices = [names[group] for group in table.group_of]
    for composite, runs in zip(table.composites, again, strict=True):
        for region in composite.regions if runs else ():
            for block in problem.regions[region].members:
                choices[block] = REGION
    return choices


def holding_least(problem: Problem, *, again: bool) -> list[str]:
    """Return the choices that hold the fewest bytes of each block; ``again``: recompute all regions."""
    return [
        REGION if again and block in problem.region_of else problem.least_resident(block)
        for block in range(len(problem.trace.blocks))
    ]


def earliest(problem: Problem) -> list[Candidate]:
    """Return choices that free the fewest of the first saved blocks, so that all later ones are unmanaged.

    Each freed block takes the option that is cheapest per byte. If regions can be recomputed, a second
    candidate recomputes those that lie wholly among the freed blocks.
    """
    links = problem.trace.links
    link_seconds = 1 / links.down_rate + 1 / links.up_rate
    cheapest = _cheapest_freeing(problem, link_seconds)

    def up_to(count: int, *, again: bool) -> list[str]:
        choices = [
            name if min(end, len(cheapest)) <= count else "keep"
            for name, end in zip(cheapest, problem.ends, strict=True)
        ]
        for region in problem.regions if again else ():
            if max(region.members) < count:
                for member in region.members:
                    choices[member] = REGION
        return choices

    found = []
    for again in (False, True) if problem.regions else (False,):
        counts = range(len(problem.trace.blocks) + 1)
        count = least_prefix(problem, functools.partial(up_to, again=again), counts)
        found.append(Candidate(up_to(count, again=again), link_seconds))
    return found


def least_prefix(
    problem: Problem, up_to: Callable[[int], Sequence[str]], counts: Sequence[int]
) -> int:
    """Return the first of the ``counts``, which rise, for which the choices ``up_to`` of them fit; the last
    one if none do."""

    def fits(count: int) -> bool:
        return problem.forecast(up_to(count)).peak_bytes <= problem.budget

    first, *others = counts
    if not others or fits(first):
        return first
    if not fits(others[-1]):
        return others[-1]
    return others[bisect.bisect_left(others[:-1], True, key=fits)]


def _cheapest_freeing(problem: Problem, link_seconds: float) -> list[str]:
    """Return, for each block, the option that frees a byte at the least cost; ``"keep"`` if none frees any."""
    cheapest = []
    for block in range(len(problem.trace.blocks)):
        now = problem.option(block, "keep")
        freeing = [
            (
                added_seconds(now, option, link_seconds)
                / (now.resident_bytes - option.resident_bytes),
                name,
            )
            for name, option in problem.options(block)
            if option.resident_bytes < now.resident_bytes
        ]
        cheapest.append(min(freeing)[1] if freeing else "keep")
    return cheapest
