"""``only`` and ``skip``: regions whose saves are left alone."""

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from backstash import Stash
from backstash.errors import InplaceError, UsageError
from backstash.graph import allow_mutation_on_saved_tensors, only, saved, saved_tensors_hooks, skip

current = torch._C._autograd._top_saved_tensors_default_hooks


def same(value: Any) -> Any:
    return value


def test_inside_skip_torch_itself_holds_the_tensors() -> None:
    x = torch.ones(3, requires_grad=True)
    with (
        saved_tensors_hooks(lambda t: t.clone(), same),
        saved_tensors_hooks(lambda t: t.clone(), same),
    ):
        with skip():
            assert current(False) is None
            y = x * 1
            z = y.exp()
            z.detach().zero_()
        assert current(False) is not None
    assert current(False) is None
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.sum().backward()


def test_a_context_inside_skip_works_and_an_error_restores(tmp_path: Any) -> None:
    x = torch.ones(3, requires_grad=True)
    stash = Stash(disk=tmp_path, min_bytes=0)
    with saved_tensors_hooks(lambda t: t.clone(), same):
        before = current(False)
        with pytest.raises(KeyError), skip(), stash:
            y = x.exp()
            raise KeyError
        assert current(False) == before
    assert saved(y.grad_fn)[0].where == "disk"
    stash.close()


def test_skip_is_a_decorator_too() -> None:
    x = torch.ones(3, requires_grad=True)
    with saved_tensors_hooks(lambda t: t.numpy(), torch.from_numpy):
        y = skip()(torch.exp)(x)
    assert saved(y.grad_fn)[0].where == "in place"


def test_a_context_left_active_inside_skip_is_an_error() -> None:
    inner, outer = (saved_tensors_hooks(lambda t: t.clone(), same) for _ in range(2))
    with outer:
        with pytest.raises(UsageError, match="1 context"), skip():
            inner.__enter__()
        inner.__exit__()
        assert current(False) is not None
    assert current(False) is None


def test_only_sends_on_what_the_predicate_chooses() -> None:
    x = torch.ones(4, requires_grad=True)
    packed: list[int] = []
    with saved_tensors_hooks(lambda t: packed.append(t.numel()) or t.numpy(), torch.from_numpy):
        with only(lambda t: t.numel() < 4):
            y = x.exp()[:2].exp()
    y.sum().backward()
    assert packed == [2]
    reference = torch.ones(4, requires_grad=True)
    reference.exp()[:2].exp().sum().backward()
    assert torch.equal(x.grad, reference.grad)


def test_what_only_leaves_in_place_is_checked_and_not_leaked() -> None:
    x = torch.ones(4, requires_grad=True)
    with only(lambda t: True):  # no pair around it: all stay
        y = x.exp()
        z = x.exp()
    z.sum().backward()
    y.detach()[0] = 5
    with pytest.raises(
        InplaceError, match=r"\(4,\) for ExpBackward0 is at version 1; expected version 0"
    ):
        y.sum().backward()


def test_what_only_leaves_in_place_does_not_hold_itself() -> None:
    with only(lambda t: True):
        y = torch.ones(4, requires_grad=True).exp()
    mark = weakref.ref(y)
    del y
    gc.collect()
    assert mark() is None


def test_only_names_what_it_allows() -> None:
    with pytest.raises(UsageError, match="callable"):
        only(3)  # type: ignore[arg-type]


def test_scopes_inside_mutation_stay_exact() -> None:
    def program(x: Tensor, change: bool) -> Tensor:
        with skip():
            y = x * 1
            loss = (y**2).sum()
        with only(lambda t: False):
            loss = loss + (y**3).sum()
        if change:
            y.detach().t()[1:].zero_()
        return loss

    values = torch.rand(3, 2)
    x, reference = values.clone().requires_grad_(), values.clone().requires_grad_()
    with allow_mutation_on_saved_tensors():
        program(x, True).backward()
    program(reference, False).backward()
    assert torch.equal(x.grad, reference.grad)
    assert current(False) is None
