"""Identity: which block has the bytes of a saved tensor.

A storage is looked up by its identity, which PyTorch cannot give to another storage while a weak reference is
held, and by its version. A block has the bytes of the storage that it was made of. If the memory may have been
written without a new version, the bytes are compared. ``docs/explanation/exactness.md`` has the cases.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from .._device.base import Check, Device
from .._runtime.weak import WeakTable
from .._saved.block import Block, PartedStorage, StorageVersion
from .._saved.slice_counts import SliceCounts, Slices
from .._saved.view import StridedRegion, extent_bytes
from .._torch.modules import module_path
from .._torch.storages import storage_identity
from ..codecs import Codec

__all__ = ["MOST_PARTS", "Identities", "Match", "is_separate"]

MOST_PARTS = 8  # of a storage that moves as one block


class Match(NamedTuple):
    """What a save is of."""

    block: Block | None
    """The block that has its bytes; ``None``: a new one must be made."""
    check: bool | Check
    """Whether the block has them, or an accelerator's comparison of which backward reads the result."""
    source: StorageVersion
    """The storage version of the tensor itself."""
    version: StorageVersion
    """What the block is of: the same, a storage of parts, or a copy of a region."""
    gone: Block | None = None
    """A block of the storage that has left memory, and may not have these bytes."""
    region: StridedRegion | None = None
    """The region that is copied; ``None``: the block is the whole storage."""
    copy: Tensor | None = None
    """The copy of the region."""


class Identities:
    """The storages of which blocks are alive, by identity and version. The caller holds the stash's lock."""

    def __init__(self) -> None:
        self._versions = WeakTable[tuple[int, int], StorageVersion]()
        self._parted = WeakTable[int, PartedStorage]()
        self._slice_counts = SliceCounts()

    def find(
        self,
        tensor: Tensor,
        storage: torch.UntypedStorage,
        modules: list[nn.Module],
        device: Device | None,
        in_pass: int,
        *,
        codec: Codec | None,
        may_part: bool,
    ) -> Match:
        """Return the block that has the bytes of ``tensor``, or what a new one is to be made of.

        Args:
            tensor: which is saved.
            storage: its storage.
            modules: the running modules.
            device: the accelerator; ``None``: the CPU.
            in_pass: the number of the forward pass.
            codec: what is to pack the block.
            may_part: whether a storage of parts may be one block.
        """
        nbytes, offset = storage.nbytes(), int(tensor.storage_offset())
        # A rare wrong "no" costs time, not exactness.
        needs_all = tensor.nbytes == nbytes and tensor.is_contiguous()
        source, parted = self._identify(tensor, storage, offset), None
        if may_part and not needs_all:
            parted = self._parted_storage(tensor, storage, source)
        if source.slices is not None:
            _add_slice(source.slices, tensor, offset)
        version = source if parted is None else parted
        known = version.block
        block = known() if known is not None else None
        if block is not None and block.is_rounded and not _may_share(block, tensor, codec):
            block = None
        if parted is not None:
            parted.add(source, offset, tensor.nbytes)
        if block is not None:
            check = _has_bytes(block, tensor, storage, source, parted, device)
            if check:
                return Match(block, check, source, version)
        if not needs_all:
            region = self._region_of(
                tensor, nbytes, modules, source, parted, block, device, in_pass
            )
            if region is not None:
                copied = self._copied(tensor, source, region, block, device, codec)
                if copied is not None:
                    return copied
        return Match(None, False, source, version, block)

    def _region_of(
        self,
        tensor: Tensor,
        nbytes: int,
        modules: list[nn.Module],
        source: StorageVersion,
        parted: PartedStorage | None,
        gone: Block | None,
        device: Device | None,
        in_pass: int,
    ) -> StridedRegion | None:
        """Return the region that ``tensor`` needs of its storage, if a copy of it is to be held."""
        share = nbytes // 2 if is_separate(tensor) else (nbytes - 1) // 4
        if gone is None and (parted is not None or _needs_more_than(tensor, share)):
            return None
        region = StridedRegion(tensor)
        if gone is None and (
            region.nbytes > share
            or self._are_slices_all(source, tensor, region, modules, device, in_pass)
        ):
            return None
        return region

    def _copied(
        self,
        tensor: Tensor,
        source: StorageVersion,
        region: StridedRegion,
        gone: Block | None,
        device: Device | None,
        codec: Codec | None,
    ) -> Match | None:
        """Copy a small region of a storage, so that it does not keep the whole storage alive.

        Also used for a storage whose block ``gone`` has left memory and which may have been written since.
        Returns ``None`` if the overlapping regions cost as much as the whole storage.
        """
        if source.regions is None:
            source.regions = {}
        known = source.regions.get(region.key)
        block = known() if known is not None else None
        if block is not None and block.is_rounded and not _may_share(block, tensor, codec):
            block = None
        has_room = source.copied_bytes + region.nbytes <= tensor.untyped_storage().nbytes()
        if block is None and not has_room:
            return None
        try:
            copy = region.copy(tensor)
        except torch.OutOfMemoryError:
            return None  # the whole storage needs no extra memory to be saved
        if block is not None:
            check = _has_copied(block, copy.untyped_storage(), device)
            if check:
                return Match(block, check, source, block.storage_version, gone, region)
        if not has_room:
            return None
        version = StorageVersion(copy, copy.untyped_storage())
        version.origin = source
        return Match(None, False, source, version, gone, region, copy)

    def _are_slices_all(
        self,
        source: StorageVersion,
        tensor: Tensor,
        region: StridedRegion,
        modules: list[nn.Module],
        device: Device | None,
        in_pass: int,
    ) -> bool:
        """Return whether small slices of a storage, of which ``tensor`` is one, are expected to cover it, so
        that one block holds it. Always ``False`` on an accelerator: if the storage is written between two
        saves without a new version and the block has left memory, only backward would find the difference.
        """
        if device is not None:
            return False
        if source.slices is None:
            nbytes = tensor.untyped_storage().nbytes()
            module = module_path(modules)
            source.slices = self._slice_counts.begin(in_pass, module, nbytes, region.nbytes)
            source.slices.add(region.first * region.itemsize, region.nbytes)
        return source.slices.expected > 0

    def _identify(
        self, tensor: Tensor, storage: torch.UntypedStorage, offset: int
    ) -> StorageVersion:
        # Tensors that share a storage but have their own version counters differ in where they begin.
        key = storage_identity(storage), 0 if tensor._base is not None else offset
        ref = self._versions.refs.get(key)
        storage_version = ref() if ref is not None else None
        if storage_version is None or not storage_version.is_of(tensor):
            storage_version = StorageVersion(tensor, storage)
            self._versions[key] = storage_version
        return storage_version

    def _parted_storage(
        self, tensor: Tensor, storage: torch.UntypedStorage, source: StorageVersion
    ) -> PartedStorage | None:
        """Return the shared storage that ``tensor`` is a part of (an LSTM gate, for example), or ``None``. It
        moves as one block, since its parts are mostly saved together.

        ``None`` if ``tensor`` is not such a part.
        """
        nbytes = storage.nbytes()
        if not is_separate(tensor):
            return None
        if not nbytes // MOST_PARTS <= tensor.nbytes <= nbytes // 2:
            return None
        parted = self._parted.get(source.cdata)
        if parted is None:
            parted = PartedStorage(tensor, storage)
            self._parted[source.cdata] = parted
        return parted

    def has_in_place(self, tensor: Tensor) -> bool:
        """Return whether a block that is in place has the memory of ``tensor``."""
        known = self._versions.refs.get((storage_identity(tensor.untyped_storage()), 0))
        version = known() if known is not None else None
        block = version.block() if version is not None and version.block is not None else None
        return block is not None and block.placement.is_kept


def _has_copied(block: Block, copy: torch.UntypedStorage, device: Device | None) -> bool | Check:
    """Return whether ``block``, a copy of a region, has the same bytes as ``copy``."""
    if block.storage_version.changed:  # by a backward that received it
        return False
    if block.placement.is_kept and device is None:
        return block.has_in_place(copy)
    if block.mark is None and block.placement.is_kept:
        block.take_fingerprint(device)
    return block.has(copy, device)


def _needs_more_than(tensor: Tensor, nbytes: int) -> bool:
    """Whether it is plain that ``tensor`` needs more than ``nbytes`` of its storage: its elements do not repeat
    and take that much. A ``False`` means nothing."""
    if tensor.nbytes <= nbytes or 0 in tensor.stride():
        return False
    first, end = extent_bytes(tensor)
    return end - first >= tensor.nbytes


def _add_slice(slices: Slices, tensor: Tensor, offset: int) -> None:
    begin = offset * tensor.element_size()
    is_plain = not slices.is_new(begin) or 0 not in tensor.stride()
    slices.add(begin, tensor.nbytes if is_plain else StridedRegion(tensor).nbytes)


def _has_bytes(
    block: Block,
    tensor: Tensor,
    storage: torch.UntypedStorage,
    source: StorageVersion,
    parted: PartedStorage | None,
    device: Device | None,
) -> bool | Check:
    """Return whether ``block``, of this storage at this version, has the bytes that the storage has now."""
    if parted is not None and block.is_copy_of(storage):
        # The block is being written or could not leave: a part may have been written since, here or there.
        return block.has_in_place(storage)
    if block.placement.is_kept:
        return True
    # On an accelerator a "no" would become an error in backward, and the storage may have been filled
    # meanwhile. A slice is compared separately, with its copy; otherwise the whole storage would be read for
    # each slice.
    needs_all = tensor.nbytes == storage.nbytes() and tensor.is_contiguous()
    may_ask = device is None or needs_all or not _may_be_being_filled(tensor)
    if may_ask and (source.slices is None or needs_all):
        return block.has(storage, device)
    return False


def _may_share(block: Block, tensor: Tensor, asked: Codec | None) -> bool:
    """Return whether ``tensor`` may share a block that a lossy codec rounds: its codec must be lossy, too."""
    if asked is None or asked.exact:
        return False
    return block.reduction is not None and tensor.dtype == block.reduction.dtype


def _may_be_being_filled(tensor: Tensor) -> bool:
    """Return whether parts of the storage may still be written without a new version.

    A tensor that autograd made is complete. A buffer that the program allocated may be filled through
    ``.data`` between two saves, as torchdiffeq's solvers do.
    """
    base = tensor._base
    return not (tensor if base is None else base).requires_grad


def is_separate(tensor: Tensor) -> bool:
    """Return whether autograd made ``tensor`` and does not treat it as a view. If it is a part of its storage,
    the other parts have their own version counters, as the gates of an LSTM cell on the CPU do."""
    return tensor._base is None and tensor.requires_grad
