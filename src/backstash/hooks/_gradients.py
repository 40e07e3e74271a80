"""A captured value and its gradients, with a check that nothing changed the value in place.

A tensor's ``detach()`` shares its memory, so an in-place operation that comes later (a ReLU with
``inplace=True``, a residual ``+=``) changes what was captured. It shares the version counter too: the
versions are noted at the capture, and reading a value whose versions changed raises ``InplaceError``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Any, Literal

import torch

from .._torch.versions import version_of
from ..errors import InplaceError
from ._registration import HookRecord, Registration
from ._tree import map_leaves, tensors_in

__all__ = ["Calls", "Gradients", "Keep", "ValueSnapshot"]


Calls = Literal["last", "first", "all"]


class ValueSnapshot:
    """A captured value, and the version that each of its tensors had then."""

    __slots__ = ("_marks", "_value")

    def __init__(self, value: Any, marks: tuple[tuple[torch.Tensor, int | None], ...]) -> None:
        self._value = value
        self._marks = marks

    def get(self, what: str) -> Any:
        """Return the value, called ``what`` in the ``InplaceError`` for a tensor changed in place since."""
        for tensor, version in self._marks:
            now = version_of(tensor)
            if now != version:
                raise InplaceError(
                    f"{what} of shape {tuple(tensor.shape)} was changed in place after it was captured "
                    f"(version {version} then, {now} now), by an in-place module or operation that "
                    "came later; capture with clone=True"
                )
        return self._value


@dataclass(frozen=True, slots=True)
class Keep:
    """What a capture keeps, and how: with or without the graph, shared or copied, and on which device."""

    inputs: bool
    outputs: bool
    grads: bool
    calls: Calls
    detach: bool
    clone: bool
    device: torch.device | None

    def snapshot(self, value: Any) -> ValueSnapshot:
        """Keep a value, and record the versions of the tensors that still share its memory."""
        marks: list[tuple[torch.Tensor, int | None]] = []

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            kept = tensor.detach() if self.detach else tensor
            if self.device is not None and self.device != kept.device:
                return kept.to(self.device)
            if self.clone:
                return kept.clone()
            marks.append((kept, version_of(kept)))
            return kept

        kept = map_leaves(keep, value)
        return ValueSnapshot(kept, tuple(marks))


class _Hole:
    """Holds the place of a tensor's gradient in the structure of a value."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


class Gradients:
    """The gradients of the tensors of one value, collected as backward computes them."""

    __slots__ = ("_holes", "_keep", "_kept", "_record", "expected")

    def __init__(self, value: Any, keep: Keep, record: HookRecord) -> None:
        counter = count()
        self._holes = map_leaves(lambda _: _Hole(next(counter)), value)
        self._keep = keep
        self._record = record
        self._kept: dict[int, ValueSnapshot] = {}
        self.expected = False
        """Whether any tensor was hooked; none is under ``no_grad``."""

    def hook_tensors(self, value: Any, registration: Registration) -> None:
        """Hook each tensor of ``value`` that requires a gradient."""
        for index, tensor in enumerate(tensors_in(value)):
            if tensor.requires_grad:
                self.expected = True
                registration.activation(tensor, self.hook_of(index))

    def hook_of(self, index: int) -> Callable[[torch.Tensor], None]:
        """Return the hook that keeps the gradient of the ``index``-th tensor."""

        def hook(gradient: torch.Tensor) -> None:
            self._record.fired += 1
            self._kept[index] = self._keep.snapshot(gradient)

        return hook

    @property
    def arrived(self) -> bool:
        """Whether backward has computed any of them."""
        return bool(self._kept)

    def get(self, what: str) -> Any:
        """Return the gradients in the structure of the value, ``None`` where a tensor got none."""
        kept = self._kept

        def fill(hole: _Hole) -> Any:
            return kept[hole.index].get(what) if hole.index in kept else None

        return map_leaves(fill, self._holes, kind=_Hole)
