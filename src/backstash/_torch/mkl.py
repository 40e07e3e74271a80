"""The first call of each of MKL's vector functions, made by one thread.

PyTorch hands ``sqrt``, ``exp``, ``tanh`` and their like on the CPU to MKL, a share to each of its
threads, and MKL (2024.2, the one in PyTorch's packages) chooses the kernel at the first call. Where
two threads make that call at once, one of them may run a kernel of low accuracy over its whole
share: wrong by some 1e-4 of the value, once in a process, with or without a stash, and nothing is
said (https://github.com/pytorch/pytorch/issues/188792, which is also the source of the cure). An
optimizer's first ``sqrt`` is enough to make two runs of one script differ. One call of each on one
element, by the importing thread, and the choice is made.

MKL is called by itself where PyTorch's library shows its functions: PyTorch's operations around them would
take 3 MiB of memory more in every process.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any

import torch

__all__ = ["NAMES", "resolve"]

NAMES = (
    *("acos", "asin", "atan", "cos", "erf", "erfc", "erfinv", "exp", "log", "log10", "log2", "sin"),
    *("sqrt", "tan", "tanh", "trunc"),
)
"""What PyTorch gives to MKL, by PyTorch's names: aten/src/ATen/cpu/vml.h."""
_NAMES_IN_MKL = {"log": "Ln", "erfinv": "ErfInv"}  # else PyTorch's, with a capital
_HIGH_ACCURACY_SILENT = 0x2 | 0x140000 | 0x100  # VML_HA | VML_FTZDAZ_OFF | VML_ERRMODE_IGNORE


def resolve() -> None:
    """Call each of the functions on one element: some 0.2 ms, no threads, no random numbers."""
    library = _library()
    for dtype, letter in ((torch.float32, "s"), (torch.float64, "d")):
        for name in NAMES:
            function = getattr(library, f"vm{letter}{_NAMES_IN_MKL.get(name, name.title())}", None)
            if function is None:
                getattr(torch, name)(torch.full((1,), 0.5, dtype=dtype, device="cpu"))
            else:
                _call(function, ctypes.c_float if letter == "s" else ctypes.c_double)


def _call(function: Any, kind: Any) -> None:
    one, result = kind(0.5), kind()
    # A count that is right whether MKL's integers have 32 bits or 64.
    function(
        ctypes.c_int64(1),
        ctypes.byref(one),
        ctypes.byref(result),
        ctypes.c_int64(_HIGH_ACCURACY_SILENT),
    )


def _library() -> Any:
    """PyTorch's library for the CPU; ``None`` where it cannot be found by its usual name."""
    try:
        return ctypes.CDLL(os.path.join(os.path.dirname(torch.__file__), "lib", "libtorch_cpu.so"))
    except OSError:
        return None
