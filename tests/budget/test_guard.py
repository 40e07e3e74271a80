"""When memory is compared with a budget, and when free memory is returned to the system. All sizes in MiB."""

from types import SimpleNamespace

import pytest

from backstash._budget.guard import MemoryGuard
from counted_memory import MIB

MOST, BUDGET = 98, 100


class Scripted:
    """A meter whose readings a test sets, in MiB."""

    held = 0
    ever = 0
    """The most that the process ever held."""
    _reported = _highest = 0

    def now(self):
        return self.held * MIB

    def sample(self, held):
        self._highest = max(self._highest, held)

    def take_highest(self):
        highest, self._highest = self._highest, 0
        return highest * MIB

    def raised_peak_bytes(self):
        if self.ever <= self._reported:
            return 0
        self._reported = self.ever
        return self.ever * MIB

    def ever_peak_bytes(self):
        return self.ever * MIB


class Process:
    """A guard of a process with a clock of its own; returning memory takes ``trim_seconds``."""

    def __init__(self, **options):
        self.meter, self.given_back = Scripted(), []
        self.seconds = self.trim_seconds = 0.0
        self.frees = 0
        self.guard = MemoryGuard(self.meter, MOST * MIB, BUDGET * MIB, self._trim, **options)

    def _trim(self):
        self.given_back.append(self.meter.held)
        self.meter.held -= self.frees
        self.seconds += self.trim_seconds

    def rest(self):
        """Wait until memory may be returned again."""
        self.seconds += 1000.0

    def hold(self, held):
        self.meter.held = held
        return self

    def use(self, *levels, mib=2):
        """Use blocks in backward, each while so much is held. Return at which levels memory was returned."""
        self.given_back.clear()
        for self.meter.held in levels:
            self.guard.note_used(int(mib * MIB))
        return list(self.given_back)

    def backward(self, *levels, mib=2):
        self.guard.begin_step()
        self.rest()
        return self.use(*levels, mib=mib)

    def grow(self, mib, *, sampled=0):
        """A backward that grew by so much between two readings, and by ``sampled`` in a sample."""
        self.guard.begin_step()
        self.use(20)
        self.meter.sample(20 + max(mib, sampled))
        self.use(20 + mib)
        self.guard.take_highest()

    def step(self, at_start, *levels, always=False):
        """Whether a step gave memory back as it began, and later."""
        self.given_back.clear()
        self.rest()
        must_free = self.hold(at_start).guard.must_free_at_start(always=always)
        self.guard.begin_step()
        for self.meter.held in levels:
            self.guard.over()
        self.guard.take_highest()
        return must_free, bool(self.given_back)


@pytest.fixture
def process(monkeypatch):
    made = Process()
    clock = SimpleNamespace(perf_counter=lambda: made.seconds)
    monkeypatch.setattr("backstash._budget.guard.time", clock)
    return made


@pytest.fixture
def planned(process):
    """Under a plan whose steps add 30, to 95 at most."""
    process.guard.plan_for(30 * MIB, 95 * MIB)
    return process


def test_giving_back_takes_a_twentieth_of_the_time_at_most(planned):
    guard, planned.trim_seconds = planned.guard, 1.0
    assert guard.release()
    planned.seconds += 19.0
    assert not guard.release()
    planned.seconds += 2.0
    assert guard.release()
    assert not planned.hold(75).guard.must_free_at_start(always=False) and guard.keeps_free
    assert guard.release(), "a step that began with free memory returns it as soon as it must"
    assert not guard.release()


def test_an_exceeded_budget_waits_for_nothing_if_memory_can_be_given_back(process):
    process.trim_seconds = 1.0

    def returns(held, *, frees, waits):
        process.frees = frees
        if not waits:
            process.rest()
        return process.hold(held).guard.release()

    assert returns(90, frees=20, waits=False)
    assert not returns(99, frees=20, waits=True), "the budget is kept"
    assert returns(101, frees=20, waits=True)
    assert returns(101, frees=1, waits=True), "the last one returned much"
    assert not returns(101, frees=20, waits=True), "this one did not"


def test_free_memory_is_returned_before_less_is_kept_or_read_ahead(process):
    guard, process.frees = process.guard, 9
    guard.begin_step()
    assert guard.over() == 0 and not process.given_back
    process.rest()
    assert process.hold(105).guard.over() == 0 and process.given_back == [105]
    process.rest()
    assert process.hold(108).guard.over() == MIB and process.given_back[1:] == [108]
    process.rest()
    assert process.hold(98).guard.has_room(9 * MIB) and process.given_back[2:] == [98]
    process.rest()
    assert not process.hold(98).guard.has_room(10 * MIB)
    assert process.hold(90).guard.has_room(8 * MIB) and len(process.given_back) == 4


def test_what_backward_frees_is_given_back_before_what_comes_next_could_exceed(process):
    """An allocator keeps it for the process; the largest growth between two looks may come again."""
    process.frees = 52

    def backward(*levels):
        process.guard.over()  # of the forward
        return process.backward(*levels, mib=1)

    assert backward(50, 58, 66, 92) == [92], "26 at most come at once"
    assert backward(50, 58, 60, 62, 74, 74) == [], "100 are not exceeded, though 98 are"
    assert backward(50, 58, 60, 62, 75) == [75]
    assert backward(75, 75) == [], "it has used too little to have freed much"
    assert backward(30) == []
    process.hold(70).guard.over()
    assert process.use(70, 70, 70, 70, mib=1) == [], (
        "what a forward takes is no growth of a backward's"
    )
    process.use(70, mib=0.5)
    assert process.use(99, mib=0.25) == [], "it is not looked at each of many small ones"


def test_what_an_operation_takes_until_it_ends_counts_before_there_is_a_plan(process):
    """No look finds it. What a plan was made from has it, so that steps under one rely on that."""

    def backward(*levels):
        """Each a look, and what is sampled before the next one."""
        process.guard.begin_step()
        process.rest()
        given_back = []
        for level, until in levels:
            given_back += process.use(level)
            process.meter.sample(until)
        return given_back

    assert backward((50, 90), (52, 52), (54, 54)) == []
    assert backward((50, 52), (56, 56), (60, 60)) == []
    assert backward((50, 52), (61, 61)) == [61], "40 were sampled beyond 50"
    process.guard.plan_for(30 * MIB, MOST * MIB)
    assert backward((50, 52), (61, 61)) == []
    process.guard.keeps_free = True
    assert backward((50, 52), (61, 61)) == [61], "what is free was not given back before this step"


def test_what_a_step_would_have_held_without_its_guard_is_known_as_the_next_one_begins(process):
    """As each excess is moved away, the next one is counted from there; the last one is in the peak."""
    for levels, avoided in (((90, 98), 0), ((101,), 0), ((101, 99, 106, 110), 8), ((90,), 0)):
        process.guard.begin_step()
        for process.meter.held in levels:
            if over := process.guard.over():
                process.guard.note_lowered(over)
        process.guard.begin_step()
        assert process.guard.avoided_bytes == avoided * MIB, levels
    for resident, avoided in ((64, 12), (3, 6), (0, 0)):
        process.guard.begin_step()
        for process.meter.held in (104, 110, 120):
            if over := process.guard.over():
                process.guard.note_lowered(min(over, resident * MIB))
        process.guard.begin_step()
        assert process.guard.avoided_bytes == avoided * MIB, "no more than was in place"


def test_where_the_process_never_held_as_much_a_look_sees_what_an_operation_took(process):
    guard, meter = process.guard, process.meter
    guard.begin_step()
    for meter.ever in (60, 90, 90):
        assert process.use(50) == []
    assert guard.take_highest() == 90 * MIB
    assert process.use(61) == [61], "40 more than 50 came at once"
    assert guard.take_highest() == 61 * MIB, "it is reported once"
    guard.begin_step()
    process.use(61, mib=0.5)
    meter.ever = 95
    process.use(61, mib=0.25)
    assert guard.take_highest() == 95 * MIB, "it may be the last use of the step"


def test_a_check_ahead_of_need_hides_nothing_from_the_check_in_backward(process):
    process.guard.begin_step()
    process.use(50)
    process.meter.ever = 90
    assert process.guard.has_room(MIB)
    assert process.use(50, 61) == [61]


@pytest.mark.parametrize(("held", "is_kept"), [(93, False), (92, True)])
def test_a_step_begins_with_what_is_free_only_where_one_operation_more_keeps_the_budget(
    planned, held, is_kept
):
    """What came between two looks may come between any two."""
    planned.grow(0, sampled=8)
    assert planned.hold(held).guard.must_free_at_start(always=False) != is_kept
    assert planned.guard.keeps_free == is_kept
    assert planned.guard.kept_free_bytes == (held - 70) * MIB * is_kept


def test_a_step_begins_with_what_is_free_unless_one_that_did_exceeded_the_budget(planned):
    guard, run = planned.guard, planned.step
    assert run(65, 95) == (False, False) and not guard.keeps_free, "all that it may add fits"
    assert guard.kept_free_bytes == 0
    assert run(75, 95, always=True) == (True, False)
    assert run(99, 95) == (True, False), "it would hold too much at once"
    assert run(75, 95) == (False, False) and guard.keeps_free
    assert run(75, 99) == (False, True), "it had to give memory back"
    assert run(75, 95) == (False, False)
    assert run(75, 101) == (False, True)
    assert run(75, 95) == (True, False), "none begins so from now on"
    guard.plan_for(28 * MIB, 95 * MIB)
    assert run(75, 95) == (True, False), "and under no other plan"


def test_a_step_gives_memory_back_where_the_growth_between_two_looks_could_exceed(planned):
    planned.grow(10)
    assert planned.step(75, 90) == (False, False)
    assert planned.step(75, 91) == (False, True)


def test_growth_where_blocks_moved_does_not_count_where_all_stays(planned):
    guard = planned.guard
    planned.grow(30, sampled=30)
    guard.plan_for(30 * MIB, 95 * MIB)
    assert planned.step(75, 95) == (True, False), "with 30 more it would exceed 100"
    guard.plan_for(30 * MIB, 95 * MIB, is_left=True)
    assert planned.backward(70, 71, mib=4) == [71], "in steps that give back what is free"
    assert planned.step(75, 95) == (False, False)
    assert planned.use(93, mib=4) == []
    assert planned.backward(60, 66, 95) == [95], "6 more than 95 would exceed"


def test_backward_gives_back_at_once_what_no_plan_holds(planned):
    """Else only after it has used a part of the budget, since the next forward takes it again."""
    planned.grow(10)
    assert planned.backward(94) == [], "as much as the plan holds"
    assert planned.backward(96) == [96]


def test_less_is_left_unseen_where_peaks_differ_from_step_to_step(planned):
    """As of a heap that grows although no more is in use."""

    def may_be_unseen(*peaks):
        for peak in peaks:
            planned.guard.note_peak(peak * MIB)
        return planned.hold(40).guard.part_of_what_is_left(4, 1) > 0

    assert may_be_unseen(60, 70, 80)
    assert not may_be_unseen(81), "the next one may hold 102"
    assert may_be_unseen(81, 81, 81, 81)
    assert may_be_unseen(*(40, 81) * 4), "steps of two sizes that take turns do not grow"
    planned.grow(20)
    assert not may_be_unseen(), "so may it by what one operation adds"


def test_steady_steps_go_unseen_only_if_their_peaks_are_steady_too(planned):
    planned.meter.ever = 92
    guard = planned.hold(40).guard

    def fits(*peaks):
        for peak in peaks:
            guard.note_peak(peak * MIB)
        guard.begin_step()
        found = []
        for _ in range(2):
            found.append(guard.fits_unseen(30 * MIB, 92 * MIB, is_known=True, is_steady=True))
            guard.begin_step()
        return found[-1]

    assert not fits(90, 90, 90), "too few are known"
    assert fits(90)
    assert not fits(82), "the next one may hold 100"
    assert fits(90, 90, 90, 90)


def test_an_accelerator_s_allocator_uses_again_what_is_freed(process):
    """So no step begins with what is free, and none needs more looks for what one operation adds."""
    device = Process(is_process=False)
    device.guard.plan_for(30 * MIB, MOST * MIB)
    assert device.hold(75).guard.must_free_at_start(always=False)
    for peak in (40, 81):
        device.guard.note_peak(peak * MIB)
    device.grow(20)
    assert device.hold(40).guard.part_of_what_is_left(4, 1) > 0


def test_memory_held_as_three_steps_in_a_row_begin_belongs_to_them(process):
    late = [process.hold(held).guard.late_bytes() for held in (101, 101, 100, 101, 101, 102, 101)]
    assert late == [0, 0, 0, 0, 0, 102 * MIB, 0]


@pytest.mark.parametrize(("held", "parts"), [(50, (12, 6)), (97, (1, 0.5)), (99, (-1, -1))])
def test_what_is_left_of_a_budget_is_handed_out_in_parts_to_one_thread_or_two(process, held, parts):
    """What plans do not use of it, too, where it is little: the memory is not read at each small block."""
    guard = process.hold(held).guard
    found = [guard.part_of_what_is_left(4, threads) for threads in (1, 2)]
    assert found == [each * MIB if each > 0 else -1 for each in parts]


def test_a_step_that_is_not_known_goes_unseen_if_twice_as_much_fits(process):
    """Never the first one, of which it is not known from where the highest one grew."""
    guard, process.meter.ever = process.hold(10).guard, 40
    for is_known, saved, fits in ((True, 0, False), (False, 0, True), (False, 60, False)):
        found = guard.fits_unseen(saved * MIB, 20 * MIB, is_known=is_known, is_steady=False)
        assert found is fits, "it is expected to hold 40, and 30 or what it saves more"
        guard.begin_step()


def test_a_step_begins_with_no_peak_and_no_limit_of_the_one_before(process):
    guard, process.meter.ever = process.guard, 150  # between the two
    guard.raise_to(200 * MIB)
    guard.begin_step()
    assert process.hold(50).guard.left_bytes == (MOST - 50) * MIB
    process.use(50)
    assert guard.take_highest() == 50 * MIB
