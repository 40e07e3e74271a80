"""Which storage a saved tensor looks into: of a parameter, a buffer, an input, or made by forward."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .save import Stored

__all__ = ["Storages", "existing_tensors", "pieces"]

_RANK = {"input": 0, "buffer": 1, "parameter": 2}


class Storages:
    """Storages by identity, each told from another that was given the same identity later.

    An identity is not given out again while a weak reference to its storage is owned, so one is owned for
    each. That holds no bytes.
    """

    def __init__(self) -> None:
        self._owned: dict[int, tuple[Any, str]] = {}
        self._known: dict[int, tuple[Any, Stored]] = {}
        self.count = 0

    def own(self, tensor: Tensor | None, kind: str) -> None:
        """Remember that ``tensor``'s storage is a ``"parameter"``, ``"buffer"`` or ``"input"``."""
        for storage, _ in pieces(tensor) if tensor is not None else ():
            found = self._owned.get(storage._cdata)
            if found is None or found[0].expired() or _RANK[found[1]] < _RANK[kind]:
                self._owned[storage._cdata] = (_weak(storage), kind)

    def own_all(self, tensors: Iterable[Tensor]) -> None:
        """Remember tensors that were there before the forward: parameters by their class, else inputs."""
        for tensor in tensors:
            try:
                self.own(tensor, "parameter" if isinstance(tensor, nn.Parameter) else "input")
            except Exception:  # objects of any class, perhaps half made: what fails is not known
                continue

    def of(self, tensor: Tensor) -> tuple[tuple[Stored, ...], int]:
        """The storages that ``tensor`` looks into, and its elements' bytes."""
        stored, total = [], 0
        for storage, nbytes in pieces(tensor):
            found = self._known.get(storage._cdata)
            if found is None or found[0].expired():
                one = Stored(
                    self.count, storage.nbytes(), self._kind(tensor, storage), tensor.device
                )
                self.count += 1
                self._known[storage._cdata] = (_weak(storage), one)
            else:
                one = found[1]
                one.nbytes = max(one.nbytes, storage.nbytes())
            one.saved_bytes += nbytes
            total += nbytes
            stored.append(one)
        return tuple(stored), total

    def _kind(self, tensor: Tensor, storage: torch.UntypedStorage) -> str:
        owned = self._owned.get(storage._cdata)
        if owned is not None and not owned[0].expired():
            return owned[1]
        base = tensor._base
        for each in (tensor, base) if base is not None else (tensor,):
            if isinstance(each, nn.Parameter):
                return "parameter"
            if each.is_leaf and each.requires_grad:
                return "input"
        return "activation"

    def forget(self) -> None:
        """Know no storage as saved any more; what was found stays with the saves."""
        self._known.clear()

    def close(self) -> None:
        """Drop all weak references."""
        self.forget()
        self._owned.clear()


def _weak(storage: torch.UntypedStorage) -> Any:
    return StorageWeakRef(storage)  # type: ignore[no-untyped-call]


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


def existing_tensors() -> list[Tensor]:
    """Every tensor that Python's collector knows of now."""
    objects = gc.get_objects()
    kinds = {kind for kind in set(map(type, objects)) if issubclass(kind, Tensor)}
    return [each for each in objects if type(each) in kinds]
