"""Budgets of accelerators with what else a program does: other devices, captures, forks, dropping a stash."""

import gc
import itertools
import subprocess
import sys
import threading
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import simulated
from backstash import Stash
from backstash._budget.device_meter import DeviceMeter
from backstash.errors import StashWarning
from backstash.plan import StepFigures
from backstash.testing import TwinDevice, stash_on
from long_tests import takes_long
from test_device_meter import MIB, planned_on, step

HERE = Path(__file__).parents[1]

BEGIN = """
import sys, warnings
sys.path.insert(0, HERE)
import torch, simulated
from torch import nn
from backstash import Stash
warnings.simplefilter("ignore")
here = simulated.register()
there = torch.device("simulated", 1)
simulated.begin(0.2, 1)

def model(device, seed):
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(6))).to(device)

def flat(model):
    # Without modules in modules, which a budget would find and record.
    return nn.Sequential(*(each for block in model for each in block))

def gradients(model, x, stash=None):
    model.zero_grad()
    with stash or torch.enable_grad():
        loss = model(x).square().mean()
    loss.backward()
    return [each.grad.cpu() for each in model.parameters()]
"""


def run(program: str) -> str:
    """What a program prints that has two simulated devices, for good."""
    try:
        simulated.build()
    except simulated.CannotBuild as reason:
        pytest.skip(str(reason))
    whole = BEGIN.replace("HERE", repr(str(HERE))) + program + "\nassert not simulated.faults()\n"
    done = subprocess.run([sys.executable, "-c", whole], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_devices_step_begins_where_it_saves_something():
    """Two models in turn, each on its device: to one's planner the other's passes are no steps."""
    printed = run("""
models = (model(here, 0), here), (model(there, 1), there)
x = torch.randn(256, 64)
true = [gradients(each, x.to(device)) for each, device in models]
stash = Stash(budget="1200KiB", host="64MiB", min_bytes=0)
for each in range(20):
    number = each % 2 if each else 0
    found = gradients(models[number][0], x.to(models[number][1]), stash)
    assert all(map(torch.equal, found, true[number]))
    stash.plan, [planner.plan for planner in stash._session.planners.values()]
for planner in stash._session.planners.values():
    assert planner._steps in (10, 11), planner._steps
    assert planner.plan.predicted is not None and planner.plan.classes, planner.plan
    print(planner.plan.state)
stash.close()
""")
    assert "measuring" not in printed


@takes_long
def test_a_loaded_plan_may_be_for_one_device_of_two():
    run("""
first, second = model(here, 0), nn.Linear(64, 8).to(there)
x = torch.randn(256, 64).to(here)
stash = Stash(budget="1200KiB", host="64MiB", min_bytes=0)
for _ in range(6):
    gradients(first, x, stash), stash.plan
plan = stash.plan
stash.close()
stash = Stash(plan=plan, host="64MiB", min_bytes=0)
for _ in range(3):
    with stash:
        loss = second(first(x).to(there)).square().mean()
    loss.backward()
stash.close()
stash = Stash(plan=plan, host="64MiB", min_bytes=0)
try:
    for _ in range(3):
        with stash:
            loss = second(x.detach().to(there).exp()).square().mean()
        loss.backward()
except Exception as error:
    assert "does not match this model" in str(error), error
else:
    raise AssertionError("it is of no class of the plan")
""")


def test_a_plan_of_the_cpu_is_refused_where_all_is_an_accelerators():
    run("""
on_cpu = model("cpu", 0)
from backstash.plan import Plan
stash = Stash(plan=Plan(1 << 20, "planned"), host="64MiB", min_bytes=0)
x = torch.randn(256, 64).to(here)
on_cpu.to(here)
gradients(on_cpu, x, stash)
try:
    gradients(on_cpu, x, stash)
except Exception as error:
    assert "does not match this model" in str(error), error
else:
    raise AssertionError("it is followed by nobody")
""")


def test_where_an_accelerator_is_planned_for_the_cpu_is_left_as_it_was():
    """Before the first use of the device the CPU's planner began a step, and set windows for a small budget."""
    run("""
stash = Stash(budget="2MiB", host="64MiB", min_bytes=0)
tiers = stash._session.device_tiers[0]
windows = tiers.evictor.inflight.window_bytes, tiers.prefetcher.ahead.window_bytes
x = torch.randn(256, 64, requires_grad=True)
with stash:
    x.exp().to(here).erf().sum().backward()
assert list(stash._session.planners) == [1]
assert windows == (tiers.evictor.inflight.window_bytes, tiers.prefetcher.ahead.window_bytes)
assert tiers.prefetcher.ahead.has_room is None and tiers.packer.has_room is None
assert not tiers.evictor.resident.is_planned
stash.close()
""")


def test_nothing_is_asked_of_a_device_or_planned_while_a_graph_is_captured():
    device = TwinDevice()
    stash = planned_on(device, budget=116 * MIB)
    marks = []
    time_mark, device.time_mark = device.time_mark, lambda: marks.append(0) or time_mark()
    true = step(Stash())
    for number in range(8):
        device.capturing = number in (0, 2, 5)
        before = len(marks)
        assert torch.equal(step(stash), true)
        assert not device.capturing or len(marks) == before, f"step {number}"
        device.capturing = False
        _ = stash.plan
    assert not device.faults
    assert "a graph of the accelerator is being captured" in stash.stats().left
    assert stash.plan.state == "planned", str(stash.plan)
    stash.close()


def test_in_a_forked_process_no_planner_of_an_accelerator_listens():
    device = TwinDevice()
    stash = planned_on(device, budget=116 * MIB)
    step(stash)
    planner = stash._session.planners[1]
    assert stash._event_log.on
    stop = planner._meter._stop
    with stop._cond:  # in a forked process nobody releases what the sampling thread held
        stash._forked()
        listening = [each.__self__ for each in stash._event_log._listeners]
        assert planner not in listening and list(stash._session.planners) == [0]
    stop.set()
    stash.close()


def test_a_dropped_stash_leaves_nothing_that_measures():
    """The device is kept by its pinned memory for longer."""
    device = TwinDevice()
    stash = stash_on(device, budget=116 * MIB, host=64 * MIB, min_bytes=0)
    step(stash)
    assert device.on_time is not None
    meter = weakref.ref(stash._session.planners[1]._meter)
    assert isinstance(meter(), DeviceMeter)
    del stash
    for _ in range(3):  # the thread may hold it for the moment of a sample
        gc.collect()
        for each in threading.enumerate():
            if each.name == "backstash meter":
                each.join(0.2)
    assert meter() is None
    device.on_time("read", 0.0, 1.0, MIB)


def test_a_warning_names_the_device():
    device = TwinDevice()
    stash = planned_on(device, budget=101 * MIB)
    with pytest.warns(StashWarning, match="budget=101 MiB of twin cannot be kept"):
        for _ in range(6):
            step(stash)
            _ = stash.plan
    stash.close()


@takes_long
def test_a_device_too_full_for_what_is_tried_lets_the_step_go_on():
    """What is tried on each block in the second step takes memory, which the step must not lack."""
    run("""
from backstash._tiers import packing
tried = []
def full(self, storage):
    tried.append(storage)
    raise torch.OutOfMemoryError("no space for a fingerprint")
packing.Packer._mark = full
first, x = flat(model(here, 0)), torch.randn(256, 64).to(here)
true = gradients(first, x)
stash = Stash(budget="600KiB", host="64MiB", min_bytes=0)
for _ in range(3):
    assert all(map(torch.equal, gradients(first, x, stash), true))
assert tried
tried.clear()
stash.close()
""")


@takes_long
def test_what_is_tried_on_a_block_reads_no_memory_of_the_device_on_the_host():
    """Its price has the device's own way to compare bytes; on a real one the other ends the process."""
    run("""
from backstash._device import fingerprint as _fingerprint
from backstash._tiers import packing
def read(*given):
    raise AssertionError("the host reads the device's memory")
packing.fingerprint = read
marked, mark = [], packing.Packer._mark
packing.Packer._mark = lambda self, storage: marked.append(self._device) or mark(self, storage)
first, x = flat(model(here, 0)), torch.randn(256, 64).to(here)
true = gradients(first, x)
stash = Stash(budget="600KiB", host="64MiB", min_bytes=0)
for _ in range(4):
    assert all(map(torch.equal, gradients(first, x, stash), true))
assert marked and None not in marked
stash.close()
""")


def run_out(stash):
    """A step that runs out of memory in forward; what is said of it."""
    x = torch.ones(512, 512, requires_grad=True)
    with pytest.raises(torch.OutOfMemoryError), stash:
        y = (x * 2).erf().erf()
        raise torch.OutOfMemoryError("a large one")
    del y
    gc.collect()
    (note,) = (each for each in stash.stats().notes if "ran out of device memory" in each)
    return note


def test_a_step_that_runs_out_of_memory_before_there_is_a_plan_may_be_run_again():
    """Until nothing is left that could be less."""
    stash, true = planned_on(TwinDevice(chance=1.0), budget=116 * MIB), step(Stash())
    assert torch.equal(step(stash), true)
    windows, notes, measured = [], [], set()
    for _ in range(9):
        windows.append(stash._planner._limits.windows)
        notes.append(run_out(stash))
        measured.add(len(stash._planner._first_steps.records))
    assert measured == {1}, "what they would have held is not known"
    assert (
        "before it had a plan: the stash holds less from now on, so run the step again" in notes[0]
    )
    assert all(2 * after[0] <= before[0] for before, after in itertools.pairwise(windows[:3]))
    assert "no plan makes it fit" in notes[-1]
    for _ in range(12):
        assert torch.equal(step(stash), true)
        _ = stash.plan
    assert stash.plan.state == "planned", str(stash.plan)
    stash.close()


def test_a_device_that_runs_out_of_memory_within_a_plan_is_planned_for_with_less():
    device = TwinDevice(chance=1.0)
    stash, true = planned_on(device, budget=116 * MIB), step(Stash())
    for _ in range(12):
        assert torch.equal(step(stash), true)
        _ = stash.plan
    assert stash.plan.state == "planned"
    planner = stash._planner
    bias, (trace, solution) = planner._corrections.bias_bytes, planner._solving.taken
    planner._keep_if_it_fits(trace, solution.choices, solution.windows, 113 * MIB)
    assert planner._solving._kept, "what plans may use of the budget"
    assert "7.25 MiB less of it from now on, so run the step again" in run_out(stash)
    assert planner._corrections.bias_bytes == bias + 116 * MIB // 16
    assert not planner._solving._kept
    planner._keep_if_it_fits(trace, solution.choices, solution.windows, 113 * MIB)
    assert not planner._solving._kept, "the device has not as much"
    for _ in range(8):
        assert torch.equal(step(stash), true)
        _ = stash.plan
    device.peak_bytes = 0
    assert torch.equal(step(stash), true)
    assert device.peak_bytes <= 116 * MIB - 116 * MIB // 16
    exceeding, device.peak_bytes = planner._reports.exceeding, 200 * MIB
    assert torch.equal(step(stash), true)
    assert planner._reports.exceeding == exceeding + 1, "of an operation that no reading shows"
    stash._planner.follower.plan = replace(stash.plan, state="too small")
    assert "no plan makes it fit" in run_out(stash)
    stash._planner.follower.plan = replace(stash.plan, state="loaded")
    assert "a loaded plan is never changed" in run_out(stash)
    stash.close()


def test_a_plan_that_was_tried_and_exceeded_the_budget_is_left():
    stash, true = planned_on(TwinDevice(chance=1.0), budget=116 * MIB), step(Stash())
    for _ in range(12):
        assert torch.equal(step(stash), true)
        _ = stash.plan
    planner = stash._planner
    solving = planner._solving
    other = solving.taken[0], replace(solving.taken[1])
    solving._timed = {"other": (StepFigures(100 * MIB, 1.0), other)}
    solving._trial = solving.taken
    planner._corrections.exceed(200 * MIB, 0.5)
    planner._correct()
    assert solving.found is other and not solving.is_trying
    stash.close()
