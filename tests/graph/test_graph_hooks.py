"""``saved_tensors_hooks``: what torch's does, the checks that it lacks, and composition."""

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import graph as stock
from torch.utils._pytree import tree_map_only

from backstash import Stash
from backstash.errors import InplaceError, UsageError
from backstash.graph import disable_saved_tensors_hooks, saved, saved_tensors_hooks

current = torch._C._autograd._top_saved_tensors_default_hooks


def leaf(*values: float) -> Tensor:
    return torch.tensor(values or (1.0, 2.0, 3.0), requires_grad=True)


def same(value: Any) -> Any:
    return value


def test_pack_and_unpack_see_what_is_saved() -> None:
    seen: list[str] = []
    x = leaf()
    with saved_tensors_hooks(
        lambda t: seen.append("pack") or t.clone(), lambda t: seen.append("unpack") or t
    ):
        y = x.exp() * 2
    y.sum().backward()
    assert seen == ["pack", "unpack"]
    assert torch.equal(x.grad, 2 * x.detach().exp())


@pytest.mark.parametrize(
    "pack, unpack",
    [(lambda t: 3, lambda v: torch.full((3,), float(v))), (repr, lambda v: leaf().detach())],
)
def test_any_object_may_be_packed(
    pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]
) -> None:
    x = leaf()
    with saved_tensors_hooks(pack, unpack):
        y = x.sin()
    y.sum().backward()
    assert x.grad is not None


def test_the_inner_pair_wins() -> None:
    x = leaf()
    with saved_tensors_hooks(lambda t: t * 100, same), saved_tensors_hooks(lambda t: t * 10, same):
        y = x * x
    y.sum().backward()
    assert torch.equal(x.grad, 20 * x.detach())


def test_a_context_may_be_entered_again_and_inside_itself() -> None:
    x = leaf()
    count = []
    hooks = saved_tensors_hooks(lambda t: count.append(1) or t.clone(), same)
    for _ in range(2):
        with hooks, hooks:
            x.exp()
        x.exp()
    assert len(count) == 2
    assert current(False) is None


def test_exit_needs_no_arguments_and_attributes_are_read_at_entry() -> None:
    hooks = saved_tensors_hooks(same, same)
    hooks.pack_hook = lambda t: t * 10
    hooks.__enter__()
    x = leaf()
    y = x * x
    hooks.__exit__()
    y.sum().backward()
    assert torch.equal(x.grad, 20 * x.detach())


def test_each_thread_has_its_own_pairs() -> None:
    seen: list[object] = []
    with saved_tensors_hooks(same, same):
        thread = threading.Thread(target=lambda: seen.append(current(False)))
        thread.start()
        thread.join()
    assert seen == [None]


def test_an_identity_pack_hook_does_not_leak() -> None:
    class Mark:
        pass

    def run() -> "weakref.ref[Mark]":
        mark = Mark()
        with saved_tensors_hooks(same, same):
            y = leaf().exp()
        y.grad_fn.metadata["mark"] = mark
        return weakref.ref(mark)

    marks = [run() for _ in range(5)]
    gc.collect()
    assert not any(mark() for mark in marks)


@pytest.mark.parametrize(
    "unpack, message",
    [
        (lambda t: t.view(1, 3), r"shape \(1, 3\).*MulBackward0.*has shape \(3,\)"),
        (lambda t: t.double(), r"dtype torch.float64.*has dtype torch.float32"),
        (lambda t: t.to("meta"), r"device meta.*has device cpu"),
        (lambda t: t.mul_(2), r"changed its argument in place"),
    ],
)
def test_a_wrong_unpack_hook_is_an_error_that_names_it(
    unpack: Callable[[Tensor], Tensor], message: str
) -> None:
    x = leaf()
    with saved_tensors_hooks(lambda t: t.clone(), unpack):
        y = (x * x).sum()
    with pytest.raises(UsageError, match=message) as error:
        y.backward(retain_graph=True)
    assert "test_graph_hooks.py" in str(error.value)
    assert x.grad is None and current(False) is None
    assert torch.equal(torch.autograd.grad((x * 3).sum(), x)[0], torch.full((3,), 3.0))


def test_an_unpack_hook_that_changes_a_tensor_in_a_tuple_is_caught() -> None:
    x = leaf()
    with saved_tensors_hooks(lambda t: (1, t.clone()), lambda p: p[1].mul_(2)):
        y = (x * x).sum()
    with pytest.raises(UsageError, match="in place"):
        y.backward()


def test_a_pack_hook_that_changes_its_argument_is_an_error() -> None:
    x = leaf().exp()
    with (
        saved_tensors_hooks(lambda t: t.mul_(2), same),
        pytest.raises(RuntimeError, match=r"in-place operations"),
    ):
        x * x
    assert current(False) is None


def test_hook_errors_keep_their_type_and_state_is_intact() -> None:
    def fail(_: Any) -> Any:
        raise KeyError("mine")

    x = leaf()
    with saved_tensors_hooks(same, same):
        with saved_tensors_hooks(fail, same), pytest.raises(KeyError, match="mine"):
            x.exp()
        with saved_tensors_hooks(same, fail):
            y = x.exp().sum()
        before = current(False)
        with pytest.raises(KeyError, match="mine"):
            y.backward()
        assert current(False) == before
    assert current(False) is None


@pytest.mark.parametrize("alias", [same, Tensor.detach, lambda t: t.view(3)])
def test_a_change_in_place_of_what_was_packed_in_place_is_an_error(
    alias: Callable[[Tensor], Tensor],
) -> None:
    b = leaf() * 1
    with saved_tensors_hooks(alias, same):
        y = (b * b).sum()
    b.detach()[1:].zero_()
    with pytest.raises(
        InplaceError, match=r"modified by an inplace operation.*\(3,\) for MulBackward0"
    ):
        y.backward()


def test_contexts_left_in_the_wrong_order_are_an_error_and_are_put_right() -> None:
    one, two = (
        saved_tensors_hooks(lambda t: t * 10, same),
        saved_tensors_hooks(lambda t: t * 100, same),
    )
    one.__enter__()
    two.__enter__()
    with pytest.raises(UsageError, match=r"exited before 1 context"):
        one.__exit__(None, None, None)
    x = leaf()
    y = x * x
    y.sum().backward()
    assert torch.equal(x.grad, 200 * x.detach())  # two is active still
    two.__exit__(None, None, None)
    assert current(False) is None


def test_torchs_own_pair_above_is_kept_too() -> None:
    one, two = saved_tensors_hooks(same, same), stock.saved_tensors_hooks(same, same)
    one.__enter__()
    two.__enter__()
    with pytest.raises(UsageError, match="exited before 1 context"):
        one.__exit__()
    assert current(False)[0] is same
    two.__exit__()


def test_an_exit_too_many_is_an_error_and_changes_nothing() -> None:
    one, two = saved_tensors_hooks(same, same), saved_tensors_hooks(same, same)
    with two:
        before = current(False)
        with pytest.raises(UsageError, match="exited where it is not active"):
            one.__exit__()
        assert current(False) == before


def test_an_exit_on_another_thread_is_an_error_there() -> None:
    errors: list[BaseException] = []

    def leave() -> None:
        try:
            hooks.__exit__()
        except UsageError as error:
            errors.append(error)

    hooks = saved_tensors_hooks(same, same)
    with hooks:
        thread = threading.Thread(target=leave)
        thread.start()
        thread.join()
    assert len(errors) == 1


def test_where_hooks_are_disabled_entering_says_so() -> None:
    with disable_saved_tensors_hooks("not here, please"):
        for compose in (False, True):
            with pytest.raises(RuntimeError, match="not here, please"):
                saved_tensors_hooks(same, same, compose=compose).__enter__()
    assert current(False) is None


# Composition.


def to_half(tensor: Tensor) -> tuple[Tensor, torch.dtype]:
    return tensor.half(), tensor.dtype


def from_half(packed: tuple[Tensor, torch.dtype]) -> Tensor:
    return packed[0].to(packed[1])


def program(x: Tensor) -> Tensor:
    return ((x * 2).exp() * x).sin().sum()


def test_quantize_then_to_disk_is_two_contexts(tmp_path: Any) -> None:
    values = torch.rand(64, 32)
    x = values.clone().requires_grad_()
    with (
        Stash(disk=tmp_path, min_bytes=0) as stash,
        saved_tensors_hooks(to_half, from_half, compose=True),
    ):
        loss = program(x)
    (on_disk,) = saved(loss.grad_fn.next_functions[0][0])
    assert (on_disk.where, on_disk.dtype) == ("disk", torch.float32)
    assert stash.stats().written_bytes == 4 * values.nbytes // 2  # four saves, at half their size
    loss.backward()
    y = values.clone().requires_grad_()
    with saved_tensors_hooks(to_half, from_half):
        program(y).backward()
    assert torch.equal(x.grad, y.grad)
    stash.close()


def test_a_stash_inside_wins(tmp_path: Any) -> None:
    x, y = (torch.arange(1.0, 9.0).requires_grad_() for _ in range(2))
    packed: list[int] = []
    with saved_tensors_hooks(lambda t: packed.append(1) or t.clone(), same, compose=True):
        with Stash(disk=tmp_path, min_bytes=0) as stash:
            loss = program(x)
    loss.backward()
    program(y).backward()
    assert packed == [] and torch.equal(x.grad, y.grad)
    stash.close()


@pytest.mark.parametrize("around", [saved_tensors_hooks, stock.saved_tensors_hooks])
def test_any_pytree_composes(around: Any) -> None:
    outer: list[torch.Size] = []
    x = leaf()

    def pack(tensor: Tensor) -> Any:
        return {"scale": 3, "parts": [tensor[:1].clone(), (tensor[1:].clone(),)]}

    def unpack(packed: Any) -> Tensor:
        assert packed["scale"] == 3
        return torch.cat([packed["parts"][0], packed["parts"][1][0]])

    with around(lambda t: outer.append(t.shape) or t.numpy(), torch.from_numpy):
        with saved_tensors_hooks(pack, unpack, compose=True):
            y = x * x
    y.sum().backward()
    assert [tuple(shape) for shape in outer] == [(1,), (2,)] * 2
    assert torch.equal(x.grad, 2 * x.detach())


def test_three_contexts_compose() -> None:
    x = leaf()

    def scale(by: int) -> Any:
        return lambda t: (t * by,), lambda p: tree_map_only(Tensor, lambda t: t / by, p)[0]

    held: list[Tensor] = []
    with saved_tensors_hooks(lambda t: held.append(t.clone()) or t.clone(), same):
        with (
            saved_tensors_hooks(*scale(4), compose=True),
            saved_tensors_hooks(*scale(8), compose=True),
        ):
            y = x.exp()
    y.sum().backward()
    assert torch.equal(held[0], 32 * y.detach())
    assert torch.equal(x.grad, y.detach())


def test_compose_with_nothing_around_is_plain() -> None:
    x = leaf()
    with saved_tensors_hooks(to_half, from_half, compose=True):
        y = x * x
    y.sum().backward()
    assert torch.equal(x.grad, 2 * x.detach())


def test_repeated_and_double_backward_through_composed_hooks() -> None:
    x = torch.tensor([0.5, 0.25], dtype=torch.float64, requires_grad=True)

    def run(x: Tensor) -> Tensor:
        with saved_tensors_hooks(lambda t: t.numpy().copy(), torch.from_numpy):
            with saved_tensors_hooks(lambda t: [t.clone()], lambda p: p[0], compose=True):
                return x.exp() * x.sin()

    assert torch.autograd.gradgradcheck(run, x)
