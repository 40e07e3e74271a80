"""Random numbers that autograd does not save: to hold them for a replay would take more than it frees."""

import weakref
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from backstash import Stash

ROWS, WIDTH = 512, 128


class Noisy(nn.Module):
    """Adds noise many times, and records how much of it is alive at once."""

    def __init__(self, times=12):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.times, self.storages, self.most = times, [], 0

    def alive(self):
        return sum(each() is not None for each in self.storages)

    def forward(self, x):
        self.storages, self.most = [], 0
        for _ in range(self.times):
            noise = torch.rand_like(x)
            self.storages.append(weakref.ref(noise.untyped_storage()))
            x = x + 0.1 * noise
            del noise
            self.most = max(self.most, self.alive())
        return torch.sin(self.second(torch.tanh(self.first(x)))) * torch.cos(x)


class Mixed(nn.Module):
    """Multiplies by random numbers, which autograd saves."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        noise = torch.rand_like(x)
        return torch.sin(torch.exp(x * self.scale * noise))


def steps(net, context, times=4):
    torch.manual_seed(1)
    found = []
    for _ in range(times):
        x = torch.randn(ROWS, WIDTH, requires_grad=True)
        net.zero_grad()
        with context:
            loss = net(x).sum()
        alive = net.alive() if isinstance(net, Noisy) else 0
        loss.backward()
        found.append((loss.detach(), x.grad, *(each.grad.clone() for each in net.parameters())))
        yield found[-1], alive


def both(make, stash):
    torch.manual_seed(0)
    plain = [found for found, _ in steps(make(), nullcontext())]
    torch.manual_seed(0)
    net = make()
    with stash.recompute(net):
        for at, (found, alive) in enumerate(steps(net, stash)):
            assert all(map(torch.equal, found, plain[at])), at
            yield net, alive


@pytest.mark.parametrize("verify", ["auto", "always"])
def test_noise_that_nothing_saves_is_not_held(verify):
    stash = Stash(min_bytes=0, verify=verify)
    nbytes = ROWS * WIDTH * 4
    for net, alive in both(Noisy, stash):
        assert alive == 0
        assert net.most <= 2
    stats = stash.stats()
    assert stats.recomputed_bytes >= 4 * nbytes  # what was computed from the last sum is discarded
    assert any("random numbers that PyTorch does not save" in reason for reason in stats.left)
    stash.close()


def test_noise_that_autograd_saves_is_held_once():
    stash = Stash(min_bytes=0)
    for _ in both(Mixed, stash):
        pass
    assert not any("does not save" in reason for reason in stash.stats().left)
    assert stash.stats().recomputed_bytes == 4 * ROWS * WIDTH * 4
    stash.close()


class Small(nn.Module):
    """Fills a small buffer with noise at each call."""

    def __init__(self):
        super().__init__()
        self.register_buffer("noise", torch.zeros(1, WIDTH))

    def forward(self, x):
        self.noise.normal_()
        return torch.sin(torch.exp(x * 0.1) + self.noise)


class Repeated(nn.Module):
    """Fills a buffer that is too large to be copied, but small compared with what is computed from it."""

    def __init__(self):
        super().__init__()
        self.register_buffer("noise", torch.zeros(ROWS, WIDTH))

    def forward(self, x):
        self.noise.normal_()
        return torch.sin(torch.exp(x * 0.1 * torch.ones(8, 1, 1)) + self.noise)


@pytest.mark.parametrize("make", [Small, Repeated])
@pytest.mark.parametrize("write", ["zero_", "normal_", "data", "another call"])
def test_the_program_may_write_to_noise_that_nothing_saves(write, make):
    """As in plain PyTorch: what is small is copied, and nothing else is held for a replay."""

    def gradients(net, context):
        torch.manual_seed(0)
        found = []
        for _ in range(4):
            x = torch.randn(ROWS, WIDTH, requires_grad=True)
            with context:
                loss = net(x).sum()
            if write == "another call":
                net(x)
            elif write == "data":
                net.noise.data.zero_()
            else:
                getattr(net.noise, write)()
            found += torch.autograd.grad(loss, x)
        return found

    plain = gradients(make(), nullcontext())
    net, stash = make(), Stash(min_bytes=0, verify="first")
    with stash.recompute(net):
        assert all(map(torch.equal, gradients(net, stash), plain))
    assert stash.stats().recomputed_bytes
    stash.close()


def test_noise_at_the_identity_of_what_was_saved_is_not_held():
    """What was discarded is freed, and the next storage may get its identity."""
    alive = []

    class Freed(nn.Module):
        def forward(self, x):
            storages = []
            for _ in range(10):
                x = torch.sin(torch.exp(-torch.tanh(x)))
                noise = torch.randn(20, ROWS, WIDTH)
                storages.append(weakref.ref(noise.untyped_storage()))
                x = x + noise.sum(0)
                del noise
            alive.append(sum(each() is not None for each in storages))
            return x

    net, stash = Freed(), Stash(min_bytes=0)
    with stash.recompute(net):
        for _ in range(5):
            loss = net(torch.randn(ROWS, WIDTH, requires_grad=True)).sum()
            loss.backward()
    stash.close()
    assert max(alive) <= 1 and not any(alive[2:])


class Widened(torch.autograd.Function):
    """Makes twenty times as much, which nothing saves."""

    @staticmethod
    def forward(ctx, x):
        return x * torch.ones(20, 1, 1)

    @staticmethod
    def backward(ctx, grad):
        return grad.sum(0)


class Wide(nn.Module):
    """Uses a sum of what no replay computes, and records how much of that is alive as the forward ends."""

    def forward(self, x):
        storages = []
        for _ in range(6):
            wide = Widened.apply(x)
            storages.append(weakref.ref(wide.untyped_storage()))
            x = torch.sin(x + wide.sum(0))
            del wide
        self.alive = sum(each() is not None for each in storages)
        return x


def test_what_takes_more_than_it_frees_is_not_held():
    net, stash = Wide(), Stash(min_bytes=0)
    with stash.recompute(net):
        for _ in range(4):
            x = torch.randn(ROWS, WIDTH, requires_grad=True)
            (found,) = torch.autograd.grad(net(x).sum(), x)
            assert not net.alive
            (plain,) = torch.autograd.grad(Wide()(x).sum(), x)
            assert torch.equal(found, plain)
    assert any("takes more than half" in reason for reason in stash.stats().left)
    stash.close()


class Expanded(nn.Module):
    """Saves sums with few elements in memory, which look as large as what they are sums of."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(60, ROWS, 1))

    def forward(self, x):
        wide = Widened.apply(x)
        self.made = weakref.ref(wide.untyped_storage())
        total = wide.sum(0)
        del wide
        return self.scale * total.expand(60, ROWS, WIDTH)


def test_an_expanded_tensor_frees_what_it_takes():
    net, stash = Expanded(), Stash(min_bytes=0)
    with stash.recompute(net):
        for _ in range(4):
            loss = net(torch.randn(ROWS, WIDTH, requires_grad=True)).sum()
            assert net.made() is None
            loss.backward()
    stash.close()


class Narrow(nn.Module):
    """Uses a small part of what no replay computes many times."""

    def forward(self, x):
        part = Widened.apply(x[: ROWS // 2, : WIDTH // 40])[0].sum(1)
        part = Identity.apply(part[:, None] * torch.ones(WIDTH))
        return torch.sin(torch.cat([x, x]) + torch.cat([part] * 4)).cos()


class Identity(torch.autograd.Function):
    """Computes what no replay does."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad


def test_what_takes_less_than_it_frees_is_held():
    net, stash = Narrow(), Stash(min_bytes=0)
    with stash.recompute(net):
        for _ in range(4):
            before = stash.stats().recomputed_bytes
            x = torch.randn(ROWS, WIDTH, requires_grad=True)
            (found,) = torch.autograd.grad(net(x).sum(), x)
            (plain,) = torch.autograd.grad(Narrow()(x).sum(), x)
            assert torch.equal(found, plain)
            assert stash.stats().recomputed_bytes - before >= 2 * 2 * x.nbytes
    stash.close()
