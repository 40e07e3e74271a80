"""The outputs (``ys``) that steps return in addition to the state, stacked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ._state import StepState

__all__ = ["Outputs"]


class Outputs:
    """The outputs that the steps return in addition to the state.

    Args:
        steps: the number of steps; ``None``: unknown.
    """

    def __init__(self, steps: int | None) -> None:
        self._steps = steps
        self._rows: dict[int, _OutputRows] = {}
        self._collected: list[StepState] = []

    def copied(self, place: int, value: Tensor) -> Tensor:
        """Return the next step's leaf ``place``, detached, as a row of its stack if it fits there."""
        if self._steps is None:
            return value.detach()
        return self._rows.setdefault(place, _OutputRows(self._steps)).copied(value)

    def add(self, y: StepState) -> None:
        """Add the next step's output. A leaf with a graph went through :meth:`copied` or stays as it is."""
        leaves = [
            self.copied(place, leaf)
            if isinstance(leaf, Tensor) and not leaf.requires_grad
            else leaf
            for place, leaf in enumerate(y.leaves)
        ]
        self._collected.append(StepState(leaves, y.structure))

    def whole(self) -> Any:
        """Return all outputs: tensors stacked in a new first dimension, other leaves in lists."""
        if not self._collected:
            return None
        columns = zip(*(y.leaves for y in self._collected), strict=True)
        leaves = [
            _stacked(column, self._rows.get(place))
            if isinstance(column[0], Tensor)
            else list(column)
            for place, column in enumerate(columns)
        ]
        return StepState(leaves, self._collected[0].structure).whole()


class _OutputRows:
    """One tensor for an output of all steps, into which each step's value is copied.

    Thousands of small tensors that stay alive, each cut from memory that a larger tensor has freed, keep an
    allocator from reusing that memory as a whole. With glibc, 10,000 outputs of 1.5 KiB took 1,372 MiB.

    Args:
        steps: the number of steps.
    """

    __slots__ = ("_rows", "_steps", "_written")

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._rows: Tensor | None = None
        self._written = 0

    def copied(self, value: Tensor) -> Tensor:
        """Return the next step's ``value`` without a graph, copied to its row if it has one.

        A value has no row if it differs in shape, dtype or device from the first, or has a layout other than
        the result of ``torch.stack``.
        """
        plain = value.detach()
        if self._rows is None and not self._written and _fits(plain):
            with torch.no_grad():
                self._rows = torch.empty(
                    (self._steps, *plain.shape), dtype=plain.dtype, device=plain.device
                )
        rows = self._rows
        if rows is None or not _fits(plain) or _kind(plain) != _kind(rows[0]):
            self._rows, self._written = None, self._steps + 1
            return plain
        place = self._written * plain.numel()
        # Not a view of the rows: autograd would treat a write to it as a write to all rows.
        with torch.no_grad():
            row = torch.empty(0, dtype=plain.dtype, device=plain.device)
            row.set_(rows.untyped_storage(), place, plain.shape, plain.stride())
            row.copy_(plain)
        self._written += 1
        return row

    def whole(self) -> Tensor | None:
        """Return all rows, if each was written."""
        return self._rows if self._written == self._steps else None


def _fits(value: Tensor) -> bool:
    return (
        type(value) is Tensor
        and value.layout is torch.strided
        and value.is_contiguous()
        and not value.is_conj()
        and not value.is_neg()
    )


def _kind(value: Tensor) -> tuple[Any, ...]:
    return value.shape, value.stride(), value.dtype, value.device


def _stacked(values: Sequence[Tensor], rows: _OutputRows | None) -> Tensor:
    """Return ``torch.stack(values)``, without a copy if they are ``rows``."""
    whole = None if rows is None else rows.whole()
    if whole is None:
        return torch.stack(tuple(values))
    apply: Any = _Stack.apply
    stack: Tensor = apply([whole], *values)
    return stack


class _Stack(torch.autograd.Function):
    """``torch.stack`` for tensors that are already stacked in memory."""

    @staticmethod
    def forward(ctx: Any, whole: list[Tensor], *values: Tensor) -> Tensor:
        return whole[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        return (None, *gradients[0].unbind(0))
