"""Kernels that call what autocast handles: inside of a dispatch mode PyTorch does not."""

import contextlib

import pytest
import torch
from torch import nn

from backstash import Action, Stash, recomputable
from backstash.errors import UsageError
from backstash.graph import Binomial, checkpoint_loop

library = torch.library.Library("backstash_autocast_inside", "DEF")
library.define("product(Tensor a, Tensor b) -> Tensor")
library.define("doubled(Tensor a) -> Tensor")
library.impl("product", lambda a, b: (a @ b).float(), "CPU")
library.impl("doubled", lambda a: a + a, "CPU")
OPS = torch.ops.backstash_autocast_inside


class Product(nn.Module):
    """Calls the operator in a context of its own, or in none."""

    def __init__(self, inside=None, call=OPS.product):
        super().__init__()
        self.inside, self.call = inside or contextlib.nullcontext(), call

    def forward(self, x):
        y = torch.sin(x)
        with self.inside, torch.no_grad():
            z = self.call(y, y)
        return torch.cos(y * z)


def autocast(enabled=True):
    return torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled)


def gradients(net, stash, outside, steps=1):
    found = []
    for _ in range(steps):
        torch.manual_seed(0)
        x = torch.randn(16, 16, requires_grad=True)
        with outside(), stash or contextlib.nullcontext():
            loss = net(x).float().sum()
        loss.backward()
        found.append(x.grad)
    return found


@pytest.mark.parametrize("enabled", [True, False, None])
def test_a_custom_operator_computes_as_under_no_mode(enabled):
    outside = contextlib.nullcontext if enabled is None else lambda: autocast(enabled)
    (true,) = gradients(Product(), None, outside)
    net, stash = Product(), Stash(min_bytes=0)
    stash.recompute(net)
    assert all(torch.equal(each, true) for each in gradients(net, stash, outside, 5))
    stash.close()
    stash = Stash(min_bytes=0, policy=lambda saved: Action("recompute"))
    assert all(torch.equal(each, true) for each in gradients(Product(), stash, outside, 5))
    stash.close()


def test_a_tape_that_begins_amid_an_operation_takes_autocast_for_unknown():
    """In a step that begins inside of a context, with a product: its kernel runs without autocast."""
    weight = torch.randn(16, 16, requires_grad=True)
    stash = Stash(min_bytes=0, policy=lambda saved: Action("recompute"))

    def step():
        torch.manual_seed(0)
        x = torch.randn(16, 16, requires_grad=True)
        y = nn.functional.linear(x, weight).float()
        with torch.no_grad():
            z = OPS.product(y, y)
        (y.sin() * z).cos().sum().backward()
        return x.grad

    with autocast():
        true = step()
        with stash:
            for _ in range(4):
                with contextlib.suppress(UsageError):
                    assert torch.equal(step(), true)
    stash.close()


def test_what_a_declared_operator_computes_under_autocast_is_held():
    """A replay has no autocast. Without it, the same module's operator is replayed."""
    recomputable(OPS.product)
    net, stash = Product(call=OPS.product), Stash(min_bytes=0)
    stash.recompute(net)
    for outside in (contextlib.nullcontext, autocast) * 2:
        (true,) = gradients(Product(), None, outside)
        assert all(torch.equal(each, true) for each in gradients(net, stash, outside, 4))
    stash.close()


@pytest.mark.parametrize("enabled", [True, False])
def test_where_the_state_is_not_known_it_is_an_error_or_makes_no_difference(enabled):
    net, stash = Product(autocast(enabled)), Stash(min_bytes=0)
    stash.recompute(net)
    with pytest.raises(UsageError, match=r"product.* calls aten\.matmul.*whether autocast is on"):
        gradients(net, stash, autocast)
    net.call = lambda a, _: OPS.doubled(a)
    (true,) = gradients(net, None, autocast)
    assert all(torch.equal(each, true) for each in gradients(net, stash, autocast, 5))
    stash.close()


def test_operators_of_pytorch_s_that_call_products_are_an_error():
    net, stash = nn.Bilinear(8, 8, 4), Stash(min_bytes=0)
    stash.recompute(net)
    x = torch.randn(4, 8, requires_grad=True)
    with stash:
        net(x, x)
    with autocast(False), stash:
        net(x, x)
    with autocast(), stash, pytest.raises(UsageError, match=r"_trilinear.*autocast"):
        net(x, x)
    stash.close()


def test_the_steps_of_a_loop():
    """A step runs again in backward, in a mode that records what it writes."""
    net = Product()
    torch.manual_seed(0)
    x = torch.randn(16, 16, requires_grad=True)
    with autocast():
        true = net(net(net(net(x)))).sum()
        found = checkpoint_loop(net, x, 4, schedule=Binomial(2)).sum()
    (expected,) = torch.autograd.grad(true, x)
    assert torch.equal(torch.autograd.grad(found, x)[0], expected)
