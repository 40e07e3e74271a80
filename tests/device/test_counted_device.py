"""What a stash asks of an accelerator, counted on one that the CPU plays."""

import sys

import pytest
import torch
from torch import nn

from backstash import Stash
from backstash._torch import modules
from backstash.testing import CountedDevice, stash_on
from counts import KEYS

NBYTES = 128 * 256 * 4


class Net(nn.Module):
    """Its forward iterates a list of blocks."""

    def __init__(self, blocks):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(blocks)
        )

        self.trained = list(self.parameters())

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def step(net, stash, seed=0):
    x = torch.randn(128, 256, generator=torch.Generator().manual_seed(seed))
    with stash:
        loss = net(x).sum()
    return [loss.detach(), *torch.autograd.grad(loss, net.trained)]


def counted(blocks, options, *, recompute=False, steps=12):
    """The device's counts of each step, which have plain PyTorch's gradients."""
    device, net = CountedDevice(), Net(blocks)
    stash, found = stash_on(device, min_bytes=0, host="64MiB", **options), []
    if recompute:
        stash.recompute(*net.blocks)
    for seed in range(steps):
        _ = stash.plan
        device.counts.clear()
        assert all(map(torch.equal, step(net, stash, seed), step(net, Stash(), seed)))
        found.append(dict(device.counts))
    stash.close()
    return found


@pytest.mark.filterwarnings("ignore::backstash.StashWarning")  # the windows take more
@pytest.mark.parametrize(
    ("options", "recompute"),
    [({}, False), ({"keep": "1GiB"}, False), ({"budget": 14 * NBYTES}, False), ({}, True)],
)
def test_gradients_are_plain_pytorch_s_and_the_keys_are_the_documented_ones(options, recompute):
    found = counted(8, options, recompute=recompute)
    assert set().union(*found) <= {*KEYS}
    assert found[-1], "it is asked for something"


def test_each_copy_is_counted():
    for blocks in (3, 5):
        last = counted(blocks, {"inflight": 2 * NBYTES})[-1]
        assert last["copies_down"] == 2 * blocks  # what each linear and each activation is given
        assert last["copies_up"] > blocks


def test_a_step_that_fits_asks_nothing_for_each_block():
    few, many = (
        {key: min(each.get(key, 0) for each in steps) for key in KEYS}
        for steps in (counted(blocks, {"budget": "64MiB"}, steps=16)[-6:] for blocks in (3, 9))
    )
    assert few == many
    assert not few.get("host_syncs") and not few.get("kernels")


def test_what_is_recomputed_needs_one_synchronization_a_backward_at_most():
    """A sample of some calls is compared: a fingerprint in forward and one in backward, read at the end."""
    steps = counted(4, {}, recompute=True, steps=30)[4:]
    backwards = 2  # the other stash's step is recomputed, too
    assert 0 < max(each.get("host_syncs", 0) for each in steps) <= backwards
    assert 0 < max(each.get("kernels", 0) for each in steps) <= 2 * 4 * backwards
    assert not all(each.get("kernels") for each in steps)


def test_a_step_under_a_budget_opens_no_file():
    opened, is_on = [], [False]
    sys.addaudithook(lambda event, given: is_on[0] and event == "open" and opened.append(given[0]))
    device, net = CountedDevice(), Net(4)
    stash = stash_on(device, budget="64MiB", min_bytes=0, host="64MiB")
    for _ in range(8):
        step(net, stash)
        _ = stash.plan
    is_on[0] = True
    step(net, stash)
    is_on[0] = False
    stash.close()
    assert not opened


def test_a_module_below_a_list_is_searched_for_once(monkeypatch):
    searched, named = [], nn.Module.named_modules

    def named_modules(module, *given, **more):
        if not given and not more:  # else it calls itself
            searched.append(module)
        return named(module, *given, **more)

    device, net = CountedDevice(), Net(4)
    stash = stash_on(device, min_bytes=0, host="64MiB")
    step(net, stash)
    monkeypatch.setattr(nn.Module, "named_modules", named_modules)
    step(net, stash)
    assert not searched
    net.blocks = nn.ModuleList(reversed(net.blocks))  # the paths lead to other modules
    step(net, stash)
    assert len(searched) == 4
    assert modules.module_path([net, net.blocks[0]]) == "blocks.0"
    stash.close()


def test_an_event_has_ended_once_the_host_waited_or_enough_more_were_recorded():
    device = CountedDevice(ahead=2)
    stream = device.stream()
    first, second = stream.record_event(), stream.record_event()
    assert not first.query() and not second.query()
    second.synchronize()
    assert first.query() and second.query()
    third = stream.record_event()
    assert not third.query()
    stream.record_event(), stream.record_event()
    assert third.query()
    assert device.counts["host_syncs"] == 1 and device.counts["event_queries"] == 6


def test_what_it_holds_is_what_the_stash_holds():
    device = CountedDevice()
    stash = stash_on(device, min_bytes=0, host="64MiB", keep="1GiB")
    x = torch.ones(128, 256, requires_grad=True)
    with stash:
        y = x.exp()
    assert device.memory().held_bytes == NBYTES
    y.sum().backward()
    del y
    stash.stats()
    assert device.memory().held_bytes == 0 and device.memory().peak_bytes == NBYTES
    stash.close()


def test_what_is_left_in_place_counts_as_memory_once():
    """Otherwise a plan would be thought to hold less than it does, and keep more."""
    device = CountedDevice()
    stash = stash_on(device, keep="1GiB", host="64MiB", min_bytes=0)
    thread_state = stash._session.thread_state()
    leave = stash._admission.hook_leaving(thread_state, 8 * NBYTES)
    x, y = (torch.zeros(NBYTES // 4, requires_grad=True) * 1 for _ in range(2))
    left = [leave(x), leave(x), leave(x[4:])]
    assert device.left_bytes == device.holds() == NBYTES
    block = stash._admission.hook(thread_state)(y)
    left.append(leave(y))
    assert device.left_bytes == NBYTES and device.holds() == 2 * NBYTES, "the block has it"
    left.clear()
    assert device.left_bytes == 0, "as where autograd frees it"
    del block
    stash.close()


@pytest.mark.parametrize("at_once", [False, True])
def test_a_saved_tensor_whose_memory_the_program_frees_for_a_while_stays(at_once):
    """As Megatron-Core's ``CheckpointWithoutOutput`` does: its output comes back before it is used."""
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    stash = stash_on(CountedDevice(), host="64MiB", min_bytes=0)

    def bring_back():
        y.untyped_storage().resize_(4 * 64 * 64)
        y.untyped_storage().copy_(kept.untyped_storage())

    with stash:
        y = x + 1
        z = y.erf().sum()
        kept = y.detach().clone()
        y.untyped_storage().resize_(0)
        if at_once:
            bring_back()
    if not at_once:
        bring_back()
    (found,) = torch.autograd.grad(z, x)
    assert torch.equal(found, torch.autograd.grad((x + 1).erf().sum(), x)[0])
    stash.close()
