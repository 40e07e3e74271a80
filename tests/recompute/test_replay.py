"""What a replay copies: values that a later operation of it would overwrite."""

import random
from contextlib import nullcontext

import pytest
import torch
from torch import nn

import backstash._recompute.replay as replays
from backstash import Stash
from backstash._recompute.operations import place_of

SIZE = 48


def some_view(random):
    """A view of a memory of ``SIZE`` elements."""
    whole = torch.arange(SIZE)
    while True:
        shape = [random.randint(0, 5) for _ in range(random.randint(0, 3))]
        stride = [random.choice([0, 1, 1, 2, 4, 6, 8, 12]) for _ in shape]
        offset = random.randint(0, SIZE - 1)
        last = offset + sum((length - 1) * step for length, step in zip(shape, stride, strict=True))
        if last < SIZE:
            return whole.as_strided(shape, stride, offset)


def test_tensors_that_are_said_to_be_apart_have_no_element_in_common():
    chance, apart = random.Random(0), 0
    for _ in range(20_000):
        one, other = some_view(chance), some_view(chance)
        if replays.are_apart(place_of(one), place_of(other)):
            apart += 1
            assert not {*one.flatten().tolist()} & {*other.flatten().tolist()}
    assert apart > 2_000


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_the_parts_of_a_tensor_are_apart(dim):
    parts = torch.arange(SIZE).view(4, 6, 2).chunk(2, dim)
    assert replays.are_apart(*map(place_of, parts))
    assert not replays.are_apart(place_of(parts[0]), place_of(parts[0]))


def test_parts_of_another_type_are_not_known_to_be_apart():
    memory = torch.zeros(SIZE)
    assert not replays.are_apart(place_of(memory[:4]), place_of(memory.view(torch.uint8)[16:20]))


class Cells(nn.Module):
    """Each step writes in place to the gates, which are parts of one product."""

    def __init__(self, cell):
        super().__init__()
        self.cell = cell

    def forward(self, x):
        state = None
        for _ in range(3):
            state = self.cell(x, state)
        return state[0] if isinstance(state, tuple) else state


@pytest.mark.parametrize("cell", [nn.LSTMCell, nn.GRUCell])
def test_a_gate_is_not_copied_where_another_one_is_written(cell, monkeypatch):
    copied = []
    monkeypatch.setattr(replays, "snapshot", lambda tensor: copied.append(tensor) or tensor.clone())

    def gradients(net, context):
        torch.manual_seed(0)
        found = []
        for _ in range(4):
            x = torch.randn(64, 32, requires_grad=True)
            with context:
                loss = net(x).square().sum()
            found += torch.autograd.grad(loss, [x, *net.parameters()])
        return found

    net, stash = Cells(cell(32, 32)), Stash(min_bytes=0)
    plain = gradients(net, nullcontext())
    with stash.recompute(net):
        assert all(map(torch.equal, gradients(net, stash), plain))
    assert stash.stats().recomputed_bytes and not copied
    stash.close()


class Overwritten(nn.Module):
    """Saves a part of a memory, writes to the other part, and then to it: plain PyTorch raises an error."""

    in_place = False

    def scaled(self, tensor, by):
        return tensor.mul_(by) if self.in_place else tensor * by

    def forward(self, x):
        left, right = (x * 2).unsafe_chunk(2, 1)
        found = left.sin()
        right = self.scaled(right, 3)
        left = self.scaled(left, 5)
        return found + right.cos() + left.tanh()


@pytest.mark.parametrize("verify", ["first", "always"])
def test_what_is_overwritten_is_copied(verify):
    net, stash = Overwritten(), Stash(min_bytes=0, verify=verify)
    with stash.recompute(net):
        for step in range(6):
            x = torch.rand(64, 32, requires_grad=True)
            net.in_place = step > 1  # once a replay is known to be exact
            (found,) = torch.autograd.grad(net(x).sum(), x)
            (true,) = torch.autograd.grad(Overwritten()(x).sum(), x)
            assert torch.equal(found, true)
    stash.close()
