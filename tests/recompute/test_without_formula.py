"""Operators without a formula for backward: plain PyTorch differentiates through their kernels."""

import warnings

import pytest
import torch
from torch import nn

from backstash import Action, Stash
from backstash.errors import UsageError
from backstash.graph import Binomial, checkpoint_loop

library = torch.library.Library("backstash_without_formula", "DEF")
library.define("cubed(Tensor x) -> Tensor")
library.define("places(Tensor x) -> Tensor")
library.define("halve_(Tensor(a!) x) -> ()")


def _halve(x):
    x.mul_(0.5)


library.impl("cubed", lambda x: x * x * x, "CPU")
library.impl("places", lambda x: x.argsort(), "CPU")
library.impl("halve_", _halve, "CPU")
OPS = torch.ops.backstash_without_formula


class Calls(nn.Module):
    def __init__(self, call):
        super().__init__()
        self.call = call

    def forward(self, x):
        return torch.sin(self.call(torch.cos(x)))


def halved(x):
    y = x * 1
    OPS.halve_(y)
    return y


def gradient(net, stash):
    x = torch.linspace(0, 1, 64, requires_grad=True)
    with stash:
        loss = net(x).sum()
    loss.backward()
    return x.grad


@pytest.mark.parametrize("call", [OPS.cubed, halved])
def test_it_is_an_error_in_a_recorded_forward(call):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        true = gradient(Calls(call), Stash())
        assert true.count_nonzero() > 60
        net, stash = Calls(call), Stash(min_bytes=0)
        stash.recompute(net)
        for _ in range(3):
            with pytest.raises(UsageError, match="no formula for backward"):
                gradient(net, stash)
        stash.close()
        stash = Stash(min_bytes=0, policy=lambda saved: Action("recompute"))
        with pytest.raises(UsageError, match="no formula for backward"):
            gradient(Calls(call), stash)
        stash.close()
        stash = Stash(min_bytes=0, recompute=False)
        assert torch.equal(gradient(Calls(call), stash), true)
        stash.close()


@pytest.mark.parametrize(
    "call", [lambda x: x[OPS.places(x)], lambda x: x * OPS.cubed(x.detach())], ids=["ints", "none"]
)
def test_where_no_gradient_flows_it_is_none(call):
    true = gradient(Calls(call), Stash())
    net, stash = Calls(call), Stash(min_bytes=0)
    stash.recompute(net)
    assert all(torch.equal(gradient(net, stash), true) for _ in range(5))
    stash.close()


def test_it_is_an_error_in_a_step_that_runs_again():
    x = torch.linspace(0, 1, 64, requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(UsageError, match="no formula for backward"):
            checkpoint_loop(Calls(OPS.cubed), x, 4, schedule=Binomial(2)).sum().backward()
