"""Solve: the cheapest choice for each block within a budget, by prices, with a lower bound beside it.

The problem, in seconds added to a step::

    minimise   sum of the options' own seconds + stalls
    such that  at each moment: other bytes + resident bytes + windows <= budget
               bytes written / down rate <= computing time of the forward pass + window + stall
               bytes read / up rate      <= computing time of the backward pass + stall

A price on a resident byte at each moment that binds, and one on a byte of each direction of the link, makes
the choices independent of each other: every block takes the option that is cheapest at these prices; a region,
that or to run again as a whole, at the price of what is then in memory in backward. Raising
the prices where a constraint is violated (a subgradient method) gives a lower bound for any choice (Lagrangian
duality: Everett 1963, Held and Karp 1971). Choices at good prices are repaired to fit, filled up where space is
left, scored in the simulation, and the best is taken.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from .simulate import Forecast, Windows, simulate
from .table import REGION, Group, Problem, Table
from .trace import Option, Trace

__all__ = ["Solution", "best_of", "follow", "smallest_budget", "solve"]

_ROUNDS = 120  # of the subgradient method
_MOMENTS = 6  # at most so many that bind
_FILLED = 8  # of the repaired choices, the best, which are filled up
_ALIKE = 1e-3  # of a step's seconds: solutions that differ by less take the same time
_MIB = 1 << 20
_NOTHING = Option(0)


@dataclass(frozen=True, slots=True)
class Solution:
    """Choices for all blocks of a trace."""

    choices: tuple[str, ...]
    """The name of each block's option; ``"region"`` for all members of a region that runs again."""
    windows: Windows
    """The windows that go with them."""
    forecast: Forecast
    """By the simulation."""
    bound_seconds: float
    """No choice of options within the budget makes the step shorter than this, by the same figures."""
    fits: bool
    """Whether the forecast's peak is within the budget."""
    left_after: int | None = None
    """After so many blocks all stay, and are left alone; ``None``: each is looked at."""
    measured_bytes: int | None = None
    """Of choices that were measured before: their peak, which is predicted again."""

    def predicted_bytes(self, bias_bytes: int) -> int:
        """The peak, where steps were seen to hold so many bytes more than the simulation says."""
        measured = self.measured_bytes
        return self.forecast.peak_bytes + bias_bytes if measured is None else measured


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
        allowed: names of the options that may be chosen, ``"region"`` for those that run again as a whole.
            Default: all.
        windows: bytes of the windows down and up; ``None``: several are tried.

    Where nothing fits, the choice of the smallest peak, with ``fits=False``.
    """
    names = allowed or sorted({REGION, *(name for block in trace.blocks for name in block.options)})
    everything = Windows(0, 0)
    plain = simulate(trace, trace.left_alone(), everything)
    if plain.peak_bytes <= budget:
        choices = ("keep",) * len(trace.blocks)
        return Solution(choices, everything, plain, plain.step_seconds, fits=True, left_after=0)
    repaired: list[tuple[Solution, Problem, float]] = []
    tried = _windows(trace, windows)
    for each in tried:
        problem = Problem(trace, budget, names, (each.inflight_bytes, each.prefetch_bytes))
        candidates = _prices(problem, each, plain.peak_moment)[1]
        if problem.leaves:
            candidates += _earliest(problem, each)
        different = {tuple(candidate.choices): candidate for candidate in candidates}
        for candidate in different.values():
            repaired.append((_repair(problem, each, candidate), problem, candidate.link_seconds))
    repaired.sort(key=lambda each: _rank(each[0]))
    best = best_of([_fill(*each) for each in repaired[:_FILLED]])
    bound, _ = _prices(Problem(_left(trace), budget, names), tried[-1], plain.peak_moment)
    forecast = _with_what_is_kept_beside(trace, best.forecast, plain, budget)
    left_after = problem.left_after(best.choices)
    return replace(best, forecast=forecast, bound_seconds=bound, left_after=left_after)


def _with_what_is_kept_beside(
    trace: Trace, forecast: Forecast, plain: Forecast, budget: int
) -> Forecast:
    """With what an allocator keeps beside tensors that stay, in proportion to these. It rules out no choice:
    near the budget it is given back."""
    if not trace.beside_left_bytes:
        return forecast
    beside = trace.beside_left_bytes * forecast.resident_peak_bytes // plain.resident_peak_bytes
    peak_bytes = max(forecast.peak_bytes, min(budget, forecast.peak_bytes + beside))
    return replace(forecast, peak_bytes=peak_bytes)


def follow(
    trace: Trace, choices: Sequence[str], windows: Windows, *, allowed: Sequence[str]
) -> Solution:
    """What such choices for a step come to; it is not looked at whether they fit into any budget."""
    problem = Problem(trace, 0, allowed)
    forecast = _run(problem, choices, windows)
    left_after = problem.left_after(choices)
    return Solution(tuple(choices), windows, forecast, 0.0, fits=True, left_after=left_after)


def smallest_budget(
    trace: Trace,
    *,
    allowed: Sequence[str] | None = None,
    windows: tuple[int | None, int | None] = (None, None),
) -> int:
    """The smallest budget in bytes that :func:`solve` can keep: the least peak of any choice it knows."""
    return solve(trace, 0, allowed=allowed, windows=windows).forecast.peak_bytes


def _left(trace: Trace) -> Trace:
    """The same step, where it takes nothing to keep a block: for a bound, as any may be left alone."""
    blocks = (
        replace(each, options={**each.options, "keep": Option(each.nbytes)})
        for each in trace.blocks
    )
    return replace(trace, blocks=tuple(blocks))


def best_of(solutions: Sequence[Solution], alike: float = _ALIKE) -> Solution:
    """Of those that fit, one that takes the least time. Of several that take the same, within such a part of
    it, the one that moves the least; where none fits, the one of the smallest peak."""
    best = min(solutions, key=_rank)
    if not best.fits:
        return best
    most = best.forecast.step_seconds * (1 + alike)
    as_fast = [each for each in solutions if each.fits and each.forecast.step_seconds <= most]
    return min(as_fast, key=lambda each: each.forecast.moved_bytes)


def _rank(solution: Solution) -> tuple[bool, float]:
    """The least is the best: one that fits by its time, another by its peak."""
    forecast = solution.forecast
    return not solution.fits, forecast.step_seconds if solution.fits else forecast.peak_bytes


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


@dataclass(slots=True)
class _Turn:
    """What is cheapest at some prices."""

    chosen: list[tuple[str, Option]]
    """Of each group."""
    again: list[bool]
    """Of each composite, whether it runs again."""
    cost: float
    used: list[float]
    """Bytes at each moment."""
    moved: float
    """Bytes."""


def _cheapest(table: Table, memory_prices: list[float], per_moved_byte: float) -> _Turn:
    """The cheapest choice of each group and composite: see the module."""
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
        apart = sum(number * prices[group] for group, number in composite.parts)
        as_one = composite.seconds + sum(
            price * nbytes for price, nbytes in zip(memory_prices, composite.returned, strict=True)
        )
        turn.again.append(as_one < apart)
        turn.cost += count * min(as_one, apart)
        if as_one < apart:
            for index, nbytes in enumerate(composite.returned):
                turn.used[index] += count * nbytes
        else:
            for at, number in composite.parts:
                take(table.groups[at], turn.chosen[at][1], count * number)
    return turn


def _prices(problem: Problem, windows: Windows, first: int) -> tuple[float, list[_Candidate]]:
    """A lower bound of the step's seconds, and choices at the best prices that were tried."""
    trace, links = problem.trace, problem.trace.links
    moments = [first]
    forward = sum(moment.seconds for moment in trace.moments[: problem.first_use])
    backward = trace.compute_seconds - forward
    spare_down = forward + windows.inflight_bytes / links.down_rate
    computing = max(trace.compute_seconds, 1e-9)
    best_bound, candidates = float("-inf"), list[_Candidate]()
    link_seconds = 0.0
    for _ in range(_MOMENTS):
        table = Table(problem, moments)
        capacity = [problem.capacity(at) for at in moments]
        scale = max(1, *(abs(each) for each in capacity))
        memory_prices = [0.0] * len(moments)
        down_price = up_price = 0.0
        value_before = float("-inf")
        best_here: _Turn | None = None
        shares: list[Counter[str]] = [Counter() for _ in table.groups]
        again = [0] * len(table.composites)
        for number in range(_ROUNDS):
            per_moved_byte = down_price / links.down_rate + up_price / links.up_rate
            turn = _cheapest(table, memory_prices, per_moved_byte)
            value = turn.cost - sum(p * c for p, c in zip(memory_prices, capacity, strict=True))
            value -= down_price * spare_down + up_price * backward
            if 2 * number >= _ROUNDS:
                for share, (name, _option) in zip(shares, turn.chosen, strict=True):
                    share[name] += 1
                again = [count + runs for count, runs in zip(again, turn.again, strict=True)]
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
            up_excess = (turn.moved / links.up_rate - backward) / max(backward, 1e-9)
            down_price = min(1.0, max(0.0, down_price + 0.5 * step * down_excess))
            up_price = min(1.0, max(0.0, up_price + 0.5 * step * up_excess))
        assert best_here is not None
        names = [name for name, _option in best_here.chosen]
        choices = _assigned(problem, table, names, best_here.again)
        for each in (choices, _shared_out(problem, table, shares, again)):
            candidates.append(_Candidate(each, link_seconds))
        outcome = _run(problem, choices, windows)
        if outcome.peak_bytes <= problem.budget or outcome.peak_moment in moments:
            break
        moments.append(outcome.peak_moment)
    for runs in (False, True) if problem.regions else (False,):
        candidates.append(_Candidate(_everything(problem, again=runs), link_seconds))
    return trace.compute_seconds + trace.beside_seconds(all_stay=False) + max(
        0.0, best_bound
    ), candidates


def _assigned(
    problem: Problem, table: Table, names: Sequence[str], again: Sequence[bool]
) -> list[str]:
    """Choices of all blocks from those of each group, and whether each composite runs again."""
    choices = [names[group] for group in table.group_of]
    for composite, runs in zip(table.composites, again, strict=True):
        for region in composite.regions if runs else ():
            for block in problem.regions[region].members:
                choices[block] = REGION
    return choices


def _shared_out(
    problem: Problem, table: Table, shares: list[Counter[str]], again: list[int]
) -> list[str]:
    """Choices in the proportions that the prices chose while they settled; ``again``: in how many turns each
    composite ran again.

    Their average tends to the best fractional choice (Shor 1985; Larsson, Patriksson and Stromberg 1999).
    Within a group the earliest saved move, whose writes have the most time, and the latest stay; the earliest
    regions run again, which is last in backward.
    """
    choices = [""] * len(problem.trace.blocks)
    turns = sum(shares[0].values()) if shares else 1
    for composite, count in zip(table.composites, again, strict=True):
        runs = int(len(composite.regions) * count / turns + 0.5)
        for region in composite.regions[:runs]:
            for block in problem.regions[region].members:
                choices[block] = REGION
    members: list[list[int]] = [[] for _ in table.groups]
    for block in sorted(range(len(choices)), key=problem.saves.__getitem__):
        if not choices[block]:
            members[table.group_of[block]].append(block)
    for group, blocks, share in zip(table.groups, members, shares, strict=True):
        options = dict(group.options)
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


def _everything(problem: Problem, *, again: bool) -> list[str]:
    """The choices that hold the least; ``again``: with all regions run again."""
    return [
        REGION if again and block in problem.region_of else _least_resident(problem, block)
        for block in range(len(problem.trace.blocks))
    ]


def _earliest(problem: Problem, windows: Windows) -> list[_Candidate]:
    """The fewest that are saved first are let go, by what is cheapest for each byte, so that all after them are
    left alone; where regions can run again, those that lie there whole do, in a second candidate."""
    trace, links = problem.trace, problem.trace.links
    link_seconds = 1 / links.down_rate + 1 / links.up_rate
    cheapest = []
    for block in range(len(trace.blocks)):
        now = problem.option(block, "keep")
        freeing = [
            (_added(now, option, link_seconds) / (now.resident_bytes - option.resident_bytes), name)
            for name, option in problem.options(block)
            if option.resident_bytes < now.resident_bytes
        ]
        cheapest.append(min(freeing)[1] if freeing else "keep")

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
        few, many = 0, len(cheapest)  # this many may do
        while few < many:
            middle = (few + many) // 2
            fits = _run(problem, up_to(middle, again=again), windows).peak_bytes <= problem.budget
            few, many = (few, middle) if fits else (middle + 1, many)
        found.append(_Candidate(up_to(many, again=again), link_seconds))
    return found


def _least_resident(problem: Problem, block: int) -> str:
    return min(
        problem.options(block), key=lambda each: (each[1].resident_bytes, each[1].moved_bytes)
    )[0]


def _run(problem: Problem, choices: Sequence[str], windows: Windows) -> Forecast:
    return simulate(problem.trace, problem.taken(choices), windows, problem.running_again(choices))


@dataclass(frozen=True, slots=True)
class _Change:
    """Other choices for a block, or for all members of a region."""

    updates: tuple[tuple[int, str], ...]
    seconds: float
    """That it adds to the step."""
    freed: int
    """Bytes at the moment in question."""
    is_whole: bool = False
    """It is a region's."""

    @property
    def place(self) -> tuple[int, str]:
        """The earliest saved first."""
        return self.updates[0]


def _changes(
    problem: Problem, choices: Sequence[str], at: int | None, link_seconds: float
) -> list[_Change]:
    """All single changes, with what they free in the interval before the moment ``at``; ``None``: what each
    block holds from its save to its free, as if all were alive at once."""
    changes = []
    for block, name in enumerate(choices):
        if name == REGION or (at is not None and not problem.is_alive(block, at)):
            continue
        now = problem.option(block, name)
        for other, option in problem.options(block):
            if other != name:
                freed = now.resident_bytes - option.resident_bytes
                changes.append(_Change(((block, other),), _added(now, option, link_seconds), freed))
    for index in range(len(problem.regions)):
        changes += _changes_of(problem, choices, index, at, link_seconds)
    return changes


def _changes_of(
    problem: Problem, choices: Sequence[str], index: int, at: int | None, link_seconds: float
) -> list[_Change]:
    """Run a region again; or no longer, with its members in place, or held by what holds the least."""
    region = problem.regions[index]
    seconds = region.save_seconds + region.use_seconds
    alive = {each for each in region.members if at is None or problem.is_alive(each, at)}
    returned = -region.small_bytes if at is None else problem.returned_bytes(index, at)

    def held(names: Sequence[str]) -> tuple[float, int]:
        """What such choices of the members take, and hold."""
        options = [
            problem.option(each, name) for each, name in zip(region.members, names, strict=True)
        ]
        nbytes = sum(
            option.resident_bytes
            for each, option in zip(region.members, options, strict=True)
            if each in alive
        )
        return sum(_added(_NOTHING, option, link_seconds) for option in options), nbytes

    if choices[region.members[0]] != REGION:
        cost, nbytes = held([choices[each] for each in region.members])
        updates = tuple((each, REGION) for each in region.members)
        return [_Change(updates, seconds - cost, nbytes - returned, is_whole=True)]
    found = []
    least = [_least_resident(problem, each) for each in region.members]
    for names in (["keep"] * len(least), least):
        cost, nbytes = held(names)
        updates = tuple(zip(region.members, names, strict=True))
        found.append(_Change(updates, cost - seconds, returned - nbytes, is_whole=True))
    return found


def _with(choices: Sequence[str], changes: Sequence[_Change]) -> list[str]:
    changed = list(choices)
    for change in changes:
        if changed[change.updates[0][0]] == REGION and not change.is_whole:
            continue  # its region runs again, by an earlier change
        for block, name in change.updates:
            changed[block] = name
    return changed


def _repair(problem: Problem, windows: Windows, start: _Candidate) -> Solution:
    """Change single choices until the peak fits."""
    budget, choices = problem.budget, list(start.choices)
    forecast = _run(problem, choices, windows)
    # At the moment of the peak, the change that frees a byte at the least cost; the earliest saved first among
    # equals, since its write has the most time. As many at once as the excess needs.
    for _ in range(64):
        excess = forecast.peak_bytes - budget
        if excess <= 0:
            break
        changes = [
            each
            for each in _changes(problem, choices, forecast.peak_moment, start.link_seconds)
            if each.freed > 0
        ]
        if not changes:
            break
        changes.sort(key=lambda each: (each.seconds / each.freed, each.place))
        changed: set[int] = set()
        taken = []
        for change in changes:
            if excess <= 0:
                break
            blocks = {block for block, _name in change.updates}
            if not blocks & changed:
                taken.append(change)
                changed |= blocks
                excess -= change.freed
        choices = _with(choices, taken)
        forecast = _run(problem, choices, windows)
    return Solution(tuple(choices), windows, forecast, 0.0, fits=forecast.peak_bytes <= budget)


def _fill(start: Solution, problem: Problem, link_seconds: float) -> Solution:
    """Undo the dearest changes for which there is space: by the seconds that a byte saves, the latest saved
    first among equals, halving the number tried when the peak or the time rises."""
    if not start.fits:
        return start
    choices, forecast = list(start.choices), start.forecast
    gains = [each for each in _changes(problem, choices, None, link_seconds) if each.seconds < 0]
    gains.sort(
        key=lambda each: (
            each.seconds / each.freed if each.freed < 0 else float("inf"),
            each.place,
        ),
        reverse=True,
    )
    at, count, tries = 0, max(1, len(gains) // 2), 0
    while at < len(gains) and tries < 40:
        tries += 1
        tried = _with(choices, gains[at : at + count])
        outcome = _run(problem, tried, start.windows)
        if (
            outcome.peak_bytes <= problem.budget
            and outcome.step_seconds <= forecast.step_seconds + 1e-12
        ):
            choices, forecast, at = tried, outcome, at + count
        elif count > 1:
            count //= 2
        else:
            at += 1
    return replace(start, choices=tuple(choices), forecast=forecast)


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
