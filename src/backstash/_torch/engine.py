"""The parts of autograd that torch keeps private, each with what we do where it is missing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["in_backward", "queue_callback", "version_of"]

_task_id: Callable[[], int] | None = getattr(torch._C, "_current_graph_task_id", None)


def in_backward() -> bool:
    """Whether this thread runs inside a backward: a forward called now recomputes a checkpoint.

    Where torch does not tell, False: a recomputed call then looks like any other call.
    """
    return _task_id is not None and _task_id() != -1


def queue_callback(callback: Callable[[], None]) -> None:
    """Calls ``callback`` when the running backward ends, as DDP and FSDP do.

    The engine holds the only reference that we give it, and drops it if backward raises.
    """
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(callback)


def version_of(tensor: torch.Tensor) -> int | None:
    """How often the tensor's memory was changed in place; ``None`` for inference tensors."""
    try:
        return tensor._version
    except RuntimeError:
        return None
