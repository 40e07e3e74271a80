"""What autograd holds of a tensor that a region let go of."""

from __future__ import annotations

from typing import Any

from torch import Tensor

__all__ = ["Held", "kind_of"]


class Held:
    """What autograd holds of a tensor that was let go: which one of a run's it is, and its fingerprint."""

    __slots__ = (
        "__weakref__",
        "device",
        "dtype",
        "kind",
        "nbytes",
        "number",
        "packed",
        "run",
        "shape",
        "told",
    )

    def __init__(self, run: Any, number: int, tensor: Tensor) -> None:
        self.run = run
        self.number = number
        self.packed: Any = None  # as the stash packed it, while it is not let go
        self.told: Any = None
        self.shape = tensor.shape
        self.dtype = tensor.dtype
        self.device = tensor.device
        self.nbytes = tensor.nbytes
        self.kind = kind_of(tensor)

    @property
    def where(self) -> str:
        """The tier that has the bytes, once they were made again; before, ``"recomputed"``."""
        if self.packed is None:
            return "recomputed"
        return str(getattr(self.packed, "where", "keep"))


def kind_of(tensor: Tensor) -> tuple[Any, ...]:
    return (
        tensor.shape,
        tensor.stride(),
        tensor.dtype,
        tensor.device,
        tensor.storage_offset(),
        tensor.untyped_storage().nbytes(),
        tensor.is_conj(),
        tensor.is_neg(),
        tensor.requires_grad,
    )
