"""A codec for tensors whose elements are all equal."""

from __future__ import annotations

from typing import Any, final

from torch import Tensor

from ._base import NOT_WITHOUT_LOOKING, Codec, Encoded, integers

__all__ = ["Constant"]


@final
class Constant(Codec):
    """Encodes a tensor whose elements all have the same bits, such as zeros, to one number.

    >>> import torch
    >>> Constant().encode(torch.zeros(100_000))
    Encoded(payload=None, recipe=0)
    """

    def encode(self, values: Tensor) -> Encoded | str:
        """See :meth:`Codec.encode`."""
        if values.device.type != "cpu":
            return NOT_WITHOUT_LOOKING
        bits = integers(values)
        if bits[0] != bits[-1] or bits[0] != bits[bits.numel() // 2]:
            return "its elements differ"
        low, high = (int(each) for each in bits.aminmax())
        return Encoded(None, low) if low == high else "its elements differ"

    def decode(self, payload: Tensor | None, recipe: Any, out: Tensor) -> None:
        """See :meth:`Codec.decode`."""
        integers(out).fill_(recipe)
