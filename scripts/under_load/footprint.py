"""How much memory a stash's own bookkeeping takes: every Python object that it reaches, counted once."""

from __future__ import annotations

import gc
import sys
import threading
import types
from typing import Any

import torch

# What is everybody's, or nobody's bookkeeping: not followed.
_ELSEWHERE = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.CodeType)
_ELSEWHERE += (
    types.FrameType,
    threading.Thread,
    torch.Tensor,
    torch.Size,
    torch.dtype,
    torch.device,
)


def footprint(root: Any) -> tuple[int, int]:
    """The objects that ``root`` reaches and their bytes, tensors' memory left out.

    Weak references count themselves and not what they refer to: that is owned by somebody else.
    """
    seen: set[int] = set()
    waiting, count, nbytes = [root], 0, 0
    while waiting:
        each = waiting.pop()
        if id(each) in seen or isinstance(each, _ELSEWHERE):
            continue
        seen.add(id(each))
        count += 1
        nbytes += sys.getsizeof(each)
        waiting.extend(gc.get_referents(each))
    return count, nbytes
