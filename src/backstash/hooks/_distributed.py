"""The meaning of DDP and FSDP2 for a gradient that a hook sees."""

from __future__ import annotations

import sys
from typing import Any, Literal

import torch
from torch import nn

__all__ = ["Reduction", "fsdp2_parameters", "is_ddp", "is_dtensor", "reduction_of", "replicated"]

Reduction = Literal["none", "before", "after", "unknown"]
"""Whether a gradient is read ``"before"`` or ``"after"`` it is averaged over the processes, if at all."""


def is_ddp(model: object) -> bool:
    """Return whether the model is, or contains, a ``DistributedDataParallel``."""
    return isinstance(model, nn.Module) and any(
        isinstance(module, nn.parallel.DistributedDataParallel) for module in model.modules()
    )


def _syncs(model: nn.Module) -> bool:
    """Return whether DDP averages in this backward; under its ``no_sync()`` it does not."""
    ddp = nn.parallel.DistributedDataParallel
    return all(m.require_backward_grad_sync for m in model.modules() if isinstance(m, ddp))


def fsdp2_parameters(model: object) -> frozenset[int]:
    """Return the ids of the parameters that FSDP2 shards: their tensor hooks never fire."""
    # Looked up, not imported: a model cannot be sharded unless its program imported this.
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    if kind is None or not isinstance(model, nn.Module):
        return frozenset()
    shards = (m for m in model.modules() if isinstance(m, kind))
    return frozenset(id(p) for m in shards for p in m.parameters() if is_dtensor(p))


def is_dtensor(tensor: torch.Tensor) -> bool:
    """Return whether the tensor is a ``DTensor``, which is spread over processes."""
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return kind is not None and isinstance(tensor, kind)


def replicated(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole value of a ``DTensor``, on every process; a plain tensor itself."""
    if not is_dtensor(tensor):
        return tensor
    spread: Any = tensor
    whole = sys.modules["torch.distributed.tensor"].Replicate()
    return spread.redistribute(placements=[whole] * spread.device_mesh.ndim)  # type: ignore[no-any-return]


def reduction_of(model: object, *, at_end: bool) -> Reduction:
    """Return whether the gradients of ``model``'s parameters are averaged when they are read.

    Args:
        model: the module that the user passed.
        at_end: whether the gradients are read when backward has ended, rather than in it.
    """
    distributed: Any = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return "none"
    if distributed.get_world_size() == 1:
        return "none"
    if is_ddp(model):
        return "after" if at_end and isinstance(model, nn.Module) and _syncs(model) else "before"
    return "after" if fsdp2_parameters(model) else "unknown"
