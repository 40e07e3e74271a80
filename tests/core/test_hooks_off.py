"""A step that fits well within the budget: after its first blocks the hooks are off until the context is
left."""

import contextlib
import threading
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from backstash import Stash
from backstash._budget.corrections import Corrections
from backstash._budget.device_meter import DeviceMeter
from backstash._core import hooks_off as _hooks_off
from backstash._device.base import MemoryFigures
from backstash._torch.hook_stack import current_pair
from backstash.errors import InplaceError
from backstash.testing import CountedDevice, TwinDevice, stash_on
from counted_memory import MIB, OTHER, CountedMemory, Saves

LAYERS = 16  # of which each saves 1 MiB
SAVED = LAYERS * MIB
TWICE = OTHER + 4 * SAVED


@pytest.fixture
def memory(monkeypatch):
    counted = CountedMemory(monkeypatch, inflight="2MiB", prefetch="2MiB")
    yield counted
    counted.close()


def model(layers=LAYERS):
    return nn.Sequential(*(Saves() for _ in range(layers)))


def given(rows=512):
    return torch.linspace(-1, 1, rows * 512).view(rows, 512).requires_grad_()


@contextlib.contextmanager
def within(stash):
    """The one statement that enters it."""
    with stash:
        yield


def step(net, stash, rows=512):
    x = given(rows)
    with within(stash):
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


@contextlib.contextmanager
def settled_in(memory, directory):
    stash, net = memory(budget=TWICE, disk=directory), model()
    settle(lambda: step(net, stash), stash)
    yield stash
    stash.close()
    assert current_pair() is None


@pytest.fixture
def settled(memory, tmp_path):
    """For a test after which steps have hooks."""
    with settled_in(memory, tmp_path) as stash:
        yield stash


@pytest.fixture(scope="module")
def steady(tmp_path_factory):
    """One stash for all tests that leave it as it was."""
    with pytest.MonkeyPatch.context() as patch:
        memory = CountedMemory(patch, inflight="2MiB", prefetch="2MiB")
        with settled_in(memory, tmp_path_factory.mktemp("disk")) as stash:
            yield stash


def counts(stash):
    stats = stash.stats()
    return stats.hooks_off, stats.saves


def test_all_but_the_first_saves_of_a_step_are_pytorch_s(steady):
    net = model()
    true, (times, saves) = step(net, Stash()), counts(steady)
    for number in range(1, 6):
        assert torch.equal(step(net, steady), true)
        assert counts(steady)[0] == times + number
        assert counts(steady)[1] <= saves + 8 * number
    assert steady.stats().blocks == 0 and steady.plan.state == "left alone"
    assert f"hooks off  {times + 5} times" in str(steady.stats())
    assert steady.stats().as_json()["hooks_off"] == times + 5


def test_they_are_off_within_the_context_and_back_in_the_next(steady):
    seen = []
    net = model()
    for at in (0, 2, 8, 15):
        net[at].register_forward_hook(lambda *_: seen.append(current_pair() is not None))
    for _ in range(2):
        step(net, steady)
    assert seen == [True, True, False, False] * 2


def test_what_is_modified_in_place_is_pytorch_s_own_error(steady):
    net, outputs = model(), []
    net[12].register_forward_hook(lambda *given: outputs.append(given[2]))
    with within(steady):
        loss = net(given() * 2).sum()
    outputs[0].detach().add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation") as raised:
        loss.backward()
    assert not isinstance(raised.value, InplaceError)
    del raised, outputs[0], loss
    assert torch.equal(step(net, steady), step(net, Stash()))


def test_one_that_is_measured_or_recorded_has_hooks(steady):
    net, (times, _) = model(), counts(steady)
    with steady.record() as recording:
        step(net, steady)
    assert len([event for event in recording.events if event.kind == "save"]) == LAYERS
    assert counts(steady)[0] == times
    step(net, steady)
    assert counts(steady)[0] == times + 1


def test_hooks_of_the_program_around_it_get_nothing(steady):
    """They would, if the stash's were not there."""
    net, (times, _) = model(), counts(steady)
    around = []
    with saved_tensors_hooks(lambda tensor: around.append(tensor) or tensor, lambda tensor: tensor):
        assert torch.equal(step(net, steady), step(net, Stash()))
        assert not around and counts(steady)[0] == times
        (given() * 2).erf()
        assert around
    step(net, steady)
    assert counts(steady)[0] == times + 1


def test_hooks_of_the_program_inside_it_get_what_they_get(steady):
    net, inside = model(), []
    pair = saved_tensors_hooks(
        lambda tensor: inside.append(tensor) or tensor, lambda tensor: tensor
    )
    x = given()
    with within(steady):
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


def test_a_context_that_is_left_inside_another_one_leaves_that_as_it_is(steady):
    net = model()
    pair = saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)
    for number in range(2):
        steady.__enter__()
        loss = net(given() * 2).sum()
        assert (current_pair() is None) == bool(number), "the statement is new the first time"
        if number:
            pair.__enter__()
        steady.__exit__(None, None, None)
        if number:
            assert current_pair().pack is pair.pack_hook
            pair.__exit__(None, None, None)
        loss.backward()
    assert current_pair() is None


def test_a_statement_that_is_new_or_had_several_steps_keeps_them(steady):
    """Nothing would put them on again before the next context."""
    net, (times, _) = model(), counts(steady)
    true = step(net, Stash())

    def steps(number):
        with steady:
            for _ in range(number):
                x = given()
                net(x * 2).sum().backward()
                assert torch.equal(x.grad, true)
        return counts(steady)[0] - times

    assert steps(4) == 0 and steps(1) == 0
    assert steps(1) == 1 and steps(1) == 2
    with steady:  # another statement
        for _ in range(3):
            net(given() * 2).sum().backward()
            assert current_pair() is not None
    assert steps(1) == 3
    with steady.record():
        steps(2)
    assert steps(1) == 3, "it was measured by steps that had hooks"
    assert steps(1) == 4


def test_what_is_wrapped_is_known_by_where_it_is_called(steady):
    net, (times, _) = model(), counts(steady)
    loss_of = steady(lambda: net(given() * 2).sum())
    for number in range(4):
        loss_of().backward()
        assert counts(steady)[0] - times == number
    loss_of().backward()
    assert counts(steady)[0] - times == 3, "elsewhere it is not known"


def test_modules_that_it_is_attached_to_keep_them(memory, tmp_path):
    stash, net = memory(budget=TWICE, disk=tmp_path), model()
    attached = [stash.attach(each) for each in net]
    for _ in range(10):
        x = given()
        net(x * 2).sum().backward()
        _ = stash.plan
    assert stash.plan.state == "left alone" and stash.stats().hooks_off == 0
    for each in attached:
        each.remove()


def test_a_graph_that_is_kept_hides_no_later_step(settled, memory):
    """Its blocks are never used, so that none of the later steps begins by what the stash sees."""
    net, kept = model(), []
    with within(settled):
        kept.append(net(given() * 2).sum())
    true = step(net, Stash(), 2560)
    for _ in range(4):
        seen, saves = settled.stats().written_bytes, counts(settled)[1]
        assert torch.equal(step(net, settled, 2560), true)
        assert counts(settled)[1] - saves >= LAYERS
    assert settled.stats().written_bytes > seen
    del kept[:]


def test_a_step_that_begins_with_more_has_hooks(settled, memory):
    net, (times, _) = model(), counts(settled)
    memory.peaks[0] = 0
    true = step(net, Stash(), 2560)
    for _ in range(3):
        assert torch.equal(step(net, settled, 2560), true)
        _ = settled.plan
    assert counts(settled)[0] == times and memory.peaks[0] <= TWICE
    assert settled.stats().written_bytes > 0


def test_after_one_that_took_more_in_its_middle_they_stay(settled, memory):
    """The system reports what the process held at most. Then all is seen, and planned for."""
    net, deeper = model(), model(5 * LAYERS)
    true, (times, _) = step(deeper, Stash()), counts(settled)
    x = given()
    with within(settled):
        loss = deeper(x * 2).sum()
    memory.hold(OTHER + 5 * SAVED)  # what PyTorch holds is not counted here
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


def test_a_peak_that_is_reset_before_each_step_is_still_known(settled, memory):
    """As tools do that ask for each step's: it is read where backward ends."""
    net, (times, _) = model(), counts(settled)
    for number in range(3):
        memory._most = OTHER
        step(net, settled)
        assert counts(settled)[0] == times + number + 1
    x, deeper = given(), model(5 * LAYERS)
    memory._most = OTHER
    with within(settled):
        loss = deeper(x * 2).sum()
    memory.hold(OTHER + 5 * SAVED)  # what PyTorch holds is not counted here
    loss.backward()
    memory._most = OTHER
    step(net, settled)
    assert counts(settled)[0] == times + 4  # of the deeper one, and none since


def test_what_an_accelerator_ever_held_stays_known_when_its_peak_is_reset():
    device = TwinDevice()
    meter = DeviceMeter(device, lambda: 0)
    known = []
    for held, peak in ((1, 3), (2, 5), (2, 2), (6, 6)):
        device.figures = MemoryFigures(held * MIB, peak * MIB, 0, 0)
        known.append(meter.ever_peak_bytes() // MIB)
    assert known == [3, 5, 5, 6]
    meter.stop()


def test_an_accelerator_s_peak_is_read_where_backward_ends(monkeypatch):
    """Where no hooks were on, and the program resets the peak before the next step."""
    device, net = CountedDevice(), model(8)
    stash = stash_on(device, budget="1GiB", min_bytes=0)
    settle(lambda: step(net, stash), stash)
    meter, memory = stash._planner._meter, device.memory
    with within(stash):
        loss = net(given() * 2).sum()
    with monkeypatch.context() as patch:
        patch.setattr(device, "memory", lambda: replace(memory(), peak_bytes=1 << 40))
        loss.backward()
    assert meter.ever_peak_bytes() == 1 << 40
    stash.close()


def test_other_memory_that_comes_puts_them_on(settled, memory):
    net, (times, _) = model(), counts(settled)
    memory.other = lambda: OTHER + 3 * SAVED
    for _ in range(3):
        assert torch.equal(step(net, settled), step(net, Stash()))
    assert counts(settled)[0] == times


def test_a_steady_step_has_hooks_if_it_no_longer_fits_with_other_memory(memory, tmp_path):
    stash, net = memory(budget=OTHER + 3 * SAVED // 2, disk=tmp_path), model()
    for _ in range(26):
        step(net, stash)
        _ = stash.plan
    times, _ = counts(stash)
    memory.other = lambda: OTHER + 8 * MIB  # it fits until the step grows
    step(net, stash)
    assert counts(stash)[0] == times > 0


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


@pytest.mark.parametrize("is_steady", [True, False])
def test_where_less_than_a_tenth_is_free_only_steady_steps_have_none(memory, tmp_path, is_steady):
    stash = memory(budget=OTHER + 3 * SAVED // 2, disk=tmp_path)
    nets = model(), model(LAYERS if is_steady else LAYERS - 2)
    for number in range(26):
        step(nets[number % 2], stash)
        _ = stash.plan
    assert stash.plan.state == "left alone"
    assert bool(stash.stats().hooks_off) is is_steady


def test_free_memory_that_a_process_still_holds_is_not_counted_twice(memory, tmp_path):
    stash, net = memory(budget=OTHER + 3 * SAVED // 2, disk=tmp_path), model()
    memory.other = lambda: OTHER + SAVED - memory.saved_bytes()  # as freed memory is used again
    for _ in range(26):
        step(net, stash)
        _ = stash.plan
    assert stash.stats().hooks_off


def test_where_the_step_does_not_fit_twice_only_a_known_one_has_none(memory, tmp_path):
    budget = OTHER + 33 * MIB
    stash, net = memory(budget=budget, disk=tmp_path), model()
    settle(lambda: step(net, stash), stash)
    times, _ = counts(stash)
    for rows, is_off in ((512, True), (384, False), (512, True)):
        assert torch.equal(step(net, stash, rows), step(net, Stash(), rows))
        assert counts(stash)[0] == times + is_off
        times += is_off


class Thrice(nn.Module):
    """Saves its input three times."""

    def forward(self, x):
        return x.erf() + x.erf() + x.erf()


def test_memory_that_is_saved_several_times_counts_once(memory, tmp_path):
    """Three times what the step saves would not fit."""
    net = nn.Sequential(*(Thrice() for _ in range(LAYERS)))
    stash = memory(budget=OTHER + 39 * MIB, disk=tmp_path)
    settle(lambda: step(net, stash), stash)
    assert stash._planner.follower._shape.most_held_bytes == SAVED


def test_such_steps_are_timed_and_count_as_the_planned_one(settled, monkeypatch):
    timed, net = [], model()
    monkeypatch.setattr(Corrections, "time", lambda _, found: timed.append(found))
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


def test_several_graphs_and_a_second_derivative(steady):
    net = model()

    def run(stash):
        x = given()
        with within(stash):
            one, other = net(x * 2).sum(), net(x * 3).square().sum()
            (first,) = torch.autograd.grad(one, x, create_graph=True)
            loss = first.square().sum() + other
        loss.backward()
        return x.grad

    true = run(Stash())
    for _ in range(3):
        assert torch.equal(run(steady), true)
        assert torch.equal(step(net, steady), step(net, Stash()))


def test_checkpoint_inside(steady):
    net = model()

    def run(stash):
        x = given()
        with within(stash):
            loss = checkpoint(net, net(x * 2), use_reentrant=False).sum()
        loss.backward()
        return x.grad

    true = run(Stash())
    for _ in range(3):
        assert torch.equal(run(steady), true)


def test_each_thread_has_hooks_of_its_own(steady):
    net = model()
    true = step(net, Stash())
    gate, found = threading.Barrier(3, timeout=30), []

    def run():
        x = given()
        gate.wait()
        with within(steady):
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
    assert torch.equal(step(net, steady), true)


def test_an_interrupt_while_they_are_taken_off_leaves_none_behind(steady, monkeypatch):
    real = _hooks_off.take_off

    def interrupted(scope):
        real(scope)
        raise KeyboardInterrupt

    monkeypatch.setattr(_hooks_off, "take_off", interrupted)
    net = model()
    with pytest.raises(KeyboardInterrupt), within(steady):
        net(given() * 2)
    monkeypatch.undo()
    assert current_pair() is None
    assert torch.equal(step(net, steady), step(net, Stash()))


def test_the_contexts_of_one_step_count_once(memory, tmp_path):
    """As of an encoder and a decoder, or of batches whose losses are added. The hooks are off in the first
    one only."""
    contexts, net = 4, model(4)
    stash = memory(budget=OTHER + 21 * MIB, disk=tmp_path)

    def whole():
        x, total = given(), 0
        for number in range(contexts):
            with within(stash):
                loss = net(x * (number + 2)).sum()
            total = total + loss
        total.backward()
        return x.grad

    expected = whole()
    for _ in range(24):
        _ = stash.plan
        assert torch.equal(whole(), expected)
    before = stash.stats()
    for _ in range(6):
        whole()
        assert not stash._event_log.on, "no step is measured"
    assert stash.stats().hooks_off - before.hooks_off == 6
    assert stash.stats().written_bytes == before.written_bytes


def test_an_unseen_step_that_exceeds_the_budget_is_noted(settled, memory):
    def unseen():
        return [each for each in settled.stats().notes if "hooks were off" in each]

    step(model(), settled)
    assert unseen() == []
    with within(settled):
        loss = model()(given() * 2).sum()
    memory.hold(TWICE + 64 * MIB)
    loss.backward()
    step(model(), settled)
    (note,) = unseen()
    assert "was exceeded" in note and "228 MiB" in note
    step(model(), settled)
    assert unseen() == [note]
