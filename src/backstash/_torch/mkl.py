"""The first call of each of MKL's vector functions, made by one thread.

PyTorch hands ``sqrt``, ``exp``, ``tanh`` and their like on the CPU to MKL, a share to each of its
threads, and MKL (2024.2, the one in PyTorch's packages) chooses the kernel at the first call. Where
two threads make that call at once, one of them may run a kernel of low accuracy over its whole
share: wrong by some 1e-4 of the value, once in a process, with or without a stash, and nothing is
said (https://github.com/pytorch/pytorch/issues/188792, which is also the source of the cure). An
optimizer's first ``sqrt`` is enough to make two runs of one script differ. One call of each on one
element, by the importing thread, and the choice is made.
"""

import torch

__all__ = ["NAMES", "resolve"]

NAMES = (
    *("abs", "acos", "asin", "atan", "cos", "cosh", "erf", "erfc", "exp", "expm1", "log", "log10"),
    *("log1p", "log2", "sin", "sinh", "sqrt", "tan", "tanh", "trunc"),
)


def resolve() -> None:
    """Call each of the functions on one element: some 0.2 ms, no threads, no random numbers."""
    for dtype in (torch.float32, torch.float64):
        one = torch.full((1,), 0.5, dtype=dtype, device="cpu")
        for name in NAMES:
            getattr(torch, name)(one)
