"""A backward inside of another one: a reentrant checkpoint computes its gradients by one of its own."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

from torch.autograd.function import BackwardCFunction

from .lookup import optional

__all__ = ["outermost_function"]

_APPLY = BackwardCFunction.apply.__code__
_RUN = getattr(optional("torch.autograd.graph._engine_run_backward", None), "__code__", None)


def outermost_function() -> Any:
    """Return the node of the outermost custom function in whose backward another backward runs on this thread.

    ``None`` if there is none. If torch lacks the function that begins a backward, each one counts by itself.
    """
    found, is_inner = None, False
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _RUN:
            is_inner = True
        elif is_inner and frame.f_code is _APPLY:
            found = frame.f_locals.get("self")
        frame = frame.f_back
    return found
