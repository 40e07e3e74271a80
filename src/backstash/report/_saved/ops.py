"""Which operation saved what: found in the graph, while there is one, without unpacking."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from ..._nodes import iter_graph, packed_of
from .save import Packed, Save
from .storages import existing_tensors

__all__ = ["find_ops"]


def find_ops(saves: Iterable[Save]) -> None:
    """Name the operation and the argument of each save that is alive and not named yet.

    A node is a save's own if it holds the very object that was packed, so nothing is guessed. The graphs of all
    tensors that Python knows are walked: an operation is above what it saved, where only its result leads.
    """
    if not any(not save.name and save.held is not None and save.held() for save in saves):
        return
    with torch._C.DisableTorchFunctionSubclass():
        for node in iter_graph(_with_history(existing_tensors())):
            for name, packed in packed_of(node):
                while not isinstance(packed, Packed) and hasattr(packed, "packed_inside"):
                    packed = packed.packed_inside
                if isinstance(packed, Packed) and packed.save is not None:
                    packed.save.op, packed.save.name = node.name(), name


def _with_history(tensors: list[Tensor]) -> list[Tensor]:
    found = []
    for tensor in tensors:
        try:
            if tensor.requires_grad and not tensor.is_leaf:
                found.append(tensor)
        except (
            Exception
        ):  # objects of any class, perhaps half made: what fails has no graph to look at
            continue
    return found
