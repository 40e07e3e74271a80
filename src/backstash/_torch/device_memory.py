"""What an accelerator's allocator counts, without the time that the public calls take to sort it."""

from __future__ import annotations

from typing import Any

import torch

from .lookup import optional

__all__ = ["allocator_counts"]

_nested: Any = optional("torch._C._accelerator_getDeviceStats", None)
_is_initialized: Any = optional("torch._C._accelerator_isAllocatorInitialized", lambda: True)


def allocator_counts(device: torch.device) -> tuple[int, int, int, int]:
    """Bytes of tensors that are alive, the most of these so far, bytes of all so far, and how many these were.

    ``torch.accelerator.memory_stats`` sorts all of its names at each call, and this is asked at each save of a
    measured step. What it reads, private in torch 2.11 to 2.15, is a dictionary of dictionaries; where it is
    missing, the public call is used.
    """
    if _nested is None:
        counts = torch.accelerator.memory_stats(device)
        held, peak, ever = (
            int(counts.get(f"allocated_bytes.all.{each}", 0))
            for each in ("current", "peak", "allocated")
        )
        return held, peak, ever, int(counts.get("allocation.all.allocated", 0))
    if not _is_initialized():
        return 0, 0, 0, 0
    counts = _nested(device.index)
    of_bytes = counts["allocated_bytes"]["all"]
    allocations = counts["allocation"]["all"]["allocated"]
    return of_bytes["current"], of_bytes["peak"], of_bytes["allocated"], allocations
