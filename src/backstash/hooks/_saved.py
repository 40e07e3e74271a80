"""Which bytes a forward saves for backward, and which module's operations save them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

__all__ = ["SavedBytes"]


class SavedBytes:
    """Counts saved storages once each, for the module that was running when the first was saved.

    The storages of parameters and buffers are not counted: they are there without backward too. Inside a
    region with hooks of its own (activation checkpointing) nothing is seen.
    """

    def __init__(self, owned: Iterable[torch.Tensor]) -> None:
        self.by_path: dict[str, int] = defaultdict(int)
        """Bytes by the path of the innermost module."""
        self.running: list[str] = []
        """The paths of the modules that run now, innermost last."""
        # Storages are held until the count ends: a freed one's identity would be given out again.
        self._seen: dict[int, torch.UntypedStorage] = {}
        for tensor in owned:
            self._see(tensor)

    def _see(self, tensor: torch.Tensor) -> int:
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):
            return 0  # a layout or a subclass without one storage
        if storage._cdata in self._seen:
            return 0
        self._seen[storage._cdata] = storage
        return storage.nbytes()

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        path = self.running[-1] if self.running else ""
        self.by_path[path] += self._see(tensor)
        # Not the tensor itself: one that is its own node's output would keep itself alive.
        return tensor.detach()

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Counts what is saved inside; the storages are let go at the end."""
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor):
                yield
        finally:
            self._seen.clear()
