"""The objects that autograd holds in place of tensors that were freed and will be recomputed."""

from __future__ import annotations

from typing import Any

from torch import Tensor

__all__ = ["Held"]


class Held:
    """What autograd holds in place of a saved tensor that was freed: how to recompute it.

    Args:
        call: the forward call that saved the tensor.
        state: the memory of the tensor, at the version that was saved, on the tape of ``call``.
        place: where the tensor lies in that memory.
        tensor: the saved tensor.
    """

    __slots__ = (
        "__weakref__",
        "call",
        "device",
        "dtype",
        "fingerprint",
        "made",
        "nbytes",
        "needs",
        "packed",
        "place",
        "shape",
        "state",
        "used_in",
    )

    def __init__(self, call: Any, state: Any, place: Any, tensor: Tensor) -> None:
        self.call = call
        self.state = state
        self.place = place
        self.packed: Any = None
        """The result of the stash's pack hook, if the tensor was packed and not freed."""
        self.needs: Any = None
        """The operands of its replay."""
        self.fingerprint: Any = None
        """A fingerprint of some of its bytes, if one was taken."""
        self.made: Any = None
        """The recomputed tensor and its version, until it is used."""
        self.used_in = -1
        """The number of the backward that used it last."""
        self.shape = tensor.shape
        self.dtype = tensor.dtype
        self.device = tensor.device
        self.nbytes = tensor.nbytes

    @property
    def where(self) -> str:
        """The tier that holds the bytes; ``"recomputed"`` if none does."""
        if self.packed is None:
            return "recomputed"
        return str(getattr(self.packed, "where", "keep"))
