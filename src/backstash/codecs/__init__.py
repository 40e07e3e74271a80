"""Codecs, which store the bytes of saved tensors in less memory.

Exact codecs: :class:`Constant` (all elements equal), :class:`Bits` (``bool``), :class:`TwoValued` (two
different elements), :class:`Narrow` (integers that need fewer bytes) and :class:`Zeros` (many zeros). Each
refuses a tensor that it does not make smaller. :data:`EXACT` tries these in turn; it is what
``Action("pack")`` uses. Lossy codecs, which are used only if you name them: :class:`BFloat16`, :class:`Float8`
and :class:`Int8`. Subclass :class:`Codec` for a codec of your own; :func:`backstash.testing.check_codec` tests
it.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from ._base import Codec, Encoded
from ._bits import Bits
from ._constant import Constant
from ._first_of import EXACT, FirstOf
from ._narrow import Narrow
from ._two_valued import TwoValued
from ._zeros import Zeros

if TYPE_CHECKING:
    from ._bfloat16 import BFloat16
    from ._chain import Chain
    from ._float8 import Float8
    from ._int8 import Int8
else:
    _WHERE = {"BFloat16": "_bfloat16", "Chain": "_chain", "Float8": "_float8", "Int8": "_int8"}

    def __getattr__(name):  # loaded on first use, since few programs name them
        if name not in _WHERE:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(f".{_WHERE[name]}", __name__), name)
        return value


__all__ = [
    "EXACT",
    "BFloat16",
    "Bits",
    "Chain",
    "Codec",
    "Constant",
    "Encoded",
    "FirstOf",
    "Float8",
    "Int8",
    "Narrow",
    "TwoValued",
    "Zeros",
]
