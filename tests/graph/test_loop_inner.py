"""A backward inside a step of checkpoint_loop: plain PyTorch's formulas, and what it writes is written once."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from backstash.errors import UsageError
from backstash.graph import Binomial, checkpoint_loop
from test_loop_exact import BUDGETS, N, check, tensors

# Backward of each computes in another way while a dispatch mode is active, and rounds otherwise.
ENERGIES: dict[str, Callable[[Tensor], Tensor]] = {
    "prod": lambda a: a.prod(1).sum(),
    "cumprod": lambda a: a.cumprod(0).sum(),
    "det": torch.linalg.det,
    "prod in a checkpoint": lambda a: checkpoint(lambda b: b.prod(), a, use_reentrant=False),
}


@pytest.mark.parametrize("budget", BUDGETS, ids=str)
@pytest.mark.parametrize("kind", ENERGIES)
def test_a_force_is_computed_as_without_a_loop(kind: str, budget: dict[str, Any]) -> None:
    def run(loop: Any) -> list[Any]:
        w, x = tensors((6, 6), (6, 6))

        def step(state: Tensor) -> Tensor:
            (force,) = torch.autograd.grad(ENERGIES[kind](state * w), state, create_graph=True)
            return (state - 0.01 * force).tanh()

        y = loop(step, x, N)
        y.sum().backward()
        return [w.grad, x.grad, y.detach()]

    check(run, budget)


@pytest.mark.parametrize("budget", BUDGETS, ids=str)
@pytest.mark.parametrize("transform", ["grad", "hessian", "one that fails"])
def test_a_transform_computes_as_without_a_loop(transform: str, budget: dict[str, Any]) -> None:
    """And what the step writes after it is seen."""

    def run(loop: Any) -> list[Any]:
        w, x = tensors((5,), (5,))
        calls = torch.zeros(())

        def energy(a: Tensor) -> Tensor:
            if transform == "one that fails":
                raise KeyError
            return (a * w).prod() if transform == "grad" else (a * w).sin().sum() ** 3

        def step(state: Tensor) -> Tensor:
            try:
                made = getattr(torch.func, "hessian" if transform == "hessian" else "grad")(energy)
                state = state - 0.1 * (made(state) * state).sum()
            except KeyError:
                pass
            calls.add_(1)
            return state.tanh() * w

        loop(step, x, N).sum().backward()
        return [w.grad, x.grad, calls]

    check(run, budget)


def on_a_node(product: Tensor, count: Callable[[Any], None]) -> Tensor:
    node: Any = product.grad_fn
    node.register_hook(lambda *_: count(1.0))
    return product.prod()


def on_a_node_of_a_product(product: Tensor, count: Callable[[Any], None]) -> Tensor:
    return on_a_node(product.prod(), count)


def on_a_gradient(product: Tensor, count: Callable[[Any], None]) -> Tensor:
    product.register_hook(lambda gradient: count(gradient.sum()))
    return product.prod()


def of_a_function(product: Tensor, count: Callable[[Any], None]) -> Tensor:
    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x.sin()

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            count(x.sum())
            return grads[0] * x.cos()

    apply: Callable[..., Tensor] = Function.apply
    return apply(product).prod()


@pytest.mark.parametrize("budget", BUDGETS, ids=str)
@pytest.mark.parametrize("how", [on_a_node, on_a_node_of_a_product, on_a_gradient, of_a_function])
def test_what_a_backward_inside_writes_is_written_once(how: Any, budget: dict[str, Any]) -> None:
    def run(loop: Any) -> list[Any]:
        w, v, x = tensors((6,), (6,), (6,))
        sums = torch.zeros(())

        def count(value: Any) -> None:
            sums.add_(value)

        def step(state: Tensor) -> Tensor:
            how((state.detach() * v).exp(), count).backward()
            return (state * w).sin()

        loop(step, x, N).sum().backward()
        return [w.grad, v.grad, x.grad, sums]

    check(run, budget)


def under_hooks(state: Tensor) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda each: each.clone(), lambda each: each):
        energy = (state * 2).prod()
    return torch.autograd.grad(energy, state, create_graph=True)[0]


def by_a_transform(state: Tensor) -> Tensor:
    made: Any = torch.func.jacrev(lambda each: (each * 2).prod())(state)
    return made  # type: ignore[no-any-return]


@pytest.mark.parametrize("force", [under_hooks, by_a_transform])
def test_a_formula_that_cannot_be_left_alone(force: Callable[[Tensor], Tensor]) -> None:
    """It takes what other hooks saved, and the mode has no moment to step aside."""
    x = torch.ones(4, requires_grad=True)
    with pytest.raises(UsageError, match="ProdBackward0 inside the step computes differently"):
        checkpoint_loop(lambda state: state - force(state), x, 5, schedule=Binomial(1))


def test_a_gradient_that_step_0_has_not_given_and_that_is_dropped() -> None:
    """Nobody knows it when the step runs again."""
    head = nn.Linear(4, 1)

    def step(state: Tensor, number: int) -> Tensor:
        torch.autograd.grad(
            state.sin().sum(), state
        )  # so that what the step saves stays from step 0 on
        if number >= 2:
            head.zero_grad()
            head(state.detach()).sum().backward()
        return state * 0.5

    x = torch.ones(4, requires_grad=True)
    y = checkpoint_loop(step, x, 5, index=True, schedule=Binomial(1)).sum()
    with pytest.raises(UsageError, match="whether the step cleared a gradient is not known"):
        y.backward()


def test_a_gradient_that_step_0_has_not_given_is_put_back() -> None:
    def run(loop: Any) -> list[Any]:
        torch.manual_seed(0)
        heads = [nn.Linear(6, 1) for _ in range(N)]
        (x,) = tensors((4, 6))

        def step(state: Tensor, number: int) -> Tensor:
            heads[number](state.detach()).square().mean().backward()
            return state.sin()

        loop(step, x, N, index=True).sum().backward()
        return [x.grad, *(each.grad for head in heads for each in head.parameters())]

    for budget in BUDGETS:
        check(run, budget)


def test_the_settings_that_choose_a_kernel_are_as_in_forward() -> None:
    def run(loop: Any) -> list[Any]:
        (x,) = tensors((4,))
        y = loop(lambda s: s.sin() + torch.linspace(0, 1, 4), x, N)
        torch.set_default_dtype(torch.float64)
        try:
            y.sum().backward()
            assert torch.get_default_dtype() == torch.float64
        finally:
            torch.set_default_dtype(torch.float32)
        return [x.grad]

    check(run, {"schedule": Binomial(2)})
