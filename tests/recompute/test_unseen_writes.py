"""What is written or replaced without a version that shows it: by collectives, fused optimizers, ``data =``."""

import copy
import functools
import sys
import weakref
from contextlib import contextmanager, nullcontext

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, distribute_tensor

from backstash import Action, Stash
from backstash._recompute import holding
from backstash._torch import sharded as sharded_parameters
from backstash._torch.optimizer_steps import OPTIMIZER_STEPS, watch_optimizer_steps
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


@contextmanager
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def used_before():
    """The first sharded module of a process leaves a thread's descriptors."""
    with group():
        sharded_steps(sharded(), lambda: None, 0)
        Distributed()(torch.ones(ROWS, WIDTH)).sum().backward()


@pytest.fixture
def alone(monkeypatch, used_before):
    """A process group of this process."""
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # the group replaces it
    with group():
        yield


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
        with pytest.raises(InplaceError, match="by an optimizer's step or a write to"):
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


class Other(torch.optim.Optimizer):
    """As optimizers of other libraries may be."""

    def __init__(self, *weights):
        super().__init__(weights, {})

    def step(self, closure=None):
        if closure is not None:
            closure()
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is not None:
                    each.data -= each.grad


def test_steps_count_the_parameters_to_which_they_may_write():
    """Those with a gradient before or after the step; all, where it may have had other gradients meanwhile."""
    watch_optimizer_steps()
    weight, other = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    optimizer, known = Other(weight, other), fused(weight, other)

    def is_counted(step, *args):
        before = OPTIMIZER_STEPS.latest
        step(*args)
        return [OPTIMIZER_STEPS.have_written(each, before) for each in (weight, other)]

    def closure():
        loss = (weight + other.detach()).sum()
        loss.backward()
        return loss

    assert is_counted(known.step) == is_counted(known.step, None) == [False, False]
    assert is_counted(known.step, closure) == [True, True], "its own hook may delete gradients"
    assert is_counted(known.step) == [True, False]
    known.register_step_post_hook(lambda *_: known.zero_grad())
    assert is_counted(known.step) == [True, False]
    assert is_counted(known.step) == [False, False]
    other.main_grad = torch.ones(3)
    assert is_counted(known.step) == [False, True]
    del other.main_grad
    assert is_counted(optimizer.step) == [True, True], "no gradient is needed"


def test_steps_count_by_the_range_of_memory_that_a_parameter_has():
    """The parameters of several networks may be parts of one buffer."""
    watch_optimizer_steps()
    flat = torch.ones(6, 4)
    one, other = (nn.Parameter(torch.empty(0)) for _ in range(2))
    one.data, other.data = flat[:3], flat[3:].t()
    one.grad = torch.ones(3, 4)
    before = OPTIMIZER_STEPS.latest
    fused(one, other).step()
    read = [one, other, flat, flat[2], flat[2:4, 1], flat[3:, 2]]
    found = [OPTIMIZER_STEPS.have_written(each, before) for each in read]
    assert found == [True, False, True, True, True, False]


def clearing(weight):
    """Its own hooks run before those of all optimizers."""
    optimizer = fused(weight)
    optimizer.register_step_post_hook(lambda *_: optimizer.zero_grad())
    return optimizer


class Given(torch.optim.Optimizer):
    """It makes its gradients itself."""

    def __init__(self, weight):
        super().__init__([weight], {})

    def step(self, closure=None):
        for each in self.param_groups[0]["params"]:
            each.data.sub_(one_row(each))


def closing(weight):
    """Its gradients exist within a step only."""
    optimizer = clearing(weight)
    weight.grad = None
    optimizer.step = functools.partial(optimizer.step, weight[3].sum().backward)
    return optimizer


@pytest.mark.parametrize("verify", ["first", "auto"])
@pytest.mark.parametrize("make", [Other, clearing, Given, closing])
def test_the_step_of_any_optimizer_is_seen(verify, make):
    net = Weighted()

    def act(step):
        if step >= BEGINS:
            net.weight.grad = one_row(net.weight)
            before = net.weight._version
            make(net.weight).step()
            assert net.weight._version == before
            net.weight.grad = None

    with Stash(min_bytes=0, verify=verify) as stash, stash.recompute(net):
        assert len(train([net], act, steps=BEGINS)) == BEGINS
        with pytest.raises(InplaceError, match="by an optimizer's step or a write to"):
            train([net], act)


class Distributed(Weighted):
    """It reads the local tensor of a DTensor, whose version does not rise with that of the DTensor."""

    def __init__(self):
        super().__init__()
        mesh = init_device_mesh("cpu", (1,))
        self.weight = nn.Parameter(distribute_tensor(self.weight.detach(), mesh, [Replicate()]))

    def forward(self, x):
        return (x + self.weight.to_local()).sin().cos()


def step_of(weight):
    weight.grad = distribute_tensor(one_row(weight.to_local()), weight.device_mesh, [Replicate()])
    torch.optim.SGD([weight], lr=0.5).step()
    weight.grad = None


@torch.no_grad()
def write_to(weight):
    weight.mul_(
        distribute_tensor(1 + one_row(weight.to_local()), weight.device_mesh, [Replicate()])
    )


@pytest.mark.parametrize("verify", ["first", "auto"])
@pytest.mark.parametrize("write", [step_of, write_to])
def test_a_write_to_a_dtensor_is_seen_where_its_local_tensor_was_read(alone, verify, write):
    net, other = Distributed(), Distributed()

    def act(step):
        write(net.weight if step >= BEGINS else other.weight)

    with Stash(min_bytes=0, verify=verify) as stash, stash.recompute(net):
        assert len(train([net], act, steps=BEGINS)) == BEGINS, "another parameter is written"
        assert stash.stats().recomputed_bytes
        with pytest.raises(InplaceError, match="by an optimizer's step or a write to"):
            train([net], act)


def sharded():
    net = nn.Sequential(Weighted(), nn.Linear(WIDTH, WIDTH))
    for each in net:
        fully_shard(each)
    return fully_shard(net)


def step_sharded(weight):
    torch.optim.SGD([weight], lr=0.5).step()


def step_fused(weight):
    before = weight._version
    torch.optim.AdamW([weight], lr=0.5, fused=True).step()
    assert weight._version == before


@torch.no_grad()
def write_sharded(weight):
    weight.mul_(2)


def test_a_sharded_parameter_that_was_replaced_is_the_one_that_is_compared(alone):
    """As loading a state does, after what is gathered from it has been seen."""
    net = sharded()
    with Stash(min_bytes=0, verify="first") as stash, stash.recompute(net[0]):
        sharded_steps(net, lambda: None, BEGINS)
        state = {name: each.detach().clone() for name, each in net.state_dict().items()}
        net.load_state_dict(state, assign=True)
        sharded_steps(net, lambda: None, BEGINS)
        with pytest.raises(InplaceError, match="by an optimizer's step or a write to"):
            sharded_steps(net, lambda: step_sharded(net[0].weight), 1)


def sharded_steps(net, write, begins):
    """Each with two graphs; from ``begins`` on, ``write`` is called between their backwards."""
    found = []
    for step in range(begins + 2):
        torch.manual_seed(step)
        first, second = (net(torch.randn(ROWS, WIDTH)).square().mean() for _ in range(2))
        first.backward()
        if step >= begins:
            write()
        second.backward()
        found += [each.grad.to_local().clone() for each in net.parameters()]
        net.zero_grad()
    return found


@pytest.mark.parametrize("is_known", [True, False])
@pytest.mark.parametrize("write", [step_sharded, step_fused, write_sharded])
def test_a_write_to_what_fsdp_gathers_again_is_seen(alone, monkeypatch, is_known, write):
    """It is gathered for backward without a version."""
    net = sharded()
    if not is_known:  # another version of PyTorch may not show it
        monkeypatch.setattr(sharded_parameters, "_pairs", lambda root: [None])
    with Stash(min_bytes=0, verify="first") as stash, stash.recompute(net[0]):
        sharded_steps(net, lambda: None, BEGINS)
        assert stash.stats().recomputed_bytes
        if is_known or write is not write_sharded:
            with pytest.raises(InplaceError, match="by an optimizer's step or a write to"):
                sharded_steps(net, lambda: write(net[0].weight), 1)


@pytest.mark.parametrize("write", [step_sharded, step_fused, write_sharded])
def test_a_write_to_another_parameter_that_fsdp_gathers_is_no_error(alone, write):
    net, other = sharded(), sharded()
    other(torch.randn(ROWS, WIDTH)).sum().backward()
    plain = sharded_steps(net, lambda: write(other[0].weight), 1)
    with Stash(min_bytes=0) as stash, stash.recompute(net[0], other[0]):
        found = sharded_steps(net, lambda: write(other[0].weight), 1)
        assert stash.stats().recomputed_bytes
    assert all(map(torch.equal, found, plain))


def test_optimizers_may_step_in_backward_on_what_fsdp_gathers(alone):
    """One for each parameter, as soon as it has its gradient."""

    def trained(stash):
        torch.manual_seed(0)
        net = sharded()
        if stash is not None:
            stash.recompute(*net)
        for each in net.parameters():
            optimizer = torch.optim.SGD([each], lr=0.5)
            each.register_post_accumulate_grad_hook(lambda _, optimizer=optimizer: optimizer.step())
        for step in range(6):
            torch.manual_seed(step)
            net(torch.randn(ROWS, WIDTH)).square().mean().backward()
            net.zero_grad()
        return [each.to_local() for each in net.parameters()]

    with Stash(min_bytes=0) as stash:
        assert all(map(torch.equal, trained(stash), trained(None)))
        assert stash.stats().recomputed_bytes


def test_a_parameter_without_memory_is_an_error_that_says_so():
    net = Weighted()
    with Stash(min_bytes=0) as stash, stash.recompute(net):
        loss = net(torch.randn(ROWS, WIDTH)).sum()
    net.weight.untyped_storage().resize_(0)
    with pytest.raises(InplaceError, match="has no memory any more: FSDP frees a parameter"):
        loss.backward()


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


def frozen(data):
    return nn.Parameter(torch.from_numpy(data), requires_grad=False)


def unaligned(data):
    """Its memory begins four bytes after one that is aligned."""
    memory = np.empty(data.size + 16, np.float32)
    begin = -memory.ctypes.data % 64 // 4 + 1
    made = memory[begin : begin + data.size].reshape(data.shape)
    made[:] = data
    return torch.from_numpy(made)


def by_numpy(weight):
    weight.detach().numpy()[3] += 1


def by_step(weight):
    """Frozen, with the gradient of an earlier phase."""
    weight.grad = one_row(weight)
    fused(weight).step()


@pytest.mark.parametrize("verify", ["first", "auto"])
@pytest.mark.parametrize(
    ("make", "write"), [(frozen, by_numpy), (frozen, by_step), (unaligned, by_numpy)]
)
def test_a_write_to_data_of_the_program_is_seen(verify, make, write):
    class Reads(nn.Module):
        def forward(self, x):
            return (x * weight).tanh().cos()

    weight, net = make(np.ones((ROWS, WIDTH), np.float32)), Reads()

    def act(step):
        if step >= BEGINS:
            before = weight._version
            write(weight)
            assert weight._version == before

    with Stash(min_bytes=0, verify=verify) as stash, stash.recompute(net):
        assert len(train([net], act, steps=BEGINS)) == BEGINS
        with pytest.raises(InplaceError, match="was changed since forward without a new version"):
            train([net], act)


class Turned(Weighted):
    """It reads a view of its weight, as a linear layer does."""

    def forward(self, x):
        return (x + self.weight.t().t()).sin().cos()


@pytest.mark.parametrize("kind", [Weighted, Turned])
def test_a_step_on_a_frozen_parameter_is_seen_where_there_is_no_fingerprint(monkeypatch, kind):
    """As on an accelerator."""
    monkeypatch.setattr(holding, "fingerprint_of", lambda tensor: None)
    net = kind().requires_grad_(requires_grad=False)

    def act(step):
        if step >= BEGINS:
            by_step(net.weight)

    def steps(count):
        for step in range(count):
            x = torch.randn(ROWS, WIDTH, requires_grad=True)
            loss = net(x).square().sum()
            act(step)
            loss.backward()

    with Stash(min_bytes=0) as stash, stash.recompute(net):
        steps(BEGINS)
        with pytest.raises(InplaceError, match="by an optimizer's step or a write to"):
            steps(BEGINS + 1)
