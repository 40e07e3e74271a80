"""Recomputed blocks: gradients, what is freed, changes in place, refusals."""

import copy
import gc
import sys
import threading
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from backstash import Action, Stash
from backstash._recompute.blocks import MOST_BLOCKS, MOST_OPERATIONS, Replay
from backstash._recompute.replay import Values
from backstash._recompute.tape import _LEAST_SWEPT
from backstash._saved.block import PartedStorage, StorageVersion
from backstash._tiers import packing as _packing
from backstash._tiers.packing import Packer
from backstash._torch.dispatch import dispatch_modes
from backstash.errors import InplaceError, UsageError
from backstash.testing import MemoryStore, TwinDevice, stash_on

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

import soak_recomputed

KINDS = {
    "gelu": nn.GELU(),
    "gelu tanh": nn.GELU(approximate="tanh"),
    "silu": nn.SiLU(),
    "mish": nn.Mish(),
    "hardswish": nn.Hardswish(),
    "leaky relu": nn.LeakyReLU(0.3),
}


EYE = torch.eye(64)  # a product is not computed again


def recompute(saved):
    return Action("recompute")


def net_of(kind="gelu"):
    torch.manual_seed(0)
    layers = [nn.Linear(67, 131), KINDS[kind], nn.Linear(131, 67), KINDS[kind], nn.Linear(67, 5)]
    return nn.Sequential(*layers), torch.randn(8, 17, 67)


def gradients(net, x, **options):
    return torch.autograd.grad(net(x).square().mean(), list(net.parameters()), **options)


def are_same(left, right):
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", [{}, {"keep": "256KiB"}])
def test_gradients_are_the_same_and_results_are_freed(kind, dtype, place):
    net, x = net_of(kind)
    net, x = net.to(dtype), x.to(dtype)
    expected = gradients(net, x)
    options = {"keep": None, "min_bytes": 0, **place}
    with Stash(policy=recompute, disk=MemoryStore(), **options) as stash:
        for _ in range(2):
            assert are_same(gradients(net, x), expected)
            assert not dispatch_modes()
    stats = stash.stats()
    once = 8 * 17 * (131 + 67) * dtype.itemsize
    assert stats.recomputed_bytes == 2 * once
    assert "recomputed" in str(stats)


@pytest.mark.parametrize("kind", KINDS)
def test_with_no_memory_to_keep_anything_the_input_is_at_hand_to_be_compared(kind, disk_dir):
    """It is held in the context, in the first two steps: until the second, nothing new occurs."""
    net, x = net_of(kind)
    expected = gradients(net, x)
    once = 8 * 17 * (131 + 67) * 4
    with Stash(policy=recompute, disk=disk_dir, min_bytes=0, inflight=0) as stash:
        pass
    (thread_state,) = stash._session.thread_states
    held = []
    handle = net[-1].register_forward_hook(lambda *_: held.append(len(thread_state.latest)))
    for step in range(4):
        with stash:
            loss = net(x).square().mean()
        assert stash.stats().recomputed_bytes == (step + 1) * once
        assert stash.stats().keep_bytes == 0
        assert held[step] == (4 if step < 2 else 0) and not thread_state.latest
        assert are_same(torch.autograd.grad(loss, list(net.parameters())), expected)
    handle.remove()
    x = x[:5].contiguous()  # another class
    expected = gradients(net, x)
    for step in range(3):
        before = stash.stats().recomputed_bytes
        with stash:
            loss = net(x).square().mean()
        assert stash.stats().recomputed_bytes > before or step == 0
        assert are_same(torch.autograd.grad(loss, list(net.parameters())), expected)
    stash.close()


def cast_step(net, x, **options):
    with torch.autocast("cpu", torch.bfloat16):
        loss = net(x).float().square().mean()
    return torch.autograd.grad(loss, list(net.parameters()), **options)


@pytest.mark.parametrize("keep", [0, None])
def test_a_parameter_s_cast_is_made_again(keep, disk_dir):
    net, x = net_of()
    expected = cast_step(net, x)
    weights = 2 * (net[2].weight.numel() + net[4].weight.numel())  # the first one's is not saved
    stash = Stash(policy=recompute, disk=disk_dir, keep=keep, min_bytes=0)
    for step in range(2):
        with stash:
            assert are_same(cast_step(net, x), expected)
        # The input's cast, and the results. What comes after the model is not recorded.
        made = 2 * x.numel() + 2 * 8 * 17 * (131 + 67)
        assert stash.stats().recomputed_bytes == (step + 1) * (weights + made)
    stash.close()


@pytest.mark.parametrize("how", ["optimizer", "data", "another", "gone", "as it was"])
def test_a_parameter_that_changed_before_its_cast_is_made_again(how):
    net, x = net_of()
    expected = cast_step(net, x)
    with torch.autocast("cpu", torch.bfloat16), Stash(policy=recompute, keep=None, min_bytes=0):
        loss = net(x).float().square().mean()
    weight = net[2].weight
    was = weight.detach().clone()
    if how == "optimizer":
        with torch.no_grad():
            weight.add_(0.5)
    elif how == "data":
        weight.data.fill_(1)
    elif how == "another":
        weight.data = torch.zeros(3)
    elif how == "gone":
        weight.untyped_storage().resize_(0)
    else:
        weight.data = was
        assert are_same(torch.autograd.grad(loss, list(net.parameters())), expected)
        return
    with pytest.raises(InplaceError, match="by its optimizer"):
        torch.autograd.grad(loss, list(net.parameters()), retain_graph=True)
    weight.data = was
    assert are_same(torch.autograd.grad(loss, list(net.parameters())), expected)


@pytest.mark.parametrize("known", [False, True])
def test_an_input_that_has_left_and_is_written_unseen_gives_no_wrong_gradient(known, disk_dir):
    x = torch.randn(400, 100, requires_grad=True)
    stash = Stash(policy=recompute, disk=disk_dir, min_bytes=0, inflight=0)
    for step in range(1 + known):
        with stash:
            h = x * 2.0
            y = F.gelu(h)
            if step == known:
                h.data.fill_(3.0)  # h is on disk as it was
            loss = y.square().sum()
        if step == known:
            expected = y.detach().clone()
            saved = y.grad_fn.name()
            assert saved == "GeluBackward0"
            (gradient,) = torch.autograd.grad(loss, y)
            assert torch.equal(gradient, 2 * expected)
        else:
            torch.autograd.grad(loss, x)
    stash.close()


def test_autocast_retain_graph_double_backward_and_checkpoint():
    net, x = net_of()
    net = net.requires_grad_()

    def step():
        with torch.autocast("cpu", torch.bfloat16):
            y = net(x) + checkpoint(net, x, use_reentrant=False)
            loss = y.float().square().mean()
        first = torch.autograd.grad(loss, list(net.parameters()), create_graph=True)
        again = torch.autograd.grad(loss, list(net.parameters()), retain_graph=True)
        second = torch.autograd.grad(
            sum(g.square().sum() for g in first), list(net.parameters())[:4]
        )
        return [*first, *again, *second]

    expected = step()
    state = torch.get_rng_state()
    with Stash(policy=recompute, disk=MemoryStore(), keep=None, min_bytes=0) as stash:
        assert are_same(step(), expected)
    assert stash.stats().recomputed_bytes > 0
    assert torch.equal(state, torch.get_rng_state())


def test_replays_run_without_autocast_in_forward_too(monkeypatch):
    run, seen = Values.run, []

    def looked_at(values, op):
        seen.append(torch.is_autocast_enabled("cpu"))
        return run(values, op)

    monkeypatch.setattr(Values, "run", looked_at)
    net, x = net_of()
    with torch.autocast("cpu", torch.bfloat16), Stash(policy=recompute, min_bytes=0):
        loss = net(x).float().square().mean()
        assert torch.is_autocast_enabled("cpu")
    in_forward = len(seen)
    loss.backward()
    assert 0 < in_forward < len(seen) and not any(seen)


def test_a_dispatch_mode_of_the_program_sees_no_replay():
    net, x = net_of()

    class Counting(TorchDispatchMode):
        calls = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.calls += 1
            return func(*args, **(kwargs or {}))

    counts = []
    for policy in (None, recompute):
        stash = Stash(policy=policy, min_bytes=0, disk=MemoryStore(), keep=None)
        with Counting() as mode, stash:
            loss = net(x).square().mean()
        counts.append(mode.calls)
        loss.backward()
    assert counts[0] == counts[1]


@pytest.mark.parametrize("action", ["recompute", "pack"])
def test_a_mode_around_backward_neither_sees_nor_changes_what_is_decoded(action):
    net, x = net_of()
    net.insert(2, nn.ReLU())

    class Doubling(TorchDispatchMode):
        """Changes the result of each operation that plain backward does not call, but for views."""

        def __init__(self):
            super().__init__()
            self.known = {"as_strided", "view", "slice", "empty", "new_empty"}

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result, name = func(*args, **(kwargs or {})), func.overloadpacket.__name__
            if plain:
                self.known.add(name)
            elif name not in self.known:
                result.mul_(2)
            return result

    mode, found = Doubling(), []
    stash = Stash(policy=lambda saved: Action(action), min_bytes=0)
    for plain in (True, False):
        with nullcontext() if plain else stash:
            loss = net(x).square().mean()
        with mode:
            found.append(torch.autograd.grad(loss, list(net.parameters())))
    assert stash.stats().recomputed_bytes or stash.stats().packed_bytes
    assert are_same(*found)


def test_an_input_that_changed_in_place_raises():
    weight = torch.randn(64, 64, requires_grad=True)
    base = torch.randn(64, 64, requires_grad=True)
    with Stash(policy=recompute, disk=MemoryStore(), keep=None, min_bytes=0) as stash:
        x = base @ EYE
        loss = (F.gelu(x) @ weight).sum()
        assert stash.stats().recomputed_bytes == x.nbytes
        x.add_(1)
        with pytest.raises(InplaceError):
            torch.autograd.grad(loss, weight)


def test_an_input_that_was_written_unseen_raises():
    weight = torch.randn(64, 64, requires_grad=True)
    base = torch.randn(64, 64, requires_grad=True)
    with Stash(policy=recompute, disk=MemoryStore(), keep=None, min_bytes=0):
        x = base @ EYE
        loss = (F.gelu(x) @ weight).sum()
        x.data.add_(1)
        with pytest.raises(InplaceError, match="gave different bits"):
            torch.autograd.grad(loss, weight)


def test_a_result_that_was_written_unseen_is_not_recomputed():
    weight = torch.randn(64, 64, requires_grad=True)
    base = torch.randn(64, 64, requires_grad=True)
    x = base @ EYE

    def step():
        y = F.gelu(x)
        y.detach().numpy()[:] += 1
        return torch.autograd.grad((y @ weight).sum(), weight)

    expected = step()
    with Stash(policy=recompute, disk=MemoryStore(), keep=None, min_bytes=0) as stash:
        assert are_same(step(), expected)
    assert stash.stats().recomputed_bytes == 0
    (reason,) = [each for each in stash.stats().left if "does not give" in each]
    expected = "recomputing aten.gelu.default does not give the same bytes"
    assert reason == f"not recomputed: {expected}"


def test_what_cannot_be_called_again_is_treated_by_default_and_said():
    x = torch.randn(64, 64, requires_grad=True)
    with Stash(policy=recompute, disk=MemoryStore(), min_bytes=0) as stash:
        (torch.normal(x.detach(), 1.0) * x).square().sum().backward()
    left = stash.stats().left
    (reason,) = [each for each in left if "random" in each]
    assert reason == "not recomputed: aten.normal.Tensor_float draws random numbers"
    assert left[reason].nbytes == x.nbytes and stash.stats().recomputed_bytes == x.nbytes
    assert stash.stats().written_bytes == x.nbytes


def rms_norm(x, weight):
    """As models write it out: in float32, then back."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
    return weight * wide.to(x.dtype)


LAYERS = {
    "silu, relu": nn.Sequential(nn.SiLU(), nn.ReLU()),
    "silu, relu in place": nn.Sequential(nn.SiLU(), nn.ReLU(inplace=True)),
    "relu6": nn.ReLU6(),
    "elu": nn.ELU(0.7),
    "selu": nn.SELU(),
    "celu": nn.CELU(0.7),
    "softplus": nn.Softplus(2.0),
    "hardsigmoid": nn.Hardsigmoid(),
    "silu, sigmoid": nn.Sequential(nn.SiLU(), nn.Sigmoid()),
    "silu, tanh": nn.Sequential(nn.SiLU(), nn.Tanh()),
    "softmax, dropout": nn.Sequential(nn.Softmax(-1), nn.Dropout(0.5)),
    "gelu, dropout": nn.Sequential(nn.GELU(), nn.Dropout(0.2)),
    "layer norm": nn.LayerNorm(67, eps=1e-3),
    "layer norm, silu": nn.Sequential(nn.LayerNorm(67), nn.SiLU()),
    "layer norm without weights": nn.LayerNorm(67, elementwise_affine=False),
    "layer norm without bias": nn.LayerNorm(67, bias=False),
    "group norm, relu": nn.Sequential(nn.GroupNorm(1, 17), nn.ReLU(True)),
    "batch norm, relu": nn.Sequential(nn.BatchNorm1d(17), nn.ReLU(True)),
    "batch norm in evaluation": nn.BatchNorm1d(17).eval(),
    "rms norm": nn.RMSNorm(67, eps=1e-6),
    "glu": nn.Sequential(nn.Linear(67, 134), nn.GLU()),
}
CALLS = {
    "gate": lambda x, w: F.silu(x) * (x @ w),
    "quotient": lambda x, w: x.exp() / (x @ w).square().exp(),
    "sums": lambda x, w: torch.sub(x.tanh() + x.sigmoid(), x.sin().exp(), alpha=0.3),
    "powers": lambda x, w: x.abs().sqrt().pow(3) * x.cos(),
    "cat": lambda x, w: torch.cat([x.relu(), F.gelu(x)], 0),
    "written-out rms norm": lambda x, w: rms_norm(x, w[0]),
    "functional layer norm": lambda x, w: F.layer_norm(x, (67,), w[0], w[1], 1e-2),
    "transposed": lambda x, w: F.gelu(x).transpose(1, -1).contiguous().transpose(1, 2),
    "heads": lambda x, w: F.gelu(x).view(8, 17, 1, 67).permute(0, 2, 1, -1).reshape(8, 17, 67),
    "a mask": lambda x, w: F.silu(x) * torch.ones(17, 1, dtype=x.dtype).bernoulli_(),
}


class Layer(nn.Module):
    """A product, what is to be computed again, and a product that saves it."""

    def __init__(self, layer):
        super().__init__()
        self.into, self.out = nn.Linear(67, 67), nn.Linear(67, 5)
        self.weight = nn.Parameter(torch.randn(67, 67) * 0.1)
        self.layer = layer

    def forward(self, x):
        x = self.into(x)
        y = self.layer(x) if isinstance(self.layer, nn.Module) else self.layer(x, self.weight)
        return self.out(y)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", LAYERS | CALLS)
def test_operations(name, dtype, disk_dir):
    torch.manual_seed(0)
    layer = LAYERS.get(name) or CALLS[name]
    net = Layer(copy.deepcopy(layer)).to(dtype)
    net.layer = layer if not isinstance(layer, nn.Module) else net.layer
    buffers = copy.deepcopy(dict(net.named_buffers()))
    x = torch.randn(8, 17, 67, dtype=dtype)
    expected, after = [], []
    for how in (None, {"keep": None}, {"inflight": 0, "prefetch": 0}):
        with torch.no_grad():
            for key, value in net.named_buffers():
                value.copy_(buffers[key])
        torch.manual_seed(1)
        stash = (
            nullcontext()
            if how is None
            else Stash(policy=recompute, disk=disk_dir, min_bytes=64, **how)
        )
        for step in range(3):
            with stash:
                loss = net(x).square().mean()
            found = torch.autograd.grad(loss, list(net.parameters()), allow_unused=True)
            found = [each for each in found if each is not None]
            if how is None:
                expected.append(found)
            else:
                assert are_same(found, expected[step])
        state = [*map(torch.clone, net.buffers()), torch.get_rng_state()]
        after = after or state
        assert are_same(state, after)
        if how is None:
            continue
        # Of some layers what they make inside is freed, too.
        assert stash.stats().recomputed_bytes >= 3 * x.nbytes, stash.stats().left
        stash.close()


class OtherEps(nn.LayerNorm):
    def forward(self, x):
        return F.layer_norm(x, (67,), self.weight, self.bias, self.eps * 3)


class BiasAlone(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x):
        return F.layer_norm(x, (67,), None, self.bias)


class TrainedAfterwards(nn.Module):
    """Uses its statistics, and then updates them, which raises no version."""

    def __init__(self, width):
        super().__init__()
        self.norm = nn.BatchNorm1d(17)
        self.bias = self.norm.bias
        self.weight = nn.Parameter(torch.randn(width, width) * 0.1)

    def forward(self, x):
        y = self.norm.eval()(x) @ self.weight
        self.norm.train()(x.detach() * 2)
        return y


@pytest.mark.parametrize("layer", [OtherEps, BiasAlone, TrainedAfterwards])
def test_what_a_first_comparison_does_not_show_is_no_error_later(layer):
    """Large inputs hide an eps, a bias of zeros how it is added."""
    torch.manual_seed(0)
    net, x = Layer(layer(67)), torch.randn(8, 17, 67) * 1e5
    expected = []
    for stash in (nullcontext(), Stash(policy=recompute, min_bytes=64)):
        state = copy.deepcopy(net.state_dict())
        for step, scale in enumerate((1, 1e-5, 1e-5)):
            with stash:
                loss = net(x * scale).square().mean()
            found = torch.autograd.grad(loss, list(net.parameters()), allow_unused=True)
            found = [each for each in found if each is not None]
            if len(expected) <= step:
                expected.append(found)
            else:
                assert are_same(found, expected[step])
            with torch.no_grad():
                torch.manual_seed(step)
                net.layer.bias.add_(torch.randn_like(net.layer.bias))
        net.load_state_dict(state)


@pytest.mark.parametrize("forward, backward", [(1, 2), (2, 1)])
def test_another_number_of_threads_in_backward(forward, backward):
    """Vector code and the code for what is left over of each thread's part differ in a last bit."""
    torch.manual_seed(0)
    x = torch.randn(1111, 333, requires_grad=True)
    weight = torch.randn(333, 3, requires_grad=True)
    stash = Stash(policy=recompute, keep=None, disk=MemoryStore())
    before, found = torch.get_num_threads(), []
    try:
        for how in (nullcontext(), stash):
            torch.set_num_threads(forward)
            z = x * 1.5
            with how:
                y = F.mish(z)
                loss = (y @ weight).sum()
            torch.set_num_threads(backward)
            found.append(torch.autograd.grad(loss, weight))
            assert torch.get_num_threads() == backward
        assert not torch.equal(F.mish(x * 1.5), y)
    finally:
        torch.set_num_threads(before)
    assert stash.stats().recomputed_bytes == x.nbytes
    assert are_same(*found)


@pytest.mark.parametrize("kind", KINDS)
def test_on_an_accelerator(kind):
    net, x = net_of(kind)
    expected = gradients(net, x)
    options = {"policy": recompute, "min_bytes": 0, "disk": MemoryStore(), "host": "1MiB"}
    for place in ({"keep": 0}, {"keep": None}):
        with stash_on(TwinDevice(chance=0.5), **options, **place) as stash:
            for _ in range(2):
                assert are_same(gradients(net, x), expected)
        assert stash.stats().recomputed_bytes == 2 * 8 * 17 * (131 + 67) * 4
        stash.close()


def test_on_an_accelerator_other_bits_raise_when_backward_ends():
    stash = stash_on(TwinDevice(), keep=None, host="1MiB", policy=recompute, min_bytes=0)
    x, weight = (torch.randn(64, 64, requires_grad=True) for _ in range(2))

    def step(write):
        y = x * 1
        with stash:
            loss = (F.gelu(y) @ weight).sum()
        if write:
            y.data.add_(1)
        return loss

    step(False).backward()
    for _ in range(2):  # a backward that raised leaves nothing for the next
        loss = step(True)
        x.grad = None
        with pytest.raises(InplaceError, match="recomputing"):
            loss.backward()
        step(False).backward()
    node = step(True).grad_fn.next_functions[0][0]  # of the product
    with pytest.raises(InplaceError, match="recomputing"):
        _ = node._saved_self  # outside backward, at once
    stash.close()


def test_on_an_accelerator_each_backward_is_notified_of_its_own_replays():
    """One that runs in the middle of another ends before it; one that raises is never notified that it ends."""
    stash = stash_on(TwinDevice(), keep=None, host="1MiB", policy=recompute, min_bytes=0)
    x, weight = (torch.randn(64, 64, requires_grad=True) for _ in range(2))

    def step(write, within):
        y = x * 1
        y.register_hook(within)  # the product's node has computed its operand again by then
        with stash:
            loss = (F.gelu(y) @ weight).sum()
        if write:
            y.data.add_(1)
        return loss

    inner, ended = step(False, lambda grad: None), []

    def runs_another(grad):
        inner.backward()
        ended.append(True)

    step(False, lambda grad: None).backward()
    with pytest.raises(InplaceError, match="recomputing"):
        step(True, runs_another).backward()
    assert ended, "the inner one is right"
    wrong = step(True, lambda grad: None)

    def runs_a_wrong_one(grad):
        with pytest.raises(InplaceError, match="recomputing"):
            wrong.backward()

    step(False, runs_a_wrong_one).backward()

    # What asks when backward ends comes before a callback that was queued later, and that unpacks.
    y = x * 1
    with stash:
        late = (F.gelu(y) @ weight).sum().grad_fn.next_functions[0][0]  # the product
    y.data.add_(1)
    asked = torch.autograd.Variable._execution_engine.queue_callback
    with pytest.raises(InplaceError, match="recomputing"):
        step(False, lambda grad: asked(lambda: late._saved_self)).backward()

    def fails(grad):
        raise LookupError

    for _ in range(20):
        with pytest.raises(LookupError):
            step(False, fails).backward()
    (packer,) = (each.packer for each in stash._session.device_tiers if each.device is not None)
    gc.collect()
    assert not packer._endings, "nothing is left of them"
    step(False, lambda grad: None).backward()
    stash.close()


def test_on_an_accelerator_what_one_backward_has_yet_to_ask_for_is_not_used_by_another():
    """What was computed again may still be in memory: of a graph that is retained, or of one that raised."""
    stash = stash_on(TwinDevice(), keep=None, host="1MiB", policy=recompute, min_bytes=0)
    x, weight = (torch.randn(64, 64, requires_grad=True) for _ in range(2))

    def step(within=lambda grad: None):
        y = x * 1
        y.register_hook(within)
        with stash:
            return y, (F.gelu(y) @ weight).sum()

    step()[1].backward()
    y, loss = step()
    y.data.add_(1)
    for _ in range(3):
        with pytest.raises(InplaceError, match="recomputing"):
            loss.backward(retain_graph=True)

    def fails(grad):
        if not ended:
            ended.append(True)
            raise LookupError

    ended = []
    y, loss = step(fails)
    y.data.add_(1)
    with pytest.raises(LookupError):
        loss.backward(retain_graph=True)
    with pytest.raises(InplaceError, match="recomputing"):
        loss.backward(retain_graph=True)
    y, loss = step()
    for _ in range(2):
        loss.backward(retain_graph=True)
    stash.close()


def test_on_an_accelerator_without_memory_to_compare_nothing_is_given(monkeypatch):
    stash = stash_on(TwinDevice(), keep=None, host="1MiB", policy=recompute, min_bytes=0)
    x, weight = (torch.randn(64, 64, requires_grad=True) for _ in range(2))
    with stash:
        (F.gelu(x * 1) @ weight).sum().backward()
    with stash:
        loss = (F.gelu(x * 1) @ weight).sum()
    monkeypatch.setattr(TwinDevice, "compare", lambda *given: None)
    with pytest.raises(torch.OutOfMemoryError, match="compare"):
        loss.backward()
    monkeypatch.setattr(TwinDevice, "mark", lambda *given: None)
    with stash:
        (F.gelu(x * 1) @ weight).sum().backward()
    assert any("no memory to fingerprint it" in reason for reason in stash.stats().left)
    stash.close()


def test_an_input_of_another_stash_is_not_relied_on():
    weight = torch.randn(64, 64, requires_grad=True)
    base = torch.randn(64, 64, requires_grad=True)
    with Stash(policy=recompute, disk=MemoryStore(), keep=None, min_bytes=0):
        y = F.gelu(base @ EYE)
    with Stash(policy=recompute, disk=MemoryStore(), keep=None, min_bytes=0) as stash:
        loss = (y @ weight).sum()
    loss.backward()
    assert stash.stats().recomputed_bytes == 0
    assert "not recomputed: the operation that computed it was not recorded" in stash.stats().left


def test_a_chain_has_a_most():
    x = torch.randn(64, 64, requires_grad=True)
    with Stash(policy=recompute, disk=MemoryStore(), keep=None, min_bytes=0) as stash:
        y = x * 1
        for _ in range(MOST_BLOCKS + 1):  # x, which is a leaf, is held
            y = y.sin()
        y.sum().backward()
    assert stash.stats().recomputed_bytes == MOST_BLOCKS * x.nbytes
    (reason,) = [each for each in stash.stats().left if "in a chain of recomputed tensors" in each]
    assert stash.stats().left[reason].nbytes == x.nbytes


def test_an_operation_that_is_far_from_what_was_saved_is_not_called_again():
    x = torch.randn(64, 64, requires_grad=True)
    with Stash(policy=recompute, disk=MemoryStore(), keep=None, min_bytes=0) as stash:
        y = x * 2
        for _ in range(MOST_OPERATIONS):  # which save nothing
            y = y + 1
        y.sin().sum().backward()
    assert stash.stats().recomputed_bytes == 0
    reason = (
        f"it takes {MOST_OPERATIONS + 1} operations to compute it from saved tensors, more than "
    )
    assert f"not recomputed: {reason}{MOST_OPERATIONS}" in stash.stats().left


def test_an_interrupt_in_the_middle_of_a_replay_leaves_a_graph_that_works(monkeypatch):
    net, x = net_of()
    expected = gradients(net, x)
    result = Replay.result
    with Stash(policy=recompute, disk=MemoryStore(), keep=None, min_bytes=0):
        loss = net(x).square().mean()

        def interrupted(*args):
            result(*args)
            raise KeyboardInterrupt

        monkeypatch.setattr(Replay, "result", interrupted)
        with pytest.raises(KeyboardInterrupt):
            torch.autograd.grad(loss, list(net.parameters()), retain_graph=True)
        monkeypatch.setattr(Replay, "result", result)
        assert are_same(torch.autograd.grad(loss, list(net.parameters())), expected)


def test_two_threads_have_backward_of_one_graph_at_once():
    net, x = net_of()
    expected = gradients(net, x)
    with Stash(policy=recompute, disk=MemoryStore(), keep=0, min_bytes=0):
        loss = net(x).square().mean()
    found = []

    def run():
        found.append(torch.autograd.grad(loss, list(net.parameters()), retain_graph=True))

    threads = [threading.Thread(target=run) for _ in range(2)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert len(found) == 2 and all(are_same(each, expected) for each in found)


def networks(count, first=0):
    said = Counter()
    found = [soak_recomputed.judge(seed, said) for seed in range(first, first + count)]
    return [each for each in found if each], said


@pytest.mark.filterwarnings("ignore")
def test_random_networks():
    """`scripts/soak_recomputed.py` is the long form."""
    wrong, said = networks(40)
    assert not wrong
    assert said["networks"] > 35 and said["recomputed bytes"] > 0.1 * said["blocks' bytes"]


@pytest.mark.filterwarnings("ignore")
def test_a_wrong_replay_is_not_used_and_without_the_comparison_found(monkeypatch):
    result = Replay.result

    def wrong_result(replay, values):
        made = result(replay, values)
        is_wrong = "silu" in repr(replay) or "layer_norm" in repr(replay)
        return made + 1e-3 if is_wrong else made

    monkeypatch.setattr(Replay, "result", wrong_result)
    wrong, said = networks(20)
    assert not wrong and said["recomputed bytes"]
    monkeypatch.setattr(Packer, "_reason_to_doubt", lambda packer, block, replay: "")
    wrong, _ = networks(20)
    assert any("InplaceError" in each for each in wrong)  # by the fingerprint
    monkeypatch.setattr(_packing, "_check", lambda *given: None)
    wrong, _ = networks(20)
    assert any("other bits" in each for each in wrong)


def test_it_takes_no_codec():
    from backstash.codecs import EXACT

    with pytest.raises(UsageError, match="has no codec"):
        Action("recompute", EXACT)


class OwnNorm(nn.Module):
    """As many models write it; no module gives its eps."""

    def __init__(self, width):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x):
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, 1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("casts", [False, True])
def test_a_layer_norm_that_no_module_describes(dtype, casts):
    """Its weights are ones and zeros in the first step, when it is compared, and others in the second."""

    def run(hold):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(16, 16), OwnNorm(16), nn.Linear(16, 16))
        net = net if casts else net.to(dtype)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
        x, found = torch.randn(512, 16), []
        x = x if casts else x.to(dtype)
        for _ in range(3):
            optimizer.zero_grad()
            with hold, torch.autocast("cpu", dtype, enabled=casts and dtype != torch.float32):
                loss = net(x).square().mean()
            loss.backward()
            found += [each.grad.clone() for each in net.parameters()]
            optimizer.step()
        return found

    with Stash(policy=recompute, min_bytes=4096) as stash:
        pass
    assert are_same(run(stash), run(nullcontext()))
    assert stash.stats().recomputed_bytes


def test_a_storage_of_parts_is_not_made_again_by_what_made_one_of_them():
    """A plan may ask for it: the first part's operation is known when the block is made."""
    storage = torch.zeros(64).untyped_storage()
    replay, block = object.__new__(Replay), SimpleNamespace()
    replay.operands, replay.depth, replay._state = (), 0, SimpleNamespace(is_over=False)
    for made, is_refused in ((StorageVersion, False), (PartedStorage, True)):
        block.storage_version, block.is_copy = made(torch.zeros(64), storage), False
        assert bool(replay.reason_against(block)) == is_refused


class Tricky(nn.Module):
    """Formulas of backward that are others under a dispatch mode, of nodes that no stash unpacks for."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x):
        y = self.layer(x).sin().exp()
        mask = torch.zeros(16, dtype=torch.bool)
        z = checkpoint(lambda t: t.masked_fill(mask, 2.0).prod(-1), y, use_reentrant=False)
        return (z + y.sum(-1)).square().mean()


def test_no_mode_is_active_when_the_model_has_returned():
    net, x = Tricky(), torch.randn(8, 16)
    x[:, 3] = 0
    with Stash(policy=recompute, min_bytes=0) as stash:
        for _ in range(2):
            loss = net(x)
            assert not dispatch_modes()
            loss = loss.sqrt().sin() * 2
            assert not dispatch_modes(), "and none after what was saved since"
            expected = torch.autograd.grad(net(x).sqrt().sin() * 2, list(net.parameters()))
            assert are_same(torch.autograd.grad(loss, list(net.parameters())), expected)
        loss = (x @ net.layer.weight).sin().exp().sum()  # outside of a module it is on
        assert dispatch_modes()
        loss.backward()
        assert not dispatch_modes(), "and off when backward has ended"
    assert stash.stats().recomputed_bytes > 0


def test_inside_backward_no_mode_is_active():
    seen = []

    class Looks(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            _ = ctx.saved_tensors
            seen.append(len(dispatch_modes()))
            return grad * 2

    x = torch.randn(64, 64, requires_grad=True)
    with Stash(policy=recompute, min_bytes=0):
        loss = Looks.apply(x.sin().exp()).sum()
        assert len(dispatch_modes()) == 1
        loss.backward()
    assert seen == [0]


def test_svd_under_a_tape_has_the_bits_that_it_has_without_one():
    matrix = torch.randn(40, 40)
    x = torch.randn(40, 40, requires_grad=True)
    wanted = torch.linalg.svd(matrix)
    with Stash(policy=recompute, min_bytes=0):
        y = x.sin()
        assert dispatch_modes()
        found = torch.linalg.svd(matrix)
        y.exp().sum().backward()
    assert are_same(found, wanted)


def values_of(matrix):
    return torch.linalg.svdvals(matrix)


def test_svdvals_by_its_name_has_the_bits_that_it_has_without_a_tape():
    matrix, x = torch.randn(40, 40), torch.randn(40, 40, requires_grad=True)
    wanted = values_of(matrix)
    with Stash(policy=recompute, min_bytes=0):
        y = x.sin()
        assert dispatch_modes()
        found = values_of(matrix)
        y.exp().sum().backward()
    assert torch.equal(found, wanted)


def test_nothing_is_recomputed_where_that_is_off():
    net, x = net_of()
    expected = gradients(net, x)
    with Stash(policy=recompute, min_bytes=0, keep=None, recompute=False) as stash:
        assert are_same(gradients(net, x), expected)
    assert not stash.stats().recomputed_bytes
    assert "not recomputed: recompute=False" in stash.stats().left
    with pytest.raises(UsageError, match="recompute=False"):
        stash.recompute(net)


@pytest.mark.parametrize("given", ["blocks", 3, True, [3], []])
def test_recompute_takes_auto_false_and_modules(given):
    with pytest.raises(UsageError, match="allowed are"):
        Stash(recompute=given)


def test_modules_may_be_given_to_the_stash():
    net, x = net_of()
    expected = gradients(net, x)
    stash = Stash(min_bytes=0, recompute=net)
    assert are_same(gradients(net, x), expected)
    assert stash.stats().recomputed_bytes


@pytest.mark.parametrize("verify", ["first", "auto", "always"])
def test_all_bytes_of_what_a_policy_frees_are_compared(verify):
    """Plain PyTorch does not mind where what nobody saved is changed, so its version cannot be asked."""
    base, weight = (torch.randn(64, 64, requires_grad=True) for _ in range(2))
    bias = torch.randn(64, 64, requires_grad=True)
    stash = Stash(policy=recompute, disk=MemoryStore(), keep=None, min_bytes=0, verify=verify)
    x = base * 1
    for _ in range(2):
        with stash:
            loss = (F.gelu(x) @ weight).sum() + (x + bias).sin().sum()
    assert stash.stats().recomputed_bytes
    with torch.no_grad():
        bias.mul_(1.5)
    x.detach().numpy()[63, 63] += 1
    with pytest.raises(InplaceError, match="gave different bits"):
        loss.backward()


DECOMPOSED = {
    "svdvals": lambda a: torch.linalg.svdvals(a),
    "svd": lambda a: torch.linalg.svd(a).S,
    "eigh": lambda a: torch.linalg.eigh(a + a.T)[0],
    "eigvalsh": lambda a: torch.linalg.eigvalsh(a + a.T),
    "cond": lambda a: torch.linalg.cond(a),
    "nuclear": lambda a: a.norm(p="nuc"),
    "spectral": lambda a: torch.linalg.matrix_norm(a, 2),
    "method": lambda a: a.svd()[1] * torch.linalg.svdvals(a),
}


@pytest.mark.skipif(sys.version_info < (3, 11), reason="code does not say where it is")
@pytest.mark.parametrize("name", DECOMPOSED)
def test_a_decomposition_by_its_name_is_plain_pytorch_s_under_a_tape(name):
    matrix, x = torch.randn(40, 40), torch.randn(40, 40, requires_grad=True)
    wanted = DECOMPOSED[name](matrix)
    with Stash(policy=recompute, min_bytes=0):
        y = x.sin()
        assert dispatch_modes()
        found = DECOMPOSED[name](matrix)
        y.exp().sum().backward()
    assert torch.equal(found, wanted)


def test_a_decomposition_whose_name_is_not_seen_raises():
    values, matrix = torch.linalg.svdvals, torch.randn(40, 40)
    x = torch.randn(40, 40, requires_grad=True)
    with (
        Stash(policy=recompute, min_bytes=0),
        pytest.raises(UsageError, match="it is unknown whether torch"),
    ):
        y = x.sin()
        values(matrix)
        y.exp()
    assert not dispatch_modes()


def test_statistics_that_the_operation_writes_which_saves_them():
    net = nn.Sequential(nn.Linear(16, 16), nn.InstanceNorm1d(8, track_running_stats=True))
    x = torch.randn(4, 8, 16)
    plain = copy.deepcopy(net)
    stash = Stash(policy=recompute, min_bytes=0)
    for train in (False, True, False, True):
        net.train(train), plain.train(train)
        with stash:
            loss = net(x).sin().exp().sum()
        found = torch.autograd.grad(loss, list(net.parameters()))
        expected = torch.autograd.grad(plain(x).sin().exp().sum(), list(plain.parameters()))
        assert are_same(found, expected)
        assert are_same(net.buffers(), plain.buffers())
    assert stash.stats().recomputed_bytes


def test_a_tape_holds_nothing_that_the_program_drops():
    weight = torch.randn(8, 8, requires_grad=True)
    with Stash(policy=recompute, min_bytes=0) as stash:
        (tape,) = dispatch_modes()
        for _ in range(100):
            z = torch.rand(300, 300).requires_grad_()
            small = torch.rand(8, 8)
            y = (z * 2).detach()[:8, :8] @ weight + small
            with torch.no_grad():
                torch.rand(10, 10).softmax(-1)
        assert len(tape._memories) <= _LEAST_SWEPT, "the dead are forgotten from time to time"
        known = sum(each() is not None for each in tape._memories.values())
        del z, y, small
        assert sum(each() is not None for each in tape._memories.values()) < known < 12
    assert stash.stats().blocks == 0


def test_what_autograd_holds_as_it_is_and_the_program_then_writes():
    """A small tensor stays where it is; nothing is computed again from the bytes that it has then."""
    base = torch.randn(64, 64, requires_grad=True)

    def step():
        x = base * 1
        y = x.sin()  # saves x, which stays
        x.add_(0)
        x.detach().mul_(3.0)
        z = (x * 1.5).exp()
        return torch.autograd.grad(z.sum(), base)[0], y

    expected, _ = step()
    with Stash(policy=lambda saved: Action("recompute" if saved.index else "keep"), min_bytes=0):
        found, _ = step()
    assert torch.equal(found, expected)


def test_what_is_held_for_the_first_comparisons_is_limited(disk_dir):
    """To 64 MiB, and to the newest block."""
    with Stash(policy=recompute, disk=disk_dir, min_bytes=1 << 20, inflight=0) as stash:
        pass
    (thread_state,) = stash._session.thread_states
    held, loss = [], 0
    with stash:
        for mib in (10, 30, 30, 80):
            x = torch.zeros(mib << 18, requires_grad=True) * 2
            loss = loss + x.sin().sum()
            held.append(sum(kept.nbytes for _, kept in thread_state.latest) >> 20)
            del x
    loss.backward()
    assert held == [10, 40, 60, 80]
