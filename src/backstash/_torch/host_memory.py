"""The pinned host memory that PyTorch's allocator keeps."""

from __future__ import annotations

import torch

__all__ = ["empty_host_cache"]


def empty_host_cache() -> None:
    """Have PyTorch's allocator of pinned memory give back to the system what nobody uses.

    Public in torch 2.13 and 2.15; in torch 2.11 a private call, of builds for CUDA only. Without either,
    nothing is done: the allocator keeps the memory for what is pinned next.
    """
    empties = getattr(torch.accelerator, "empty_host_cache", None)
    empties = empties or getattr(torch._C, "_host_emptyCache", None)
    if empties is not None:
        empties()
