"""A lossy codec: one byte for each number, with one scale for all."""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor

from ._base import NOT_SMALLER, Codec, Encoded, parts, reals

__all__ = ["Float8"]

_SCALE_BYTES = 4


@final
class Float8(Codec):
    """Lossy: numbers are scaled by the largest one and rounded to an 8-bit floating-point format.

    With ``float8_e4m3fn`` the error is at most 1 part in 16, and numbers smaller than 1/200,000 of the largest
    become zero (formats: Micikevicius et al., "FP8 Formats for Deep Learning", 2022). If an element is not
    finite, the whole tensor comes back as NaN.

    Args:
        dtype: the format.

    >>> import torch
    >>> codec, values, out = Float8(), torch.tensor([1.0, -0.3]), torch.empty(2)
    >>> encoded = codec.encode(values)
    >>> codec.decode(encoded.payload, encoded.recipe, out)
    >>> out
    tensor([ 1.0000, -0.2857])
    """

    exact = False

    def __init__(self, dtype: torch.dtype = torch.float8_e4m3fn) -> None:
        self.dtype = dtype
        self._largest = torch.finfo(dtype).max

    def encode(self, values: Tensor) -> Encoded | str:
        """See :meth:`Codec.encode`."""
        numbers = reals(values)
        if isinstance(numbers, str):
            return numbers
        if numbers.element_size() <= 1:
            return NOT_SMALLER
        count, device = numbers.numel(), numbers.device
        low, high = numbers.aminmax()
        scale = torch.maximum(high, low.neg()).to(torch.float32).div_(self._largest)
        scale = scale.where(scale != 0, 1.0)
        payload = torch.empty(count + -count % 4 + _SCALE_BYTES, dtype=torch.uint8, device=device)
        payload[-_SCALE_BYTES:].view(torch.float32).copy_(scale)
        rounded = payload[:count].view(self.dtype)
        for part in parts(count, device):
            rounded[part] = (numbers[part] / scale).to(self.dtype)
        return Encoded(payload)

    def decode(self, payload: Tensor | None, recipe: Any, out: Tensor) -> None:
        """See :meth:`Codec.decode`."""
        numbers = reals(out)
        assert payload is not None and not isinstance(numbers, str)
        scale = payload[-_SCALE_BYTES:].view(torch.float32)
        rounded = payload[: numbers.numel()].view(self.dtype)
        for part in parts(numbers.numel(), out.device):
            numbers[part] = rounded[part].to(torch.float32).mul_(scale)

    def __repr__(self) -> str:
        return f"Float8({self.dtype})"
