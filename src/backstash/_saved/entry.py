"""The objects that autograd holds in place of saved tensors that the stash manages."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from .._device.base import Check
from .._device.fingerprint import fingerprint
from .._text import clean
from .._torch.dispatch import count_dispatch_modes
from .._torch.storages import storage_of
from .._torch.tensors import flattened, is_wrapper_subclass, toggle_bits
from ..errors import InplaceError
from .block import Block
from .view import StridedRegion, extent_bytes, raw_alias, reason_to_stay, with_bits_of

__all__ = ["Entry", "WrapperEntry"]


class Entry:
    """One saved view: its block, and how to rebuild the view from the block's bytes.

    ``region`` is set if the block holds the elements of a view with gaps densely; loading then restores the
    gaps. ``source`` has the version that shows whether the view was modified in place. It is the block's
    storage version, or that of one part if the storage consists of parts with version counters of their own.
    """

    __slots__ = (
        "block",
        "check",
        "conj",
        "device",
        "dtype",
        "neg",
        "offset_bytes",
        "region",
        "shape",
        "source",
        "stride",
        "turn",
    )

    def __init__(
        self, block: Block, tensor: Tensor, offset_bytes: int, region: StridedRegion | None = None
    ) -> None:
        self.block = block
        self.source = block.storage_version
        # The comparison with the bytes of a block that had left memory, where an accelerator has to answer it.
        self.check: Check | None = None
        self.dtype = tensor.dtype
        self.device = tensor.device
        self.shape = tensor.shape
        self.stride = tensor.stride()
        self.offset_bytes = offset_bytes  # of its first element, from the block's first byte
        self.conj = tensor.is_conj()
        self.neg = tensor.is_neg()
        self.region = region
        self.turn = 0

    @classmethod
    def at(cls, block: Block, device: torch.device, place: tuple[Any, ...]) -> Entry:
        """Return an entry for a view that was not saved, of ``block``, which holds a whole storage.

        Args:
            block: the block.
            device: the device of the view.
            place: the view's dtype, shape, stride, offset, and its conj and neg bits; empty: all bytes of the
                block.
        """
        all_bytes = (torch.uint8, (block.nbytes,), (1,), 0, False, False)
        self = object.__new__(cls)
        self.block, self.source, self.device = block, block.storage_version, device
        self.dtype, shape, self.stride, offset, self.conj, self.neg = place or all_bytes
        self.shape = torch.Size(shape)
        self.offset_bytes = offset * self.dtype.itemsize
        self.check = self.region = None
        self.turn = 0
        return self

    @property
    def nbytes(self) -> int:
        """Bytes of the view's elements."""
        return self.shape.numel() * self.dtype.itemsize

    @property
    def where(self) -> str:
        """The tier that holds the bytes now."""
        return self.block.where

    @property
    def was_changed(self) -> bool:
        """Whether the view was modified in place while the block had its bytes, as far as autograd can know.

        A part of a storage may have been modified when the block left memory for the sake of other parts. So a
        part counts as changed no matter when it was modified.
        """
        block, placement = self.block, self.block.placement
        if placement.alias is None and not placement.is_unordered:
            return self.source is not block.storage_version and self.source.changed
        return self.source.changed

    @property
    def is_rounded(self) -> bool:
        """Whether the block is to be packed by a lossy codec."""
        return self.block.is_rounded

    def view_in_place(self, alias: Tensor) -> Tensor:
        """Return the saved view of its block's own memory, with the version counter of the saved tensor."""
        view = self.view_of(alias, 0)
        return view if self.source is self.block.storage_version else self.source.counted(view)

    def view_of(self, base: Tensor, base_bytes: int) -> Tensor:
        """Return the saved view of ``base``, whose storage has the block's first byte at ``base_bytes``.

        The result shares the version counter of ``base``, except that a region with gaps is copied.
        """
        itemsize = self.dtype.itemsize
        base = self.in_its_dtype(base)
        first, odd = divmod(base_bytes + self.offset_bytes, itemsize)
        if odd:
            raise AssertionError(f"a view at byte {base_bytes + self.offset_bytes} of {self.dtype}")
        if self.region is not None:
            dense = base.as_strided((self.region.count,), (1,), first)
            base, first = self.region.spread(dense, self.dtype), self.region.residue
        out = base.as_strided(self.shape, self.stride, first)
        if self.conj or self.neg:
            out = toggle_bits(out, conj=self.conj, neg=self.neg)
        return out

    def in_its_dtype(self, base: Tensor) -> Tensor:
        """Return ``base``, or a flat tensor of the view's dtype on its storage and version counter."""
        if base.dtype == self.dtype:
            return base
        return _flat(base, self.dtype.itemsize).view(self.dtype)


def written_unseen(entry: Entry) -> InplaceError:
    """Return the error for memory that was written without a new version, and that another save needs."""
    kind, module = str(entry.dtype).removeprefix("torch."), clean(entry.block.cleanup.module)
    return InplaceError(
        f"the values of the {kind} tensor of shape {tuple(entry.shape)} that {module or 'no module'} "
        "saved are unknown: it shares memory with an earlier saved tensor that was moved out of "
        "memory, and that memory was then changed without a new version (.data, NumPy, a tensor with a "
        "version counter of its own), or the disk returned other bytes than were written "
        "(Disk(verify=True) detects this). Run forward again, and change the tensor itself"
    )


def recomputed_otherwise(entry: Entry, what: object) -> InplaceError:
    """Return the error for a tensor that was freed and whose recomputed bits differ."""
    module = clean(entry.block.cleanup.module)
    return InplaceError(
        f"{what!r} for the tensor of shape {tuple(entry.shape)} that {module or 'no module'} saved gave "
        f"different bits: its input was changed since forward (a parameter by its "
        "optimizer, or a tensor without a new version: .data, NumPy), or a setting of PyTorch was "
        'changed. Run forward again, or give this module no Action("recompute")'
    )


def replayed_otherwise(module: str, shape: object) -> InplaceError:
    """Return the error for a tensor that was freed and whose bits differ when its operations are replayed."""
    return InplaceError(
        f"the tensor of shape {shape} that {module or 'no module'} saved was discarded, and "
        "recomputing it gave different bits: an input was changed since forward without a new version "
        "(.data, NumPy), or a kernel that is not an operation of PyTorch wrote to its memory. Run "
        "forward again, or do not recompute() this module"
    )


class WrapperEntry:
    """A saved wrapper subclass (``__tensor_flatten__``): its inner tensors, each packed separately."""

    __slots__ = (
        "__weakref__",
        "context",
        "device",
        "dtype",
        "fingerprints",
        "kind",
        "offsets",
        "others",
        "parts",
        "seen",
        "shape",
        "stride",
    )

    def __init__(self, tensor: Any, pack: Callable[[Tensor], object]) -> None:
        inner, self.others, self.context = flattened(tensor)
        self.kind = type(tensor)
        self.shape = tensor.shape
        self.dtype = tensor.dtype
        self.device = tensor.device
        self.stride = tensor.stride()
        self.fingerprints = _fingerprints_of(tensor)
        self.seen = [(weakref.ref(each), each._version) for each in _with_inner(tensor)]
        self.offsets = {name: _offset_of(part) for name, part in inner.items()}
        self.parts = {name: pack(part) for name, part in inner.items()}

    @property
    def where(self) -> str:
        """The lowest tier that holds bytes of an inner tensor."""
        places = {getattr(part, "where", "keep") for part in self.parts.values()}
        return next(
            (tier for tier in ("disk", "host", "packed", "recomputed") if tier in places), "keep"
        )

    @property
    def is_rounded(self) -> bool:
        """Whether an inner tensor is to be packed by a lossy codec."""
        return any(getattr(part, "is_rounded", False) for part in self.parts.values())

    def is_of(self, tensor: Tensor) -> bool:
        """Return whether ``tensor`` is the tensor that was packed, unchanged, with unchanged inner tensors.

        The answer is ``False`` if only a wait for a device could give it.
        """
        now = list(_with_inner(tensor))
        if len(now) != len(self.seen) or not all(
            seen() is each and version == each._version
            for each, (seen, version) in zip(now, self.seen, strict=True)
        ):
            return False
        return self.fingerprints is not None and self.fingerprints == _fingerprints_of(tensor)

    def rebuild(self, unpack: Callable[[object], Tensor]) -> Tensor:
        """Return the wrapper, rebuilt around its unpacked inner tensors."""
        parts = {
            name: _at_offset(unpack(part), self.offsets[name]) for name, part in self.parts.items()
        }
        rebuilt: Tensor = self.kind.__tensor_unflatten__(
            {**parts, **self.others}, self.context, self.shape, self.stride
        )
        return rebuilt


def _with_inner(tensor: Any) -> Iterator[Tensor]:
    yield tensor
    if is_wrapper_subclass(tensor):
        for part in flattened(tensor)[0].values():
            yield from _with_inner(part)


def _fingerprints_of(tensor: Any) -> list[object] | None:
    """Return fingerprints of all inner tensors; ``None`` off the CPU, or if a dispatch mode would see it."""
    parts = [each for each in _with_inner(tensor) if not is_wrapper_subclass(each)]
    storages = [storage_of(each) for each in parts]
    found = []
    if count_dispatch_modes() > 0:
        return None
    for storage in storages:
        if storage is None or storage.device.type != "cpu":
            return None
        found.append(fingerprint(storage))
    return found


def _offset_of(part: Tensor) -> int | None:
    """Return where a plain tensor begins in its storage, on which its subclass may depend, or ``None``."""
    return int(part.storage_offset()) if type(part) is Tensor and not reason_to_stay(part) else None


def _at_offset(part: Tensor, offset: int | None) -> Tensor:
    """Return ``part``, or a copy of it that begins at ``offset`` of its storage."""
    if offset is None or part.storage_offset() == offset:
        return part
    raw = raw_alias(part)
    first, end = (each // part.element_size() for each in extent_bytes(part))
    flat = torch.empty(offset + end - first, dtype=part.dtype, device=part.device)
    flat[offset:] = raw.as_strided((end - first,), (1,), first)
    return with_bits_of(part, flat.as_strided(part.shape, part.stride(), offset))


def _flat(base: Tensor, itemsize: int) -> Tensor:
    """Return ``base``'s storage as bytes in whole ``itemsize`` items, with the same version counter."""
    storage_bytes = base.untyped_storage().nbytes()
    flat = base.as_strided((storage_bytes // base.element_size(),), (1,), 0).view(torch.uint8)
    return flat[: flat.numel() // itemsize * itemsize]
