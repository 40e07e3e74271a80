"""Which storage is which, and how a storage's identity is kept from being given to another one.

A storage's identity is the address of its C++ object, which a new storage may get once that object is
gone. While a weak reference to the storage is owned the object stays, without its bytes. All of these are
in torch 2.11 to 2.15; names in lower case are PyTorch's functions themselves, or calls of C.
"""

from __future__ import annotations

import operator
from collections.abc import Callable

import torch
from torch import Tensor

from .lookup import optional, required

__all__ = [
    "free_weak_ref",
    "has_other_owners",
    "keep_identity",
    "storage_identity",
    "storage_of",
    "weak_ref",
]

_IDENTIFIES = "tells one storage from another"
_KEEPS = "keeps a storage's identity from being given to another one"

storage_identity: Callable[[torch.UntypedStorage], int] = (
    operator.attrgetter("_cdata")
    if optional("torch.UntypedStorage._cdata", None) is not None
    else required("torch.UntypedStorage._cdata", _IDENTIFIES)
)
"""The identity of a storage that is alive. Where torch lacks it, it raises ``UsageError``."""

weak_ref: Callable[[torch.UntypedStorage], int] = required("torch.UntypedStorage._weak_ref", _KEEPS)
"""A weak reference to a storage, as a number; to be freed once. Where torch lacks it: ``UsageError``."""

free_weak_ref: Callable[[int], None] = required("torch.UntypedStorage._free_weak_ref", _KEEPS)
"""Frees what :data:`weak_ref` returned. Where torch lacks it, it raises ``UsageError``."""

keep_identity: Callable[[torch.UntypedStorage], object] = required(
    "torch.multiprocessing.reductions.StorageWeakRef", _KEEPS
)
"""An object that owns a weak reference to a storage. Undocumented; where torch lacks it: ``UsageError``."""


_use_count: Callable[[int], int] = optional("torch._C._storage_Use_Count", lambda identity: 3)


def has_other_owners(tensor: Tensor) -> bool:
    """Whether another tensor or storage object has the memory of ``tensor``, which has no such object yet.

    Where torch lacks the call, or the tensor has no storage of its own: yes, which costs a copy.
    """
    storage = storage_of(tensor)
    return (
        storage is None or _use_count(storage_identity(storage)) > 2
    )  # the tensor, and this object


def storage_of(tensor: Tensor) -> torch.UntypedStorage | None:
    """The one storage of ``tensor``; ``None`` for a layout or a subclass that has none."""
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return None
