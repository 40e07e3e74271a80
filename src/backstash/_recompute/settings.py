"""Record the global settings by which PyTorch chooses a kernel, and restore them for a replay.

The number of threads is one of them. How the elements are divided among threads decides which of them
vectorized code computes, and in which order they are added.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from .._torch.precision import (
    are_deterministic,
    are_only_warned,
    bf16_sums,
    cudnn_benchmark,
    cudnn_deterministic,
    cudnn_enabled,
    fp16_sums,
    fp32_precision,
    mkldnn_enabled,
    set_fp32_precision,
)

__all__ = ["ON_CPU", "Settings", "now", "put"]

Settings = tuple[Any, ...]

_ON_CPU = tuple(("mkldnn", each) for each in ("matmul", "conv", "rnn"))
_ON_CUDA = tuple(("cuda", each) for each in ("matmul", "conv", "rnn"))
_smallest = sys.float_info.min

_lock = (
    threading.RLock()
)  # the settings are global; reentrant, since a signal handler may run backward during a replay
_is_changed = False


def _deterministic(setting: tuple[bool, bool]) -> None:
    torch.use_deterministic_algorithms(setting[0], warn_only=setting[1])


def _cudnn(setting: tuple[bool, ...]) -> None:
    cudnn = torch.backends.cudnn
    cudnn.enabled, cudnn.benchmark, cudnn.deterministic = setting


def _set_precisions(values: tuple[str, ...]) -> None:
    for (backend, operation), value in zip((*_ON_CPU, *_ON_CUDA), values, strict=False):
        if fp32_precision(backend, operation) != value:
            set_fp32_precision(backend, operation, value)


def now(*, on_accelerator: bool = False) -> Settings:
    """Return the current settings; for an operation on the CPU, only those that it depends on."""
    precisions: tuple[str, ...] = (
        fp32_precision(*_ON_CPU[0]),
        fp32_precision(*_ON_CPU[1]),
        fp32_precision(*_ON_CPU[2]),
    )
    if on_accelerator:
        precisions += (
            fp32_precision(*_ON_CUDA[0]),
            fp32_precision(*_ON_CUDA[1]),
            fp32_precision(*_ON_CUDA[2]),
        )
    found = (
        torch.get_num_threads(),
        torch.get_default_dtype(),
        precisions,
        _smallest / 2 == 0.0,  # whether this thread replaces denormal numbers by zero
        mkldnn_enabled(),
        (are_deterministic(), are_only_warned()),
    )
    if not on_accelerator:
        return found
    cudnn = cudnn_enabled(), cudnn_benchmark(), cudnn_deterministic()
    return (*found, cudnn, fp16_sums(), bf16_sums())


def _mkldnn(enabled: bool) -> None:
    torch.backends.mkldnn.enabled = enabled  # type: ignore[assignment]


def _fp16_sums(allowed: Any) -> None:
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = allowed


def _bf16_sums(allowed: Any) -> None:
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = allowed


ON_CPU = 6  # settings of an operation on the CPU
_SET: tuple[Any, ...] = (
    torch.set_num_threads,
    torch.set_default_dtype,
    _set_precisions,
    torch.set_flush_denormal,
    _mkldnn,
    _deterministic,
    _cudnn,
    _fp16_sums,
    _bf16_sums,
)


@contextmanager
def put(settings: Settings) -> Iterator[None]:
    """Apply ``settings`` inside the context and restore the previous ones after it. One thread at a time."""
    global _is_changed
    before = now(on_accelerator=len(settings) > ON_CPU)
    if before == settings and not _is_changed:
        yield
        return
    with _lock, ExitStack() as stack:
        before, was_changed = now(on_accelerator=len(settings) > ON_CPU), _is_changed
        _is_changed = True
        stack.callback(_restore, was_changed)
        for change, wanted, found in zip(_SET, settings, before, strict=False):
            if wanted != found:
                stack.callback(change, found)
                change(wanted)
        yield


def _restore(was_changed: bool) -> None:
    global _is_changed
    _is_changed = was_changed
