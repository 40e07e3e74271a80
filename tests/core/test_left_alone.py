"""A budget that everything fits in: nothing is done about what is saved, and it is seen when that changes."""

import threading

import pytest
import torch
from torch import nn

from backstash import Stash
from backstash._budget.corrections import Corrections
from backstash._budget.follower import Follower
from backstash._core.admission import FITS
from backstash.errors import InplaceError, StashClosedError
from counted_memory import MIB, OTHER, CountedMemory, Saves
from long_tests import mostly_long, takes_long

LAYERS = 16  # of which each saves 1 MiB
SAVED = LAYERS * MIB
ROOMY = OTHER + 2 * SAVED  # but not for twice as much


@pytest.fixture
def memory(monkeypatch):
    counted = CountedMemory(monkeypatch, inflight="2MiB", prefetch="2MiB", recompute=False)
    yield counted
    counted.close()


def model(layers=LAYERS):
    return nn.Sequential(*(Saves() for _ in range(layers)))


def loss_of(net, stash, rows=512):
    x = torch.linspace(-1, 1, rows * 512).view(rows, 512).requires_grad_()
    with stash:
        return x, net(x * 2).sum()


def step(net, stash, rows=512):
    x, loss = loss_of(net, stash, rows)
    loss.backward()
    return x.grad


def settled(memory, tmp_path, budget=ROOMY, **options):
    """A stash of which everything fits, that measures no more."""
    stash = memory(budget=budget, disk=tmp_path, **options)
    net = model()
    true = step(net, Stash())
    for _ in range(8):
        assert torch.equal(step(net, stash), true)
        if stash.plan.measured is not None:
            break
    assert stash.plan.state == "left alone" and stash.plan.measured is not None
    return stash


def fitting(stash):
    left = stash.stats().left.get(FITS)
    return left.count if left is not None else 0


def test_only_the_first_of_a_step_are_blocks(memory, tmp_path, monkeypatch):
    monkeypatch.setattr(Follower, "fits_unseen", lambda _: False)
    stash = settled(memory, tmp_path)
    before, saves = fitting(stash), stash.stats().saves
    blocks, steps = stash.stats().eligible_bytes, stash._planner._steps
    true = step(model(), Stash())
    for _ in range(5):
        assert torch.equal(step(model(), stash), true)
    saved, left = stash.stats().saves - saves, fitting(stash) - before
    assert saved == 5 * LAYERS
    assert left >= 5 * (LAYERS - 6)
    assert stash.stats().eligible_bytes - blocks == (saved - left) * MIB
    assert stash._planner._steps == steps + 5, "each of them begins, and ends"
    assert stash.stats().blocks == 0


@pytest.mark.parametrize("rows", [512, 100])
def test_what_was_modified_in_place_is_an_error(memory, tmp_path, rows):
    stash = settled(memory, tmp_path)
    x = torch.ones(rows, 512, requires_grad=True)
    before = fitting(stash)
    with stash:
        y = x * 2
        for _ in range(LAYERS):
            y = y.erf()
        last = y
        loss = last.erf().sum()
    assert fitting(stash) > before
    last.detach().add_(1)
    with pytest.raises(InplaceError):
        loss.backward()


@pytest.mark.parametrize("smaller", mostly_long([1, 3], 3))
def test_a_deeper_step_among_others_is_planned_for(memory, tmp_path, smaller):
    """As those of two networks that are trained in turns: none knows from its first block which it is."""
    budget = OTHER + SAVED + 12 * MIB
    stash = settled(memory, tmp_path, budget)
    net, deeper = model(), model(3 * LAYERS)
    true, more = step(net, Stash()), step(deeper, Stash())
    memory.peaks[0] = 0
    for _ in range(10):
        for _ in range(smaller):
            assert torch.equal(step(net, stash), true)
            _ = stash.plan
        assert torch.equal(step(deeper, stash), more)
        _ = stash.plan
    assert stash.plan.state == "planned"
    assert sum(each.blocks for each in stash.plan.classes) == 3 * LAYERS
    assert memory.peaks[0] <= budget


@pytest.mark.parametrize("is_off", [False, True])
def test_two_graphs_in_a_step_make_no_larger_step(memory, tmp_path, is_off, monkeypatch):
    """One after the other, as those of a generator and its discriminator; and side by side."""
    if not is_off:
        monkeypatch.setattr(Follower, "fits_unseen", lambda _: False)
    stash = settled(memory, tmp_path, OTHER + 4 * SAVED)
    net, written = model(), stash.stats().written_bytes
    true = step(net, Stash())
    for _ in range(3):
        assert torch.equal(step(net, stash), true)
        (one, first), (other, second) = loss_of(net, stash), loss_of(net, stash)
        first.backward()
        second.backward()
        assert torch.equal(one.grad, true) and torch.equal(other.grad, true)
        assert not stash._planner._shape.is_larger
    assert stash.stats().written_bytes == written and stash.plan.state == "left alone"


def test_all_of_a_recorded_step_are_blocks(memory, tmp_path):
    stash, net = settled(memory, tmp_path), model()
    with stash.record() as recording:
        step(net, stash)
    assert sum(each.kind == "save" for each in recording.events) == LAYERS


def test_a_deeper_step_moves_what_is_beyond_the_others(memory, tmp_path):
    """It is not known before it has saved more than they did; what it has left in place until then stays."""
    budget = OTHER + SAVED + 12 * MIB
    stash, deeper = settled(memory, tmp_path, budget), model(3 * LAYERS)
    true = step(deeper, Stash())
    memory.peaks[0] = 0
    written = stash.stats().written_bytes
    for _ in range(6):
        assert torch.equal(step(deeper, stash), true)
        _ = stash.plan
    assert stash.stats().written_bytes > written
    assert memory.peaks[0] <= budget
    assert stash.plan.state == "planned"


def test_a_larger_first_block_is_asked_about(memory, tmp_path):
    budget = OTHER + 2 * SAVED
    stash, net = settled(memory, tmp_path, budget), model()
    true, written = step(net, Stash(), 2048), stash.stats().written_bytes
    memory.peaks[0] = 0
    for _ in range(4):
        assert torch.equal(step(net, stash, 2048), true)
        assert memory.peaks[0] <= budget
        _ = stash.plan
    assert stash.stats().written_bytes > written


def test_a_codec_that_is_asked_is_asked_for_each(memory, tmp_path):
    asked = []
    stash = settled(memory, tmp_path, codec=lambda saved: asked.append(saved.index))
    del asked[:]
    step(model(), stash)
    assert len(asked) == LAYERS
    assert asked == list(range(asked[0], asked[0] + LAYERS))


def test_a_forward_without_a_backward_ends_with_its_graph(memory, tmp_path):
    stash = settled(memory, tmp_path)
    net, written = model(), stash.stats().written_bytes
    true = step(net, Stash())
    for _ in range(4):
        for _ in range(3):
            loss_of(net, stash)
        assert torch.equal(step(net, stash), true)
        assert not stash._planner._shape.is_larger
    assert stash.stats().written_bytes == written and stash.stats().blocks == 0


def test_graphs_that_come_and_go_while_another_waits_are_no_larger_step(memory, tmp_path):
    """As in an inner loop: no block marks the end of such a graph, whose backward takes more than it saves."""
    stash = memory(budget=OTHER + 60 * MIB, disk=tmp_path)
    outer, inner = model(6), model(2)
    true, each_true = step(outer, Stash()), step(inner, Stash())

    def in_backward(grad):
        memory.other = lambda: OTHER + 20 * MIB
        stash._planner._meter.mark()

    for number in range(8):
        written = stash.stats().written_bytes
        x, loss = loss_of(outer, stash)
        for _ in range(20):
            each, its_loss = loss_of(inner, stash)
            its_loss.register_hook(in_backward)
            its_loss.backward()
            memory.other = lambda: OTHER
            assert torch.equal(each.grad, each_true)
            _ = stash.plan
        loss.backward()
        assert torch.equal(x.grad, true)
        assert number < 2 or stash.stats().written_bytes == written
    assert stash.plan.state == "left alone"


def test_a_stash_that_is_closed_meanwhile_leaves_no_more(memory, tmp_path):
    stash = settled(memory, tmp_path)
    x = torch.ones(512, 512, requires_grad=True)
    before = fitting(stash)
    with stash:
        y = x * 2
        for _ in range(8):
            y = y.erf()
        assert fitting(stash) > before
        stash.close()
        with pytest.raises(StashClosedError):
            y.erf()


def test_threads_that_save_at_once_share_what_is_left(memory, tmp_path):
    budget = OTHER + 2 * SAVED
    stash = settled(memory, tmp_path, budget)
    net = model()
    true = step(net, Stash())
    memory.peaks[0] = 0
    gate, grads = threading.Barrier(4, timeout=30), []

    def run():
        gate.wait()
        x, loss = loss_of(net, stash)
        gate.wait()  # all that all of them have saved is alive
        loss.backward()
        grads.append(x.grad)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert len(grads) == 4 and all(torch.equal(each, true) for each in grads)
    # Each thread may be at a save that it was allowed before the others saved.
    assert memory.peaks[0] <= budget + 4 * MIB


def test_gates_of_a_cell_cost_nothing_where_they_fit(memory, tmp_path):
    """Each is a part of a storage, which is a block otherwise."""
    torch.manual_seed(0)
    cell = nn.LSTMCell(256, 256)

    def run(stash):
        state = None
        with stash:
            for _ in range(8):
                state = cell(torch.ones(256, 256), state)
            loss = state[0].sum()
        for each in cell.parameters():
            each.grad = None
        loss.backward()
        return [each.grad.clone() for each in cell.parameters()]

    true = run(Stash())
    stash = memory(budget=ROOMY, disk=tmp_path)
    for _ in range(9):
        assert all(map(torch.equal, run(stash), true))
        _ = stash.plan
    assert stash.plan.state == "left alone"
    before, saves = fitting(stash), stash.stats().saves
    assert all(map(torch.equal, run(stash), true))
    blocks = 4 * 8  # the saves of a step's first blocks, of which each is the gates of one step
    assert fitting(stash) - before >= stash.stats().saves - saves - blocks


# What a plan keeps after the last block that it moves.

MANY = 64
PART = OTHER + MANY * MIB - 20 * MIB  # of which these are too much


def planned(memory, directory):
    """A stash whose plan moves the first blocks of a step, and measures no more."""
    stash, net = memory(budget=PART, disk=directory), model(MANY)
    for _ in range(12):
        step(net, stash)
        if stash.plan.measured is not None and stash.plan.predicted.peak_bytes <= PART:
            break
    assert stash.plan.state == "planned" and stash.plan.measured is not None
    return stash


@pytest.fixture
def steady(monkeypatch):
    """No step is measured again because a busy machine takes longer for it."""
    monkeypatch.setattr(Corrections, "is_off", lambda *_: False)


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        memory = CountedMemory(patch, inflight="2MiB", prefetch="2MiB", recompute=False)
        stash = planned(memory, tmp_path_factory.mktemp("disk"))
        stash.close()
    return stash.plan


@pytest.fixture
def loaded(memory, tmp_path, plan):
    """A stash that has followed this plan for a step."""
    stash = memory(plan=plan, disk=tmp_path)
    step(model(MANY), stash)
    yield stash
    stash.close()


@pytest.mark.usefixtures("steady")
def test_after_the_last_block_that_moves_all_are_left_alone(memory, tmp_path):
    stash, net = planned(memory, tmp_path), model(MANY)
    true = step(net, Stash())
    after = stash.plan.left_after
    moved = sum(n for each in stash.plan.classes for name, n in each.choices if name == "disk")
    assert moved <= after < MANY - 20
    before, eligible = fitting(stash), stash.stats().eligible_bytes
    memory.peaks[0] = 0
    for _ in range(3):
        assert torch.equal(step(net, stash), true)
    left = fitting(stash) - before
    assert 3 * (MANY - after - 24) <= left <= 3 * (MANY - after), "but where memory is looked at"
    assert stash.stats().eligible_bytes - eligible == (3 * MANY - left) * MIB
    assert memory.peaks[0] <= PART
    assert stash.stats().blocks == 0


def test_what_else_is_held_makes_the_rest_of_them_move(memory, loaded):
    """Memory that no plan knew of comes in the middle of the forward: what is saved from then on goes."""
    stash, net = loaded, model(MANY)
    true = step(net, Stash())
    more, written = 16 * MIB, stash.stats().written_bytes
    assert torch.equal(step(net, stash), true)
    usual = stash.stats().written_bytes - written
    handle = net[MANY // 2].register_forward_hook(
        lambda *_: setattr(memory, "other", lambda: OTHER + more)
    )
    memory.peaks[0], written = 0, stash.stats().written_bytes
    assert torch.equal(step(net, stash), true)
    handle.remove()
    assert stash.stats().written_bytes - written >= usual + more // 2
    assert memory.peaks[0] <= PART


def test_a_step_of_which_a_plan_does_not_know_all_leaves_nothing_alone(loaded):
    net = model(MANY)
    other = nn.Sequential(*net[:4], nn.Tanh(), *net[5:])
    before = fitting(loaded)
    assert torch.equal(step(other, loaded), step(other, Stash()))
    assert fitting(loaded) == before
    assert torch.equal(step(net, loaded), step(net, Stash()))
    assert fitting(loaded) > before


@pytest.mark.usefixtures("steady")
def test_a_longer_step_is_seen_where_its_blocks_are_left_alone(memory, tmp_path):
    stash, net = planned(memory, tmp_path), model(MANY)
    true = step(net, Stash())
    longer = nn.Sequential(*net, *net[: MANY // 2])
    more = step(longer, Stash())
    memory.peaks[0] = 0
    for _ in range(8):
        assert torch.equal(step(longer, stash), more)
        _ = stash.plan
    assert sum(each.blocks for each in stash.plan.classes) == MANY + MANY // 2
    assert memory.peaks[0] <= PART
    for _ in range(2):
        assert torch.equal(step(net, stash), true)


def test_a_loaded_plan_leaves_alone_what_it_keeps_last(memory, tmp_path, plan):
    net, path = model(MANY), tmp_path / "plan.json"
    true = step(net, Stash())
    plan.save(path)
    stash = memory(plan=path, disk=tmp_path)
    assert stash.plan.left_after == plan.left_after
    memory.peaks[0] = 0
    for _ in range(2):
        before = fitting(stash)
        assert torch.equal(step(net, stash), true)
        assert fitting(stash) - before >= MANY - plan.left_after - 24
    assert memory.peaks[0] <= PART


def test_a_loaded_plan_that_leaves_all_alone_is_known_to_be_this_model_s(memory, tmp_path):
    stash = settled(memory, tmp_path)
    net, plan = model(), stash.plan
    true = step(net, Stash())
    stash.close()
    assert plan.left_after == 0
    stash = memory(plan=plan, disk=tmp_path)
    for _ in range(3):
        before = fitting(stash)
        assert torch.equal(step(net, stash), true)
        assert fitting(stash) - before >= LAYERS - 6


@takes_long
def test_a_longer_step_under_a_loaded_plan_changes_nothing_for_the_next_ones(
    memory, tmp_path, plan
):
    net = model(MANY)
    longer = nn.Sequential(*net, *net[: MANY // 2])
    true, more = step(net, Stash()), step(longer, Stash())
    stash = memory(plan=plan, disk=tmp_path)
    moved = []
    for each, its_true in ((net, true), (net, true), (longer, more), (net, true), (net, true)):
        before = stash.stats().written_bytes
        memory.peaks[0] = 0
        assert torch.equal(step(each, stash), its_true)
        assert memory.peaks[0] <= PART
        moved.append(stash.stats().written_bytes - before)
    assert moved[2] > moved[1] and moved[1] == moved[3] == moved[4]


class Twice(nn.Module):
    """Saves what the layer before saved, or made, once more."""

    def forward(self, x):
        return x.erf() + x.erf()


@takes_long
@pytest.mark.usefixtures("steady")
def test_what_goes_and_is_saved_again_is_looked_at_again(memory, tmp_path):
    """Else it would stay in place for what saved it last, and be written all the same."""
    budget = PART
    stash = memory(budget=budget, disk=tmp_path)
    net = nn.Sequential(*(Twice() for _ in range(MANY)))
    true = step(net, Stash())
    for number in range(24):
        assert torch.equal(step(net, stash), true)
        plan = stash.plan
        if number >= 11 and plan.measured is not None:
            break  # a busy machine has more steps measured
    assert plan.state == "planned" and plan.measured is not None
    moved = sum(n for each in plan.classes for name, n in each.choices if name != "keep")
    after = plan.left_after
    assert plan.trace.blocks[moved - 1].saved_until == moved and after >= moved + 1
    memory.peaks[0], before = 0, stash.stats().deduplicated_bytes
    assert torch.equal(step(net, stash), true)
    assert stash.stats().deduplicated_bytes - before >= after * MIB - 4 * MIB
    assert memory.peaks[0] <= budget


@takes_long
@pytest.mark.usefixtures("steady")
def test_a_graph_that_is_dropped_takes_what_was_allowed_with_it(memory, tmp_path):
    """The next step begins with its first block, not when that is used up."""
    stash, net = planned(memory, tmp_path), model(MANY)
    true = step(net, Stash())
    written = stash.stats().written_bytes
    assert torch.equal(step(net, stash), true)
    usual = stash.stats().written_bytes - written
    loss_of(net, stash)
    stash.stats()
    assert stash._session.thread_state().allowed_until != stash._session.uses
    steps, written = stash._planner._steps, stash.stats().written_bytes
    assert torch.equal(step(net, stash), true)
    assert stash._planner._steps == steps + 1
    assert stash.stats().written_bytes - written >= usual - 2 * MIB


def test_what_a_plan_leaves_alone_may_not_be_modified(loaded):
    net, before, outputs = model(MANY), fitting(loaded), []
    net[loaded.plan.left_after + 8].register_forward_hook(lambda *given: outputs.append(given[2]))
    _x, loss = loss_of(net, loaded)
    assert fitting(loaded) > before
    outputs[0].detach().add_(1)
    with pytest.raises(InplaceError):
        loss.backward()
    del outputs[0], loss


@takes_long
@pytest.mark.usefixtures("steady")
def test_a_step_that_begins_with_a_small_part_begins_with_its_first_block(memory, tmp_path):
    """The part is copied and no block. What was left alone in the step before says nothing of this one."""
    large = torch.linspace(-1, 1, 1024 * 512).view(1024, 512)
    net, stash = model(MANY), memory(budget=PART, disk=tmp_path, min_bytes="64KiB")

    def run(stash):
        x = torch.linspace(-1, 1, 512 * 512).view(512, 512).requires_grad_()
        weight = torch.ones(8, 512, requires_grad=True)
        with stash:
            small = (weight * large[8:16]).sum()
            loss = net(x * 2).sum() + small
        loss.backward()
        return x.grad, weight.grad

    true = run(Stash())
    for _ in range(12):
        assert all(map(torch.equal, run(stash), true))
        _ = stash.plan
    assert stash.plan.measured is not None and stash.plan.state == "planned"
    planner, steps = stash._planner, stash._planner._steps
    early = []
    net[4].register_forward_hook(lambda *_: early.append(fitting(stash)))
    for number in range(1, 4):
        written, before = stash.stats().written_bytes, fitting(stash)
        assert all(map(torch.equal, run(stash), true))
        assert early.pop() == before, "the first blocks are none that are left alone"
        assert planner._steps == steps + number
        assert planner._shape.counted >= stash.plan.left_after
        assert stash.stats().written_bytes - written >= (stash.plan.left_after - 4) * MIB
        assert fitting(stash) > before
