"""Which elements of its storage a view needs, in one form for all views of the same elements.

A small region of a large storage is copied, so that it does not keep the whole storage alive. The copy holds
the elements densely, in the order of their addresses; loading restores the gaps. Elements are copied as
integers of the same size, since PyTorch has no copy for some dtypes (``uint4``, ``bits8``).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .._torch.tensors import is_functorch_wrapped, is_zero_tensor, toggle_bits

__all__ = [
    "ALIGNMENT_BYTES",
    "UNALIGNED",
    "StridedRegion",
    "dense",
    "extent_bytes",
    "own_copy",
    "raw_alias",
    "reason_to_stay",
    "snapshot",
    "with_bits_of",
]

_CARRIERS = {
    1: torch.uint8,
    2: torch.int16,
    4: torch.int32,
    8: torch.int64,
    16: torch.complex128,
}
_FLOATS = frozenset((torch.float16, torch.bfloat16, torch.float32, torch.float64))
UNALIGNED = "its memory is not aligned"
ALIGNMENT_BYTES = 64
"""The alignment that results of vectorized CPU code may depend on: a block keeps its address modulo this."""
_DEVICE_ALIGNMENT_BYTES = 256  # cuBLASLt chooses a kernel by this alignment
_HAS_NAMES = hasattr(Tensor, "names")  # torch 2.13 removed it


class StridedRegion:
    """The elements that a view needs. Sizes and strides are in elements, the largest stride first.

    An expanded dimension needs its elements once. A view whose elements overlap in any other way needs
    everything from its first to its last.
    """

    __slots__ = ("carrier", "count", "extent", "first", "itemsize", "residue", "sizes", "strides")

    def __init__(self, tensor: Tensor) -> None:
        self.itemsize = tensor.element_size()
        self.carrier = _CARRIERS[self.itemsize]
        self.first = int(tensor.storage_offset())
        runs = _runs(tensor)
        self.extent = 1
        for stride, size in runs:
            self.extent += (size - 1) * stride
        if _overlap(runs):
            runs = [(1, self.extent)]
        runs.reverse()
        self.sizes = tuple([size for _, size in runs])
        self.strides = tuple([stride for stride, _ in runs])
        self.count = math.prod(self.sizes)
        # Elements between an aligned address and the first one: a copy must have the same alignment as the
        # view.
        self.residue = _unaligned_bytes(tensor) // self.itemsize

    @property
    def nbytes(self) -> int:
        """The bytes of its elements, each counted once."""
        return self.count * self.itemsize

    @property
    def is_dense(self) -> bool:
        """Whether it has no gaps."""
        return self.count == self.extent

    @property
    def key(self) -> object:
        """Equal for two views of one storage that need the same elements."""
        return self.itemsize, self.first, self.sizes, self.strides

    def copy(self, tensor: Tensor) -> Tensor:
        """Return a new storage with ``residue`` zeros and then the elements, densely."""
        source = raw_alias(tensor).view(self.carrier)
        copy = torch.empty(self.residue + self.count, dtype=self.carrier, device=tensor.device)
        copy[: self.residue].zero_()  # so that equal elements make equal copies
        copy[self.residue :].view(self.sizes).copy_(
            source.as_strided(self.sizes, self.strides, self.first)
        )
        return copy

    def spread(self, dense: Tensor, dtype: torch.dtype) -> Tensor:
        """Return a flat tensor with the elements of ``dense`` at their distances in the original storage."""
        out = torch.empty(self.residue + self.extent, dtype=self.carrier, device=dense.device)
        place = out.as_strided(self.sizes, self.strides, self.residue)
        place.copy_(dense.view(self.carrier).view(self.sizes))
        return out.view(dtype)


def dense(tensor: Tensor) -> Tensor:
    """Return the elements of a plain tensor, in the order of their indices, in a storage of their own."""
    raw = raw_alias(tensor).view(_CARRIERS[tensor.element_size()])
    return raw.clone(memory_format=torch.contiguous_format)


def snapshot(tensor: Tensor) -> Tensor:
    """Return a copy of a plain tensor with the same strides, alignment, and conj and neg bits."""
    if tensor.dtype in _FLOATS and tensor.is_contiguous() and not tensor.is_neg():
        if not _unaligned_bytes(tensor):
            copy = tensor.detach().clone()  # as below, in two operations
            if copy.stride() == tensor.stride():
                return copy
    region = StridedRegion(tensor)
    flat = region.copy(tensor)
    flat = (
        flat.view(tensor.dtype)
        if region.is_dense
        else region.spread(flat[region.residue :], tensor.dtype)
    )
    return with_bits_of(tensor, flat.as_strided(tensor.shape, tensor.stride(), region.residue))


def own_copy(tensor: Tensor) -> Tensor:
    """Return a copy of any tensor, without its graph: :func:`snapshot` if it is plain."""
    if type(tensor) is Tensor and not reason_to_stay(tensor):
        return snapshot(tensor)
    return tensor.detach().clone()


def _unaligned_bytes(tensor: Tensor) -> int:
    """Return the bytes between an aligned address and the tensor's first element."""
    is_on_cpu = tensor.device.type == "cpu"
    return tensor.data_ptr() % (ALIGNMENT_BYTES if is_on_cpu else _DEVICE_ALIGNMENT_BYTES)


def _runs(tensor: Tensor) -> list[tuple[int, int]]:
    """Return (stride, size) pairs, the smallest stride first; adjacent dimensions are merged."""
    runs: list[tuple[int, int]] = []
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1 or stride == 0:
            continue
        if runs and runs[-1][0] * runs[-1][1] == stride:
            runs[-1] = runs[-1][0], runs[-1][1] * size
        else:
            runs.append((stride, size))
    return runs


def _overlap(runs: list[tuple[int, int]]) -> bool:
    """Return whether two indices may refer to one element. A rare false "yes" costs bytes, not exactness."""
    reach = 0
    for stride, size in runs:
        if stride <= reach:
            return True
        reach += (size - 1) * stride
    return False


def with_bits_of(tensor: Tensor, raw: Tensor) -> Tensor:
    """Return ``raw`` with the conj and neg bits of ``tensor``."""
    if not (tensor.is_conj() or tensor.is_neg()):
        return raw
    return toggle_bits(raw, conj=tensor.is_conj(), neg=tensor.is_neg())


def raw_alias(tensor: Tensor) -> Tensor:
    """Return ``tensor``'s memory and version counter without its graph and its conj and neg bits."""
    alias = tensor.detach()
    # Setting a bit that is set clears it.
    return with_bits_of(alias, alias) if alias.is_conj() or alias.is_neg() else alias


def extent_bytes(tensor: Tensor) -> tuple[int, int]:
    """Return the first byte of the storage that ``tensor`` needs, and the byte after the last."""
    itemsize = tensor.element_size()
    low = int(tensor.storage_offset()) * itemsize
    if tensor.is_contiguous():
        return low, low + tensor.nbytes
    last = 0
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        last += (size - 1) * stride  # strides are never negative
    return low, low + (last + 1) * itemsize


def reason_to_stay(tensor: Tensor, storage: torch.UntypedStorage | None = None) -> str:
    """Return why a plain ``torch.Tensor``'s bytes cannot be moved and rebuilt exactly; ``""`` if they can.

    ``storage`` is the tensor's storage, if the caller already has it.
    """
    if is_functorch_wrapped(tensor):
        return "a functorch transform's tensor"
    if tensor.layout is not torch.strided:
        return f"layout {str(tensor.layout).removeprefix('torch.')}"
    if tensor.is_nested:
        return "a nested tensor"
    if tensor.is_quantized:
        return "a quantized tensor"
    if _HAS_NAMES and any(tensor.names):  # type: ignore[attr-defined]
        return "a named tensor"
    if is_zero_tensor(tensor):
        return "a tensor of zeros without memory"
    if storage is None:
        storage = tensor.untyped_storage()
    needed, nbytes, address = tensor.nbytes, storage.nbytes(), storage.data_ptr()
    if not needed or not address:
        return "no bytes"
    is_whole = needed == nbytes and tensor.is_contiguous()
    if not is_whole and extent_bytes(tensor)[1] > nbytes:
        return "its storage is smaller than the view"
    if address % 16:
        return UNALIGNED
    return ""
