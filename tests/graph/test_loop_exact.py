"""checkpoint_loop's gradients are the plain loop's, to the bit."""

import functools
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F

from backstash import Stash
from backstash.errors import UsageError
from backstash.graph import Binomial, KeepAll, TwoLevel, checkpoint_loop
from long_tests import takes_long

N = 12
BUDGETS = [
    {"schedule": Binomial(1)},
    {"schedule": Binomial(3)},
    {"schedule": TwoLevel(5, 2)},
    {"schedule": KeepAll()},
    {"memory": "40KiB"},
    {"memory": "1GiB"},
]


def plain(step: Callable[..., Any], state: Any, n: int, *args: Any, index: bool = False) -> Any:
    for number in range(n):
        state = step(state, *([number] if index else []), *args)
    return state


def tensors(*shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, requires_grad=True) for shape in shapes]


def same(one: list[Any], other: list[Any]) -> None:
    assert len(one) == len(other)
    for number, (left, right) in enumerate(zip(one, other, strict=True)):
        assert (left is None) == (right is None), number
        assert left is None or torch.equal(left, right), number


def check(run: Callable[[Any], list[Any]], budget: dict[str, Any]) -> None:
    same(run(functools.partial(checkpoint_loop, **budget)), run(plain))


@pytest.mark.parametrize("budget", BUDGETS, ids=str)
def test_sums_over_many_uses_round_alike(budget: dict[str, Any]) -> None:
    def run(loop: Any) -> list[Any]:
        w, b, x, v = tensors((32, 32), (32,), (4, 32), (32,))

        def step(state: Tensor, c: Tensor) -> Tensor:
            mixed = torch.tanh(state @ w * 0.1 + b) + (torch.sin(state @ w) @ w.t()) * 0.01
            return mixed + F.dropout(state, 0.2) * c + c.sin()

        torch.manual_seed(1)
        c = v.sin()
        before = (w * w).sum() * 0.1 + (x @ w).tanh().sum() + c.sum()
        y = loop(step, x, N, c)
        after = ((y @ w) ** 2).sum() + (w * b).sum() + (x * 0.3).sin().sum() + (c * c).sum()
        (before + after).backward()
        return [w.grad, b.grad, x.grad, v.grad, y.detach(), torch.rand(2)]

    check(run, budget)


@pytest.mark.parametrize("budget", BUDGETS, ids=str)
def test_what_closures_reach_gets_its_gradient(budget: dict[str, Any]) -> None:
    def run(loop: Any) -> list[Any]:
        v, x = tensors((16,), (16,))
        c = v.exp()
        c.retain_grad()
        seen: list[Tensor] = []
        v.register_hook(lambda gradient: seen.append(gradient.clone()))
        y = loop(lambda state: (state * c).sin() + c * v, x, N)
        (y.sum() + (c * c).sum()).backward()
        return [v.grad, x.grad, c.grad, *seen]

    check(run, budget)


class Cell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin, self.gate = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, state: Tensor) -> Tensor:
        return torch.tanh(self.lin(state)) * torch.sigmoid(self.gate(state)) + state


@pytest.mark.parametrize("how", ["backward", "inputs", "grad"])
def test_a_modules_parameters_get_theirs(how: str) -> None:
    def run(loop: Any) -> list[Any]:
        torch.manual_seed(0)
        cell, x = Cell(), torch.randn(4, 16)
        loss = loop(cell, x, N).sum()
        parameters = list(cell.parameters())
        if how == "grad":
            return list(torch.autograd.grad(loss, parameters))
        loss.backward(inputs=parameters[:2] if how == "inputs" else None)
        return [parameter.grad for parameter in parameters]

    check(run, {"schedule": Binomial(3)})


def test_a_tree_of_states_with_a_part_that_stays() -> None:
    def run(loop: Any) -> list[Any]:
        w, a, b, k = tensors((8,), (8,), (8,), (8,))

        def step(state: dict[str, Any]) -> dict[str, Any]:
            a, b = state["ab"]
            new = (b * state["k"], (a * w).sin() + state["k"] * 0.1 * state["i"])
            return {"ab": new, "k": state["k"], "i": state["i"] + 1}

        end = loop(step, {"ab": (a, b), "k": k, "i": 0}, N)
        (end["ab"][0].sum() + (end["ab"][1] ** 2).sum() + end["k"].sum()).backward()
        return [w.grad, a.grad, b.grad, k.grad, torch.tensor(end["i"])]

    check(run, {"schedule": Binomial(3)})


def test_a_step_that_takes_gradients_itself() -> None:
    """Molecular dynamics: forces are the gradient of an energy."""

    def run(loop: Any) -> list[Any]:
        k, x = tensors((8,), (8,))

        def step(state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
            place, speed = state
            at = place if place.requires_grad else place.detach().requires_grad_()
            (force,) = torch.autograd.grad((k * at**4).sum(), at, create_graph=True)
            speed = speed - 0.01 * force
            return place + 0.01 * speed, speed

        place, speed = loop(step, (x, torch.zeros(8)), N)
        (place.sum() + speed.sum()).backward()
        return [k.grad, x.grad]

    check(run, {"schedule": Binomial(3)})


def test_autocast_is_as_it_was() -> None:
    def run(loop: Any) -> list[Any]:
        w, x = tensors((16, 16), (4, 16))
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            y = loop(lambda state: torch.tanh(F.linear(state, w)).float(), x, N)
        y.sum().backward()
        return [w.grad, x.grad]

    check(run, {"schedule": Binomial(3)})


def test_inputs_and_outputs_of_single_steps() -> None:
    w, x, xs = tensors((8,), (8,), (N, 8))

    def step(state: Tensor, number: int, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        new = (state * w + x * number * 0.1).sin()
        return new, (new * x).sum()

    end, ys = checkpoint_loop(step, x, None, w, xs=xs, ys=True, index=True, schedule=Binomial(3))
    (end.sum() + ys.sum() + ys[3]).backward()
    found = [w.grad, x.grad, xs.grad, end.detach(), ys.detach()]

    w, x, xs = tensors((8,), (8,), (N, 8))
    state, collected = x, []
    for number, row in enumerate(xs.unbind(0)):
        state, y = step(state, number, row, w)
        collected.append(y)
    ys = torch.stack(collected)
    (state.sum() + ys.sum() + ys[3]).backward()
    same(found, [w.grad, x.grad, xs.grad, state.detach(), ys.detach()])


@pytest.mark.parametrize("n", [None, 200])
@pytest.mark.parametrize("stop", [1, 2, 7, 40, 100])
def test_a_loop_that_ends_by_itself(stop: int, n: int | None) -> None:
    def run(loop: Any) -> list[Any]:
        w, x = tensors((8,), (8,))
        state, _ = loop(lambda s: ((s[0] * w).sin(), s[1] + 1), (x, 0), stop)
        state.sum().backward()
        return [w.grad, x.grad]

    def loop(step: Any, state: Any, _: int) -> Any:
        return checkpoint_loop(
            step, state, n, until=lambda state: state[1] == stop, schedule=Binomial(4)
        )

    same(run(loop), run(plain))


def test_a_second_backward_and_a_dropped_graph() -> None:
    w, x = tensors((8,), (8,))
    y = checkpoint_loop(lambda s: (s * w).sin(), x, N, schedule=Binomial(3)).sum()
    first = torch.autograd.grad(y, [w, x], retain_graph=True)
    second = torch.autograd.grad(y, [w, x])
    same(list(first), list(second))
    checkpoint_loop(lambda s: (s * w).sin(), x, N, schedule=Binomial(3))


def test_snapshots_and_saves_are_blocks_of_a_stash(disk_dir: Path) -> None:
    w, x = tensors((256, 256), (256, 256))
    with Stash(disk=disk_dir, min_bytes=0) as stash:
        pass
    y = checkpoint_loop(lambda s: (s @ w * 0.01).tanh(), x, N, schedule=Binomial(4), stash=stash)
    held = stash.stats()
    assert held.blocks >= 4
    # Not exact: a write that ends between two looks is in both figures.
    assert held.keep_bytes == 0 and held.disk_bytes + held.inflight_bytes >= 4 * 256 * 256 * 4
    y.sum().backward()
    found = [w.grad, x.grad]
    del y
    assert stash.stats().blocks == 0
    stash.close()
    w, x = tensors((256, 256), (256, 256))
    plain(lambda s: (s @ w * 0.01).tanh(), x, N).sum().backward()
    same(found, [w.grad, x.grad])


@pytest.mark.parametrize("memory", [None, "600KiB"])
def test_with_a_disk(disk_dir: Path, memory: str | None) -> None:
    def run(loop: Any) -> list[Any]:
        w, x = tensors((256, 256), (256, 256))
        loop(lambda s: (s @ w * 0.01).tanh(), x, N).sum().backward()
        return [w.grad, x.grad]

    check(run, {"disk": disk_dir, "memory": memory})


def test_without_gradients_it_is_the_plain_loop() -> None:
    with torch.no_grad():
        y = checkpoint_loop(torch.sin, torch.ones(3), 4)
    assert torch.equal(y, plain(torch.sin, torch.ones(3), 4))
    x = torch.ones(3, requires_grad=True)
    assert checkpoint_loop(torch.sin, x, 0, memory="1MiB") is x


@takes_long
def test_a_graph_of_very_many_steps_can_be_freed() -> None:
    x = torch.ones(2, requires_grad=True)
    y = checkpoint_loop(lambda s: s * 1.0, x, 20_000, schedule=Binomial(8))
    del y


def test_batch_normalization_counts_each_step_once() -> None:
    def run(loop: Any) -> list[Any]:
        torch.manual_seed(0)
        norm, x = nn.BatchNorm1d(8), torch.randn(16, 8, requires_grad=True)
        loop(lambda state: norm(state).sin(), x, N).sum().backward()
        return [norm.weight.grad, norm.bias.grad, x.grad, *norm.buffers()]

    check(run, {"schedule": Binomial(3)})


def test_a_step_that_is_begun_again_leaves_buffers_as_one_run_does() -> None:
    """One that reaches what was computed outside, or asks for what it saved, is begun again."""

    def run(loop: Any, inner: bool) -> list[Any]:
        torch.manual_seed(0)
        norm, x = nn.BatchNorm1d(8), torch.randn(16, 8, requires_grad=True)
        outside = x.exp()

        def step(state: Tensor) -> Tensor:
            y = norm(state)
            if not inner:
                return (y * outside).sin()
            (force,) = torch.autograd.grad(y.cos().sum(), state, create_graph=True)
            return y + force

        loop(step, x, N).sum().backward()
        return [norm.weight.grad, norm.bias.grad, x.grad, *norm.buffers()]

    for inner in (False, True):
        check(functools.partial(run, inner=inner), {"schedule": Binomial(3)})


def test_a_buffer_that_a_step_replaces_is_what_the_last_step_made_it() -> None:
    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(8))
            self.register_buffer("none", None)

        def forward(self, x: Tensor) -> Tensor:
            self.mean = self.mean * 0.9 + x.detach().mean(0) * 0.1
            return x * 1.01

    def run(loop: Any) -> list[Any]:
        module, x = Mean(), tensors((4, 8))[0]
        loop(lambda state: module(state).sin(), x, N).sum().backward()
        return [x.grad, module.mean]

    check(run, {"schedule": Binomial(3)})


def test_buffers_that_cannot_be_written_stay() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mask", torch.ones(1).expand(8))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.mask

    def run(loop: Any) -> list[Any]:
        module, x = Masked(), tensors((4, 8))[0]
        loop(lambda state: module(state).sin(), x, N).sum().backward()
        return [x.grad, module.mask]

    check(run, {"schedule": Binomial(3)})


def test_hooks_on_a_parameter_see_the_whole_gradient_once() -> None:
    def run(loop: Any) -> list[Any]:
        w, x = tensors((8,), (8,))
        seen: list[Tensor] = []

        def double(gradient: Tensor) -> Tensor:
            seen.append(gradient.clone())
            return gradient * 2

        w.register_hook(double)
        loop(lambda state: (state * w).sin(), x, N).sum().backward()
        return [w.grad, *seen]

    check(run, {"schedule": Binomial(3)})
    check(run, {"schedule": KeepAll()})


class Cube(torch.autograd.Function):
    """A function of one's own in a step."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x**3 * w

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return gradient * 3 * x**2 * w, gradient * x**3


def test_a_function_of_ones_own() -> None:
    def run(loop: Any) -> list[Any]:
        w, x = tensors((8,), (8,))
        loop(lambda state: Cube.apply(state.sin(), w) + state * w, x, N).sum().backward()
        return [w.grad, x.grad]

    check(run, {"schedule": Binomial(3)})


def test_autocast_inside_a_step_caches_what_it_caches_in_a_plain_loop() -> None:
    """A leaf's cast is cached and adds up in the lower precision; the state's is not, but the first one's."""

    def run(loop: Any) -> list[Any]:
        w, x = tensors((16, 16), (4, 16))

        def step(state: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                mixed = F.linear(state, w) + F.linear(state, w.t() * 0.3) + F.linear(state * 1, w)
            return torch.tanh(mixed.float())

        loop(step, x, N).sum().backward()
        return [w.grad, x.grad]

    for budget in BUDGETS:
        check(run, budget)


def test_backward_on_another_thread_finds_what_closures_reach() -> None:
    """Nodes have numbers of their thread: there, those of this one are from the future."""

    def run(loop: Any) -> list[Any]:
        v, x = tensors((8,), (8,))
        for _ in range(1000):
            c = v.exp()
        loss = loop(lambda state: (state * c).sin() + c, x, N).sum()
        with ThreadPoolExecutor(1) as pool:
            pool.submit(loss.backward).result()
        return [v.grad, x.grad]

    check(run, {"schedule": Binomial(3)})


def test_two_threads_go_backward_through_one_loop() -> None:
    """One waits until the other's step is done: they share the snapshots."""
    w, x = tensors((8,), (8,))
    inside, most, count = threading.Lock(), 0, 0

    def step(state: Tensor) -> Tensor:
        nonlocal most, count
        with inside:
            count += 1
            most = max(most, count)
        result = (state * w).sin()
        time.sleep(0.001)  # lets the other thread in, where nothing holds it back
        with inside:
            count -= 1
        return result

    loss = checkpoint_loop(step, x, N, schedule=Binomial(3)).sum()
    expected = torch.autograd.grad(plain(step, x, N).sum(), [w, x])
    with ThreadPoolExecutor(2) as pool:
        found = [
            pool.submit(torch.autograd.grad, loss, [w, x], retain_graph=True) for _ in range(2)
        ]
        for each in found:
            same(list(each.result()), list(expected))
    assert most == 1


def test_an_error_or_an_interrupt_in_backward_leaves_a_graph_that_can_be_used() -> None:
    w, x = tensors((8,), (8,))
    fails = {"at": -1}

    def step(state: Tensor, number: int) -> Tensor:
        if number == fails["at"]:
            raise KeyboardInterrupt
        return (state * w).sin()

    loss = checkpoint_loop(step, x, N, index=True, schedule=Binomial(3)).sum()
    fails["at"] = 4
    before = torch.get_rng_state()
    with pytest.raises(KeyboardInterrupt):
        torch.autograd.grad(loss, [w, x], retain_graph=True)
    assert torch.equal(torch.get_rng_state(), before) and torch.is_grad_enabled()
    fails["at"] = -1
    found = torch.autograd.grad(loss, [w, x])
    same(list(found), list(torch.autograd.grad(plain(step, x, N, index=True).sum(), [w, x])))


def test_what_a_step_saves_in_forward_is_freed_at_once() -> None:
    """But the last step's, whose graph backward takes."""
    w, x = tensors((8,), (8,))
    saved: list[bool] = []

    def step(state: Tensor) -> Tensor:
        product = state * w
        result = product.sin()
        storage = StorageWeakRef(product.untyped_storage())
        del product
        saved.append(not storage.expired())
        return result

    y = checkpoint_loop(step, x, N, schedule=Binomial(3))
    assert saved == [False] * (N - 1) + [True]
    y.sum().backward()


def test_a_step_that_asks_its_own_graph_what_it_saved() -> None:
    def looks(w: Tensor, state: Tensor) -> Tensor:
        result = (state * w).sin()
        try:
            kept = result.grad_fn._saved_self  # type: ignore[union-attr]
        except Exception:  # a step that hides the error it gets
            kept = torch.zeros(8)
        return result + kept.detach() * 0.1

    def transforms(w: Tensor, state: Tensor) -> Tensor:
        return torch.func.grad(lambda each: (each.sin() * w).sum())(state) * w

    for kind in (looks, transforms):

        def run(loop: Any, kind: Any = kind) -> list[Any]:
            w, x = tensors((8,), (8,))
            loop(functools.partial(kind, w), x, N).sum().backward()
            return [w.grad, x.grad]

        check(run, {"schedule": Binomial(3)})


class Step(nn.Module):
    """One that writes to memory from outside, in the way of ``kind``."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.layer, self.head, self.norm = nn.Linear(16, 16), nn.Linear(16, 1), nn.BatchNorm1d(16)
        self.mean = nn.Parameter(torch.zeros(16), requires_grad=False)
        self.calls, self.sparse = torch.zeros(()), torch.eye(4).to_sparse()

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        if self.kind == "a call of a norm's forward":
            y = self.norm.forward(y)
        elif self.kind == "a function's statistics":
            y = F.batch_norm(y, self.norm.running_mean, self.norm.running_var, training=True)
        elif self.kind == "backward":
            self.head(y.detach()).square().mean().backward()  # type: ignore[no-untyped-call]
        elif self.kind == "a gradient that is dropped":
            self.head.zero_grad()
            self.head(y.detach()).square().mean().backward()  # type: ignore[no-untyped-call]
        elif self.kind == "a sparse matrix":
            self.sparse.mul_(0.9)
        elif self.kind == "a frozen parameter":
            with torch.no_grad():
                self.mean.lerp_(x.mean(0), 0.1)
        else:
            self.calls += 1
        return y.tanh()


KINDS = (
    "a call of a norm's forward",
    "a function's statistics",
    "backward",
    "a frozen parameter",
    "a gradient that is dropped",
    "a sparse matrix",
    "a counter",
)


@pytest.mark.parametrize("forgets", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_what_a_step_writes_outside_is_written_once(kind: str, forgets: bool) -> None:
    def run(loop: Any) -> list[Any]:
        torch.manual_seed(0)
        step, x = Step(kind), torch.randn(8, 16)
        y = loop(step, x, N)
        if forgets:
            step.zero_grad()  # what a replay accumulates then is a gradient's first
        y.square().mean().backward()
        grads = [each.grad for each in step.parameters()]
        return [*grads, *step.buffers(), step.mean.detach(), step.calls, step.sparse.to_dense()]

    for budget in BUDGETS:
        check(run, budget)


def test_a_number_that_decides_gradients_alone_may_not_change() -> None:
    class Reverse(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
            ctx.factor = factor
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
            return -ctx.factor * grads[0], None

    factor = [0.5]
    (w,) = tensors((16, 16))
    apply: Callable[..., Tensor] = Reverse.apply
    y = checkpoint_loop(
        lambda x: apply((x @ w).tanh(), factor[0]), torch.ones(4, 16), 5, schedule=Binomial(2)
    )
    factor[0] = 0.25
    with pytest.raises(UsageError, match="numbers for its gradients"):
        y.sum().backward()


@pytest.mark.parametrize("budget", BUDGETS, ids=str)
def test_a_step_that_uses_a_transform(budget: dict[str, Any]) -> None:
    def run(loop: Any) -> list[Any]:
        (w,) = tensors((16,))

        def step(x: Tensor) -> Tensor:
            force: Callable[[Tensor], Tensor] = torch.func.grad(lambda each: (each * w).sin().sum())
            return x - 0.01 * force(x)

        loop(step, torch.ones(8, 16), N).square().sum().backward()
        return [w.grad]

    check(run, budget)


@pytest.mark.parametrize("of", [lambda z: z.mH, lambda z: z.conj().imag], ids=["mH", "imag"])
def test_singular_values_of_conjugate_and_negative_views(of: Callable[[Tensor], Tensor]) -> None:
    """An operation gets a clone of such a view, which needs no gradient even if the view does."""

    def run(loop: Any) -> list[Any]:
        (x,) = tensors((96, 96))

        def step(state: Tensor) -> Tensor:
            values = torch.linalg.svdvals(of(torch.complex(state, state.sin())))
            return torch.sigmoid(state) * values

        end = loop(step, x, 4)
        return [end, *torch.autograd.grad(end.sum(), x)]

    check(run, {"schedule": Binomial(2)})


def test_forward_mode_in_a_step() -> None:
    """Of zero tangents, which have no memory; tangents that would differ are refused."""
    index, ones = torch.tensor([0, 1]), torch.ones(2, 4)

    def run(loop: Any, inner: Any) -> list[Any]:
        (x,) = tensors((5, 4))

        def step(state: Tensor) -> Tensor:
            return torch.func.jvp(inner, (state.sin(),), (state.cos(),))[1] * state

        end = loop(step, x, 4)
        return [end, *torch.autograd.grad(end.sum(), x)]

    check(
        functools.partial(run, inner=lambda t: t.index_add(0, index, ones, alpha=2)),
        {"schedule": Binomial(2)},
    )
    check(functools.partial(run, inner=lambda t: F.layer_norm(t, (4,))), {"schedule": Binomial(2)})

    def dual(state: Tensor) -> Tensor:
        with torch.autograd.forward_ad.dual_level():
            given = torch.autograd.forward_ad.make_dual(state.detach(), state.cos())
            return state * torch.autograd.forward_ad.unpack_dual(F.layer_norm(given, (4,))).tangent

    with pytest.raises(UsageError, match="computes the tangent of aten"):
        checkpoint_loop(dual, tensors((5, 4))[0], 4, schedule=Binomial(2))
