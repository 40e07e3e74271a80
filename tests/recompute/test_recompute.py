"""Stash.recompute: what a module saves is freed, and replayed in backward. Plain PyTorch is the oracle."""

import copy
import gc
import math
import pickle
import random
import subprocess
import sys
import threading
import types
import weakref
from collections import Counter, deque
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import forward_ad
from torch.func import functional_call
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import backstash
import backstash._recompute.region_state as states
import backstash._recompute.replay as replays
from backstash import Action, Stash, graph
from backstash._recompute import declared, settings
from backstash._recompute.call import _are_same
from backstash._recompute.holding import HoldingTape
from backstash._saved.held import Held
from backstash._torch import schemas
from backstash._torch.dispatch import dispatch_modes
from backstash.errors import InplaceError, StashClosedError, UsageError
from backstash.testing import CountedDevice, MemoryStore, TwinDevice, stash_on
from long_tests import mostly_long
from oracle import same_bits

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

import soak_recomputed


class Block(nn.Module):
    """A transformer's block."""

    def __init__(self, width=32, heads=2):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width), nn.Dropout(0.2)
        )

    def forward(self, x, *, scale=1.0):
        batch, tokens, width = x.shape
        parts = self.qkv(self.norm1(x)).view(batch, tokens, 3, self.heads, -1)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.1)
        x = x + self.out(y.transpose(1, 2).reshape(batch, tokens, width)) * scale
        return x + self.mlp(self.norm2(x))


class Residual(nn.Module):
    """A ResNet's block."""

    def __init__(self, width=8):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, padding=1),
            nn.BatchNorm2d(width, momentum=None),
        )

    def forward(self, x):
        return torch.relu_(x + self.body(x))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.LSTMCell(16, 16)

    def forward(self, x):
        state = None
        for step in x.unbind(1):
            state = self.cell(step, state)
        return x * state[0][:, None]


class Noisy(nn.Module):
    """Draws from every generator, and has an operation that fills what it has saved."""

    def __init__(self):
        super().__init__()
        self.layer, self.rrelu = nn.Linear(16, 16), nn.RReLU()

    def forward(self, x):
        if random.random() < 0.5:
            x = x * float(np.random.rand())
        return self.rrelu(self.layer(x)) * torch.rand(16)


NETS = {
    "transformer": (Block, (4, 12, 32)),
    "resnet": (Residual, (2, 8, 10, 10)),
    "recurrent": (Recurrent, (3, 5, 16)),
    "noisy": (Noisy, (6, 16)),
}
PLACES = {
    "in memory": {},
    "below": {"disk": True, "inflight": 0},
    "some kept": {"disk": True, "keep": "20KiB"},
    "packed": {"policy": lambda saved: Action("pack")},
    "recomputed": {"policy": lambda saved: Action("recompute")},
}


def net_of(kind, count=3):
    torch.manual_seed(0)
    make, shape = NETS[kind]
    return nn.Sequential(*(make() for _ in range(count))), torch.randn(shape)


def stash_of(**options):
    if options.pop("disk", False):
        options["disk"] = MemoryStore()
    return Stash(**{"min_bytes": 0, **options})


def train(net, x, stash=None, *, steps=3, cast=False, loss_of=None):
    """All that a run leaves: gradients, buffers, and what the generators give next."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(1)
    found = []
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for _ in range(steps):
        x_in = x.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=cast):
            if stash is None:
                loss = (loss_of or F.mse_loss)(net(x_in), x)
            else:
                with stash:
                    loss = (loss_of or F.mse_loss)(net(x_in), x)
        loss.backward()
        found += [loss.detach(), x_in.grad, torch.rand(2), random.random(), np.random.rand()]
        found += [each.grad.clone() for each in net.parameters()]
        found += [each.clone() for each in net.buffers()]
        optimizer.step()
        optimizer.zero_grad()
    return found


def are_same(left, right):
    return len(left) == len(right) and all(map(same_bits, left, right))


@pytest.mark.parametrize("cast", [False, True])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", NETS)
def test_training_is_the_same(kind, place, cast):
    net, x = net_of(kind)
    other = copy.deepcopy(net)
    expected = train(net, x, cast=cast)
    stash = stash_of(**PLACES[place])
    with stash.recompute(*other) as handle:
        assert are_same(train(other, x, stash, cast=cast), expected)
        assert repr(handle).startswith("<stash on a ")
    stats = stash.stats()
    assert (
        stats.recomputed_bytes > 1000
    )  # not exact: each network saves as much as PyTorch's operations do
    assert not any("not recomputed: " in each and "module" in each for each in stats.left)
    assert stats.blocks == 0  # without the garbage collector's help


@pytest.mark.parametrize(("width", "is_freed"), [(16 << 10, True), (4 << 10, False)])
def test_small_tensors_are_freed_too(width, is_freed):
    """Of 16 KiB and more, however much larger what moves has to be."""
    net = nn.Sequential(nn.Tanh(), nn.Sigmoid())
    stash = Stash(disk=MemoryStore())
    with stash.recompute(net):
        for _ in range(2):
            x = torch.linspace(-1, 1, width // 4, requires_grad=True)
            with stash:
                loss = net(x * 1).square().sum()
            made = loss.grad_fn.next_functions[0][0].next_functions[0][0]  # of the sigmoid
            assert (type(made._raw_saved_result.data) is Held) == is_freed
            loss.backward()
            expected = x.grad
            x.grad = None
            net(x * 1).square().sum().backward()
            assert same_bits(expected, x.grad)
    stash.close()


def test_a_small_tensor_that_is_no_result_is_held():
    """Not every byte of it may have been written, as of noise that is made for a part of a batch."""

    class Masked(nn.Module):
        def forward(self, x):
            return x * torch.ones(x.shape)

    net, stash = Masked(), Stash(disk=MemoryStore())
    with stash.recompute(net):
        for _ in range(2):
            x = torch.linspace(-1, 1, 8 << 10, requires_grad=True)
            with stash:
                y = net(x * 1)
            assert type(y.grad_fn._raw_saved_other.data) is not Held
    stash.close()


def test_a_second_run_begins_no_step():
    net, x = net_of("transformer")
    stash = stash_of(disk=True, keep=None)
    with stash.recompute(*net):
        train(net, x, stash, steps=1)
        before = stash._session.predictor.passes
        train(net, x, stash, steps=4)
    assert stash._session.predictor.passes == before + 4


@pytest.mark.parametrize("kind", ["transformer", "resnet"])
def test_retain_graph_and_double_backward(kind):
    def step(net, x):
        torch.manual_seed(2)
        x_in = x.clone().requires_grad_()
        loss = net(x_in).square().mean()
        first = torch.autograd.grad(loss, x_in, retain_graph=True)
        second = torch.autograd.grad(loss, list(net.parameters()), retain_graph=True)
        (inner,) = torch.autograd.grad(loss, x_in, create_graph=True)
        return [
            *first,
            *second,
            *torch.autograd.grad(inner.square().sum(), list(net.parameters()), allow_unused=True),
        ]

    net, x = net_of(kind)
    if kind == "transformer":  # the attention's own double backward is not implemented on the CPU
        net = nn.Sequential(*(each.mlp for each in net))
    want = step(copy.deepcopy(net), x)
    stash = stash_of(disk=True)
    with stash.recompute(*net):
        for _ in range(2):
            got = step(net, x)
            assert all(
                (a is None and b is None) or same_bits(a, b) for a, b in zip(got, want, strict=True)
            )
    gc.collect()
    assert stash.stats().blocks == 0


class Reading(nn.Module):
    """What its forward gives depends on more than its input."""

    factor = 2.0

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 16)
        self.register_buffer("shift", torch.ones(16))

    def forward(self, x):
        return (self.layer(x) * Reading.factor + self.shift).tanh()


def _change_weight(net):
    net.layer.weight.data.mul_(1.5)


def _change_buffer(net):
    net.shift.data.add_(1)


def _change_global(net):
    Reading.factor = 3.0


def _step(net):
    with torch.no_grad():
        net.layer.weight.mul_(1.5)


@pytest.mark.parametrize("change", [_change_weight, _step])
@pytest.mark.parametrize("known", [False, True])
def test_a_weight_that_changed_since_forward_raises(change, known):
    """Where ``torch.utils.checkpoint`` is silently wrong."""
    net, x = Reading(), torch.randn(4, 16)
    stash = stash_of()
    with stash.recompute(net):
        if known:
            net(x).sum().backward()
        loss = net(x).sum()
        change(net)
        with pytest.raises(InplaceError, match=r"gave different bits|cannot be recomputed"):
            loss.backward()


@pytest.mark.parametrize("change", [_change_buffer, _change_global])
def test_what_plain_backward_does_not_read_may_change(change, monkeypatch):
    monkeypatch.setattr(Reading, "factor", 2.0)
    net, x = Reading(), torch.randn(4, 16)
    expected = torch.autograd.grad(net(x).sum(), list(net.parameters()))
    stash = stash_of()
    with stash.recompute(net):
        net(x).sum().backward()
        loss = net(x).sum()
        change(net)
        assert are_same(torch.autograd.grad(loss, list(net.parameters())), expected)


def test_an_input_that_changed_in_place_raises():
    net, x = nn.Sequential(nn.Linear(16, 16), nn.Tanh()), torch.randn(4, 16)
    stash = stash_of()
    with stash.recompute(net):
        y = x.clone()
        loss = net(y).sum()
        y.add_(1)
        with pytest.raises(InplaceError):
            loss.backward()


class Adding(nn.Module):
    def forward(self, x):
        x.add_(1)
        return x.sin().exp()


class Growing(nn.Module):
    """Its buffer changes what it gives, as spectral norm's does."""

    def __init__(self):
        super().__init__()
        self.register_buffer("state", torch.ones(16))

    def forward(self, x):
        self.state.mul_(1.5)
        return (x * self.state).exp()


class Caching(nn.Module):
    """It appends to what it is given."""

    def forward(self, x, cache):
        cache.items.append(x)
        return torch.cat(cache.items).exp().sum(0, keepdim=True)


class Cache:
    def __init__(self):
        self.items = []


class Momentum(nn.Module):
    """Its forward changes a parameter that is not trained."""

    def __init__(self):
        super().__init__()
        self.layer, self.mean = (
            nn.Linear(16, 16),
            nn.Parameter(torch.zeros(16), requires_grad=False),
        )

    def forward(self, x):
        with torch.no_grad():
            self.mean.lerp_(x.mean(0), 0.1)
        return self.layer(x).tanh()


class Drawing(nn.Module):
    def __init__(self):
        super().__init__()
        self.generator = torch.Generator().manual_seed(0)

    def forward(self, x):
        return (x * torch.rand(16, generator=self.generator)).exp()


class Auxiliary(nn.Module):
    """It goes backward itself."""

    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.Linear(16, 16), nn.Linear(16, 1)

    def forward(self, x):
        y = self.layer(x).tanh()
        self.head(y.detach()).square().mean().backward()
        return y.exp()


class Counting(nn.Module):
    """Its result depends on how often it was called."""

    def __init__(self):
        super().__init__()
        self.layer, self.calls = nn.Linear(16, 16), 0

    def forward(self, x):
        self.calls += 1
        return (self.layer(x) * self.calls).tanh().sin()


class Statistics(nn.Module):
    """It reads a buffer, and changes it afterwards."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 16)
        self.register_buffer("mean", torch.zeros(16))

    def forward(self, x):
        y = (x - self.mean).sin()
        self.mean.lerp_(x.detach().mean(0), 0.5)
        return self.layer(y).tanh() - self.mean


class Logging(nn.Module):
    """It keeps tensors of the graph elsewhere, and has hooks."""

    kept: ClassVar = []

    def __init__(self):
        super().__init__()
        self.layer, self.seen = nn.Linear(16, 16), []
        self.layer.register_forward_hook(lambda *given: self.seen.append(len(self.seen)))

    def forward(self, x):
        y = self.layer(x).tanh()
        Logging.kept.append(y)
        return (y * Logging.kept[0].detach()).exp()


class InPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.out = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x):
        y = self.layer(x)
        y.relu_()
        z = torch.empty_like(y)
        z.copy_(y.detach())
        z[:, ::2] = z[:, 1::2]
        z.mul_(0.5)
        left, right = torch.unsafe_chunk(self.out(y) + z, 2, 1)
        return (left.sigmoid_() * right.tanh_()).exp()


class Ordinary(nn.Module):
    """A function with a kernel that no tape sees."""

    class Kernel(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            y = torch.zeros_like(x)
            y.numpy()[...] = np.square(x.detach().numpy())
            ctx.save_for_backward(x)
            return y

        @staticmethod
        def backward(ctx, grad):
            return 2 * grad * ctx.saved_tensors[0]

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x):
        return self.Kernel.apply(self.layer(x).tanh()).sin().exp()


def _present(found):
    return [each for each in found if each is not None]


def other_numbers_of(net):
    """What ``net`` holds in addition to tensors of the state dict."""
    return [
        getattr(net, "calls", None),
        getattr(net, "seen", None),
        [each.detach().clone() for each in net.buffers()],
    ]


@pytest.mark.parametrize(
    "make",
    [Auxiliary, Counting, Statistics, Logging, InPlace, Ordinary, Momentum, Drawing, Growing],
)
def test_side_effects_of_a_forward_happen_once(make):
    found = []
    for stash in (None, stash_of(disk=True, inflight=0)):
        torch.manual_seed(0)
        Logging.kept.clear()
        net, x = make(), torch.randn(4, 16)
        with stash.recompute(net) if stash else nullcontext():
            for _ in range(3):
                x_in = x.clone().requires_grad_()
                (net(x_in * 2).square().mean()).backward()
                found.append([x_in.grad, *(each.grad for each in net.parameters())])
                Logging.kept[:] = Logging.kept[:1]
        found.append(other_numbers_of(net))
    half = len(found) // 2
    for got, want in zip(found[half:-1], found[: half - 1], strict=True):
        assert all(map(torch.equal, _present(got), _present(want)))
    assert found[-1][:2] == found[half - 1][:2]
    assert are_same(found[-1][2], found[half - 1][2])
    assert stash.stats().recomputed_bytes > 0, stash.stats().left
    stash.close()


class NoWrites(TorchDispatchMode):
    """Fails where an operation writes to memory that is older than the mode."""

    def __init__(self):
        super().__init__()
        self.made, self.operations = {}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.operations += 1
        for at, each in enumerate(func._schema.arguments):
            given = (kwargs or {}).get(each.name) if each.kwarg_only else args[at : at + 1]
            if each.alias_info is not None and each.alias_info.is_write and "set_" not in str(func):
                for tensor in given if isinstance(given, (tuple, list)) else [given]:
                    assert tensor.untyped_storage()._cdata in self.made, f"{func} writes old memory"
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, torch.Tensor) and "set_" not in str(func):
                given = [
                    each.untyped_storage()._cdata for each in args if isinstance(each, torch.Tensor)
                ]
                storage = tensor.untyped_storage()
                if storage._cdata not in given:
                    self.made[storage._cdata] = storage
        return result


@pytest.mark.parametrize("kind", NETS)
def test_a_replay_writes_no_memory_but_its_own(kind, monkeypatch):
    modes, alone = [], replays._alone

    @contextmanager
    def watched():
        with alone(), NoWrites() as mode:
            modes.append(mode)
            yield

    monkeypatch.setattr(replays, "_alone", watched)
    net, x = net_of(kind)
    want = train(copy.deepcopy(net), x)
    stash = stash_of()
    with stash.recompute(*net):
        assert are_same(train(net, x, stash), want)
    assert len(modes) >= 9 and all(each.operations > 2 for each in modes)


def test_nothing_is_held_but_the_inputs_and_random_numbers():
    net, x = net_of("transformer", count=4)
    stash = stash_of(disk=True, keep=None)
    with stash.recompute(*net):
        for each in net:
            each.eval()
        net(x).sum().backward()
        with stash:
            loss = net(x).sum()
        held = stash.stats().keep_bytes
        loss.backward()
    noise = 4 * 2 * 12 * 12 * 4  # of the attention's dropout
    assert 4 * x.nbytes < held < 4 * (x.nbytes + noise / 8), "it is packed to bits"


def test_forward_holds_no_more_than_without():
    """The tape holds no result of an operation that can be replayed."""
    alive = []

    class Deep(nn.Module):
        def forward(self, x):
            refs = []
            for _ in range(8):
                x = x * 1.1
                refs.append(StorageWeakRef(x.untyped_storage()))
                x = x.sin()
                alive.append(sum(not each.expired() for each in refs))
            return x

    net, stash = Deep(), stash_of()
    with stash.recompute(net):
        net(torch.ones(64, requires_grad=True)).sum().backward()
        del alive[:]
        net(torch.ones(64, requires_grad=True)).sum().backward()
    assert len(alive) == 8 and max(alive) <= 1


def test_an_operand_that_is_written_in_the_forward_is_copied():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.state = torch.ones(200, 200)

        def forward(self, x):
            y = (x + self.state).sin()
            self.state.add_(1)
            return y

    found = []
    for stash in (None, stash_of()):
        net, x = Net(), torch.randn(200, 200, requires_grad=True)
        torch.manual_seed(0)
        x.data.normal_()
        with stash.recompute(net) if stash else nullcontext():
            for _ in range(3):
                found.append(torch.autograd.grad(net(x).sum(), x)[0])
    assert are_same(found[:3], found[3:])
    assert stash.stats().recomputed_bytes > 0


@pytest.mark.parametrize("size", [2, 200])
@pytest.mark.parametrize("where", ["module", "context"])
def test_what_depends_on_a_tensor_of_inference_mode_is_held(where, size):
    """PyTorch counts no changes of such a tensor, and does not save it."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(size, size)
            with torch.inference_mode():
                self.shift = torch.randn(size, size)
                self.noise = torch.rand(size, size)

        def forward(self, x):
            x = self.linear(x).sin() * 2
            return F.gelu(x + self.shift).exp() + self.noise

    net, x = Net(), torch.randn(size, size, requires_grad=True)
    expected = torch.autograd.grad(net(x).sum(), [x, *net.parameters()])
    options = {"policy": lambda saved: Action("recompute")} if where == "context" else {}
    with stash_of(**options) as stash:
        if where == "module":
            stash.recompute(net)
        for _ in range(3):
            loss = net(x).sum()
            with torch.inference_mode():
                shift = net.shift.clone()
                net.shift.add_(1)
            found = torch.autograd.grad(loss, [x, *net.parameters()])
            with torch.inference_mode():
                net.shift.copy_(shift)
            assert are_same(found, expected)
    if where == "module" and size > 2:
        assert "made in inference mode" in str(stash.stats())
        assert stash.stats().recomputed_bytes > 0, "what does not depend on it"


def test_an_interrupt_in_a_replay_leaves_a_graph_that_works(monkeypatch):
    net, x = net_of("resnet", count=1)
    stash = stash_of(disk=True)
    with stash.recompute(*net):
        net(x).sum().backward()
        net.zero_grad()
        loss = net(x).sum()
        run, calls = replays.Values.run, []

        def interrupted(self, op):
            calls.append(op)
            if len(calls) == 3:
                raise KeyboardInterrupt
            run(self, op)

        monkeypatch.setattr(replays.Values, "run", interrupted)
        torch.manual_seed(5)
        before = [each.clone() for each in net.buffers()]
        with pytest.raises(KeyboardInterrupt):
            loss.backward()
        monkeypatch.undo()
        assert are_same(list(net.buffers()), before)
        loss.backward()
        got = [each.grad for each in net.parameters()]
        net.zero_grad()
        net(x).sum().backward()
    assert are_same(got, [each.grad for each in net.parameters()])
    stash.close()


def test_an_interrupt_in_forward_leaves_no_tape_behind():
    class Interrupted(nn.Module):
        def forward(self, x):
            raise KeyboardInterrupt

    net = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), Interrupted())
    stash = stash_of()
    with stash.recompute(net):
        with pytest.raises(KeyboardInterrupt):
            net(torch.ones(4, 16))
        net[2] = nn.Identity()
        net(torch.ones(4, 16)).sum().backward()
    assert not dispatch_modes()
    assert stash.stats().recomputed_bytes > 0


def test_a_function_s_kernels_are_not_replayed():
    net, x = Ordinary(), torch.randn(4, 16)
    stash = stash_of()
    with stash.recompute(net):
        net(x).sum().backward()
    (left,) = (each for each in stash.stats().left if "autograd.Function" in each)
    assert left == "not recomputed: an autograd.Function computed it"


def test_what_a_replay_gives_other_bits_for_is_held_and_said():
    """A kernel that no tape sees has written to the memory, outside a function."""

    class Unseen(nn.Module):
        def forward(self, x):
            mask = torch.zeros(4, 16)
            mask.numpy()[:, ::2] = 1
            return (x * mask).sin().exp()

    net, x = Unseen(), torch.randn(4, 16, requires_grad=True)
    want = torch.autograd.grad(net(x * 2).sum(), x)
    stash = stash_of()
    with stash.recompute(net):
        for _ in range(3):
            assert are_same(torch.autograd.grad(net(x * 2).sum(), x), want)
    assert "not recomputed: recomputing it gives different bits" in stash.stats().left


def test_what_a_kernel_that_is_not_seen_changes_later_raises():
    class Unseen(nn.Module):
        fill = 0.0

        def forward(self, x):
            mask = torch.zeros(4, 16)
            mask.numpy()[...] = self.fill
            return (x + mask).sin().exp()

    net, x = Unseen(), torch.randn(4, 16, requires_grad=True)
    stash = stash_of()
    with stash.recompute(net):
        net(x * 2).sum().backward()
        net.fill = 1.0
        with pytest.raises(InplaceError, match="gave different bits"):
            net(x * 2).sum().backward()


def test_looking_at_what_is_freed():
    net = nn.Sequential(nn.Linear(16, 16), nn.Tanh())
    stash = stash_of()
    with stash.recompute(net):
        net(torch.ones(4, 16))
        y = net(torch.ones(4, 16))
        for _ in range(2):
            (found,) = graph.saved(y.grad_fn)
            assert (found.shape, found.dtype, found.nbytes) == ((4, 16), torch.float32, 256)
            assert found.where == "recomputed"
            assert same_bits(y.grad_fn._saved_result.detach(), y.detach())


def test_copies_pickles_removal_and_wrong_calls():
    net, x = nn.Sequential(nn.Linear(16, 16), nn.Tanh()), torch.ones(4, 16)
    stash = stash_of()
    handle = stash.recompute(net)
    twin = copy.deepcopy(net)
    twin(x).sum().backward()
    assert stash.stats().recomputed_bytes > 0
    other = pickle.loads(pickle.dumps(net))
    assert torch.equal(other(x), net(x))
    handle.remove()
    handle.remove()
    assert "removed" in repr(handle)
    before = stash.stats().recomputed_bytes
    net(x).sum().backward()
    assert stash.stats().recomputed_bytes == before
    with pytest.raises(
        UsageError, match="a ModuleList, which has no forward: give the modules in it"
    ):
        Stash().recompute(nn.ModuleList([nn.Linear(2, 2)]))
    with pytest.raises(UsageError, match="allowed are modules"):
        stash.recompute("blocks.*")
    with stash.recompute(net):
        loss = net(x).sum()
        stash.close()
        loss.backward()
        with pytest.raises(StashClosedError):
            net(x)


def test_what_was_computed_again_and_not_used_is_dropped_when_backward_ends():
    net = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
    x = torch.randn(8, 64, requires_grad=True)
    stash = stash_of()
    with stash.recompute(net):
        net(x).sum().backward()
        y = net(x)
        torch.autograd.grad(y.sum(), list(net[2].parameters()), retain_graph=True)
        held = y.grad_fn.next_functions[0][0].next_functions[1][0]._raw_saved_result.data
        assert type(held) is Held and held.made is None


def test_an_lstm_of_many_steps_is_run_again():
    """On the CPU oneDNN's, with a workspace of 1 MiB: a first run has fresh memory for it, a later one not."""
    layers, stash = [nn.LSTM(128, 128) for _ in range(6)], stash_of(keep=None)

    def step():
        torch.manual_seed(0)
        y = x = torch.randn(4, 32, 128, requires_grad=True)
        for each in layers:
            y, _ = each(y)
        y.square().sum().backward()
        return x.grad

    with stash.recompute(*layers):
        found = [step() for _ in range(4)]
    expected = step()
    assert all(torch.equal(each, expected) for each in found)


def test_attributes_of_the_module_are_those_of_the_first_run():
    class Remembering(nn.Module):
        def __init__(self):
            super().__init__()
            self.calls, self.layer = 0, nn.Linear(16, 16)

        def forward(self, x):
            self.calls += 1
            y = self.layer(x).tanh()
            self.aux = y.square().mean()
            self.new = y.detach()
            return y

    net = Remembering()
    stash = stash_of()
    with stash.recompute(net):
        for step in range(1, 3):
            y = net(torch.ones(4, 16))
            aux = net.aux
            (y.sum() + aux).backward()
            assert net.calls == step
            assert net.aux is aux


class Attention(nn.Module):
    def forward(self, x):
        return F.scaled_dot_product_attention(x, x, x, is_causal=True)


def test_the_settings_of_the_first_run():
    x = torch.randn(2, 2, 64, 16, requires_grad=True)
    net = Attention()

    def step():
        threads, kernels = torch.get_num_threads(), [torch.nn.attention.SDPBackend.MATH]
        torch.set_num_threads(1)
        with torch.nn.attention.sdpa_kernel(kernels):
            loss = net(x * 2).sum()
        torch.set_num_threads(2)
        try:
            return torch.autograd.grad(loss, x)
        finally:
            assert torch.get_num_threads() == 2
            assert torch.backends.cuda.flash_sdp_enabled()
            torch.set_num_threads(threads)

    want = step()
    stash = stash_of()
    with stash.recompute(net):
        for _ in range(2):
            assert are_same(step(), want)
    assert stash.stats().recomputed_bytes > 0


def test_forward_that_takes_a_gradient_itself():
    class Penalty(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(16, 16)

        def forward(self, x):
            y = self.layer(x).tanh().sum()
            (inner,) = torch.autograd.grad(y, x, create_graph=True)
            return y + inner.square().sum()

    net = Penalty()
    x = torch.randn(4, 16, requires_grad=True)
    want = torch.autograd.grad(net(x), [x, *net.layer.parameters()])
    stash = stash_of()
    with stash.recompute(net):
        for _ in range(2):
            assert are_same(torch.autograd.grad(net(x), [x, *net.layer.parameters()]), want)


def test_arguments_of_all_kinds():
    class Mixing(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(16, 16)

        def forward(self, pair, *, more, flag, none=None):
            x, y = pair
            found = {"sum": self.layer(x).exp() * y + more["z"].sin()}
            return (found if flag else None), none

    net = Mixing()
    x, y, z = (torch.randn(4, 16, requires_grad=True) for _ in range(3))

    def step():
        found, none = net([x * 2, y], more={"z": z, "n": 3}, flag=True)
        assert none is None
        return torch.autograd.grad(found["sum"].sum(), [x, y, z, *net.parameters()])

    want = step()
    stash = stash_of(disk=True)
    with stash.recompute(net):
        for _ in range(2):
            assert are_same(step(), want)
    assert stash.stats().recomputed_bytes > 0


@pytest.mark.parametrize("reentrant", [False, True])
def test_around_inside_and_next_to_a_checkpoint(reentrant):
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x):
            y = checkpoint(lambda x: self.first(x).tanh().exp(), x, use_reentrant=reentrant)
            return self.second(y).tanh()

    net = Checkpointed()
    x = torch.randn(4, 16, requires_grad=True)

    def step():
        y = net(x)
        z = checkpoint(net, y, use_reentrant=reentrant)
        net.zero_grad()
        x.grad = None
        z.sum().backward()
        return [x.grad, *(each.grad.clone() for each in net.parameters())]

    want = step()
    stash = stash_of(disk=True)
    with stash.recompute(net):
        for _ in range(2):
            assert are_same(step(), want)


def test_the_outer_one_of_two_is_run_again():
    net, x = net_of("transformer", count=2)
    want = train(copy.deepcopy(net), x)
    stash = stash_of()
    with stash.recompute(net, *net, net[0].mlp):
        assert are_same(train(net, x, stash), want)
    other = stash_of()
    with other.recompute(net):
        train(net, x, other)
    assert stash.stats().recomputed_bytes == other.stats().recomputed_bytes


def test_no_mode_around_backward_sees_a_second_run():
    class Seeing(TorchDispatchMode):
        seen = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.seen += "tanh.default" in str(func)
            return func(*args, **(kwargs or {}))

    net, x = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16)), torch.ones(4, 16)
    stash = stash_of()
    with stash.recompute(net):
        net(x)
        loss = net(x).sum()
        with Seeing() as mode, torch.device("meta"):
            loss.backward()
        assert mode.seen == 0
        assert stash.stats().recomputed_bytes > 0
        with Seeing() as mode:
            net(x)
        assert mode.seen == 1
        assert any("a dispatch mode" in each for each in stash.stats().left)


def test_two_threads_have_backward_of_one_graph_at_once():
    net, x = net_of("resnet", count=2)
    want = train(copy.deepcopy(net), x, steps=1)
    stash = stash_of(disk=True)
    with stash.recompute(*net):
        train(copy.deepcopy(net), x, stash, steps=1)
        torch.manual_seed(1)
        x_in = x.clone().requires_grad_()
        with stash:
            loss = F.mse_loss(net(x_in), x)
        found = []

        def run():
            found.append(torch.autograd.grad(loss, x_in, retain_graph=True)[0])

        threads = [threading.Thread(target=run) for _ in range(4)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
    assert all(same_bits(each, want[1]) for each in found)
    assert len(found) == 4
    assert are_same(list(net.buffers()), want[-len(list(net.buffers())) :])


def test_a_graph_that_is_dropped_and_one_without_gradients():
    net, x = net_of("transformer", count=2)
    stash = stash_of()
    with stash.recompute(*net):
        for _ in range(3):
            net(x)
        with torch.no_grad():
            net(x)
    assert stash.stats().blocks == 0


@pytest.mark.filterwarnings("ignore")
def test_random_networks():
    """`scripts/soak_recomputed.py --modules` is the long form."""
    said = Counter()
    wrong = [soak_recomputed.judge(seed, said, modules=True) for seed in range(12)]
    assert not any(wrong)
    assert said["networks"] > 9 and said["recomputed bytes"] > 0.3 * said["blocks' bytes"]


def test_on_an_accelerator_the_comparison_is_the_device_s():
    net, x = net_of("transformer", count=2)
    want = train(copy.deepcopy(net), x)
    stash = stash_on(TwinDevice(), host="1MiB", keep=0, min_bytes=0, disk=MemoryStore())
    with stash.recompute(*net):
        assert are_same(train(net, x, stash), want)
    assert stash.stats().recomputed_bytes > 0


@pytest.mark.parametrize("device", [TwinDevice, CountedDevice])
def test_on_an_accelerator_other_bits_raise_when_backward_ends(device):
    net, x = net_of("transformer", count=2)
    stash = stash_on(
        device(), host="1MiB", keep=0, min_bytes=0, disk=MemoryStore(), verify="always"
    )
    with stash.recompute(*net):
        train(net, x, stash)  # the second run is alike
        with stash:
            loss = net(x).square().sum()
    weight = next(net.parameters())
    weight.data.mul_(2)  # unseen by its version
    for _ in range(2):
        with pytest.raises(InplaceError, match="gave different bits"):
            loss.backward(retain_graph=True)
    weight.data.div_(2)
    loss.backward()


def test_on_an_accelerator_one_tensor_of_some_forwards_is_compared():
    """In all of them once, by one wait for each backward at most."""
    net, x = net_of("transformer", count=2)
    seen = Counter()

    class Marks(CountedDevice):
        def mark(self, storage, made_on, first=0, nbytes=-1):
            seen[number[0]] += 1
            return super().mark(storage, made_on, first, nbytes)

    device, number = Marks(), [0]
    stash = stash_on(device, host="1MiB", keep=0, min_bytes=0)
    raised = 0
    with stash.recompute(*net):
        for number[0] in range(80):
            with stash:
                loss = net(x).square().sum()
            before = device.counts["host_syncs"]
            if number[0] < 20:
                loss.backward()
                assert device.counts["host_syncs"] - before == bool(seen[number[0]])
            else:
                for each in net.parameters():
                    each.data.neg_()
                try:
                    loss.backward()
                except InplaceError:
                    raised += 1
    sampled = sum(seen[at] > 0 for at in range(20, 80))
    assert 1 <= raised <= sampled < 60  # some do not depend on a parameter
    assert max(count for at, count in seen.items() if at) <= len(net)


class Keeping(nn.Module):
    """It changes what an attribute holds; ``numbers_of`` returns that in numbers."""

    def __init__(self, held, change, numbers_of):
        super().__init__()
        self.layer, self.held = nn.Linear(16, 16), held
        self.change, self.numbers_of = change, numbers_of

    def forward(self, x):
        y = self.layer(x)
        self.change(self.held, y)
        return y.tanh()


class Meter:
    def __init__(self):
        self.calls, self.norms = 0, [nn.BatchNorm1d(16)]


class Slotted:
    __slots__ = ("calls",)

    def __init__(self):
        self.calls = 0


class Named(list):
    calls = 0


def count(meter, y):
    meter.calls += 1


IN_CONTAINERS = {
    "an attribute of a list": (Named, count, lambda held: held.calls),
    "a list": (
        list,
        lambda held, y: held.append(y.mean()),
        lambda held: [each.item() for each in held],
    ),
    "a dictionary": (dict, lambda held, y: held.update({len(held): 1}), dict),
    "a set": (set, lambda held, y: held.add(len(held)), set),
    "a deque": (lambda: deque(maxlen=2), lambda held, y: held.append(y[0, 0].item()), list),
}


def kept_twice(held, change, numbers_of):
    """Train with plain PyTorch and under a stash, and compare what is held; the stash's statistics."""
    x = torch.randn(4, 16)
    torch.manual_seed(0)
    modules = [Keeping(held(), change, numbers_of) for _ in range(2)]
    modules[1].load_state_dict(modules[0].state_dict())
    stash = stash_of()
    with stash.recompute(modules[1]):
        for _ in range(3):
            for module in modules:
                module(x).sum().backward()
    assert numbers_of(modules[1].held) == numbers_of(modules[0].held)
    assert are_same(*([each.grad for each in module.layer.parameters()] for module in modules))
    return stash.stats()


@pytest.mark.parametrize("case", IN_CONTAINERS)
def test_what_a_container_of_the_module_holds_is_that_of_the_first_run(case):
    assert kept_twice(*IN_CONTAINERS[case]).recomputed_bytes > 0


class Using(nn.Module):
    """What it changes is saved, too."""

    def __init__(self):
        super().__init__()
        self.layer, self.calls = nn.Linear(16, 16), torch.ones(16)
        self.mean = nn.Parameter(torch.ones(16), requires_grad=False)

    def forward(self, x):
        self.calls.add_(1)
        self.mean.data.add_(1)
        return (self.layer(x) * self.calls * self.mean).tanh()


def test_what_is_put_back_has_the_version_that_a_graph_has_saved():
    plain, x = Using(), torch.randn(4, 16)
    module = copy.deepcopy(plain)
    with stash_of().recompute(module):
        for _ in range(3):
            for each in (plain, module):
                each(x).sum().backward()
            assert torch.equal(module.calls, plain.calls)
            assert torch.equal(module.mean, plain.mean)
    assert torch.equal(module.layer.weight.grad, plain.layer.weight.grad)


class Buffered(nn.Module):
    """It changes the buffer ``held``."""

    def __init__(self, held, change):
        super().__init__()
        self.layer, self.norm, self.change = nn.Linear(16, 16), nn.BatchNorm1d(16), change
        self.register_buffer("held", held)

    def forward(self, x):
        self.change(self.held)
        return self.layer(self.norm(x)).tanh()


def grow(held):
    held.data = torch.cat([held, held[:1] + 1])


@pytest.mark.parametrize(
    ("held", "change"),
    [(torch.zeros(4), torch.Tensor.neg_), (torch.zeros(1), grow), (torch.eye(4).to_sparse(), id)],
)
def test_buffers_of_all_kinds_are_those_of_the_first_run(held, change):
    x = torch.randn(4, 16)
    plain = Buffered(held.clone(), change)
    module = copy.deepcopy(plain)
    with stash_of().recompute(module):
        for _ in range(3):
            for each in (plain, module):
                each(x).sum().backward()
    bits = [each.held.to_dense().view(torch.int32) for each in (module, plain)]
    assert torch.equal(*bits)
    assert are_same(list(module.norm.buffers()), list(plain.norm.buffers()))
    assert are_same(*([each.grad for each in part.parameters()] for part in (module, plain)))


def test_weights_of_another_module_for_a_call():
    one, other = (nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16)) for _ in range(2))
    x = torch.randn(4, 16)
    weights = dict(other.named_parameters())
    want = torch.autograd.grad(other(x).sum(), list(weights.values()))
    with stash_of().recompute(one):
        got = torch.autograd.grad(functional_call(one, weights, (x,)).sum(), list(weights.values()))
    assert are_same(got, want)


def test_a_module_that_two_stashes_recompute():
    net, x = net_of("resnet", count=2)
    begin = copy.deepcopy(net.state_dict())
    want = train(copy.deepcopy(net), x)
    one, other = stash_of(), stash_of()
    with one.recompute(*net), other.recompute(*net):
        for stash in (one, other):
            net.load_state_dict(begin)
            assert are_same(train(net, x, stash), want)
    assert any("another stash" in each for stash in (one, other) for each in stash.stats().left)


def test_a_stash_that_was_closed_between():
    net = nn.Sequential(nn.Linear(16, 64), nn.Dropout(0.5), nn.ReLU(), nn.Linear(64, 16))
    x = torch.randn(4, 16)
    grads = []
    for stash in (None, stash_of()):
        net.zero_grad()
        with stash.recompute(net) if stash else nullcontext():
            for step in range(2):
                torch.manual_seed(step)
                loss = net(x).sum()
                if stash and step:
                    stash.close()
                loss.backward()
        grads.append([each.grad for each in net.parameters()])
    assert are_same(*grads)


@pytest.mark.parametrize("is_buffer", [False, True])
def test_a_module_that_holds_a_sparse_tensor_is_run_again(is_buffer):
    """A graph network's adjacency."""

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            edges = torch.eye(16).roll(1, 0).to_sparse()
            if is_buffer:
                self.register_buffer("edges", edges)
            else:
                self.edges = edges
            self.linear = nn.Linear(64, 64)

        def forward(self, x):
            return torch.tanh(torch.sparse.mm(self.edges, self.linear(x)))

    torch.manual_seed(0)
    model, x = nn.Sequential(Layer(), Layer()), torch.randn(16, 64)
    expected = torch.autograd.grad(model(x).sum(), list(model.parameters()))
    stash = Stash(min_bytes=0)
    with stash.recompute(*model):
        for _ in range(2):
            found = torch.autograd.grad(model(x).sum(), list(model.parameters()))
            assert all(map(same_bits, found, expected))
    assert stash.stats().recomputed_bytes > 0, stash.stats().left


def test_a_module_in_a_checkpoint_is_left_to_it():
    """It runs the module again itself: statistics are updated as often as without a stash."""

    def run(stash):
        torch.manual_seed(0)
        blocks = [nn.Sequential(nn.BatchNorm1d(32), nn.Linear(32, 32)) for _ in range(3)]
        if stash is not None:
            stash.recompute(*blocks)
        with stash if stash is not None else nullcontext():
            h = blocks[0](torch.randn(64, 32))
            h = checkpoint(blocks[1], h, use_reentrant=False)
            h = checkpoint(blocks[2], h, use_reentrant=True)
            h.square().mean().backward()
        found = [each.grad for block in blocks for each in block.parameters()]
        return found + [each.clone() for block in blocks for each in block.buffers()]

    stash = Stash(min_bytes=0)
    assert all(map(torch.equal, run(stash), run(None)))
    reasons = stash.stats().left
    assert (
        "not recomputed: it is inside torch.utils.checkpoint, which already recomputes it"
        in reasons
    )


def test_a_stash_that_is_dropped_releases_the_modules_that_it_recomputed():
    """Its hooks stay on them and do nothing: the next stash recomputes as the first did."""
    blocks = [nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(3)]

    def run(stash):
        stash.recompute(*blocks)
        with stash:
            nn.Sequential(*blocks)(torch.randn(64, 64)).sum().backward()
        return stash.stats().recomputed_bytes

    dropped = Stash(min_bytes=0)
    recomputed, alive = run(dropped), weakref.ref(dropped)
    del dropped
    gc.collect()
    assert alive() is None and recomputed
    second = Stash(min_bytes=0)
    assert run(second) == recomputed
    third = Stash(min_bytes=0)
    assert not run(third)
    (reason,) = (each for each in third.stats().left if "another stash" in each)
    assert "call remove() on the handle that its recompute() returned" in reason


def test_a_graph_keeps_what_runs_again_for_it():
    block = nn.Sequential(nn.Linear(64, 64), nn.GELU())
    x = torch.randn(64, 64, requires_grad=True)
    block(x).sum().backward()
    true, x.grad = x.grad, None
    stash = Stash(min_bytes=0)
    stash.recompute(block)
    with stash:
        loss = block(x).sum()
    del stash
    gc.collect()
    loss.backward()
    assert torch.equal(x.grad, true)


class Lazy(nn.Module):
    """Kernels that conjugate lazily what they have made: under a dispatch mode PyTorch gets them wrong."""

    def forward(self, x):
        return torch.linalg.pinv(torch.complex(x, x.flip(0) * 1.5)).abs()


def test_lazy_conjugation_inside_a_kernel():
    x = torch.randn(6, 6, dtype=torch.float64, requires_grad=True)
    net = Lazy()
    want = torch.autograd.grad(net(x * 1).sum(), x)
    stash = stash_of()
    with stash.recompute(net):
        for _ in range(2):
            assert are_same(torch.autograd.grad(net(x * 1).sum(), x), want)
    assert stash.stats().recomputed_bytes > 0


@pytest.mark.parametrize("values", [torch.linalg.svdvals, torch.linalg.eigvalsh, torch.linalg.cond])
def test_values_that_have_other_bits_under_a_mode_raise(values):
    class Net(nn.Module):
        def forward(self, x, matrix):
            return (x * values(matrix).sum()).sin().exp()

    x, matrix = torch.randn(4, 16, requires_grad=True), torch.randn(40, 40)
    matrix = matrix + matrix.T
    stash = stash_of()
    with (
        stash.recompute(net := Net()),
        pytest.raises(UsageError, match="it is unknown whether torch"),
    ):
        net(x, matrix)
    assert not dispatch_modes()


svd = torch.linalg.svdvals  # a misleading name
symmetric_values = torch.linalg.eigvalsh
vectors_of = torch.linalg.svd


class Misleading:
    eigh = torch.linalg.eigvalsh
    svdvals = torch.linalg.svd


NAMED = [
    lambda matrix: svd(matrix),
    lambda matrix: symmetric_values(matrix),
    lambda matrix: torch.linalg.eigvalsh(matrix),
    lambda matrix: torch.linalg.svdvals(matrix),
    lambda matrix: torch.linalg.eigvals(matrix).abs(),
    lambda matrix: torch.linalg.matrix_norm(matrix, "nuc"),
    lambda matrix: matrix.norm(p="nuc"),
    lambda matrix: vectors_of(matrix, full_matrices=False)[1],
    lambda matrix: torch.linalg.svd(
        matrix,
        full_matrices=False,
    )[1],
    lambda matrix: torch.linalg.eigh(matrix)[0],
    lambda matrix: torch.linalg.eig(matrix)[0].abs(),
]
UNNAMED = [
    lambda matrix: torch.svd(matrix).S,
    lambda matrix: torch.svd(matrix, compute_uv=False)[1],
    lambda matrix: matrix.svd(compute_uv=False)[1],
    lambda matrix: Misleading.eigh(matrix),
    lambda matrix: (lambda own: own(matrix)[1])(torch.linalg.svd),
    lambda matrix: (lambda own: own(matrix))(torch.linalg.svdvals),
    lambda matrix: Misleading.svdvals(matrix)[1],
]


@pytest.mark.parametrize("values", NAMED + UNNAMED)
def test_values_without_a_gradient_are_plain_pytorch_s_or_refused(values):
    """Whatever the name says. Of values and vectors, and of values alone, the bits differ."""

    class Net(nn.Module):
        def forward(self, x, matrix):
            return (x * values(matrix).sum()).sin().exp()

    net, refused = Net(), 0
    for seed in range(6):
        torch.manual_seed(seed)
        x, matrix = torch.randn(4, 16, requires_grad=True), torch.randn(200, 200)
        matrix = matrix + matrix.T if seed < 3 else matrix + matrix.T + torch.randn(200, 200) / 9
        plain = net(x, matrix)
        stash = stash_of()
        with stash.recompute(net):
            try:
                assert torch.equal(net(x, matrix), plain)
            except UsageError as error:
                assert "it is unknown whether torch" in str(error)
                refused += 1
        assert not dispatch_modes()
    assert not refused or values in UNNAMED


def resolved_and_detached(z):
    own = z.conj().resolve_conj()
    own.detach_()
    return torch.linalg.svdvals(own)


def resolved_before(z):
    own = z.conj().resolve_conj()
    with torch.no_grad():
        return torch.linalg.svdvals(own)


LAZY = [
    lambda z: torch.linalg.svdvals(z.mH),
    lambda z: torch.linalg.svdvals(z.conj()),
    lambda z: torch.linalg.svdvals(z.conj().imag),
    lambda z: torch.linalg.eigvalsh((z @ z.mH).conj()),
    lambda z: torch.linalg.eigvals(z.conj()).abs(),
    lambda z: torch.linalg.cond(z.mH),
    lambda z: torch.linalg.cond(z.conj().imag),
    lambda z: torch.linalg.matrix_norm(z.mH, "nuc"),
    lambda z: torch.svd(z.conj(), compute_uv=False)[1],
    lambda z: (lambda own: own(z.conj()))(torch.linalg.svdvals),
    resolved_and_detached,
    resolved_before,
]


@pytest.mark.parametrize("values", LAZY)
def test_values_of_a_conjugate_or_negative_view_are_plain_pytorch_s(values):
    """An operation gets a clone of such a view, which needs no gradient even if the view does."""

    class Net(nn.Module):
        def forward(self, z):
            return (torch.sigmoid(z.abs()) * values(z * 2)).sin().exp()

    net = Net()
    stash = stash_of()
    with stash.recompute(net):
        for seed in range(6):  # the third forward is the first that follows a route
            torch.manual_seed(seed)
            z = torch.randn(96, 96, dtype=torch.complex64, requires_grad=True)
            plain = net.forward(z)  # without hooks
            want = torch.autograd.grad(plain.sum(), z)
            with stash:
                loss = net(z)
            assert torch.equal(loss, plain)
            assert are_same(torch.autograd.grad(loss.sum(), z), want)
    assert stash.stats().recomputed_bytes > 0
    stash.close()


@pytest.mark.parametrize(
    "values",
    [
        torch.vmap(lambda t: torch.linalg.svdvals(t)),
        torch.vmap(lambda t: torch.linalg.matrix_norm(t, "nuc")),
        lambda x: torch.func.vjp(lambda t: torch.linalg.eigvalsh(t @ t.mT), x)[0],
        torch.func.jacrev(lambda t: torch.linalg.svdvals(t)),
    ],
    ids=["vmap", "norm", "vjp", "jacrev"],
)
def test_values_inside_a_transform_are_refused(values):
    """A transform's wrapper requests vectors, and it is not seen whether it wraps the tensor."""

    class Net(nn.Module):
        def forward(self, x, matrix):
            return (x * values(matrix).sum()).sin().exp()

    x, matrix = torch.randn(4, 16, requires_grad=True), torch.randn(2, 40, 40)
    stash = stash_of()
    with stash.recompute(net := Net()), pytest.raises(UsageError, match=r"outside of torch\.func"):
        net(x, matrix)
    assert not dispatch_modes()


def product_by_stash(h):
    return torch.autograd.grad(h.prod(0).sum(), h, create_graph=True)[0]


def cumulated_by_stash(h):
    return torch.autograd.grad(h.cumprod(0).sum(), h, create_graph=True)[0]


def determinant_by_stash(h):
    return torch.autograd.grad(torch.linalg.det(h), h, create_graph=True)[0]


def product_by_vjp(h):
    out, pull = torch.func.vjp(lambda t: t.prod(0), h)
    return pull(torch.ones_like(out))[0]


def product_under_own_hooks(h):
    given = h.detach().requires_grad_()
    with torch.autograd.graph.save_on_cpu():
        out = given.prod(0)
    return torch.autograd.grad(out.sum(), given)[0]


class InnerGradient(nn.Module):
    def __init__(self, of):
        super().__init__()
        self.of = of

    def forward(self, x):
        h = 1 + 0.3 * torch.sin(x)
        return torch.sigmoid(self.of(h)) * h


def bits_of(call, x):
    y = call(x)
    return [y.detach(), *torch.autograd.grad(y.sum(), x)]


@pytest.mark.parametrize("of", [product_by_stash, cumulated_by_stash, determinant_by_stash])
@pytest.mark.parametrize("outer", [False, True], ids=["own", "another stash's hooks"])
def test_a_backward_inside_has_no_tape(of, outer):
    """Some of its nodes compute differently under a mode."""
    torch.manual_seed(0)
    net, x = InnerGradient(of), torch.randn(64, 64, requires_grad=True)
    want = bits_of(net.forward, x)
    with Stash().recompute(net):
        for _ in range(4):
            if outer:
                with Stash():
                    found = bits_of(net, x)
            else:
                found = bits_of(net, x)
            assert are_same(found, want)
    assert not dispatch_modes()


@pytest.mark.parametrize("of", [product_by_vjp, product_under_own_hooks])
@pytest.mark.parametrize("by", ["region", "policy"])
def test_a_backward_inside_that_the_stash_does_not_see_is_refused(of, by, tmp_path):
    net, x = InnerGradient(of), torch.randn(64, 64, requires_grad=True)
    recompute = None if by == "region" else lambda saved: Action("recompute")
    stash = Stash(disk=tmp_path, min_bytes=0, policy=recompute)
    handle = stash.recompute(net) if by == "region" else nullcontext()
    with handle, stash, pytest.raises(UsageError, match="ProdBackward1 of a backward inside"):
        net(x)
    assert not dispatch_modes()
    with Stash(disk=tmp_path, min_bytes=0, recompute=False):
        assert are_same(bits_of(net, x), bits_of(net.forward, x))


@pytest.mark.parametrize("by", ["region", "policy"])
def test_forward_mode_with_zero_tangents(by, tmp_path):
    """PyTorch fills in tangents without memory."""

    class Net(nn.Module):
        def forward(self, x):
            h, ones = torch.sin(x), torch.ones(2, 4)
            index = torch.tensor([0, 1])
            add = lambda t: t.index_add(0, index, ones, alpha=2)  # noqa: E731
            return torch.func.jvp(add, (h,), (h.cos(),))[1] * h

    net, x = Net(), torch.randn(5, 4, requires_grad=True)
    want = bits_of(net.forward, x)
    recompute = None if by == "region" else lambda saved: Action("recompute")
    stash = Stash(disk=tmp_path, min_bytes=0, policy=recompute)
    with stash.recompute(net) if by == "region" else nullcontext():
        for _ in range(4):
            with stash:
                assert are_same(bits_of(net, x), want)


def test_a_forward_with_dual_numbers_is_not_recorded():
    """Tangents of some norms would have other bits."""
    net = nn.Sequential(nn.GroupNorm(2, 8), nn.LayerNorm(8))
    x, tangent = torch.randn(4, 8, 8), torch.randn(4, 8, 8)

    def tangent_of(call):
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(x, tangent)
            return torch.autograd.forward_ad.unpack_dual(call(dual)).tangent

    want = tangent_of(net.forward)
    stash = stash_of()
    with stash.recompute(net):
        assert are_same([tangent_of(net)], [want])
    assert any("forward-mode AD" in reason for reason in stash.stats().left)


@pytest.mark.parametrize(
    "of",
    [
        lambda t: F.layer_norm(t, (8,)),
        lambda t: F.group_norm(t, 2),
        lambda t: F.instance_norm(t),
        lambda t: F.batch_norm(t, None, None, training=True),
        lambda t: t.prod(0),
    ],
    ids=["layer", "group", "instance", "batch", "prod"],
)
@pytest.mark.parametrize("by", ["region", "policy", "policy, without a graph"])
def test_tangents_that_differ_are_refused(of, by, tmp_path):
    class Net(nn.Module):
        def forward(self, x):
            h = x.sin()
            with forward_ad.dual_level(), torch.set_grad_enabled("without" not in by):
                tangent = forward_ad.unpack_dual(
                    of(forward_ad.make_dual(h.detach(), h.cos()))
                ).tangent
            return (h * tangent).exp()

    net, x = Net(), torch.randn(4, 8, 8, requires_grad=True)
    recompute = None if by == "region" else lambda saved: Action("recompute")
    stash = Stash(disk=tmp_path, min_bytes=0, policy=recompute)
    with stash.recompute(net) if by == "region" else nullcontext(), stash:
        with pytest.raises(UsageError, match="computes the tangent of aten"):
            net(x)
    assert not dispatch_modes()


def by_jvp(of):
    return lambda h: torch.func.jvp(of, (h,), (h.cos(),))[1]


EXACT_TRANSFORMS = [
    by_jvp(lambda t: F.layer_norm(t, (8,))),
    by_jvp(lambda t: F.group_norm(t[:, :, None], 2)[:, :, 0]),
    by_jvp(lambda t: F.batch_norm(t, None, None, training=True)),
    by_jvp(lambda t: t.prod(0)),
    torch.func.jacfwd(lambda t: F.layer_norm(t, (8,)).sum(0)),
    torch.func.grad(lambda t: t.prod(1).sum()),
    torch.func.grad(lambda t: t.cumprod(1).sum()),
    torch.func.grad(lambda t: t.det()),
    torch.vmap(torch.func.grad(lambda t: t.prod(0))),
    by_jvp(torch.func.grad(lambda t: t.cumprod(1).sum())),
]


@pytest.mark.parametrize("of", EXACT_TRANSFORMS)
@pytest.mark.parametrize("by", ["region", "policy"])
def test_transforms_whose_tensors_are_wrapped_are_exact(of, by, tmp_path):
    """Then PyTorch's formulas compute the same with a mode as without one."""
    torch.manual_seed(0)
    net, x = InnerGradient(lambda h: of(h).sum() * h), torch.randn(8, 8, requires_grad=True)
    want = bits_of(net.forward, x)
    recompute = None if by == "region" else lambda saved: Action("recompute")
    stash = Stash(disk=tmp_path, min_bytes=0, policy=recompute)
    with stash.recompute(net) if by == "region" else nullcontext():
        for _ in range(4):
            with stash:
                assert are_same(bits_of(net, x), want)


def test_a_discarded_complex_number():
    class Net(nn.Module):
        def forward(self, x):
            product = torch.vdot(x * 2, x * 3)
            return (product * product).abs() * x.abs().sum()

    net, x = Net(), torch.randn(8, dtype=torch.complex128, requires_grad=True)
    want = bits_of(net.forward, x)
    with Stash(min_bytes=0).recompute(net):
        for _ in range(4):
            assert are_same(bits_of(net, x), want)


def test_a_decomposition_without_a_gradient_is_the_program_s_own():
    class Net(nn.Module):
        def forward(self, x, matrix):
            u, s, _ = torch.linalg.svd(matrix)
            return (x @ (u * s)).sin().exp()

    x, matrix = torch.randn(4, 40, requires_grad=True), torch.randn(40, 40)
    net = Net()
    want = torch.autograd.grad(net(x * 1, matrix).sum(), x)
    stash = stash_of()
    with stash.recompute(net):
        for _ in range(2):
            assert are_same(torch.autograd.grad(net(x * 1, matrix).sum(), x), want)
    assert stash.stats().recomputed_bytes > 0


@pytest.mark.filterwarnings("ignore")
def test_a_higher_order_operator_inside():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(16, 16)

        def forward(self, x):
            y = self.layer(x).tanh()
            return torch.cond(y.sum() > 1e9, torch.sin, torch.cos, (y,)).exp()

    net, x = Net(), torch.randn(4, 16)
    want = torch.autograd.grad(net(x).sum(), list(net.parameters()))
    stash = stash_of()
    with stash.recompute(net):
        for _ in range(2):
            assert are_same(torch.autograd.grad(net(x).sum(), list(net.parameters())), want)
    assert stash.stats().recomputed_bytes > 0


class InInference(nn.Module):
    """Composite operations are not decomposed there."""

    def __init__(self):
        super().__init__()
        self.norm, self.layer = nn.BatchNorm1d(16), nn.Linear(16, 16)

    def forward(self, x):
        with torch.inference_mode():
            h = self.norm(x.detach())
        return (self.layer(h.clone()) + x).tanh().exp()


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x):
        h = self.layer(x).tanh()
        nested = torch.nested.as_nested_tensor([h[:1], h[1:]]).sin()
        return torch.nested.to_padded_tensor(nested, 0.0).exp()


class Compressed(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x):
        return (torch.eye(4).to_sparse_csr() @ self.layer(x).tanh()).exp()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", [InInference, Nested, Compressed])
def test_tensors_and_modes_that_a_tape_cannot_follow(make):
    found = []
    for stash in (None, stash_of()):
        torch.manual_seed(0)
        net, x = make(), torch.randn(4, 16, requires_grad=True)
        with stash.recompute(net) if stash else nullcontext():
            for _ in range(3):
                found.append(torch.autograd.grad(net(x * 2).sum(), [x, *net.layer.parameters()]))
        found.append(list(net.buffers()))
    assert all(map(are_same, found[:4], found[4:]))
    assert stash.stats().recomputed_bytes > 0, stash.stats().left


def test_a_weight_that_was_changed_unseen_is_detected_where_only_parts_are_saved():
    class Net(nn.Linear):
        def forward(self, x):
            left, right = super().forward(x).chunk(2, 1)
            return left * right

    net, x = Net(16, 16), torch.randn(8, 16)
    stash = stash_of()
    with stash.recompute(net):
        net(x).sum().backward()
        loss = net(x).sum()
        net.bias.data.add_(1)
        with pytest.raises(InplaceError, match="gave different bits"):
            loss.backward()


def test_reuse_of_a_numpy_buffer_that_holds_the_data_is_detected():
    array = np.zeros((600, 64), dtype=np.float32)
    net = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
    net[0].weight.requires_grad_(False)  # so that plain PyTorch does not save the data
    stash = stash_of()
    with stash.recompute(net):
        for step in range(2):
            array[:] = step + 1
            loss = net(torch.from_numpy(array)).sum()
            array[500] = 7
            with pytest.raises(InplaceError, match="an input of shape"):
                loss.backward()


def test_a_tape_that_an_interrupt_left_ends_by_itself():
    class Interrupted(nn.Module):
        def forward(self, x):
            raise KeyboardInterrupt

    net = nn.Sequential(nn.Linear(16, 16), Interrupted())
    stash = stash_of()
    with stash.recompute(net):
        with pytest.raises(KeyboardInterrupt):
            net(torch.ones(4, 16))
        (tape,) = dispatch_modes()
        x = torch.ones(4)
        for _ in range(64):
            x = x * 1.5
        assert not tape.is_recording
        net[1] = nn.Identity()
        net(torch.ones(4, 16)).sum().backward()
    assert not dispatch_modes()


def test_a_frozen_parameter_may_be_written_before_backward():
    """As a buffer may: plain PyTorch does not save it."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.mean = nn.Parameter(torch.zeros(16), requires_grad=False)

        def forward(self, x):
            return (x + self.mean).sin()

    x, found = torch.randn(4, 16, requires_grad=True), []
    for stash in (None, stash_of()):
        net = Net()
        with stash.recompute(net) if stash else nullcontext():
            for _ in range(3):
                loss = net(x).sum()
                with torch.no_grad():
                    net.mean.add_(1)
                found.append(torch.autograd.grad(loss, x)[0])
    assert are_same(found[:3], found[3:])
    assert stash.stats().recomputed_bytes > 0


def test_all_bytes_are_compared_where_that_is_asked_for():
    """One element of 64 Ki is written by what nobody sees: a sample may not have it."""
    net = nn.Sequential(nn.GELU(), nn.Tanh())
    base = torch.randn(256, 256, requires_grad=True)
    stash = Stash(verify="always")
    with stash.recompute(net):
        for _ in range(4):
            x = base * 1
            loss = net(x).sum()
            x.detach().numpy()[200, 7] += 1
            with pytest.raises(InplaceError, match="gave different bits"):
                loss.backward()
    assert stash.stats().recomputed_bytes


@torch.library.custom_op("backstash_tests::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    calls.append(1)
    return x * 2


calls: list[int] = []
doubled.register_autograd(lambda ctx, grad: grad * 2)


class Tripled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        calls.append(1)
        return x * 3

    @staticmethod
    def backward(ctx, grad):
        return grad * 3


@pytest.mark.parametrize("what", [doubled, Tripled], ids=["operator", "Function"])
def test_what_is_declared_recomputable_is_recomputed(what, monkeypatch):
    monkeypatch.setattr(declared, "_functions", weakref.WeakSet())

    class Net(nn.Module):
        def forward(self, x):
            made = what(x.sin()) if what is doubled else what.apply(x.sin())
            return made.erf().exp()

    def trained():
        x, net = torch.ones(300, 300, requires_grad=True), Net()
        with Stash(min_bytes=0) as stash, stash.recompute(net):
            net(x).sum().backward()
        return x.grad, stash.stats()

    plain = torch.ones(300, 300, requires_grad=True)
    Net()(plain).sum().backward()
    grad, stats = trained()
    assert torch.equal(grad, plain.grad)
    assert stats.recomputed_bytes == 300 * 300 * 4, (
        "the exponential alone follows from what is held"
    )
    assert backstash.recomputable(what) is what
    try:
        for _ in range(2):
            calls.clear()
            grad, stats = trained()
            assert torch.equal(grad, plain.grad)
            assert stats.recomputed_bytes == 2 * 300 * 300 * 4
    finally:
        schemas._pure.clear()
        schemas.operations.clear()


def test_only_operators_can_be_declared():
    for wrong in (torch.sin, "mine::scale", None, nn.Linear):
        with pytest.raises(UsageError, match="allowed are a custom operator"):
            backstash.recomputable(wrong)


@pytest.mark.parametrize(
    "of",
    [
        lambda base: base,
        lambda base: base.t(),
        lambda base: base[:, 3:17],
        lambda base: base.T[5:, ::3],
        lambda base: base[:, :1].expand(-1, 7),
        lambda base: base[2:3],
    ],
    ids=["whole", "transposed", "columns", "strided", "expanded", "row"],
)
def test_samples_pass_through_every_element(of):
    """A change of any one element is seen by one of the samples that follow each other."""
    base = torch.arange(96.0 * 64).view(96, 64)
    tensor = of(base)
    indices = {
        address
        for number in range(2000)
        for first, size in [states._window(tensor, number)]
        for address in range(first // 4, (first + size) // 4)
    }
    assert indices == {int(each) for each in tensor.flatten()}
    region = types.SimpleNamespace(_verify="auto", _samples=0)
    at, before = states.RegionState.sample(region, tensor)
    assert states.RegionState.sample(region, tensor, at) == (at, before)
    first, _ = states._window(tensor, at)
    base.view(-1)[first // 4] += 1
    assert states.RegionState.sample(region, tensor, at) != (at, before)


@pytest.mark.parametrize(
    "codec", [backstash.codecs.BFloat16(), lambda saved: backstash.codecs.Int8()]
)
def test_a_replay_reads_no_rounded_operand(codec):
    net, x = net_of("transformer", count=2)
    want = train(copy.deepcopy(net), x)
    stash = Stash(min_bytes=0, codec=codec, keep="1GiB", verify="always")
    with stash.recompute(*net):
        found = train(net, x, stash)
    assert stash.stats().recomputed_bytes > 0 and stash.stats().packed_bytes > 0
    assert are_same(found[:1], want[:1])
    stash.close()


@pytest.mark.parametrize("declared_pure", [False, True])
def test_an_operator_of_the_program_s_sees_lazy_bits(declared_pure):
    """Its kernel conjugates an intermediate result, which a dispatch mode would hide from it."""

    @torch.library.custom_op(f"backstash_tests::conjugates_{declared_pure}", mutates_args=())
    def conjugates(x: torch.Tensor) -> torch.Tensor:
        return (torch.complex(x, x + 1).conj() * 2).imag.clone()

    conjugates.register_autograd(lambda ctx, grad: -2 * grad)

    class Net(nn.Linear):
        def forward(self, x):
            return super().forward(conjugates(x.sin()) * x).tanh()

    if declared_pure:
        backstash.recomputable(conjugates)
    net, x = Net(64, 64), torch.linspace(0.1, 1, 4096).view(64, 64)
    want = train(copy.deepcopy(net), x)
    stash = Stash(min_bytes=0)
    with stash.recompute(net):
        assert are_same(train(net, x, stash), want)


def test_a_transform_of_torch_func_over_a_recomputed_module_works():
    net, x = nn.Sequential(nn.Linear(80, 80), nn.Tanh()), torch.randn(64, 80)
    want = torch.func.jvp(net, (x,), (x,))
    with Stash(min_bytes=0).recompute(net):
        for _ in range(3):
            assert all(map(torch.equal, torch.func.jvp(net, (x,), (x,)), want))
            net(x).sum().backward()


def test_the_precision_of_a_backend_is_that_of_the_forward():
    """Also where ``torch.get_float32_matmul_precision`` raises, since both ways to set it were used."""
    matmul = torch.backends.mkldnn.matmul
    net, x = nn.Sequential(nn.Linear(80, 80), nn.Tanh()), torch.randn(64, 80)
    stash = Stash(min_bytes=0, verify="always")
    try:
        with stash.recompute(net):
            for _ in range(3):
                matmul.fp32_precision = "bf16"
                loss, recorded = net(x).sum(), settings.now()
                matmul.fp32_precision = "ieee"
                loss.backward()
                with settings.put(recorded):
                    assert matmul.fp32_precision == "bf16"
                assert matmul.fp32_precision == "ieee"
    finally:
        matmul.fp32_precision = "none"
    assert stash.stats().recomputed_bytes > 0


@pytest.mark.parametrize("before", [False, True])
def test_denormal_numbers_are_those_of_the_forward(before):
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush denormal numbers")
    torch.set_flush_denormal(False)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(80))

        def forward(self, x):
            return (x * 0.5) * self.weight

    net, x = Net(), torch.full((64, 80), 1.5e-38)
    stash = Stash(min_bytes=0, verify="always")
    try:
        with stash.recompute(net):
            for _ in range(3):
                torch.set_flush_denormal(before)
                loss = net(x.clone().requires_grad_()).sum()
                torch.set_flush_denormal(not before)
                loss.backward()
                assert (sys.float_info.min / float("2") == 0) is not before
    finally:
        torch.set_flush_denormal(False)
    assert stash.stats().recomputed_bytes > 0


def test_one_dimension_from_the_end_is_not_two_from_the_end():
    """Else an operation along one would count as compared along the other: Python's hashes are equal."""
    assert hash(-1) == hash(-2)
    x, tape = torch.ones(4, 4), HoldingTape()
    tape.enter()
    try:
        last, other = torch.cumsum(x, -1), torch.cumsum(x, -2)
    finally:
        tape.leave()
    found = [tape.state_of(each) for each in (last, other)]
    assert found[0] is not None
    assert found[1] is not None
    assert found[0].key != found[1].key


@pytest.mark.parametrize("has_kernel", mostly_long([True, False], True))
def test_a_norm_with_a_kernel_of_another_accelerator_is_no_composite(has_kernel):
    """In a process of its own, since the kernel stays."""
    if torch.version.cuda and not has_kernel:
        pytest.skip("CUDA has a kernel for it")
    program = f"""
import torch
from backstash._torch.schemas import operation_of
if {has_kernel}:
    library = torch.library.Library("aten", "IMPL")
    library.impl("_fused_rms_norm", lambda *given: None, "PrivateUse1")
print("composite" in operation_of(torch.ops.aten._fused_rms_norm.default).reason)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == f"{not has_kernel}\n", done.stderr


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.complex128]
)
def test_what_is_compared_are_bits_not_numbers(dtype):
    """Of numbers, a zero would equal a negative one, and NaN would not equal itself."""
    zero = torch.zeros(2, 3, dtype=dtype)
    assert _are_same(zero, zero.clone())
    assert not _are_same(zero, -zero)
    nan = torch.full((2, 3), math.nan, dtype=dtype)
    assert _are_same(nan, nan.clone())
    assert _are_same(nan[:, :2], nan[:, 1:].clone())


class PostNorm(nn.Module):
    """What its norm saves is replayed from the dropout's mask, which is held as the forward ends."""

    def __init__(self):
        super().__init__()
        self.linear, self.dropout, self.norm = nn.Linear(64, 64), nn.Dropout(0.1), nn.LayerNorm(64)

    def forward(self, x):
        return self.norm(x + self.dropout(self.linear(x).tanh()))


def test_what_is_held_as_a_forward_ends_is_packed():
    net, stash = nn.Sequential(*(PostNorm() for _ in range(3))), Stash(min_bytes=0)
    x, masks = torch.randn(128, 64), 3 * 128 * 64 * 4
    with stash.recompute(*net):
        for _ in range(4):
            before = stash.stats().packed_bytes
            with stash:
                loss = net(x).sum()
            loss.backward()
            assert stash.stats().packed_bytes - before >= masks
    assert not any("dispatch mode" in reason for reason in stash.stats().left)
    stash.close()
