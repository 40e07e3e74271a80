"""Memory that is written and read through aliases with version counters of their own, such as ``.data``."""

import copy
import weakref
from contextlib import nullcontext

import pytest
import torch
from torch import nn

import backstash._recompute.route as routes
from backstash import Stash

ROWS, WIDTH = 256, 64


class Net(nn.Module):
    """``forward`` writes to a gradient or reads it while an inner backward adds to it, which no mode sees."""

    def __init__(self, way):
        super().__init__()
        self.table = nn.Embedding(ROWS, WIDTH)
        self.weight = nn.Parameter(torch.ones(ROWS, WIDTH))
        self.way, self.adds = way, False

    def add(self):
        if self.adds:
            self.table(torch.tensor([3])).sum().backward()

    def forward(self, x):
        gradient = torch.zeros_like(self.table.weight)
        self.table.weight.grad = gradient
        return torch.sin(self.way(self, gradient) * self.weight + x)


def written_through_data(net, gradient):
    gradient.data.add_(0.5)
    net.add()
    return gradient


def written_through_a_view_of_data(net, gradient):
    gradient.data[1:].add_(0.5)
    net.add()
    return gradient


def read_through_data(net, gradient):
    before = (gradient.data * 2).cos()
    net.add()
    return (gradient.data * 2).cos() + before


def read_through_data_only(net, gradient):
    net.table.weight.grad = None
    net.table(torch.tensor([5])).sum().backward()
    before = net.table.weight.grad.data * 2
    net.add()
    return net.table.weight.grad.data * 2 + before


def written_twice(net, gradient):
    gradient.add_(0.5).mul_(2)
    net.add()
    gradient.add_(1)
    net.add()
    return gradient


def written_through_an_alias(net, gradient):
    gradient.detach().add_(0.5)
    net.add()
    return gradient


def written_without_a_version(net, gradient):
    with torch.autograd._unsafe_preserve_version_counter(gradient):
        gradient.add_(0.5)
    kept = gradient * 1
    net.add()
    return gradient + kept


def only_detached_is_left(net, gradient, detached=torch.detach):
    net.table.weight.grad = gradient * 2
    added, one = net.table(torch.tensor([3])).sum(), torch.ones(())
    found = detached(net.table.weight.grad)
    if net.adds:
        added.backward(one)  # calls nothing that the tape records
    net.table.weight.grad = None
    return found


def only_data_is_left(net, gradient):
    return only_detached_is_left(net, gradient, lambda tensor: tensor.data)


WAYS = (
    only_detached_is_left,
    only_data_is_left,
    written_through_data,
    written_through_a_view_of_data,
    read_through_data,
    read_through_data_only,
    written_twice,
    written_through_an_alias,
    written_without_a_version,
)


def gradients(net, context):
    found = []
    for step in range(8):
        net.adds = step >= 4  # from then on it does otherwise than the steps before
        net.weight.grad = None
        with context:
            loss = net(torch.full((ROWS, WIDTH), float(step))).square().sum()
        loss.backward()
        found.append(net.weight.grad.clone())
    return found


@pytest.mark.parametrize("way", WAYS)
def test_what_an_inner_backward_adds_is_not_missed(way):
    torch.manual_seed(0)
    net = Net(way)
    plain = gradients(copy.deepcopy(net), nullcontext())
    stash = Stash(min_bytes=0)
    with stash.recompute(net):
        found = gradients(net, stash)
    assert stash.stats().recomputed_bytes
    stash.close()
    for step, (one, other) in enumerate(zip(plain, found, strict=True)):
        assert torch.equal(one, other), step


class InPlace(nn.Sequential):
    """A linear layer of three dimensions returns an alias of a product, and not a view of it."""

    def __init__(self):
        super().__init__(nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH))

    def forward(self, x):
        return super().forward(x).sigmoid_() * x


def test_a_product_that_is_changed_in_place_is_recomputed_on_a_route(monkeypatch):
    left = []
    differ = routes.ForwardTape._differ

    def differing(tape):
        left.append(tape.route is not None)
        return differ(tape)

    monkeypatch.setattr(routes.ForwardTape, "_differ", differing)
    net, stash = InPlace(), Stash(min_bytes=0)
    x = torch.randn(4, ROWS, WIDTH)
    discarded = []
    with stash.recompute(net):
        for _ in range(6):
            before = stash.stats().recomputed_bytes
            net(x).sum().backward()
            discarded.append(stash.stats().recomputed_bytes - before)
    stash.close()
    assert discarded == [3 * x.nbytes] * 6
    assert not any(left)


class Cache(nn.Module):
    """Writes to a position of a cache, and reads those before it."""

    def __init__(self):
        super().__init__()
        self.values = torch.zeros(ROWS, 128, WIDTH)

    def forward(self, x, at):
        self.values.data[:, at] = x.detach()
        return ((self.values[:, :at].clone() + x[:, None]).sin()).sum(1)


def test_what_is_between_the_elements_of_an_operand_may_change():
    torch.manual_seed(0)
    given = [torch.randn(ROWS, WIDTH) for _ in range(4)]

    def gradients(context):
        net = Cache()
        inputs = [each.clone().requires_grad_() for each in given]
        with context(net):
            loss = sum(net(each, at).sum() for at, each in enumerate(inputs, 1))
        return torch.autograd.grad(loss, inputs)

    plain = gradients(lambda net: nullcontext())
    stash = Stash(min_bytes=0)
    assert all(map(torch.equal, gradients(stash.recompute), plain))
    assert stash.stats().recomputed_bytes
    stash.close()


class Sequence(nn.Module):
    """Each of its steps has parts of its own, of one product."""

    def __init__(self):
        super().__init__()
        self.layer = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, x, state):
        x = x if state is None else state
        return self.layer(x.view(ROWS // 32, 32, WIDTH))[0].reshape(ROWS, WIDTH)


ALIASED = {
    "a layer of many steps": Sequence,
    "cells": lambda: nn.GRUCell(WIDTH, WIDTH),
    "long cells": lambda: nn.LSTMCell(WIDTH, WIDTH),
}


class Unrolled(nn.Module):
    """Cells write to the parts of a product, each of which counts its own versions."""

    def __init__(self, cell):
        super().__init__()
        self.cell = cell

    def forward(self, x):
        state = None
        for _ in range(4):
            state = self.cell(x, state)
        return state[0] if isinstance(state, tuple) else state


@pytest.mark.parametrize("name", ALIASED)
def test_parts_that_are_written_in_place_are_recomputed(name):
    torch.manual_seed(0)
    net, stash = Unrolled(ALIASED[name]()), Stash(min_bytes=0)
    other = copy.deepcopy(net)
    with stash.recompute(net):
        for _ in range(5):
            before = stash.stats().recomputed_bytes
            x = torch.randn(ROWS, WIDTH)
            found = torch.autograd.grad(net(x).square().sum(), list(net.parameters()))
            plain = torch.autograd.grad(other(x).square().sum(), list(other.parameters()))
            assert all(map(torch.equal, found, plain))
            discarded = stash.stats().recomputed_bytes - before
            assert discarded > (30 if name == "a layer of many steps" else 16) * x.nbytes
    stash.close()


def test_an_alias_that_outlives_what_it_is_of_is_not_held():
    """What it showed before is not known, and to hold it takes more than it frees."""
    alive = []

    class Detached(nn.Module):
        def forward(self, x):
            storages = []
            for _ in range(6):
                wide = (x * torch.ones(20, 1, 1)).detach()
                storages.append(weakref.ref(wide.untyped_storage()))
                x = torch.cos(x)  # the operation after detach() may still read it
                x = torch.sin(x + wide.sum(0))
                del wide
            alive.append(sum(each() is not None for each in storages))
            return x

    net, stash = Detached(), Stash(min_bytes=0)
    with stash.recompute(net):
        for _ in range(4):
            x = torch.randn(ROWS, WIDTH, requires_grad=True)
            found = torch.autograd.grad(net(x).sum(), x)
            plain = torch.autograd.grad(Detached()(x).sum(), x)
            alive.pop()
            assert torch.equal(*found, *plain)
    assert stash.stats().recomputed_bytes
    stash.close()
    assert max(alive) <= 1 and not any(alive[2:])


class Rounded(nn.Module):
    """A straight-through estimator: the tensor that it detaches is gone when the result is used."""

    def __init__(self, detached):
        super().__init__()
        self.detached = detached

    def forward(self, x):
        wide = x * 4
        wide = wide + self.detached(wide.round() - wide)
        return torch.sin(wide).cos()


@pytest.mark.parametrize("detached", [torch.detach, lambda tensor: tensor.data])
def test_a_straight_through_estimator_is_recomputed(detached):
    net, stash = Rounded(detached), Stash(min_bytes=0)
    with stash.recompute(net):
        for _ in range(5):
            before = stash.stats().recomputed_bytes
            x = torch.randn(4 * ROWS, WIDTH, requires_grad=True)  # a small operand is copied
            (found,) = torch.autograd.grad(net(x).sum(), x)
            (plain,) = torch.autograd.grad(Rounded(detached)(x).sum(), x)
            assert torch.equal(found, plain)
            assert stash.stats().recomputed_bytes - before == 2 * x.nbytes
    stash.close()


class Rewritten(nn.Module):
    """Reads a weight, changes it by an alias, and reads it again before the first result is saved."""

    def __init__(self, change):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2 * ROWS, WIDTH))
        self.change, self.changes = change, False

    def forward(self, x):
        result = self.weight + x
        if self.changes:
            with torch.no_grad():
                self.change(self.weight)[ROWS:].mul_(0.5)
        other = self.weight.cos()
        return result.sin() + other


@pytest.mark.parametrize("verify", ["first", "auto"])
@pytest.mark.parametrize(
    "change", [torch.detach, lambda tensor: tensor.data, lambda tensor: tensor]
)
def test_what_was_read_before_a_change_is_not_held_as_it_is_after(change, verify):
    def gradients(net, context):
        found = []
        for step in range(6):
            net.changes = step >= 3  # once a replay is known to be exact
            x = torch.full((2 * ROWS, WIDTH), float(step), requires_grad=True)
            with context:
                loss = net(x).sum()
            found += torch.autograd.grad(loss, x)
        return found

    plain = gradients(Rewritten(change), nullcontext())
    net, stash = Rewritten(change), Stash(min_bytes=0, verify=verify)
    with stash.recompute(net):
        assert all(map(torch.equal, gradients(net, stash), plain))
    assert stash.stats().recomputed_bytes
    stash.close()


class SparseRewritten(nn.Module):
    """Reads a sparse tensor, and changes it before the result is saved."""

    def __init__(self, change):
        super().__init__()
        self.register_buffer("scale", torch.eye(8 * ROWS).to_sparse())
        self.register_buffer("rows", torch.ones(8 * ROWS, WIDTH))
        self.change, self.changes = change, False

    def forward(self, x):
        result = torch.sparse.mm(self.scale, self.rows) + x
        if self.changes:
            self.change(self.scale).mul_(0.5)
        return result.sin().cos()


@pytest.mark.parametrize("change", [lambda sparse: sparse, torch.Tensor.values])
def test_a_sparse_tensor_that_was_changed_is_not_held(change):
    def gradients(net, context):
        found = []
        for step in range(6):
            net.changes = step >= 3
            x = torch.full((8 * ROWS, WIDTH), float(step), requires_grad=True)
            with context:
                loss = net(x).sum()
            found += torch.autograd.grad(loss, x)
        return found

    plain = gradients(SparseRewritten(change), nullcontext())
    net, stash = SparseRewritten(change), Stash(min_bytes=0, verify="first")
    with stash.recompute(net):
        assert all(map(torch.equal, gradients(net, stash), plain))
    assert stash.stats().recomputed_bytes
    stash.close()


class Twice(torch.autograd.Function):
    """Computes what no replay does, and saves nothing."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


class Changing(nn.Module):
    """Changes what an operation has read, in a way of its own."""

    def __init__(self, way):
        super().__init__()
        self.weight, self.way = nn.Parameter(torch.ones(2 * ROWS, WIDTH)), way
        self.flat = torch.linspace(-1, 1, 8 * ROWS * WIDTH).view(8 * ROWS, WIDTH)
        self.register_buffer("window", torch.zeros(0))
        self.window.data = self.flat[: 2 * ROWS]
        self.register_buffer("part", torch.ones(ROWS, WIDTH))
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("var", torch.ones(WIDTH))
        self.table = nn.Embedding(ROWS, WIDTH)

    def add_to(self, memory):
        """Write to a memory by an inner backward, which the tape does not see."""
        self.table.weight.grad = memory
        self.table(torch.tensor([3])).sum().backward()
        self.table.weight.grad = None

    def forward(self, x):
        return self.way(self, x * 1)


def moved(net, x):
    result = x + net.window
    if net.changes:
        net.window.data = net.flat[4 * ROWS : 6 * ROWS]
    return result.sin()


def added_to_and_read_again(net, x):
    result = x[:ROWS] + net.part
    if net.changes:
        net.add_to(net.part)
    other = net.part.cos()  # before the result is saved
    return result.sin() + other


def written_after_it_is_held(net, x):
    result = (x + net.weight).sin()
    if net.changes:
        net.weight.data.mul_(0.5)
    return result


def written_by_a_part_after_it_is_held(net, x):
    result = (x + net.weight).sin()
    if net.changes:
        with torch.no_grad():
            torch.unsafe_chunk(net.weight, 2)[1].detach().mul_(0.5)
    return result


def added_to_a_part_on_a_route(net, x):
    parts = torch.unsafe_chunk(net.flat, 8)
    result = torch.cat([x] * 4) + net.flat
    if net.changes:
        net.add_to(parts[1])
    return result.sin()


def added_to_two_parts_on_a_route(net, x):
    parts = torch.unsafe_chunk(net.flat, 8)
    if net.changes:
        net.add_to(parts[0])
    result = torch.cat([x] * 4) + net.flat
    if net.changes:
        net.add_to(parts[1])
    return result.sin()


def held_and_dropped(net, x):
    if net.changes:
        net.window.sin()  # so that it leaves its route
    first = Twice.apply(net.weight)
    result = (torch.stack([x] * 4) + first).sin()
    second = x + Twice.apply(net.window)
    if net.changes:
        first.data.mul_(0.5)
    return result + second


def statistics_of_a_kernel(net, x):
    with torch.no_grad():
        mean, _ = torch.batch_norm_update_stats(x, net.mean, net.var, 0.1)
    return (x + mean).sin() + net.mean


CHANGES = (
    moved,
    added_to_and_read_again,
    written_after_it_is_held,
    written_by_a_part_after_it_is_held,
    added_to_a_part_on_a_route,
    added_to_two_parts_on_a_route,
    held_and_dropped,
    statistics_of_a_kernel,
)


@pytest.mark.parametrize("way", CHANGES)
def test_a_replay_reads_what_the_operation_read(way):
    def gradients(net, context):
        torch.manual_seed(0)
        found = []
        for step in range(7):
            net.changes = step in (3, 4, 5)
            x = torch.rand(2 * ROWS, WIDTH, requires_grad=True)
            with context:
                loss = net(x).sum()
            found += [*torch.autograd.grad(loss, x), net.mean.clone()]
        return found

    torch.manual_seed(0)
    net = Changing(way)
    plain = gradients(copy.deepcopy(net), nullcontext())
    stash = Stash(min_bytes=0, verify="first")
    with stash.recompute(net):
        assert all(map(torch.equal, gradients(net, stash), plain))
    assert stash.stats().recomputed_bytes
    stash.close()
