"""The storages that a tensor is made of."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

__all__ = ["identities", "pieces"]


def pieces(tensor: Tensor) -> Iterator[tuple[torch.UntypedStorage, int]]:
    """The storages that a tensor is made of, each with the bytes of the elements in it.

    Several for sparse tensors and for subclasses that are made of others; none for what has no storage that
    can be seen.
    """
    try:
        if is_traceable_wrapper_subclass(tensor):
            several: Any = tensor
            inner = [getattr(several, name) for name in several.__tensor_flatten__()[0]]
        elif tensor.layout is torch.sparse_coo:
            inner = [tensor._indices(), tensor._values()]
        elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
            inner = [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
        elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
            inner = [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
        else:
            storage = tensor.untyped_storage()
            nbytes = (
                storage.nbytes() if tensor.is_nested else tensor.numel() * tensor.element_size()
            )
            yield storage, nbytes
            return
    except (NotImplementedError, RuntimeError):
        return
    for each in inner:
        yield from pieces(each)


def identities(tensor: Tensor) -> frozenset[int]:
    """What tells a tensor's storages from all others that are alive."""
    return frozenset(storage._cdata for storage, _ in pieces(tensor))
