"""A small language of autograd programs, and what plain PyTorch says of each.

A program is a list of steps ``(operation, i, j)``; ``i`` and ``j`` pick operands among the values so far,
the newest first. Two references judge a run under a stash: plain PyTorch, which is equal to the bit or
raises; and, where it raises because of a change in place, the same program with every saved tensor cloned,
which says what the gradient would be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

SIDE = 16
Step = tuple[str, int, int]


class Mutates(torch.autograd.Function):
    """Backward changes in place what it is given: a tensor of its own, since plain PyTorch gives no copy."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        own = x.detach() * 2
        ctx.save_for_backward(own, own[..., :1])
        return x * own

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        own, part = ctx.saved_tensors
        part = part + 1  # before, since in plain PyTorch it is the same memory
        own.mul_(2)
        return grad * own + part


class Scales(torch.autograd.Function):
    """In place, and says so; saves its input once it is changed, and a view of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x.mul_(0.5)
        ctx.mark_dirty(x)
        ctx.save_for_backward(x, x.detach()[..., :3])
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        x, part = ctx.saved_tensors
        return grad * 0.5 + 0.0 * x.sum() * part.sum()


def _pair(operation: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    def run(x: Tensor, y: Tensor) -> Tensor:
        return operation(x, y if y.shape == x.shape else y.mean())

    return run


def _no_grad(operation: Callable[[Tensor, Tensor], Any]) -> Callable[[Tensor, Tensor], None]:
    def run(x: Tensor, y: Tensor) -> None:
        with torch.no_grad():
            operation(x, y)

    return run


def _rows(x: Tensor) -> Tensor:
    return x[: max(1, len(x) // 3)]


PURE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sin": lambda x, y: x.sin(),
    "exp": lambda x, y: x.tanh().exp(),
    "tanh": lambda x, y: x.tanh(),
    "relu": lambda x, y: x.relu(),
    "square": lambda x, y: x * x,
    "mul": _pair(torch.mul),
    "add": _pair(torch.add),
    "where": lambda x, y: torch.where(x > 0, x, x.sin()),
    "matmul": lambda x, y: x.reshape(len(x), -1) @ x.reshape(len(x), -1).t() / x.numel(),
    "softmax": lambda x, y: torch.softmax(x, -1),
    "gather": lambda x, y: x.gather(0, x.detach().argsort(0)),
    "own": lambda x, y: Mutates.apply(x),
    "clone": lambda x, y: x.clone(),
}
VIEWS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "t": lambda x, y: x.transpose(0, -1),
    "flat": lambda x, y: x.view(-1),
    "rows": lambda x, y: _rows(x),
    "first rows": lambda x, y: x[:2],
    "last rows": lambda x, y: x[-2:],
    "column": lambda x, y: x[..., 1:3],
    "corner": lambda x, y: x[-2:, ..., -2:],
    "expand": lambda x, y: x[..., :1].expand(*x.shape[:-1], 5),
    "expand all": lambda x, y: x.expand(2, *x.shape),
    "unfold": lambda x, y: x.unfold(0, 2, 1),
    "strided": lambda x, y: x.as_strided((3, 4), (2, 1)),
    "chunk": lambda x, y: x.chunk(3, -1)[-1],
    "detach": lambda x, y: x.detach(),
    "integers": lambda x, y: x.detach().view(torch.int64) % 7 * 1.0,
}
CHANGES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "mul_": lambda x, y: x.mul_(0.5),
    "add_": lambda x, y: x.add_(y if y.shape == x.shape else 1.0),
    "sigmoid_": lambda x, y: x.sigmoid_(),
    "zero a row": lambda x, y: x[0].zero_(),
    "set a column": lambda x, y: x.__setitem__((..., 0), 0.25),
    "change detached": lambda x, y: x.detach().add_(0.125),
    "change quietly": _no_grad(lambda x, y: x.mul_(0.75)),
    "copy quietly": _no_grad(lambda x, y: x.copy_(x.flip(0))),
    "scale": lambda x, y: Scales.apply(x),
}
USES = ("backward", "backward, kept", "of two", "differentiate", "look")
LIFE = ("drop", "land", "hold", "let go", "leave and enter")
OPERATIONS = (*PURE, *VIEWS, *CHANGES, *USES, *LIFE)


def _look(x: Tensor) -> list[Tensor | None]:
    node = x.grad_fn
    if "_saved_result" not in dir(node):
        return []
    return [node._saved_result.detach().clone()]


class Run:
    """One run of a program. ``gate`` is told "hold", "let go" and "land"; ``scope`` makes the hook context."""

    def __init__(
        self, scope: Callable[[], AbstractContextManager[Any]], gate: Callable[[str], None]
    ) -> None:
        self.scope, self.gate = scope, gate
        generator = torch.Generator().manual_seed(0)
        self.leaves = [
            torch.randn(SIDE, SIDE, dtype=torch.float64, generator=generator).requires_grad_()
            for _ in range(2)
        ]
        self.values: list[Tensor] = []
        self.results: list[list[Tensor | None] | str] = []

    def run(self, steps: Iterable[Step]) -> list[list[Tensor | None] | str]:
        """What each backward gave: gradients, or ``"changed"``, after which nothing can be compared."""
        context = self.scope()
        context.__enter__()
        try:
            self.values = [self.leaves[0] * 1, self.leaves[1] * 2]
            for step in steps:
                if step[0] == "leave and enter":
                    context.__exit__(None, None, None)
                    context = self.scope()
                    context.__enter__()
                elif not self.step(*step):
                    return self.results
        finally:
            context.__exit__(None, None, None)
        for loss in list(self.values):
            if not self.differentiate(loss, retain_graph=True):
                break
        return self.results

    def step(self, name: str, i: int, j: int) -> bool:
        x, y = (self.values[-1 - k % len(self.values)] for k in (i, j))
        if name in USES:
            return self.use(name, x, y)
        if name == "drop":
            if len(self.values) > 2:
                del self.values[-1 - i % len(self.values)]
        elif name in LIFE:
            self.gate(name)
        else:
            self.compute(name, x, y)
        return True

    def compute(self, name: str, x: Tensor, y: Tensor) -> None:
        operation = {**PURE, **VIEWS, **CHANGES}[name]
        try:
            out = operation(x, y)
        except (RuntimeError, IndexError, ValueError) as error:
            self.results.append(type(error).__name__)  # illegal: in every run alike
            return
        if name not in CHANGES and 0 < out.numel() <= 4096:
            self.values.append(out)

    def use(self, name: str, x: Tensor, y: Tensor) -> bool:
        if name == "look":
            return self.attempt(lambda: _look(x))
        if name == "of two":
            self.compute("add", x, y)
            return self.differentiate(self.values[-1], retain_graph=True)
        if name == "differentiate":
            return self.differentiate(x, create_graph=True)
        return self.differentiate(x, retain_graph=name != "backward")

    def differentiate(self, loss: Tensor, **options: bool) -> bool:
        if not loss.requires_grad:
            return True

        def grads() -> list[Tensor | None]:
            found = torch.autograd.grad(loss.sum(), self.leaves, allow_unused=True, **options)
            self.values.extend(g for g in found if g is not None and g.requires_grad)
            return [None if g is None else g.detach().clone() for g in found]

        return self.attempt(grads)

    def attempt(self, grads: Callable[[], list[Tensor | None]]) -> bool:
        try:
            self.results.append(grads())
        except RuntimeError as error:
            text = str(error)
            if "modified by an inplace operation" in text or "has been modified inplace" in text:
                self.results.append("changed")
                return False
            self.results.append(text.split(":")[0][:60])
            return "second time" not in text  # how much was freed is the engine's affair
        return True
