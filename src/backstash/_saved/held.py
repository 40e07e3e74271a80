"""What autograd holds of a tensor that was let go, to be computed again."""

from __future__ import annotations

from typing import Any

from torch import Tensor

__all__ = ["Held"]


class Held:
    """What autograd holds of a tensor that was let go: how it is computed again.

    Args:
        call: the forward that saved it.
        state: the bytes of its memory, on that one's tape.
        place: where it lies in the memory.
        tensor: that was saved.
    """

    __slots__ = (
        "__weakref__",
        "call",
        "device",
        "dtype",
        "made",
        "nbytes",
        "packed",
        "place",
        "shape",
        "state",
        "told",
        "used_in",
    )

    def __init__(self, call: Any, state: Any, place: Any, tensor: Tensor) -> None:
        self.call = call
        self.state = state
        self.place = place
        self.packed: Any = None
        """As the stash packed it, where it is not let go."""
        self.told: Any = None
        """A fingerprint of some of its bytes, where one was taken."""
        self.made: Any = None
        """Computed again, and not used yet: the tensor, and its version."""
        self.used_in = -1
        """The backward that used it last."""
        self.shape = tensor.shape
        self.dtype = tensor.dtype
        self.device = tensor.device
        self.nbytes = tensor.nbytes

    @property
    def where(self) -> str:
        """The tier that has the bytes; ``"recomputed"``: none has."""
        if self.packed is None:
            return "recomputed"
        return str(getattr(self.packed, "where", "keep"))
