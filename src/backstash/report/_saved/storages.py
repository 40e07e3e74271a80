"""Find which storages contain a saved tensor's elements, and which operation saved it.

A storage belongs to a parameter, a buffer or an input, or forward made it. Operations are found in the graph
while it is alive, without unpacking anything.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ..._torch.dispatch import without_subclass_functions
from ..._torch.graph_walk import iter_graph
from ..._torch.node_saves import packed_of
from ..._torch.storages import keep_identity, storage_identity
from .save import RecordedPack, Save, SavedStorage, pieces

__all__ = ["Storages", "existing_tensors", "find_ops"]

_RANK = {"input": 0, "buffer": 1, "parameter": 2}


class Storages:
    """Storages by their address, which is unique while this object is open.

    An owned weak reference prevents the reuse of a storage's address, without keeping its bytes.
    """

    def __init__(self) -> None:
        self._owned: dict[int, tuple[Any, str]] = {}
        self._known: dict[int, tuple[Any, SavedStorage]] = {}
        self.count = 0

    def own(self, tensor: Tensor | None, kind: str) -> None:
        """Remember the storage of ``tensor`` as that of a ``"parameter"``, ``"buffer"`` or ``"input"``."""
        for storage, _ in pieces(tensor) if tensor is not None else ():
            identity = storage_identity(storage)
            found = self._owned.get(identity)
            if found is None or _RANK[found[1]] < _RANK[kind]:
                self._owned[identity] = (keep_identity(storage), kind)

    def own_all(self, tensors: Iterable[Tensor]) -> None:
        """Remember tensors that exist before forward: parameters by their class, others as inputs."""
        for tensor in tensors:
            try:
                self.own(tensor, "parameter" if isinstance(tensor, nn.Parameter) else "input")
            except Exception:  # any class, perhaps half constructed: its storage stays unknown
                continue

    def of(self, tensor: Tensor) -> tuple[tuple[SavedStorage, ...], int]:
        """Return the storages of the elements of ``tensor``, and the bytes of the elements."""
        stored, total = [], 0
        for storage, nbytes in pieces(tensor):
            identity = storage_identity(storage)
            found = self._known.get(identity)
            if found is None:
                one = SavedStorage(
                    self.count, storage.nbytes(), self._kind(tensor, storage), tensor.device
                )
                one.stays = _gets_gradient(tensor)
                self.count += 1
                self._known[identity] = (keep_identity(storage), one)
            else:
                one = found[1]
                one.nbytes = max(one.nbytes, storage.nbytes())
            one.saved_bytes += nbytes
            total += nbytes
            stored.append(one)
        return tuple(stored), total

    def _kind(self, tensor: Tensor, storage: torch.UntypedStorage) -> str:
        owned = self._owned.get(storage_identity(storage))
        if owned is not None:
            return owned[1]
        if isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter):
            return "parameter"
        return "input" if _gets_gradient(tensor) else "activation"

    def forget(self) -> None:
        """Forget which storages were saved; the records of the saves keep theirs."""
        self._known.clear()

    def close(self) -> None:
        """Drop all weak references."""
        self.forget()
        self._owned.clear()


def _gets_gradient(tensor: Tensor) -> bool:
    leaves = (each for each in (tensor, tensor._base) if each is not None and each.is_leaf)
    return any(each.requires_grad for each in leaves)


def existing_tensors() -> list[Tensor]:
    """Return every tensor that Python's garbage collector tracks now."""
    kinds: set[type] = {Tensor}
    ahead: list[type] = [Tensor]
    while ahead:
        below: list[type] = type.__subclasses__(ahead.pop())
        ahead += [kind for kind in below if kind not in kinds]
        kinds.update(below)
    return [each for each in gc.get_objects() if type(each) in kinds]


def find_ops(saves: Iterable[Save]) -> None:
    """Set the operation and its name for the tensor in each live save that has none yet.

    A save's node is the one that holds the very object that was packed, so this does not guess. The node can
    only be reached from the result of its operation, so the graphs of all existing tensors are walked.
    """
    if not any(not save.name and save.held is not None and save.held() for save in saves):
        return
    with without_subclass_functions():
        for node in iter_graph(_with_history(existing_tensors())):
            for name, packed in packed_of(node):
                while not isinstance(packed, RecordedPack) and hasattr(packed, "packed_inside"):
                    packed = packed.packed_inside
                if isinstance(packed, RecordedPack) and packed.save is not None:
                    packed.save.op, packed.save.name = node.name(), name


def _with_history(tensors: list[Tensor]) -> list[Tensor]:
    found = []
    for tensor in tensors:
        try:
            if tensor.requires_grad and not tensor.is_leaf:
                found.append(tensor)
        except Exception:  # any class, perhaps half constructed: no graph to walk
            continue
    return found
