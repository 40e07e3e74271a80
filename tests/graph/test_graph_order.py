"""``docs/reference/order-of-hooks.md``: each of its numbered sentences is the docstring of a test."""

import gc
import inspect
import re
import sys
import threading
import warnings
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function

from backstash.graph import get_gradient_edge, register_multi_grad_hook, saved_tensors_hooks

PAGE = Path(__file__).resolve().parents[2] / "docs/reference/order-of-hooks.md"


def test_the_page_says_what_the_tests_hold() -> None:
    said = re.findall(r"^\d+\. (.+)$", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    tests = inspect.getmembers(sys.modules[__name__], inspect.isfunction)
    held = [
        " ".join(test.__doc__.replace("``", "`").split())
        for name, test in tests
        if name.startswith("test_s")
    ]
    assert sorted(said) == sorted(held)


def leaf(*values: float) -> Tensor:
    return torch.tensor(values or (1.0, 2.0), requires_grad=True)


def test_s01() -> None:
    """A tensor's hooks run first, in the order in which they were registered; each gets the gradient that
    the one before it returned."""
    log: list[Any] = []
    x = leaf()
    y = x * 2
    y.grad_fn.register_prehook(lambda grads: log.append("node"))
    y.register_hook(lambda grad: log.append(("first", grad.tolist())) or grad * 10)
    y.register_hook(lambda grad: log.append(("second", grad.tolist())))
    y.register_hook(lambda grad: log.append(("third", grad.tolist())))
    y.sum().backward()
    assert log == [("first", [1, 1]), ("second", [10, 10]), ("third", [10, 10]), "node"]
    assert x.grad.tolist() == [20, 20]


def test_s02() -> None:
    """Then the pre-hooks of the tensor's node run, with one gradient for each of the node's outputs; what
    they return is what the node gets."""
    got: list[Any] = []
    x = leaf()
    first, second = (x * 1).unbind()
    node = first.grad_fn
    node.register_prehook(lambda grads: got.append(len(grads)) or (grads[0] * 3, grads[1] * 5))
    (first + second).backward()
    assert got == [2] and x.grad.tolist() == [3, 5]


def test_s03() -> None:
    """A tensor that retains its gradient has it after its own hooks and before the node's pre-hooks, with
    what the hooks made of it."""
    log: list[Any] = []
    y = leaf() * 2
    y.retain_grad()
    y.register_hook(lambda grad: log.append(y.grad) or grad * 10)
    y.grad_fn.register_prehook(lambda grads: log.append(y.grad.tolist()))
    y.sum().backward()
    assert log == [None, [10, 10]]


def test_s04() -> None:
    """Then the saved tensors are unpacked, once for each use, and the node computes."""
    log: list[str] = []

    class Square(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            log.append("compute")
            return grad * 2 * ctx.saved_tensors[0] + 0 * ctx.saved_tensors[0]

    with saved_tensors_hooks(lambda t: t.clone(), lambda t: log.append("unpack") or t):
        y, z = Square.apply(leaf()), leaf().exp()
    for output in (y, z):
        output.grad_fn.register_prehook(lambda grads: log.append("pre"))
        output.grad_fn.register_hook(lambda *_: log.append("post"))
    y.sum().backward()
    assert log == ["pre", "compute", "unpack", "unpack", "post"]
    log.clear()
    z.sum().backward()
    assert log == ["pre", "unpack", "post"]


def test_s05() -> None:
    """Then the node's post-hooks run, with what it computed and what it was given; what they return takes
    the place of what it computed."""
    got: list[Any] = []
    x = leaf()
    y = x * 3
    y.grad_fn.register_hook(
        lambda grads, given: (
            got.append((grads[0].tolist(), given[0].tolist())) or (grads[0] * 2, None)
        )
    )
    y.sum().backward()
    assert got == [([3, 3], [1, 1])] and x.grad.tolist() == [6, 6]


@pytest.mark.parametrize("retain", [False, True])
def test_s06(retain: bool) -> None:
    """The node's saved tensors are freed before the next node runs, unless the graph is retained."""

    class Box:
        pass

    boxes: list[Any] = []

    def pack(tensor: Tensor) -> Any:
        box = Box()
        box.tensor = tensor.detach().clone()
        boxes.append(weakref.ref(box))
        return box

    log: list[bool] = []
    with saved_tensors_hooks(pack, lambda box: box.tensor):
        y = leaf().exp()
        z = y.exp()
    y.register_hook(lambda grad: log.append(boxes[1]() is None))
    z.sum().backward(retain_graph=retain)
    assert log == [not retain]


def test_s07() -> None:
    """A leaf's tensor hooks run before its gradient is accumulated, its post-accumulate hooks after it,
    and then the post-hooks of its node."""
    log: list[Any] = []
    x = leaf()
    x.register_post_accumulate_grad_hook(lambda p: log.append(("accumulated", p.grad.tolist())))
    x.register_hook(lambda grad: log.append(("hook", x.grad)) or grad * 2)
    edge = get_gradient_edge(x)
    edge.node.register_prehook(lambda grads: log.append(("node pre", x.grad)))
    edge.node.register_hook(lambda *_: log.append(("node post", x.grad.tolist())))
    x.sum().backward()
    assert log == [
        ("hook", None),
        ("node pre", None),
        ("accumulated", [2, 2]),
        ("node post", [2, 2]),
    ]


def test_s08() -> None:
    """A tensor's hook fires once for each backward that computes the tensor's gradient, after the parts
    from all its uses were added up."""
    got: list[Any] = []
    x = leaf()
    y = x * 1
    for tensor in (x, y):
        tensor.register_hook(lambda grad: got.append(grad.tolist()))
    loss = (y * 2 + y * 3).sum() + x.sum()
    for _ in range(2):
        loss.backward(retain_graph=True)
    assert got == [[5, 5], [6, 6]] * 2


def test_s09() -> None:
    """Under ``autograd.grad``, the hooks of an input fire, but its node does not run, so its
    pre- and post-hooks do not fire."""
    log: list[str] = []
    y = leaf() * 2
    y.register_hook(lambda grad: log.append("hook"))
    y.grad_fn.register_prehook(lambda grads: log.append("pre"))
    y.grad_fn.register_hook(lambda *_: log.append("post"))
    torch.autograd.grad(y.sum(), y)
    assert log == ["hook"]


def test_s10() -> None:
    """``autograd.grad`` returns what an input's hooks made of its gradient, changes no leaf's ``.grad``,
    and fires no post-accumulate hook."""
    log: list[str] = []
    x, other = leaf(), leaf()
    x.register_hook(lambda grad: grad * 10)
    for tensor in (x, other):
        tensor.register_post_accumulate_grad_hook(lambda p: log.append("accumulated"))
    (found,) = torch.autograd.grad((x + other).sum(), x)
    assert found.tolist() == [10, 10] and x.grad is None and other.grad is None and log == []


def test_s11() -> None:
    """Under ``backward(inputs=...)``, only the leaves that are named have their hooks fired and their
    gradients accumulated."""
    log: list[str] = []
    x, other = leaf(), leaf()
    for name, tensor in (("x", x), ("other", other)):
        tensor.register_hook(lambda grad, name=name: log.append(name))
        tensor.register_post_accumulate_grad_hook(lambda p, name=name: log.append(name + "+"))
    (x * other).sum().backward(inputs=[x])
    assert log == ["x", "x+"] and other.grad is None


def test_s12() -> None:
    """A tensor that retains its gradient gets it also from ``autograd.grad``, and a second backward adds
    to it."""
    y = leaf() * 2
    y.retain_grad()
    torch.autograd.grad(y.sum(), y, retain_graph=True)
    assert y.grad.tolist() == [1, 1]
    y.sum().backward()
    assert y.grad.tolist() == [2, 2]


def test_s13() -> None:
    """A post-accumulate hook can be registered on a leaf only, and a tensor hook only on a tensor that
    requires a gradient."""
    with pytest.raises(RuntimeError, match="leaf"):
        (leaf() * 2).register_post_accumulate_grad_hook(print)
    with pytest.raises(RuntimeError, match="doesn't require gradient"):
        torch.ones(1).register_hook(print)


def test_s14() -> None:
    """A hook that was registered before an in-place operation sees the gradient of the tensor as it was;
    one registered after it sees the gradient of the tensor as it is."""
    got: list[Any] = []
    y = leaf() * 1
    y.register_hook(lambda grad: got.append(("before", grad.tolist())))
    y.mul_(10)
    y.register_hook(lambda grad: got.append(("after", grad.tolist())))
    y.sum().backward()
    assert got == [("after", [1, 1]), ("before", [10, 10])]


def test_s15() -> None:
    """A node that no gradient reaches does not run, and none of its hooks fires."""
    log: list[str] = []
    x = leaf()
    used, unused = x * 2, x * 3
    for tensor in (used, unused):
        name = "used" if tensor is used else "unused"
        tensor.register_hook(lambda grad, name=name: log.append(name))
        tensor.grad_fn.register_prehook(lambda grads, name=name: log.append(name))
        tensor.grad_fn.register_hook(lambda *_, name=name: log.append(name))
    used.sum().backward()
    assert log == ["used"] * 3


def test_s16() -> None:
    """If a hook raises, the backward ends with that exception, and no further node runs."""

    def fail(grad: Tensor) -> None:
        raise KeyError("mine")

    log: list[str] = []
    x = leaf()
    y = x * 2
    y.register_hook(fail)
    x.register_hook(lambda grad: log.append("x"))
    with pytest.raises(KeyError, match="mine"):
        y.sum().backward()
    assert log == [] and x.grad is None


def test_s17() -> None:
    """Hooks run with gradients disabled, unless the backward is run with ``create_graph=True``."""
    modes: list[bool] = []
    x = leaf()
    y = x * x
    record: Any = lambda *_: modes.append(torch.is_grad_enabled())  # noqa: E731
    y.register_hook(record)
    y.grad_fn.register_prehook(record)
    y.grad_fn.register_hook(record)
    torch.autograd.grad(y.sum(), x, retain_graph=True)
    assert modes == [False] * 3
    torch.autograd.grad(y.sum(), x, create_graph=True)
    assert modes[3:] == [True] * 3


def test_s18() -> None:
    """A multi-grad hook runs as a tensor hook of the tensor whose gradient completes it, before that
    tensor's node."""
    log: list[str] = []
    x = leaf()
    y, z = x * 2, x * 3
    y.register_hook(lambda grad: log.append("y"))
    register_multi_grad_hook([y, z], lambda grads: log.append("both"))
    y.register_hook(lambda grad: log.append("y again"))
    y.grad_fn.register_prehook(lambda grads: log.append("node of y"))
    (y + z).sum().backward()
    assert log == ["y", "both", "y again", "node of y"]


def test_s19() -> None:
    """A module's forward pre-hooks run before its forward and its forward hooks after it, and what they
    return replaces the inputs or the output."""
    module = nn.ReLU()
    module.register_forward_pre_hook(lambda module, inputs: (inputs[0] - 1,))
    module.register_forward_hook(lambda module, inputs, output: output * 10 + inputs[0])
    assert module(torch.tensor([0.0, 3.0])).tolist() == [-1, 22]


def test_s20() -> None:
    """Hooks for all modules run before a module's own."""
    log: list[str] = []
    module = nn.Identity()
    module.register_forward_hook(lambda *_: log.append("own"))
    with_all = nn.modules.module.register_module_forward_hook(lambda *_: log.append("all"))
    module(torch.ones(1))
    with_all.remove()
    assert log == ["all", "own"]


def test_s21() -> None:
    """A full backward pre-hook runs when the gradients of the module's outputs are there, before the
    gradients inside the module are computed."""
    log: list[Any] = []
    module = nn.Linear(2, 2)
    module.weight.register_hook(lambda grad: log.append("weight"))
    module.register_full_backward_pre_hook(lambda module, grads: log.append(grads[0].tolist()))
    module(leaf()).sum().backward()
    assert log == [[1, 1], "weight"]


def test_s22() -> None:
    """A full backward hook runs when the gradients of the module's inputs are there, and what it returns
    replaces them."""
    x = leaf()
    module = nn.Linear(2, 2)
    module.register_full_backward_hook(
        lambda module, grads, given: (torch.full_like(grads[0], 42),)
    )
    module(x).sum().backward()
    assert x.grad.tolist() == [42, 42]


def test_s23() -> None:
    """A full backward hook of a module whose output is a ``dict`` never fires; a forward hook that
    registers tensor hooks does."""

    class Gives(nn.Module):
        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"out": x * 2}

    log: list[str] = []
    module = Gives()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that a dict is not covered
        handle = module.register_full_backward_hook(lambda *_: log.append("full"))
        module(leaf())["out"].sum().backward()
        handle.remove()
    assert log == []
    module.register_forward_hook(
        lambda module, inputs, output: (
            output["out"].register_hook(lambda grad: log.append("tensor")) and None
        )
    )
    module(leaf())["out"].sum().backward()
    assert log == ["tensor"]


def test_s24() -> None:
    """A pack hook runs in forward, once for each save: a tensor that an operation saves twice is packed
    twice."""
    packed: list[int] = []
    x = leaf()
    with saved_tensors_hooks(lambda t: packed.append(id(t)) or t.clone(), lambda t: t):
        x * x
    assert packed == [id(x)] * 2


def test_s25() -> None:
    """A pack hook runs with gradients disabled, and an unpack hook of a backward with
    ``create_graph=True`` with gradients enabled."""
    modes: list[bool] = []

    def record(tensor: Tensor) -> Tensor:
        modes.append(torch.is_grad_enabled())
        return tensor.detach().clone()

    x = leaf()
    with saved_tensors_hooks(record, record):
        y = x.exp()
    torch.autograd.grad(y.sum(), x, retain_graph=True)
    torch.autograd.grad(y.sum(), x, create_graph=True)
    assert modes == [False, False, True]


def test_s26() -> None:
    """An unpack hook runs at each look at a saved tensor, so what it reads must not be deleted by it."""
    unpacked: list[int] = []
    with saved_tensors_hooks(lambda t: t.clone(), lambda t: unpacked.append(1) or t):
        y = leaf().exp()
    for _ in range(3):
        assert torch.equal(y.grad_fn._saved_result, y)
    assert len(unpacked) == 3


def test_s27() -> None:
    """Only the innermost pair of hooks is used, unless it was made with ``compose=True``."""
    log: list[str] = []

    def named(name: str, compose: bool = False) -> saved_tensors_hooks:
        return saved_tensors_hooks(
            lambda t: log.append(name) or t.clone(), lambda t: t, compose=compose
        )

    with named("outer"), named("inner"):
        leaf().exp()
    with named("outer"), named("inner", compose=True):
        leaf().exp()
    assert log == ["inner", "inner", "outer"]


def test_s28() -> None:
    """Hooks are of the thread that entered them: another thread has none."""
    packed: list[int] = []
    with saved_tensors_hooks(lambda t: packed.append(1) or t.clone(), lambda t: t):
        thread = threading.Thread(target=lambda: leaf().exp())
        thread.start()
        thread.join()
        assert packed == []
        leaf().exp()
    assert packed == [1]


def test_s29() -> None:
    """Hooks of saved tensors that are active while a backward with ``create_graph=True`` runs also take
    what that backward saves."""
    packed: list[int] = []
    x = leaf()
    y = x**3
    with saved_tensors_hooks(lambda t: packed.append(1) or t.clone(), lambda t: t):
        (grad,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    assert packed
    (second,) = torch.autograd.grad(grad.sum(), x)
    assert second.tolist() == [6, 12]


def test_s30() -> None:
    """A pack hook is not called under ``torch.no_grad()``, or for what an operation does not need."""
    packed: list[int] = []
    x = leaf()
    with saved_tensors_hooks(lambda t: packed.append(1) or t.clone(), lambda t: t):
        with torch.no_grad():
            x.exp()
        x + x
        x.detach().exp()
    gc.collect()
    assert packed == []
