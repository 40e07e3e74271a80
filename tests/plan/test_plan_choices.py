"""Which class a saved tensor is of under a plan, and what is done with one of a size that the plan lacks."""

import itertools

import pytest
import torch
from torch import nn

from backstash import Stash
from backstash._plan.choices import Choices, ClassOf
from counted_memory import MIB, OTHER, CountedMemory
from long_tests import mostly_long

SAVED = 12 * MIB
BUDGET = OTHER + 10 * MIB


@pytest.fixture
def memory(monkeypatch):
    counted = CountedMemory(monkeypatch, inflight="1MiB", prefetch="1MiB")
    yield counted
    counted.close()


def test_a_size_that_is_not_known_is_held_as_the_others_of_its_place_are():
    choices = Choices(
        [
            ("part Erf #0 1.00 MiB", [("disk", 1)]),
            ("part Erf #0 900 KiB", [("keep", 2)]),
            ("part Exp #0 900 KiB", [("pack", 1)]),
        ]
    )
    names = ["1.01 MiB", "1.00 MiB", "899 KiB", "1.30 MiB"]
    assert [choices.next(f"part Erf #0 {size}", of_any_size=True) for size in names] == [
        *("disk", "disk", "keep", "disk")
    ]
    assert choices.next("part Sin #0 1.00 MiB", of_any_size=True) is None
    assert choices.next("part Erf #1 1.00 MiB", of_any_size=True) is None
    assert choices.next("part Erf #0 2.00 MiB") is None
    choices.begin_step()
    assert choices.next("part Erf #0 2.00 MiB", of_any_size=True) == "disk"
    assert choices.next("part Erf #0 1.99 MiB", of_any_size=True) == "keep"


class Expert(nn.Module):
    """Saves as much again as it is given, twice."""

    def forward(self, x):
        return x.erf().erf().sum()


class Mixture(nn.Module):
    """A first part that saves the same at each step, then experts with a new share of the rows."""

    def __init__(self, cuts, parts=16):
        super().__init__()
        self.cuts = cuts
        self.parts = nn.ModuleList(Expert() for _ in range(parts))

    def forward(self, x):
        x = x.erf()
        pieces = torch.split(x, next(self.cuts))
        return sum(part(each * 1) for part, each in zip(self.parts, pieces, strict=True))


def step(net, stash):
    x = torch.linspace(-1, 1, 1 << 20).view(8192, 128).requires_grad_()
    with stash:
        loss = net(x * 2)
    loss.backward()
    return x.grad


def sizes(generator, parts=16):
    """Of the parts of 8192 rows: never the same."""
    while True:
        cuts = torch.randperm(8191, generator=generator)[: parts - 1] + 1
        edges = [0, *cuts.sort().values.tolist(), 8192]
        yield [after - before for before, after in itertools.pairwise(edges)]


def test_experts_whose_rows_change_at_each_step_follow_the_plan(memory, tmp_path, monkeypatch):
    net = Mixture(sizes(torch.Generator().manual_seed(0)))
    plain = Mixture(sizes(torch.Generator().manual_seed(0)))
    stash = memory(budget=BUDGET, disk=tmp_path, recompute=False)
    chosen, choose = [], Choices.next

    def choose_and_note(*arguments, **options):
        chosen.append(choose(*arguments, **options))
        return chosen[-1]

    monkeypatch.setattr(Choices, "next", choose_and_note)
    for _ in range(14):
        assert torch.equal(step(net, stash), step(plain, Stash()))
        assert stash.plan.state in ("measuring", "planned")
    assert len(chosen) >= 100 and set(chosen) == {"keep", "disk"}
    assert memory.peaks[0] <= BUDGET
    # What the windows were not to hold is no room for blocks of other sizes than the plan's.
    limits, lower = [], stash._planner._limits.lower_resident
    monkeypatch.setattr(
        stash._planner._limits, "lower_resident", lambda limit: (limits.append(limit), lower(limit))
    )
    step(net, stash)
    planned = max(stash._planner._limits.unplanned, stash.plan.resident_bytes)
    assert planned in limits


def test_a_class_of_the_module_around_or_of_another_call_is_taken_where_its_own_is_unknown():
    """In a recorded call its input belongs to the called module, and each call is numbered from 0."""
    found = Choices(
        [
            ("blocks.* AddBackward0 #0 1.00 MiB", [("disk", 1), ("keep", 1)]),
            ("other no operation #0 1.00 MiB", [("disk", 1)]),
            ("head no operation #0 3.00 MiB", [("keep", 2)]),
        ]
    )
    assert found.next("blocks.*.first AddBackward0 #0 1.00 MiB") is None, "another program's plan"
    assert found.next("head no operation #0 3.00 MiB") == "keep"
    assert found.next("blocks.*.first AddBackward0 #0 1.00 MiB") == "disk"
    assert found.next("blocks.* AddBackward0 #1 1.00 MiB") == "keep"
    assert found.matched == 3
    for unknown in (
        "blocks.*.first AddBackward0 #1 1.00 MiB",  # all of the class were used
        "blocks.*.first AddBackward0 #0 2.00 MiB",
        "blocks.*.first MulBackward0 #0 1.00 MiB",
        "blocks no operation #0 1.00 MiB",
    ):
        assert found.next(unknown) is None, unknown
    found.begin_step()
    assert found.next("(Block) no operation #3 1.00 MiB") == "disk", (
        "the outermost has its class's name"
    )


def test_a_class_of_the_same_module_comes_before_one_of_the_module_around():
    found = Choices(
        [
            ("(Block) ViewBackward0 #0 1.00 MiB", [("keep", 2)]),
            ("down ViewBackward0 #0 1.00 MiB", [("recompute", 2)]),
        ]
    )
    assert found.next("down ViewBackward0 #0 1.00 MiB") == "recompute"
    assert found.next("down ViewBackward0 #1 1.00 MiB") == "recompute"
    assert found.next("down ViewBackward0 #2 1.00 MiB") == "keep"


def test_saves_are_numbered_from_0_in_each_module_that_the_program_calls():
    """Whether or not its calls have hooks, which are gone where a plan recomputes none."""
    of = ClassOf()
    given = "down", "ViewBackward0", MIB
    names = [of.next(*given, root) for root in (1, 1, 2, 2, 1)]
    assert [name.split(" ")[2] for name in names] == ["#0", "#1", "#0", "#1", "#2"]
    of.begin_again(["down"])
    assert of.next(*given, 1) == of.next(*given, 2) == names[0]


class Called(nn.Module):
    """One of the blocks that a program calls itself."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x):
        return x + self.last(self.first(x.cos()).erf())


@pytest.mark.parametrize("budget_mib", mostly_long([9, 11, 13], 11))
def test_a_program_that_calls_its_blocks_follows_its_plan(
    memory, tmp_path, monkeypatch, budget_mib
):
    """Every block that is not recomputed has a class that the plan knows."""
    torch.manual_seed(0)
    blocks = [Called() for _ in range(8)]
    x = torch.rand(4096, 64)  # 1 MiB

    def step(stash):
        with stash:
            y = x * 1
            for block in blocks:
                y = block(y)
            loss = y.square().mean()
        return torch.autograd.grad(loss, [each for block in blocks for each in block.parameters()])

    true, stash = step(Stash()), memory(budget=OTHER + budget_mib * MIB, disk=tmp_path)
    unknown, following = [], Choices.next

    def recorded(choices, name, **options):
        found = following(choices, name, **options)
        if found is None:
            unknown.append(name)
        return found

    for number in range(16):
        if number == 12:
            monkeypatch.setattr(Choices, "next", recorded)
            monkeypatch.setattr(Choices, "_of_another_module", lambda *_: None)
        assert all(map(torch.equal, step(stash), true))
        _ = stash.plan
    assert stash.plan.state == "planned" and not unknown
    names = {each.name for each in stash.plan.classes if each.nbytes > MIB}
    assert not any(" #2 " in name for name in names), names
