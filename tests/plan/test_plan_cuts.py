"""Parts of a module call that are recomputed, while the rest of what it saves is held."""

import itertools
import random
from dataclasses import replace

import pytest
import torch
from torch import nn

import backstash._budget.first_steps
import backstash._budget.planner
import backstash._budget.solving as solving
import backstash._recompute.call as call
from backstash import Stash
from backstash._plan.cuts import CallGraph, CallOperation, Cut, _Network, cuts_of
from backstash._plan.regions import Forward, traced_regions
from backstash._plan.solve import solve, solve_with_cuts
from backstash._plan.trace import Links, Moment, Option, RegionCut, Trace, TracedBlock
from backstash._recompute.replay import Values
from backstash.errors import UsageError
from counted_memory import MIB, OTHER, CountedMemory
from long_tests import mostly_long


def any_graph(draw):
    """Up to six operations, each of one or two values, that read values before them."""
    operations, values = [], 0
    for _ in range(draw.randint(1, 6)):
        reads = tuple(draw.sample(range(values), min(values, draw.randint(0, 2))))
        makes = tuple(range(values, values + draw.randint(1, 2)))
        values += len(makes)
        operations.append(CallOperation(draw.randint(1, 9), reads, makes))
    saved = draw.sample(range(values), draw.randint(1, values))
    return CallGraph(tuple(operations), tuple(enumerate(saved))), values


def cost_of(graph, held_bytes, price, running):
    """What it costs that these operations run, and all else is held; ``None``: that cannot be."""
    made = {value: at for at, each in enumerate(graph.operations) for value in each.makes}
    for at in running:
        for value in graph.operations[at].reads:
            if made[value] not in running and value not in held_bytes:
                return None
    held = sum(n for value, n in held_bytes.items() if made[value] not in running)
    return sum(graph.operations[at].seconds for at in running) + price * held


@pytest.mark.parametrize("seed", range(40))
def test_a_cut_is_the_cheapest_of_all_choices(seed):
    draw = random.Random(seed)
    graph, _ = any_graph(draw)
    held_bytes = {value: draw.randint(1, 9) for _, value in graph.saves}
    network = _Network(graph, held_bytes)
    for price in (0.1, 0.5, 1.0, 3.0):
        held, running = network.cheapest(price)
        found = cost_of(graph, held_bytes, price, running)
        numbers = range(len(graph.operations))
        every = (
            cost_of(graph, held_bytes, price, set(some))
            for size in range(len(numbers) + 1)
            for some in itertools.combinations(numbers, size)
        )
        assert found == pytest.approx(min(each for each in every if each is not None))
        made = {value: at for at, each in enumerate(graph.operations) for value in each.makes}
        assert held == {value for value in held_bytes if made[value] not in running}


def test_what_is_dear_to_compute_stays_first():
    """A product, and an activation and a norm of its result, all as large."""
    graph = CallGraph(
        (
            CallOperation(1.0, (), (0,)),
            CallOperation(0.01, (0,), (1,)),
            CallOperation(0.02, (1,), (2,)),
        ),
        ((0, 0), (1, 1), (2, 2)),
    )
    (cut,) = cuts_of(graph, dict.fromkeys(range(3), 100))
    assert cut.stays == {0} and cut.part == pytest.approx(0.03 / 1.03)
    assert cuts_of(graph, {}) == (), "nothing is known of its bytes"


def test_two_saves_of_one_value_stay_together():
    graph = CallGraph(
        (CallOperation(1.0, (), (0,)), CallOperation(0.01, (0,), (1,))), ((0, 0), (3, 0), (4, 1))
    )
    assert [cut.stays for cut in cuts_of(graph, {0: 100, 4: 100})] == [{0, 3}]


def test_a_forward_that_saved_something_else_has_no_cuts():
    graph = CallGraph(
        (CallOperation(1.0, (), (0,)), CallOperation(0.01, (0,), (1,))), ((0, 0), (1, 1))
    )
    blocks = [TracedBlock("class", 100, {"keep": Option(100)}) for _ in range(3)]
    for saved, cuts in (({0: 5, 1: 6}, 1), ({0: 5, 1: 6, 2: 7}, 0)):
        forward = Forward("a", 0, saved=saved, graph=graph, seconds=1.0, can_run_again=True)
        (region,) = traced_regions([forward], {}, blocks, {5: 0, 6: 1, 7: 2})
        assert len(region.cuts) == cuts
    assert region.cut_at(1) is region


def test_a_replay_takes_what_its_operations_took():
    """A forward of the same name with twice the bytes takes twice as long. The forward's own time counts only
    where no replay was timed."""
    graph = CallGraph(
        (CallOperation(1.5, (), (0,)), CallOperation(0.5, (0,), (1,))), ((0, 0), (1, 1))
    )
    blocks = [TracedBlock("class", 100, {"keep": Option(100)}) for _ in range(4)]
    timed = Forward("a", 0, saved={0: 0}, graph=graph, nbytes=100, seconds=5.0, can_run_again=True)
    larger = Forward("a", 1, saved={0: 1, 1: 2}, nbytes=200, seconds=5.0, can_run_again=True)
    other = Forward("b", 0, saved={0: 3}, nbytes=100, seconds=5.0, can_run_again=True)
    index = {at: at for at in range(4)}
    found = traced_regions([larger, timed, other], {}, blocks, index)
    assert [each.use_seconds for each in found] == [4.0, 2.0, 5.0]


def cut_trace():
    """A call whose first block is dear to compute, and it is dear to move. Between forward and backward the
    step takes most."""
    options = {"keep": Option(MIB), "disk": Option(0, 50.0, 50.0, MIB)}
    last = TracedBlock("last", 1, {"keep": Option(1)})
    blocks = (*(TracedBlock(f"class {at}", MIB, options) for at in range(2)), last)
    moments = [Moment("save", at, 0.1, MIB * (at == 2)) for at in range(3)]
    for at in (2, 1, 0):
        moments += [Moment("use", at, 0.1, 0), Moment("free", at, 0.1, 0)]
    forward = Forward(
        "a",
        0,
        saved={0: 0, 1: 1},
        graph=CallGraph(
            (CallOperation(9.9, (), (0,)), CallOperation(0.1, (0,), (1,))), ((0, 0), (1, 1))
        ),
        seconds=10.0,
        can_run_again=True,
    )
    regions = traced_regions([forward], {}, blocks, {0: 0, 1: 1})
    return Trace(blocks, tuple(moments), Links(1e4, 1e4), regions=regions)


def test_a_part_is_recomputed_where_that_is_cheaper_than_the_whole():
    trace = cut_trace()
    (region,) = trace.regions
    assert region.cuts == (RegionCut((1,), (0,), pytest.approx(0.01), (0,)),)
    part = trace.cut_at((1,)).regions[0]
    assert part.use_seconds == pytest.approx(0.1) and part.stays == (0,) and part.inputs == (0,)
    found = solve_with_cuts(trace, 3 * MIB - 1, windows=(0, 0))
    assert found.fits and found.levels == (1,) and found.choices == ("keep", "region", "keep")
    assert (
        found.forecast.step_seconds
        < solve(trace, 3 * MIB - 1, windows=(0, 0)).forecast.step_seconds
    )
    assert not any(solve_with_cuts(trace, 3 * MIB + 1).levels), "it fits"


def test_cuts_are_written_and_read():
    trace = cut_trace()
    assert Trace.from_dict(trace.as_dict()) == trace
    values = trace.as_dict()
    values["regions"][0]["cuts"][0]["members"] = [7]
    with pytest.raises(UsageError, match="not the trace of a step"):
        Trace.from_dict(values)


class Layer(nn.Module):
    """Several saves of one operation in one module, of which some stay."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(512))

    def forward(self, x):
        for _ in range(3):
            x = torch.erf(torch.erf(x * self.scale) * 1.5) + x
        return x


@pytest.mark.parametrize(
    ("stays", "operations"), mostly_long([({1, 4}, 12.5), ({0, 3, 5, 7}, 8)], ({1, 4}, 12.5))
)
def test_a_part_of_each_module_is_recomputed(monkeypatch, tmp_path, stays, operations):
    """With the same gradients, the classes of what stays as they were measured, and from a file."""
    for where in (backstash._budget.planner, backstash._budget.first_steps):
        monkeypatch.setattr(where, "links_of", lambda records: Links(2e6, 2e6))
    monkeypatch.setattr(
        "backstash._plan.regions.cuts_of",
        lambda graph, nbytes: [Cut(frozenset(stays), 0.5)],
    )

    def part_alone(trace, target, **options):
        levels = (1,) * len(trace.regions)
        return replace(solve(trace.cut_at(levels), target, **options), levels=levels)

    monkeypatch.setattr(solving, "solve_with_cuts", part_alone)
    memory = CountedMemory(monkeypatch, inflight="2MiB", prefetch="2MiB")
    net = nn.Sequential(*(Layer() for _ in range(6)))

    def step(stash):
        x = torch.randn(512, 512, generator=torch.Generator().manual_seed(0))
        with stash:
            loss = net(x * 2).sum()
        return [loss.detach(), *torch.autograd.grad(loss, list(net.parameters()))]

    true = step(Stash())
    stash = memory(budget=OTHER + 22 * MIB, disk=tmp_path)
    with stash.recompute(*net):
        for _ in range(10):
            assert all(map(torch.equal, step(stash), true))
            _ = stash.plan
        plan = stash.plan
        (region,) = plan.regions
        again = [
            at for at, (name, n) in enumerate(region.choices) for _ in range(n) if name == "region"
        ]
        assert again and all(set(region.stays[at]) >= stays for at in again)
        before, run, ran = stash.stats().recomputed_bytes, Values.run, []
        monkeypatch.setattr(Values, "run", lambda *given: (ran.append(given[1]), run(*given)))
        assert all(map(torch.equal, step(stash), true))
        monkeypatch.setattr(Values, "run", run)
        assert stash.stats().recomputed_bytes - before == region.nbytes
        assert len(ran) <= operations * len(again), "what stays is not computed again"
        assert not stash._planner._shape.is_unknown
    stash.close()
    path = tmp_path / "plan.json"
    replace(plan, left_after=None).save(path)
    loaded = memory(plan=path, disk=tmp_path)
    with loaded.recompute(*net):
        for _ in range(2):
            before = loaded.stats().recomputed_bytes
            assert all(map(torch.equal, step(loaded), true))
            assert loaded.stats().recomputed_bytes - before == region.nbytes
            for each in plan.classes:
                held = sum(n for name, n in each.choices if name not in ("region", "left"))
                assert loaded._planner.follower.choices._encountered[each.name] == held, each.name
    loaded.close()


class Gates(nn.Module):
    """Parts of one memory, written and saved one after the other."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4 * 512))

    def forward(self, x):
        one, other, *_ = torch.unsafe_chunk((torch.cat([x] * 4, 1) * self.scale).sin(), 4, 1)
        return torch.sigmoid_(one) * torch.tanh_(other)


@pytest.mark.parametrize(
    ("make", "most_bytes", "has_cuts"), [(Gates, 32 * MIB, False), (Layer, 12 * MIB, True)]
)
def test_a_call_that_saves_parts_of_a_memory_between_writes_has_no_cuts(
    monkeypatch, tmp_path, make, most_bytes, has_cuts
):
    graphs, made = [], call._graph_of
    monkeypatch.setattr(call, "_graph_of", lambda *given: graphs.append(made(*given)) or graphs[-1])
    memory = CountedMemory(monkeypatch, inflight="2MiB", prefetch="2MiB")
    net = nn.Sequential(*(make() for _ in range(4)))
    stash = memory(budget=OTHER + most_bytes, disk=tmp_path)
    with stash.recompute(*net):
        for _ in range(5):
            with stash:
                loss = net(torch.ones(512, 512)).sum()
            loss.backward()
            _ = stash.plan
    stash.close()
    assert graphs and all(bool(each.saves) is has_cuts for each in graphs)
    assert all(each.operations for each in graphs)
