"""Stream queries that run several times for each block, without the Python wrappers around them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .lookup import optional

__all__ = ["capture_query", "current_stream"]

current_stream: Callable[[int], Any] = optional(
    "torch._C._accelerator_getStream", torch.accelerator.current_stream
)
"""Returns the current stream of this thread on the accelerator with that index. Exists in torch 2.11 to 2.15;
otherwise the public wrapper is used."""

_cuda_query: Callable[[], bool] | None = optional("torch._C._cuda_isCurrentStreamCapturing", None)


def capture_query(module: Any) -> Callable[[], bool]:
    """Return the function that checks whether the current stream of ``module`` is being captured.

    For CUDA in torch 2.11 to 2.15 this is the private function inside the public one; otherwise the public
    one. For a device without graphs it returns ``False``.
    """
    if module is torch.cuda and _cuda_query is not None:
        return _cuda_query
    query: Callable[[], bool] = getattr(module, "is_current_stream_capturing", bool)
    return query
