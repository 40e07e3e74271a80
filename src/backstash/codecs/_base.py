"""The interface of a codec."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["NOT_SMALLER", "NOT_WITHOUT_LOOKING", "Codec", "Encoded", "integers", "parts", "reals"]

NOT_WITHOUT_LOOKING = (
    "its encoded size depends on its values, and reading those would stall the accelerator"
)
NOT_SMALLER = "it would not be smaller"

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}
# Elements that a codec on the CPU processes at a time. The intermediate results stay in a cache, and PyTorch
# uses one thread for so few elements. Several threads would wait for each other, for long if other work is
# running.
_PART = 1 << 15


@dataclass(frozen=True, slots=True)
class Encoded:
    """The result of encoding a tensor."""

    payload: Tensor | None
    """A flat, contiguous tensor of any dtype with a storage of its own; ``None`` if ``recipe`` is enough. It
    is evicted and loaded like a block, and comes back with the same bytes."""
    recipe: Any = None
    """What :meth:`Codec.decode` needs in addition. It stays in memory, so it must not hold a large tensor."""


class Codec(ABC):
    """Encodes the bytes of tensors to fewer bytes, and decodes them.

    A stash calls a codec on the thread that computes. Autocast and the default dtype stay as the program set
    them, so name dtypes and devices. On an accelerator a codec must not wait for the device: it refuses a
    tensor whose values it would have to read.

    A stash decodes the result of an ``exact`` codec and compares it bit for bit before relying on it. On an
    accelerator, where that would wait, it does so once for each dtype.
    """

    exact: bool = True
    """Whether each element comes back with the same bits, including NaNs and negative zeros."""

    @abstractmethod
    def encode(self, values: Tensor) -> Encoded | str:
        """Encode ``values``, or return the reason for refusing in a few words.

        Args:
            values: all elements of one storage, flat and contiguous, in the dtype of the saved tensor. Must
                not be changed. Some elements may belong to no saved view.
        """

    @abstractmethod
    def decode(self, payload: Tensor | None, recipe: Any, out: Tensor) -> None:
        """Fill ``out`` with the elements that :meth:`encode` received.

        Args:
            payload: the payload of :meth:`encode`, perhaps at another address. Must not be changed.
            recipe: the recipe of :meth:`encode`.
            out: a tensor of the shape and dtype of ``values``, with arbitrary elements.
        """

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


def integers(values: Tensor) -> Tensor:
    """Return the same memory as integers of the elements' size; complex128 gives two integers per element."""
    if values.dim() == 0:
        values = values.reshape(1)  # two integers need a dimension
    return values.view(_INTEGERS[values.element_size()])


def reals(values: Tensor) -> Tensor | str:
    """Return ``values`` as real numbers (two for each complex one), or why they cannot be rounded."""
    if values.dtype.is_complex:
        return values.view(values.dtype.to_real())
    if not values.dtype.is_floating_point:
        return "its dtype is not floating point"
    return values


def parts(count: int, device: torch.device, *, of: int = 1) -> Iterator[slice]:
    """Return slices of ``count`` elements, or of blocks ``of`` so many elements; on an accelerator, one slice.

    All slices but the last have a multiple of 8 elements.
    """
    step = max(_PART // of, 1) if device.type == "cpu" else max(count, 1)
    return (slice(at, min(at + step, count)) for at in range(0, count, step))
