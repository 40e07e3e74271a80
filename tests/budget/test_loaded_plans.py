"""Plans as values: what is read from one, written to a file, asked for another budget, and followed again."""

import json
import warnings
from dataclasses import replace

import pytest
import torch

from backstash import Stash
from backstash.errors import StashWarning, UsageError
from backstash.plan import Plan
from counted_memory import MIB, OTHER, CountedMemory, Saves
from plan_steps import SAVED, Sine, model, moved, settle, step

BUDGET = OTHER + SAVED // 2 + 3 * MIB
FITS = 2 * (OTHER + SAVED)


def plan_of(layer, directory):
    with pytest.MonkeyPatch.context() as patch:
        memory = CountedMemory(patch, disk=directory, inflight="1MiB", prefetch="2MiB")
        stash = memory(budget=BUDGET)
        net = model(layer)
        with pytest.raises(UsageError, match="the first three steps are measured"):
            step(net, stash)
            stash.plan.save(directory / "early.json")
        assert not (directory / "early.json").exists() and stash.plan.state == "measuring"
        assert "is being measured" in str(stash.plan)
        plan = settle(net, stash, steps=11)
        stash.close()
    return plan


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    """That steps of the usual model were measured under."""
    return plan_of(Saves, tmp_path_factory.mktemp("plan"))


@pytest.fixture(scope="module")
def plan_of_sines(tmp_path_factory):
    return plan_of(Sine, tmp_path_factory.mktemp("plan"))


@pytest.fixture
def memory(monkeypatch, tmp_path):
    counted = CountedMemory(monkeypatch, disk=tmp_path, inflight="1MiB", prefetch="2MiB")
    yield counted
    counted.close()


def test_a_plan_is_followed_from_a_file(memory, tmp_path, plan):
    assert plan.state == "planned" and plan.bound.step_seconds <= plan.predicted.step_seconds
    assert 1 <= moved(plan) <= 15 and plan.measured.peak_bytes <= BUDGET
    reasons = {each.reason for each in plan.classes if len(each.choices) > 1}
    assert reasons == {"as many as fit are kept"}
    plan, path = replace(plan, left_after=None), tmp_path / "plan.json"
    plan.save(path)
    assert Plan.load(path) == plan
    assert json.loads(path.read_text())["predicted"]["peak_bytes"] == plan.predicted.peak_bytes
    stash = memory(plan=path)
    assert stash.plan.state == "loaded"
    true = step(model(), Stash())
    for _ in range(2):
        assert torch.equal(step(model(), stash), true)
    assert stash.stats().eligible_bytes == 2 * SAVED
    assert stash.stats().written_bytes == 2 * moved(plan) * MIB > 0
    assert memory.peaks[0] <= BUDGET


@pytest.mark.parametrize("budget", [BUDGET, FITS])
def test_a_plan_for_another_model_is_refused_in_the_second_step(memory, plan, budget):
    stash = memory(plan=plan.at(budget))
    step(model(torch.nn.Tanh, 2), stash)
    with pytest.raises(UsageError, match="does not match this model"):
        step(model(torch.nn.Tanh, 2), stash)


def test_a_plan_for_a_batch_of_another_size_is_refused(memory, plan):
    """Its modules and operations are the same, and none of its sizes."""
    stash = memory(plan=replace(plan, left_after=None))
    step(model(), stash, rows=1024)
    with pytest.raises(UsageError, match="or this batch size"):
        step(model(), stash, rows=1024)


def test_a_loaded_plan_that_exceeds_its_budget_is_reported_once(memory, plan):
    memory.other = lambda: OTHER + SAVED  # it was made for less
    stash = memory(plan=replace(plan, left_after=None))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            step(model(), stash)
        with pytest.warns(StashWarning, match="exceeded in 3 steps.* A loaded plan is never chang"):
            step(model(), stash)
        step(model(), stash)
    assert stash.plan.measured is None


def test_a_plan_s_replay_that_is_refused_moves_instead(memory, plan_of_sines):
    classes = tuple(
        replace(each, choices=(("recompute", each.blocks),)) for each in plan_of_sines.classes
    )
    stash, true = memory(plan=replace(plan_of_sines, classes=classes)), step(model(Sine), Stash())
    for _ in range(2):
        assert torch.equal(step(model(Sine), stash), true)
    stats = stash.stats()
    assert stats.recomputed_bytes and stats.written_bytes, "four of five sines in a row"
    assert any("of at most 4" in reason for reason in stats.left)


def test_other_budgets_are_planned_from_the_same_step_with_the_windows_that_were_given(
    tmp_path, plan
):
    larger = plan.at(FITS)
    assert larger.state == "left alone"
    assert larger.predicted.peak_bytes == plan.plain.peak_bytes
    assert plan.at("1MiB").state == "too small"
    small = plan.at("1MiB")
    assert small.smallest_budget_bytes > small.predicted.peak_bytes * 17 // 16 > OTHER
    assert small.bound is None is not plan.bound, "no time is a bound of what cannot be kept"
    for each in (plan, plan.at(BUDGET + MIB), plan.at(BUDGET + MIB).at(BUDGET)):
        assert (each.inflight_bytes, each.prefetch_bytes) == (1 * MIB, 2 * MIB)
    assert Plan.from_dict(plan.as_dict()).windows == (None, None), "of this stash alone"
    trace = json.loads(json.dumps(plan.trace.as_dict()))
    assert Plan.from_trace(trace, FITS).classes == larger.classes
    assert Plan.from_trace(trace, FITS).device == "cpu"
    ahead = replace(plan.trace, runs_ahead=True).as_dict()
    assert Plan.from_trace(ahead, FITS).device == "accelerator"
    other = replace(plan, device="cuda:1", bias_bytes=plan.bias_bytes + 2 * MIB).at(FITS)
    assert other.predicted.peak_bytes == larger.predicted.peak_bytes + 2 * MIB
    assert other.plain.peak_bytes == larger.plain.peak_bytes + 2 * MIB
    assert other.device == "cuda:1" and other.windows == plan.windows == (1 * MIB, 2 * MIB)
    plan.save(tmp_path / "plan.json")
    with pytest.raises(UsageError, match="has no measured step"):
        Plan.load(tmp_path / "plan.json").at("1GiB")
    with pytest.raises(UsageError, match="not the trace"):
        Plan.from_trace({"format": 2}, "1GiB")


@pytest.mark.parametrize(
    "damage",
    [
        {"budget_bytes": None},
        {"budget_bytes": 0},
        {"predicted": {"peak_bytes": "x", "step_seconds": 1.0}},
        {"classes": [{"name": 7}]},
        {"classes": [{"seconds": "long"}]},
        {"classes": [{"choices": [["teleport", 16]]}]},
        {"classes": [{"choices": [["keep", 18], ["disk", -2]]}]},
        {"classes": [{"choices": []}]},
        {"classes": [{"blocks": 10**9, "choices": [["keep", 10**9]]}]},
    ],
)
def test_a_damaged_plan_is_refused_in_one_line(tmp_path, plan, damage):
    values = plan.as_dict()
    assert Plan.from_dict(json.loads(json.dumps(values))).classes
    for name, value in damage.items():
        is_list = isinstance(value, list)
        values[name] = [{**values[name][0], **value[0]}] if is_list else value
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(values))
    with pytest.raises(UsageError, match="is not a plan"):
        Stash(plan=path, disk=tmp_path)


@pytest.mark.parametrize("given", [7, {}, ["plan.json"]])
def test_what_is_neither_a_plan_nor_a_path_is_refused(tmp_path, given):
    with pytest.raises(UsageError, match="allowed: a Plan, or the path of a file"):
        Stash(plan=given, disk=tmp_path)


def test_a_file_that_is_no_plan_is_refused(tmp_path):
    path = tmp_path / "plan.json"
    with pytest.raises(UsageError, match=r"not a plan; allowed.*No such file"):
        Stash(plan=path)
    values = Plan(1 << 30, "planned", left_after=3).as_dict()
    wrong = [json.dumps({**values, "left_after": each}) for each in ("3", -1, True, 0.5)]
    wrong += [
        json.dumps({**values, "state": "no such"}),
        json.dumps({**values, "budget_bytes": "6GiB"}),
    ]
    for text in ("nonsense", "{}", "[]", '{"format": "backstash plan 1"}', *wrong):
        path.write_text(text)
        with pytest.raises(UsageError, match="not a plan; allowed"):
            Stash(plan=path)
