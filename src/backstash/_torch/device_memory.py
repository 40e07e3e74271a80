"""The counts of an accelerator's allocator, without the time that the public calls take to sort them."""

from __future__ import annotations

from typing import Any

import torch

from .lookup import optional

__all__ = ["allocator_counts"]

_nested: Any = optional("torch._C._accelerator_getDeviceStats", None)
_is_initialized: Any = optional("torch._C._accelerator_isAllocatorInitialized", lambda: True)


def allocator_counts(device: torch.device) -> tuple[int, int, int, int]:
    """Return bytes of living tensors, their peak, bytes of all allocations, and their number.

    ``torch.accelerator.memory_stats`` sorts all of its names at each call, and this function runs at each save
    of a measured step. The private call inside it (torch 2.11 to 2.15) returns nested dictionaries. If it is
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
