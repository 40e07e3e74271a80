"""A codec that applies several codecs one after another."""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor

from ._base import Codec, Encoded

__all__ = ["Chain"]


@final
class Chain(Codec):
    """Applies codecs one after another, each to the payload of the one before.

    If the first codec refuses, the chain refuses. If a later one refuses, the chain ends before it.

    Args:
        codecs: at least one, in the order in which they encode.

    >>> import torch
    >>> from backstash.codecs import BFloat16, Zeros
    >>> codec = Chain(BFloat16(), Zeros())
    >>> codec.encode(torch.randn(1000).relu()).payload.nbytes < 1500
    True
    >>> codec.exact
    False
    """

    def __init__(self, *codecs: Codec) -> None:
        self.codecs = codecs
        self.exact = all(each.exact for each in codecs)

    def encode(self, values: Tensor) -> Encoded | str:
        """See :meth:`Codec.encode`."""
        steps: list[tuple[Codec, Any, torch.dtype, int]] = []
        payload: Tensor | None = values
        for codec in self.codecs:
            if payload is None or not payload.numel():
                break
            encoded = codec.encode(payload)
            if isinstance(encoded, str):
                if not steps:
                    return encoded
                break
            steps.append((codec, encoded.recipe, payload.dtype, payload.numel()))
            payload = encoded.payload
        return Encoded(payload, steps)

    def decode(self, payload: Tensor | None, recipe: Any, out: Tensor) -> None:
        """See :meth:`Codec.decode`."""
        for codec, its_recipe, dtype, count in reversed(recipe[1:]):
            between = torch.empty(count, dtype=dtype, device=out.device)
            codec.decode(payload, its_recipe, between)
            payload = between
        codec, its_recipe, _, _ = recipe[0]
        codec.decode(payload, its_recipe, out)

    def __repr__(self) -> str:
        return f"Chain({', '.join(map(repr, self.codecs))})"
