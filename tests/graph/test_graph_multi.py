"""``register_multi_grad_hook``: when it calls, with what, and that nothing is left behind."""

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import Function

from backstash.graph import register_multi_grad_hook

Build = Callable[[Tensor], tuple[list[Tensor], Tensor]]


def leaf() -> Tensor:
    return torch.rand(3, requires_grad=True)


class Calls(list[list[bool]]):
    """Records which gradients were there at each call."""

    def __call__(self, grads: Any) -> None:
        self.append([grad is not None for grad in grads])


class Fails(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise ValueError("backward failed")


def test_all_is_called_once_per_backward_with_what_it_computes() -> None:
    a, b, calls = leaf(), leaf(), Calls()
    c, d = a * b, a + b
    register_multi_grad_hook((a, b, c, d), calls)
    c.sum().backward(retain_graph=True)
    c.sum().backward(inputs=(a,), retain_graph=True)
    (c + d).sum().backward(retain_graph=True)
    d.sum().backward(inputs=(b, c))
    assert calls == [
        [True, True, True, False],
        [True, False, True, False],
        [True, True, True, True],
        [False, True, False, True],
    ]


def test_the_gradients_are_the_right_ones() -> None:
    a, got = leaf(), []
    b = a * 2
    register_multi_grad_hook([b, a], got.extend)
    (b * 3).sum().backward()
    assert torch.equal(got[0], torch.full((3,), 3.0)) and torch.equal(got[1], torch.full((3,), 6.0))


@pytest.mark.parametrize("dropped", [False, True])
def test_it_is_called_as_soon_as_all_are_there(dropped: bool) -> None:
    order: list[str] = []
    x = leaf()
    unused = x * 5
    a = x * 1
    a.register_hook(lambda g: order.append("before the group"))
    b, c = a.exp(), a.sin()
    b.register_hook(lambda g: order.append("b"))
    c.register_hook(lambda g: order.append("c"))
    register_multi_grad_hook((b, c, unused), lambda grads: order.append("both"))
    loss = (b * c).sum()
    if dropped:
        del b, c, unused
    loss.backward()
    assert order == ["c", "b", "both", "before the group"]


def test_tensors_that_need_no_gradient_are_ignored() -> None:
    a, calls = leaf(), Calls()
    with register_multi_grad_hook([torch.ones(1), a, torch.ones(1)], calls):
        (a * 2).sum().backward()
    assert calls == [[False, True, False]]
    with register_multi_grad_hook([torch.ones(1)], calls), register_multi_grad_hook([], calls):
        (a * 2).sum().backward()
    assert len(calls) == 1


@pytest.mark.parametrize(
    "inputs, found", [((0, 1), [True, True]), ((0,), [True, False]), ((1,), [False, True])]
)
def test_leaves_given_to_grad(inputs: tuple[int, ...], found: list[bool]) -> None:
    leaves, calls = [leaf(), leaf()], Calls()
    register_multi_grad_hook(leaves, calls)
    loss = (leaves[0] * leaves[1]).sum()
    torch.autograd.grad(loss, [leaves[i] for i in inputs])
    assert calls == [found]


def test_tensors_that_were_dropped_still_count() -> None:
    x, calls = leaf(), Calls()
    a = x * 2
    b, unused = a.exp(), a.sin()
    register_multi_grad_hook([a, unused, b], calls)
    loss = b.sum()
    del a, b, unused
    loss.backward()
    assert calls == [[True, False, True]]


def test_a_graph_that_another_thread_went_on_with() -> None:
    """Each thread numbers its nodes for itself, so the numbers do not give the order."""
    calls = Calls()
    for _ in range(100):
        late = leaf() * 1
    made: list[Tensor] = []
    thread = threading.Thread(target=lambda late: made.append(late.exp()), args=(late,))
    thread.start()
    thread.join()
    early = made.pop()
    register_multi_grad_hook([late, early], calls)
    loss = early.sum()
    assert late.grad_fn._sequence_nr() > early.grad_fn._sequence_nr()
    del late, early, thread
    loss.backward()
    assert calls == [[True, True]]


def test_outputs_of_one_node_of_which_one_is_not_used() -> None:
    calls = Calls()
    first, second = (leaf()[:2] * 1).split(1)
    register_multi_grad_hook([first, second], calls)
    first.sum().backward()
    assert calls == [[True, False]]


def test_an_undefined_gradient_does_not_block() -> None:
    class Nothing(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> None:
            return None

    a, b, calls = leaf() * 1, leaf() * 1, Calls()
    register_multi_grad_hook([a, b], calls)
    (Nothing.apply(a) + b).sum().backward()
    assert calls == [[False, True]]


def test_any_is_called_once_with_the_first() -> None:
    got: list[Tensor] = []
    a = leaf()
    b = a * 2
    with register_multi_grad_hook([a, b, torch.ones(1)], got.append, mode="any"):
        for _ in range(2):
            (b * 3).sum().backward(retain_graph=True)
    (b * 3).sum().backward()
    assert len(got) == 2 and all(torch.equal(grad, torch.full((3,), 3.0)) for grad in got)


@pytest.mark.parametrize("mode", ["all", "any"])
def test_a_nested_backward_counts_for_itself(mode: Any) -> None:
    inner_leaf, calls = leaf(), []
    inner = inner_leaf * 2

    class Reenters(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            with torch.enable_grad():
                (inner * inner_leaf).sum().backward(retain_graph=True)
            return grad

    outer = leaf()
    register_multi_grad_hook([inner, inner_leaf], lambda g: calls.append(1), mode=mode)
    (Reenters.apply(outer * 1) + inner).sum().backward()
    assert len(calls) == 2


@pytest.mark.parametrize(
    "mode, fails", [("all", False), ("all", True), ("any", False), ("any", True)]
)
def test_concurrent_backwards_count_for_themselves(mode: Any, fails: bool) -> None:
    a, b, calls, lock = leaf(), leaf(), [], threading.Lock()
    handle = register_multi_grad_hook((a, b), lambda g: calls.append(1), mode=mode)
    c = Fails.apply(a) * b if fails else a * b
    begun = threading.Barrier(6)

    def run() -> None:
        begun.wait()
        for index in range(20):
            loss = c if index % 2 else (a * b)
            try:
                loss.sum().backward(retain_graph=True)
            except ValueError:
                with lock:
                    failed.append(1)

    failed: list[int] = []
    threads = [threading.Thread(target=run) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    handle.remove()
    assert len(failed) == (60 if fails else 0)
    if mode == "all":
        assert len(calls) == 120 - len(failed)  # in a failed one, a's gradient never came
    else:
        assert 120 - len(failed) <= len(calls) <= 120


def chain(a: Tensor) -> tuple[list[Tensor], Tensor]:
    b = a * 2
    c = b.exp()
    return [b, c], (b + c).sum()


def siblings(a: Tensor) -> tuple[list[Tensor], Tensor]:
    b, c = a * 2, a.exp()
    return [b, c], (b + c).sum()


def mixed(a: Tensor) -> tuple[list[Tensor], Tensor]:
    b = a * 2
    c = torch.utils.checkpoint.checkpoint(torch.exp, b, use_reentrant=True)
    return [c, a, b], (b * c).sum()


def failing(a: Tensor) -> tuple[list[Tensor], Tensor]:
    b = Fails.apply(a * 2)
    return [b, a], (b * 2).sum()


@pytest.mark.parametrize("mode", ["all", "any"])
@pytest.mark.parametrize("runs", [True, False])
@pytest.mark.parametrize("build", [chain, siblings, mixed, failing, lambda a: ([a], a.sum())])
def test_hook_and_graph_are_freed_without_remove(build: Build, runs: bool, mode: Any) -> None:
    marks = []
    for _ in range(20):
        hook = Calls()
        marks.append(weakref.ref(hook))
        a = leaf()
        tensors, loss = build(a)
        register_multi_grad_hook(tensors, lambda g, hook=hook: None, mode=mode)
        if runs:
            try:
                loss.backward()
            except ValueError:
                pass
        del a, tensors, loss, hook
    gc.collect()
    assert not any(mark() is not None for mark in marks)


@pytest.mark.parametrize("mode", ["all", "any"])
def test_thousands_of_backwards_leave_nothing_also_when_they_raise(mode: Any) -> None:
    a, b = leaf(), leaf()
    grads: list[weakref.ref[Tensor]] = []
    c = Fails.apply(a) * b
    hooks = []
    b.register_hook(lambda g: grads.append(weakref.ref(g)))
    with register_multi_grad_hook((a, b), lambda g: None, mode=mode):
        hooks += list(b._backward_hooks.values())
        for index in range(2000):
            try:
                (c if index % 2 else a * b).sum().backward(retain_graph=True)
            except ValueError:
                pass
        assert len(hooks[-1].group.running) == 0
    assert sum(grad() is not None for grad in grads) <= 1


def test_what_the_hook_raises_comes_out_of_backward_and_state_is_intact() -> None:
    def fail(grads: Any) -> None:
        raise KeyError("mine")

    a, calls = leaf(), Calls()
    with register_multi_grad_hook([a], fail), pytest.raises(KeyError, match="mine"):
        a.sum().backward()
    with register_multi_grad_hook([a], calls):
        a.sum().backward()
    assert calls == [[True]]


def test_the_handle_removes_its_own_and_may_do_so_twice() -> None:
    a, calls, others = leaf(), Calls(), Calls()
    handle = register_multi_grad_hook([a], calls)
    register_multi_grad_hook([a], others)
    handle.remove()
    handle.remove()
    a.sum().backward()
    assert not calls and others == [[True]]


def test_another_mode_is_refused() -> None:
    with pytest.raises(ValueError, match=r"one of \('all', 'any'\) but got each"):
        register_multi_grad_hook([leaf()], print, mode="each")  # type: ignore[arg-type]
