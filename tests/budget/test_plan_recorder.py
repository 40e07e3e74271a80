"""From what is recorded of a step to its trace: what is computing, and what the stash adds."""

from dataclasses import replace

import pytest

from backstash._budget.corrections import Corrections
from backstash._budget.first_steps import FirstSteps
from backstash._budget.meter import Measured
from backstash._budget.record import (
    Costs,
    StepRecord,
    compared_with_unmanaged,
    costs_of,
    links_of,
    trace_of,
    typical_costs,
)
from backstash._budget.shape import StepShape
from backstash._plan.cuts import CallGraph, CallOperation
from backstash._plan.regions import Forward
from backstash._plan.trace import Links, Moment, Option, Trace, TracedRegion
from backstash.plan import StepFigures

MIB = 1 << 20
LINKS = Links(1e9, 1e9)


def event(kind, start, seconds=0.0, nbytes=MIB, number=-1):
    return (kind, start, seconds, nbytes, number, "", "", 0, 0, 0, 0, 0, 0)


def record(*events, ended=4.0):
    samples = [(0.0, 100 * MIB, 0)]
    return StepRecord(Measured(0.0, ended, [*events], samples), dict.fromkeys(range(9), "class"))


def seconds(trace):
    return [each.seconds for each in trace.moments]


def test_waits_are_no_computing():
    step = record(
        event("save", 1.0, number=0),
        event("stall", 1.5, 0.25),
        event("use", 3.0, number=0),
        event("free", 3.5, number=0),
    )
    trace = trace_of(step, LINKS, Costs(), "disk")
    assert seconds(trace) == pytest.approx([1.0, 1.75, 0.5])
    assert trace.tail_seconds == pytest.approx(0.5)


@pytest.mark.parametrize("is_late", [True, False])
def test_what_backward_uses_of_moved_blocks_counts_once(is_late):
    """A plan's step holds it, too: the simulation adds it, so it is no other memory."""
    read = event("read", 2.0, 0.5, number=0)  # the stash holds it until its end, and until the use
    used = [event("use", 1.9, number=0), read] if is_late else [read, event("use", 2.6, number=0)]
    step = record(
        event("save", 1.0, number=0),
        event("land", 1.5, number=0),
        *used,
        event("free", 3.0, number=0),
        event("save", 3.1, number=1),
        event("use", 3.2, number=1),
        event("land", 3.4, number=1),  # it was used in place while it was being written
        event("use", 3.5, number=1),
        event("free", 3.8, number=1),
    )
    held = [(0.0, 100, 0), (0.9, 110, 0), (1.2, 101, 1), (1.7, 110, 0), (2.4, 101, 1)]
    held += [
        (2.8, 101, 0),
        (3.05, 100, 0),
        (3.15, 101, 1),
        (3.3, 101, 1),
        (3.6, 101, 0),
        (3.9, 105, 0),
    ]
    step = replace(
        step,
        measured=replace(
            step.measured, samples=[(at, all_of * MIB, ours * MIB) for at, all_of, ours in held]
        ),
    )
    trace = trace_of(step, LINKS, Costs(), "disk")
    found = {(each.kind, each.block): each.other_bytes // MIB for each in trace.moments}
    assert found["free", 0] == 100 and found["free", 1] == 100
    assert trace.tail_other_bytes // MIB == 105


def test_what_a_transfer_costs_beyond_an_interval_is_taken_off_the_next():
    step = record(
        event("save", 1.0, number=0),
        event("write", 0.9, 0.1, nbytes=10),
        event("save", 1.5, number=1),
        event("use", 3.0, number=1),
    )
    trace = trace_of(step, LINKS, Costs(per_moved_byte=0.1), "disk")
    assert seconds(trace) == pytest.approx([1.0, 0.0, 1.0])
    assert trace.compute_seconds == pytest.approx(4.0 - 10 * 0.1)


def test_transfers_of_several_steps_are_each_of_their_own_clock():
    """An accelerator's begins with its step, so that two steps are at the same time by it."""
    steps = [record(event("write", 1.0, 0.5), event("read", 2.0, 0.25)) for _ in range(3)]
    assert links_of(steps) == links_of(steps[:1]) == Links(2 * MIB, 4 * MIB)
    overlapping = record(event("write", 1.0, 0.5), event("write", 1.25, 0.25))
    assert links_of([overlapping]).down_rate == 4 * MIB, "two at once take their time together"


def test_the_first_hook_counts_from_its_step_on():
    """It began before: the first save of a step ends the one before."""
    step = record(
        event("save", 1.0, number=0), event("pack hook", -2.0, 2.5), event("use", 3.0, number=0)
    )
    assert step.hook_seconds("pack hook") == 0.0, "it also takes the record of the step before"
    assert step.computing_seconds == pytest.approx(3.5)


def test_what_a_region_does_in_addition_to_its_hooks_is_no_computing():
    step = record(
        event("stall", 0.8, 0.05),
        event("save", 1.0, number=0),
        event("stall", 1.0, 0.1),
        event("pack hook", 0.9, 0.4),
        event("stall", 1.35, 0.05),
        event("region hook", 0.8, 1.0),
    )
    step.forwards.append(Forward("m", 0))
    assert step.hook_seconds("pack hook") == pytest.approx(0.3)
    assert step.computing_seconds == pytest.approx(4.0 - 1.0), "none of it twice"


def test_where_copies_overlap_the_shorter_step_gives_the_computing_time_and_a_byte_costs_nothing():
    full = moving(seconds=8.5, nbytes=2 * 10**9, hook=6.0)
    part = moving(seconds=6.0, nbytes=10**9, hook=4.0)
    for pair in ((full, part), (part, full)):
        costs = costs_of(*pair, LINKS, copies_aside=True)
        assert costs.per_moved_byte == 0
        assert costs.computing_seconds == pytest.approx(2.0)
    found = typical_costs([(full, part)], LINKS, copies_aside=True)
    assert found.computing_seconds == pytest.approx(2.0)


def test_on_an_accelerator_the_step_that_computed_for_the_least_time_is_planned_with():
    steps = [moving(seconds=each, nbytes=MIB, hook=1.0) for each in (9.0, 8.0, 5.0)]
    for aside, expected in ((True, steps[2]), (False, steps[1])):
        first = FirstSteps(10**9, copies_aside=aside)
        for each in steps:
            first.add(each, 1.0, MIB, 0)
        assert first.traced is expected and first.largest is steps[1]


def test_a_step_that_saves_more_for_trials_is_like_one_whose_backward_uses_as_much():
    """Trials of the first step of a pair save a fifth of its bytes, and no backward uses them."""
    steps = []
    for computing, tried in ((9.0, 0), (8.0, 1), (5.0, 0)):
        blocks = range(5 + tried)
        events = [event("save", 0.1 * at, number=at) for at in blocks]
        events += [event("use", 2 + 0.1 * at, number=at) for at in blocks[:5]]
        steps.append(record(*events, ended=computing))
    first = FirstSteps(10**9, copies_aside=True)
    for each in steps:
        first.add(each, 1.0, MIB, 0)
    assert first.largest is steps[1] and first.traced is steps[2]


@pytest.mark.parametrize("left", [16, 4])
def test_steps_that_were_left_alone_say_nothing_about_larger_ones(left):
    first, mib = FirstSteps(1), []
    for number in range(12):
        first.mode = mode = first.next_mode(lambda: 1 << 40) if number else "all"
        is_left = mode in ("left", "sampled")
        mib.append(left if is_left else 16)
        step = None if is_left else moving(seconds=1.0, nbytes=MIB, hook=0.1)
        first.add(step, 7.0 + len(mib), mib[-1], 300)
    assert first.next_mode(lambda: 1 << 40) is None
    assert mib == [16] * 7 + [left] * 5, "three pairs, then those that are left alone"
    assert first.left_seconds == (17.0 if left == 16 else None)
    assert first.left_peak_bytes == (300 if left == 16 else 0)


@pytest.mark.parametrize("turns", [[16, 4], [4, 16, 16]])
def test_where_steps_take_turns_the_largest_of_the_first_is_planned_for(turns):
    first = FirstSteps(1)
    for number in range(7):
        saves = range(turns[number % len(turns)])
        events = [event(kind, 1.0, number=at) for kind in ("save", "use") for at in saves]
        first.add(record(*events, ended=float(number)), 1.0, len(saves), 0)
    assert first.largest is first.records[1 + (turns[1] == 4)]
    assert first.asked_bytes(first.largest) == 16
    for pair in first.alike():
        assert {each.saved_bytes for each in pair} == {16 * MIB}, "costs are those of like steps"


def test_memory_that_moved_between_two_saves_makes_no_step_a_larger_one():
    shape = StepShape(begins_as_known=False)
    shape.follow([MIB] * 10, 0)
    for is_again in (False, True):
        shape.begin_step(is_first=False)
        found = [shape.count(MIB, is_planned=True) for _ in range(10)]
        found += [shape.count(MIB, is_planned=True, is_again=is_again) for _ in range(3)]
        assert any(found) is not is_again
        assert shape.saved_bytes == 13 * MIB
        ended = shape.begin_step(is_first=False)
        assert ended.saved_bytes == (10 if is_again else 13) * MIB


def test_what_a_compared_forward_holds_makes_no_step_a_larger_one():
    """A region that is compared holds some of what it discards later: here 2 of 100 MiB."""
    for discarded, is_larger in ((0, True), (90 * MIB, False)):
        shape = StepShape(begins_as_known=False)
        shape.follow([MIB] * 10, discarded)
        found = [shape.count(MIB // 2, is_planned=True) for _ in range(23)]
        assert any(found) is is_larger
        ended = shape.begin_step(is_first=False)
        assert shape.is_alike(ended, by_blocks=True) is not is_larger


def test_memory_that_moved_between_two_saves_is_one_block_of_a_trace():
    """Its second block is of a step that did not know yet that it would be saved again."""
    step = record(
        event("save", 1.0, number=0),
        event("save", 1.5, number=1),
        event("save", 2.0, number=2),
        event("use", 2.5, number=1),
        event("use", 3.0, number=0),
        event("free", 3.25, number=1),
        event("free", 3.5, number=0),
    )
    step.copies.add(1)
    trace = trace_of(step, LINKS, Costs(), "host")
    assert len(trace.blocks) == 2 and trace.compute_seconds == pytest.approx(4.0)
    assert [(each.kind, each.block) for each in trace.moments] == [
        *(("save", 0), ("save", 1)),
        *(("use", 0), ("free", 0)),
    ]
    assert step.used_bytes == 2 * MIB, "as in a step that knew it"


def test_a_step_with_the_planned_blocks_shows_how_much_is_saved_in_all():
    shape = StepShape(begins_as_known=False)
    shape.begin_plan(50 * MIB)
    shape.follow([MIB] * 10, 0)
    for _ in range(10):
        shape.count(MIB, is_planned=True)
    shape.count_saved(30 * MIB)
    ended = shape.begin_step(is_first=False)
    assert shape.is_alike(ended, by_blocks=True) and not shape.is_alike(ended, by_blocks=False)
    shape.note_alike(ended)
    assert shape.is_alike(ended, by_blocks=False)


def test_a_trace_has_the_options_that_another_step_was_asked_for():
    asked, other = (record(event("save", 1.0, number=0)) for _ in range(2))
    asked.groups = {0: "class"}
    asked.offers[0] = {"pack": Option(10, 1.0, 2.0)}
    (block,) = trace_of(other, LINKS, Costs(), "host", priced=asked).blocks
    assert block.options["pack"] == Option(10, 1.0, 2.0)


def test_what_the_hooks_take_is_no_computing_but_a_cost_of_the_options():
    step = record(
        event("save", 1.0, number=0),
        event("stall", 1.1, 0.5),
        event("pack hook", 0.9, 0.8),  # 0.3 s but for the wait in it
        event("use", 3.0, number=0),
        event("unpack hook", 2.9, 0.2),
    )
    assert step.hook_seconds("pack hook") == pytest.approx(0.3)
    assert step.computing_seconds == pytest.approx(4.0 - 0.5 - 0.3 - 0.2)
    costs = Costs(0.0, (0.1, 0.2), (0.3, 0.4))
    trace = trace_of(step, LINKS, costs, "disk")
    assert trace.compute_seconds == pytest.approx(step.computing_seconds)
    options = trace.blocks[0].options
    assert options["keep"] == Option(MIB, 0.1, 0.2)
    assert options["disk"] == Option(0, 0.3, 0.4, MIB)
    assert trace.left_alone() == [Option(MIB)]


def test_memory_that_was_given_back_to_measure_a_step_is_no_computing():
    step = record(event("save", 1.0, number=0), event("use", 3.0, number=0))
    step.fault_seconds = 0.5
    assert step.computing_seconds == pytest.approx(3.5)
    costs = typical_costs([(step, step)], LINKS)
    assert costs == Costs(), "where nothing moves no costs are known"
    step.events.append(event("write", 3.5, 0.1))
    costs = typical_costs([(step, step)], LINKS)
    assert (costs.fault_seconds, costs.computing_seconds) == pytest.approx((0.5, 3.5))
    trace = trace_of(step, LINKS, costs, "disk")
    assert trace.anew_seconds == pytest.approx(0.5)
    assert trace.compute_seconds == pytest.approx(3.5)


def test_of_several_pairs_of_steps_the_typical_costs_are_taken():
    def pair(all_seconds, half_seconds):
        full = record(event("write", 0.5, 0.1), event("read", 1.0, 0.1), ended=all_seconds)
        return full, record(event("write", 0.5, 0.1), ended=half_seconds)

    slow = Links(1e4, 1e4)  # else a byte could not cost as much
    each = [costs_of(*given, slow) for given in (pair(4.0, 3.9), pair(4.0, 3.7), pair(9.0, 3.6))]
    found = typical_costs([pair(4.0, 3.9), pair(4.0, 3.7), pair(9.0, 3.6)], slow)
    assert found.per_moved_byte == each[1].per_moved_byte == pytest.approx(0.3 / MIB)
    assert found.computing_seconds == pytest.approx(3.7 - 0.3)


def test_a_wait_before_a_hook_is_none_of_the_hooks():
    step = record(
        event("save", 0.5, number=0),
        event("stall", 1.0, 0.5),
        event("pack hook", 2.0, 0.25),
    )
    assert step.hook_seconds("pack hook") == pytest.approx(0.25)


def moving(*, seconds, nbytes, hook, blocks=2):
    saves = [event("save", 0.1, number=number) for number in range(blocks)]
    hooks = [event("pack hook", 0.1, hook / blocks)] * blocks
    return record(*saves, *hooks, event("write", 0.2, 0.1, nbytes=nbytes), ended=seconds)


def test_the_cost_of_a_block_is_found_from_two_steps_that_move_different_amounts():
    """All of it moves, and half of it: 3 s for each block that moves, and 1 s for one that stays."""
    full = moving(seconds=8.5, nbytes=2 * 10**9, hook=6.0)
    part = moving(seconds=6.0, nbytes=10**9, hook=4.0)
    costs = costs_of(full, part, LINKS)
    assert costs.moved == pytest.approx((3.0, 0.0))
    assert costs.kept == pytest.approx((1.0, 0.0))
    assert costs.per_moved_byte == pytest.approx(0.5e-9)
    assert costs.computing_seconds == pytest.approx(1.5)


def test_a_byte_costs_at_most_the_time_of_its_transfer():
    full = moving(seconds=90.0, nbytes=2 * 10**9, hook=0.0)
    part = moving(seconds=2.0, nbytes=10**9, hook=0.0)
    assert costs_of(full, part, LINKS).per_moved_byte == pytest.approx(1e-9)


def test_a_step_that_moves_more_in_less_time_gives_the_computing_time():
    """The other one shared the machine: the additional time is none of its own, and moving takes nothing."""
    full = moving(seconds=5.0, nbytes=2 * 10**9, hook=0.0)
    part = moving(seconds=7.0, nbytes=10**9, hook=0.0)
    for costs in (costs_of(full, part, LINKS), typical_costs([(full, part)], LINKS)):
        assert costs.per_moved_byte == 0
        assert costs.computing_seconds == pytest.approx(5.0)


def test_two_steps_that_move_alike_give_no_cost_of_a_byte_and_the_shorter_the_computing_time():
    full = moving(seconds=9.0, nbytes=10**9, hook=4.0)
    part = moving(seconds=6.0, nbytes=10**9, hook=2.0)
    costs = costs_of(full, part, LINKS)
    assert costs == Costs(0.0, (1.0, 0.0), (1.0, 0.0), 4.0)
    trace = trace_of(full, LINKS, costs, "disk")
    assert trace.compute_seconds == pytest.approx(4.0)


def test_where_nothing_moves_no_costs_are_known():
    full = moving(seconds=9.0, nbytes=0, hook=4.0)
    assert costs_of(full, full, LINKS) == Costs()


def test_extra_computing_compared_with_an_unmanaged_step_is_charged_to_its_blocks():
    """Each takes half of its part when it is saved, and half when it is used."""
    costs = Costs(kept=(0.5, 0.25), moved=(1.0, 0.75), computing_seconds=3.0)
    found = compared_with_unmanaged(costs, 2, 2.0)
    assert found == replace(costs, extra_each=0.5, computing_seconds=2.0, left_seconds=2.0)
    longer = compared_with_unmanaged(costs, 2, 4.0)
    assert longer == replace(costs, computing_seconds=4.0, left_seconds=4.0), "no plan is faster"
    assert compared_with_unmanaged(costs, 2, None) == costs
    nothing_moved = compared_with_unmanaged(Costs(), 2, 2.0)
    assert nothing_moved == Costs(computing_seconds=2.0, left_seconds=2.0)
    step = record(event("save", 1.0, number=0), event("save", 2.0, number=1))
    trace = trace_of(step, LINKS, found, "disk")
    assert trace.compute_seconds == pytest.approx(2.0)
    for block in trace.blocks:
        kept, moved = block.options["keep"], block.options["disk"]
        assert (kept.save_seconds, kept.use_seconds) == (0.75, 0.5)
        assert (moved.save_seconds, moved.use_seconds) == (1.25, 1.0)


def followed(*steps, budget=2000):
    """What came of steps under a plan: each with its sampled peak, what looks saw, and whether it was alike."""
    of = Corrections()
    of.follow(1000, 500, is_left=False)
    ended = []
    for peak, looked, is_alike in steps:
        step = record(event("save", 1.0, number=0), event("use", 3.0, number=0))
        step.measured.samples[:] = [(at / 10, peak, 0) for at in range(20)]
        ended.append(of.add(step, budget, looked, is_alike=is_alike))
    return of, ended


def test_a_peak_that_no_sample_saw_in_the_first_step_is_expected_of_the_next():
    """What the process never held before is reported once."""
    of, ended = followed((1500, 1600, True), (1000, 900, True), (1010, 900, True))
    assert of._figures == [(1100, 4.0)] * 2 and not any(ended)
    of, ended = followed((1500, 2100, True), (1500, 900, True))
    assert ended == [False, True] and of.measured == (2100, 4.0)
    of, _ = followed((1500, 1400, True), (1000, 900, True))
    assert of._figures == [(1000, 4.0)]
    of, _ = followed((1000, 1100, True), (1100, 900, True))
    assert of._figures == [(1100, 4.0)], "sampled now, it is not counted twice"


def test_what_a_look_saw_is_no_peak_of_later_steps_where_no_thread_samples():
    of = Corrections()
    of.follow(1000, 500, is_left=False)
    for looked in (150 * MIB, 0, 0):
        of.add(record(event("save", 1.0, number=0)), MIB << 10, looked, is_alike=True)
    assert of.measured == (100 * MIB, 4.0), "the one sample of each"


def test_a_step_of_another_shape_counts_where_it_exceeds():
    of, ended = followed((1000, 900, True), (1500, 900, False), (2001, 900, False))
    assert ended == [False, False, True] and of._figures == [(2001, 4.0)]


def corrected(of, peak, predicted, budget, saved, *, is_left=False, can_hold_less=True):
    of.follow(predicted, saved, is_left=is_left)
    of.exceed(peak, 1.0)
    return of.correct(budget, can_hold_less=can_hold_less)


def test_a_plan_is_made_again_until_the_peak_is_what_was_predicted():
    """Over: all of it at once; below: by three quarters, four times."""
    of = Corrections()
    assert corrected(of, 110, 100, 105, 100) and of.bias_bytes == 10
    assert of.measured == (110, 1.0)
    of.begin()
    assert of.measured is None
    found = []
    for _ in range(4):
        found.append(corrected(of, 1000, 1100, 2000, 1000))
    assert found == [False] * 4, "what was exceeded is never given back"
    spared = Corrections()
    for _ in range(5):
        found.append(corrected(spared, 1000, 1100, 2000, 1000))
    assert found[4:] == [True] * 4 + [False] and spared.bias_bytes == -300


def test_a_plan_that_can_hold_no_less_is_made_again_a_few_times_only():
    """Else steps were measured for ever, each exceeding by a little. The figures kept are a few, too."""
    of, found = Corrections(), []
    for _ in range(6):
        found.append(corrected(of, 110, 100, 105, 100, can_hold_less=False))
    assert found == [True] * 4 + [False] * 2 and of.bias_bytes == 40
    for peak in range(100):
        of.exceed(200 - peak, 1.0)
    assert of.measured[0] == 200 and len(of._figures) < 20


@pytest.mark.parametrize(
    ("peak", "saved", "is_made_again"),
    [
        *((985, 1000, False), (1015, 1000, False), (975, 1000, True), (1025, 1000, True)),
        *((985, 160, True), (995, 160, False)),
    ],
)
def test_a_peak_within_a_fiftieth_is_what_was_predicted(peak, saved, is_made_again):
    """Or within a sixteenth of what is saved, where that is less."""
    of = Corrections()
    assert corrected(of, peak, 1000, 2000, saved) is is_made_again


def test_what_is_left_in_place_is_planned_again_only_where_it_exceeds():
    of = Corrections()
    assert not corrected(of, 500, 1000, 2000, 1000, is_left=True)
    assert corrected(of, 2001, 1000, 2000, 1000, is_left=True)


def test_all_is_left_where_what_was_measured_has_room_for_it_until_that_exceeds():
    of = Corrections()
    assert not of.leave_all(0, 1000, 1000), "nothing was measured"
    of.exceed(900, 1.0)
    assert not of.leave_all(101, 1000, 1100)
    assert of.leave_all(100, 1000, 1100) and of.bias_bytes == -100
    assert corrected(of, 1051, 1000, 1050, 500, is_left=True) and of.bias_bytes == -49
    of.begin()
    of.exceed(900, 1.0)
    assert not of.leave_all(100, 1000, 1100), "it was tried"


def test_a_step_is_measured_again_after_three_that_are_off_and_then_more_rarely():
    of = Corrections()
    found = [of.is_off(1.2, 1.0) for _ in range(3)]
    assert found == [False, False, True]
    again = [of.is_off(1.2, 1.0) for _ in range(6)]
    assert again == [False] * 5 + [True]
    assert not any(of.is_off(1.05, 1.0) for _ in range(100))


def test_measured_again_steps_are_off_what_was_found_then():
    of = Corrections()
    of.exceed(100, 1.2)
    found = [of.time(StepFigures(0, 1.2)) or of.is_off(1.2, 1.0) for _ in range(3)]
    assert found == [True] * 3 and not of.time(StepFigures(0, 9.0))
    assert of.measured == (100, 1.2)
    assert [of.is_off(1.2, 1.0) for _ in range(3)] == [False, False, True]
    of.begin(again=True)
    of.exceed(100, 2.0)
    assert of.measured == (100, 2.0)
    assert [of.time(StepFigures(0, each)) for each in (1.2, 1.3, 1.2, 1.2)] == [
        True,
        True,
        True,
        False,
    ]
    assert of.measured == (100, 1.2), "by steps that are not measured block by block"
    assert not any(of.is_off(1.2, 1.0) for _ in range(50))
    found = [of.is_off(1.5, 1.0) for _ in range(3)]
    assert found == [False, False, True]


def test_steps_that_take_less_than_predicted_are_not_measured_again():
    """Their plan is no worse for it; one that takes longer than they did is off."""
    of = Corrections()
    of.exceed(100, 2.0)
    assert not any([of.time(StepFigures(0, 1.2)), of.is_off(1.2, 2.0)][1] for _ in range(50))
    assert [of.is_off(1.5, 2.0) for _ in range(3)] == [False, False, True]


def test_a_plan_is_timed_without_recording_its_steps():
    """The first of them still has transfers from before. Until two are alike, none counts."""
    of = Corrections()
    of.begin_timing()
    assert of.begins_timing and of.measured is None
    found = []
    for each in range(5):
        found.append(of.time(StepFigures(100 - each, 9.0 - each)))
        assert each > 2 or not any(of.is_off(2.0, 1.0) for _ in range(9)), "it is timed anyway"
    assert found == [False, True, True, True, False]
    assert of.is_timed and not of.begins_timing and of.measured == (99, 7.0)
    assert not any(of.unlike() for _ in range(50)), "they count from now on"
    of.begin_timing()
    assert [of.unlike() for _ in range(12)] == [False] * 11 + [True]
    of.begin()
    assert not of.begins_timing and not of.time(StepFigures(1, 1.0))
    assert not any(of.unlike() for _ in range(50))


def test_a_plan_that_was_timed_before_is_not_measured_again():
    of = Corrections()
    of.take_as_known(StepFigures(100, 2.0))
    assert of.is_timed and of.measured == (100, 2.0)
    assert not of.time(StepFigures(200, 9.0))
    assert not any(of.is_off(2.1, 3.0) for _ in range(20)), "compared with its own steps"
    assert [of.is_off(2.5, 3.0) for _ in range(3)] == [False, False, True]


def test_bytes_that_move_at_another_rate_than_they_did_are_planned_for():
    """Only where steps were measured again since their time was another one; a tenth is none."""
    of = Corrections()

    def links_now(links, *, again=True, nbytes=10**9):
        of.begin(again=again)
        of.add(moving(seconds=1.0, nbytes=nbytes, hook=0.1), MIB, is_alike=False)
        return of.as_now(Trace((), (), links), 0.0, runs_again=False).links

    assert links_now(LINKS, again=False) is LINKS
    now = links_now(LINKS)
    assert now.down_rate == pytest.approx(1e10) and now.up_rate == 1e9, "nothing was read"
    near = Links(now.down_rate * 1.08, now.up_rate * 0.95)
    assert links_now(near) is near
    assert links_now(LINKS, nbytes=0) is LINKS, "nothing moved"


def test_a_step_that_computes_for_another_time_than_it_did_is_planned_for():
    """Only by steps like the plan's that were measured again; without what moving takes of it."""
    of = Corrections()

    def now(computing, *, again=True, is_alike=True, per_byte=0.0, runs_again=False, steps=4):
        region = TracedRegion("m", (0,), 0.25, 1.0)
        moments = (Moment("save", 0, 2.0, MIB), Moment("use", 0, 1.0, MIB))
        trace = Trace((), moments, Links(1e10, 1e9), 1.0, regions=(region,))
        of.begin(again=again)
        for seconds in (99.0, computing, computing, 50.0)[:steps]:  # the first is of no account
            step = moving(seconds=seconds + 0.1, nbytes=10**9, hook=0.1)
            of.add(step, 200 * MIB, is_alike=is_alike)
        return trace, of.as_now(trace, per_byte, runs_again=runs_again)

    trace, found = now(2.0)
    assert [each.seconds for each in found.moments] == pytest.approx([1.0, 0.5])
    assert found.tail_seconds == pytest.approx(0.5) and found.regions == trace.regions
    assert found.compute_seconds == pytest.approx(2.0)
    # As before; not measured again; modules ran again, which is in it; one step alone.
    for given in ({}, {"again": False}, {"runs_again": True}, {"steps": 2}):
        trace, found = now(2.0 if given else 4.2, **given)
        assert found is trace, given
    trace, found = now(2.0, is_alike=False)
    assert found is trace
    _, found = now(3.0, per_byte=1e-9)
    assert found.compute_seconds == pytest.approx(2.0), "of 10**9 bytes"
    assert of.as_now(trace, 0.0, runs_again=False) is trace, "once"


def step_of(seconds):
    return record(event("save", 0.5, number=0), ended=seconds)


def test_three_steps_like_the_plans_are_enough_after_the_first():
    of = Corrections()
    assert [of.add(step_of(2.0), 200 * MIB, is_alike=True) for _ in range(4)] == [
        False,
        False,
        False,
        True,
    ]
    assert of.measured == (100 * MIB, 2.0)
    of.begin()
    found = [of.add(step_of(2.0), 200 * MIB, is_alike=False) for _ in range(12)]
    assert found == [False] * 11 + [True] and of.measured is None
    of.begin()
    found = [of.add(step_of(2.0), 90 * MIB, is_alike=True) for _ in range(2)]
    assert found == [False, True], "one that exceeds the budget is enough"
    of.begin()
    later = record(
        event("save", 0.3, number=0), event("use", 0.5, number=0), event("free", 1.9, number=0)
    )
    later.samples.append((1.0, 200 * MIB, 0))
    assert later.peak_bytes == 200 * MIB and later.graph_peak_bytes == 100 * MIB
    found = [
        of.add(later, 110 * MIB, is_alike=True) for _ in range(4)
    ]  # it was freed when the next step began
    assert found == [False] * 3 + [True] and of.measured[0] == 100 * MIB, (
        "no plan changes what came after"
    )


def test_the_bias_of_choices_that_were_measured_before_is_of_what_was_simulated():
    """What was measured of them says nothing of the others; but that they exceed now, another plan is for."""
    of = Corrections()
    assert corrected(of, 1110, 1000, 1050, 500) and of.bias_bytes == 110
    of.follow(980, 500, is_left=False, simulated_peak_bytes=960)
    of.exceed(1060, 1.0)
    assert of.correct(1050) and of.bias_bytes == 110, "100 are in it"
    of.follow(980, 500, is_left=False, simulated_peak_bytes=960)
    of.exceed(1080, 1.0)
    assert of.correct(1050) and of.bias_bytes == 120
    of.follow(980, 500, is_left=False, simulated_peak_bytes=960)
    of.exceed(985, 1.0)
    assert not of.correct(1050), "as predicted"


def test_an_excess_over_what_was_measured_before_counts_from_what_was_simulated():
    """Also within the budget: a plan whose steps were measured to hold 100 was simulated to hold 90."""
    of = Corrections()
    of.follow(100, 100, is_left=False, simulated_peak_bytes=90)
    of.exceed(110, 1.0)
    assert of.correct(200) and of.bias_bytes == 20


def test_windows_that_were_not_filled_are_not_credited_to_plans_without_them():
    of = Corrections()
    of.follow(1000, 500, is_left=False, window_bytes=300)
    of.exceed(720, 1.0)
    assert not of.correct(2000) and not of.bias_bytes
    of.follow(1000, 500, is_left=False, window_bytes=200)
    of.exceed(720, 1.0)
    assert of.correct(2000) and of.bias_bytes == -60, "three quarters of the rest"


def test_what_the_guard_kept_from_being_held_is_predicted_of_the_next_plan():
    of, peak = Corrections(), 300 * MIB
    of.follow(peak, peak, is_left=False)
    for avoided in (0, 9 * MIB, 0, 0):
        of.add(step_of(2.0), 310 * MIB, peak, avoided, is_alike=True)
    assert of.measured == (peak, 2.0)
    assert of.correct(310 * MIB) and of.bias_bytes == 9 * MIB
    of.follow(peak, peak, is_left=False)
    for _ in range(4):
        of.add(step_of(2.0), 310 * MIB, peak, is_alike=True)
    assert not of.correct(310 * MIB), "as predicted"


def test_looks_count_where_nothing_is_sampled():
    of = Corrections()
    of.follow(100, 100, is_left=False)
    for _ in range(4):
        of.add(step_of(2.0), 400 * MIB, 300 * MIB, is_alike=True)
    assert of.measured == (300 * MIB, 2.0)


def test_steps_that_are_timed_again_leave_the_plan_s_corrections():
    of = Corrections()
    of.begin()
    for seconds in (2.0, 2.0, 2.0):
        of.exceed(100, seconds)
    for number in range(5):
        of._wait_steps = 0
        assert [of.is_off(9.0, 2.0) for _ in range(3)] == [False, False, True], number
    found = []
    for _ in range(6):
        found.append(corrected(of, 1000, 1100, 2000, 1000))
        if len(found) == 5:
            of.begin_larger()
    assert found == [True] * 4 + [False, True]


def test_a_forward_that_ended_in_another_step_is_none_of_this_one():
    """As where a backward in the middle of it began the step that is recorded."""
    step = record(event("leave", 0.5, number=0), event("save", 1.0, number=0))
    assert seconds(trace_of(step, LINKS, Costs(), "disk")) == [1.0]


def test_a_replay_takes_what_its_operations_took_and_the_hooks_of_its_saves():
    def of(graph):
        step = record(
            event("enter", 0.5, nbytes=0, number=0),
            event("save", 1.0, number=0),
            event("save", 1.25, number=1),
            event("leave", 1.5, nbytes=0, number=0),
            event("use", 3.0, number=0),
            event("write", 3.5, 0.1, nbytes=0),
        )
        forward = Forward("blocks.*", 0, can_run_again=True, graph=graph)
        forward.add(0, 0, MIB, is_new=True)
        forward.add(1, 1, MIB, is_new=True)
        step.forwards.append(forward)
        (region,) = trace_of(step, LINKS, Costs(kept=(0.0, 0.125)), "disk").regions
        return region

    assert of(None).use_seconds == pytest.approx(1.0 + 2 * 0.125), "as forward"
    timed = of(CallGraph((CallOperation(0.5, (), (0,)), CallOperation(0.25, (0,), (1,))), ()))
    assert timed.use_seconds == pytest.approx(0.75 + 2 * 0.125), "less than forward"
    assert timed.save_seconds == 0.0
