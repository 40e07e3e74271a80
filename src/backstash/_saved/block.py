"""Blocks: which storage is which, at which version, and where its bytes are.

A *source* is one storage at one version. It owns a weak reference to the storage, which keeps the
storage's identity (not its bytes) from being handed out again while the source is alive: so a table keyed
by that identity cannot confuse two storages. It also has a *guard*: a tensor without memory that shares
the saved tensor's version counter, so that a change in place can be seen after the memory is gone.

A *block* is what moves: a source's whole storage, or a copy of a small part of it. It starts in place,
holding an alias of the memory; on its way down it still holds it; once it has landed only the parcel below
has the bytes.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .._runtime.reclaim import BlockCleanup, on_death
from .._torch.versions import same_counter

if TYPE_CHECKING:
    from .._device.base import Copy
    from .._tiers.device_tiers import DeviceTiers
    from .access_order import ForwardPass
    from .thread_state import ThreadState
    from .view import StridedRegion

__all__ = [
    "Block",
    "StorageVersion",
]

_NOTHING = torch.empty(0, device="cpu")
_free_weak_ref: Any = torch.UntypedStorage._free_weak_ref


class StorageVersion:
    """One storage at one version; its blocks own it."""

    __slots__ = (
        "__del__",
        "__weakref__",
        "block",
        "cdata",
        "copied_bytes",
        "owner",
        "probe",
        "slices",
        "version",
    )
    __del__: Callable[[], None]

    def __init__(self, tensor: Tensor, storage: torch.UntypedStorage) -> None:
        # What StorageWeakRef does, whose own __del__ is Python: see _runtime/reclaim.
        self.__del__ = functools.partial(_free_weak_ref, storage._weak_ref())
        self.cdata = storage._cdata
        self.version = tensor._version
        self.owner = weakref.ref(_owner_of(tensor))
        self.probe = tensor.detach()
        try:
            self.probe.data = _NOTHING  # drops the memory, keeps the counter
        except RuntimeError:  # an accelerator from outside PyTorch takes only what is of its kind
            self.probe.data = _nothing_like(tensor)
        self.block: weakref.ref[Block] | None = None  # of the whole storage
        self.slices: dict[object, weakref.ref[Block]] | None = None  # copies of parts, by Part.key
        self.copied_bytes = 0  # of small parts so far

    @property
    def changed(self) -> bool:
        """Whether the storage was modified in place since it was saved, as far as autograd can know."""
        return self.probe._version != self.version

    def is_of(self, tensor: Tensor) -> bool:
        """Whether ``tensor``, which has this storage, has the very bytes that were saved."""
        if not tensor._version == self.version == self.probe._version:
            return False
        # A view and its base share their counter: mostly nothing has to be tried.
        return self.owner() is _owner_of(tensor) or same_counter(self.probe, tensor)


class Block:
    """The bytes of one storage, wherever they are now. Every entry that needs them owns it."""

    __slots__ = (
        "__del__",
        "__weakref__",
        "address",
        "alias",
        "arrival",
        "backing",
        "cleanup",
        "entries",
        "forward_pass",
        "goes_on",
        "index",
        "lost",
        "nbytes",
        "offset",
        "origin",
        "root",
        "root_low",
        "root_version",
        "saved_regions",
        "served",
        "storage_version",
        "stream",
        "thread_state",
        "tiers",
        "turn",
        "unsure",
    )
    __del__: Callable[[], None]

    def __init__(self, storage_version: StorageVersion, alias: Tensor, tiers: DeviceTiers) -> None:
        storage = alias.untyped_storage()
        self.nbytes = storage.nbytes()
        # What the budgets count for it, and what events call it.
        self.cleanup = BlockCleanup(tiers.reclaim_queue, tiers.number, self.nbytes)
        self.__del__ = on_death(tiers.reclaim_queue, self.cleanup)
        self.storage_version = storage_version
        self.origin = storage_version  # whose bytes these are: differs for a copy of a part
        self.alias: Tensor | None = alias  # in place or on its way down; None once it has landed
        self.address = storage.data_ptr()  # while in place; its residue matters ever after
        self.tiers = tiers  # whose budgets count it
        self.stream = tiers.stream()  # that its bytes were made on, on an accelerator
        self.lost = ""  # why its bytes cannot be known, once they cannot
        self.thread_state: ThreadState
        self.forward_pass: ForwardPass
        self.index = 0  # in its round
        self.backing: Any = None  # what carries it below: a Parcel or a HostParcel
        # What its entries need, as far as that had to be asked; None: all of it.
        self.saved_regions: list[StridedRegion] | None = None
        self.goes_on = False  # whether it is to go to disk whatever room the host has
        self.unsure = False  # whether it landed while its copy still ran
        self.arrival: Copy | None = None  # of root, on an accelerator
        self.offset = 0  # of its first byte in the parcel
        self.entries = 0  # how many saves it stands for
        # One read serves every entry once: a turn. Then the memory is let go.
        self.turn = 0
        self.served = 0
        self.root: Tensor | None = None  # bytes read back, as one storage for all views
        self.root_low = 0  # where in root the block's first byte is
        self.root_version = 0

    @property
    def facts(self) -> tuple[int, int, str]:
        """What events say of it: its bytes, its number, and the module that saved it."""
        return self.nbytes, self.cleanup.serial, self.cleanup.module

    def serves(self, region: StridedRegion) -> bool:
        """Whether its bytes are right for ``part`` too, where nobody knows what else is written.

        While it is in place they are, and stay so. Once it has left, only what had been saved by then is.
        """
        if self.saved_regions is None:
            return True
        for saved in self.saved_regions:
            if saved.covers(region):
                return True
        if self.backing is not None or self.alias is None:
            return False
        self.saved_regions.append(region)
        return True

    def let_go(self) -> None:
        """Drop the storage that was read back; the parcel still has the bytes."""
        self.root = self.arrival = None

    @property
    def has_moved(self) -> bool:
        """Whether its storage was resized, and so has other memory: that raises no version."""
        alias = self.alias
        return alias is not None and alias.untyped_storage().data_ptr() != self.address

    @property
    def where(self) -> str:
        """The tier that has the bytes: ``"keep"`` until they have landed on ``"disk"``."""
        return "keep" if self.alias is not None or self.backing is None else self.backing.tier


def _nothing_like(tensor: Tensor) -> Tensor:
    empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    empty = torch._neg_view(empty) if tensor.is_neg() else empty
    return empty.conj() if tensor.is_conj() else empty


def _owner_of(tensor: Tensor) -> Tensor:
    base = tensor._base
    return tensor if base is None else base
