"""A table of saved tensors by storage, so that they can be cloned before the storage is written.

A storage is identified by its ``_cdata``. The table owns a weak reference to it, so that no other storage gets
the same identity. Every alias of a saved tensor has the same storage, whatever its address, shape or dtype, so
the table finds a write through any of them.

The table keeps nothing of a saved tensor that died. The callback of its weak reference may run on any thread
at any point of a program. So it only appends to a queue, which the next call drains.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from .._recompute.operations import place_of
from .._saved.view import extent_bytes, own_copy
from .._torch.storages import keep_identity, storage_identity, storage_of
from .._torch.tensors import parts_of, toggle_bits
from .._torch.versions import changed_in_place, version_of

__all__ = ["Saved", "WatchTable"]

_PLAIN = (Tensor, torch.nn.Parameter)


class WatchedRegion(NamedTuple):
    """Bytes ``low`` to ``high`` of a storage."""

    storage: torch.UntypedStorage
    low: int
    high: int


class Saved:
    """A saved tensor: where its bytes are, and an alias, or a clone that was made before they changed."""

    __slots__ = (
        "__weakref__",
        "alias",
        "cloned",
        "place",
        "version",
        "where",
    )

    def __init__(self, tensor: Tensor, *, hold: bool) -> None:
        self.place = place_of(tensor) if _is_plain(tensor) else None
        self.alias = tensor.detach() if hold or self.place is None else None
        self.version = version_of(tensor)
        self.cloned = False
        self.where: list[tuple[int, object]] = []  # in the table: storage and key

    def get(self) -> Tensor:
        """Return the tensor as it was saved. Raises ``InplaceError`` after a change that was not seen."""
        alias = self.alias
        assert alias is not None
        if self.version is not None and version_of(alias) != self.version:
            raise changed_in_place(alias, self.version)
        return alias

    def clone_from(self, storage: torch.UntypedStorage) -> None:
        """Clone the value before a write to ``storage``, which holds the saved tensor's bytes."""
        source = self.alias
        if source is None:
            assert self.place is not None
            dtype, size, stride, offset, conj, neg = self.place
            source = torch.empty(0, dtype=dtype, device=storage.device)
            source.set_(storage, offset, size, stride)
            source = toggle_bits(source, conj=conj, neg=neg)
        self.alias = own_copy(source)
        self.version = version_of(self.alias)
        self.cloned = True


class _Storage(NamedTuple):
    weak: object
    """A weak reference to the storage, so that no other storage gets its identity."""
    saved: dict[object, tuple[weakref.ref[Saved], int, int]]


class WatchTable:
    """The saved tensors of one context. Safe to use from several threads."""

    def __init__(self) -> None:
        self._storages: dict[int, _Storage] = {}
        self._dead: deque[tuple[int, object]] = deque()
        self._clones: weakref.WeakSet[Saved] = weakref.WeakSet()
        self._lock = threading.RLock()
        self.closed = False

    def add(self, tensor: Tensor, *, hold: bool) -> Saved:
        """Watch ``tensor``; with ``hold``, keep it alive. A second save of it gets the same record."""
        regions = _regions(tensor)
        with self._lock:  # a pack hook calls this, and gradients are disabled there
            self._drain()
            key: object = object()
            if regions and _is_plain(tensor):
                key = place_of(tensor), version_of(tensor), hold
                known = self._storages.get(storage_identity(regions[0].storage))
                entry = known.saved.get(key) if known is not None else None
                saved = entry[0]() if entry is not None else None
                if saved is not None:
                    return saved
            saved = Saved(tensor, hold=hold)
            if regions is None:  # no storage to watch: it must be safe from the start
                assert saved.alias is not None
                saved.alias = saved.alias.clone()
                saved.version = None
            elif not regions:  # no bytes, but a write may raise the version
                saved.alias = tensor.detach().clone()
                saved.version, saved.cloned = None, True
            self._register(saved, regions or [], key)
            return saved

    def before_write(self, tensor: Tensor, *, moves_only: bool) -> None:
        """Clone the saved tensors that a write to ``tensor`` changes. With ``moves_only`` no byte changes."""
        with self._lock, torch.no_grad():
            self._drain()
            for storage, low, high in _regions(tensor) or ():
                for saved, saved_low, saved_high in self._in(storage):
                    untouched = moves_only or high <= saved_low or saved_high <= low
                    if untouched and saved.alias is not None and not saved.cloned:
                        # The write raises the version that an alias shares, though its bytes stay.
                        saved.version = None
                    else:
                        self._clone(saved, storage)

    def cloned(self) -> dict[Saved, Tensor]:
        """Return the living clones of saved tensors."""
        with self._lock:
            return {saved: saved.alias for saved in self._clones if saved.alias is not None}

    def alive(self) -> dict[object, Saved]:
        """Return the living saved tensors, cloned or not."""
        with self._lock:
            self._drain()
            return {id(saved): saved for saved in self._everything()}

    def close(self) -> None:
        """Release every tensor. What is still saved can no longer be unpacked."""
        with self._lock:
            self.closed = True
            for saved in list(self._everything()):
                saved.alias = None
            self._storages.clear()
            self._clones.clear()
            self._dead.clear()

    def _everything(self) -> Iterator[Saved]:
        for storage in self._storages.values():
            for reference, _, _ in storage.saved.values():
                saved = reference()
                if saved is not None:
                    yield saved

    def _in(self, storage: torch.UntypedStorage) -> list[tuple[Saved, int, int]]:
        known = self._storages.get(storage_identity(storage))
        found = [(ref(), low, high) for ref, low, high in known.saved.values()] if known else []
        return [(saved, low, high) for saved, low, high in found if saved is not None]

    def _register(self, saved: Saved, regions: list[WatchedRegion], key: object) -> None:
        dead = self._dead
        for storage, low, high in regions:
            identity = storage_identity(storage)
            where = (identity, key)
            record = self._storages.get(identity)
            if record is None:
                record = self._storages[identity] = _Storage(keep_identity(storage), {})
            reference = weakref.ref(saved, lambda _, where=where: dead.append(where))  # type: ignore[misc]
            record.saved[key] = (reference, low, high)
            saved.where.append(where)

    def _clone(self, saved: Saved, storage: torch.UntypedStorage) -> None:
        saved.clone_from(storage)
        for where in saved.where:
            self._forget(*where)
        saved.where.clear()
        assert saved.alias is not None
        # A clone that was unpacked may be written, too, so it is watched.
        self._register(saved, _regions(saved.alias) or [], object())
        self._clones.add(saved)

    def _drain(self) -> None:
        while self._dead:
            cdata, key = self._dead.popleft()
            record = self._storages.get(cdata)
            if record is not None and key in record.saved and record.saved[key][0]() is None:
                self._forget(cdata, key)

    def _forget(self, cdata: int, key: object) -> None:
        record = self._storages.get(cdata)
        if record is not None:
            record.saved.pop(key, None)
            if not record.saved:
                del self._storages[cdata]


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) in _PLAIN and tensor.layout is torch.strided and not tensor.is_nested


def _regions(tensor: Tensor) -> list[WatchedRegion] | None:
    """Return where the bytes of ``tensor`` are; ``None`` if that is unknown."""
    parts = parts_of(tensor)
    if parts is not None:
        found = [_regions(part) for part in parts]
        known = [regions for regions in found if regions is not None]
        return [*itertools.chain(*known)] if len(known) == len(found) else None
    storage = storage_of(tensor)
    if storage is None:
        return None
    if tensor.is_nested:
        return [WatchedRegion(storage, 0, storage.nbytes())]
    if tensor.numel() == 0:
        return []
    return [WatchedRegion(storage, *extent_bytes(tensor))]
