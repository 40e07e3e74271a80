"""What is written or replaced without a version that shows it: by collectives, fused optimizers, ``data =``."""

import copy
import sys
import weakref
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn

from backstash import Action, Stash
from backstash._torch.fused_steps import FUSED_STEPS, watch_fused_steps
from backstash._torch.schemas import operation_of
from backstash.errors import InplaceError

ROWS, WIDTH, BEGINS = 512, 64, 4


def train(nets, act, *, steps=8):
    """The gradients of each step, in which ``act(step)`` comes between forward and backward."""
    found = []
    for step in range(steps):
        torch.manual_seed(step)
        x = torch.randn(ROWS, WIDTH, requires_grad=True)
        loss = x
        for net in nets:
            net.step = step
            loss = net(loss)
        act(step)
        parameters = [each for net in nets for each in net.parameters()]
        found.append(torch.autograd.grad(loss.square().sum(), [x, *parameters]))
    return found


def assert_same(nets, act=lambda step: None, *, verify):
    plain = train(copy.deepcopy(nets), act)
    stash = Stash(min_bytes=0, verify=verify)
    with stash.recompute(*nets):
        found = train(nets, act)
    assert stash.stats().recomputed_bytes
    stash.close()
    for step, (one, other) in enumerate(zip(plain, found, strict=True)):
        assert all(map(torch.equal, one, other)), step


@pytest.fixture
def alone(monkeypatch):
    """A process group of this process."""
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # the group replaces it
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Exchanging(nn.Module):
    """One row of zeros gets a row of the input, which raises no version."""

    def __init__(self, begins):
        super().__init__()
        self.begins = begins

    def forward(self, x):
        zeros = torch.zeros(ROWS, WIDTH)
        if self.step >= self.begins:
            dist.all_to_all_single(zeros[:1], x[:1].contiguous())
        return (x + zeros).sin().cos()


@pytest.mark.parametrize("verify", ["first", "auto", "always"])
def test_what_a_collective_has_written_is_not_replayed(alone, verify):
    """The other module of the same operations has been compared, and its route is followed."""
    assert_same([Exchanging(99), Exchanging(0)], verify=verify)
    assert_same([Exchanging(BEGINS)], verify=verify)


def test_all_collectives_are_known_to_write():
    names = {each.split(".")[0] for each in torch._C._dispatch_get_all_op_names()}
    names = {each.removeprefix("c10d::") for each in names if each.startswith("c10d::")}
    written = {each for each in names if operation_of(getattr(torch.ops.c10d, each).default).writes}
    assert names - written == {"barrier", "check_for_nan", "send"}


class Weighted(nn.Module):
    """It reads a weight that PyTorch does not save."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(ROWS, WIDTH))

    def forward(self, x):
        x = (x + self.weight).sin().cos()
        return (x + self.weight).sin().cos()


def one_row(weight):
    gradient = torch.zeros_like(weight)
    gradient[3] = 1.0
    return gradient


def fused(*weights):
    return torch.optim.SGD(weights, lr=0.5, fused=True)


@pytest.mark.parametrize("verify", ["first", "auto"])
def test_a_fused_step_between_forward_and_backward_raises(verify):
    net, other = Weighted(), nn.Parameter(torch.ones(ROWS, WIDTH))

    def act(step):
        for each in (other, *([net.weight] if step >= BEGINS else [])):
            before = each._version
            each.grad = one_row(each)
            fused(net.weight, other).step()
            assert each._version == before  # else PyTorch raises an error by itself
            each.grad = None

    with Stash(min_bytes=0, verify=verify) as stash, stash.recompute(net):
        assert len(train([net], act, steps=BEGINS)) == BEGINS, "another parameter's steps"
        with pytest.raises(InplaceError, match="changed by a fused optimizer's step"):
            train([net], act)


@pytest.mark.parametrize("verify", ["first", "auto", "always"])
def test_a_fused_step_within_a_forward_is_seen(verify):
    """An inner backward makes the step, so that no mode sees it, between reading the weight and holding it."""

    class Stepping(Weighted):
        def forward(self, x):
            before = x + self.weight
            if self.step >= BEGINS:
                weight = self.weight
                optimizer = fused(weight)
                hook = weight.register_post_accumulate_grad_hook(lambda _: optimizer.step())
                (weight * one_row(weight)).sum().backward()
                hook.remove()
                weight.grad = None
            return (before.sin() + (x + self.weight).sin()).cos()

    assert_same([Stepping()], verify=verify)


def test_only_steps_of_fused_optimizers_are_counted():
    watch_fused_steps()
    weight, before = nn.Parameter(torch.ones(3)), FUSED_STEPS.latest
    weight.grad = torch.ones(3)
    torch.optim.SGD([weight], lr=0.1, foreach=True).step()
    assert FUSED_STEPS.latest == before
    fused(weight).step()
    assert FUSED_STEPS.latest == before + 1


class Swapping(nn.Module):
    """Around the forward, one row of the weight is another one."""

    def __init__(self):
        super().__init__()
        self.inner = Weighted()

    def forward(self, x):
        weight = self.inner.weight
        data = weight.data
        if self.step >= BEGINS:
            weight.data = torch.where(torch.arange(ROWS)[:, None] == 3, 0.5, data)
        x = self.inner(x)
        weight.data = data
        return x


@pytest.mark.parametrize("verify", ["first", "auto", "always"])
@pytest.mark.parametrize("policy", [None, lambda saved: None], ids=["", "with a policy"])
@pytest.mark.parametrize("is_trained", [True, False])
def test_a_weight_that_gets_other_data_is_replayed_as_it_was_read(verify, policy, is_trained):
    net = Swapping()
    if not is_trained:
        weight = net.inner.weight.detach()
        del net.inner.weight
        net.inner.register_buffer("weight", weight)
    plain = train([copy.deepcopy(net)], lambda step: None)
    with Stash(min_bytes=0, verify=verify, policy=policy) as stash, stash.recompute(net.inner):
        found = train([net], lambda step: None)
        assert stash.stats().recomputed_bytes
    for step, (one, other) in enumerate(zip(plain, found, strict=True)):
        assert all(map(torch.equal, one, other)), step


def test_an_input_that_is_larger_than_what_it_frees_is_not_held():
    class Pooled(nn.Module):
        def forward(self, x):
            return torch.sin(x.mean(1)).cos()

    net = Pooled()
    with Stash(min_bytes=0) as stash, stash.recompute(net):
        for _ in range(6):
            x = torch.randn(ROWS, 16, WIDTH, requires_grad=True)
            large = x * 2
            memory = weakref.ref(large.untyped_storage())
            loss = net(large).sum()
            del large
            assert memory() is None
            loss.backward()
        assert stash.stats().recomputed_bytes, "what is computed from the mean"


class Noisy(nn.Module):
    """The noise, which is saved, is noted after the input."""

    def forward(self, x):
        return torch.exp(x * torch.rand(ROWS, WIDTH))


class Averaging(nn.Module):
    def forward(self, x):
        return torch.exp(x.mean(0))


class Adding(nn.Module):
    def forward(self, one, other):
        return torch.exp(one + other)


INPUTS = {
    "a tensor": (Noisy, lambda x: (x * 2,), True),
    "expanded": (Averaging, lambda x: ((x[0] * 2).expand(ROWS, WIDTH),), True),
    "a part": (Noisy, lambda x: ((x.expand(8, ROWS, WIDTH) * 2)[3],), True),
    "two parts": (Adding, lambda x: (x.expand(8, ROWS, WIDTH) * 2)[3:5], False),
    "two": (Adding, lambda x: (x * 2, x * 3), False),
}


@pytest.mark.parametrize(("make", "given", "is_held"), INPUTS.values(), ids=INPUTS)
def test_inputs_that_take_no_more_than_they_free_are_held(make, given, is_held):
    net = make()
    with Stash(min_bytes=0) as stash, stash.recompute(net):
        net(*given(torch.randn(ROWS, WIDTH, requires_grad=True))).sum().backward()
        assert bool(stash.stats().recomputed_bytes) is is_held


@pytest.mark.parametrize("kind", [nn.GRUCell, nn.LSTMCell])
def test_a_policy_recomputes_what_parts_of_a_memory_led_to(kind):
    """Between the saves of its parts, a cell writes to the memory of the gates."""
    cell, x = kind(WIDTH, WIDTH), torch.randn(ROWS, WIDTH, requires_grad=True)

    def gradients(context):
        with context:
            made = cell(x)
            loss = (made if torch.is_tensor(made) else made[0]).square().sum()
        return torch.autograd.grad(loss, [x, *cell.parameters()])

    plain = gradients(nullcontext())
    with Stash(min_bytes=0, policy=lambda saved: Action("recompute")) as stash:
        for _ in range(3):
            assert all(map(torch.equal, gradients(stash), plain))


class Doubled(torch.autograd.Function):
    """Not recomputed, and nothing saves what it returns."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


@pytest.mark.parametrize(("parts", "is_held"), [(1, False), (2, True)])
def test_what_the_forward_made_may_take_half_of_what_it_frees(parts, is_held):
    class Repeated(nn.Module):
        def forward(self, x):
            return torch.exp(torch.cat([Doubled.apply(x)] * parts) + 1)

    with Stash(min_bytes=0) as stash, stash.recompute(net := Repeated()):
        net(torch.ones(ROWS, WIDTH, requires_grad=True)).sum().backward()
        assert bool(stash.stats().recomputed_bytes) is is_held
