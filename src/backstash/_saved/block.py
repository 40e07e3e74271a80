"""Storage versions and blocks.

A *storage version* is one storage at one version. It holds a weak reference to the storage. The reference does
not keep the bytes alive, but it keeps PyTorch from reusing the storage's identity, so a table keyed by that
identity cannot confuse two storages. It also has a *version probe*: a tensor without memory that shares the
version counter of the saved tensor. The probe shows a change in place even after the memory was freed.

A *block* is the unit that the stash moves: a whole storage, or a copy of a small region of one. Its
``placement`` says where the bytes are.
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
_of_own_kind: set[str] = set()  # types of devices whose tensors accept no memory of the CPU


class StorageVersion:
    """One storage at one version. Its blocks own it."""

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
    """Whether several tensors that have version counters of their own share the storage."""

    def __init__(self, tensor: Tensor, storage: torch.UntypedStorage) -> None:
        # The same as StorageWeakRef, whose __del__ is written in Python: see _runtime/reclaim.
        self.__del__ = functools.partial(free_weak_ref, weak_ref(storage))
        self.cdata = storage_identity(storage)
        self.version = tensor._version
        base = tensor._base
        self.owner = weakref.ref(tensor if base is None else base)
        self.probe = tensor.detach()
        is_emptied = tensor.device.type not in _of_own_kind
        if is_emptied:
            try:
                self.probe.data = _NOTHING  # drops the memory, keeps the counter
            except RuntimeError:  # an out-of-tree accelerator
                _of_own_kind.add(tensor.device.type)
                is_emptied = False
        if not is_emptied:
            empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            self.probe.data = with_bits_of(tensor, empty)
        self.block: weakref.ref[Block] | None = None  # of the whole storage
        self.regions: dict[object, weakref.ref[Block]] | None = None  # copied regions, by key
        self.slices: Slices | None = None  # the slices that were saved of it, if there are any
        self.copied_bytes = 0  # of small regions, so far
        self.origin: StorageVersion | None = None  # of a copy of a region: its source

    @property
    def changed(self) -> bool:
        """Whether the storage was modified in place since it was saved, as far as autograd can know."""
        return self.probe._version != self.version

    def assumed_saves(self, nbytes: int) -> int:
        """Return how many saves to assume for a block of which only ``nbytes``, the size of its first saved
        part, is known; 0 if nothing can be assumed."""
        return 0

    def has_all_saves(self, saves: BlockSaves) -> bool:
        """Return whether a block of it that waits in place was saved as often as expected."""
        return saves.done >= saves.expected

    @property
    def is_held(self) -> bool:
        """Whether the program still holds the tensor, unchanged and with this storage."""
        owner = self.owner()
        if owner is None or self.changed:
            return False
        storage = storage_of(owner)  # ``x.data = y`` replaces the storage and raises no version
        return storage is not None and storage_identity(storage) == self.cdata

    def counted(self, view: Tensor) -> Tensor:
        """Return ``view`` with the version counter of the saved tensor."""
        counted = self.probe.detach()
        counted.data = view
        return counted

    def is_of(self, tensor: Tensor) -> bool:
        """Return whether ``tensor``, which has this storage, has exactly the bytes that were saved."""
        if not tensor._version == self.version == self.probe._version:
            return False
        # A view and its base share their version counter, so the first comparison mostly decides.
        base = tensor._base
        owner = tensor if base is None else base
        return self.owner() is owner or same_counter(self.probe, tensor)


class PartedStorage(StorageVersion):
    """One storage shared by several tensors that are not views of each other and have version counters of
    their own, such as the gates of ``nn.LSTMCell`` on the CPU. The storage itself has no version. Each entry
    checks the version of its part, wherever the bytes are, since a part may have been modified before the
    block left memory.

    In a first step the block stays in place until the saved parts cover all of it, or until the program has
    freed or modified them. A block of 512 KiB or more is written from a copy, since the program may write to
    one part while a worker reads. A part that is saved after the block has left memory is compared with it. It
    gets a block of its own if its bytes differ or no fingerprint was taken.
    """

    __slots__ = ("_nbytes", "_saved", "is_new", "parts")
    is_parted = True

    def __init__(self, tensor: Tensor, storage: torch.UntypedStorage) -> None:
        super().__init__(tensor, storage)
        self.is_new = False
        """Whether its number of saves is not known yet; one save of each part is assumed."""
        self.parts: list[StorageVersion] = []
        """The parts that were saved, oldest first."""
        self._nbytes = storage.nbytes()
        self._saved: dict[int, int] = {}  # offset of a part: its bytes

    def add(self, part: StorageVersion, offset: int, nbytes: int) -> None:
        """Record that ``part`` was saved, perhaps not for the first time."""
        if part not in self.parts:
            self.parts.append(part)
            self._saved[offset] = nbytes

    def assumed_saves(self, nbytes: int) -> int:
        """See :meth:`StorageVersion.assumed_saves`: one save of each part is assumed."""
        self.is_new = True
        return self._nbytes // nbytes

    def has_all_saves(self, saves: BlockSaves) -> bool:
        """See :meth:`StorageVersion.has_all_saves`: if it is new, once the saved parts cover all of it."""
        if not self.is_new:
            return super().has_all_saves(saves)
        if self.is_full:
            saves.expected = 0  # it is unknown whether parts will be saved again
        return self.is_full

    @property
    def is_full(self) -> bool:
        """Whether the saved parts cover all of it."""
        return sum(self._saved.values()) >= self._nbytes

    @property
    def changed(self) -> bool:
        """Always ``False``: a change of one part does not change the others."""
        return False

    @property
    def is_held(self) -> bool:
        """Whether the program still holds any of the parts."""
        return any(part.is_held for part in self.parts)


class Loaded:
    """The bytes of a block that were loaded: one storage for all of its views."""

    __slots__ = ("arrival", "asked_by", "low", "root", "version")

    def __init__(self, root: Tensor, low: int, arrival: Arrival | None, asked_by: int = -1) -> None:
        self.root = root
        self.low = low  # the offset of the block's first byte in root
        self.arrival = arrival  # on an accelerator, the copy that each user must be ordered after
        self.version = root._version
        # The backward that checks at its end whether the accelerator restored these bytes; -1: no check is
        # due.
        self.asked_by = asked_by

    @property
    def is_good(self) -> bool:
        """Whether these are the block's bytes, as far as this thread's backward has to know: nothing has
        modified them, and if the accelerator has yet to confirm them, this backward is the one that checks."""
        return self.root._version == self.version and self.asked_by in (-1, task_or_none())


class BlockCleanup(Cleanup):
    """What remains of a dead block: the bytes that the budgets count for it."""

    __slots__ = ("again_bytes", "module", "nbytes", "packs", "resident_bytes", "serial")

    def __init__(self, reclaim_queue: ReclaimQueue, number: int, nbytes: int) -> None:
        self.mark = reclaim_queue.mark
        self.number = number
        self.loaded_bytes = self.again_bytes = 0
        self.nbytes = nbytes
        self.resident_bytes = 0  # its bytes in the keep budget
        self.serial = -1  # its number among all blocks of the stash; -1: not counted as one
        self.packs: weakref.ref[Block] | None = (
            None  # if it is a payload: the block with its serial
        )
        self.module = ""

    @property
    def facts(self) -> tuple[int, int, str] | None:  # type: ignore[override]
        """See :attr:`Cleanup.facts`."""
        is_one = self.serial >= 0 and self.packs is None
        return (self.nbytes, self.serial, self.module) if is_one else None

    def settle(self, ledger: Ledger) -> None:
        """See :meth:`Cleanup.settle`."""
        resident, self.resident_bytes, self.serial = self.resident_bytes, 0, -1
        again, self.again_bytes = self.again_bytes, 0
        ledger.subtract(resident_bytes=resident, again_bytes=again)


class Reduction:
    """How a block is packed, or freed and later recomputed, once all of its bytes are written.

    Args:
        dtype: the dtype in which its bytes are read.
    """

    __slots__ = ("apply", "depth", "dtype", "is_whole", "rounds")

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.apply: Callable[[Block], Block | None] | None = None
        """Called when the block is complete. Returns the block to move instead, or ``None``."""
        self.depth = 0
        """How many blocks must be recomputed one after another to get this one, itself included."""
        self.rounds = False
        """Whether a lossy codec packs it."""
        self.is_whole = True
        """Whether every element holds a value, and none is uninitialized memory."""


class Mark:
    """The bytes of a block as they were when it left: a fingerprint, or the accelerator's equivalent."""

    __slots__ = ("matched", "value")

    def __init__(self, value: Any) -> None:
        self.value = value
        self.matched = False
        """Whether a later save relied on it."""


class Block:
    """The bytes of one storage, in whichever tier they are. Every entry that needs them owns the block.

    Args:
        storage_version: the storage version that the bytes belong to.
        alias: a tensor with the memory and its version counter (a storage of parts: the counter of one),
            without a graph.
        reclaim_queue: receives the block's cleanup when the block dies.
        number: the number of the device whose tiers count it.
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
        # The bytes that the budgets count for it, and its name in events.
        self.cleanup = BlockCleanup(reclaim_queue, number, self.nbytes)
        self.__del__ = functools.partial(reclaim_queue.append, self.cleanup)
        self.placement: Placement = Resident(alias)
        self.storage_version = storage_version
        self.address = storage.data_ptr()  # while in place; later its alignment matters
        self.number = number
        self.stream: Any = None  # on an accelerator, the stream that its bytes were written on
        self.thread_state: ThreadState
        self.forward_pass: ForwardPass[Block]
        self.index = 0  # in its forward pass
        self.tier = ""  # the tier that it goes to at once, even if "keep" has space; "": none
        self.reduction: Reduction | None = None
        self.saves = BlockSaves()
        self.mark: Mark | None = None  # a mark of its bytes when it left, if it may be saved again
        self.offset = 0  # of its first byte in its backing
        self.entries = 0  # the number of saves that share it
        # One load serves every entry once, which is called a turn. After that its memory is freed.
        self.turn = 0
        self.served = 0
        self.loaded: Loaded | None = None
        self.making: Any = None  # set while it is computed ahead of need, until used

    @property
    def is_copy(self) -> bool:
        """Whether it is a copy of a region, and not the storage itself."""
        return self.storage_version.origin is not None

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which its bytes are read. Only for a block that has a reduction."""
        assert self.reduction is not None
        return self.reduction.dtype

    @property
    def depth(self) -> int:
        """How many blocks must be recomputed one after another to get this one; 0 if it is not recomputed."""
        return self.reduction.depth if self.reduction is not None else 0

    @property
    def is_rounded(self) -> bool:
        """Whether a lossy codec is to pack it. Another save of its storage may not allow that."""
        return self.reduction is not None and self.reduction.rounds

    @property
    def facts(self) -> tuple[int, int, str]:
        """Its bytes, its number, and the module that saved it, as events report them."""
        return self.nbytes, self.cleanup.serial, self.cleanup.module

    @property
    def waits(self) -> bool:
        """Whether it is in place and counts toward no budget, because more saves of it are expected."""
        return self.placement.is_kept and not self.cleanup.resident_bytes

    def copy_out(self) -> bool:
        """Copy the bytes of a storage with parts to separate CPU memory, since the program may write to any
        part while a worker reads. Return ``False`` if there is no such memory."""
        alias = self.placement.alias
        assert alias is not None
        storage = alias.untyped_storage()
        if storage_identity(storage) != self.storage_version.cdata:
            return True  # an earlier eviction already made the copy
        modes = without_function_modes(), without_dispatch_modes(), torch.inference_mode(False)
        try:
            with modes[0], modes[1], modes[2], torch.no_grad():
                whole = torch.empty(0, dtype=torch.uint8, device="cpu")
                copy = whole.set_(storage, 0, (self.nbytes,), (1,)).clone()
                if self.nbytes % alias.dtype.itemsize == 0:
                    copy = copy.view(alias.dtype)  # so that parts need no view at each use
        except (RuntimeError, MemoryError):
            return False
        address = copy.data_ptr()
        if (address - self.address) % ALIGNMENT_BYTES:
            return False
        self.address, self.placement = address, Resident(copy)
        return True

    def is_copy_of(self, storage: torch.UntypedStorage) -> bool:
        """Return whether the bytes are in memory that :meth:`copy_out` allocated, and not in ``storage``."""
        alias = self.placement.alias
        return alias is not None and storage_identity(alias.untyped_storage()) != storage_identity(
            storage
        )

    def take_fingerprint(self, device: Device | None) -> None:
        """Record a fingerprint of its bytes, which leave memory now, to compare a later save with them."""
        self.mark = None
        if count_dispatch_modes() > 0:
            return  # a dispatch mode of the program would see the operations
        alias = self.placement.alias
        assert alias is not None
        storage = alias.untyped_storage()
        self.mark = Mark(
            fingerprint(storage) if device is None else device.mark(storage, self.stream)
        )

    def has_in_place(self, storage: torch.UntypedStorage) -> bool:
        """Return whether another CPU storage has the same bytes as this block, which is in place."""
        alias = self.placement.alias
        if alias is None or count_dispatch_modes() > 0 or storage.nbytes() != self.nbytes:
            return False
        return same_bytes(alias.untyped_storage(), storage)

    def has(self, storage: torch.UntypedStorage, device: Device | None) -> bool | Check:
        """Return whether the bytes in ``storage`` now are those of this block, which has left memory.

        The storage may have been written since without raising the version. On an accelerator the answer is a
        comparison whose result backward reads later. Without a fingerprint the answer is ``False``.
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
        """Free the memory that was loaded or recomputed. The bytes stay where they came from."""
        self.loaded = self.making = None

    @property
    def has_moved(self) -> bool:
        """Whether its storage was resized and so has other memory. Resizing raises no version."""
        alias = self.placement.alias
        return alias is not None and alias.untyped_storage().data_ptr() != self.address

    @property
    def where(self) -> str:
        """The tier that holds the bytes: ``"keep"`` until their write has completed, ``"packed"`` wherever the
        payload is, ``"recomputed"`` wherever the input is."""
        placement = self.placement
        if placement.derivation is not None:
            return placement.derivation.where
        backing = placement.backing
        return "keep" if backing is None or placement.alias is not None else backing.tier
