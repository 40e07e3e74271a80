"""What a write that raises no version makes unknowable.

A write through ``.data``, NumPy or an alias with a version counter of its own is unseen, by plain PyTorch
too. What was saved before it has two values, the one that was saved and the one that is there now: a result
for which the two differ is not judged. What is saved after it must be right. On an accelerator an error is,
too, where a tensor was saved, written unseen and saved again *at the same version*: from there on nothing of
a program is compared.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from backstash._torch.versions import same_counter

NEVER = 1 << 30


@dataclass
class _Save:
    probe: Tensor
    """Shares the saved tensor's version counter."""
    version: int
    bytes: Tensor
    """Which bytes of the storage it needs, as a mask."""
    any_byte: bool
    """Whether all of the storage counts as saved: what autograd made is complete."""
    written: bool = False
    """Whether it was written unseen since."""


@dataclass
class Knowable:
    """Watches the saves and the writes of one run of a program."""

    step: int = 0
    """The step that runs."""
    unseen_from: int = NEVER
    """The step from which what was saved and what is there may differ."""
    cut: int = NEVER
    """The step from which nothing is compared on an accelerator."""
    _saves: dict[int, tuple[Any, list[_Save]]] = field(default_factory=dict)

    def saved(self, tensor: Tensor) -> None:
        """``tensor`` is being saved."""
        try:
            storage = tensor.untyped_storage()
            mask = _bytes_of(tensor)
        except (RuntimeError, NotImplementedError):
            return
        # The storage is held, so that its identity is not handed out again.
        _, saves = self._saves.setdefault(storage._cdata, (storage, []))
        for save in saves:
            same = save.probe._version == tensor._version == save.version
            if same and save.written and same_counter(save.probe, tensor):
                self.cut = min(self.cut, self.step)
        whole = (tensor if tensor._base is None else tensor._base).requires_grad
        saves.append(_Save(tensor.detach(), tensor._version, mask, whole))

    @contextmanager
    def watch(self, *tensors: Tensor | None) -> Iterator[None]:
        """Each of ``tensors`` may be written in place within this."""
        places = [place for each in tensors for place in self._places_of(each)]
        before = [[save.probe._version for save in saves] for _, saves, _ in places]
        olds = [storage.clone() for storage, _, _ in places]
        yield
        for (storage, saves, mask), versions, old in zip(places, before, olds, strict=True):
            if storage.nbytes() == old.nbytes() and _same(storage, old):
                continue
            for save, version in zip(saves, versions, strict=False):
                if save.probe._version == version:
                    self.unseen_from = min(self.unseen_from, self.step)
                    touches = len(mask) == len(save.bytes) and bool((mask & save.bytes).any())
                    save.written |= save.any_byte or touches

    def _places_of(self, tensor: Tensor | None) -> list[tuple[Any, list[_Save], Tensor]]:
        try:
            if tensor is None:
                return []
            known = self._saves.get(tensor.untyped_storage()._cdata)
            return [] if known is None else [(*known, _bytes_of(tensor))]
        except (RuntimeError, NotImplementedError):
            return []


def _bytes_of(tensor: Tensor) -> Tensor:
    item = tensor.element_size()
    count = tensor.untyped_storage().nbytes() // item
    index = torch.arange(count).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
    mask = torch.zeros(count, item, dtype=torch.bool)
    mask[index.reshape(-1)] = True
    return mask.view(-1)


def _same(one: Any, other: Any) -> bool:
    empty = torch.tensor([], dtype=torch.uint8, device=one.device)
    first, second = (empty.new_empty(0).set_(each) for each in (one, other))
    return torch.equal(first, second)
