"""A budget for the peak: what the stash measures, decides and follows."""

import gc
import json
import threading
import warnings

import pytest
import torch
from torch import nn

import backstash._planner
from backstash import Stash
from backstash._plan.meter import ProcessMeter
from backstash.errors import SizeError, StashWarning, UsageError
from backstash.plan import Plan

MIB = 1 << 20
OTHER = 100 * MIB
SAVED = 16 * MIB  # sixteen blocks of 1 MiB


@pytest.fixture
def memory(monkeypatch):
    """The process's memory as far as a stash has a part in it, over a fixed sum: no noise, no allocator."""
    peaks, stashes = [0], []

    def now(meter):
        held = made.other()
        for stash in stashes:
            stats = backstash.stash._levels_of(stash)
            held += stats[0] + stats[1] + stats[4]
        peaks[0] = max(peaks[0], held)
        return held

    monkeypatch.setattr(ProcessMeter, "now", now)

    def made(**arguments):
        stash = Stash(min_bytes=0, **arguments)
        stashes.append(__import__("weakref").ref(stash))
        return stash

    made.peaks, made.other = peaks, lambda: OTHER
    return made


class Sine(nn.Module):
    def forward(self, x):
        return x.sin()


def model():
    return nn.Sequential(*(Sine() for _ in range(16)))


def step(net, stash, seed=0):
    x = torch.randn(512, 512, generator=torch.Generator().manual_seed(seed), requires_grad=True)
    y = x * 2
    with stash:
        loss = net(y).sum()
    loss.backward()
    return x.grad


def settle(net, stash, steps=12):
    """Run until the plan is followed and measured."""
    true = step(net, Stash())
    for _ in range(steps):
        assert torch.equal(step(net, stash), true)
        _ = stash.plan  # waits for a plan that is being made
    return stash.plan


def test_what_fits_is_left_in_place(memory, tmp_path):
    stash = memory(budget=OTHER + 4 * SAVED, disk=tmp_path)
    plan = settle(model(), stash)
    assert plan.state == "left alone"
    assert all(
        choices == (("keep", each.blocks),) for each in plan.classes for choices in [each.choices]
    )
    written = stash.stats().written_bytes
    step(model(), stash)
    assert stash.stats().written_bytes == written
    assert plan.predicted.peak_bytes <= OTHER + 4 * SAVED
    stash.close()


def test_a_budget_is_kept_and_most_of_it_used(memory, tmp_path):
    budget = OTHER + SAVED // 2 + 3 * MIB
    stash = memory(budget=budget, disk=tmp_path, inflight="2MiB", prefetch="2MiB")
    net = model()
    plan = settle(net, stash)
    assert plan.state == "planned"
    kept = sum(count for each in plan.classes for name, count in each.choices if name == "keep")
    moved = sum(count for each in plan.classes for name, count in each.choices if name == "disk")
    assert kept + moved == 16
    assert kept >= 1
    memory.peaks[0] = 0
    before = stash.stats().written_bytes
    step(net, stash)
    assert memory.peaks[0] <= budget
    assert 0 < stash.stats().written_bytes - before <= moved * MIB
    assert plan.measured.peak_bytes <= budget
    assert plan.bound.step_seconds <= plan.predicted.step_seconds
    stash.close()


def test_a_budget_that_cannot_be_kept_is_said_before_the_second_step(memory, tmp_path):
    stash = memory(budget=OTHER // 2, disk=tmp_path)
    net = model()
    step(net, stash)
    with pytest.warns(
        StashWarning, match=r"cannot be kept: the smallest that this step can keep is 10\d MiB"
    ):
        step(net, stash)
    assert any("cannot be kept" in note for note in stash.stats().notes)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan = settle(net, stash)
    assert plan.state == "too small"
    assert plan.smallest_budget_bytes > OTHER
    assert "the smallest that can be kept is" in str(plan)
    stash.close()


def test_a_plan_is_followed_from_a_file(memory, tmp_path):
    budget = OTHER + SAVED // 2 + 3 * MIB
    stash = memory(budget=budget, disk=tmp_path, inflight="2MiB", prefetch="2MiB")
    net = model()
    plan = settle(net, stash)
    stash.close()
    path = tmp_path / "plan.json"
    plan.save(path)
    assert Plan.load(path) == plan
    assert json.loads(path.read_text())["predicted"]["peak_bytes"] == plan.predicted.peak_bytes

    again = memory(plan=path, disk=tmp_path, inflight="2MiB", prefetch="2MiB")
    assert again.plan.state == "loaded"
    true = step(net, Stash())
    for _ in range(2):
        assert torch.equal(step(net, again), true)
    moved = sum(count for each in plan.classes for name, count in each.choices if name == "disk")
    assert 0 < again.stats().eligible_bytes == 2 * 16 * MIB
    assert 0 < again.stats().written_bytes <= 2 * moved * MIB
    again.close()


def test_a_plan_for_another_model_is_refused_in_the_second_step(memory, tmp_path):
    stash = memory(budget=OTHER + 4 * SAVED, disk=tmp_path)
    plan = settle(model(), stash)
    stash.close()
    other = memory(plan=plan, disk=tmp_path)
    net = nn.Sequential(nn.Tanh(), nn.Tanh())
    step(net, other)
    with pytest.raises(UsageError, match="made for another model"):
        step(net, other)


def test_the_plan_reads_as_text(memory, tmp_path):
    stash = memory(budget=OTHER + 4 * SAVED, disk=tmp_path)
    assert "is being measured" in str(stash.plan)
    text = str(settle(model(), stash))
    assert text.startswith("plan within 164 MiB: everything fits in place")
    assert "predicted  peak" in text
    assert "measured   peak" in text
    stash.close()


def test_nothing_runs_on_after_the_end(memory, tmp_path):
    stash = memory(budget=OTHER + 2 * SAVED, disk=tmp_path)
    step(model(), stash)
    assert any(thread.name == "backstash meter" for thread in threading.enumerate())
    stash.close()
    dropped = memory(budget=OTHER + 2 * SAVED, disk=tmp_path)
    step(model(), dropped)
    del dropped
    gc.collect()
    for thread in threading.enumerate():
        if thread.name in ("backstash meter", "backstash plan"):
            thread.join(10)
            assert not thread.is_alive()


def test_shapes_that_change_keep_the_budget(memory, tmp_path):
    """Each step has another size: nothing of it is in the plan."""
    budget = OTHER + SAVED // 2 + 3 * MIB
    stash = memory(budget=budget, disk=tmp_path, inflight="2MiB", prefetch="2MiB")
    net = model()
    settle(net, stash)
    memory.peaks[0] = 0
    generator = torch.Generator().manual_seed(1)
    for _ in range(20):
        rows = int(torch.randint(100, 900, (), generator=generator))
        x = torch.randn(rows, 512, generator=generator, requires_grad=True)
        with stash:
            loss = net(x * 2).sum()
        loss.backward()
        y = x.detach().clone().requires_grad_()
        net(y * 2).sum().backward()
        assert torch.equal(x.grad, y.grad)
    assert memory.peaks[0] <= budget
    stash.close()


def test_a_program_that_grows_under_a_plan_stays_within_the_budget(memory, tmp_path):
    """What the plan did not see is taken off what is kept, in the very step."""
    budget = OTHER + 4 * SAVED
    stash = memory(budget=budget, disk=tmp_path, inflight="1MiB", prefetch="1MiB")
    net = model()
    assert settle(net, stash).state == "left alone"
    memory.other = lambda: budget - SAVED // 2
    memory.peaks[0] = 0
    true = step(net, Stash())
    assert torch.equal(step(net, stash), true)
    assert OTHER < memory.peaks[0] <= budget
    stash.close()


def test_nothing_is_read_ahead_that_has_no_room(memory, tmp_path):
    budget = OTHER + SAVED // 2 + 3 * MIB
    stash = memory(budget=budget, disk=tmp_path, inflight="2MiB", prefetch="2MiB")
    net = model()
    assert settle(net, stash).state == "planned"
    planner = stash._planner
    memory.other = lambda: budget - MIB
    assert planner._has_room(MIB)
    assert not planner._has_room(2 * MIB)
    memory.other = lambda: OTHER
    planner._has_room = lambda nbytes: False
    before = stash.stats()
    true = step(net, Stash())
    assert torch.equal(step(net, stash), true)
    after = stash.stats()
    assert after.read_bytes > before.read_bytes
    assert after.prefetch_hits == before.prefetch_hits
    stash.close()


def test_a_correction_that_went_too_far_is_not_made_again(memory, tmp_path):
    """An allocator that holds more as soon as more is kept: giving back what seemed to be spared exceeds."""
    budget = OTHER + 12 * MIB
    stash = memory(budget=budget, disk=tmp_path, inflight="1MiB", prefetch="1MiB")
    planner, biases = stash._planner, []
    resident = stash._session.device_tiers[0].evictor.resident

    def other():
        moved = planner._choices is None
        return OTHER + (8 * MIB if moved else 0) + (9 * MIB if resident.nbytes > 6 * MIB else 0)

    memory.other = other
    settle(model(), stash, steps=8)
    for _ in range(30):
        memory.peaks[0] = 0
        step(model(), stash)
        _ = stash.plan
        biases.append(planner._bias_bytes)
    assert len(set(biases[10:])) == 1
    assert memory.peaks[0] <= budget
    stash.close()


def test_without_a_tier_below_it_is_said_what_is_missing():
    if torch.accelerator.is_available():
        pytest.skip("an accelerator's tensors have host memory below")
    with pytest.warns(StashWarning, match=r"budget= without disk=: .*; give disk=DIR"):
        Stash(budget="1GiB").close()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"budget": "1GiB", "keep": "1GiB"}, "keep='1GiB' with budget=: allowed is one of them"),
        ({"budget": "1GiB", "plan": "plan.json"}, "budget= with plan=: allowed is one of them"),
        ({"plan": "plan.json", "keep": 3}, "keep=3 with plan=: allowed is one of them"),
    ],
)
def test_what_contradicts_is_refused(arguments, message):
    with pytest.raises(UsageError) as caught:
        Stash(**arguments)
    assert message in str(caught.value)


def test_a_size_that_cannot_be_read_is_refused():
    with pytest.raises(SizeError, match="budget='half' is not a size"):
        Stash(budget="half")


def test_a_file_that_is_no_plan_is_refused(tmp_path):
    path = tmp_path / "plan.json"
    with pytest.raises(UsageError, match=r"no plan; allowed.*No such file"):
        Stash(plan=path)
    for text in ("nonsense", "{}", "[]", '{"format": "backstash plan 1"}'):
        path.write_text(text)
        with pytest.raises(UsageError, match="no plan; allowed"):
            Stash(plan=path)


def test_auto_is_what_the_machine_can_spare(tmp_path):
    stash = Stash(budget="auto", disk=tmp_path)
    held = ProcessMeter().now()
    assert stash.plan.budget_bytes > held
    stash.close()


def test_plans_that_change_at_every_step_are_exact(memory, tmp_path, monkeypatch):
    generator = torch.Generator().manual_seed(0)

    def choose(planner, block, tensor):
        return ["", "disk"][int(torch.randint(2, (), generator=generator))]

    monkeypatch.setattr(backstash._planner.Planner, "choose", choose)
    stash = memory(budget=OTHER + 2 * SAVED, disk=tmp_path)
    net = model()
    true = step(net, Stash())
    for _ in range(20):
        assert torch.equal(step(net, stash), true)
    stash.close()


def test_other_budgets_are_planned_from_the_same_step(memory, tmp_path):
    stash = memory(
        budget=OTHER + SAVED // 2 + 3 * MIB, disk=tmp_path, inflight="2MiB", prefetch="2MiB"
    )
    plan = settle(model(), stash)
    stash.close()
    larger = plan.at(2 * (OTHER + SAVED))
    assert larger.state == "left alone"
    assert larger.predicted.peak_bytes == plan.plain.peak_bytes
    assert plan.at("1MiB").state == "too small"
    assert plan.at("1MiB").smallest_budget_bytes > OTHER
    trace = json.loads(json.dumps(plan.trace.as_dict()))
    assert Plan.from_trace(trace, 2 * (OTHER + SAVED)).classes == larger.classes
    path = tmp_path / "plan.json"
    plan.save(path)
    with pytest.raises(UsageError, match="has no measured step"):
        Plan.load(path).at("1GiB")
    with pytest.raises(UsageError, match="no trace"):
        Plan.from_trace({"format": 1}, "1GiB")
