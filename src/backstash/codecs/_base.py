"""What a codec is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["NOT_SMALLER", "NOT_WITHOUT_LOOKING", "Codec", "Encoded", "integers", "parts"]

NOT_WITHOUT_LOOKING = "its size is known only from its values, which an accelerator would wait for"
NOT_SMALLER = "it would not be smaller"

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}
# Elements that a CPU's codec takes at a time. What it makes of them stays in a cache, and PyTorch uses one
# thread for an operation on so few: several wait for each other, long where other work is running.
_PART = 1 << 15


@dataclass(frozen=True, slots=True)
class Encoded:
    """What a codec made of a tensor."""

    payload: Tensor | None
    """A flat, contiguous tensor of any dtype in memory of its own; ``None`` where ``recipe`` says all. It moves
    from tier to tier and comes back with the same bytes."""
    recipe: Any = None
    """What :meth:`Codec.decode` needs in addition to it. It stays in memory, so it holds no large tensor."""


class Codec(ABC):
    """Stores the bytes of tensors smaller, and gives them back.

    A stash calls a codec on the thread that computes, with no mode or autocast that matters to integer
    arithmetic switched off: name dtypes and devices. On an accelerator a codec does not wait for the device:
    it refuses there what it would have to look at.

    What an ``exact`` codec encodes is decoded again and compared bit for bit before a stash relies on it; on
    an accelerator, where that would wait, once for each dtype.
    """

    exact: bool = True
    """Whether each element comes back with the same bits, NaNs and negative zeros too."""

    @abstractmethod
    def encode(self, values: Tensor) -> Encoded | str:
        """Encode ``values``, or say in a few words why not.

        Args:
            values: all elements of one storage, flat and contiguous, in the dtype of the tensor that was
                saved; not to be changed. There may be elements among them that no saved view looks at.
        """

    @abstractmethod
    def decode(self, payload: Tensor | None, recipe: Any, out: Tensor) -> None:
        """Fill ``out`` with what :meth:`encode` was given.

        Args:
            payload: as it was encoded, perhaps at another address; not to be changed.
            recipe: likewise.
            out: of the shape and dtype of ``values``, with arbitrary elements.
        """

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


def integers(values: Tensor) -> Tensor:
    """The same memory as integers of the elements' size, or twice as many for complex128."""
    return values.view(_INTEGERS[values.element_size()])


def parts(count: int, device: torch.device, *, of: int = 1) -> Iterator[slice]:
    """``count`` elements in turns, or blocks ``of`` so many; an accelerator takes all at once.

    All turns but the last are of a multiple of 8 elements.
    """
    step = max(_PART // of, 1) if device.type == "cpu" else max(count, 1)
    return (slice(at, min(at + step, count)) for at in range(0, count, step))
