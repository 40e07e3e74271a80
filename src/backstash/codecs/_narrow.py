"""A codec for integers that need fewer bytes than their dtype has."""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor

from ._base import NOT_SMALLER, NOT_WITHOUT_LOOKING, Codec, Encoded, integers, parts

__all__ = ["Narrow"]

_TARGETS = (torch.int8, torch.int16, torch.int32)


@final
class Narrow(Codec):
    """Encodes integers to one, two or four bytes each, counted from the middle of their range.

    It suits the 64-bit indices of a max-pooling or an embedding, and class numbers.

    >>> import torch
    >>> Narrow().encode(torch.tensor([7000, 7255])).payload
    tensor([-128,  127], dtype=torch.int8)
    """

    def encode(self, values: Tensor) -> Encoded | str:
        """See :meth:`Codec.encode`."""
        if values.dtype.is_floating_point or values.dtype.is_complex or values.dtype == torch.bool:
            return "its dtype is not an integer"
        if values.device.type != "cpu":
            return NOT_WITHOUT_LOOKING
        bits = integers(values)
        low, high = (int(each) for each in bits.aminmax())
        fitting = (each for each in _TARGETS if high - low <= torch.iinfo(each).max * 2 + 1)
        target = next(fitting, bits.dtype)
        if target.itemsize >= bits.element_size():
            return NOT_SMALLER
        least = torch.iinfo(target).min
        payload = torch.empty(bits.numel(), dtype=target, device=bits.device)
        for part in parts(bits.numel(), bits.device):
            payload[part] = bits[part].to(torch.int64, copy=True).sub_(low).add_(least)
        return Encoded(payload, low)

    def decode(self, payload: Tensor | None, recipe: Any, out: Tensor) -> None:
        """See :meth:`Codec.decode`."""
        assert payload is not None
        least, elements = torch.iinfo(payload.dtype).min, integers(out)
        for part in parts(elements.numel(), out.device):
            elements[part] = payload[part].to(torch.int64).sub_(least).add_(recipe)
