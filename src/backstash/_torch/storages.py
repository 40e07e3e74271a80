"""The identity of storages, and how to keep an identity from being reused.

A storage's identity is the address of its C++ object, which a new storage may get once that object is freed. A
weak reference keeps the object alive, without its bytes. Everything here exists in torch 2.11 to 2.15. Names
in lower case are PyTorch's functions themselves, or C calls.
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

_IDENTIFIES = "distinguishes one storage from another"
_KEEPS = "keeps a storage's identity from being given to another one"

storage_identity: Callable[[torch.UntypedStorage], int] = (
    operator.attrgetter("_cdata")
    if optional("torch.UntypedStorage._cdata", None) is not None
    else required("torch.UntypedStorage._cdata", _IDENTIFIES)
)
"""Returns the identity of a living storage. If torch lacks it, it raises ``UsageError``."""

weak_ref: Callable[[torch.UntypedStorage], int] = required("torch.UntypedStorage._weak_ref", _KEEPS)
"""Returns a weak reference to a storage, as a number; free it once. If torch lacks it: ``UsageError``."""

free_weak_ref: Callable[[int], None] = required("torch.UntypedStorage._free_weak_ref", _KEEPS)
"""Frees a reference of :data:`weak_ref`. If torch lacks it, it raises ``UsageError``."""

keep_identity: Callable[[torch.UntypedStorage], object] = required(
    "torch.multiprocessing.reductions.StorageWeakRef", _KEEPS
)
"""Returns an object with a weak reference to a storage. Undocumented; if missing: ``UsageError``."""


_use_count: Callable[[int], int] = optional("torch._C._storage_Use_Count", lambda identity: 3)


def has_other_owners(tensor: Tensor) -> bool:
    """Return whether another tensor or storage object has the memory of ``tensor``.

    ``tensor`` must not have a storage object yet. If torch lacks the call, or the tensor has no storage of its
    own: ``True``, which costs a copy.
    """
    storage = storage_of(tensor)
    return (
        storage is None or _use_count(storage_identity(storage)) > 2
    )  # the tensor, and this object


def storage_of(tensor: Tensor) -> torch.UntypedStorage | None:
    """Return the storage of ``tensor``; ``None`` for a layout or a subclass without one."""
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return None
