"""What is measured of a step on an accelerator: its own time, and memory between two events of its host."""

import time

import pytest
import torch

from backstash import Stash
from backstash._budget.device_meter import DeviceMeter
from backstash._budget.record import Costs, StepRecord, trace_of
from backstash._budget.solving import Solving
from backstash._device.base import MemoryFigures
from backstash._plan.simulate import Windows, simulate
from backstash._plan.trace import Links, Moment, Option, Trace, TracedBlock
from backstash.plan import Plan, usable_bytes
from backstash.testing import TwinDevice, stash_on

MIB = 1 << 20


class Scripted(TwinDevice):
    """Its clock and its allocator are a test's."""

    seconds = 0.0
    passed = True

    def time_mark(self):
        return self.seconds

    def has_passed(self, mark):
        return self.passed

    def holds(self, held, *, peak=None, ever=None, allocations=None):
        """In MiB; ``ever``: what was asked for since the last call, where some of it is gone again."""
        before = self.figures
        grown = max(0, held * MIB - before.held_bytes) if ever is None else ever * MIB
        highest = max(before.peak_bytes, held * MIB if peak is None else peak * MIB)
        count = before.allocations + (bool(grown) if allocations is None else allocations)
        self.figures = MemoryFigures(held * MIB, highest, before.ever_bytes + grown, count)


@pytest.fixture
def device():
    made = Scripted()
    made.ours = 0
    return made


@pytest.fixture
def meter(device):
    made = DeviceMeter(device, lambda: device.ours * MIB)
    device.holds(100)
    made.begin_step()
    made.forget()
    yield made
    made.stop()


def note(meter, device, kind, block, *, at, held, ours, **figures):
    device.seconds = at
    device.holds(held, **figures)
    device.ours = ours
    meter.note((kind, time.perf_counter(), 0.0, MIB, block, "", "", 0, 0, 0, 0, 0, 0))


def end(meter, device, *, at):
    device.seconds = at
    meter.begin_step()
    return meter.take()


def moments(measured):
    record = StepRecord(measured, dict.fromkeys(range(9), "class"))
    return trace_of(record, Links(1e9, 1e9), Costs(), "host", runs_ahead=True).moments


def test_seconds_are_the_devices(meter, device):
    note(meter, device, "save", 0, at=1.0, held=101, ours=1)
    note(meter, device, "use", 0, at=3.0, held=101, ours=1)
    note(meter, device, "free", 0, at=3.5, held=100, ours=0)
    measured = end(meter, device, at=4.0)
    assert (measured.began, measured.ended) == (0.0, 4.0)
    assert [each.seconds for each in moments(measured)] == pytest.approx([1.0, 2.0, 0.5])


def test_waits_of_the_device_are_no_computing(meter, device):
    """Also one that is reported between a use and the free of its block, as a load on demand is."""
    meter.start()
    note(meter, device, "save", 0, at=1.0, held=101, ours=1)
    note(meter, device, "use", 0, at=2.0, held=101, ours=1)
    device.on_time("read", 2.0, 2.4, MIB)
    device.on_time("stall", 2.0, 2.5, 0)
    note(meter, device, "free", 0, at=3.0, held=100, ours=0)
    measured = end(meter, device, at=4.0)
    assert [each.seconds for each in moments(measured)] == pytest.approx([1.0, 1.0, 0.5])
    assert [event[:4] for event in measured.events if event[0] == "read"] == [
        ("read", 2.0, pytest.approx(0.4), MIB)
    ]


def test_what_is_paused_counts_none_of_the_steps_seconds(meter, device):
    meter.start()
    note(meter, device, "save", 0, at=1.0, held=101, ours=1)
    paused = meter.pause()
    assert device.on_time is None, "a copy of what is tried is none of the step's"
    device.seconds = 1.75
    meter.resume(paused)
    note(meter, device, "save", 1, at=2.0, held=102, ours=2)
    assert [each.seconds for each in moments(end(meter, device, at=2.0))] == pytest.approx(
        [1.0, 0.25]
    )


def test_a_device_that_waits_for_the_host_computes_nothing(meter, device):
    """In a hook, of which the look at the memory is only of a measured step; and in the look at a free."""

    class Slow(type(device)):
        def memory(self):
            self.seconds += 0.125
            return super().memory()

    meter.start()
    device.seconds = 0.25
    began = meter.hook_begins()
    device.__class__ = Slow
    note(meter, device, "save", 0, at=1.0, held=101, ours=1)
    device.seconds = 1.5
    meter.hook_took("pack hook", began)
    note(meter, device, "use", 0, at=2.5, held=101, ours=1)
    note(meter, device, "free", 0, at=3.0, held=100, ours=0)
    device.__class__ = Scripted
    measured = end(meter, device, at=4.0)
    assert measured.looking_seconds == pytest.approx(3 * 0.125)
    step = StepRecord(measured, {0: "class"})
    assert step.hook_seconds("pack hook") == pytest.approx(1.25 - 0.125)
    assert step.unmeasured_seconds == pytest.approx(4.0 - 3 * 0.125)
    assert step.computing_seconds == pytest.approx(4.0 - 1.25 - 2 * 0.125)


def test_the_hook_that_begins_a_step_takes_nothing_from_later_operations(meter, device):
    """It takes the record of the step before, while the device has nothing to do."""
    meter.start()
    began = meter.hook_begins()
    note(meter, device, "save", 0, at=10.0, held=101, ours=1)
    meter.hook_took("pack hook", began)
    note(meter, device, "use", 0, at=11.0, held=101, ours=1)
    note(meter, device, "free", 0, at=13.0, held=100, ours=0)
    measured = end(meter, device, at=13.0)
    assert [each.seconds for each in moments(measured)] == pytest.approx([0.0, 1.0, 2.0])
    assert StepRecord(measured, {0: "class"}).hook_seconds("pack hook") == 0.0


def test_a_hook_that_began_before_measuring_started_is_not_recorded(meter, device):
    began = meter.hook_begins()
    meter.start()
    meter.hook_took("pack hook", began)
    assert end(meter, device, at=1.0).events == []


def test_a_saved_tensor_was_its_operations_until_it_is_saved(meter, device):
    note(meter, device, "save", 0, at=1, held=110, ours=10)
    note(meter, device, "save", 1, at=2, held=120, ours=20)
    found = moments(end(meter, device, at=3))
    assert [each.other_bytes // MIB for each in found] == [110, 110]


def test_what_few_allocations_could_have_held_between_two_events_counts(meter, device):
    """An operation's workspace of 30 MiB, gone again when its result is saved."""
    note(meter, device, "save", 0, at=1, held=101, ours=1, peak=200)
    note(meter, device, "save", 1, at=2, held=102, ours=2, ever=31, allocations=2)
    found = moments(end(meter, device, at=3))
    assert found[1].other_bytes == (101 + 31 - 1) * MIB


def test_it_never_held_more_than_the_allocator_has_seen(meter, device):
    note(meter, device, "save", 0, at=1, held=101, ours=1, peak=120)
    note(meter, device, "save", 1, at=2, held=102, ours=2, ever=90, allocations=3)
    assert moments(end(meter, device, at=3))[1].other_bytes == (120 - 1) * MIB


def test_of_many_allocations_only_what_was_seen_counts(meter, device):
    note(meter, device, "save", 0, at=1, held=101, ours=1, peak=900)
    device.holds(150)
    meter.mark()
    note(meter, device, "save", 1, at=2, held=102, ours=2, ever=500, allocations=50)
    assert moments(end(meter, device, at=3))[1].other_bytes == (150 - 1) * MIB


def test_a_new_peak_is_known_whatever_was_seen(meter, device):
    note(meter, device, "use", 0, at=1, held=101, ours=1)
    note(meter, device, "use", 1, at=2, held=102, ours=2, peak=400, ever=900, allocations=50)
    measured = end(meter, device, at=3)
    assert max(held - ours for _, held, ours in measured.samples) == (400 - 2) * MIB
    assert measured.known_peak_bytes == 400 * MIB
    device.holds(160)
    meter.now()
    device.holds(100)
    assert end(meter, device, at=4).known_peak_bytes == 160 * MIB, "that of an earlier step"


def test_a_program_that_resets_the_peak_at_each_step_takes_none_of_it_away(meter, device):
    device.figures = MemoryFigures(100 * MIB, 100 * MIB, 0, 0)  # reset before the step
    note(meter, device, "use", 0, at=1, held=101, ours=1, peak=180, ever=900, allocations=50)
    device.figures = MemoryFigures(100 * MIB, 100 * MIB, 0, 0)  # and after it
    assert end(meter, device, at=2).known_peak_bytes == 180 * MIB


def test_the_time_reported_is_that_of_the_last_step_the_device_has_finished(meter, device):
    device.seconds = 2.0
    assert meter.begin_step() == 2.0
    device.seconds, device.passed = 5.0, False
    assert meter.begin_step() < 1.0, "the host's own time, where it is ahead"
    device.passed = True
    device.seconds = 9.0
    assert meter.begin_step() == 4.0


def test_a_host_several_steps_ahead_is_not_taken_for_the_device(meter, device):
    for device.seconds in (2.0, 5.0, 6.0, 7.0):
        meter.begin_step()
    device.has_passed = lambda mark: mark <= 5.0
    device.seconds = 8.0
    assert meter.begin_step() == 3.0, "the step from 2 to 5"


def block(options=("keep", "host"), nbytes=MIB):
    known = {"keep": Option(nbytes), "host": Option(0, moved_bytes=nbytes)}
    return TracedBlock("class", nbytes, {name: known[name] for name in options})


def chain(count, *, runs_ahead, seconds=1.0):
    saves = [Moment("save", at, seconds, 0) for at in range(count)]
    uses = [
        Moment(kind, at, seconds, 0) for at in reversed(range(count)) for kind in ("use", "free")
    ]
    links = Links(100 * MIB, 100 * MIB)  # a copy takes 10 ms, and computing a second
    return Trace((block(),) * count, (*saves, *uses), links, runs_ahead=runs_ahead)


def test_a_host_that_runs_ahead_sees_no_copy_end():
    windows = Windows(2 * MIB, MIB)
    for runs_ahead, peak in ((False, MIB), (True, 3 * MIB)):
        trace = chain(6, runs_ahead=runs_ahead)
        moved = [each.options["host"] for each in trace.blocks]
        forecast = simulate(trace, moved, windows)
        # Two are in the window when backward begins, used from there and held; one at a time is read.
        assert forecast.peak_bytes == peak
        assert forecast.resident_peak_bytes == 0


def test_old_traces_are_of_no_device_that_runs_ahead():
    trace = chain(2, runs_ahead=True)
    assert Trace.from_dict(trace.as_dict()) == trace
    old = trace.as_dict()
    del old["runs_ahead"]
    assert not Trace.from_dict(old).runs_ahead


def step(stash, seed=0):
    x = torch.randn(512, 512, generator=torch.Generator().manual_seed(seed), requires_grad=True)
    y = x * 2
    with stash:
        for _ in range(24):
            y = y.erf()
        loss = y.sum()
    loss.backward()
    return x.grad


def planned_on(device, **options):
    stash = stash_on(device, host=64 * MIB, min_bytes=0, recompute=False, **options)
    tiers, device.peak_bytes = stash._session.device_tiers[1], 0

    def memory():  # of the tensors that the stash holds, over 100 MiB of others
        held = tiers.evictor.resident.nbytes + tiers.evictor.inflight.nbytes
        held += tiers.prefetcher.ahead.nbytes + 100 * MIB
        device.peak_bytes = max(device.peak_bytes, held)
        return MemoryFigures(held, device.peak_bytes, 0, 0)

    device.memory = memory
    return stash


def test_an_accelerator_that_is_planned_for_leaves_the_cpu_without_a_plan():
    device = TwinDevice(chance=0.5, seed=3)
    stash = planned_on(device, budget=116 * MIB)
    assert list(stash._session.planners) == [1], "the CPU's tensors are held as keep='auto' says"
    true = step(Stash())
    for _ in range(12):
        assert torch.equal(step(stash), true)
        _ = stash.plan
    plan = stash.plan
    assert plan.device == "twin" and plan.state == "planned", str(plan)
    assert {name for each in plan.classes for name, _ in each.choices} == {"keep", "host"}
    assert str(plan).startswith("plan within 116 MiB of twin")
    device.peak_bytes = 0
    step(stash)
    assert 100 * MIB < device.peak_bytes <= 116 * MIB
    stash.close()


def test_auto_is_what_the_device_holds_and_can_spare():
    device = TwinDevice(free=900 * MIB)
    device.figures = MemoryFigures(100 * MIB, 100 * MIB, 0, 0)
    assert stash_on(device, budget="auto").plan.budget_bytes == 1000 * MIB * 19 // 20


def test_a_plan_is_followed_on_the_kind_of_device_that_it_was_made_for(tmp_path):
    for device, planners in (("cpu", [0]), ("twin", [1])):
        path = tmp_path / f"{device}.json"
        Plan(200 * MIB, "planned", device=device).save(path)
        assert Plan.load(path).device == device
        stash = stash_on(TwinDevice(), plan=path)
        assert list(stash._session.planners) == planners, device


def test_a_device_first_used_in_the_middle_of_a_step_begins_a_step():
    stash = stash_on(TwinDevice(), budget="1GiB")
    planner = stash._session.planners[1]
    stash._session._followed = stash._session.predictor.passes = 1  # a step of another device's
    stash._session.predictor.add = lambda block, separate=None: None
    assert not planner._steps
    with stash:
        torch.ones(512, 512, requires_grad=True).exp().sum()
    assert planner._steps == 1
    stash.close()


def test_what_a_plan_moves_leaves_at_once_and_what_it_keeps_stays():
    stash = stash_on(TwinDevice(), budget="1GiB", host="1GiB")
    resident = stash._session.device_tiers[1].evictor.resident
    step(stash)
    resident.set_limit(10 * MIB)
    assert resident.most(MIB, 0) == 10 * MIB, "none leaves early"
    assert resident.wants_room(0), "what was copied is freed although there is space"
    resident.is_planned = False
    assert resident.most(MIB, 0) == 0 and not resident.wants_room(0)
    stash.close()


def test_a_step_begins_before_its_first_module_that_may_run_again_is_counted():
    """On the module's own device; else the second forward would be taken for the first."""
    stash = stash_on(TwinDevice(), budget="1GiB", host="64MiB", min_bytes=0)
    layers = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(3)))
    x = torch.ones(4, 8) * 2  # no leaf: it is a block, which begins a step where none has begun
    with stash.recompute(*layers), stash:
        y = layers(x.requires_grad_() * 2)
        counts = stash._session.planners[1].regions._counts
        assert list(counts.values()) == [3]
    y.sum().backward()
    stash.close()


def test_a_plan_may_take_more_of_the_margin_where_no_plan_changes_the_peak(monkeypatch):
    """As an optimizer's, which an allocator counts exactly: a plan that only keeps below it fits."""
    options = {"keep": Option(MIB), "host": Option(0, moved_bytes=MIB)}
    moments = [Moment(kind, 0, 1.0, MIB) for kind in ("save", "use", "free")]

    def trace(other):
        blocks = (TracedBlock("class", MIB, options),)
        return Trace(blocks, tuple(moments), Links(1e9, 1e9), tail_other_bytes=other * MIB)

    stash = planned_on(TwinDevice(), budget=1000 * MIB)
    (planner,) = stash._session.planners.values()
    given = []
    monkeypatch.setattr(Solving, "begin", lambda self, trace, target, **_: given.append(target))
    for other in (500, 990, 1001):
        planner._solve(trace(other))
    usable = usable_bytes(1000 * MIB)
    assert usable < 990 * MIB and given == [usable, 995 * MIB, usable]
    stash.close()
