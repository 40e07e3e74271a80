"""A codec for tensors with many zeros: one bit for each element, plus the nonzero elements."""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor

from . import _bit_runs
from ._base import NOT_SMALLER, NOT_WITHOUT_LOOKING, Codec, Encoded, integers, parts

__all__ = ["Zeros"]

_LOOKED_AT = 1024  # elements that are sampled first
_LEAST_SHARE = 1 / 8  # of the bytes: the least saving


@final
class Zeros(Codec):
    """Encodes a tensor with many zeros, as after a ReLU, to one bit for each element, plus the other elements.

    Only an element without a set bit counts as zero; a negative zero is stored with the others.

    >>> import torch
    >>> Zeros().encode(torch.tensor([0, 0, 0, 0, 0, 0, 5, 0])).payload
    tensor([ 5,  0,  0,  0,  0,  0,  0,  0, 64], dtype=torch.uint8)
    """

    def encode(self, values: Tensor) -> Encoded | str:
        """See :meth:`Codec.encode`."""
        if values.device.type != "cpu":
            return NOT_WITHOUT_LOOKING
        bits = integers(values)
        count, itemsize = bits.numel(), bits.element_size()
        some = bits[:: -(-count // _LOOKED_AT)]
        most = (1 - _LEAST_SHARE) * bits.nbytes - _bit_runs.nbytes_of(count)
        if int(some.count_nonzero()) * bits.nbytes > most * 1.1 * some.numel():
            return NOT_SMALLER
        others = int(bits.count_nonzero())
        if others * itemsize > most:
            return NOT_SMALLER
        size = others * itemsize + _bit_runs.nbytes_of(count)
        payload = torch.empty(size, dtype=torch.uint8, device=bits.device)
        kept, truths = _divided(payload, others, bits.dtype)
        end = 0
        for part in parts(count, bits.device):
            is_other = bits[part].ne(0)
            _bit_runs.pack(is_other, _bit_runs.of_part(truths, part))
            found = bits[part].index_select(0, is_other.nonzero().squeeze(1))
            begin, end = end, end + found.numel()
            kept[begin:end] = found
        return Encoded(payload, others)

    def decode(self, payload: Tensor | None, recipe: Any, out: Tensor) -> None:
        """See :meth:`Codec.decode`."""
        assert payload is not None
        elements = integers(out)
        kept, truths = _divided(payload, recipe, elements.dtype)
        rows = _bit_runs.rows_of(0, 1, torch.uint8, out.device)
        end = 0
        for part in parts(elements.numel(), out.device):
            is_other = torch.empty(part.stop - part.start, dtype=torch.uint8, device=out.device)
            _bit_runs.unpack(_bit_runs.of_part(truths, part), rows, is_other)
            begin, end = end, end + int(is_other.count_nonzero())
            elements[part].zero_().masked_scatter_(is_other.view(torch.bool), kept[begin:end])


def _divided(payload: Tensor, others: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the nonzero elements, and the bits."""
    nbytes = others * dtype.itemsize
    return payload[:nbytes].view(dtype), payload[nbytes:]
