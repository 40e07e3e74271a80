"""``allow_mutation_on_saved_tensors``: exact for every alias, under every pair, and bounded."""

import gc
import threading
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import graph as stock
from torch.utils.checkpoint import checkpoint

from backstash import Stash
from backstash.errors import InplaceError, UsageError
from backstash.graph import SaveOnCpu, allow_mutation_on_saved_tensors, only, saved_tensors_hooks

current = torch._C._autograd._top_saved_tensors_default_hooks
Change = Callable[[Tensor], Any]


def loss_of(x: Tensor, change: Change | None) -> Tensor:
    """Saves a tensor, two overlapping views of it, a transposed one and an expanded one; then changes it."""
    b = x * 1
    loss = (b**2).sum() + (b[1:] ** 3).sum() + (b[:2] ** 2).sum()
    loss = loss + (b.t()[1:] ** 3).sum() + (b[0, :1].expand(5) ** 2).sum()
    if change is not None:
        change(b.detach())
    return loss


def gradient(change: Change | None, values: Tensor | None = None) -> Tensor:
    x = (
        torch.linspace(0.5, 2, 12).view(3, 4) if values is None else values.clone()
    ).requires_grad_()
    (found,) = torch.autograd.grad(loss_of(x, change), x)
    return found


def put_topk(b: Tensor) -> None:
    torch.topk(torch.rand(3, 4), 4, out=(b, torch.empty(3, 4, dtype=torch.long)))


def fused_sgd(b: Tensor) -> None:
    torch._fused_sgd_(
        [b], [torch.ones(3, 4)], [], weight_decay=0.0, momentum=0.0, lr=0.5, dampening=0.0,
        nesterov=False, maximize=False, is_first_step=True,
    )  # fmt: skip


CHANGES: dict[str, Change] = {
    "the tensor": lambda b: b.zero_(),
    "a view that begins elsewhere": lambda b: b[1:].zero_(),
    "one element": lambda b: b[2, 3].fill_(9),
    "a transposed view": lambda b: b.t()[1].fill_(3),
    "another dtype": lambda b: b.view(torch.uint8).zero_(),
    ".data": lambda b: b.data.zero_(),
    "as_strided": lambda b: b.as_strided((2,), (1,), 3).zero_(),
    "out=": lambda b: torch.sin(torch.rand(3, 4), out=b),
    "out= with several outputs": put_topk,
    "foreach": lambda b: torch._foreach_mul_([b[:1], b[1:]], 2),
    "fused": fused_sgd,
    "copy_": lambda b: b.copy_(torch.rand(3, 4)),
    "index_put_": lambda b: b.index_put_((torch.tensor([1]),), torch.zeros(4)),
    "setitem": lambda b: b.__setitem__((slice(None), 0), 5.0),
    "set_": lambda b: b.set_(torch.zeros(3, 4)),
    "resize_ and fill": lambda b: b.resize_(100).zero_(),
    "swapped data": lambda b: setattr(b, "data", torch.zeros(3, 4)),
    "a random fill": lambda b: b.normal_(),
    "twice": lambda b: b.add_(1).mul_(2),
    "nothing": lambda b: None,
}


PAIRS: dict[str, Callable[[str], Any]] = {
    "none": lambda directory: ExitStack(),
    "alias": lambda directory: stock.saved_tensors_hooks(lambda t: t.detach(), lambda t: t),
    "identity": lambda directory: saved_tensors_hooks(lambda t: t, lambda t: t),
    "hidden": lambda directory: stock.saved_tensors_hooks(*hidden()),
    "tuple": lambda directory: stock.saved_tensors_hooks(lambda t: (1, t.detach()), lambda p: p[1]),
    "copy": lambda directory: stock.saved_tensors_hooks(lambda t: t.clone(), lambda t: t),
    "only": lambda directory: only(lambda t: False),
    "composed": lambda directory: saved_tensors_hooks(lambda t: (t,), lambda p: p[0], compose=True),
    "save_on_cpu": lambda directory: stock.save_on_cpu(),
    "stash in place": lambda directory: Stash(min_bytes=0),
    "stash on disk": lambda directory: Stash(disk=directory, min_bytes=0),
}


def hidden() -> tuple[Callable[[Tensor], int], Callable[[int], Tensor]]:
    """Keeps what it packs out of sight of its packed object, and computes when it unpacks."""
    kept: list[Tensor] = []
    return lambda t: kept.append(t.detach()) or len(kept) - 1, lambda index: kept[index] * 1


@pytest.mark.parametrize("name", PAIRS)
def test_gradients_are_those_of_no_change_under_every_pair(name: str, tmp_path: Path) -> None:
    pair = PAIRS[name](str(tmp_path))
    expected = gradient(None)
    for how, change in CHANGES.items():
        with allow_mutation_on_saved_tensors() as context, pair:
            found = gradient(change)
            assert not context.cloned and not context.tid_to_weakhandle, how
        assert torch.equal(found, expected), how
        with pair, allow_mutation_on_saved_tensors():
            found = gradient(change)
        assert torch.equal(found, expected), how
    assert current(False) is None
    if isinstance(pair, Stash):
        pair.close()


def test_plain_torch_raises_for_that_program_so_the_changes_are_real() -> None:
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        gradient(CHANGES["the tensor"])


def test_a_pair_around_it_still_packs(disk_dir: Any) -> None:
    stash = Stash(disk=disk_dir, min_bytes=0)
    with stash, allow_mutation_on_saved_tensors():
        gradient(CHANGES["one element"], torch.rand(3, 4))
    assert stash.stats().written_bytes > 0
    stash.close()


@pytest.mark.parametrize("name", ["none", "alias"])
def test_complex_and_conjugated_views(name: str) -> None:
    def run(change: bool) -> Tensor:
        x = torch.tensor([1 + 2j, 3 - 1j], requires_grad=True)
        b = x * 1
        out = (b.conj() ** 2).sum() + (b.imag**2).sum() * (b.conj().imag ** 3).sum()
        if change:
            b.detach().zero_()
        return torch.autograd.grad(out.abs(), x)[0]

    with allow_mutation_on_saved_tensors(), PAIRS[name](""):
        found = run(True)
    assert torch.equal(found, run(False))


@pytest.mark.parametrize("name", ["alias", "identity", "hidden", "save_on_cpu", "stash in place"])
def test_a_pair_is_found_before_its_first_save(name: str) -> None:
    def run(change: bool) -> Tensor:
        x = torch.rand(3, generator=torch.Generator().manual_seed(0)).requires_grad_()
        b = x * 1
        with PAIRS[name](""):
            out = b.square()
        if change:
            b.detach().zero_()
        return torch.autograd.grad(out.sum(), x)[0]

    with allow_mutation_on_saved_tensors():
        found = run(True)
    assert torch.equal(found, run(False))


@pytest.mark.parametrize("inplace", [False, True])
def test_noise_that_is_filled_after_it_was_saved(inplace: bool) -> None:
    """The write gives the noise the value that backward needs."""
    x = torch.linspace(-1, 1, 20, requires_grad=True)

    def run() -> Tensor:
        torch.manual_seed(0)
        result = nn.functional.rrelu(x * 1, training=True, inplace=inplace)
        return torch.autograd.grad(result.sum(), x)[0]

    with allow_mutation_on_saved_tensors():
        found = run()
    assert torch.equal(found, run())


def test_sparse_tensors() -> None:
    def run(change: bool) -> Tensor:
        x = torch.rand(3, 3).relu().requires_grad_()
        other = torch.eye(3).to_sparse()
        out = torch.sparse.mm(other, x).sum()
        if change:
            other.detach().zero_()
        return torch.autograd.grad(out, x)[0]

    torch.manual_seed(0)
    with allow_mutation_on_saved_tensors():
        found = run(True)
    assert torch.equal(found, torch.ones(3, 3))


def test_double_and_repeated_backward_after_a_change() -> None:
    def run(x: Tensor) -> Tensor:
        b = x * 1
        out = b**3
        b.detach()[1:].zero_()
        return out

    x = torch.rand(3, dtype=torch.float64, requires_grad=True)
    with allow_mutation_on_saved_tensors():
        assert torch.autograd.gradgradcheck(run, x)


def test_an_unpacked_tensor_that_a_backward_changes_is_cloned_too() -> None:
    class Cube(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x**3

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            return grad * 3 * x.square_()

    x = torch.rand(3, requires_grad=True)
    with allow_mutation_on_saved_tensors():
        y = Cube.apply(x * 1).sum()
        first = torch.autograd.grad(y, x, retain_graph=True)[0]
        assert torch.equal(first, torch.autograd.grad(y, x)[0])


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_a_function_that_changes_what_it_saved(reentrant: bool) -> None:
    def block(x: Tensor, change: bool) -> Tensor:
        y = x * 1
        z = y.exp() * y
        if change:
            y.detach().zero_()
        return z.sin().sum()

    x, reference = (torch.linspace(0, 1, 5).requires_grad_() for _ in range(2))
    with allow_mutation_on_saved_tensors():
        checkpoint(block, x, True, use_reentrant=reentrant).backward()
    block(reference, False).backward()
    assert torch.equal(x.grad, reference.grad)


def test_training_steps_with_retained_graphs() -> None:
    def run(allowed: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), SaveOnCpu(nn.Linear(8, 1)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)
        loss = model(torch.ones(3, 4)).sum()
        gradients = []
        for _ in range(3):
            optimizer.zero_grad()
            loss.backward(retain_graph=True)
            gradients += [p.grad.clone() for p in model.parameters()]
            if allowed:
                optimizer.step()
        return gradients

    with allow_mutation_on_saved_tensors():
        found = run(True)
    assert all(torch.equal(a, b) for a, b in zip(found, run(False), strict=True))


# What it clones, and what it keeps.


def clones(change: Callable[[Tensor], Any]) -> int:
    with allow_mutation_on_saved_tensors() as context:
        b = torch.rand(4, 4).requires_grad_() * 1
        out = (b[:2] ** 2).sum()
        change(b.detach())
        found = len(context.cloned)
        del out, b
        assert not context.cloned and not context.tid_to_weakhandle
    return found


@pytest.mark.parametrize(
    "change, count",
    [
        (lambda b: b[1:].zero_(), 1),
        (lambda b: b[2:].zero_(), 0),  # other bytes of the same storage
        (lambda b: b.clone().zero_(), 0),
        (lambda b: torch.rand(4, 4).zero_(), 0),
        (lambda b: b.zero_().zero_(), 1),
        (lambda b: b.set_(torch.zeros(1)), 0),
    ],
)
def test_only_what_was_saved_and_is_about_to_change_is_cloned(change: Change, count: int) -> None:
    assert clones(change) == count


def test_a_change_next_to_what_was_saved_is_no_error() -> None:
    x = torch.rand(4, requires_grad=True)
    with allow_mutation_on_saved_tensors():
        b = x * 1
        out = (b[:2] ** 2).sum()
        b.detach()[2:].zero_()
        out.backward()
    assert torch.equal(x.grad[:2], 2 * x.detach()[:2])


def test_one_tensor_saved_often_is_cloned_once_and_each_version_for_itself() -> None:
    with allow_mutation_on_saved_tensors() as context:
        a = torch.rand(3, requires_grad=True) * 1
        one, two = a**2, a**2
        assert len(context.tid_to_weakhandle) == 1
        a.detach().sin_()
        assert len(context.cloned) == 1
        three = a**2
        a.detach().sin_()
        assert len(context.cloned) == 2
        del one, two
        assert len(context.cloned) == 1
        del three
        assert not context.cloned


def test_an_expanded_tensor_is_cloned_as_small_as_it_is() -> None:
    with allow_mutation_on_saved_tensors() as context:
        b = torch.rand(1, requires_grad=True) * 1
        out = b.expand(1000) ** 2
        b.detach().zero_()
        (clone,) = context.cloned.values()
        assert clone.shape == (1000,) and clone.untyped_storage().nbytes() == 4
        del out


def test_state_does_not_grow() -> None:
    with allow_mutation_on_saved_tensors() as context:
        for _ in range(200):
            x = torch.rand(3, requires_grad=True)
            b = x * 1
            loss = (b**2).sum()
            b.detach().zero_()
            loss.backward()
        del x, b, loss
        gc.collect()
        assert not context.tid_to_weakhandle
        table = context._table
        assert not table._storages and not table._dead and not table._clones


def test_memory_goes_with_the_graph_and_with_the_context() -> None:
    with allow_mutation_on_saved_tensors() as context:
        b = torch.rand(3, requires_grad=True) * 1
        out = b**2
        b.detach().zero_()
        (record,) = context.cloned
    assert record.alias is None and not context.cloned
    del out


# Refusals, errors, threads.


def test_an_empty_part_of_what_is_changed_is_not_changed() -> None:
    x = torch.ones(3, 3, requires_grad=True)
    y = x * 1
    for context in (nullcontext(), Stash(min_bytes=0)):
        with context, allow_mutation_on_saved_tensors():
            nothing = y[:0]
            result = nothing.sin().sum()
            nothing.mul_(0.5)  # raises the version of all of y
            (found,) = torch.autograd.grad(result, x, retain_graph=True)
        assert torch.equal(found, torch.zeros(3, 3))


def test_nesting_is_refused_and_the_outer_one_goes_on() -> None:
    with allow_mutation_on_saved_tensors():
        with pytest.raises(RuntimeError, match="contexts cannot be nested"):
            with allow_mutation_on_saved_tensors():
                pass
        found = gradient(CHANGES["a view that begins elsewhere"])
    assert torch.equal(found, gradient(None))
    assert current(False) is None


def test_an_error_inside_leaves_nothing() -> None:
    with pytest.raises(KeyError), allow_mutation_on_saved_tensors():
        raise KeyError
    assert current(False) is None
    with allow_mutation_on_saved_tensors():
        assert torch.equal(gradient(CHANGES["copy_"]), gradient(None))


def test_an_error_in_an_operator_inside_leaves_it_working() -> None:
    with allow_mutation_on_saved_tensors():
        with pytest.raises(RuntimeError):
            torch.rand(2, 3) @ torch.rand(2, 3)
        assert torch.equal(gradient(CHANGES["copy_"]), gradient(None))


@pytest.mark.parametrize("another", [False, True])
def test_backward_outside_is_an_error(another: bool) -> None:
    with allow_mutation_on_saved_tensors():
        loss = loss_of(torch.rand(3, 4, requires_grad=True), None)
    with ExitStack() as stack:
        if another:
            stack.enter_context(allow_mutation_on_saved_tensors())
        with pytest.raises(
            AssertionError, match="outside of the 'allow_mutation_on_saved_tensors'"
        ):
            loss.backward()
        if another:
            assert torch.equal(gradient(CHANGES["copy_"]), gradient(None))
    assert current(False) is None


def test_a_change_that_cannot_be_seen_is_an_error_not_a_wrong_gradient() -> None:
    x = torch.rand(3, requires_grad=True)
    with allow_mutation_on_saved_tensors():
        b = x * 1
        loss = (b**2).sum()
        thread = threading.Thread(target=b.detach().zero_)
        thread.start()
        thread.join()
        with pytest.raises(InplaceError, match=r"at version 1; expected version 0"):
            loss.backward()
        b = x * 1
        loss = (b**2).sum()
        torch.autograd.graph.increment_version(b.detach())
        with pytest.raises(InplaceError):
            loss.backward()


def test_threads_have_a_context_each() -> None:
    expected, wrong = gradient(None), []
    begun = threading.Barrier(4)

    def run() -> None:
        begun.wait()
        for change in [*CHANGES.values()] * 3:
            with allow_mutation_on_saved_tensors():
                if not torch.equal(gradient(change), expected):
                    wrong.append(change)

    threads = [threading.Thread(target=run) for _ in range(4)]
    with allow_mutation_on_saved_tensors():
        mine = loss_of(
            x := torch.linspace(0.5, 2, 12).view(3, 4).requires_grad_(), CHANGES["copy_"]
        )
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert torch.equal(torch.autograd.grad(mine, x)[0], expected)
    assert not wrong


def test_backward_on_another_thread() -> None:
    x = torch.linspace(0.5, 2, 12).view(3, 4).requires_grad_()
    with allow_mutation_on_saved_tensors():
        loss = loss_of(x, CHANGES["copy_"])
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
    assert torch.equal(x.grad, gradient(None))


def test_a_context_entered_inside_and_left_too_late_is_an_error_and_is_put_right() -> None:
    inner = saved_tensors_hooks(lambda t: t.clone(), lambda t: t)
    with pytest.raises(UsageError, match="exited before 1 context"):
        with allow_mutation_on_saved_tensors():
            inner.__enter__()
            torch.ones(1, requires_grad=True).exp()
    assert current(False) is not None
    inner.__exit__()
    assert current(False) is None
