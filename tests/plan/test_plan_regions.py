"""Modules that may run again as a whole, under a plan that decides how many of them do."""

import gc
import json
import pickle
import random
import time
import weakref
from dataclasses import replace

import pytest
import torch
import torch.nn.modules.module as module_hooks
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

import backstash._budget.first_steps
import backstash._budget.follower
import backstash._budget.planner
import backstash._recompute.call as calls
import backstash._recompute.found_modules as found_modules
import backstash._recompute.region as regions
import backstash._saved.held
from backstash import Stash
from backstash._plan.choices import Choices
from backstash._plan.regions import ONCE, Regions
from backstash._plan.table import REGION
from backstash._plan.trace import Links
from backstash._recompute.naming import largest_modules
from backstash._recompute.replay import Values
from backstash._torch.dispatch import dispatch_modes
from backstash._torch.hook_stack import current_pair
from backstash.errors import StashClosedError, StashWarning
from backstash.plan import Plan
from counted_memory import MIB, OTHER, CountedMemory
from long_tests import mostly_long, takes_long

LAYERS = 8
SAVED = LAYERS * 4 * MIB  # of each layer: its input, and three blocks that only it saves


class Layer(nn.Module):
    """Cannot be packed; what it is given is saved, too."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(512))

    def forward(self, x):
        return torch.erf(torch.erf(torch.erf(x * self.scale) * 1.5) * 1.5) + x


@pytest.fixture
def memory(monkeypatch):
    """In addition a slow disk. What is recomputed of a module is all of it: see test_plan_cuts."""
    monkeypatch.setattr("backstash._plan.regions.cuts_of", lambda graph, nbytes: [])
    for where in (backstash._budget.planner, backstash._budget.first_steps):
        monkeypatch.setattr(where, "links_of", lambda records: Links(2e6, 2e6))
    counted = CountedMemory(monkeypatch, inflight="2MiB", prefetch="2MiB")
    yield counted
    counted.close()


def model(layer=Layer, layers=LAYERS):
    return nn.Sequential(*(layer() for _ in range(layers)))


def step(net, stash, seed=0, rows=512):
    x = torch.randn(rows, 512, generator=torch.Generator().manual_seed(seed))
    with stash:
        loss = net(x * 2).sum()
    return [loss.detach(), *torch.autograd.grad(loss, list(net.parameters()))]


def same(left, right):
    return all(map(torch.equal, left, right))


def settle(net, stash, steps=10):
    """Run until the plan's steps were measured, and another one left it as it was."""
    true, before = step(net, Stash()), None
    for _ in range(steps):
        assert same(step(net, stash), true)
        plan = stash.plan
        if plan.measured is not None and before is not None and plan.predicted == before.predicted:
            break
        before = plan if plan.measured is not None else None
    return plan


def count(plan, name):
    return sum(n for each in plan.regions for choice, n in each.choices if choice == name)


def test_a_plan_decides_how_many_run_again(memory, tmp_path):
    net, budget = model(), OTHER + SAVED // 2 + 8 * MIB
    stash = memory(budget=budget, disk=tmp_path)
    true = step(net, Stash())
    with stash.recompute(*net):
        again = []
        for number in range(10):
            before, memory.peaks[0] = stash.stats().recomputed_bytes, 0
            assert same(step(net, stash), true)
            assert memory.peaks[0] <= budget, number
            again.append(stash.stats().recomputed_bytes - before)
            plan = stash.plan
    assert again[:3] == [0, 0, 0], "while steps are measured, what they save is held"
    assert plan.state == "planned"
    assert 1 <= count(plan, "region") < LAYERS
    assert again[-1] == sum(each.nbytes for each in plan.regions) > 0


def test_small_tensors_that_a_region_frees_are_in_the_trace(memory, tmp_path):
    """Of 32 KiB, which are no blocks: in each of four steps one is saved, and once more."""

    class Small(Layer):
        def forward(self, x):
            state = x[:16]
            for _ in range(4):
                state = torch.tanh(state * 1.5)
                state = state * state
            return super().forward(x) + state.sum()

    net = model(Small, 3)
    stash = memory(disk=tmp_path, budget=OTHER + 10 * MIB, min_bytes="64KiB")
    with stash.recompute(*net):
        plan = settle(net, stash, steps=5)
    assert plan.trace.regions
    first, *others = (each.small_bytes for each in plan.trace.regions)
    assert first == 0, "no gradient flows through what it makes of its input"
    assert others == [4 * 16 * 512 * 4] * 2
    assert (
        replace(plan.trace, regions=())
        != plan.trace
        == type(plan.trace).from_dict(plan.trace.as_dict())
    )


def test_small_tensors_that_others_hold_are_not_counted_as_freed(memory, tmp_path):
    """A result that the next module is given is that one's input, and held by it."""

    class Small(Layer):
        def forward(self, x):
            return torch.tanh(super().forward(x)[:16])

    class Given(Layer):
        def forward(self, x):
            y = torch.sigmoid(x * 1.5)
            return super().forward(x.repeat(32, 1)) + (y * y).sum()

    net = nn.Sequential(*(part for _ in range(2) for part in (Small(), Given())))
    stash = memory(disk=tmp_path, budget=OTHER + 12 * MIB, min_bytes="64KiB")
    with stash.recompute(*net):
        plan = settle(net, stash, steps=5)
    found = {each.name + str(each.index): each.small_bytes for each in plan.trace.regions}
    assert {found[f"*{at}"] for at in (0, 2)} == {0}, "the next one's input"
    assert {found[f"*{at}"] for at in (1, 3)} == {16 * 512 * 4}


def test_what_a_replay_takes_is_measured(memory, tmp_path, monkeypatch):
    def slower(values, op, run=Values.run):
        time.sleep(0.01)
        run(values, op)

    monkeypatch.setattr(Values, "run", slower)
    net, stash = model(layers=3), memory(budget=OTHER + 10 * MIB, disk=tmp_path)
    with stash.recompute(*net):
        trace = settle(net, stash, steps=5).trace
        assert trace.regions and all(each.use_seconds >= 0.03 for each in trace.regions)


def test_what_a_replay_that_is_compared_leaves_free_is_not_the_step_s(
    memory, tmp_path, monkeypatch
):
    """An allocator keeps what it took; else every plan would count it."""
    stash, free = memory(budget=OTHER + SAVED // 2 + 8 * MIB, disk=tmp_path), [0]
    compared = []

    def leaving(*given, replay=calls.replay):
        if stash._planner.follower.choices is None:
            free[0] += 2 * MIB
            compared.append(1)
        return replay(*given)

    monkeypatch.setattr(calls, "replay", leaving)
    memory.other = lambda: OTHER + free[0]
    stash._planner._guard.trim = lambda: free.__setitem__(0, 0)
    net, held = model(), []
    with stash.recompute(*net):
        for number in range(6):
            step(net, stash)
            if number == 1:
                held.append(free[0])
            _ = stash.plan
        assert held == [0] and compared
        assert max(each.other_bytes for each in stash.plan.trace.moments) < OTHER + 5 * MIB
        assert all(each.use_seconds > 0 for each in stash.plan.trace.regions)


@takes_long
def test_gates_of_a_cell_are_freed_and_recomputed(memory, tmp_path):
    """Four tensors in one storage, each with a version counter of its own, and changed one after the other."""

    class Unrolled(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell = nn.LSTMCell(128, 128)

        def forward(self, x):
            state, out = None, []
            for _ in range(4):
                state = self.cell(x, state)
                out.append(state[0])
            return torch.stack(out).sum(0)

    torch.manual_seed(0)
    net = nn.Sequential(*(Unrolled() for _ in range(4)))

    def run(stash):
        net.zero_grad()
        with stash:
            loss = net(torch.linspace(-1, 1, 512 * 128).view(512, 128)).sum()
        loss.backward()
        return [each.grad.clone() for each in net.parameters()]

    true = run(Stash())
    stash = memory(budget=OTHER + 12 * MIB, disk=tmp_path)
    with stash.recompute(*net):
        for _ in range(10):
            assert same(run(stash), true)
            plan = stash.plan
    assert count(plan, "region") >= 1
    assert not any("runs again" in each for each in stash.stats().left)


def test_what_fits_runs_once(memory, tmp_path):
    net, stash = model(), memory(budget=OTHER + 4 * SAVED, disk=tmp_path)
    with stash.recompute(*net):
        plan = settle(net, stash)
    assert plan.state == "left alone" and count(plan, "region") == 0
    assert stash.stats().recomputed_bytes == 0


def test_a_plan_with_regions_is_followed_from_a_file(memory, tmp_path):
    net, budget = model(), OTHER + SAVED // 2 + 8 * MIB
    stash = memory(budget=budget, disk=tmp_path)
    with stash.recompute(*net):
        plan = replace(settle(net, stash), left_after=None)
    stash.close()
    path = tmp_path / "plan.json"
    plan.save(path)
    assert Plan.load(path) == plan and count(plan, "region")
    assert "*, as a whole: " in str(plan)
    older = json.loads(path.read_text())
    del older["regions"]
    assert Plan.from_dict(older).regions == ()

    again, true = memory(plan=path, disk=tmp_path), step(net, Stash())
    with again.recompute(*net):
        for number in range(3):
            before, memory.peaks[0] = again.stats(), 0
            assert same(step(net, again), true)
            after = again.stats()
            assert after.recomputed_bytes - before.recomputed_bytes == sum(
                each.nbytes for each in plan.regions
            )
            for each in plan.classes:  # what is held until a forward was compared, is none of them
                held = sum(n for name, n in each.choices if name not in ("region", "left"))
                assert again._planner.follower.choices._encountered[each.name] == held
            if number:  # in the first, each is tried first, and what it saves moves meanwhile
                assert after.written_bytes == before.written_bytes
                assert memory.peaks[0] <= budget


class Ends(nn.Module):
    """Its last operation saves its result, which the next one saves as its input."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(512))

    def forward(self, x):
        return torch.exp(-((torch.erf(torch.erf(x * self.scale)) * self.scale).square()))


def test_what_something_outside_the_region_saves_too_is_not_freed(memory, tmp_path):
    net, budget = model(Ends), OTHER + SAVED // 2 + 8 * MIB
    stash = memory(budget=budget, disk=tmp_path)
    with stash.recompute(*net):
        plan = settle(net, stash, steps=12)
        assert count(plan, "region")
        assert [len(each) for each in plan.regions[0].stays] == [1] * (LAYERS - 1) + [0]
        known = {each.name: each.blocks for each in plan.classes}
        limits, lower = [], stash._planner._limits.lower_resident
        stash._planner._limits.lower_resident = lambda limit: (limits.append(limit), lower(limit))
        memory.peaks[0] = 0
        step(net, stash)
    assert memory.peaks[0] <= budget
    assert not limits, "no block of it was of a class that the plan does not know"
    assert sum(known.values()) == sum(len(each.group) > 0 for each in plan.trace.blocks)


def test_runs_of_one_module_are_distinguished_by_their_turns(memory, tmp_path):
    layer = Layer()
    net, budget = nn.Sequential(*[layer] * LAYERS), OTHER + SAVED // 2 + 8 * MIB
    stash = memory(budget=budget, disk=tmp_path)
    with stash.recompute(layer):
        plan = settle(net, stash)
        memory.peaks[0] = 0
        before = stash.stats().recomputed_bytes
        step(net, stash)
    assert memory.peaks[0] <= budget
    assert 1 <= count(plan, "region") < LAYERS
    assert stash.stats().recomputed_bytes - before == sum(each.nbytes for each in plan.regions)
    assert plan.measured is not None, "a step under it saves what it says"
    kinds = [moment.kind for moment in plan.trace.moments]
    assert kinds.count("free") == kinds.count("save"), "each of the step, and of no other"


class Separate(nn.Module):
    """Saves in modules of its own."""

    def __init__(self):
        super().__init__()
        self.first, self.second = Layer(), Layer()

    def forward(self, x):
        return self.second(self.first(x))


def test_blocks_that_no_module_calls_are_numbered_again_in_each_turn(memory, tmp_path):
    """Their paths begin with what is in them: those of the one that runs again are not counted."""
    net, budget = [Separate() for _ in range(LAYERS // 2)], OTHER + SAVED // 2 + 8 * MIB
    stash = memory(budget=budget, disk=tmp_path)

    def loss_of(hold):
        x = torch.randn(512, 512, generator=torch.Generator().manual_seed(0))
        with hold:
            for each in net:
                x = each(x)
        parameters = [each for block in net for each in block.parameters()]
        return torch.autograd.grad(x.sum(), parameters)

    true = loss_of(Stash())
    with stash.recompute(*net):
        for _ in range(10):
            moved = stash.stats().written_bytes
            assert same(loss_of(stash), true)
            plan = stash.plan
    assert 1 <= count(plan, "region") < len(net), plan
    inside = [each for each in plan.classes if each.name.startswith(("first", "second"))]
    assert inside and all(len(net) == sum(n for _, n in each.choices) for each in inside), plan
    planned = sum(
        each.nbytes // len(net) * sum(n for choice, n in each.choices if choice == "disk")
        for each in plan.classes
    )
    assert stash.stats().written_bytes - moved == planned, "none that was to stay"


@pytest.mark.parametrize("late", mostly_long([False, True], True))
def test_a_region_that_is_refused_moves_and_is_planned_for_without(
    memory, tmp_path, monkeypatch, late
):
    """From the first step on or once the plan is followed."""
    net, budget = model(), OTHER + SAVED // 2 + 8 * MIB
    stash = memory(budget=budget, disk=tmp_path)
    true = step(net, Stash())
    with stash.recompute(*net):
        if late:
            assert count(settle(net, stash), "region")
        monkeypatch.setattr(regions, "_reason_against", lambda: "of no reason")
        for _ in range(7):
            memory.peaks[0] = 0
            assert same(step(net, stash), true)
            plan = stash.plan
            assert memory.peaks[0] <= budget
    assert count(plan, "region") == 0, plan
    assert plan.state == "planned"
    assert "not recomputed: of no reason" in stash.stats().left


@takes_long
def test_larger_steps_are_measured_with_none_run_again(memory, tmp_path):
    net, budget = model(), OTHER + SAVED + 8 * MIB
    stash = memory(budget=budget, disk=tmp_path)
    with stash.recompute(*net):
        for rows in [512] * 8 + [1024] * 10 + [512, 700, 100, 1024]:
            memory.peaks[0] = 0
            assert same(step(net, stash, rows=rows), step(net, Stash(), rows=rows))
            plan = stash.plan
            assert memory.peaks[0] <= budget, rows
    assert plan.state == "planned"
    assert sum(each.nbytes for each in plan.trace.blocks) >= 2 * SAVED
    assert count(plan, "region"), plan


class Chance(nn.Module):
    """Random numbers, statistics, and an activation that saves its result."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(64, 64), nn.BatchNorm1d(64)

    def forward(self, x):
        return torch.relu(x + nn.functional.dropout(self.norm(self.linear(x)), 0.3))


@pytest.mark.filterwarnings("ignore::backstash.StashWarning")
@pytest.mark.parametrize("seed", mostly_long(range(4), 0))
def test_plans_that_change_at_every_step_are_exact(memory, tmp_path, monkeypatch, seed):
    draw = random.Random(seed)

    def choose(follower, block, tensor, modules):
        return draw.choice(["", "disk", "pack", "recompute"])

    follower = backstash._budget.follower.Follower
    monkeypatch.setattr(follower, "choose", choose)
    monkeypatch.setattr(follower, "way_of", lambda *_: draw.choice([REGION, ONCE]))

    def stays(regions, name, index):  # of a part that is recomputed
        return frozenset(each for each in range(12) if draw.random() < 0.3)

    monkeypatch.setattr(Regions, "stays", stays)

    def run(net, stash, number):
        torch.manual_seed(number)
        x = torch.randn(draw_rows[number], 64)
        with stash:
            first = net(x).square().sum()
            second = net(x + 1).square().sum() if number % 3 == 0 else first
        if number % 4 == 1:
            first.backward(retain_graph=True)
            second = first
        elif second is not first:
            first.backward()
        second.backward()
        found = [each.grad.clone() for each in net.parameters()]
        net.zero_grad()
        return [first.detach(), *found, *map(torch.clone, net.buffers()), torch.get_rng_state()]

    torch.manual_seed(0)
    net, plain = model(Chance), model(Chance)
    plain.load_state_dict(net.state_dict())
    draw_rows = [draw.randint(16, 256) for _ in range(12)]
    stash = memory(budget=OTHER + MIB, disk=tmp_path)
    with stash.recompute(*net):
        for number in range(len(draw_rows)):
            assert same(run(net, stash, number), run(plain, Stash(), number)), number
    assert stash.stats().recomputed_bytes
    assert stash.stats().blocks == 0


def test_what_a_refused_region_saves_moves(memory, tmp_path):
    """Beyond those that the plan chooses for; where no region is to free a class, the first's choice."""
    stash = memory(budget=OTHER, disk=tmp_path)
    planner = stash._planner
    planner.follower.choices = Choices(
        [("erf #0 1 B", [("keep", 1), ("region", 1)]), ("sin #0 1 B", [("keep", 1)])],
    )
    for operation, beyond in (("erf #0 1 B", "disk"), ("sin #0 1 B", "keep")):
        assert [planner.follower._choose(operation) for _ in range(3)] == ["keep", beyond, beyond]


def test_what_the_plan_does_not_know_runs_again_unless_it_was_measured():
    regions = Regions()
    regions.note_name("seen.*")
    regions.follow({"some.*": ["region", "once"]}, {("some.*", 1): frozenset([3])}, {})
    assert regions.runs_again("new.*", 5)
    assert not regions.runs_again("seen.*", 0)
    assert [regions.runs_again("some.*", at) for at in range(3)] == [True, False, False]
    assert regions.stays("some.*", 1) == {3} and not regions.stays("some.*", 0)


def test_a_step_without_a_region_does_not_say_that_it_cannot_run_again():
    regions = Regions()
    regions.follow({"some.*": ["region"]}, {}, {})
    regions.begin_step()
    assert regions.can_be_followed(()), "none began in the step before"
    regions.begin("some.*")
    regions.begin_step()
    assert not regions.can_be_followed(()), "one did, and is not among those that can"


class Force(nn.Module):
    """Takes a gradient of its own in the middle, of a graph that the rest of the step goes back through."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(
            torch.randn(512, 512, generator=torch.Generator().manual_seed(1)) / 30
        )

    def forward(self, x):
        with torch.enable_grad():
            place = x if x.requires_grad else x.requires_grad_()
            energy = torch.erf(place @ self.weight) * (x.detach() > 0)
            (force,) = torch.autograd.grad(energy.sum(), place, create_graph=True)
        return torch.erf(x + force)


def test_what_a_gradient_in_a_forward_saves_is_held(monkeypatch):
    """It may be what was handed out to that backward, which lies elsewhere in memory each time."""
    tasks, made = [], backstash._saved.held.Held.__init__

    def held(self, *given):
        tasks.append(torch._C._current_graph_task_id())
        made(self, *given)

    monkeypatch.setattr(backstash._saved.held.Held, "__init__", held)
    net, stash = nn.Sequential(Force(), Force()), Stash(min_bytes=0)
    true = step(net, Stash())
    with stash.recompute(*net):
        for _ in range(3):
            assert same(step(net, stash), true)
    assert len(tasks) > 6 and set(tasks) == {-1}


def test_a_forward_that_another_step_began_with_is_not_recorded():
    regions = Regions()
    forward = regions.record("some.*", 0)
    assert regions.is_recorded(forward)
    regions.take()
    assert not regions.is_recorded(forward)
    regions.record("some.*", 0)
    assert not regions.is_recorded(forward)


@pytest.mark.filterwarnings("ignore::backstash.StashWarning")
@pytest.mark.parametrize("options", [{}, {"budget": OTHER + 4 * MIB}, {"budget": OTHER + 12 * MIB}])
def test_modules_that_take_a_gradient_in_their_forward(memory, tmp_path, options):
    net = nn.Sequential(*(Force() for _ in range(3)))
    true = step(net, Stash())
    stash = memory(disk=tmp_path, **options)
    with stash.recompute(*net):
        for number in range(7 if options else 2):
            assert same(step(net, stash), true), number
            _ = stash.plan


class Block(nn.Module):
    """A module in a module, as the blocks of real models are."""

    def __init__(self):
        super().__init__()
        self.layer = Layer()

    def forward(self, x):
        return self.layer(x)


def hooks_of_all_modules():
    return len(module_hooks._global_forward_pre_hooks) + len(module_hooks._global_forward_hooks)


def plan_only(monkeypatch, *names):
    """Let plans choose nothing else, however long what takes on a busy machine."""
    solving = backstash._budget.solving
    solve = solving.solve_with_cuts

    def solve_for(trace, target, **given):
        blocks = [
            replace(each, options={name: of for name, of in each.options.items() if name in names})
            for each in trace.blocks
        ]
        regions = trace.regions if "region" in names else ()
        return solve(replace(trace, blocks=tuple(blocks), regions=regions), target, **given)

    monkeypatch.setattr(solving, "solve_with_cuts", solve_for)


@pytest.fixture
def only_regions(monkeypatch):
    plan_only(monkeypatch, "keep", "region")


def test_modules_that_nobody_named_are_recomputed_where_not_everything_fits(
    memory, tmp_path, only_regions
):
    net, budget = model(Block), OTHER + SAVED // 2 + 8 * MIB
    stash = memory(budget=budget, disk=tmp_path)
    true = step(net, Stash())
    for number in range(10):
        before, memory.peaks[0] = stash.stats().recomputed_bytes, 0
        assert same(step(net, stash), true)
        assert memory.peaks[0] <= budget * 1.02, number
        plan = stash.plan
    assert memory.peaks[0] <= budget
    assert 1 <= count(plan, "region") < LAYERS
    again = stash.stats().recomputed_bytes - before
    assert again == sum(each.nbytes for each in plan.regions) > 0
    path = tmp_path / "plan.json"
    plan.save(path)
    stash.close()
    loaded = memory(plan=path, disk=tmp_path)
    for _ in range(3):
        before, memory.peaks[0] = loaded.stats().recomputed_bytes, 0
        assert same(step(net, loaded), true)
    assert loaded.stats().recomputed_bytes - before == again
    assert memory.peaks[0] <= budget
    loaded.close()
    assert not hooks_of_all_modules()


class Several(nn.Module):
    """Its blocks are called by the program, and not by a module."""

    def __init__(self, blocks):
        super().__init__()
        self.blocks = blocks

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def test_blocks_that_the_program_calls_itself_are_found(memory, tmp_path, only_regions):
    net, budget = Several(model(Block)), OTHER + SAVED // 2 + 8 * MIB
    stash = memory(budget=budget, disk=tmp_path)
    true = step(net, Stash())
    for _ in range(6):
        assert same(step(net, stash), true)
        plan = stash.plan
    assert 1 <= count(plan, "region") < LAYERS
    assert stash.stats().recomputed_bytes


class Drops(nn.Module):
    """Its child saves noise, which no operation with a gradient has made, and which is packed later."""

    def __init__(self):
        super().__init__()
        self.layer, self.dropout = Layer(), nn.Dropout(0.3)

    def forward(self, x):
        return x + torch.erf(self.dropout(self.layer(x)))


def test_what_is_packed_late_belongs_to_the_module_that_saved_it(memory, tmp_path):
    """Or a plan would not know it in a forward that is not recorded."""
    net = model(Drops, 4)
    stash = memory(budget=OTHER + 2 * SAVED // 5, disk=tmp_path)
    with stash.recompute(*net):
        for _ in range(9):
            step(net, stash)
            _ = stash.plan
    noise = [each.group for each in stash.plan.trace.blocks if ".dropout no op" in each.group]
    assert len(noise) == 4
    assert not stash._planner._shape.is_unknown


def test_a_root_is_chosen_before_what_is_in_it():
    block = Block()
    assert largest_modules(block, {"": 1, "layer": 30}, 8 * 31) == [block]
    assert largest_modules(block, {"": 1, "layer": 30}, 31) == []


def test_of_modules_without_submodules_only_recurrent_layers_are_chosen():
    net = nn.Sequential(nn.LSTM(4, 4), nn.Linear(4, 4), nn.GRU(4, 4), Layer(), nn.LSTMCell(4, 4))
    saved = {str(at): 8 for at in range(len(net))}
    assert largest_modules(net, saved, 8 * 8) == [net[0], net[2], net[4]]
    assert largest_modules(net, {"0": 40, "1": 40}, 80) == [net[0]]
    assert largest_modules(net, {"0": 41, "1": 39}, 80) == []


@pytest.mark.parametrize("options", [{"recompute": False}, {"fits": True}, {"named": True}])
def test_no_module_gets_hooks_where_none_needs_to_be_recomputed(memory, tmp_path, options):
    net, budget = model(Block), OTHER + SAVED // 2 + 8 * MIB
    if options.pop("fits", False):
        budget = OTHER + 2 * SAVED
    named = options.pop("named", False)
    if named:
        options["recompute"] = [net[0]]
    stash = memory(budget=budget, disk=tmp_path, **options)
    true = step(net, Stash())
    for _ in range(5):
        assert same(step(net, stash), true)
        assert not hooks_of_all_modules()
        assert not any(each._forward_pre_hooks for each in net[1:].modules())
        assert bool(net[0]._forward_pre_hooks) is named
        _ = stash.plan
    assert not stash.plan.regions or named


def test_the_hooks_go_where_the_plan_recomputes_no_module(memory, tmp_path, monkeypatch):
    plan_only(monkeypatch, "keep", "disk")
    net, stash = model(Block), memory(budget=OTHER + SAVED // 2 + 8 * MIB, disk=tmp_path)
    had = []
    for _ in range(6):
        step(net, stash)
        had.append(hooks_of_all_modules())
        assert not any(each._forward_pre_hooks for each in net.modules())
        _ = stash.plan
    assert had[0] == 2 and not had[-1]
    assert stash.plan.state == "planned"


@pytest.mark.parametrize("changes", [range(8), range(6, 8)])
def test_what_plain_pytorch_does_not_save_may_change_before_backward(memory, tmp_path, changes):
    """In a module that nobody named; also where it changes in none of the steps that are measured."""

    class Shifted(Block):
        def __init__(self):
            super().__init__()
            self.shift = nn.Parameter(torch.zeros(512, 512))

        def forward(self, x):
            return super().forward(x + self.shift)  # of which neither is saved

    def changed(stash, number):
        with stash:
            out = net(torch.ones(512, 512)).sum()
        with torch.no_grad():
            net[3].shift.add_(int(number in changes))
        grads = torch.autograd.grad(out, list(net.parameters()))
        with torch.no_grad():
            net[3].shift.sub_(int(number in changes))
        return [out.detach(), *grads]

    net, stash = model(Block), memory(budget=OTHER + SAVED // 2 + 8 * MIB, disk=tmp_path)
    net[3] = Shifted()
    true = changed(Stash(), 0)
    for number in range(8):
        assert same(changed(stash, number), true)
        _ = stash.plan
    found = {each.index for each in stash.plan.trace.regions}
    assert found >= {1, 2, 3, 4, 5, 6, 7}  # in the third from the sum on, which is held
    assert any("does not save" in reason for reason in stash.stats().left)


def test_modules_that_were_found_are_let_alone_outside_of_the_stash_s_contexts(
    memory, tmp_path, only_regions
):
    net, stash = model(Block), memory(budget=OTHER + SAVED // 2 + 8 * MIB, disk=tmp_path)
    for _ in range(8):
        step(net, stash)
        _ = stash.plan
    assert hooks_of_all_modules() == 2 and count(stash.plan, "region")
    before = stash.stats()
    true = step(net, Stash())
    out = net(torch.ones(512, 512)).sum()
    out.backward()
    pickle.loads(pickle.dumps(net.state_dict()))
    torch.jit.script(nn.Sequential(nn.Linear(2, 2)))
    assert stash.stats().saves == before.saves
    assert stash.stats().recomputed_bytes == before.recomputed_bytes
    assert same(step(net, stash), true)
    assert stash.stats().recomputed_bytes > before.recomputed_bytes
    del stash
    gc.collect()
    assert not hooks_of_all_modules()


def test_a_stash_that_is_closed_in_the_forward_of_a_found_module_leaves_no_tape(memory, tmp_path):
    net, stash = model(Block), memory(budget=OTHER + SAVED // 2 + 8 * MIB, disk=tmp_path)
    for _ in range(2):
        step(net, stash)
    handle = net[5].layer.register_forward_pre_hook(lambda *_: stash.close())
    with pytest.raises(StashClosedError):
        step(net, stash)
    handle.remove()
    assert not dispatch_modes() and not hooks_of_all_modules()
    gc.collect()


@pytest.mark.parametrize("is_found", [False, True])
def test_a_forward_leaves_nothing_to_the_garbage_collector(is_found, memory, tmp_path, monkeypatch):
    """What it holds would be released late, and count as memory until then."""
    begun = []
    begin, begin_region = calls.Call.__init__, regions.Region.__init__

    def beginning(call, *given, **options):
        begin(call, *given, **options)
        begun.append(weakref.ref(call))

    def of_the_stash(region, *given, **options):
        begin_region(region, *given, **options)
        region.is_found = is_found  # as if the program had not named it

    monkeypatch.setattr(calls.Call, "__init__", beginning)
    monkeypatch.setattr(regions.Region, "__init__", of_the_stash)
    net, stash = model(), memory(budget=OTHER + SAVED // 2 + 8 * MIB, disk=tmp_path)
    with stash.recompute(*net):
        assert count(settle(net, stash), "region") >= 1
        gc.collect()
        gc.disable()
        try:
            for _ in range(4):
                begun.clear()
                step(net, stash)
                assert begun and not any(each() for each in begun)
        finally:
            gc.enable()


def test_the_program_s_hooks_around_a_module_that_begins_a_plan(
    memory, tmp_path, monkeypatch, only_regions
):
    """A plan that recomputes nothing stops looking at modules, in the hook of the first module of a step. That
    module's own pair must be popped nevertheless, or the program's exit would pop it in place of its own."""
    net, stash = model(Block), memory(budget=OTHER + SAVED // 2 + 8 * MIB, disk=tmp_path)
    for _ in range(8):
        step(net, stash)
        _ = stash.plan
    assert hooks_of_all_modules()
    planned, stopped = regions.Region._planned, []

    def stop(region, *given):
        found = planned(region, *given)
        stash._recorder.set_modules(on=False)
        stopped.append(region)
        return found

    monkeypatch.setattr(regions.Region, "_planned", stop)
    x = torch.randn(512, 512, generator=torch.Generator().manual_seed(0))
    with stash:
        with saved_tensors_hooks(lambda each: each.clone(), lambda each: each):
            loss = net(x * 2).sum()
        loss = loss * 2
    assert current_pair() is None and len(stopped) == 1
    loss.backward()
    assert not hooks_of_all_modules() and not found_modules._ending


def test_a_scripted_module_in_a_model_that_is_planned_for(tmp_path):
    torch.manual_seed(0)
    inner = torch.jit.script(nn.Sequential(nn.Linear(64, 64), nn.GELU()))
    net = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), inner, nn.Tanh()) for _ in range(3)))
    x = torch.randn(256, 64)

    def gradients():
        net.zero_grad()
        net(x).square().mean().backward()
        return [each.grad for each in net.parameters()]

    true = gradients()
    with pytest.warns(StashWarning, match="cannot be kept"):
        stash = Stash(budget="1MiB", disk=tmp_path, min_bytes=0)
        for _ in range(5):
            with stash:
                found = gradients()
            assert all(map(torch.equal, found, true))
            assert stash.plan is not None
    stash.close()
