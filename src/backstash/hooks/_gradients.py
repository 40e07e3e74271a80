"""The gradients of one captured value, in the value's own structure."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

import torch

from ._registration import HookRecord, Registration
from ._snapshot import Keep, Snapshot
from ._tree import map_leaves, tensors_in

__all__ = ["Gradients"]


class _Hole:
    """Stands in a structure where the gradient of a tensor will be."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


class Gradients:
    """The gradients of the tensors of one value, as backward brings them."""

    __slots__ = ("_holes", "_keep", "_kept", "_record", "expected")

    def __init__(self, value: Any, keep: Keep, record: HookRecord) -> None:
        counter = count()
        self._holes = map_leaves(lambda _: _Hole(next(counter)), value)
        self._keep = keep
        self._record = record
        self._kept: dict[int, Snapshot] = {}
        self.expected = False
        """Whether any tensor was hooked; none is under ``no_grad``."""

    def hook_tensors(self, value: Any, registration: Registration) -> None:
        """Hooks each tensor of ``value`` that will have a gradient."""
        for index, tensor in enumerate(tensors_in(value)):
            if tensor.requires_grad:
                self.expected = True
                registration.activation(tensor, self.hook_of(index))

    def hook_of(self, index: int) -> Callable[[torch.Tensor], None]:
        """The hook that keeps the gradient of the ``index``-th tensor."""

        def hook(gradient: torch.Tensor) -> None:
            self._record.fired += 1
            self._kept[index] = self._keep.snapshot(gradient)

        return hook

    @property
    def arrived(self) -> bool:
        """Whether backward brought any."""
        return bool(self._kept)

    def get(self, what: str) -> Any:
        """The gradients in the structure of the value, ``None`` where a tensor got none."""
        kept = self._kept

        def fill(hole: _Hole) -> Any:
            return kept[hole.index].get(what) if hole.index in kept else None

        return map_leaves(fill, self._holes, kind=_Hole)
