"""A budget that twice the step fits in: after its first blocks the hooks are off until the next step."""

import functools
import gc
import threading
import weakref

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.optim import optimizer as torch_optimizer
from torch.utils.checkpoint import checkpoint

from backstash import Stash, _hooks_off
from backstash._device.base import MemoryFigures
from backstash._device.meter import DeviceMeter
from backstash._torch.hook_stack import current_pair
from backstash.errors import InplaceError
from backstash.testing import TwinDevice
from counted_memory import MIB, OTHER, CountedMemory

LAYERS = 16  # of which each saves 1 MiB
SAVED = LAYERS * MIB
TWICE = OTHER + 4 * SAVED


@pytest.fixture
def memory(monkeypatch):
    return CountedMemory(monkeypatch, inflight="2MiB", prefetch="2MiB")


class Erf(nn.Module):
    """Cannot be computed again, nor packed."""

    def forward(self, x):
        return x.erf()


def model(layers=LAYERS):
    return nn.Sequential(*(Erf() for _ in range(layers)))


def given(rows=512):
    return torch.linspace(-1, 1, rows * 512).view(rows, 512).requires_grad_()


def step(net, stash, rows=512):
    x = given(rows)
    with stash:
        loss = net(x * 2).sum()
    loss.backward()
    return x.grad


def settle(run, stash):
    """Until it measures no more and the hooks were taken off."""
    for _ in range(12):
        run()
        _ = stash.plan
        if stash.stats().hooks_off:
            return
    pytest.fail(f"the hooks stay: {stash.stats()}")


@pytest.fixture
def settled(memory, tmp_path):
    stash, net = memory(budget=TWICE, disk=tmp_path), model()
    settle(lambda: step(net, stash), stash)
    yield stash
    stash.close()
    assert current_pair() is None


def counts(stash):
    stats = stash.stats()
    return stats.hooks_off, stats.saves


def test_all_but_the_first_saves_of_a_step_are_pytorch_s(settled):
    net = model()
    true, (times, saves) = step(net, Stash()), counts(settled)
    for number in range(1, 6):
        assert torch.equal(step(net, settled), true)
        assert counts(settled)[0] == times + number
        assert counts(settled)[1] <= saves + 8 * number
    assert settled.stats().blocks == 0 and settled.plan.state == "left alone"
    assert f"hooks off  {times + 5} times" in str(settled.stats())
    assert settled.stats().as_json()["hooks_off"] == times + 5


def test_they_are_off_within_the_context_and_back_in_the_next(settled):
    seen = []
    net = model()
    for at in (0, 2, 8, 15):
        net[at].register_forward_hook(lambda *_: seen.append(current_pair() is not None))
    for _ in range(2):
        step(net, settled)
    assert seen == [True, True, False, False] * 2


def test_what_is_modified_in_place_is_pytorch_s_own_error(settled):
    net, outputs = model(), []
    net[12].register_forward_hook(lambda *given: outputs.append(given[2]))
    with settled:
        loss = net(given() * 2).sum()
    outputs[0].detach().add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation") as raised:
        loss.backward()
    assert not isinstance(raised.value, InplaceError)
    del raised, outputs[0], loss
    assert torch.equal(step(net, settled), step(net, Stash()))


def test_one_that_is_measured_or_recorded_has_hooks(settled, memory, tmp_path):
    net, (times, _) = model(), counts(settled)
    with settled.record() as recording:
        step(net, settled)
    assert len([event for event in recording.events if event.kind == "save"]) == LAYERS
    assert counts(settled)[0] == times
    step(net, settled)
    assert counts(settled)[0] == times + 1


def test_hooks_of_the_program_around_it_get_nothing(settled):
    """They would, if the stash's were not there."""
    net, (times, _) = model(), counts(settled)
    around = []
    with saved_tensors_hooks(lambda tensor: around.append(tensor) or tensor, lambda tensor: tensor):
        assert torch.equal(step(net, settled), step(net, Stash()))
        assert not around and counts(settled)[0] == times
        (given() * 2).erf()
        assert around
    step(net, settled)
    assert counts(settled)[0] == times + 1


def test_hooks_of_the_program_inside_it_get_what_they_get(settled):
    net, inside = model(), []
    pair = saved_tensors_hooks(
        lambda tensor: inside.append(tensor) or tensor, lambda tensor: tensor
    )
    x = given()
    with settled:
        y = net(x * 2)
        assert current_pair() is None
        with pair:
            y = net(y)
            assert current_pair().pack is pair.pack_hook
        assert current_pair() is None
        loss = net(y).sum()
    loss.backward()
    assert len(inside) == LAYERS
    z = given()
    net(net(net(z * 2))).sum().backward()
    assert torch.equal(x.grad, z.grad)


def test_a_context_that_is_left_inside_another_one_leaves_that_as_it_is(settled):
    net = model()
    pair = saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)
    settled.__enter__()
    net(given() * 2)
    assert current_pair() is None
    pair.__enter__()
    settled.__exit__(None, None, None)
    assert current_pair().pack is pair.pack_hook
    pair.__exit__(None, None, None)
    assert current_pair() is None


def test_contexts_of_the_same_step_do_not_put_them_on(settled):
    net, (_, saves) = model(), counts(settled)
    x = given()
    with settled:
        y = net(x * 2)
    for _ in range(3):
        with settled:
            assert current_pair() is None
            y = net(y)
    with settled, saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        y = net(y)
    around = []
    with saved_tensors_hooks(lambda tensor: around.append(tensor) or tensor, lambda tensor: tensor):
        with settled:
            (y * 2).erf()
    assert not around, "which is what that context gets where the stash has its hooks"
    with settled.record() as recording, settled:
        y = y.erf()
    assert [event.kind for event in recording.events].count("save") == 1
    y.sum().backward()
    assert counts(settled)[1] <= saves + 8
    with settled:
        assert current_pair() is not None


def test_modules_that_it_is_attached_to(memory, tmp_path):
    stash, net = memory(budget=TWICE, disk=tmp_path), model()
    true, seen = step(net, Stash()), []
    attached = [stash.attach(each) for each in net]
    net[8].register_forward_pre_hook(lambda *_: seen.append(current_pair()))

    def run():
        x = given()
        net(x * 2).sum().backward()
        assert torch.equal(x.grad, true)

    settle(run, stash)
    assert seen.pop() is None and seen[0] is not None
    run()
    for each in attached:
        each.remove()
    stash.close()
    assert current_pair() is None


class Doubled(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.net = model()

    def forward(self, x):
        return self.net(x * self.weight)


def losses_of(net, optimizer, steps, after=lambda: None):
    losses = []
    for _ in range(steps):
        loss = net(given().detach()).sum()
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        after()
    return losses


def test_in_a_context_around_all_steps_an_optimizer_puts_them_on(memory, tmp_path):
    def optimizer_of(net):
        return torch.optim.SGD(net.parameters(), lr=1e-6)

    plain, net = Doubled(), Doubled()
    true = losses_of(plain, optimizer_of(plain), 16)
    stash, optimizer = memory(budget=TWICE, disk=tmp_path), optimizer_of(net)
    with stash:
        assert losses_of(net, optimizer, 12, lambda: stash.plan) == true[:12]
        times = stash.stats().hooks_off
        assert times >= 2
        assert losses_of(net, optimizer, 4) == true[12:]
        assert stash.stats().hooks_off == times + 4
        assert current_pair() is not None
    assert current_pair() is None
    stash.close()


def test_in_a_context_around_all_steps_they_stay_where_no_optimizer_is_seen(memory, tmp_path):
    stash, net = memory(budget=TWICE, disk=tmp_path), model()
    true = step(net, Stash())
    with stash:
        for _ in range(12):
            x = given()
            net(x * 2).sum().backward()
            assert torch.equal(x.grad, true)
            _ = stash.plan
            assert current_pair() is not None
    assert stash.plan.state == "left alone" and stash.stats().hooks_off == 0
    stash.close()


def test_an_optimizer_that_steps_within_the_program_s_hooks_puts_nothing_on_them(settled):
    weight = torch.ones(3, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    weight.grad = torch.ones(3)
    pair = saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)
    with settled:
        model()(given() * 2)
        assert current_pair() is None
        with pair:
            optimizer.step()
            assert current_pair().pack is pair.pack_hook
        assert current_pair() is None
        optimizer.step()
        assert current_pair() is not None
    assert current_pair() is None


def test_a_step_that_begins_with_more_has_hooks(settled):
    net, (times, _) = model(), counts(settled)
    true = step(net, Stash(), 4096)
    for _ in range(3):
        assert torch.equal(step(net, settled, 4096), true)
        _ = settled.plan
    assert counts(settled)[0] == times
    assert settled.stats().written_bytes > 0


def test_after_one_that_took_more_in_its_middle_they_stay(settled, memory):
    """The system tells what the process held at most. Then all is seen, and planned for."""
    net, deeper = model(), model(6 * LAYERS)
    true, (times, _) = step(deeper, Stash()), counts(settled)
    x = given()
    with settled:
        loss = deeper(x * 2).sum()
    memory.hold(OTHER + 6 * SAVED)  # what PyTorch holds is not counted here
    loss.backward()
    assert torch.equal(x.grad, true) and counts(settled)[0] == times + 1
    memory.peaks[0] = 0
    for _ in range(8):
        assert torch.equal(step(deeper, settled), true)
        assert memory.peaks[0] <= TWICE
        _ = settled.plan
    assert counts(settled)[0] == times + 1
    assert settled.plan.state == "planned"
    assert torch.equal(step(net, settled), step(net, Stash()))


def test_where_a_peak_was_reset_they_stay(settled, memory):
    """As tools do that ask for each step's."""
    net, (times, _) = model(), counts(settled)
    memory._most = OTHER
    for _ in range(3):
        step(net, settled)
    assert counts(settled)[0] == times


def test_what_an_accelerator_ever_held_is_known_until_its_peak_is_reset():
    device = TwinDevice()
    meter = DeviceMeter(device, lambda: 0)
    known = []
    for held, peak in ((1, 3), (2, 5), (2, 2), (6, 6)):
        device.figures = MemoryFigures(held * MIB, peak * MIB, 0, 0)
        known.append(meter.ever_peak_bytes())
    assert known == [3 * MIB, 5 * MIB, None, None]
    meter.stop()


def test_other_memory_that_comes_puts_them_on(settled, memory):
    net, (times, _) = model(), counts(settled)
    memory.other = lambda: OTHER + 3 * SAVED
    for _ in range(3):
        assert torch.equal(step(net, settled), step(net, Stash()))
    assert counts(settled)[0] == times


@pytest.mark.parametrize("option", ["policy", "codec"])
def test_a_policy_and_a_codec_are_asked_for_each(memory, tmp_path, option):
    asked = []
    stash = memory(budget=TWICE, disk=tmp_path, **{option: lambda saved: asked.append(saved.index)})
    net = model()
    for _ in range(10):
        step(net, stash)
        _ = stash.plan
    assert stash.stats().hooks_off == 0
    del asked[:]
    step(net, stash)
    assert len(asked) >= LAYERS
    stash.close()


def test_where_the_step_fits_only_once_they_stay(memory, tmp_path):
    stash, net = memory(budget=OTHER + 9 * SAVED // 4, disk=tmp_path), model()
    for _ in range(10):
        step(net, stash)
        _ = stash.plan
    assert stash.plan.state == "left alone" and stash.stats().hooks_off == 0
    stash.close()


def test_a_step_that_is_measured_or_larger_does_not_fit_twice(settled):
    follower = settled._planner.follower
    step(model(), settled)
    assert follower.fits_twice()
    for owner, name in (
        (follower._shape, "is_larger"),
        (follower._shape, "expects_larger"),
        (follower, "has_exceeded"),
    ):
        setattr(owner, name, True)
        assert not follower.fits_twice(), name
        setattr(owner, name, False)
    follower._recording.start()
    assert not follower.fits_twice()
    follower._recording.stop()


def test_a_graph_that_is_gone_puts_them_on(settled):
    """Its step has ended without a backward."""
    with settled:
        loss = model()(given() * 2).sum()
    del loss
    with settled:
        assert current_pair() is not None


def test_such_steps_are_timed_and_count_as_the_planned_one(settled, monkeypatch):
    timed, net = [], model()
    corrections = settled._planner._corrections
    monkeypatch.setattr(corrections, "time", timed.append)
    for _ in range(4):
        step(net, settled)
    assert len(timed) >= 3


def test_modules_that_may_run_again_keep_them(memory, tmp_path):
    stash = memory(budget=TWICE, disk=tmp_path)
    net = model()
    stash.recompute(*net[-2:])
    for _ in range(10):
        step(net, stash)
        _ = stash.plan
    assert stash.plan.state == "left alone" and stash.stats().hooks_off == 0
    stash.close()


def test_several_graphs_and_a_second_derivative(settled):
    net = model()

    def run(stash):
        x = given()
        with stash:
            one, other = net(x * 2).sum(), net(x * 3).square().sum()
            (first,) = torch.autograd.grad(one, x, create_graph=True)
            loss = first.square().sum() + other
        loss.backward()
        return x.grad

    true = run(Stash())
    for _ in range(3):
        assert torch.equal(run(settled), true)
        assert torch.equal(step(net, settled), step(net, Stash()))


def test_checkpoint_inside(settled):
    net = model()

    def run(stash):
        x = given()
        with stash:
            loss = checkpoint(net, net(x * 2), use_reentrant=False).sum()
        loss.backward()
        return x.grad

    true = run(Stash())
    for _ in range(3):
        assert torch.equal(run(settled), true)


def test_each_thread_has_hooks_of_its_own(settled):
    net = model()
    true = step(net, Stash())
    gate, found = threading.Barrier(3, timeout=30), []

    def run():
        x = given()
        gate.wait()
        with settled:
            loss = net(x * 2).sum()
        gate.wait()
        loss.backward()
        found.append((torch.equal(x.grad, true), current_pair()))

    threads = [threading.Thread(target=run) for _ in range(3)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert found == [(True, None)] * 3
    assert torch.equal(step(net, settled), true)


def test_an_interrupt_while_they_are_taken_off_leaves_none_behind(settled, monkeypatch):
    real = _hooks_off.take_off

    def interrupted(scope):
        real(scope)
        raise KeyboardInterrupt

    monkeypatch.setattr(_hooks_off, "take_off", interrupted)
    net = model()
    with pytest.raises(KeyboardInterrupt), settled:
        net(given() * 2)
    monkeypatch.undo()
    assert current_pair() is None
    assert torch.equal(step(net, settled), step(net, Stash()))


def test_a_stash_that_is_dropped_is_not_held_by_optimizers(memory, tmp_path):
    stash, net = memory(budget=TWICE, disk=tmp_path), model()
    settle(functools.partial(step, net, stash), stash)
    hooks = torch_optimizer._global_optimizer_post_hooks
    before, dead = len(hooks), weakref.ref(stash)
    del stash
    gc.collect()
    assert dead() is None and len(hooks) == before - 1
