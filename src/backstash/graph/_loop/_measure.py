"""One evaluation of a step, timed, with the bytes that it saves."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from ..._torch.func_transforms import let_transforms_pass
from ...stash import Stash

__all__ = ["Meter"]


class Meter:
    """Counts what is saved while it is entered, on the way to a stash."""

    def __init__(self, stash: Stash) -> None:
        self._stash = stash
        self._storages: dict[int, int] = {}
        self.seconds = 0.0
        """How long it was entered."""

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Everything that is saved inside goes to the stash."""
        let_transforms_pass()
        begun = time.perf_counter()
        with torch.autograd.graph.saved_tensors_hooks(self._pack, self._stash.unpack):
            yield
        self.seconds = time.perf_counter() - begun

    def steps_aside(self) -> None:
        """A transform of ``torch.func`` runs without hooks: what it saves is not counted."""

    def _pack(self, tensor: Tensor) -> object:
        if tensor.layout is torch.strided and not (tensor.is_leaf and tensor.requires_grad):
            storage = tensor.untyped_storage()
            self._storages[storage.data_ptr()] = storage.nbytes()
        return self._stash.pack(tensor)

    def saved_bytes(self, but: Iterable[Tensor] = ()) -> int:
        """Bytes of the storages that were saved, each counted once, but those of the tensors ``but``."""
        known = {each.untyped_storage().data_ptr() for each in but if each.layout is torch.strided}
        return sum(nbytes for address, nbytes in self._storages.items() if address not in known)
