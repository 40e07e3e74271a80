"""A codec for tensors with two different elements: one bit each."""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor

from . import _bit_runs
from ._base import NOT_SMALLER, NOT_WITHOUT_LOOKING, Codec, Encoded, integers, parts

__all__ = ["TwoValued"]

_SEVERAL = "it has more than two different elements"
_LOOKED_AT = 64  # elements that are sampled first


@final
class TwoValued(Codec):
    """Encodes a tensor with at most two different elements to one bit each, plus the two elements.

    It suits the noise of a dropout on the CPU (0 and 1/(1-p)) and masks that were converted to numbers.

    >>> import torch
    >>> TwoValued().encode(torch.tensor([0.0, 2.0, 2.0, 0.0]))
    Encoded(payload=tensor([6], dtype=torch.uint8), recipe=(0, 1073741824))
    """

    def encode(self, values: Tensor) -> Encoded | str:
        """See :meth:`Codec.encode`."""
        if values.device.type != "cpu":
            return NOT_WITHOUT_LOOKING
        bits = integers(values)
        count = bits.numel()
        if len(set(bits[:: -(-count // _LOOKED_AT)].tolist())) > 2:
            return _SEVERAL
        low, high = (int(each) for each in bits.aminmax())
        payload = torch.empty(_bit_runs.nbytes_of(count), dtype=torch.uint8, device=bits.device)
        if payload.nbytes >= bits.nbytes:
            return NOT_SMALLER
        for part in parts(count, bits.device):
            is_high = bits[part].eq(high)
            if not bits[part].eq(low).bitwise_or_(is_high).all():
                return _SEVERAL
            _bit_runs.pack(is_high, _bit_runs.of_part(payload, part))
        return Encoded(payload, (low, high))

    def decode(self, payload: Tensor | None, recipe: Any, out: Tensor) -> None:
        """See :meth:`Codec.decode`."""
        assert payload is not None
        elements = integers(out)
        low, high = recipe
        rows = _bit_runs.rows_of(low, high, elements.dtype, out.device)
        _bit_runs.unpack(payload, rows, elements)
