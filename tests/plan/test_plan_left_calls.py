"""Calls of which everything stays: nothing manages what they save. Plans compared by measured times."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import backstash._budget.first_steps
import backstash._budget.planner
from backstash import Stash
from backstash._budget.recording import StepRecording
from backstash._budget.shape import EndedStep, StepShape
from backstash._budget.solving import Solving
from backstash._plan.choices import Choices
from backstash._plan.simulate import Windows
from backstash._plan.solve import follow, whole_calls
from backstash._plan.table import REGION, Problem, left_blocks
from backstash._plan.trace import Links, Moment, Option, RegionCut, Trace, TracedBlock, TracedRegion
from backstash.errors import InplaceError
from backstash.plan import StepFigures, _planned_regions, plan_of
from backstash.testing import CountedDevice, stash_on
from counted_memory import MIB, OTHER, CountedMemory
from long_tests import mostly_long

LAYERS = 8
SAVED = LAYERS * 4 * MIB


class Layer(nn.Module):
    """Saves its input, and three tensors of its own."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(512))
        self.seen = None

    def forward(self, x):
        self.seen = torch.erf(x * self.scale) * 1.5
        return torch.erf(torch.erf(self.seen) * 1.5) + x


def on_a_slow_disk(monkeypatch):
    monkeypatch.setattr("backstash._plan.regions.cuts_of", lambda graph, nbytes: [])
    for where in (backstash._budget.planner, backstash._budget.first_steps):
        monkeypatch.setattr(where, "links_of", lambda records: Links(2e6, 2e6))
    return CountedMemory(monkeypatch, inflight="2MiB", prefetch="2MiB")


@pytest.fixture
def memory(monkeypatch):
    counted = on_a_slow_disk(monkeypatch)
    yield counted
    counted.close()


def model(layer=None):
    return nn.Sequential(*((layer or Layer)() for _ in range(LAYERS)))


def forward(net, stash):
    x = torch.randn(512, 512, generator=torch.Generator().manual_seed(0))
    with stash:
        return net(x * 2).sum()


def step(net, stash):
    loss = forward(net, stash)
    return [loss.detach(), *torch.autograd.grad(loss, list(net.parameters()))]


def ways(plan):
    return [name for each in plan.regions for name, n in each.choices for _ in range(n)]


def settled(memory, tmp_path, net):
    stash = memory(budget=OTHER + SAVED // 2 + 8 * MIB, disk=tmp_path)
    stash.recompute(*net)
    true = step(net, Stash())
    for _ in range(12):
        memory.peaks[0] = 0
        assert all(map(torch.equal, step(net, stash), true))
        if stash.plan.measured is not None and "left" in ways(stash.plan):
            break
    return stash, true


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    """That a step of some layers was measured under."""
    with pytest.MonkeyPatch.context() as patch:
        memory = on_a_slow_disk(patch)
        stash, _ = settled(memory, tmp_path_factory.mktemp("disk"), model())
        stash.close()
    return replace(stash.plan, left_after=None)


@pytest.fixture
def loaded(memory, tmp_path, plan):
    """The layers, a stash that has followed this plan for two steps, and their gradients."""
    plan.save(tmp_path / "plan.json")
    net, stash = model(), memory(plan=tmp_path / "plan.json", disk=tmp_path)
    stash.recompute(*net)
    true = step(net, Stash())
    for _ in range(2):
        before = stash._session.counts().fitting_saves
        assert all(map(torch.equal, step(net, stash), true))
        left = stash._session.counts().fitting_saves - before
        assert left >= 4 * ways(plan).count("left") > 0, "the same calls as in the plan"
    yield net, stash, true
    stash.close()


def test_nothing_manages_what_a_call_saves_of_which_everything_stays(memory, tmp_path):
    """And once more is held than planned, no call is left; that step is none that is larger."""
    net = model()
    stash, true = settled(memory, tmp_path, net)
    plan = stash.plan
    assert plan.state == "planned" and plan.measured is not None
    left = ways(plan).count("left")
    assert left >= 1 and ways(plan).count("region") >= 1
    assert "left" in str(plan)
    before, eligible = stash._session.counts().fitting_saves, stash.stats().eligible_bytes
    memory.peaks[0] = 0
    assert all(map(torch.equal, step(net, stash), true))
    assert memory.peaks[0] <= plan.budget_bytes
    saves = stash._session.counts().fitting_saves - before
    assert saves % left == 0 and saves >= 4 * left, "each saves as much as the others"
    blocks = (stash.stats().eligible_bytes - eligible) // MIB
    assert blocks == sum(
        n for each in plan.classes for name, n in each.choices if name not in ("left", "region")
    )
    before = stash._session.counts().fitting_saves
    memory.other = lambda: OTHER + 64 * MIB
    assert all(map(torch.equal, step(net, stash), true))
    assert stash._session.counts().fitting_saves == before
    assert not stash._planner._shape.is_larger and stash._planner._shape.manages_more


class Shared(Layer):
    """Saves its result, which the next layer saves as its input, and the loss at the end."""

    def forward(self, x):
        self.result = torch.relu(super().forward(x))
        return self.result


def test_what_several_calls_save_is_unmanaged_in_all_if_it_is_in_one(memory, tmp_path):
    net = model(Shared)
    stash, true = settled(memory, tmp_path, net)
    plan = stash.plan
    assert plan.state == "planned" and ways(plan).count("left") >= 2
    eligible, saves = stash.stats().eligible_bytes, stash.stats().saves
    memory.peaks[0] = 0
    assert all(map(torch.equal, step(net, stash), true))
    assert memory.peaks[0] <= plan.budget_bytes
    blocks = (stash.stats().eligible_bytes - eligible) // MIB
    assert blocks == sum(
        n for each in plan.classes for name, n in each.choices if name not in ("left", "region")
    )
    of_a_step = stash.stats().saves - saves
    assert all(map(torch.equal, step(net, stash), true))
    assert stash.stats().saves - saves == 2 * of_a_step
    at = ways(plan).index("left")
    loss = forward(net, stash)
    net[at].result.detach().add_(1)
    with pytest.raises(InplaceError):
        loss.backward()
    del loss
    for each in net:
        each.seen = each.result = None
    assert all(map(torch.equal, step(net, stash), true))


def test_what_was_unmanaged_in_the_step_before_is_managed_again(memory, tmp_path):
    """Also where its memory lives on, as that of a batch that the program keeps."""
    net = model(Shared)
    stash, _ = settled(memory, tmp_path, net)
    assert "left" in ways(stash.plan)
    with stash.record() as recording, stash:
        loss = sum((each.result * each.result.detach()).sum() for each in net)
    del loss
    assert sum(each.kind == "save" for each in recording.events) == LAYERS


def test_a_save_of_what_a_call_holds_unmanaged_is_counted_once(tmp_path):
    stash = Stash(disk=tmp_path)
    state = stash._session.thread_state()
    x = torch.ones(1 << 18, requires_grad=True) * 2
    held = stash._admission.hook_leaving(state, 4 * MIB)(x)
    again = stash._admission.hook(state)(x[1:])
    assert torch.equal(stash.unpack(held), x) and torch.equal(stash.unpack(again), x[1:])
    assert stash.stats().saves == 2 and stash.stats().eligible_bytes == 0
    stash.close()


def test_what_a_left_call_saved_and_the_program_changes_is_an_error(loaded):
    net, stash, true = loaded
    at = ways(stash.plan).index("left")
    loss = forward(net, stash)
    net[at].seen.detach().add_(1)
    with pytest.raises(InplaceError):
        loss.backward()
    del loss
    net[at].seen = None
    assert all(map(torch.equal, step(net, stash), true))


def test_all_of_a_recorded_step_are_blocks(loaded):
    net, stash, true = loaded
    before = stash._session.counts().fitting_saves
    with stash.record() as recording:
        assert all(map(torch.equal, step(net, stash), true))
    held = sum(
        n for each in stash.plan.classes for name, n in each.choices if name not in ("region",)
    )
    assert sum(each.kind == "save" for each in recording.events) == held
    assert stash._session.counts().fitting_saves == before
    assert all(map(torch.equal, step(net, stash), true))
    assert stash._session.counts().fitting_saves > before


def test_a_left_call_that_saves_much_more_inside_keeps_the_budget(memory, tmp_path):
    """Once, as where a mixture of experts routes more to it. Nothing is planned otherwise for that."""

    class Inside(Layer):
        times = 1

        def forward(self, x):
            y = torch.erf(torch.cat([x * self.scale] * self.times)) * 1.5
            return torch.erf(torch.erf(y) * 1.5)[: len(x)] + x

    net = model(Inside)
    stash, true = settled(memory, tmp_path, net)
    before = ways(stash.plan)
    assert before[5] == "left"
    net[5].times, memory.peaks[0] = 12, 0
    expected = step(net, Stash())
    assert all(map(torch.equal, step(net, stash), expected))
    assert memory.peaks[0] <= 1.05 * stash.plan.budget_bytes
    net[5].times = 1
    for _ in range(8):
        memory.peaks[0] = 0
        assert all(map(torch.equal, step(net, stash), true))
        _ = stash.plan
    assert stash.plan.state == "planned" and "left" in ways(stash.plan)
    assert 0.9 * stash.plan.budget_bytes <= memory.peaks[0] <= stash.plan.budget_bytes


class Noisy(Layer):
    """Reads noise, which no replay computes: a call that is recomputed holds it."""

    def forward(self, x):
        self.seen = torch.rand_like(x)
        return torch.erf(torch.erf(x * self.scale * self.seen) * 1.5) + x


def noisy_step(net, stash):
    torch.manual_seed(5)
    return step(net, stash)


def test_what_a_recomputed_call_holds_is_left_if_all_of_it_stays(memory, tmp_path):
    net = model(Noisy)
    stash = memory(budget=OTHER + SAVED - 8 * MIB, disk=tmp_path)
    stash.recompute(*net)
    true = noisy_step(net, Stash())
    for _ in range(14):
        memory.peaks[0] = 0
        assert all(map(torch.equal, noisy_step(net, stash), true))
        _ = stash.plan
    plan = stash.plan
    again = [at for at, way in enumerate(ways(plan)) if way == "region"]
    assert plan.state == "planned" and again
    (planned,) = plan.regions
    assert all(planned.left_bytes[at] >= MIB for at in again), "its noise, at least"
    before, eligible = stash._session.counts().fitting_saves, stash.stats().eligible_bytes
    memory.peaks[0] = 0
    assert all(map(torch.equal, noisy_step(net, stash), true))
    assert memory.peaks[0] <= plan.budget_bytes
    assert stash._session.counts().fitting_saves - before >= len(again)
    blocks = (stash.stats().eligible_bytes - eligible) // MIB
    assert blocks == sum(
        n for each in plan.classes for name, n in each.choices if name not in ("left", "region")
    )
    torch.manual_seed(5)
    loss = forward(net, stash)
    net[again[0]].seen.add_(1)
    with pytest.raises(InplaceError):
        loss.backward()
    del loss
    assert all(map(torch.equal, noisy_step(net, stash), true))


def trace_of_calls(seconds=0.1):
    """Four calls of two blocks and an input each, all saved before all are used."""
    options = {"keep": Option(MIB), "disk": Option(0, 0.5, 0, MIB)}
    blocks = tuple(TracedBlock("", MIB, dict(options)) for _ in range(12))
    moments = [Moment("save", at, 0.1, MIB) for at in range(12)]
    for at in reversed(range(12)):
        moments += [Moment("use", at, 0.1, MIB), Moment("free", at, 0.0, MIB)]
    regions = tuple(
        TracedRegion("m.*", (at + 1, at + 2), 0.0, seconds, index=at // 3, inputs=(at,))
        for at in range(0, 12, 3)
    )
    return Trace(blocks, tuple(moments), Links(1e9, 1e9), regions=regions)


def test_which_blocks_are_left():
    trace = trace_of_calls()
    choices = [REGION if at in (1, 2) else "keep" for at in range(12)]
    assert left_blocks(trace, choices) == {4, 5, 7, 8, 10, 11}
    assert left_blocks(trace, ["keep"] * 12) == set(), "no hook sees where a call begins"
    assert left_blocks(trace, [*choices[:3], "disk", *choices[4:]]) == {7, 8, 10, 11}, "its input"
    assert left_blocks(trace, [*choices[:4], "disk", *choices[5:]]) == {7, 8, 10, 11}, "a block"
    first, second, third, last = trace.regions
    shares = replace(last, members=(10,), shared=(11,))
    others = replace(second, others=(0,)), replace(third, own=(9,)), shares
    trace = replace(trace, regions=(first, *others))
    assert left_blocks(trace, choices) == {4, 5, 7, 8, 9, 10, 11}
    assert left_blocks(trace, ["disk", *choices[1:]]) == {7, 8, 9, 10, 11}, "it saves what moves"
    assert left_blocks(trace, [*choices[:9], "disk", *choices[10:]]) == {4, 5}, "of its own"
    assert left_blocks(trace, [*choices[:11], "disk"]) == {4, 5, 7, 8, 9}, "what it shares"
    assert Trace.from_dict(trace.as_dict()) == trace


def test_which_blocks_of_recomputed_calls_are_left():
    """What a replay reads, and what is held of a call of which a part is recomputed."""
    trace = trace_of_calls()
    choices = [REGION if at in (1, 2) else "keep" for at in range(12)]
    first, *others = trace.regions
    reads = replace(first, operands=(11,), own=(10,))
    trace = replace(trace, regions=(reads, *others[:2]))
    assert left_blocks(trace, choices) == {4, 5, 7, 8, 10, 11}
    assert left_blocks(trace, choices, with_inputs=True) == {0, 3, 4, 5, 6, 7, 8, 10, 11}
    assert left_blocks(trace, [*choices[:10], "disk", "keep"]) == {4, 5, 7, 8}, "of its own"
    assert left_blocks(trace, [*choices[:11], "disk"]) == {4, 5, 7, 8}, "what it reads"
    part = [*choices[:2], "keep", *choices[3:]]
    assert left_blocks(trace, part) == {2, 4, 5, 7, 8, 10, 11}
    cut = replace(first, cuts=(RegionCut((1,), (7,), 0.5, (0, 2)),)).cut_at(1)
    assert cut.held == (2,) and cut.members == (1,)
    trace = replace(trace, regions=(cut, *others[:2]))
    assert left_blocks(trace, part) == {2, 4, 5, 7, 8}
    assert left_blocks(trace, [*part[:2], "disk", *part[3:]]) == {4, 5, 7, 8}
    assert Trace.from_dict(trace.as_dict()) == trace
    costs = [Option(MIB, 0.25) for _ in range(12)]
    blocks = tuple(
        replace(each, options={**each.options, "keep": cost})
        for each, cost in zip(trace.blocks, costs, strict=True)
    )
    problem = Problem(replace(trace, blocks=blocks), 0)
    taken = problem.taken([*part[:10], "disk", "keep"])
    free = [at for at, each in enumerate(taken) if not each.save_seconds]
    assert free == [0, 1, 2, 3, 4, 5, 6, 7, 8, 11], "the last is after all that moves"


def test_a_recomputed_call_whose_input_moves_is_managed():
    """Also one that holds nothing else: it saves its input, and would hold its memory."""
    trace = trace_of_calls()

    def left_bytes(choices, regions=trace.regions):
        (found,) = _planned_regions(replace(trace, regions=regions), choices, {})
        return found.left_bytes

    again = [REGION if at % 3 else "keep" for at in range(12)]
    assert left_bytes(again) == (MIB,) * 4, "its input"
    assert left_bytes(["disk", *again[1:]]) == (0, MIB, MIB, MIB)
    assert left_bytes(["left", *again[1:]]) == (MIB,) * 4, "another call, which is left, holds it"
    first, second, *others = trace.regions
    saves = replace(first, others=(3,)), replace(second, shared=(6,)), *others
    assert left_bytes(again, saves) == (2 * MIB, 0, MIB, MIB), "what it shares is a block"
    shares = [*again[:6], "left", *again[7:]]
    assert left_bytes(shares, saves) == (2 * MIB, 2 * MIB, MIB, MIB)
    assert left_bytes([*again[:3], "disk", *again[4:]], saves) == (0, 0, MIB, MIB)


def test_a_plan_counts_no_block_and_no_time_of_what_is_left():
    """After the last block that is not kept, and in calls that are left: none of it is managed."""
    trace = trace_of_calls()
    options = {"keep": Option(MIB, 0.25), "disk": Option(0, 0.5, 0, MIB)}
    blocks = tuple(replace(each, options=options) for each in trace.blocks)
    small = tuple(replace(each, small_bytes=100) for each in trace.regions)
    trace = replace(trace, blocks=blocks, regions=small)
    choices = [REGION, REGION, "keep", "keep", "keep", "disk", *["keep"] * 5]
    solution = follow(trace, ("keep", *choices), Windows(0, 0))
    assert solution.left_after == 7
    plan = plan_of(1 << 30, trace, solution, 0)
    (held,), (calls,) = plan.classes, plan.regions
    assert plan.left_after == 3, "0 and 3, which calls are given, and 6, which moves"
    assert held.seconds == 0.25 + 0.25 + 0.5
    assert calls.choices == ((REGION, 1), ("left", 1), ("once", 1), ("left", 1))
    assert calls.left_bytes == (MIB + 100, 3 * MIB + 100, 0, 3 * MIB + 100)
    blocks = (*blocks[:11], replace(blocks[11], group="larger", nbytes=20 * MIB))
    plan = plan_of(1 << 30, replace(trace, blocks=blocks), solution, 0)
    assert [each.name for each in plan.classes] == ["larger", ""], "the largest one first"


def test_as_few_whole_calls_as_the_budget_allows():
    trace, windows = trace_of_calls(), Windows(0, 0)
    peaks, choices = [], []
    for count in range(5):
        again = {at for each in trace.regions[:count] for at in each.members}
        choices.append(tuple(REGION if at in again else "keep" for at in range(12)))
        found = follow(trace, choices[-1], windows)
        peaks.append(found.forecast.peak_bytes)
    assert peaks[0] > peaks[1] > peaks[2] >= peaks[3] >= peaks[4]
    for budget in peaks:
        found = whole_calls(trace, budget, windows)
        fewest = next(at for at, peak in enumerate(peaks) if peak <= budget)
        assert found.choices == choices[fewest] and found.fits
    assert whole_calls(trace, peaks[-1] - 1, windows) is None


def solving_of(choices, trace):
    solving = Solving((0, 0), {})
    found = follow(trace, choices, Windows(0, 0))
    solving.found = trace, found
    solving.take()
    return solving


def test_the_plan_whose_steps_took_the_least_time_is_followed_again():
    trace = trace_of_calls()
    first, second = ("keep",) * 12, ("disk", *["keep"] * 11)
    solving = solving_of(first, trace)
    solving.timed(StepFigures(0, 1.0))
    assert not solving.is_new
    solving.found = trace, replace(solving.taken[1], choices=second)
    solving.take()
    solving.timed(StepFigures(0, 1.04))
    assert not solving.is_new, "that much is noise"
    solving.timed(StepFigures(0, 1.2))
    assert solving.is_new and solving.found[1].choices == first
    assert solving.measured is None, "the steps of the second are still those that are followed"
    solving.take()
    assert solving.measured == StepFigures(0, 1.0)
    solving.timed(StepFigures(0, 2.0))
    assert not solving.is_new, "the other one was left for good"
    trace, solution = solving.taken
    solving.found = trace, replace(solution, windows=Windows(MIB, MIB))
    solving.take()
    assert solving.measured is None, "other windows take another time"


def test_what_was_timed_is_forgotten_once_the_trace_changed():
    trace = trace_of_calls()
    solving = solving_of(("keep",) * 12, trace)
    solving.timed(StepFigures(0, 1.0))
    budget = 1 << 40
    solving.begin(trace, budget)
    solving.wait()
    solving.found = (solving.found[0], solving.taken[1])
    solving.take()
    assert solving.measured is not None
    solving.begin(replace(trace, links=Links(1.0, 1.0)), budget)
    solving.wait()
    solving.found = (solving.found[0], solving.taken[1])
    solving.take()
    assert solving.measured is None


def test_a_plan_that_exceeded_the_budget_is_not_followed_again():
    trace = trace_of_calls()
    solving = solving_of(("keep",) * 12, trace)
    solving.timed(StepFigures(0, 1.0))
    solving.give_up(("keep",) * 12)
    solving.found = trace, replace(solving.taken[1], choices=("disk", *["keep"] * 11))
    solving.take()
    solving.timed(StepFigures(0, 2.0))
    assert not solving.is_new


@pytest.mark.parametrize("seconds", [0.1, 9.0])
def test_whole_calls_are_tried_once_unless_they_are_predicted_to_take_long(seconds):
    trace = trace_of_calls(seconds)
    solving = solving_of(("disk",) * 3 + ("keep",) * 9, trace)
    solving.timed(StepFigures(0, 1.0))
    budget = follow(trace, (REGION,) * 12, Windows(0, 0)).forecast.peak_bytes
    moved = solving.taken[1].forecast.step_seconds
    tried = solving.try_whole_calls(budget + 8 * MIB)
    assert tried == (seconds < 1), moved
    assert not solving.try_whole_calls(budget + 8 * MIB)
    if tried:
        assert solving.is_new and REGION in solving.found[1].choices
        solving.take()
        assert solving.is_trying
        trial, solving.found = solving.taken, (trace, solving.taken[1])
        solving.take()
        assert not solving.is_trying, "another plan is followed instead"
        solving.found = trial
        solving.take()
        solving.end_trial()
        assert solving.found[1].choices == ("disk",) * 3 + ("keep",) * 9 and not solving.is_trying


def test_whole_calls_are_tried_again_for_another_trace_and_never_if_they_are_the_plan():
    trace, every = trace_of_calls(), tuple(REGION if at % 3 else "keep" for at in range(12))
    held = follow(trace, every, Windows(0, 0)).forecast.peak_bytes
    fewest = whole_calls(trace, held, Windows(0, 0)).choices
    assert not solving_of(fewest, trace).try_whole_calls(held)
    solving = solving_of(("disk",) * 3 + ("keep",) * 9, trace)
    solution = solving.taken[1]
    assert solving.try_whole_calls(held + 8 * MIB)
    for again, tries in ((trace, False), (replace(trace), True)):
        solving.found = trace, solution
        solving.take()
        solving.begin(again, 1 << 30)
        solving.wait()
        solving.found = again, solution
        solving.take()
        assert solving.try_whole_calls(held + 8 * MIB) is tries


def test_a_plan_that_was_tried_stays_only_if_it_is_faster():
    trace = trace_of_calls(0.1)
    before = ("disk",) * 3 + ("keep",) * 9
    for seconds in (0.99, 1.01):
        solving = solving_of(before, trace)
        solving.timed(StepFigures(0, 1.0))
        whole = follow(trace, (REGION,) * 12, Windows(0, 0))
        assert solving.try_whole_calls(whole.forecast.peak_bytes + 8 * MIB)
        solving.take()
        solving.timed(StepFigures(0, seconds))
        assert solving.is_new is (seconds > 1)
        assert (solving.found[1].choices == before) is (seconds > 1)


@pytest.mark.parametrize("are_alike", mostly_long([True, False], False))
def test_steps_are_not_recorded_of_a_plan_that_is_tried_or_was_timed(monkeypatch, are_alike):
    """On an accelerator; its allocator knows the peak. A plan of whose steps no two are alike is tried for a
    few."""
    monkeypatch.setattr("backstash._budget.solving._TRIED", 100.0)
    is_on, times = [], iter([1e-6, 2e-6])
    timed, try_whole_calls = Solving.timed, Solving.try_whole_calls

    def time(self, measured):
        timed(self, replace(measured, step_seconds=next(times)))

    monkeypatch.setattr(Solving, "timed", time)
    tries = []
    monkeypatch.setattr(
        Solving, "try_whole_calls", lambda *args: tries.append(try_whole_calls(*args)) or tries[-1]
    )
    for name in ("start", "stop"):
        change = getattr(StepRecording, name)

        def noted(self, change=change):
            change(self)
            is_on.append(self.is_on)

        monkeypatch.setattr(StepRecording, name, noted)
    follow_step = StepShape.follow

    def follows_another(self, *args):
        """A plan that is tried counts other saves than the plan before."""
        follow_step(self, *args)
        if tries:
            self.note_alike(EndedStep(False, 0, 1, 1, True))

    monkeypatch.setattr(StepShape, "follow", follows_another)
    is_alike = StepShape.is_alike
    monkeypatch.setattr(
        StepShape,
        "is_alike",
        lambda self, *args, **kwargs: (are_alike or not tries) and is_alike(self, *args, **kwargs),
    )
    torch.manual_seed(0)
    net = model()
    stash = stash_on(CountedDevice(), budget=SAVED * 6 // 10, min_bytes=0, host="1GiB")
    stash.recompute(*list(net)[:-2])  # the last calls are unmanaged
    true, plans = step(net, Stash()), []
    for _ in range(80):
        is_on.clear()
        assert all(map(torch.equal, step(net, stash), true))
        plans.append(stash.plan)
        if tries and is_on:
            assert not is_on[-1], "of the plan that was tried, or of the one before"
            if plans[-1].measured is not None:
                break
    assert next(times, None) == (None if are_alike else 2e-6), "whether both plans were timed"
    assert tries == [True] and plans[-1].measured.step_seconds == 1e-6
    assert plans[-1].plain.step_seconds < 1e-6, "no more than a step under the plan"
    stash.close()


def test_the_blocks_of_left_calls_have_no_choice():
    """Only the others are seen."""
    choices = Choices([("m.* erf #0 1 B", [("left", 2), ("disk", 1), ("keep", 1)])])
    assert [choices.next("m.* erf #0 1 B") for _ in range(2)] == ["disk", "keep"]
    only = Choices([("m.* erf #0 1 B", [("left", 2)])])
    assert only.next("m.* erf #0 1 B") == "keep", "a call that was to be left, and is not"
