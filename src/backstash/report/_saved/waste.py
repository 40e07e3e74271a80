"""Find saved tensors whose values would fit in fewer bytes, when they are saved, and add them up.

Only large CPU tensors are read. For most of them a sample of the elements rules out every smaller form. The
others are read completely, and only that decides. Nothing is computed while a dispatch mode is active, because
the mode would see it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..._torch.dispatch import count_dispatch_modes, without_function_modes
from ..._torch.tensors import is_functorch_wrapped
from .rows import pattern
from .save import Save

__all__ = ["CONSTANT", "LEAST_BYTES", "MASK", "PART", "ZEROS", "Waste", "find_waste", "wasted"]

MASK = "two values: one bit each is enough"
CONSTANT = "one value: elements need no bytes"
ZEROS = "zeros: a bitmap and the rest are enough"
PART = "a small part keeps a large storage: a copy is enough"
_FEW_ZEROS = 0.25  # with a smaller share of zeros, a bitmap saves too little
LEAST_BYTES = 64 << 10
"""Tensors and storages below this size are not reported."""
_SAMPLE = 128
_CHUNK = 1 << 20
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_SIZES = (1, 2, 4)  # bytes of an integer


@dataclass(frozen=True, slots=True)
class Waste:
    """Saved tensors that take more bytes than their values need."""

    what: str
    """What the values are, or how little of a storage is used."""
    name: str
    """The module's path; for several modules, with ``*`` for the first number in it."""
    tensors: int
    """Number of tensors."""
    nbytes: int
    """Their bytes."""
    could_be_bytes: int
    """The bytes that would hold the same values exactly."""


def find_waste(tensor: Tensor) -> tuple[str, int] | None:
    """Return (what the values are, the bytes that would hold them exactly); ``None`` if they cannot be read.

    If there is no smaller form, and for tensors below 64 KiB, the bytes are the tensor's own.
    """
    if type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.is_nested:
        return None
    nbytes = tensor.numel() * tensor.element_size()
    if nbytes < LEAST_BYTES:
        return "", nbytes
    if tensor.dtype is torch.bool:
        return MASK, -(-tensor.numel() // 8)
    if tensor.device.type != "cpu" or count_dispatch_modes() > 0:
        return None
    if is_functorch_wrapped(tensor) or tensor.is_quantized or tensor.is_neg():
        return None
    with without_function_modes(), torch.no_grad():
        flat = _flat(tensor.detach())
        if flat is None:
            return _gaps(tensor.detach(), nbytes)
        if tensor.dtype in (torch.int64, torch.int32, torch.int16):
            return _integers(flat, nbytes)
        if tensor.is_floating_point():
            return _floats(flat, nbytes)
    return "", nbytes


def _integers(values: Tensor, nbytes: int) -> tuple[str, int]:
    low, high = (int(each) for each in torch.aminmax(values))
    if low == high:
        return CONSTANT, 0
    for size in _SIZES:
        if high - low < 1 << 8 * size and size < values.element_size():
            own = str(values.dtype).removeprefix("torch.")
            return (
                f"{own}: {size} of {values.element_size()} bytes are enough",
                values.numel() * size,
            )
    return "", nbytes


def _floats(flat: Tensor, nbytes: int) -> tuple[str, int]:
    """Compare bits, as integers: 0.0 and -0.0 are two values, and a NaN is one."""
    bits = flat.view(_BITS[flat.element_size()])
    count = bits.numel()
    sample = bits[:: max(1, count // _SAMPLE)].clone()
    low, high = _ends(sample)
    if low == high:  # a second value is rare, or there is none
        low, high = _ends(bits)
        if low == high:
            return CONSTANT, 0
    if _has_only(sample, low, high) and _has_only(bits, low, high):
        return MASK, -(-count // 8) + 2 * flat.element_size()
    if _has_zeros(sample):
        nonzero = int(torch.count_nonzero(bits))
        return ZEROS, -(-count // 8) + nonzero * flat.element_size()
    return "", nbytes


def _gaps(values: Tensor, nbytes: int) -> tuple[str, int] | None:
    """Handle elements with gaps between them: a sample rules out smaller forms, or the answer is ``None``."""
    if not values.is_floating_point():
        return None
    for dim, size in enumerate(values.shape):
        values = values.narrow(dim, 0, max(1, min(size, size * _SAMPLE // values.numel())))
    bits = values.flatten().view(_BITS[values.element_size()])
    return None if _has_only(bits, *_ends(bits)) or _has_zeros(bits) else ("", nbytes)


def _has_zeros(sample: Tensor) -> bool:
    return int(torch.count_nonzero(sample)) <= sample.numel() * (1 - _FEW_ZEROS)


def _ends(values: Tensor) -> tuple[int, int]:
    low, high = torch.aminmax(values)
    return int(low), int(high)


def _has_only(values: Tensor, one: int, other: int) -> bool:
    for part in torch.split(values, _CHUNK):
        count = _count(part, one) + (_count(part, other) if other != one else 0)
        if count != part.numel():
            return False
    return True


def _count(values: Tensor, value: int) -> int:
    if value == 0:  # several times faster, and nearly every mask has zeros
        return values.numel() - int(torch.count_nonzero(values))
    return int(torch.count_nonzero(values == value))


def _flat(values: Tensor) -> Tensor | None:
    """Return all elements in memory order, as a view; ``None`` if they have gaps or overlap."""
    expected = 1
    for stride, size in sorted(zip(values.stride(), values.shape, strict=True)):
        if size != 1 and stride != expected:
            return None
        expected *= size
    return values.as_strided((values.numel(),), (1,))


def wasted(saves: Iterable[Save]) -> tuple[Waste, ...]:
    """Return what could be smaller, most bytes to gain first."""
    found: dict[tuple[str, str], list[int]] = {}
    paths: dict[tuple[str, str], set[str]] = {}
    for save in saves:
        for what, nbytes, could_be in _wastes(save):
            key = what, pattern(save.module)
            paths.setdefault(key, set()).add(save.module)
            counts = found.setdefault(key, [0, 0, 0])
            counts[0] += 1
            counts[1] += nbytes
            counts[2] += could_be
    rows = [
        Waste(key[0], key[1] if len(paths[key]) > 1 else paths[key].pop(), *counts)
        for key, counts in found.items()
    ]
    return tuple(sorted(rows, key=lambda each: each.could_be_bytes - each.nbytes))


def _wastes(save: Save) -> Iterable[tuple[str, int, int]]:
    if not save.is_saved:
        return
    if save.waste is not None:
        what, could_be = save.waste
        yield what, save.nbytes, could_be
    for each in save.first:
        if each.kind == "activation" and save.where == "in place" and each.nbytes >= LEAST_BYTES:
            if each.saved_bytes * 2 <= each.nbytes:
                yield PART, each.nbytes, each.saved_bytes
