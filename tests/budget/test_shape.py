"""By what a step saves, and has saved so far, it is known whether it is larger than the planned one."""

from backstash._budget.shape import StepShape
from counted_memory import MIB


def planned(blocks=10):
    """A step of so many blocks of 1 MiB is the planned one, and no other save is known."""
    shape = StepShape(begins_as_known=False)
    shape.begin_plan(blocks * MIB)
    shape.follow([MIB] * blocks, 0)
    return shape


def step(shape, mib):
    """One that saves so many blocks of 1 MiB. Return what is known of it once it has ended."""
    for _ in range(mib):
        shape.count(MIB, is_planned=True)
        shape.count_saved(MIB)
    return shape.begin_step(is_first=False)


def test_blocks_that_a_plan_would_leave_unmanaged_make_no_step_a_larger_one():
    for manages_more in (False, True):
        shape = planned()
        shape.manages_more = manages_more
        found = [shape.count(MIB, is_planned=True) for _ in range(13)]
        assert any(found) is not manages_more


def test_a_step_is_larger_if_it_saves_an_eighth_more_than_any_before_that_was_not():
    shape = planned()
    shape.count_saved(11 * MIB)
    assert shape.asked_more() is None
    shape.count_saved(MIB)
    assert shape.asked_more() == (12 * MIB, 10 * MIB)
    shape.begin_larger()
    assert shape.begin_step(is_first=False).was_larger
    shape.count_saved(12 * MIB)
    assert shape.asked_more() == (12 * MIB, 10 * MIB), "the larger one is not planned for yet"
    shape.begin_step(is_first=False)
    shape.count_saved(12 * MIB)
    assert shape.asked_more() is None


def awaited(shape):
    """How many steps are measured after one was found to be larger in its middle, if none is as large."""
    shape.count(MIB, is_planned=True)
    shape.count(MIB, is_planned=True)
    shape.begin_larger()
    for number in range(100):
        if not shape.expects_larger:
            return number
        shape.begin_step(is_first=False)
        shape.await_next()
    return None


def test_a_larger_step_is_awaited_for_twice_as_many_steps_each_time():
    """And once it did not come, whether a step is larger is looked at more often."""
    shape, found = planned(), []
    for _ in range(4):
        assert shape.bytes_to_next_look(MIB) == (10 * MIB // 16 if found else MIB)
        found.append(awaited(shape))
    assert found == [5, 9, 17, 17]


def late(shape, mib):
    """A step that saves so much, and whether it is found to be larger after its first block."""
    for _ in range(mib):
        shape.count_saved(MIB)
        more = shape.count(MIB, is_planned=True)
        if not shape.is_larger and (more or shape.asked_more()):
            shape.begin_larger()
    is_late = shape.is_larger and shape.expects_larger
    shape.begin_step(is_first=False)
    return is_late


def test_a_larger_step_is_awaited_in_vain_twice_and_then_follows_the_plan():
    shape, measured = planned(), 0
    for number in range(200):
        is_large = number % 20 == 0
        is_awaited = shape.expects_larger
        if not late(shape, 15 if is_large else 10) and is_awaited:
            shape.await_next()
            measured += 1
    assert measured == 5 + 9
    assert late(shape, 20), "a still larger one is expected again"


def test_another_larger_step_is_expected_until_a_plan_is_made():
    shape = planned()
    step(shape, 2)
    shape.ended_larger()
    shape.await_another()
    assert shape.expects_larger
    shape.stop_waiting()
    shape.await_another()
    assert not shape.expects_larger


def test_steps_are_steady_after_sixteen_that_saved_the_same():
    shape = planned()
    for _ in range(16):
        step(shape, 10)
        assert not shape.is_steady
    step(shape, 10)
    assert shape.is_steady
    step(shape, 9)
    assert not shape.is_steady


def test_what_is_not_seen_of_a_step_is_taken_to_be_as_much_as_in_the_planned_one():
    shape = planned()
    shape.take_rest_as_known()
    ended = step(shape, 2)
    assert not ended.was_seen and ended.asked_bytes == 10 * MIB
    ended = step(shape, 2)
    assert ended.was_seen and ended.asked_bytes == 2 * MIB
