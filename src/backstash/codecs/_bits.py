"""A codec for truth values: one bit each."""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor

from . import _bit_runs
from ._base import Codec, Encoded, parts

__all__ = ["Bits"]


@final
class Bits(Codec):
    """Encodes a ``bool`` tensor to an eighth of its size, on an accelerator, too.

    >>> import torch
    >>> mask = torch.arange(10) % 3 == 0
    >>> Bits().encode(mask).payload
    tensor([73,  2], dtype=torch.uint8)
    """

    def encode(self, values: Tensor) -> Encoded | str:
        """See :meth:`Codec.encode`."""
        if values.dtype != torch.bool:
            return "its dtype is not bool"
        count, device = values.numel(), values.device
        payload = torch.empty(_bit_runs.nbytes_of(count), dtype=torch.uint8, device=device)
        for part in parts(count, device):
            # A byte other than 0 and 1 also counts as true.
            truths = values[part].view(torch.uint8).ne(0)
            _bit_runs.pack(truths, _bit_runs.of_part(payload, part))
        return Encoded(payload)

    def decode(self, payload: Tensor | None, recipe: Any, out: Tensor) -> None:
        """See :meth:`Codec.decode`."""
        assert payload is not None
        rows = _bit_runs.rows_of(0, 1, torch.uint8, out.device)
        _bit_runs.unpack(payload, rows, out.view(torch.uint8))
