"""Custom Functions of every kind that a program may hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.testing._internal.two_tensor import TwoTensor


class Broken(Exception):
    """What a program raises on purpose."""


class Mutates(Function):
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


class Scales(Function):
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


class SavesInputs(Function):
    """The newer style, with ``setup_context``; saves both inputs, one of them twice, and ``None``."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, y: Tensor) -> Tensor:
        return x * y + x

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        x, y = inputs
        ctx.save_for_backward(x, None, y, x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, _, y, again = ctx.saved_tensors
        return grad * (y + 1), (grad * x + 0 * again).sum_to_size(y.shape)


class SavesOutputs(Function):
    """Saves its output, and an output that is not differentiable; drops gradients nobody asked for."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        out, order = x.detach().sort(0)
        ctx.mark_non_differentiable(order)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(out, order)
        return out, order

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, _: Tensor | None) -> Tensor | None:
        out, order = ctx.saved_tensors
        if grad is None:
            return None
        return torch.zeros_like(grad).scatter(0, order, grad) + 0.25 * out.detach()


class Once(Function):
    """Saves an intermediate and changes it until it returns; its backward cannot be differentiated."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        middle = x.detach().tanh()
        ctx.save_for_backward(middle)
        middle.mul_(0.5).add_(1)  # the save happens when forward has returned
        return x * middle

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (middle,) = ctx.saved_tensors
        return grad * middle


class Both(Function):
    """Saves for backward and for forward mode."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.sin()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        (x,) = ctx.saved_tensors  # each look unpacks again
        return grad * x.cos()

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return tangent * x.cos()


def _laid_out(x: Tensor) -> Tensor:
    """A copy with the strides that two copies of one shape share, also where there are no elements."""
    return torch.empty(x.shape, dtype=x.dtype, device=x.device).copy_(x)


class ToTwo(Function):
    """A plain tensor as one of a subclass that is made of two."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return TwoTensor(_laid_out(x), _laid_out(x.detach().cos()))

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Tensor:
        out: Tensor = grad.a + grad.b
        return out


class FromTwo(Function):
    """And back."""

    @staticmethod
    def forward(ctx: Any, two: Any) -> Tensor:
        out: Tensor = two.a + two.b
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return TwoTensor(_laid_out(grad), _laid_out(grad * 0.5))


class ReturnsSaved(Function):
    """Its gradient is the saved tensor itself, which the code that gets it may add to."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        factor = x.detach().cos()
        ctx.save_for_backward(factor)
        return x * factor

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return ctx.saved_tensors[0]


class Fails(Function):
    """Saves what it is given, and then forward or backward raises."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, when: str) -> Tensor:
        ctx.save_for_backward(x, x.detach().exp())
        if when == "forward":
            raise Broken("in forward")
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        first, second = ctx.saved_tensors
        raise Broken(f"in backward {first.shape == second.shape}")


class SeenLate(Function):
    """Changes its input in place, and its version only after ``meanwhile``, as other threads see it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, meanwhile: Callable[[], None]) -> Tensor:
        x.data.mul_(0.5)
        meanwhile()
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * 0.5, None


class Doubles(Function):
    """Backward changes in place what it is given, in plain PyTorch the live tensor; then calls ``notify``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, held: Tensor, notify: Callable[[], None]) -> Tensor:
        ctx.save_for_backward(held)
        ctx.notify = notify
        return x * held

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (held,) = ctx.saved_tensors
        grad = grad * held.mul_(2)
        ctx.notify()
        return grad, None, None
