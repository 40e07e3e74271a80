"""How a saved tensor's bytes are stored smaller: exact codecs, and lossy ones that only a caller names.

Exact, and each refuses what it does not make smaller: :class:`Constant` (all elements equal), :class:`Bits`
(``bool``), :class:`TwoValued` (two different elements), :class:`Narrow` (integers that need fewer bytes) and
:class:`Zeros` (many zeros). :data:`EXACT` tries these in turn, and is what ``Action("pack")`` means. Lossy:
:class:`BFloat16`, :class:`Float8` and :class:`Int8`. A codec of one's own is a :class:`Codec`;
:func:`backstash.testing.check_codec` tests it.
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

    def __getattr__(name):  # which few programs name
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
