"""Replace the function through which all of torch's norm clipping goes.

Torch has no hook for clipping. The function exists in torch 2.11 to 2.15; if it is missing, there is nothing
to replace.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.nn.utils import clip_grad

__all__ = ["norm_clipping", "replace_norm_clipping"]

_NAME = "_clip_grads_with_norm_"


def norm_clipping() -> Callable[..., Any] | None:
    """Return the function that ``clip_grad_norm_`` calls now; ``None`` if this torch has none."""
    found: Callable[..., Any] | None = getattr(clip_grad, _NAME, None)
    return found


def replace_norm_clipping(function: Callable[..., Any]) -> None:
    """Make ``clip_grad_norm_`` call ``function``."""
    setattr(clip_grad, _NAME, function)
