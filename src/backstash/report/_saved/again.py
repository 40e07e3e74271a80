"""Saved tensors that their operations could compute again: tried when a tensor is saved, added up in a report.

Only large CPU tensors are tried: computed again once, compared bit for bit, and timed. Nothing is computed
while a dispatch mode is active, which would see it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..._torch.dispatch import count_dispatch_modes, without_function_modes
from ..._torch.made_by import MOST_OPERATIONS, UnknownOperandError, in_place, made_by
from ..._torch.storages import storage_identity
from .save import Packed

__all__ = ["Again"]


class Again:
    """Tries what one thread saves.

    A tensor whose operand could itself be computed again is that many operations further from what is held.
    """

    def __init__(self) -> None:
        self._operations: dict[int, int] = {}  # by storage, how many in a row would be called

    def seconds(self, tensor: Tensor, modules: Sequence[nn.Module]) -> float | None:
        """The seconds that computing ``tensor`` again took; ``None``: it cannot be, or has other bits then."""
        made = tensor if tensor._base is None else tensor._base
        plain = type(made) is Tensor and made.layout is torch.strided and made.is_contiguous()
        if not plain or made.device.type != "cpu" or count_dispatch_modes() > 0:
            return None
        if made.nbytes != made.untyped_storage().nbytes():
            return None
        try:
            operation, operands = made_by(made, _operand, _module_of, modules)
        except UnknownOperandError:
            return None
        before = (self._operations.get(storage_identity(e.untyped_storage()), 0) for e in operands)
        in_a_row = operation.depth + max(before, default=0)
        if in_a_row > MOST_OPERATIONS:
            return None
        with without_function_modes(), torch.no_grad():
            values = [each.detach() for each in operands]
            try:
                out = torch.empty_like(made)
                began = time.perf_counter()
                operation.run(values, out)
            except (RuntimeError, TypeError):  # no memory for it, say
                return None
            seconds = time.perf_counter() - began
            if not torch.equal(out.view(torch.uint8), made.detach().view(torch.uint8)):
                return None
        self._operations[storage_identity(made.untyped_storage())] = in_a_row
        return seconds


def _operand(packed: Any) -> Tensor:
    while not isinstance(packed, Tensor) and hasattr(packed, "packed_inside"):
        packed = packed.packed_inside
    return in_place(packed)


def _module_of(packed: Any) -> str:
    return packed.save.module if isinstance(packed, Packed) and packed.save is not None else ""
