"""What is asked of an accelerator several times for each block, without the calls in Python around it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .lookup import optional

__all__ = ["capture_query", "current_stream"]

current_stream: Callable[[int], Any] = optional(
    "torch._C._accelerator_getStream", torch.accelerator.current_stream
)
"""The stream that is current on this thread, of the accelerator with that index. In torch 2.11 to 2.15; where
the call is missing, the public one around it."""

_cuda_query: Callable[[], bool] | None = optional("torch._C._cuda_isCurrentStreamCapturing", None)


def capture_query(module: Any) -> Callable[[], bool]:
    """The call by which ``module`` (``torch.cuda``, say) tells whether its current stream is captured.

    Of CUDA in torch 2.11 to 2.15 the one that the public function calls; where it is missing, that function.
    A device without graphs answers no.
    """
    if module is torch.cuda and _cuda_query is not None:
        return _cuda_query
    query: Callable[[], bool] = getattr(module, "is_current_stream_capturing", bool)
    return query
