"""The precision of float32 products, convolutions and recurrent layers, by backend.

``torch.get_float32_matmul_precision`` may raise once a program has set ``torch.backends.*.fp32_precision``, and
knows only of products. Torch 2.13 has both names here; if one is missing, recomputing raises.
"""

from __future__ import annotations

from collections.abc import Callable

from .lookup import required

__all__ = ["fp32_precision", "set_fp32_precision"]

_REPLAYS = "recomputes what was discarded"

fp32_precision: Callable[[str, str], str] = required(
    "torch._C._get_fp32_precision_getter", _REPLAYS
)
"""Returns the precision of a backend (``"mkldnn"``, ``"cuda"``) and a kind of operation (``"matmul"``,
``"conv"``, ``"rnn"``). If torch lacks it: ``UsageError``."""

set_fp32_precision: Callable[[str, str, str], object] = required(
    "torch._C._set_fp32_precision_setter", _REPLAYS
)
"""Sets it. If torch lacks it: ``UsageError``."""
