"""A lossy codec with eight bits of precision."""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor

from ._base import NOT_SMALLER, Codec, Encoded, reals

__all__ = ["BFloat16"]


@final
class BFloat16(Codec):
    """Lossy: 32-bit and 64-bit floating-point numbers are rounded to ``bfloat16``, by at most 1 part in 256.

    It has the range of ``float32``; larger values become infinite.

    >>> import torch
    >>> BFloat16().encode(torch.tensor([1.001, 100.0])).payload
    tensor([  1., 100.], dtype=torch.bfloat16)
    """

    exact = False

    def encode(self, values: Tensor) -> Encoded | str:
        """See :meth:`Codec.encode`."""
        numbers = reals(values)
        if isinstance(numbers, str):
            return numbers
        if numbers.element_size() <= 2:
            return NOT_SMALLER
        return Encoded(numbers.to(torch.bfloat16))

    def decode(self, payload: Tensor | None, recipe: Any, out: Tensor) -> None:
        """See :meth:`Codec.decode`."""
        numbers = reals(out)
        assert payload is not None and not isinstance(numbers, str)
        numbers.copy_(payload)
