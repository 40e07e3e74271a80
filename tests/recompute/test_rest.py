"""Modules that save only small tensors, of which a few forwards are recorded and the others left alone."""

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import nn

import backstash._recompute.region as region
from backstash import Stash
from backstash._recompute.region import Region
from backstash._torch.dispatch import innermost_mode

RECORDED_FIRST, RECORDED_EVERY = 3, 32


class Watched(nn.Module):
    """Notes for each forward whether its operations are recorded."""

    def __init__(self, width=8, saved=4):
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.saved = saved
        self.seen = []

    def forward(self, x, rows=4):
        self.seen.append(innermost_mode() is not None)
        return torch.tanh(self.linear(x))[:rows].sin().cos()


class Large(Watched):
    """Computes and saves a large tensor from a small input."""

    def forward(self, x):
        return torch.sin(super().forward(x).sum() + torch.zeros(self.saved)).cos()


def step(module, *given, context=None):
    with nullcontext() if context is None else context:
        loss = module(*given).sum()
    loss.backward()


def train(module, x, *, context=None, steps):
    for _ in range(steps):
        step(module, x, context=context)


@pytest.mark.parametrize("is_in_context", [False, True])
def test_forwards_after_the_first_are_recorded_rarely(is_in_context):
    module, x = Watched(), torch.ones(4, 8)
    plain = copy.deepcopy(module)
    stash = Stash()
    with stash.recompute(module):
        train(module, x, steps=80, context=stash if is_in_context else None)
    train(plain, x, steps=80)
    assert all(module.seen[:RECORDED_FIRST])
    recorded = [at for at, each in enumerate(module.seen[RECORDED_FIRST:], 1) if each]
    assert recorded == [RECORDED_EVERY, 2 * RECORDED_EVERY]
    assert torch.equal(module.linear.weight.grad, plain.linear.weight.grad)


CHANGES = {
    "more rows": lambda module, x: (torch.ones(4096, 8),),
    "an input that requires a gradient": lambda module, x: (x.clone().requires_grad_(),),
    "another dtype": lambda module, x: (module.double() and x.double(),),
    "a number": lambda module, x: (x, 2),
    "frozen": lambda module, x: (module.linear.bias.requires_grad_(False) is not None and x,),
    "no training": lambda module, x: (module.eval() and x,),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_forward_of_another_kind_is_recorded(change):
    module, x = Watched(), torch.ones(4, 8)
    with Stash() as stash, stash.recompute(module):
        train(module, x, steps=8)
        assert not module.seen[-1]
        step(module, *change(module, x))
        assert module.seen[-1]


def test_kinds_are_forgotten_once_there_are_many():
    module = Watched()
    with Stash() as stash, stash.recompute(module):
        for rows in range(1, 66):
            train(module, torch.ones(rows, 8), steps=4)
            assert not module.seen[-1]
        step(module, torch.ones(1, 8))
        assert module.seen[-1]


def test_a_plan_decides_for_itself(monkeypatch):
    asked = []
    planned = Region._planned
    monkeypatch.setattr(Region, "_planned", lambda *given: asked.append(1) or planned(*given))
    module = Watched()
    with Stash(budget="1 GiB") as stash, stash.recompute(module):
        train(module, torch.ones(4, 8), steps=12)
    assert len(asked) == 12


def test_nested_inputs_are_of_the_kind_too():
    class Nested(Watched):
        def forward(self, x, pair=None):
            return super().forward(x + pair["one"][0])

    module, x = Nested(), torch.ones(4, 8)
    with Stash() as stash, stash.recompute(module):
        for _ in range(8):
            module(x, pair={"one": [x]})
        assert not module.seen[-1]
        module(x, pair={"one": [torch.ones(4096, 4, 8)]})
        assert module.seen[-1]


def test_a_module_that_discards_is_always_recorded():
    module = Large(saved=1 << 16)
    with Stash() as stash, stash.recompute(module):
        train(module, torch.ones(4, 8), steps=8)
        assert stash.stats().recomputed_bytes
    assert all(module.seen)


def test_a_module_that_saves_more_than_before_is_recorded_from_the_next_look_on():
    module = Large(saved=4)
    with Stash() as stash, stash.recompute(module):
        train(module, torch.ones(4, 8), steps=8)
        assert not module.seen[-1]
        module.saved = 1 << 16
        train(module, torch.ones(4, 8), steps=RECORDED_EVERY)
        discarded = stash.stats().recomputed_bytes
        assert discarded
        module.seen.clear()
        train(module, torch.ones(4, 8), steps=8)
        assert all(module.seen)


@pytest.mark.parametrize(("is_in_context", "rests"), [(True, True), (False, False)])
def test_parts_of_large_storages_reach_the_stash_outside_of_every_context(is_in_context, rests):
    module, x = Watched(), torch.ones(4096, 4, 8)
    stash = Stash()
    with stash.recompute(module):
        for part in x[:8]:
            step(module, part, context=stash if is_in_context else None)
    assert module.seen[-1] is not rests


def test_a_forward_that_fails_does_not_count():
    module, x = Watched(), torch.ones(4, 8)
    with Stash() as stash, stash.recompute(module):
        for _ in range(8):
            with pytest.raises(TypeError):
                module(x, "rows")
        step(module, x)
        assert all(module.seen)


def test_what_nothing_is_known_of_is_always_recorded():
    class Sparse(Watched):
        def forward(self, x):
            self.seen.append(innermost_mode() is not None)
            return torch.sparse.mm((x.detach()[:, :4] * 2).to_sparse(), self.linear(x))

    module = Sparse()
    with Stash() as stash, stash.recompute(module):
        train(module, torch.ones(4, 8), steps=8)
    assert all(module.seen)


class Unhashable(str):
    __hash__ = None


class OnlyOnce(list):
    """Cannot be iterated over."""

    def __iter__(self):
        raise AssertionError


@pytest.mark.parametrize("rows", [1, 4096])
def test_kinds_are_looked_at_only_where_saves_were_small(monkeypatch, rows):
    looked = []
    kind_of = region._kind_of
    monkeypatch.setattr(region, "_kind_of", lambda *given: looked.append(1) or kind_of(*given))
    module = Watched()
    with Stash() as stash, stash.recompute(module):
        train(module, torch.ones(rows, 8), steps=4)
        assert len(looked) == (4 if rows == 1 else 1)
        train(module, torch.ones(1, 8), steps=5)
        assert not module.seen[-1]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_inputs_of_any_form_are_looked_at():
    """Nested tensors have no sizes, and a list may contain itself or be long."""

    class Taking(Watched):
        def forward(self, x, some=None):
            while not torch.is_tensor(x):
                x = x[0]
            return super().forward(x.unbind()[0] if x.is_nested else x)

    looped = [torch.ones(4, 8)]
    looped.append(looped)
    with Stash() as stash, stash.recompute(module := Taking()):
        train(
            module, torch.nested.as_nested_tensor([torch.ones(4, 8)], layout=torch.strided), steps=4
        )
        train(module, looped, steps=4)
        assert not module.seen[-1]
        train(module, [OnlyOnce([torch.ones(4, 8)])], steps=4)
        assert not module.seen[-1]
        step(module, torch.ones(4, 8), Unhashable("a"))
        for number in range(4):
            step(module, torch.ones(4, 8), [0] * 100 + [number])
        assert not module.seen[-1], "the last number of many is not looked at"
