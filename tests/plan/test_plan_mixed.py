"""Plans that recompute more of some regions than of others, and move what is saved first."""

from dataclasses import replace

import pytest

import backstash._plan.table
from backstash._plan.mixed import mixed
from backstash._plan.prices import least_prefix
from backstash._plan.simulate import simulate
from backstash._plan.solve import solve, solve_with_cuts
from backstash._plan.table import REGION, Problem, absent_operands
from backstash._plan.trace import Links, Moment, Option, RegionCut, Trace, TracedBlock, TracedRegion
from counted_memory import MIB

CALLS = 8


def trace_of_calls(rate=1.0, operands=(), calls=CALLS):
    """Of some equal calls: each saves a block that is cheap to recompute, and one that is dear.

    ``operands``: for each call, another block, which only a replay of it reads.
    """
    each = 3 if operands else 2
    options = {"keep": Option(MIB), "disk": Option(0, 0.0, 0.0, MIB)}
    blocks = [TracedBlock(f"class {at % each}", MIB, options) for at in range(each * calls)]
    moments = [Moment("save", at, 0.1, 0) for at in range(len(blocks))]
    for at in reversed(range(len(blocks))):
        moments += [Moment("use", at, 0.1, 0), Moment("free", at, 0.1, 0)]
    regions = [
        TracedRegion(
            "call",
            (each * at, each * at + 1),
            0.0,
            1.1,
            index=at,
            cuts=(RegionCut((each * at,), (1,), 0.1 / 1.1, ()),),
            operands=(each * at + 2,) if operands else (),
        )
        for at in range(calls)
    ]
    links = Links(rate * MIB, rate * MIB)
    return Trace(tuple(blocks), tuple(moments), links, runs_ahead=True, regions=tuple(regions))


def recomputed(trace, found):
    """How many calls are recomputed as a whole, and how many in part."""
    again = [
        at for at, each in enumerate(trace.regions) if found.choices[each.members[0]] == REGION
    ]
    levels = found.levels or (0,) * CALLS
    return sum(not levels[at] for at in again), sum(levels[at] > 0 for at in again)


def test_the_cheapest_bytes_of_all_calls_come_first():
    """Of 16 MiB so much is to go that the cheap blocks of the first calls suffice, or not quite."""
    trace = trace_of_calls(rate=1e-3)
    seconds = []
    for gone in (2, 5, 7, 9, 11):
        found = solve_with_cuts(trace, (2 * CALLS - gone) * MIB)
        whole, part = recomputed(trace, found)
        assert found.fits and 2 * whole + part >= gone
        assert whole == max(0, gone - CALLS), gone
        seconds.append(found.forecast.step_seconds - trace.compute_seconds)
        assert seconds[-1] == pytest.approx(1.1 * whole + 0.1 * part)
    wholes = solve(trace, (2 * CALLS - 9) * MIB)
    assert seconds[3] < wholes.forecast.step_seconds - trace.compute_seconds


def test_no_more_is_recomputed_than_the_budget_needs():
    """Also of many calls, of which only some numbers of changes are tried otherwise."""
    trace = trace_of_calls(rate=1e-3)
    for gone in range(1, CALLS + 1):
        tried = mixed(Problem(trace, (2 * CALLS - gone) * MIB), 1)
        parts = [sum(recomputed(trace, one)) for one, _ in tried if one.fits]
        assert gone in parts, (gone, parts)


def test_what_transfers_hide_is_moved_and_not_recomputed():
    """The first blocks, which have the most time."""
    trace = trace_of_calls(rate=10.0)
    found = solve_with_cuts(trace, (2 * CALLS - 5) * MIB)
    assert found.forecast.step_seconds == pytest.approx(trace.compute_seconds)
    moved = [at for at, name in enumerate(found.choices) if name == "disk"]
    assert moved and max(moved) < CALLS, moved


def test_what_only_a_replay_reads_is_there_only_with_it():
    trace = trace_of_calls(operands=True)
    problem = Problem(trace, 0)
    keep = ["keep"] * len(trace.blocks)
    assert problem.forecast(keep).peak_bytes == 2 * CALLS * MIB
    for member in trace.regions[0].members:
        keep[member] = REGION
    # Two blocks less, and the one that their replay reads more.
    assert problem.forecast(keep).peak_bytes == (2 * CALLS - 1) * MIB
    assert sum(each.resident_bytes for each in trace.left_alone()) == 2 * CALLS * MIB
    assert absent_operands(trace.regions, [0]) == {2 + 3 * at for at in range(1, CALLS)}
    shared = [replace(each, operands=(2,)) for each in trace.regions]
    assert absent_operands(shared, [3]) == set(), "another region reads it, too"
    assert Trace.from_dict(trace.as_dict()) == trace


def test_what_only_a_replay_reads_is_held_until_then():
    """A recorded step tries the replay at the end of the call, and then frees what only it read."""
    trace = trace_of_calls(operands=True)
    moments = []
    for each in trace.moments:
        if each.block % 3 != 2 or each.kind == "save":
            moments.append(each)
        if each.block % 3 == 2 and each.kind == "save":
            moments.append(replace(each, kind="free"))
    early = replace(trace, moments=tuple(moments))
    names = ["keep"] * len(early.blocks)
    for region in early.regions[:3]:
        for member in region.members:
            names[member] = REGION
    found = Problem(early, 0).forecast(names)
    assert found.peak_bytes == found.resident_peak_bytes == (2 * CALLS - 3) * MIB
    kept = Problem(early, 0).forecast(["keep"] * len(early.blocks))
    assert kept.peak_bytes == 2 * CALLS * MIB


def simulations(monkeypatch):
    """The windows of all simulations from now on."""
    found = []

    def counted(trace, choices, windows, again):
        found.append(windows)
        return simulate(trace, choices, windows, again)

    monkeypatch.setattr(backstash._plan.table, "simulate", counted)
    return found


@pytest.mark.parametrize("rate", [1e-3, 0.3])
def test_a_step_of_many_blocks_is_simulated_a_few_times(rate, monkeypatch):
    """A plan is made while the program trains, on the same interpreter. With as many tries as for a short step
    it takes over 1,000 simulations of these 800 blocks."""
    count = simulations(monkeypatch)
    trace = trace_of_calls(rate, calls=400)
    found = solve_with_cuts(trace, 600 * MIB)
    assert found.fits and len(count) <= 450
    whole, part = sum(recomputed(trace, found)), sum(name == "disk" for name in found.choices)
    assert whole + part >= 200, "what is freed"


def test_the_first_count_that_fits(monkeypatch):
    trace = trace_of_calls()
    blocks = range(len(trace.blocks))

    def up_to(count):
        return ["disk" if at < count else "keep" for at in blocks]

    def first(left, counts):
        peaks = [Problem(trace, 0).forecast(up_to(count)).peak_bytes for count in counts]
        assert peaks == sorted(peaks, reverse=True)
        return least_prefix(Problem(trace, peaks[left]), up_to, counts)

    every = range(len(blocks) + 1)
    assert [first(at, every) for at in every if at % 3 == 0] == [at for at in every if at % 3 == 0]
    assert [first(at, [0, 5, 9]) for at in range(3)] == [0, 5, 9]
    count = simulations(monkeypatch)
    assert least_prefix(Problem(trace, 0), up_to, [0, 5, 9, 12]) == 12, "none fits"
    assert least_prefix(Problem(trace, 99 * MIB), up_to, every) == 0
    assert len(count) == 3
    assert least_prefix(Problem(trace, 0), up_to, [0]) == 0
