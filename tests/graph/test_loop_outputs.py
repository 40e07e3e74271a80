"""What the steps return in addition to the state is stacked as torch.stack does it, without a second copy."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from backstash.graph import Binomial, KeepAll, checkpoint_loop

N = 9
Y = Callable[[Tensor, Tensor, int, Tensor, Tensor], Any]
FITS: dict[str, Y] = {
    "a tensor of its own": lambda new, old, number, x, w: new.sum(-1),
    "no dimension": lambda new, old, number, x, w: (new * x).sum(),
    "nothing in it": lambda new, old, number, x, w: (new * w)[:0],
    "without a graph": lambda new, old, number, x, w: new.detach() * 2,
    "whole numbers": lambda new, old, number, x, w: (new > 0).sum(),
    "the state, without its graph": lambda new, old, number, x, w: new.detach(),
    "a tree": lambda new, old, number, x, w: {"a": new.exp(), "b": [new.sum(), number]},
}
STACKED: dict[str, Y] = {
    "the state": lambda new, old, number, x, w: new,
    "the state before": lambda new, old, number, x, w: old,
    "its input": lambda new, old, number, x, w: x,
    "a tensor from outside": lambda new, old, number, x, w: w,
    "one tensor twice": lambda new, old, number, x, w: [new.exp()] * 2,
    "columns first": lambda new, old, number, x, w: (new * w).t(),
    "channels last": lambda new, old, number, x, w: (
        new[None, :, :, None].contiguous(memory_format=torch.channels_last).exp()
    ),
    "another layout later": lambda new, old, number, x, w: (
        (new * w).t() if number > 4 else (new * w).t().contiguous()
    ),
    "another dtype later": lambda new, old, number, x, w: new.double() if number > 4 else new.exp(),
    "a conjugate": lambda new, old, number, x, w: torch.view_as_complex(new.view(4, 4, 2)).conj(),
    "with a gradient now and then": lambda new, old, number, x, w: (
        new.exp() if number % 2 else new.detach().exp()
    ),
}


class Stacks(TorchDispatchMode):
    """The bytes that torch.stack copied."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = op(*args, **(kwargs or {}))
        if op.overloadpacket is torch.ops.aten.stack:
            self.nbytes += result.nbytes
        return result


def step_with(y: Y) -> Callable[..., Any]:
    def step(state: Tensor, number: int, x: Tensor, w: Tensor) -> Any:
        new = (state * w + x * 0.1).sin()
        return new, y(new, state, number, x, w)

    return step


def trained(loop: Any, y: Y) -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    state, xs, w = (
        torch.randn(shape, generator=generator, requires_grad=True)
        for shape in ((4, 8), (N, 4, 8), (4, 8))
    )

    start = state * 1.5
    with Stacks() as stacks:
        end, ys = loop(step_with(y), start, N, w, xs=xs, index=True, ys=True)
    leaves = [leaf for leaf in torch.utils._pytree.tree_leaves(ys) if isinstance(leaf, Tensor)]
    loss = end.sum()
    for leaf in leaves:
        if leaf.requires_grad:
            weights = torch.arange(leaf.numel(), dtype=torch.float).cos().view(leaf.shape)
            real = torch.view_as_real(leaf).sum(-1) if leaf.is_complex() else leaf
            loss = loss + real.mul(weights).sum()
    loss.backward()
    shapes = [(leaf.dtype, leaf.shape, leaf.stride(), leaf.requires_grad) for leaf in leaves]
    kept = [leaf.detach().resolve_conj() for leaf in leaves]
    return [shapes, [state.grad, xs.grad, w.grad, *kept], stacks.nbytes]


def plain(step: Any, state: Any, n: int, w: Tensor, *, xs: Tensor, **_: Any) -> Any:
    collected = []
    for number, x in enumerate(xs.unbind(0)):
        state, y = step(state, number, x, w)
        collected.append(y)
    trees = [torch.utils._pytree.tree_flatten(each) for each in collected]
    leaves = [
        torch.stack(each) if isinstance(each[0], Tensor) else list(each)
        for each in zip(*(tree[0] for tree in trees), strict=True)
    ]
    return state, torch.utils._pytree.tree_unflatten(leaves, trees[0][1])


@pytest.mark.parametrize("schedule", [Binomial(2), KeepAll()], ids=str)
@pytest.mark.parametrize("name", [*FITS, *STACKED])
def test_outputs_and_gradients_are_the_plain_loop_s(name: str, schedule: Any) -> None:
    y = {**FITS, **STACKED}[name]
    found = trained(functools.partial(checkpoint_loop, schedule=schedule), y)
    wanted = trained(plain, y)
    assert found[0] == wanted[0]
    for one, other in zip(found[1], wanted[1], strict=True):
        assert torch.equal(one, other)
    if name in FITS:
        assert found[2] == 0


@pytest.mark.parametrize("name", [*FITS, *STACKED])
def test_outputs_without_gradients_are_the_plain_loop_s(name: str) -> None:
    step = step_with({**FITS, **STACKED}[name])
    state, xs, w = torch.ones(4, 8), torch.rand(N, 4, 8), torch.rand(4, 8)
    given = {"xs": xs, "index": True, "ys": True}
    with torch.no_grad(), Stacks() as stacks:
        found = checkpoint_loop(step, state, N, w, **given)
    with torch.no_grad():
        wanted = plain(step, state, N, w, **given)
    flat = [torch.utils._pytree.tree_leaves(each) for each in (found, wanted)]
    for one, other in zip(*flat, strict=True):
        if isinstance(other, Tensor):
            assert torch.equal(one, other)
            assert (one.dtype, one.stride()) == (other.dtype, other.stride())
        else:
            assert one == other
    if name in FITS:
        assert stacks.nbytes == 0


def test_what_a_step_returned_may_be_changed_afterwards() -> None:
    """The outputs lie in one tensor; changing them in place changes no state, and gradients stay right."""
    w = torch.tensor([0.5, 0.7], requires_grad=True)

    def run(loop: Any) -> Tensor:
        end, ys = loop(lambda state, w: ((state * w).sin(), state * w * 2), torch.ones(2), w)
        ys.mul_(w)
        (end + ys.sum(0)).sum().backward()
        gradient, w.grad = w.grad, None
        assert gradient is not None
        return gradient

    def in_full(step: Any, state: Tensor, w: Tensor) -> Any:
        ys = []
        for _ in range(N):
            state, y = step(state, w)
            ys.append(y)
        return state, torch.stack(ys)

    found = run(lambda *args: checkpoint_loop(args[0], args[1], N, args[2], ys=True, memory="1MiB"))
    assert torch.equal(found, run(in_full))
