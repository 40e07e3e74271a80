"""Modules that may run again as a whole, under a plan that decides how many of them do."""

import json
import random
import weakref
from dataclasses import replace

import pytest
import torch
from torch import nn

import backstash._planner
from backstash import Stash
from backstash._plan.meter import ProcessMeter
from backstash._plan.regions import AGAIN, ONCE, Regions
from backstash._plan.trace import Links
from backstash.plan import Plan

MIB = 1 << 20
OTHER = 100 * MIB
LAYERS = 8
SAVED = LAYERS * 4 * MIB  # of each layer: its input, and three blocks that only it saves


class Layer(nn.Module):
    """Cannot be computed again operation by operation, nor packed; what it is given is saved, too."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(512))

    def forward(self, x):
        return torch.erf(torch.erf(torch.erf(x * self.scale) * 1.5) * 1.5) + x


@pytest.fixture
def memory(monkeypatch):
    """The process's memory as far as a stash has a part in it, over a fixed sum; and a slow disk."""
    peaks, stashes = [0], []

    def now(meter):
        held = made.other()
        for stash in stashes:
            stats = backstash.stash._levels_of(stash)
            held += stats[0] + stats[1] + stats[4]
        peaks[0] = max(peaks[0], held)
        return held

    monkeypatch.setattr(ProcessMeter, "now", now)
    monkeypatch.setattr(backstash._planner, "links_of", lambda records: Links(2e6, 2e6))

    def made(**arguments):
        stash = Stash(min_bytes=0, inflight="2MiB", prefetch="2MiB", **arguments)
        stashes.append(weakref.ref(stash))
        return stash

    made.peaks, made.other = peaks, lambda: OTHER
    return made


def model(layer=Layer, layers=LAYERS):
    return nn.Sequential(*(layer() for _ in range(layers)))


def step(net, stash, seed=0, rows=512):
    x = torch.randn(rows, 512, generator=torch.Generator().manual_seed(seed))
    with stash:
        loss = net(x * 2).sum()
    return [loss.detach(), *torch.autograd.grad(loss, list(net.parameters()))]


def same(left, right):
    return all(map(torch.equal, left, right))


def settle(net, stash, steps=10):
    true = step(net, Stash())
    for _ in range(steps):
        assert same(step(net, stash), true)
        _ = stash.plan
    return stash.plan


def count(plan, name):
    return sum(n for each in plan.regions for choice, n in each.choices if choice == name)


def test_a_plan_decides_how_many_run_again(memory, tmp_path):
    net, budget = model(), OTHER + SAVED // 2 + 8 * MIB
    stash = memory(budget=budget, disk=tmp_path)
    true = step(net, Stash())
    with stash.recompute(*net):
        again = []
        for number in range(10):
            before, memory.peaks[0] = stash.stats().recomputed_bytes, 0
            assert same(step(net, stash), true)
            assert memory.peaks[0] <= budget, number
            again.append(stash.stats().recomputed_bytes - before)
            plan = stash.plan
    print(plan, again)
    assert again[:3] == [0, 0, 0], "while steps are measured, what they save is held"
    assert plan.state == "planned"
    assert 1 <= count(plan, "region") < LAYERS
    assert again[-1] == sum(each.nbytes for each in plan.regions) > 0
    stash.close()
