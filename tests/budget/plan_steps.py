"""A chain of modules whose blocks can neither be recomputed nor packed, and steps of it."""

import torch
from torch import nn

from backstash import Stash
from counted_memory import MIB, Saves

SAVED = 16 * MIB  # sixteen blocks of 1 MiB


class Sine(nn.Module):
    """Its blocks can be recomputed."""

    def forward(self, x):
        return x.sin()


def model(layer=Saves, layers=16):
    return nn.Sequential(*(layer() for _ in range(layers)))


def step(net, stash, seed=0, rows=512):
    x = torch.randn(rows, 512, generator=torch.Generator().manual_seed(seed), requires_grad=True)
    y = x * 2
    with stash:
        loss = net(y).sum()
    loss.backward()
    return x.grad


def are_same(left, right):
    return all(map(torch.equal, left, right))


def settle(net, stash, steps=None):
    """Run ``steps``, or until the plan's steps were measured and another one left it as it was."""
    true, before = step(net, Stash()), None
    for _ in range(steps or 12):
        assert torch.equal(step(net, stash), true)
        plan = stash.plan  # waits for a plan that is being made
        if steps is None and plan.measured is not None:
            if before is not None and before.predicted == plan.predicted:
                break
            before = plan
    return stash.plan


def moved(plan):
    """How many blocks a step under the plan moves."""
    return sum(n for each in plan.classes for name, n in each.choices if name == "disk")
