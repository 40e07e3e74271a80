"""Recognize ``torch.utils.checkpoint``: what it saves, frees, caches and recomputes.

It has no calls for this. It is recognized by the names of its functions on the call stack, of its dispatch
mode, and of the objects that its hooks refer to. All exist in torch 2.11 to 2.15. If one is missing, code
inside a checkpoint looks like code outside.
"""

from __future__ import annotations

from types import FrameType
from typing import Any

import torch.utils.checkpoint

from .dispatch import dispatch_modes

__all__ = [
    "CHECKPOINT_MODULE",
    "checkpoint_that_saves",
    "frame_behind",
    "is_caching",
    "is_of_checkpoint",
    "is_recomputing",
    "notes_of",
]

CHECKPOINT_MODULE = torch.utils.checkpoint.__name__
"""The module that defines the hooks and objects of a checkpoint."""
_CACHING = "_CachingTorchDispatchMode"
_NOT_REENTRANT = "_checkpoint_without_reentrant_generator"
_AGAIN = ("backward", "unpack_hook")  # of the reentrant and the non-reentrant kind
_BETWEEN = (__name__.partition(".")[0] + ".", "torch.autograd.function")


def is_caching() -> bool:
    """Return whether a selective checkpoint is caching outputs, which no hook sees."""
    return any(type(mode).__name__ == _CACHING for mode in dispatch_modes())


def is_of_checkpoint(hook: Any) -> bool:
    """Return whether a pack hook belongs to a non-reentrant checkpoint."""
    return getattr(hook, "__module__", "") == CHECKPOINT_MODULE


def checkpoint_that_saves(frame: FrameType | None) -> str:
    """Return the kind of checkpoint that calls, through this package and ``Function.apply`` only, or ``""``."""
    kind = ""
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name == CHECKPOINT_MODULE:
            if frame.f_code.co_name == _NOT_REENTRANT:
                return "checkpoint"
            kind = "reentrant checkpoint"
        elif kind or not name.startswith(_BETWEEN):
            break
        frame = frame.f_back
    return kind


def is_recomputing(frame: FrameType | None) -> bool:
    """Return whether, in a frame above ``frame``, a checkpoint runs its function again within backward."""
    while frame is not None:
        again = frame.f_code.co_name in _AGAIN
        if again and frame.f_globals.get("__name__") == CHECKPOINT_MODULE:
            return True
        frame = frame.f_back
    return False


def frame_behind(unpack_hook: Any) -> Any:
    """Return a checkpoint's record of all tensors that it freed, given an unpack hook of it, or ``None``."""
    for cell in getattr(unpack_hook, "__closure__", None) or ():
        frame = cell.cell_contents
        if isinstance(getattr(frame, "weak_holders", None), list) and isinstance(
            getattr(frame, "x_metadatas", None), list
        ):
            return frame
    return None


def notes_of(frame: Any) -> dict[int, Any]:
    """Return the record of each tensor, by the ``id`` of the object that autograd holds in its place."""
    pairs = zip(frame.weak_holders, frame.x_metadatas, strict=False)
    return {id(weak()): note for weak, note in pairs}
