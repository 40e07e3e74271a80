"""Looking at a tensor's values, once, for what a smaller form of them would hold exactly.

Only large CPU tensors are looked at. A few thousand elements tell at once that most tensors hold nothing
special; only of the others every element is read, and only that counts. Nothing is computed where a dispatch
mode would see it.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["LEAST_BYTES", "MASK", "ZEROS", "find_waste"]

MASK = "two values: one bit each would do"
ZEROS = "zeros: a bitmap and the others would do"
_FEW_ZEROS = 0.25  # below, a bitmap and the other values save too little
LEAST_BYTES = 64 << 10
"""Smaller tensors are not looked at."""
_SAMPLE = 2048
_CHUNK = 1 << 20
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32)


def find_waste(tensor: Tensor) -> tuple[str, int] | None:
    """(what the values are, the bytes that would hold them exactly); ``None`` where they were not looked at.

    The bytes are the tensor's own where nothing was found, and for tensors below 64 KiB.
    """
    if type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.is_nested:
        return None
    nbytes = tensor.numel() * tensor.element_size()
    if nbytes < LEAST_BYTES:
        return "", nbytes
    if tensor.dtype is torch.bool:
        return MASK, -(-tensor.numel() // 8)
    if tensor.device.type != "cpu" or torch._C._len_torch_dispatch_stack() > 0:
        return None
    if (
        torch._C._functorch.is_functorch_wrapped_tensor(tensor)
        or tensor.is_quantized
        or tensor.is_neg()
    ):
        return None
    with torch._C.DisableTorchFunction(), torch.no_grad():
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
    for dtype in _INTEGERS:
        limits = torch.iinfo(dtype)
        if limits.min <= low and high <= limits.max and dtype.itemsize < values.element_size():
            name = str(dtype).removeprefix("torch.")
            own = str(values.dtype).removeprefix("torch.")
            return f"{own}: all fit {name}", values.numel() * dtype.itemsize
    return "", nbytes


def _floats(flat: Tensor, nbytes: int) -> tuple[str, int]:
    """By their bits, as integers: 0.0 and -0.0 are two values, and a NaN is one."""
    bits = flat.view(_BITS[flat.element_size()])
    count = bits.numel()
    sample = bits[:: max(1, count // _SAMPLE)]
    if _has_two_values(sample) and _has_two_values(bits):
        return MASK, -(-count // 8) + 2 * flat.element_size()
    if _has_zeros(sample):
        nonzero = int(torch.count_nonzero(bits))
        return ZEROS, -(-count // 8) + nonzero * flat.element_size()
    return "", nbytes


def _gaps(values: Tensor, nbytes: int) -> tuple[str, int] | None:
    """For what has gaps in memory: a sample tells that nothing is special, or nothing is told."""
    if not values.is_floating_point():
        return None
    for dim, size in enumerate(values.shape):
        values = values.narrow(dim, 0, min(size, 64)) if values.numel() > _SAMPLE else values
    bits = values.flatten().view(_BITS[values.element_size()])
    return None if _has_two_values(bits) or _has_zeros(bits) else ("", nbytes)


def _has_zeros(sample: Tensor) -> bool:
    return int(torch.count_nonzero(sample)) <= sample.numel() * (1 - _FEW_ZEROS)


def _has_two_values(values: Tensor) -> bool:
    low, high = torch.aminmax(values)
    for at in range(0, values.numel(), _CHUNK):
        part = values[at : at + _CHUNK]
        if not bool(((part == low) | (part == high)).all()):
            return False
    return True


def _flat(values: Tensor) -> Tensor | None:
    """All elements in the order of memory, as a view; ``None`` where they have gaps or overlap."""
    expected = 1
    for stride, size in sorted(zip(values.stride(), values.shape, strict=True)):
        if size != 1 and stride != expected:
            return None
        expected *= size
    return values.as_strided((values.numel(),), (1,))
