"""What makes plain PyTorch repeat a double backward on an accelerator."""

from typing import Any

import torch
from torch import Tensor

__all__ = ["number_ahead"]


class _Counts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, count: int) -> Tensor:
        ctx.count = count
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        one = torch.ones((), requires_grad=True)
        with torch.enable_grad():
            for _ in range(ctx.count):
                one * 1  # a node, and a number
        return grad, None


def number_ahead(device: torch.device, count: int) -> None:
    """Let the engine's thread of ``device`` count ``count`` nodes.

    Each thread numbers the nodes it makes from zero, the engine runs those of a higher number first, and a
    backward with ``create_graph`` makes its nodes on the engine's own thread of an accelerator. So the order
    in which a second backward adds things up changes when that thread's numbers pass the program's, and the
    last bits with it: plain PyTorch differs from itself. Ahead once and for long, it does not.
    """
    _Counts.apply(torch.ones((), device=device, requires_grad=True), count).backward()
