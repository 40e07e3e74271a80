"""Routes: a forward that does what an earlier one did is compared with it; any other is recorded."""

import copy
import gc
import math
import threading
from collections import Counter
from contextlib import nullcontext, suppress

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import backstash._recompute.route as routes
from backstash import Stash
from backstash._torch.schemas import operation_of
from backstash._torch.storages import keep_identity
from backstash.errors import InplaceError

WIDTH, ROWS = 64, 257


@pytest.fixture
def followed(monkeypatch):
    """How many operations followed a route, and how many forwards left one."""
    count = Counter()
    follow, differ = routes.ForwardTape._follow, routes.ForwardTape._differ

    def following(tape, *given):
        result = follow(tape, *given)
        count["followed"] += result is not NotImplemented
        return result

    def differing(tape):
        count["left"] += tape.route is not None
        return differ(tape)

    monkeypatch.setattr(routes.ForwardTape, "_follow", following)
    monkeypatch.setattr(routes.ForwardTape, "_differ", differing)
    return count


class Net(nn.Module):
    """``way`` is what one step does otherwise than the others."""

    def __init__(self, act):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm, self.batch_norm = nn.LayerNorm(WIDTH), nn.BatchNorm1d(WIDTH)
        self.register_buffer("table", torch.randn(4, ROWS, WIDTH))
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("var", torch.ones(WIDTH))
        self.small = torch.ones(3, 3)
        self.half = torch.zeros(WIDTH).bfloat16(), torch.ones(WIDTH).bfloat16()
        self.rows = torch.arange(ROWS) % 4, torch.arange(ROWS) % 4 + 1000
        self.act, self.way, self.other = act, 0, None

    def forward(self, x):
        h = self.act(self, self.first(self.norm(x)))
        return x + self.second(torch.tanh(h) * h)


def bits(value):
    return value.detach().clone().view(torch.int32)


def train(act, ways, *, with_stash, around=None, **options):
    """What each step computes, in bits."""
    torch.manual_seed(0)
    net = Net(act)
    twin = copy.deepcopy(net)
    stash = Stash(keep="1GiB", **options)
    if with_stash:
        stash.recompute(net, twin)
    found = []
    for number, way in enumerate(ways):
        torch.manual_seed(100 + number)
        x = torch.randn(ROWS, WIDTH, requires_grad=True)
        net.way = twin.way = way
        net.other = twin.other = torch.randn(ROWS, WIDTH)
        with around(way) if around is not None else torch.enable_grad():
            if with_stash:
                with stash:
                    out = twin(net(x))
            else:
                out = twin(net(x))
            out.square().mean().backward()
        found.append([bits(out), bits(x.grad)])
        for each in (net, twin):
            found[-1] += [bits(p.grad) for p in each.parameters() if p.grad is not None]
            found[-1] += [bits(b) for b in each.buffers() if b.is_floating_point()]
            each.zero_grad()
    return found


def are_equal(left, right):
    return all(
        len(one) == len(other) and all(map(torch.equal, one, other))
        for one, other in zip(left, right, strict=True)
    )


def scaled(net, h):
    return torch.sigmoid(h.mul((2.0, 3.0)[net.way]))


def signed_zero(net, h):
    return torch.copysign(torch.sigmoid(h), (0.0, -0.0)[net.way])


def typed(net, h):
    return torch.sigmoid(h) + torch.arange(WIDTH).div((2, 2.0)[net.way], rounding_mode=None)


def powered(net, h):
    return torch.sigmoid(h).sum(1, keepdim=True).expand(h.shape).clamp(min=(1, 31.5)[net.way])


def swapped(net, h):
    g = torch.sigmoid(h)
    return torch.sub(g, h) if net.way == 0 else torch.sub(h, g)


def aliased(net, h):
    g = torch.sigmoid(h)
    return torch.atan2(g, h if net.way == 0 else g)


def other_memory(net, h):
    return torch.sigmoid(h * (net.table[0] if net.way == 0 else net.other))


def other_place(net, h):
    return torch.sigmoid(h * net.table[1 + net.way])


def other_order(net, h):
    return torch.sigmoid(h) * (net.table[0] if net.way == 0 else net.table[0].t().contiguous().t())


def in_list(net, h):
    g = torch.sigmoid(h)
    parts = (g[:, :32], h[:, 32:]) if net.way == 0 else (h[:, :32], g[:, 32:])
    return torch.cat(parts, 1)


def in_longer_list(net, h):
    g = torch.sigmoid(h)
    more = () if net.way == 0 else (g[:, :0],)
    return torch.cat((g[:, :32], h[:, 32:], *more), 1)


def other_part(net, h):
    part = torch.sigmoid(h)[:, 32 * net.way :][:, :32]
    return torch.cat((part * 2, part), 1)


def by_name(net, h):
    return torch.sub(torch.sigmoid(h), h, alpha=(2, 3)[net.way])


def by_tensor(net, h):
    return torch.sigmoid(h * (2.0 if net.way == 0 else net.other))


class Shifted(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        out = x.sin()
        out.numpy()[:] += 1
        return out

    @staticmethod
    def backward(ctx, grad):
        return grad


def in_function(net, h):
    return torch.sigmoid(h) * torch.tanh((h.sin() if net.way == 0 else Shifted.apply(h)) * 2)


def in_function_without_grad(net, h):
    with torch.no_grad():
        g = h.sin() if net.way == 0 else Shifted.apply(h)
    return torch.sigmoid(h) * torch.tanh(g + h)


def several_written(net, h):
    """What writes to several tensors is not replayed, and its arguments are not compared."""
    g = [torch.sigmoid(h.detach()), h * 2, h * 3]
    torch._foreach_add_(g[: 2 + net.way], 1)
    return torch.tanh(g[0] * g[1]) * g[2]


def tried_again(net, h):
    """The attempt that fails has an operand in the place of the one that succeeds."""
    scales = torch.tanh(h) * 2
    for rows in (net.rows[1], net.rows[0]) if net.way == 1 else (net.rows[0],):
        try:
            scales = scales * F.embedding(rows, net.first.weight[:4])
        except IndexError:
            pass
    return scales


def failing(net, h):
    """A route of way 1 has no numbers for what failed. Way 2 differs from it late."""
    for _ in range(5 if net.way == 0 else 0):
        with suppress(RuntimeError):
            torch.mm(h, net.small)
    g = torch.tanh(h * 2)
    h = h * 3
    k = torch.tanh(h)
    if net.way == 2:
        h.mul_(2)
    return g * k * h.cos()


class Normed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, mean, var, training):
        return F.batch_norm(x, mean, var, training=training, momentum=0.5)

    @staticmethod
    def backward(ctx, grad):
        return grad, None, None, None


def normed_in_function(net, h):
    t = h + net.mean
    z = Normed.apply(h, net.mean, net.var, net.way == 1)
    return torch.sigmoid(t) * z


def other_statistics(net, h):
    mean, var = ((net.mean, net.var), net.half)[net.way]
    out = F.batch_norm(h.bfloat16(), mean, var, training=True)
    return out.tanh().exp().float()


def written_by_another_thread(net, h):
    g = h + net.table[0]
    if net.way == 1:
        other = threading.Thread(target=lambda: net.table.mul_(0.5))
        other.start()
        other.join()
    return torch.tanh(g)


def held_elsewhere(net, h):
    """A save that the stash does not see, and later one that it did not see before: the numbers after them are
    the same."""
    inner = torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)
    with inner if net.way == 1 else nullcontext():
        g = torch.sigmoid(h * net.norm.weight)
    net.other.requires_grad_(net.way == 1)
    scaled = net.other * net.norm.bias
    return torch.tanh(g + scaled).square()


def used_after_all(net, h):
    """What no replay runs in the usual way was computed from another number when one has to."""
    other, out = h.mul((2.0, 3.0)[net.way]), torch.sigmoid(h)
    return out + torch.sigmoid(other) if net.way == 1 else out


def written_after_all(net, h):
    """As above, in place."""
    other, out = torch.zeros_like(h), torch.sigmoid(h)
    other.add_(h, alpha=1.5 + net.way)
    return out * torch.sigmoid(other) if net.way == 1 else out


def complex_at_once(net, h):
    """No replay runs this, and its operand is lazily conjugated only once."""
    table = torch.complex(net.table[0], net.table[1]) if net.way == 1 else net.table[0]
    other = torch.add(table.conj(), 1.5)
    return torch.sigmoid(h + other.abs().detach().sum() * net.way)


def longer(net, h):
    for _ in range(1 + net.way):
        h = torch.sigmoid(h)
    return h


def another(net, h):
    return torch.sigmoid(h) if net.way == 0 else torch.tanh(h)


def dropped(net, h):
    return torch.sigmoid(F.dropout(h, (0.5, 0.0)[net.way]))


def undropped(net, h):
    return torch.sigmoid(F.dropout(h, (0.0, 0.5)[net.way]))


def normed(net, h):
    net.batch_norm.train(net.way == 0)
    return torch.sigmoid(net.batch_norm(h))


def in_place(net, h):
    g = torch.sigmoid(h) * 2
    g = g.add_(1) if net.way == 0 else g.sub_(1)
    return torch.tanh(g)


def filled(net, h):
    g = torch.empty_like(h)
    g.copy_(h if net.way == 0 else net.other)
    return torch.sigmoid(h * g)


def without_grad(net, h):
    with torch.set_grad_enabled(net.way == 0):
        g = torch.sigmoid(h)
    return g * torch.sigmoid(h)


def unseen_version(net, h):
    g = torch.sigmoid(h.detach())
    if net.way == 1:
        torch._C._autograd._unsafe_set_version_counter((g,), (5,))
    return torch.sigmoid(h * g)


def caught(net, h):
    if net.way == 1:
        try:
            torch.sigmoid(h) @ torch.ones(3)
        except RuntimeError:
            pass
    return torch.sigmoid(h)


def masked(net, h):
    return torch.where(torch.rand_like(h) > 0.5, torch.sigmoid(h), h)


def saved_more(net, h):
    g = torch.sigmoid(h)
    if net.way == 1:
        g = g * g.exp()
    return g


class Doubling(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.save_for_backward(x)
        ctx.factor = factor
        return x.sin() * factor

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * x.cos() * ctx.factor, None


def by_function(net, h):
    return torch.sigmoid(Doubling.apply(h, (2.0, 3.0)[net.way]))


def transformed(net, h):
    return torch.fft.irfft(torch.fft.rfft(h) * (2 + 1j, 2 - 1j)[net.way], n=WIDTH)


def signed_complex_zero(net, h):
    angles = torch.full((WIDTH,), (complex(-1.0, 0.0), complex(-1.0, -0.0))[net.way]).angle()
    return torch.sigmoid(h) * angles


def conjugated(net, h):
    z = torch.view_as_complex(torch.sigmoid(h).view(ROWS, -1, 2))
    z = z * (z.conj() if net.way == 0 else z).exp()
    return torch.view_as_real(z).reshape(ROWS, WIDTH)


def covariance(h):
    return h.t() @ h / ROWS + torch.eye(WIDTH)


def factored(net, h):
    low = torch.linalg.cholesky(covariance(h).mul((1.0, 2.0)[net.way]))
    return torch.linalg.solve_triangular(low, h.t(), upper=False).t()


def decomposed(net, h):
    values, vectors = torch.linalg.eigh(covariance(h))
    return torch.sigmoid(h) @ (vectors * values.mul((1.0, 2.0)[net.way]))


def inverted(net, h):
    z = torch.complex(covariance(h), covariance(h * 0.5) * 1.5)
    return torch.sigmoid(h) @ torch.linalg.pinv(z, rtol=(1e-6, 1e-5)[net.way]).abs()


def of_values(net, h):
    g = covariance(h.detach())
    values = torch.linalg.svd(g)[1] if net.way == 0 else torch.linalg.svdvals(g)
    return torch.sigmoid(h) * values


ACTS = [
    scaled, signed_zero, typed, powered, swapped, aliased, other_memory, other_place, other_order, in_list,
    in_longer_list, other_part, by_tensor, in_function, in_function_without_grad, several_written,
    held_elsewhere, tried_again, normed_in_function, other_statistics, written_by_another_thread,
    by_name, longer, another, dropped, undropped, normed, in_place, filled, without_grad, unseen_version,
    caught, used_after_all, written_after_all, complex_at_once, masked, saved_more,
    by_function, transformed, signed_complex_zero, conjugated, factored, decomposed,
    inverted, of_values,
]  # fmt: skip


@pytest.mark.parametrize("act", ACTS, ids=lambda act: act.__name__)
def test_a_forward_that_differs_from_the_route_is_recorded(act, followed):
    """Each way is the usual one once, and differs once: step 3 is the first that follows."""
    for ways in ([0, 0, 0, 0, 1, 0, 1, 1, 0], [1, 1, 1, 1, 0, 1, 0, 0, 1]):
        plain = train(act, ways, with_stash=False)
        followed.clear()
        assert are_equal(train(act, ways, with_stash=True, verify="first"), plain)
        assert followed["followed"] > 20


def test_an_operation_that_failed_takes_no_number(followed):
    ways = [2, 0, 0, 1, 1, 2, 1, 2, 1, 2, 1]
    plain = train(failing, ways, with_stash=False)
    followed.clear()
    assert are_equal(train(failing, ways, with_stash=True, verify="first"), plain)
    assert followed["followed"] > 20


def test_memory_that_is_written_unseen_raises(followed):
    """As without a route: see docs/explanation/replay.md."""

    def act(net, h):
        g = torch.full((ROWS, WIDTH), 2.0)
        if net.way == 1:
            g.detach().numpy()[:] = 3.0
        return torch.sigmoid(h * g)

    train(act, [0] * 5, with_stash=True)
    assert followed["followed"] and not followed["left"]
    with pytest.raises(InplaceError, match="gave different bits"):
        train(act, [0, 0, 0, 0, 1], with_stash=True)


def _cast(way):
    return torch.autocast("cpu", torch.bfloat16, enabled=way == 1)


class _Flushed:
    def __init__(self, way):
        self.on = way == 1

    def __enter__(self):
        torch.set_flush_denormal(self.on)

    def __exit__(self, *_):
        torch.set_flush_denormal(False)


class _Threads:
    def __init__(self, way):
        self.count = 1 + way

    def __enter__(self):
        self.before = torch.get_num_threads()
        torch.set_num_threads(self.count)

    def __exit__(self, *_):
        torch.set_num_threads(self.before)


def small(net, h):
    return torch.sigmoid(h) * 1e-22 * 1e-20 * 1e38


@pytest.mark.parametrize("around", [_cast, _Flushed, _Threads])
def test_other_settings_are_another_route(around, followed):
    ways = [0, 0, 0, 0, 1, 0, 1, 1, 0]
    plain = train(small, ways, with_stash=False, around=around)
    followed.clear()
    assert are_equal(train(small, ways, with_stash=True, around=around), plain)
    assert followed["left"] >= 1 and followed["followed"] > 20


@pytest.mark.parametrize(
    "act",
    [
        *(scaled, in_list, normed, in_place, masked, dropped),
        *(transformed, conjugated, factored, decomposed, inverted),
    ],
)
def test_what_does_the_same_follows_to_its_end(act, followed):
    ways = [0] * 6
    plain = train(act, ways, with_stash=False)
    followed.clear()
    assert are_equal(train(act, ways, with_stash=True, verify="always"), plain)
    assert followed["left"] == 0 and followed["followed"] > 40


def test_arguments_of_what_no_replay_runs_may_change(followed, monkeypatch):
    """Nothing in the module's call saves what its last operation computes."""
    forward = Net.forward
    monkeypatch.setattr(Net, "forward", lambda net, x: forward(net, x).add(net.way))
    ways = [0, 0, 0, 1, 2, 1, 0]
    plain = train(scaled_twice, ways, with_stash=False)
    followed.clear()
    assert are_equal(train(scaled_twice, ways, with_stash=True, verify="always"), plain)
    assert followed["left"] == 0 and followed["followed"] > 40


@pytest.mark.parametrize("act", [used_after_all, written_after_all, complex_at_once])
def test_what_was_not_compared_is_not_replayed(act, followed):
    """The first step compares what way 1 discards, so nothing does when a later step leaves the route."""
    ways = [1, 0, 0, 0, 0, 1, 1, 0, 1]
    plain = train(act, ways, with_stash=False)
    followed.clear()
    assert are_equal(train(act, ways, with_stash=True, verify="first"), plain)
    assert followed["left"] >= 2 and followed["followed"] > 20


def written_in_part(net, h):
    """In all ways but 2, an operation writes to its first argument, and then raises."""
    first, second = (h * 2).detach(), (h * 3).detach()
    if net.way != 2:
        with suppress(RuntimeError):
            torch._foreach_add_([first, second], [h.detach(), h.detach()[:, :3]])
    return torch.sigmoid(h + first)


@pytest.mark.parametrize("ways", [[2, 1, 2, 1], [2, 2, 2, 2, 1, 2], [1, 2, 1, 1, 1, 2]])
def test_what_an_operation_wrote_that_raised_is_not_replayed(ways, followed):
    plain = train(written_in_part, ways, with_stash=False)
    assert are_equal(train(written_in_part, ways, with_stash=True, verify="first"), plain)
    assert followed["followed"]


def scaled_twice(net, h):
    return torch.sigmoid(h.mul(2.0))


def test_a_module_that_often_differs_follows_no_longer(followed):
    ways = [0, 0, 0, 1, 1, 1, 1, 1, 1, 1]
    train(scaled, ways, with_stash=True)
    assert followed["left"] == 2 * routes._MOST_MISSES


def test_two_shapes_have_a_route_each(followed):
    net = Net(another)
    stash = Stash(keep="1GiB")
    stash.recompute(net)
    for number in range(8):
        x = torch.randn(ROWS + number % 2, WIDTH)
        with stash:
            loss = net(x).square().mean()
        if number >= 4:
            assert followed.pop("followed") == len(_operations_of(net, x)), number
        loss.backward()
        followed.clear()
    assert followed["left"] == 0


def _operations_of(net, x):
    """The operations of one forward that are no views."""
    seen = []

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if not operation_of(func).is_view:
                seen.append(func)
            return func(*args, **(kwargs or {}))

    with Counting():
        net(x)
    return seen


def test_a_step_that_follows_makes_no_objects_of_its_own(monkeypatch, followed):
    net = Net(another)
    stash = Stash(keep="1GiB")
    stash.recompute(net)
    made = Counter()
    for kind in (routes.State, routes.Op, routes.Made, routes.Outside):
        begin = kind.__init__

        def counting(self, *given, begin=begin, kind=kind, **named):
            made[kind.__name__] += 1
            begin(self, *given, **named)

        monkeypatch.setattr(kind, "__init__", counting)
    for _ in range(4):
        made.clear()
        with stash:
            loss = net(torch.randn(ROWS, WIDTH)).square().mean()
        loss.backward()
    assert not made and followed["followed"]


class Forked(nn.Module):
    """Two results, of which each needs a mask of its own."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.masks = []

    def forward(self, x):
        masks = [torch.rand(ROWS, WIDTH) for _ in range(2)]
        self.masks = [keep_identity(each.untyped_storage()) for each in masks]
        first = torch.sigmoid(self.linear(x) * masks[0]).square()
        return first, torch.tanh(first * masks[1]).square()


def test_an_operand_is_released_with_the_last_that_needs_it(followed):
    net, stash = Forked(), Stash(keep="1GiB")
    stash.recompute(net)
    gc.collect()
    gc.disable()
    try:
        for _ in range(5):
            with stash:
                first, second = net(torch.randn(ROWS, WIDTH))
            loss = first.sum()
            early, late = net.masks
            assert not early.expired() and not late.expired()
            del second
            assert late.expired() and not early.expired()
            del first
            loss.backward()
            del loss
            assert early.expired()
    finally:
        gc.enable()
    assert followed["followed"]


def test_where_no_gradient_flows_other_tensors_are_saved(followed):
    """In step 5 no gradient flows through one of the operands, so other tensors are saved."""

    class Choosing(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)
            self.saves = True

        def forward(self, x):
            h = torch.sigmoid(self.linear(x))
            with torch.set_grad_enabled(self.saves):
                g = h.detach() if not self.saves else h
            return torch.tanh(g * 2).square() + h

    found = []
    for with_stash in (False, True):
        torch.manual_seed(0)
        net, stash = Choosing(), Stash(keep="1GiB")
        if with_stash:
            stash.recompute(net)
        found.append([])
        for number in range(8):
            torch.manual_seed(number)
            net.saves = number != 5
            x = torch.randn(ROWS, WIDTH)
            if with_stash:
                with stash:
                    loss = net(x).square().mean()
            else:
                loss = net(x).square().mean()
            found[-1].append([bits(each) for each in torch.autograd.grad(loss, net.parameters())])
    assert are_equal(*found) and followed["followed"]


def test_nan_among_the_constants_is_never_the_same(followed):
    def act(net, h):
        return torch.nan_to_num(torch.sigmoid(h), nan=math.nan)

    ways = [0] * 5
    assert are_equal(train(act, ways, with_stash=True), train(act, ways, with_stash=False))
    assert followed["left"]


def test_what_a_plan_keeps_is_another_route():
    known, x = routes.Routes(), torch.ones(4, 4)
    for follows in (False, True):
        for kept in (frozenset(), frozenset((0,))):
            tape = routes.ForwardTape(known, kept)
            tape.enter()
            y = x.sin()
            if kept:
                tape.take_as_given(y)
            y.cos()
            tape.leave()
            assert (tape.route is not None) is follows
            tape.make_route()
            tape.end()


class Grown(nn.Module):
    """From some step on it saves more, by the same operations on the same input."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.rows = 1

    def forward(self, x):
        grown = torch.sin(self.weight * torch.zeros(self.rows, 1)).cos()
        return torch.sin(x * self.weight).cos().sum() + grown.sum()


def test_a_route_that_saved_less_is_made_again(followed):
    net, x = Grown(), torch.ones(ROWS, WIDTH)
    stash = Stash()
    discarded = []
    with stash.recompute(net):
        for step in range(12):
            net.rows = ROWS if step >= 5 else 1
            before = stash.stats().recomputed_bytes
            net(x).backward()
            discarded.append(stash.stats().recomputed_bytes - before)
    assert followed["left"] == 1
    assert discarded[4] and discarded[-1] == 2 * discarded[4]
    assert followed["followed"] > 5 * 5  # again, after it was left
