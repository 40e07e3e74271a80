"""Settings that choose kernels: the precision of float32 products, and flags, read without a Python call.

``torch.get_float32_matmul_precision`` may raise once a program has set ``torch.backends.*.fp32_precision``, and
knows only of products. Torch 2.13 has both names here; if one is missing, recomputing raises.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .lookup import optional, required

__all__ = [
    "are_deterministic",
    "are_only_warned",
    "bf16_sums",
    "cudnn_benchmark",
    "cudnn_deterministic",
    "cudnn_enabled",
    "fp16_sums",
    "fp32_precision",
    "mkldnn_enabled",
    "set_fp32_precision",
]

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

# The values of public properties of torch.backends and of public calls, read by what these call.
mkldnn_enabled: Callable[[], bool] = optional(
    "torch._C._get_mkldnn_enabled", lambda: torch.backends.mkldnn.enabled
)
cudnn_enabled: Callable[[], bool] = optional(
    "torch._C._get_cudnn_enabled", lambda: torch.backends.cudnn.enabled
)
cudnn_benchmark: Callable[[], bool] = optional(
    "torch._C._get_cudnn_benchmark", lambda: torch.backends.cudnn.benchmark
)
cudnn_deterministic: Callable[[], bool] = optional(
    "torch._C._get_cudnn_deterministic", lambda: torch.backends.cudnn.deterministic
)
are_deterministic: Callable[[], bool] = optional(
    "torch._C._get_deterministic_algorithms", torch.are_deterministic_algorithms_enabled
)
are_only_warned: Callable[[], bool] = optional(
    "torch._C._get_deterministic_algorithms_warn_only",
    torch.is_deterministic_algorithms_warn_only_enabled,
)
fp16_sums: Callable[[], Any] = optional(
    "torch._C._get_cublas_allow_fp16_reduced_precision_reduction",
    lambda: torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction,
)
"""Whether products of float16 may add in it; and, in newer versions, also parts of a sum."""
bf16_sums: Callable[[], Any] = optional(
    "torch._C._get_cublas_allow_bf16_reduced_precision_reduction",
    lambda: torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
)
"""The same for bfloat16."""
