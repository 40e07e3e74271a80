"""Choices that were measured are planned again where they keep the budget and take less time."""

from backstash._budget.solving import Kept, Solving
from backstash._plan.simulate import Windows
from backstash._plan.solve import follow
from backstash._plan.trace import Links, Moment, Option, Trace, TracedBlock
from counted_memory import MIB


def two():
    option = {"keep": Option(MIB), "disk": Option(0, 0.5, 0, MIB)}
    return tuple(TracedBlock("", MIB, dict(option)) for _ in range(2))


MOMENTS = tuple(Moment(*each, 0.1, MIB) for each in (("save", 0), ("save", 1), ("use", 1)))


def test_what_was_measured_of_other_steps_is_no_choice():
    def solved(blocks, *, is_near=False, target=2 * MIB, choice="disk", rate=1.0):
        trace = Trace(blocks, MOMENTS, Links(rate, rate))
        solving = Solving((8 * MIB, 8 * MIB), {})
        windows = Windows(8 * MIB, 8 * MIB)
        solving.keep(Kept(known, (choice,) * 2, windows, 2 * MIB, is_near))
        solving.begin(trace, target)
        solving.wait()
        return solving.found[1]

    known = two()
    assert solved(known).fits and solved(known, is_near=True).fits
    assert not solved(two()).fits and not solved(two(), is_near=True).fits
    for is_near in (False, True):
        found = solved(known, is_near=is_near, target=3 * MIB - 1, choice="keep", rate=1e8)
        assert found.fits and (found.choices == ("keep",) * 2) != is_near, "moving one takes longer"
    found = solved(known, choice="keep", rate=1e8)
    assert found.choices == ("keep",) * 2
    assert found.bound_seconds <= found.forecast.step_seconds, "they were measured to fit"


def test_the_margin_is_used_before_a_budget_is_said_to_be_too_small():
    def solved(target, most):
        solving = Solving((0, 0), {})
        solving.begin(Trace(two(), MOMENTS, Links(1.0, 1.0)), target, most=most)
        solving.wait()
        return solving.found[1]

    peak = solved(MIB, MIB).forecast.peak_bytes
    assert not solved(peak - 2, peak - 1).fits
    found = solved(peak - 1, peak)
    assert found.fits and found.forecast.peak_bytes == peak
    assert solved(peak - 1, 9 * MIB).choices == ("keep", "keep"), "and the fastest within it"


def test_measured_choices_that_move_more_in_the_same_time_are_not_planned_again():
    """Less than a hundredth of a step's time is what no step repeats, and no reason to move twice as much."""
    options = {"keep": Option(MIB), "disk": Option(0, 0, 0, MIB)}
    blocks = tuple(TracedBlock("", MIB, dict(options)) for _ in range(2))
    moments = (("save", 0), ("save", 1), ("use", 1), ("free", 1), ("use", 0), ("free", 0))
    trace = Trace(blocks, tuple(Moment(*each, 0.1, MIB) for each in moments), Links(5e8, 5e8))
    hidden = Windows(8 * MIB, 8 * MIB)
    everything = follow(trace, ("disk",) * 2, hidden)
    one = follow(trace, ("disk", "keep"), Windows(0, 0))
    assert 0.99 < everything.forecast.step_seconds / one.forecast.step_seconds < 1
    solving = Solving((0, 0), {})
    solving.keep(Kept(blocks, ("disk",) * 2, hidden, 2 * MIB, False))
    solving.begin(trace, 2 * MIB)
    solving.wait()
    assert solving.found[1].choices == ("disk", "keep")


def test_choices_that_held_more_later_are_given_up_with_all_others():
    """The process has grown since they were measured."""
    blocks, windows = two(), Windows(8 * MIB, 8 * MIB)
    for given_up, fits in ((("pack", "pack"), True), (("disk", "disk"), False)):
        solving = Solving((8 * MIB, 8 * MIB), {})
        for choices in (("disk", "disk"), ("disk", "keep")):
            solving.keep(Kept(blocks, choices, windows, 2 * MIB, False))
        solving.give_up(given_up)
        solving.begin(Trace(blocks, MOMENTS, Links(1.0, 1.0)), 2 * MIB)
        solving.wait()
        assert solving.found[1].fits is fits, "those were not known to keep it"
