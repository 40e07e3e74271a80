"""A codec that uses the first of several codecs that accepts a tensor."""

from __future__ import annotations

from typing import Any, final

from torch import Tensor

from ._base import Codec, Encoded
from ._bits import Bits
from ._constant import Constant
from ._narrow import Narrow
from ._two_valued import TwoValued
from ._zeros import Zeros

__all__ = ["EXACT", "FirstOf"]


@final
class FirstOf(Codec):
    """Tries codecs in turn. If all of them refuse, it refuses with all their reasons.

    Args:
        codecs: the codecs, in the order in which they are tried.

    >>> import torch
    >>> codec = FirstOf(Bits(), Narrow())
    >>> codec.encode(torch.randn(10))
    'its dtype is not bool; its dtype is not an integer'
    """

    def __init__(self, *codecs: Codec) -> None:
        self.codecs = codecs
        self.exact = all(each.exact for each in codecs)

    def encode(self, values: Tensor) -> Encoded | str:
        """See :meth:`Codec.encode`."""
        reasons: dict[str, None] = {}
        for codec in self.codecs:
            encoded = codec.encode(values)
            if not isinstance(encoded, str):
                return Encoded(encoded.payload, (codec, encoded.recipe))
            reasons[encoded] = None
        return "; ".join(reasons)

    def decode(self, payload: Tensor | None, recipe: Any, out: Tensor) -> None:
        """See :meth:`Codec.decode`."""
        codec, its_recipe = recipe
        codec.decode(payload, its_recipe, out)

    def __repr__(self) -> str:
        return f"FirstOf({', '.join(map(repr, self.codecs))})"


EXACT = FirstOf(Constant(), Bits(), TwoValued(), Narrow(), Zeros())
"""The codec of ``Action("pack")``: the first exact codec that makes a tensor smaller."""
