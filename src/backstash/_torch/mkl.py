"""Make the first call of each of MKL's vector functions from a single thread.

On the CPU, PyTorch passes ``sqrt``, ``exp``, ``tanh`` and similar functions to MKL, one share to each of its
threads. MKL (2024.2, as in PyTorch's packages) chooses the kernel at the first call. If two threads make that
call at once, one of them may run a kernel of low accuracy over its whole share. The error is about 1e-4 of the
value, happens once in a process, with or without a stash, and is not reported
(https://github.com/pytorch/pytorch/issues/188792, which is also the source of this remedy). An optimizer's
first ``sqrt`` is enough to make two runs of a script differ. One call of each function on one element, by the
importing thread, makes the choice.

If PyTorch's library exports MKL's functions, they are called directly: PyTorch's operations around them would
take 3 MiB more memory in every process.
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
"""The functions that PyTorch passes to MKL, by PyTorch's names: aten/src/ATen/cpu/vml.h."""
_NAMES_IN_MKL = {"log": "Ln", "erfinv": "ErfInv"}  # others: PyTorch's name, capitalized
_HIGH_ACCURACY_SILENT = 0x2 | 0x140000 | 0x100  # VML_HA | VML_FTZDAZ_OFF | VML_ERRMODE_IGNORE


def resolve() -> None:
    """Call each of the functions on one element. Takes about 0.2 ms, no threads, and no random numbers."""
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
    # The count is valid for MKL's 32-bit and 64-bit integers.
    function(
        ctypes.c_int64(1),
        ctypes.byref(one),
        ctypes.byref(result),
        ctypes.c_int64(_HIGH_ACCURACY_SILENT),
    )


def _library() -> Any:
    """Return PyTorch's library for the CPU; ``None`` if it is not found under its usual name."""
    try:
        return ctypes.CDLL(os.path.join(os.path.dirname(torch.__file__), "lib", "libtorch_cpu.so"))
    except OSError:
        return None
