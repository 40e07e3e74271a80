"""A conformance check for codecs."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from ..codecs import Codec, Encoded
from ..codecs._base import integers as integers_of

__all__ = ["check_codec"]

_COUNTS = (1, 7, 8, 9, 63, 64, 65, 1000, 131_072, 131_079, 300_001)
_FLOATS = (
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.complex64,
    torch.complex128,
)
_WHOLES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def check_codec(codec: Codec) -> tuple[str, ...]:
    """Raise ``AssertionError`` if ``codec`` breaks what :class:`~backstash.codecs.Codec` promises.

    It is given random, constant, two-valued, sparse and narrow tensors of all common dtypes and of odd
    lengths, with NaNs of several bit patterns, infinities and negative zeros. What an exact codec encodes has
    to come back with the same bits, and what a lossy one does with the same shape and dtype, from a payload
    that has moved, as often as it is asked for. The values and the payload may not be changed.

    Returns:
        What it encoded, ``"float32, two values, 1000"``, so that a test can see that it encoded anything.

    >>> from backstash.codecs import Bits
    >>> check_codec(Bits())[-1]
    'bool, random, 300001'
    """
    generator = torch.Generator().manual_seed(5)
    encoded = []
    for name, values in _samples(generator):
        if _check(codec, name, values):
            encoded.append(name)
    return tuple(encoded)


def _samples(generator: torch.Generator) -> Iterator[tuple[str, Tensor]]:
    for count in _COUNTS:
        for dtype in _FLOATS:
            name = str(dtype).removeprefix("torch.")
            yield f"{name}, random, {count}", _random_bits(count, dtype, generator)
            normal = torch.randn(count, generator=generator)
            yield f"{name}, after a ReLU, {count}", normal.relu().to(dtype)
            yield f"{name}, finite, {count}", normal.to(dtype)
            for low, high in ((0.0, 1.25), (-0.0, 0.0), (math.nan, -math.inf)):
                two = torch.where(normal > 0.5, high, low).to(dtype)
                yield f"{name}, two values, {count}", two
            yield f"{name}, constant, {count}", torch.full((count,), -0.0).to(dtype)
        for dtype in _WHOLES:
            name = str(dtype).removeprefix("torch.")
            yield f"{name}, random, {count}", _random_bits(count, dtype, generator)
            limits = torch.iinfo(dtype)
            for width in (1, 200, 256, 60_000, 1 << 33):
                width = min(width, limits.max)
                for low in (limits.min, 0, limits.max - width):
                    offsets = torch.randint(0, width + 1, (count,), generator=generator)
                    yield f"{name}, narrow, {count}", (offsets + low).to(dtype)
        yield f"bool, random, {count}", torch.rand(count, generator=generator) > 0.3


def _random_bits(count: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    size = count * dtype.itemsize
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator).view(dtype)


def _check(codec: Codec, name: str, values: Tensor) -> bool:
    """Whether ``codec`` encodes ``values``."""
    integers = integers_of(values)
    before = integers.clone()
    encoded = codec.encode(values)
    assert torch.equal(integers, before), f"{codec!r} changed the values of {name}"
    if isinstance(encoded, str):
        assert encoded, f"{codec!r} gives no reason for refusing {name}"
        return False
    assert isinstance(encoded, Encoded), f"{codec!r} encoded {name} to {type(encoded).__name__}"
    payload = encoded.payload
    if payload is not None:
        assert payload.dim() == 1 and payload.is_contiguous(), f"{codec!r}: {name}: no flat payload"
        assert payload.numel(), f"{codec!r} encoded {name} to an empty payload"
        is_separate = payload.untyped_storage().data_ptr() != values.untyped_storage().data_ptr()
        assert is_separate, f"{codec!r}: the payload of {name} is in the memory of the values"
    moved = None if payload is None else payload.clone()
    for _ in range(2):
        out = torch.full_like(integers, 0x5B).view(values.dtype)
        codec.decode(moved, encoded.recipe, out)
        if payload is not None:
            assert moved is not None
            is_same = torch.equal(moved.view(torch.uint8), payload.view(torch.uint8))
            assert is_same, f"{codec!r} changed the payload of {name} when it decoded it"
        if codec.exact:
            found = out.view(integers.dtype)
            assert torch.equal(found, integers), f"{codec!r} does not give back the bits of {name}"
    return True
