"""Writes whose versions only the operations inside a kernel raise: in a dispatch mode PyTorch raises none."""

import pytest
import torch
from torch import nn

from backstash import Stash
from backstash.errors import InplaceError
from backstash.graph import Binomial, KeepAll, allow_mutation_on_saved_tensors, checkpoint_loop

library = torch.library.Library("backstash_writes_inside", "DEF")
library.define("double_(Tensor(a!) x) -> ()")
library.define("undeclared(Tensor x) -> Tensor")


def _double(x):
    x.mul_(2)


library.impl("double_", _double, "CPU")
library.impl("undeclared", lambda x: x.mul_(2) + 1, "CPU")


@torch.library.custom_op("backstash_writes_inside::triple_", mutates_args=("x",))
def triple_(x: torch.Tensor) -> None:
    x.mul_(3)


@torch.library.custom_op("backstash_writes_inside::more_", mutates_args=("x",))
def more_(x: torch.Tensor, y: torch.Tensor) -> None:
    y.mul_(3)


def double_(x):
    torch.ops.backstash_writes_inside.double_(x)


WRITES = {
    "foreach": lambda a, b: torch._foreach_mul_([a, b], 2),
    "foreach of one": lambda a, b: torch._foreach_add_([a], 1),
    "foreach of views": lambda a, b: torch._foreach_mul_([a[0], b[1:]], 2),
    "several results": lambda a, b: torch.unbind_copy(torch.stack([b, a]), out=[a, b]),
    "an old operator": lambda a, b: double_(a),
    "one that does not say so": lambda a, b: torch.ops.backstash_writes_inside.undeclared(a),
    "a custom operator": lambda a, b: triple_(a),
    "a custom operator that writes more than it says": lambda a, b: more_(torch.ones(2), a),
    "an operation of PyTorch's": lambda a, b: a.mul_(2),
    "one with out=": lambda a, b: torch.ops.aten.avg_pool1d.out(torch.cat((b, b), 1), [2], out=a),
}


class Writes(nn.Module):
    def __init__(self, write, *, saves=True):
        super().__init__()
        self.write, self.saves = write, saves

    def forward(self, x):
        a, b = torch.rand_like(x), torch.rand_like(x)
        y = x * a * b if self.saves else x
        self.write(a, b)
        self.versions = a._version, b._version
        return y if self.saves else y * a * b


@pytest.mark.parametrize("name", WRITES)
def test_a_write_to_what_was_saved_is_an_error(name):
    net = Writes(WRITES[name])
    x = torch.ones(4, 64, requires_grad=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        net(x).sum().backward()
    stash = Stash(min_bytes=0)
    stash.recompute(net)
    for _ in range(5):
        with stash:
            loss = net(x).sum()
        with pytest.raises(InplaceError):
            loss.backward()
        del loss
    stash.close()


@pytest.mark.parametrize("name", WRITES)
def test_a_write_before_the_save_is_none(name):
    net = Writes(WRITES[name], saves=False)
    gradients, versions = [], []
    stash = Stash(min_bytes=0)
    for at in range(6):
        if at == 1:
            stash.recompute(net)
        torch.manual_seed(0)
        x = torch.ones(4, 64, requires_grad=True)
        with stash:
            loss = net(x).sum()
        loss.backward()
        gradients.append(x.grad)
        versions.append([each > 0 for each in net.versions])
    assert all(torch.equal(each, gradients[0]) for each in gradients)
    assert all(each == versions[0] for each in versions) and any(versions[0])
    stash.close()


def test_a_buffer_that_is_written_in_inference_mode_has_the_gradients_of_before():
    class Decays(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("scale", torch.ones(32))

        def forward(self, x):
            y = torch.tanh(x * (self.scale * 2))
            with torch.inference_mode():
                self.scale.mul_(0.9)
            return torch.tanh(y)

    plain, net = Decays(), Decays()
    stash = Stash(min_bytes=0)
    stash.recompute(net)
    for _ in range(5):
        x, y = (torch.linspace(0, 1, 32, requires_grad=True) for _ in range(2))
        plain(x).sum().backward()
        with stash:
            loss = net(y).sum()
        loss.backward()
        assert torch.equal(x.grad, y.grad) and torch.equal(plain.scale, net.scale)
    stash.close()


@pytest.mark.parametrize("name", WRITES)
def test_a_mode_s_other_users_see_the_write(name):
    write = WRITES[name]

    def step(state, at):
        a, b = torch.rand_like(state), torch.rand_like(state)
        made = state * a * b
        if at == 1:
            write(a, b)
        return made

    x = torch.ones(4, 64, requires_grad=True)
    for schedule in (Binomial(2), KeepAll()):
        with pytest.raises(InplaceError, match="modified by an inplace operation"):
            checkpoint_loop(step, x, 4, index=True, schedule=schedule).sum().backward()

    a, b = torch.rand(4, 64), torch.rand(4, 64)
    loss = (x * a * b).sum()  # outside of the context
    with allow_mutation_on_saved_tensors():
        write(a, b)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
