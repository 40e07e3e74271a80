"""Small programs whose saves are of every kind: shared storages, views, parts, in place, second order."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

_WIDTHS = (16, 48, 64, 96, 144)  # squared, in float32: 1 KiB to 81 KiB
_LARGE = 400  # squared, 640 KB: written from where it lies, not gathered
LARGEST_BYTES = _LARGE * _LARGE * 4
"""Of all storages that a program saves."""


def leaves(seed: int, *, large: bool = True) -> tuple[Tensor, Tensor]:
    """An input and a weight, of a size that depends on the seed."""
    generator = torch.Generator().manual_seed(seed)
    width = _LARGE if large and seed % 5 == 4 else _WIDTHS[seed % len(_WIDTHS)]
    x, weight = (torch.randn(width, width, generator=generator) for _ in range(2))
    return x.requires_grad_(), weight.div_(width**0.5).requires_grad_()


def forward(x: Tensor, weight: Tensor, seed: int) -> Tensor:
    """A graph; what it is made of depends on the seed. No random numbers: threads share torch's."""
    h = x * weight
    for step in range(3 + seed % 4):
        kind = (seed + step) % 7
        if kind == 0:
            h = torch.tanh(h @ weight)
        elif kind == 1:
            q, k, v = (h @ weight).sigmoid().chunk(3, dim=1)
            h = torch.cat([q * v, k.exp() * 0.1, v * k], dim=1) if q.shape == v.shape else h.sin()
        elif kind == 2:
            h = h.t().softmax(-1) * h
        elif kind == 3:
            h = torch.where(h > 0, h, h * 0.3)
        elif kind == 4:
            h = (h * 0.5).cos().mul_(2.0)  # in place, before anything else saves it
        elif kind == 5:
            h = h + checkpoint(torch.tanh, h, use_reentrant=False)
        else:
            h = h + h[: len(h) // 8].exp().sum(0)
    return h


def gradients(loss: Tensor, inputs: Sequence[Tensor], *, retain: bool = False) -> list[Tensor]:
    """Of the sum of squares."""
    return list(torch.autograd.grad(loss.square().sum(), inputs, retain_graph=retain))


def second(loss: Tensor, inputs: Sequence[Tensor]) -> list[Tensor]:
    """First gradients, and the gradients of their sum of squares."""
    first = torch.autograd.grad(loss.square().sum(), inputs, create_graph=True)
    total = sum((each.square().sum() for each in first), torch.zeros(()))
    return [each.detach() for each in first] + list(torch.autograd.grad(total, inputs))


class _Nested(torch.autograd.Function):
    """Its backward runs a backward of its own, ``depth`` times within one another.

    Beyond 60 autograd goes on with a thread of the engine's.
    """

    @staticmethod
    def forward(ctx, x: Tensor, depth: int) -> Tensor:  # type: ignore[no-untyped-def, override]
        ctx.save_for_backward(x)
        ctx.depth = depth
        return x.sin()

    @staticmethod
    def backward(ctx, gradient: Tensor):  # type: ignore[no-untyped-def, override]
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            inner = x.detach().requires_grad_()
            y = (_Nested.apply(inner, ctx.depth - 1) if ctx.depth else inner.sin()) * 1.0
            (found,) = torch.autograd.grad(y, inner, gradient)
        return found, None


def nested(x: Tensor, depth: int = 64) -> Tensor:
    """Needs ``depth`` backwards within one another."""
    result: Tensor = _Nested.apply(x.exp() * 0.1, depth)
    return result
