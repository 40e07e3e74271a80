"""What the steps return beside the state, stacked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ._state import StepState

__all__ = ["Outputs"]


class Outputs:
    """What the steps return beside the state.

    Args:
        steps: how many steps there are; ``None``: not known.
    """

    def __init__(self, steps: int | None) -> None:
        self._steps = steps
        self._rows: dict[int, _OutputRows] = {}
        self._collected: list[StepState] = []

    def copied(self, place: int, value: Tensor) -> Tensor:
        """The next step's leaf ``place``, detached: a copy among those of the other steps where it fits."""
        if self._steps is None:
            return value.detach()
        return self._rows.setdefault(place, _OutputRows(self._steps)).copied(value)

    def add(self, y: StepState) -> None:
        """Take the next step's output. What has a graph went through :meth:`copied` before, or stays."""
        leaves = [
            self.copied(place, leaf)
            if isinstance(leaf, Tensor) and not leaf.requires_grad
            else leaf
            for place, leaf in enumerate(y.leaves)
        ]
        self._collected.append(StepState(leaves, y.structure))

    def whole(self) -> Any:
        """The outputs in one: tensors stacked in a new first dimension, other leaves in lists."""
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
    """One tensor for an output of all steps, which each step's value is copied into as it comes.

    Thousands of small tensors that stay, each cut out of memory that a larger one has left, keep an allocator
    from lending that memory again as a whole: with glibc's, 10,000 outputs of 1.5 KiB took 1,372 MiB.

    Args:
        steps: how many there are.
    """

    __slots__ = ("_rows", "_steps", "_written")

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._rows: Tensor | None = None
        self._written = 0

    def copied(self, value: Tensor) -> Tensor:
        """A copy of the next step's ``value`` in its row, with no graph; ``value`` detached if it has none.

        It has none where it differs in shape, dtype or device from the first, or is laid out otherwise than
        ``torch.stack`` lays out its result.
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
        # No view of the rows: autograd would take each for a change of all.
        with torch.no_grad():
            row = torch.empty(0, dtype=plain.dtype, device=plain.device)
            row.set_(rows.untyped_storage(), place, plain.shape, plain.stride())
            row.copy_(plain)
        self._written += 1
        return row

    def whole(self) -> Tensor | None:
        """All rows, if each was written."""
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
    """``torch.stack(values)``, without a copy where they are ``rows``."""
    whole = None if rows is None else rows.whole()
    if whole is None:
        return torch.stack(tuple(values))
    apply: Any = _Stack.apply
    stack: Tensor = apply([whole], *values)
    return stack


class _Stack(torch.autograd.Function):
    """``torch.stack`` of tensors that lie in one already."""

    @staticmethod
    def forward(ctx: Any, whole: list[Tensor], *values: Tensor) -> Tensor:
        return whole[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        return (None, *gradients[0].unbind(0))
