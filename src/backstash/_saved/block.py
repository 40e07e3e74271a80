"""Blocks: which storage is which, at which version, and the bytes of one.

A *storage version* is one storage at one version. It owns a weak reference to the storage, which keeps the
storage's identity (not its bytes) from being handed out again while it is alive: so a table keyed by that
identity cannot confuse two storages. It also has a *version probe*: a tensor without memory that shares the
saved tensor's version counter, so that a change in place is seen after the memory is gone.

A *block* is what moves: the whole storage, or a copy of a small region of it. Its ``placement`` says where the
bytes are.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .._device.base import Check, Device
from .._device.fingerprint import fingerprint, same_bytes
from .._runtime.reclaim import Cleanup, Ledger, ReclaimQueue
from .._torch.dispatch import count_dispatch_modes, without_dispatch_modes, without_function_modes
from .._torch.engine import task_or_none
from .._torch.storages import free_weak_ref, storage_identity, storage_of, weak_ref
from .._torch.versions import same_counter
from .access_order import ForwardPass
from .placement import Arrival, Placement, Resident
from .save_counts import BlockSaves
from .slice_counts import Slices
from .thread_state import ThreadState
from .view import ALIGNMENT_BYTES, with_bits_of

__all__ = [
    "Block",
    "BlockCleanup",
    "Loaded",
    "Mark",
    "PartedStorage",
    "Reduction",
    "StorageVersion",
]

_NOTHING = torch.empty(0, device="cpu")


class StorageVersion:
    """One storage at one version; its blocks own it."""

    __slots__ = (
        "__del__",
        "__weakref__",
        "block",
        "cdata",
        "copied_bytes",
        "origin",
        "owner",
        "probe",
        "regions",
        "slices",
        "version",
    )
    __del__: Callable[[], None]
    is_parted = False
    """Whether it is of several tensors that have version counters of their own."""

    def __init__(self, tensor: Tensor, storage: torch.UntypedStorage) -> None:
        # What StorageWeakRef does, whose own __del__ is Python: see _runtime/reclaim.
        self.__del__ = functools.partial(free_weak_ref, weak_ref(storage))
        self.cdata = storage_identity(storage)
        self.version = tensor._version
        base = tensor._base
        self.owner = weakref.ref(tensor if base is None else base)
        self.probe = tensor.detach()
        try:
            self.probe.data = _NOTHING  # drops the memory, keeps the counter
        except RuntimeError:  # an accelerator from outside PyTorch takes only what is of its kind
            empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            self.probe.data = with_bits_of(tensor, empty)
        self.block: weakref.ref[Block] | None = None  # of the whole storage
        self.regions: dict[object, weakref.ref[Block]] | None = None  # copied, by their key
        self.slices: Slices | None = None  # what is saved of it, where small slices are
        self.copied_bytes = 0  # of small regions so far
        self.origin: StorageVersion | None = None  # of a copy of a region: what it was copied from

    @property
    def changed(self) -> bool:
        """Whether the storage was modified in place since it was saved, as far as autograd can know."""
        return self.probe._version != self.version

    def assumed_saves(self, nbytes: int) -> int:
        """How often a block of it is saved, of which nothing is known but that ``nbytes`` of it were; 0: nor is
        that."""
        return 0

    @property
    def is_held(self) -> bool:
        """Whether the program has the tensor yet, unchanged and with this storage: it may be saved again."""
        owner = self.owner()
        if owner is None or self.changed:
            return False
        storage = storage_of(owner)  # another one after ``x.data = y``, which raises no version
        return storage is not None and storage_identity(storage) == self.cdata

    def counted(self, view: Tensor) -> Tensor:
        """``view``, with the version counter of what was saved."""
        counted = self.probe.detach()
        counted.data = view
        return counted

    def is_of(self, tensor: Tensor) -> bool:
        """Whether ``tensor``, which has this storage, has the very bytes that were saved."""
        if not tensor._version == self.version == self.probe._version:
            return False
        # A view and its base share their counter: mostly nothing has to be tried.
        base = tensor._base
        owner = tensor if base is None else base
        return self.owner() is owner or same_counter(self.probe, tensor)


class PartedStorage(StorageVersion):
    """One storage of several tensors that are no views and have version counters of their own, as the gates of
    ``nn.LSTMCell`` on the CPU. It has no version itself: each entry asks that of its part, wherever the bytes
    are, since a part may have been changed in place before the others left with it.

    In a first step the block waits until all of it is in parts that were saved, or until the program has freed
    or changed these. A block of 512 KiB or more leaves from a copy: a change of one part while a worker reads
    is no change of the others. A part that is saved after the block has left is compared, and is a block of its
    own if its bytes differ or no fingerprint was taken.
    """

    __slots__ = ("_nbytes", "_saved", "is_new", "parts")
    is_parted = True

    def __init__(self, tensor: Tensor, storage: torch.UntypedStorage) -> None:
        super().__init__(tensor, storage)
        self.is_new = False
        """Whether it is not known how often it will be saved: once each part, it is assumed."""
        self.parts: list[StorageVersion] = []
        """Those that were saved, oldest first."""
        self._nbytes = storage.nbytes()
        self._saved: dict[int, int] = {}  # by where a part begins: its bytes

    def add(self, part: StorageVersion, offset: int, nbytes: int) -> None:
        """One of them was saved, perhaps not for the first time."""
        if part not in self.parts:
            self.parts.append(part)
            self._saved[offset] = nbytes

    def assumed_saves(self, nbytes: int) -> int:
        """See :meth:`StorageVersion.assumed_saves`: once each part."""
        self.is_new = True
        return self._nbytes // nbytes

    @property
    def is_full(self) -> bool:
        """Whether all of it is in parts that were saved."""
        return sum(self._saved.values()) >= self._nbytes

    @property
    def changed(self) -> bool:
        """A change of one part is none of the others'."""
        return False

    @property
    def is_held(self) -> bool:
        """Whether the program has any of the parts yet."""
        return any(part.is_held for part in self.parts)


class Loaded:
    """A block's bytes that were read back: one storage for all its views."""

    __slots__ = ("arrival", "asked_by", "low", "root", "version")

    def __init__(self, root: Tensor, low: int, arrival: Arrival | None, asked_by: int = -1) -> None:
        self.root = root
        self.low = low  # where in root the block's first byte is
        self.arrival = arrival  # on an accelerator, what each user is ordered after
        self.version = root._version
        # The backward whose end asks an accelerator whether these are the bytes; -1: it is known.
        self.asked_by = asked_by

    @property
    def is_good(self) -> bool:
        """Whether these are the block's bytes, as far as this thread's backward has to know: none has changed
        them, and where an accelerator is yet to be asked, this one asks."""
        return self.root._version == self.version and self.asked_by in (-1, task_or_none())


class BlockCleanup(Cleanup):
    """What a block leaves: what the budgets count for it."""

    __slots__ = ("again_bytes", "is_counted", "module", "nbytes", "resident_bytes", "serial")

    def __init__(self, reclaim_queue: ReclaimQueue, number: int, nbytes: int) -> None:
        self.mark = reclaim_queue.mark
        self.number = number
        self.loaded_bytes = self.again_bytes = 0
        self.nbytes = nbytes
        self.resident_bytes = 0  # that the keep budget counts
        self.serial = -1  # among all blocks of the stash, while it counts as one of them
        self.is_counted = True  # not a packed block's payload, which has the serial of that
        self.module = ""

    @property
    def facts(self) -> tuple[int, int, str] | None:
        """See :attr:`Cleanup.facts`."""
        is_one = self.serial >= 0 and self.is_counted
        return (self.nbytes, self.serial, self.module) if is_one else None

    def settle(self, ledger: Ledger) -> None:
        """See :meth:`Cleanup.settle`."""
        resident, self.resident_bytes, self.serial = self.resident_bytes, 0, -1
        again, self.again_bytes = self.again_bytes, 0
        ledger.subtract(resident_bytes=resident, again_bytes=again)


class Reduction:
    """How a block is made smaller, or discarded to be computed again, once it is complete.

    Args:
        dtype: that its bytes are read in.
    """

    __slots__ = ("apply", "depth", "dtype", "is_whole", "rounds")

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.apply: Callable[[Block], Block | None] | None = None
        """Called when the block is complete: returns the block that is to move then, or ``None``."""
        self.depth = 0
        """How many blocks one after another are recomputed, with this one."""
        self.rounds = False
        """Whether a lossy codec packs it."""
        self.is_whole = True
        """Whether every element of it is a value, and none what memory held before."""


class Mark:
    """What the bytes of a block were when it left: a fingerprint, or on an accelerator what stands for one."""

    __slots__ = ("matched", "value")

    def __init__(self, value: Any) -> None:
        self.value = value
        self.matched = False
        """Whether a save has relied on it."""


class Block:
    """The bytes of one storage, wherever they are now. Every entry that needs them owns it.

    Args:
        storage_version: whose bytes they are.
        alias: a tensor with the memory and the version counter (of parts, that of one), without a graph.
        reclaim_queue: gets the block's cleanup when it dies.
        number: of the device whose tiers count it.
    """

    __slots__ = (
        "__del__",
        "__weakref__",
        "address",
        "cleanup",
        "entries",
        "forward_pass",
        "index",
        "loaded",
        "making",
        "mark",
        "nbytes",
        "number",
        "offset",
        "packs",
        "placement",
        "reduction",
        "saves",
        "served",
        "storage_version",
        "stream",
        "thread_state",
        "tier",
        "turn",
    )
    __del__: Callable[[], None]

    def __init__(
        self,
        storage_version: StorageVersion,
        alias: Tensor,
        reclaim_queue: ReclaimQueue,
        number: int,
    ) -> None:
        storage = alias.untyped_storage()
        self.nbytes = storage.nbytes()
        # What the budgets count for it, and what events call it.
        self.cleanup = BlockCleanup(reclaim_queue, number, self.nbytes)
        self.__del__ = functools.partial(reclaim_queue.append, self.cleanup)
        self.placement: Placement = Resident(alias)
        self.storage_version = storage_version
        self.address = storage.data_ptr()  # while in place; its residue matters ever after
        self.number = number
        self.stream: Any = None  # that its bytes were made on, on an accelerator
        self.thread_state: ThreadState
        self.forward_pass: ForwardPass[Block]
        self.index = 0  # in its forward pass
        self.tier = ""  # where it goes at once, whatever "keep" has room for; "": nowhere
        self.reduction: Reduction | None = None
        self.saves = BlockSaves()
        self.mark: Mark | None = (
            None  # what its bytes were when it left, where it may be saved again
        )
        self.offset = 0  # of its first byte in its backing
        self.entries = 0  # how many saves it stands for
        # One read serves every entry once: a turn. Then the memory is let go.
        self.turn = 0
        self.served = 0
        self.loaded: Loaded | None = None
        self.making: Any = None  # while a worker makes it ahead of need, and until it is used
        self.packs: weakref.ref[Block] | None = None  # of a payload: the packed block

    @property
    def is_copy(self) -> bool:
        """Whether it is a copy of a region, and not the storage itself."""
        return self.storage_version.origin is not None

    @property
    def dtype(self) -> torch.dtype:
        """That its bytes are read in; it is to be made smaller."""
        assert self.reduction is not None
        return self.reduction.dtype

    @property
    def depth(self) -> int:
        """How many blocks one after another are recomputed, with this one."""
        return self.reduction.depth if self.reduction is not None else 0

    @property
    def is_rounded(self) -> bool:
        """Whether a lossy codec is to pack it: another save of its storage may not want that."""
        return self.reduction is not None and self.reduction.rounds

    @property
    def facts(self) -> tuple[int, int, str]:
        """What events say of it: its bytes, its number, and the module that saved it."""
        return self.nbytes, self.cleanup.serial, self.cleanup.module

    @property
    def waits(self) -> bool:
        """Whether it is in place and no budget counts it, until it was saved as often as is expected."""
        return self.placement.is_kept and not self.cleanup.resident_bytes

    def copy_out(self) -> bool:
        """Take the bytes of parts to memory of its own, on the CPU: any part may be written while a worker
        reads, which is a change of that one alone. ``False``: there is no such memory."""
        alias = self.placement.alias
        assert alias is not None
        storage = alias.untyped_storage()
        if storage_identity(storage) != self.storage_version.cdata:
            return True  # it was, when it was to leave before
        modes = without_function_modes(), without_dispatch_modes(), torch.inference_mode(False)
        try:
            with modes[0], modes[1], modes[2], torch.no_grad():
                whole = torch.empty(0, dtype=torch.uint8, device="cpu")
                copy = whole.set_(storage, 0, (self.nbytes,), (1,)).clone()
                if self.nbytes % alias.dtype.itemsize == 0:
                    copy = copy.view(alias.dtype)  # so that no part has to be, at each use
        except (RuntimeError, MemoryError):
            return False
        address = copy.data_ptr()
        if (address - self.address) % ALIGNMENT_BYTES:
            return False
        self.address, self.placement = address, Resident(copy)
        return True

    def is_copy_of(self, storage: torch.UntypedStorage) -> bool:
        """Whether the bytes are in memory that :meth:`copy_out` took, and not in ``storage``."""
        alias = self.placement.alias
        return alias is not None and storage_identity(alias.untyped_storage()) != storage_identity(
            storage
        )

    def take_fingerprint(self, device: Device | None) -> None:
        """Note what its bytes are, which leave now, so that a later save can be compared with them."""
        self.mark = None
        if count_dispatch_modes() > 0:
            return  # of the program's, which would see it
        alias = self.placement.alias
        assert alias is not None
        storage = alias.untyped_storage()
        self.mark = Mark(
            fingerprint(storage) if device is None else device.mark(storage, self.stream)
        )

    def has_in_place(self, storage: torch.UntypedStorage) -> bool:
        """Whether another storage of the CPU has the bytes of this block, which is in place."""
        alias = self.placement.alias
        if alias is None or count_dispatch_modes() > 0 or storage.nbytes() != self.nbytes:
            return False
        return same_bytes(alias.untyped_storage(), storage)

    def has(self, storage: torch.UntypedStorage, device: Device | None) -> bool | Check:
        """Whether what ``storage`` has now is what the block's entries are given, as far as it has left.

        It was perhaps written since, unseen. On an accelerator the answer is a comparison that backward has
        to ask; where nothing was noted of the bytes, it is no.
        """
        mark = self.mark
        if mark is None or count_dispatch_modes() > 0:
            return False
        if device is not None:
            found = device.compare(mark.value, storage) or False
        else:
            found = mark.value == fingerprint(storage)
        mark.matched = mark.matched or bool(found)
        return found

    def free(self) -> None:
        """Drop the storage that was read back or made; the bytes are still where they come from."""
        self.loaded = self.making = None

    @property
    def has_moved(self) -> bool:
        """Whether its storage was resized, and so has other memory: that raises no version."""
        alias = self.placement.alias
        return alias is not None and alias.untyped_storage().data_ptr() != self.address

    @property
    def where(self) -> str:
        """The tier that has the bytes: ``"keep"`` until their write has completed. ``"packed"``, wherever the
        payload is; ``"recomputed"``, wherever the input is."""
        placement = self.placement
        if placement.derivation is not None:
            return placement.derivation.where
        backing = placement.backing
        return "keep" if backing is None or placement.alias is not None else backing.tier
