"""Codecs that tests attack with: one that takes any tensor, and one that is wrong."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from backstash.codecs import EXACT, Codec, Encoded, FirstOf

__all__ = ["ANYTHING", "Halves", "Wrong"]


class Halves(Codec):
    """Exact, and takes any tensor: half of the bytes are the payload, and the recipe has the others."""

    def encode(self, values: Tensor) -> Encoded | str:
        flat = values.view(torch.uint8)
        half = flat.numel() // 2
        return Encoded(flat[:half].clone(), flat[half:].clone()) if half else "it is one byte"

    def decode(self, payload: Tensor | None, recipe: Any, out: Tensor) -> None:
        assert payload is not None
        torch.cat([payload, recipe], out=out.view(torch.uint8))


class Wrong(Codec):
    """Says that it is exact, and loses the last bit of every byte."""

    def encode(self, values: Tensor) -> Encoded | str:
        flat = values.view(torch.uint8)
        return Encoded(flat[1:].clone()) if flat.numel() > 1 else "it is one byte"

    def decode(self, payload: Tensor | None, recipe: Any, out: Tensor) -> None:
        assert payload is not None
        flat = out.view(torch.uint8)
        flat[0] = 0
        flat[1:] = payload & 0xFE


ANYTHING = FirstOf(EXACT, Halves())
"""Packs every tensor, as small as that goes."""
