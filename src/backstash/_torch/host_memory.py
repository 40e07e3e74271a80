"""The pinned host memory that PyTorch's allocator caches."""

from __future__ import annotations

import torch

__all__ = ["empty_host_cache"]


def empty_host_cache() -> None:
    """Make PyTorch's allocator of pinned memory return its unused memory to the system.

    The call is public in torch 2.13 and 2.15. Torch 2.11 has a private call, only in builds for CUDA. Without
    either, nothing happens, and the allocator keeps the memory for later allocations.
    """
    empties = getattr(torch.accelerator, "empty_host_cache", None)
    empties = empties or getattr(torch._C, "_host_emptyCache", None)
    if empties is not None:
        empties()
