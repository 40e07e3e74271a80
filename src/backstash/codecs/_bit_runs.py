"""Pack eight truth values into a byte, the first one in the lowest bit.

Eight bytes of 0 or 1 form one 64-bit integer. Its product with ``_GATHER`` has each of them in a different bit
of the highest byte (a technique known from bitboards, "magic multiplication"). For unpacking, a byte selects
one of 256 rows of eight elements.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._base import parts

__all__ = ["nbytes_of", "of_part", "pack", "rows_of", "unpack"]

_GATHER = 0x0102040810204080


def nbytes_of(count: int) -> int:
    """Return the number of bytes for ``count`` bits."""
    return -(-count // 8)


def of_part(bits: Tensor, part: slice) -> Tensor:
    """Return the bytes of ``bits`` for a slice of the elements, as :func:`parts` returns it."""
    return bits[part.start // 8 : nbytes_of(part.stop)]


def pack(truths: Tensor, out: Tensor) -> None:
    """Write a flat bool tensor as bits to ``out`` (``uint8``). The last byte is padded with zeros."""
    whole = truths.numel() // 8 * 8
    eights = truths[:whole].view(torch.uint8).view(torch.int64)
    out[: whole // 8] = (eights * _GATHER).bitwise_right_shift_(56)
    if whole < truths.numel():
        last = torch.zeros(8, dtype=torch.uint8, device=truths.device)
        last[: truths.numel() - whole] = truths[whole:]
        out[whole // 8 :] = (last.view(torch.int64) * _GATHER).bitwise_right_shift_(56)


def rows_of(low: int, high: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return, for each byte value, the eight elements that it encodes: ``low`` for a 0, ``high`` for a 1."""
    byte = torch.arange(256, dtype=torch.int32, device=device).unsqueeze(1)
    bit = torch.arange(8, dtype=torch.int32, device=device)
    truths = byte.bitwise_right_shift(bit).bitwise_and_(1).to(torch.bool)
    rows = torch.full((256, 8), low, dtype=dtype, device=device)
    return rows.masked_fill_(truths, high)


def unpack(bits: Tensor, rows: Tensor, out: Tensor) -> None:
    """Write the elements that ``bits`` encode to ``out``, which is flat and has the dtype of ``rows``."""
    for part in parts(out.numel(), out.device):
        at, place = of_part(bits, part).to(torch.int32), out[part]
        whole = place.numel() // 8 * 8
        torch.index_select(rows, 0, at[: whole // 8], out=place[:whole].view(-1, 8))
        if whole < place.numel():
            place[whole:] = rows.index_select(0, at[whole // 8 :]).view(-1)[: place.numel() - whole]
