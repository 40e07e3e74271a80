"""Autocast in what a kernel calls: a dispatch mode turns it off there.

A custom operator may call a matrix product, and so do a few operators of PyTorch. Under autocast this product
is computed in lower precision, but not under any dispatch mode (seen in torch 2.13). So a mode of this package
runs such a kernel with autocast as it was where the program called the operator. PyTorch's
``torch.overrides.enable_reentrant_dispatch`` restores that state; no other call gives it in a mode.
"""

from __future__ import annotations

import sys
import warnings
from contextlib import AbstractContextManager
from types import CodeType, FrameType
from typing import Any

import torch

from ..errors import StashWarning, UsageError
from .dispatch import excluded_at_call, with_lazy_bits
from .lookup import optional
from .schemas import Operation, tensors_of

__all__ = ["is_autocast_near", "kernel_of"]

_UNKNOWN = (
    "whether torch.autocast is on inside of {} is not known while a forward is recorded, since another "
    "operator or TorchScript may have called it: call it outside of torch.autocast, or give "
    "Stash(recompute=False)"
)
_IN_OTHERS = "aten.linalg_pinv"
"""Called by ``torch.linalg.pinv``, inside of which autocast is on, and ``torch.pinverse``, where it is off."""

_key: Any = optional("torch._C.DispatchKey", None)
_is_fallthrough: Any = optional(
    "torch._C._dispatch_kernel_for_dispatch_key_is_fallthrough", lambda name, key: False
)
_gather: Any = optional("torch._C._profiler.gather_traceback", None)
_symbolize: Any = optional("torch._C._profiler.symbolize_tracebacks", None)
_DEVICES = {"cpu": "CPU", "cuda": "CUDA", "hpu": "HPU", "mps": "MPS", "xpu": "XPU"}
_AUTOGRAD = ("AutogradCPU", "AutogradCUDA", "AutogradXPU", "AutogradPrivateUse1", "AutogradOther")
_CALLS: frozenset[CodeType] = frozenset(
    each.__call__.__code__
    for name in ("OpOverload", "OpOverloadPacket", "HigherOrderOperator")
    if (each := optional(f"torch._ops.{name}", None)) is not None
)
_PYTORCH = torch.__file__.rpartition("__init__")[0]
_HERE = __file__.rpartition("_torch")[0]


def is_autocast_near() -> bool:
    """Return, in ``__torch_dispatch__``, whether a context of autocast is entered (one that turns it off, too),
    or autocast was on where the program called the operation."""
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting() > 0 or bool(_autocasts())


def _autocasts() -> list[tuple[str, Any]]:
    """Return the device types for which autocast was on where the program called the operation, and their
    dispatch keys."""
    excluded = excluded_at_call()
    keys = [(each, getattr(_key, f"Autocast{name}")) for each, name in _DEVICES.items()]
    other = torch._C._get_privateuse1_backend_name()
    return [
        each for each in (*keys, (other, _key.AutocastPrivateUse1)) if not excluded.has(each[1])
    ]


def kernel_of(operation: Operation, args: Any, kwargs: Any) -> AbstractContextManager[None]:
    """Return a context for ``__torch_dispatch__`` in which an operation computes as under no mode.

    Raises:
        UsageError: its kernel may call what autocast handles, and whether autocast is on is not known.
    """
    if not operation.may_autocast or not is_autocast_near():
        return with_lazy_bits(versions=operation.writes_inside)
    caller = _caller()
    is_in_others = operation.name.startswith(_IN_OTHERS) and _may_cast(args) and bool(_autocasts())
    if caller in ("operator", "script") or is_in_others:
        error = UsageError(_UNKNOWN.format(operation.name))
        if caller == "script":  # which raises an error without the text of this one
            warnings.warn(str(error), StashWarning, stacklevel=2)
        raise error
    if caller == "mode":
        return with_lazy_bits(versions=operation.writes_inside)
    types = {each.device.type for each in tensors_of((*args, *kwargs.values()))}
    keys = [
        key
        for device_type, key in _autocasts()
        if device_type not in types or not _is_handled(operation.func, key)
    ]
    if operation.lacks_formula:
        excluded = excluded_at_call()
        autograd = [getattr(_key, each) for each in _AUTOGRAD]
        keys += [each for each in autograd if not excluded.has(each)]
    return with_lazy_bits(versions=operation.writes_inside, keys=keys)


def _may_cast(args: Any) -> bool:
    return any(
        each.dtype in (torch.float32, torch.float16, torch.bfloat16) for each in tensors_of(args)
    )


def _is_handled(func: Any, key: Any) -> bool:
    """Return whether autocast itself handles the operator. Then it is off for what the operator calls."""
    return func.has_kernel_for_dispatch_key(key) and not _is_fallthrough(func.name(), key)


def _caller() -> str:
    """Return what called the running operation: ``"program"``, another ``"operator"``, a TorchScript
    ``"script"``, or a ``"mode"``, which may be a subclass.

    Between the calls of two operators autocast may have been changed. A script leaves no frame of Python where
    it calls an operator, so what runs below one may be an operator's kernel.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_HERE):
        frame = frame.f_back
    is_within, called = True, None
    while frame is not None:
        code = frame.f_code
        if code in _CALLS:
            operator = frame.f_locals["self"]
            operator = getattr(operator, "_overloadpacket", operator)
            if not is_within or called not in (None, operator):
                return "operator"
            called = operator
        elif code.co_name == "__torch_dispatch__":
            return "mode"
        elif code.co_name == "__torch_function__" and frame.f_back is not None:
            is_within = False
            if frame.f_back.f_code in _CALLS:
                frame = frame.f_back  # it has called no kernel yet
        elif is_within and not code.co_filename.startswith(_PYTORCH):
            is_within = False
        frame = frame.f_back
    return "script" if _is_below_script() else "program"


def _is_below_script() -> bool:
    """Return whether TorchScript runs on this thread."""
    if _gather is None or _symbolize is None:
        return False
    return bool(_symbolize([_gather(False, True, False)])[0])
