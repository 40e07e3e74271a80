"""Properties of a tensor other than its elements: conj and neg bits, its kind, and its inner tensors.

Everything here exists in torch 2.11 to 2.15. Names that are not defined by ``def`` are PyTorch's own
functions.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .lookup import optional, required

__all__ = [
    "alive",
    "flattened",
    "is_functorch_wrapped",
    "is_wrapper_subclass",
    "is_zero_tensor",
    "neg_view",
    "parts_of",
    "toggle_bits",
    "wait_for_collective",
    "wrapped_leaf_of",
]

_PLAIN = (Tensor, torch.nn.Parameter)

neg_view: Callable[[Tensor], Tensor] = required(
    "torch._neg_view", "gives back a tensor that was saved with its neg bit set"
)
"""Returns a view of a tensor with its neg bit toggled. If torch lacks it, it raises ``UsageError``."""


def _has_no_address(tensor: Tensor) -> bool:
    try:
        tensor.untyped_storage().data_ptr()
    except RuntimeError:
        return True
    return False


is_zero_tensor: Callable[[Tensor], bool] = optional("torch.Tensor._is_zerotensor", _has_no_address)
"""Whether it is a zero tensor of autograd. If torch lacks the call: whether it has no memory address."""

is_functorch_wrapped: Callable[[Tensor], bool] = required(
    "torch._C._functorch.is_functorch_wrapped_tensor", "leaves the tensors of torch.func alone"
)
"""Whether a transform of ``torch.func`` wraps the tensor. If torch lacks the call, it raises ``UsageError``,
since such a tensor cannot be distinguished from one that may be moved."""

_MOST_VIEWS = 8  # between a wrapper subclass and the tensor saved from its inner tensor


def _can_flatten(tensor: Any) -> bool:
    return hasattr(tensor, "__tensor_flatten__") and hasattr(type(tensor), "__tensor_unflatten__")


is_wrapper_subclass: Callable[[object], bool] = optional(
    "torch.utils._python_dispatch.is_traceable_wrapper_subclass", _can_flatten
)
"""Whether it is a wrapper subclass that names its inner tensors (``__tensor_flatten__``). If torch lacks the
call: whether it has the two methods for that."""


def toggle_bits(tensor: Tensor, *, conj: bool, neg: bool) -> Tensor:
    """Return a view of ``tensor`` with conj bit, neg bit, or both toggled; ``tensor`` itself for neither."""
    tensor = neg_view(tensor) if neg else tensor
    return tensor.conj() if conj else tensor


def flattened(tensor: Any) -> tuple[dict[str, Tensor], dict[str, object], object]:
    """Return what ``__tensor_flatten__`` of a wrapper subclass gives: inner tensors, others, context.

    Since torch 2.13 some names may refer to attributes that are not tensors (a DTensor's ``device_mesh``);
    ``__tensor_unflatten__`` expects those among the inner tensors.
    """
    names, context = tensor.__tensor_flatten__()
    tensors: dict[str, Tensor] = {}
    others: dict[str, object] = {}
    for name in names:
        value = getattr(tensor, name)
        if isinstance(value, Tensor):
            tensors[name] = value
        else:
            others[name] = value
    return tensors, others, context


def wrapped_leaf_of(tensor: Tensor, base: Tensor) -> Tensor | None:
    """Return the leaf of which ``base`` is an inner tensor, such as a DTensor's local tensor, if there is one.

    Args:
        tensor: a view of ``base`` with a ``grad_fn``: the result of ``DTensor.to_local()``, or a view of it.
        base: its base, which itself requires no gradient.
    """
    node = tensor.grad_fn
    for _ in range(_MOST_VIEWS):
        if node is None or len(node.next_functions) != 1:
            return None
        node = node.next_functions[0][0]
        leaf: Tensor | None = getattr(node, "variable", None)
        if leaf is not None:
            inner = flattened(leaf)[0].values() if is_wrapper_subclass(leaf) else ()
            return leaf if any(each is base for each in inner) else None
    return None


def wait_for_collective(tensor: Any) -> None:
    """Wait for the collective that fills an ``AsyncCollectiveTensor``. Return at once for other tensors.

    The class is recognized by its method ``trigger_wait`` (torch 2.11 to 2.15), so that ``torch.distributed``
    is not imported. If torch lacks the method, no such tensor exists.
    """
    wait = getattr(tensor, "trigger_wait", None)
    if wait is not None:
        wait()


def parts_of(tensor: Any) -> list[Tensor] | None:
    """Return the inner tensors of a wrapper subclass or a sparse tensor; ``None`` for any other tensor.

    The index and value tensors of the COO layout are the private ``_indices`` and ``_values``: the public
    methods reject a tensor that is not coalesced, and return other tensors. If torch lacks them, this raises
    ``AttributeError``.
    """
    if type(tensor) in _PLAIN and tensor.layout is torch.strided:
        return None
    if is_wrapper_subclass(tensor):
        return list(flattened(tensor)[0].values())
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return None


def alive(reference: weakref.ref[Tensor]) -> Tensor | None:
    """Return the tensor of a weak reference, safe to use if only a graph may have kept it alive.

    ``_fix_weakref`` makes Python own such a tensor again. If torch lacks it, nothing is needed.
    """
    tensor = reference()
    if tensor is not None and hasattr(tensor, "_fix_weakref"):
        tensor._fix_weakref()
    return tensor
