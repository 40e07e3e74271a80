"""A lossy codec: one byte for each number, with a scale for each block of numbers."""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor

from ..errors import UsageError
from ._base import NOT_SMALLER, Codec, Encoded, parts, reals

__all__ = ["Int8"]


@final
class Int8(Codec):
    """Lossy: numbers are rounded to 255 steps between plus and minus their block's largest.

    The error is at most 1/254 of the block's largest (block-wise quantization as in Dettmers et al., "8-bit
    Optimizers via Block-wise Quantization", 2021). If an element is not finite, its whole block comes back as
    NaN.

    Args:
        block: the number of elements that share a scale; a multiple of 8.

    Raises:
        UsageError: ``block`` is not a positive multiple of 8.

    >>> import torch
    >>> codec, values, out = Int8(8), torch.tensor([127.0, -3.2, 0, 0, 0, 0, 0, 0]), torch.empty(8)
    >>> encoded = codec.encode(values)
    >>> codec.decode(encoded.payload, encoded.recipe, out)
    >>> out[:2]
    tensor([127.,  -3.])
    """

    exact = False

    def __init__(self, block: int = 256) -> None:
        if not isinstance(block, int) or block < 8 or block % 8:
            raise UsageError(f"Int8 block={block!r}: allowed is a positive multiple of 8")
        self.block = block

    def encode(self, values: Tensor) -> Encoded | str:
        """See :meth:`Codec.encode`."""
        numbers = reals(values)
        if isinstance(numbers, str):
            return numbers
        count, device = numbers.numel(), numbers.device
        blocks = -(-count // self.block)
        size = 4 * blocks + blocks * self.block
        if size >= numbers.nbytes:
            return NOT_SMALLER
        payload = torch.empty(size, dtype=torch.uint8, device=device)
        scales, rounded = self._divided(payload, blocks)
        for part in parts(blocks, device, of=self.block):
            piece = numbers[part.start * self.block : part.stop * self.block]
            filled = torch.zeros(
                (part.stop - part.start) * self.block, dtype=torch.float32, device=device
            )
            filled[: piece.numel()] = piece
            rows = filled.view(-1, self.block)
            scale = rows.abs().amax(1).div_(127)
            scales[part] = scale
            rows.div_(scale.where(scale != 0, 1.0).unsqueeze(1)).round_()
            rounded[part] = rows.nan_to_num_(0.0).to(torch.int8)
        return Encoded(payload)

    def decode(self, payload: Tensor | None, recipe: Any, out: Tensor) -> None:
        """See :meth:`Codec.decode`."""
        numbers = reals(out)
        assert payload is not None and not isinstance(numbers, str)
        scales, rounded = self._divided(payload, -(-numbers.numel() // self.block))
        for part in parts(scales.numel(), out.device, of=self.block):
            place = numbers[part.start * self.block : part.stop * self.block]
            rows = rounded[part].to(torch.float32).mul_(scales[part].unsqueeze(1))
            place.copy_(rows.view(-1)[: place.numel()])

    def _divided(self, payload: Tensor, blocks: int) -> tuple[Tensor, Tensor]:
        """Return the scales, and a row of numbers for each block."""
        scales, rounded = payload[: 4 * blocks], payload[4 * blocks :]
        return scales.view(torch.float32), rounded.view(torch.int8).view(blocks, self.block)

    def __repr__(self) -> str:
        return f"Int8(block={self.block})"
