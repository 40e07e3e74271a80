"""Solve: the cheapest choice for each block within a budget, by prices, with a lower bound beside it.

The problem, in seconds added to a step::

    minimise   sum of the options' own seconds + stalls
    such that  at each moment: other bytes + resident bytes + windows <= budget
               bytes written / down rate <= computing time of the forward pass + window + stall
               bytes read / up rate      <= computing time of the backward pass + stall

A price on a resident byte at each moment that binds, and one on a byte of each direction of the link, makes
the choices independent of each other: every block takes the option that is cheapest at these prices. Raising
the prices where a constraint is violated (a subgradient method) gives a lower bound for any choice (Lagrangian
duality: Everett 1963, Held and Karp 1971). Choices at good prices are repaired to fit, filled up where space is
left, scored in the simulation, and the best is taken.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from .simulate import Forecast, Windows, simulate
from .trace import Option, Trace

__all__ = ["Solution", "smallest_budget", "solve"]

_ROUNDS = 120  # of the subgradient method
_MOMENTS = 6  # at most so many that bind
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Solution:
    """Choices for all blocks of a trace."""

    choices: tuple[str, ...]
    """The name of each block's option."""
    windows: Windows
    """The windows that go with them."""
    forecast: Forecast
    """By the simulation."""
    bound_seconds: float
    """No choice of options within the budget makes the step shorter than this, by the same figures."""
    fits: bool
    """Whether the forecast's peak is within the budget."""


@dataclass(slots=True)
class _Problem:
    trace: Trace
    budget: int
    allowed: Sequence[str]
    windows: Windows
    reserves: bool = False  # whether the windows are taken to be full, which they need not be
    saves: dict[int, int] = field(default_factory=dict)
    frees: dict[int, int] = field(default_factory=dict)
    first_use: int = 0

    def __post_init__(self) -> None:
        moments = self.trace.moments
        self.saves, self.frees = self.trace.span("save"), self.trace.span("free")
        uses = (at for at, moment in enumerate(moments) if moment.kind == "use")
        self.first_use = next(uses, len(moments))

    def options(self, block: int) -> list[tuple[str, Option]]:
        known = self.trace.blocks[block].options
        return [(name, known[name]) for name in self.allowed if name in known]

    def is_alive(self, block: int, at: int) -> bool:
        """Whether the block is saved and not freed in the interval before this moment."""
        return self.saves[block] < at <= self.frees.get(block, len(self.trace.moments))

    def capacity(self, at: int) -> int:
        """Bytes that may be resident in the interval before this moment."""
        moments, windows = self.trace.moments, self.windows
        other = moments[at].other_bytes if at < len(moments) else self.trace.tail_other_bytes
        reserved = 0
        if self.reserves:
            forward = at <= self.first_use
            reserved = windows.inflight_bytes if forward else windows.prefetch_bytes
        return self.budget - other - reserved


def solve(
    trace: Trace,
    budget: int,
    *,
    allowed: Sequence[str] | None = None,
    windows: tuple[int | None, int | None] = (None, None),
) -> Solution:
    """The cheapest choices found whose simulated peak is within ``budget`` bytes.

    Args:
        trace: of the step.
        budget: the most bytes of memory at any moment.
        allowed: names of the options that may be chosen. Default: all.
        windows: bytes of the windows down and up; ``None``: several are tried.

    Where nothing fits, the choice of the smallest peak, with ``fits=False``.
    """
    names = allowed or sorted({name for block in trace.blocks for name in block.options})
    keep = [block.options["keep"] for block in trace.blocks]
    everything = Windows(0, 0)
    plain = simulate(trace, keep, everything)
    if plain.peak_bytes <= budget:
        return Solution(("keep",) * len(keep), everything, plain, plain.step_seconds, fits=True)
    best: Solution | None = None
    tried = _windows(trace, windows)
    for each in tried:
        problem = _Problem(trace, budget, names, each, reserves=True)
        for candidate in _prices(problem, plain.peak_moment)[1]:
            found = _improve(problem, candidate)
            if best is None or _is_better(found, best):
                best = found
    assert best is not None
    bound, _ = _prices(_Problem(trace, budget, names, tried[-1]), plain.peak_moment)
    return Solution(best.choices, best.windows, best.forecast, bound, best.fits)


def smallest_budget(
    trace: Trace,
    *,
    allowed: Sequence[str] | None = None,
    windows: tuple[int | None, int | None] = (None, None),
) -> int:
    """The smallest budget in bytes that :func:`solve` can keep: the least peak of any choice it knows."""
    return solve(trace, 0, allowed=allowed, windows=windows).forecast.peak_bytes


def _is_better(one: Solution, other: Solution) -> bool:
    if one.fits != other.fits:
        return one.fits
    if one.fits:
        return one.forecast.step_seconds < other.forecast.step_seconds
    return one.forecast.peak_bytes < other.forecast.peak_bytes


def _windows(trace: Trace, given: tuple[int | None, int | None]) -> list[Windows]:
    """What windows are tried: the smaller leave more to keep, the larger hide more."""
    largest = max((block.nbytes for block in trace.blocks), default=0)
    ladder = ((1, 1), (16, 2), (64, 3))  # MiB, or so many of the largest block
    sizes = sorted({max(least * _MIB, times * largest) for least, times in ladder})
    if None not in given:
        sizes = sizes[:1]
    down, up = given
    return [Windows(size if down is None else down, size if up is None else up) for size in sizes]


@dataclass(frozen=True, slots=True)
class _Candidate:
    choices: list[str]
    link_seconds: float  # the price of a byte that moves both ways


def _prices(problem: _Problem, first: int) -> tuple[float, list[_Candidate]]:
    """A lower bound of the step's seconds, and choices at the best prices that were tried."""
    trace, links = problem.trace, problem.trace.links
    moments = [first]
    forward = sum(moment.seconds for moment in trace.moments[: problem.first_use])
    backward = trace.compute_seconds - forward
    spare_down = forward + problem.windows.inflight_bytes / links.down_rate
    best_bound, candidates = float("-inf"), list[_Candidate]()
    link_seconds = 0.0
    for _ in range(_MOMENTS):
        groups = _groups(problem, moments)
        capacity = [problem.capacity(at) for at in moments]
        scale = max(1, *(abs(each) for each in capacity))
        memory_prices = [0.0] * len(moments)
        down_price = up_price = 0.0
        step, value_before = 1.0, float("-inf")
        chosen: list[str] = []
        best_here: list[str] = []
        shares: list[Counter[str]] = [Counter() for _ in groups]
        for turn in range(_ROUNDS):
            value = -sum(p * c for p, c in zip(memory_prices, capacity, strict=True))
            value -= down_price * spare_down + up_price * backward
            used, moved = [0.0] * len(moments), 0.0
            chosen = []
            for options, alive, count in groups:
                cheapest, least = options[0], float("inf")
                for name, option in options:
                    price = option.save_seconds + option.use_seconds
                    price += option.moved_bytes * (
                        down_price / links.down_rate + up_price / links.up_rate
                    )
                    if option.resident_bytes:
                        price += option.resident_bytes * sum(
                            p for p, is_alive in zip(memory_prices, alive, strict=True) if is_alive
                        )
                    if price < least:
                        cheapest, least = (name, option), price
                chosen.append(cheapest[0])
                if 2 * turn >= _ROUNDS:
                    shares[len(chosen) - 1][cheapest[0]] += 1
                value += count * least
                moved += count * cheapest[1].moved_bytes
                for index, is_alive in enumerate(alive):
                    if is_alive:
                        used[index] += count * cheapest[1].resident_bytes
            if value > best_bound:
                best_bound = value
            if value > value_before or not best_here:
                value_before, best_here = value, chosen
                link_seconds = down_price / links.down_rate + up_price / links.up_rate
            # Seconds per byte: what moving everything costs, over all bytes, is the right order of price.
            step = 1.0 / (1 + turn) ** 0.75
            unit = max(trace.compute_seconds, 1e-9) / scale
            for index in range(len(moments)):
                excess = (used[index] - capacity[index]) / scale
                memory_prices[index] = max(0.0, memory_prices[index] + step * unit * excess)
            down_excess = (moved / links.down_rate - spare_down) / max(spare_down, 1e-9)
            up_excess = (moved / links.up_rate - backward) / max(backward, 1e-9)
            down_price = min(1.0, max(0.0, down_price + 0.5 * step * down_excess))
            up_price = min(1.0, max(0.0, up_price + 0.5 * step * up_excess))
        by_group = dict(zip(_keys(problem, moments), best_here, strict=True))
        choices = [by_group[_key(problem, moments, block)] for block in range(len(trace.blocks))]
        for each in (choices, _shared_out(problem, moments, shares)):
            candidates.append(_Candidate(each, link_seconds))
        outcome = simulate(trace, _options(problem, choices), problem.windows)
        if outcome.peak_bytes <= problem.budget or outcome.peak_moment in moments:
            break
        moments.append(outcome.peak_moment)
    everything = [_least_resident(problem, block) for block in range(len(trace.blocks))]
    candidates.append(_Candidate(everything, link_seconds))
    return trace.compute_seconds + max(0.0, best_bound), candidates


def _shared_out(problem: _Problem, moments: list[int], shares: list[Counter[str]]) -> list[str]:
    """Choices in the proportions that the prices chose while they settled.

    Their average tends to the best fractional choice (Shor 1985; Larsson, Patriksson and Stromberg 1999).
    Within a group the earliest saved move, whose writes have the most time, and the latest stay.
    """
    keys = _keys(problem, moments)
    members: dict[_Key, list[int]] = {key: [] for key in keys}
    for block in sorted(range(len(problem.trace.blocks)), key=problem.saves.__getitem__):
        members[_key(problem, moments, block)].append(block)
    choices = [""] * len(problem.trace.blocks)
    for key, share in zip(keys, shares, strict=True):
        blocks, options = members[key], dict(key[0])
        total = sum(share.values())
        order = sorted(
            share,
            key=lambda name: (not options[name].moved_bytes, options[name].resident_bytes),
        )
        at, due = 0, 0.0
        for name in order:
            due += len(blocks) * share[name] / total
            while at < len(blocks) and at + 0.5 <= due:
                choices[blocks[at]] = name
                at += 1
        for block in blocks[at:]:
            choices[block] = order[-1]
    return choices


def _least_resident(problem: _Problem, block: int) -> str:
    return min(
        problem.options(block), key=lambda each: (each[1].resident_bytes, each[1].moved_bytes)
    )[0]


_Key = tuple[tuple[tuple[str, Option], ...], tuple[bool, ...]]


def _key(problem: _Problem, moments: list[int], block: int) -> _Key:
    alive = tuple(problem.is_alive(block, at) for at in moments)
    return tuple(problem.options(block)), alive


def _keys(problem: _Problem, moments: list[int]) -> list[_Key]:
    return list(Counter(_key(problem, moments, b) for b in range(len(problem.trace.blocks))))


def _groups(
    problem: _Problem, moments: list[int]
) -> list[tuple[list[tuple[str, Option]], tuple[bool, ...], int]]:
    """Blocks that no price tells apart: their options, at which moments they are alive, how many."""
    counted = Counter(_key(problem, moments, b) for b in range(len(problem.trace.blocks)))
    return [(list(options), alive, count) for (options, alive), count in counted.items()]


def _options(problem: _Problem, choices: Sequence[str]) -> list[Option]:
    return [block.options[name] for block, name in zip(problem.trace.blocks, choices, strict=True)]


def _improve(problem: _Problem, start: _Candidate) -> Solution:
    """Change single choices until the peak fits, then use the memory that is left."""
    trace, budget, windows = problem.trace, problem.budget, problem.windows
    choices = list(start.choices)
    forecast = simulate(trace, _options(problem, choices), windows)
    # Repair: at the moment of the peak, the change that frees a byte at the least cost; the earliest saved
    # first among equals, since its write has the most time. As many at once as the excess needs.
    for _ in range(64):
        excess = forecast.peak_bytes - budget
        if excess <= 0:
            break
        changes = []
        for block in range(len(choices)):
            if not problem.is_alive(block, forecast.peak_moment):
                continue
            now = trace.blocks[block].options[choices[block]]
            for name, option in problem.options(block):
                freed = now.resident_bytes - option.resident_bytes
                if freed > 0:
                    changes.append(
                        (_added(now, option, start.link_seconds) / freed, block, name, freed)
                    )
        if not changes:
            break
        changes.sort()
        changed: set[int] = set()
        for _cost, block, name, freed in changes:
            if excess <= 0:
                break
            if block not in changed:
                choices[block] = name
                changed.add(block)
                excess -= freed
        forecast = simulate(trace, _options(problem, choices), windows)
    if forecast.peak_bytes <= budget:
        choices, forecast = _fill(problem, choices, forecast, start.link_seconds)
    return Solution(tuple(choices), windows, forecast, 0.0, fits=forecast.peak_bytes <= budget)


def _fill(
    problem: _Problem, choices: list[str], forecast: Forecast, link_seconds: float
) -> tuple[list[str], Forecast]:
    """Undo the dearest changes for which there is space: by the seconds that a byte saves, the latest saved
    first among equals, halving the number tried when the peak or the time rises."""
    trace = problem.trace
    gains = []
    for block, name in enumerate(choices):
        now = trace.blocks[block].options[name]
        for other, option in problem.options(block):
            added = option.resident_bytes - now.resident_bytes
            gain = -_added(now, option, link_seconds)
            if other != name and gain > 0:
                gains.append((gain / added if added > 0 else float("inf"), block, other))
    gains.sort(reverse=True)
    at, count, tries = 0, max(1, len(gains) // 2), 0
    while at < len(gains) and tries < 40:
        tries += 1
        tried = list(choices)
        for _gain, block, other in gains[at : at + count]:
            tried[block] = other
        outcome = simulate(trace, _options(problem, tried), problem.windows)
        if (
            outcome.peak_bytes <= problem.budget
            and outcome.step_seconds <= forecast.step_seconds + 1e-12
        ):
            choices, forecast, at = tried, outcome, at + count
        elif count > 1:
            count //= 2
        else:
            at += 1
    return choices, forecast


def _added(now: Option, then: Option, link_seconds: float) -> float:
    """Seconds that the other option adds, with the link's at its price; a hidden transfer is nearly free."""
    per_byte = max(link_seconds, 1e-13)
    return (
        then.save_seconds
        + then.use_seconds
        - now.save_seconds
        - now.use_seconds
        + per_byte * (then.moved_bytes - now.moved_bytes)
    )
