"""The interface of the tiers below a device's own memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from .._runtime.transfer import Transfer
from .._saved.block import Block
from .._saved.placement import Backing, Load

__all__ = ["LowerTier"]


class LowerTier(ABC):
    """The tier to which one device evicts its blocks. The caller holds the stash's lock."""

    runs_ahead: bool
    """Whether computation continues while a block larger than the window is written, and whether a block
    larger than the ``prefetch`` window may be read ahead, one at a time."""
    host_bytes = 0
    """Bytes of pinned host memory in use."""
    host_peak_bytes = 0
    """The peak of pinned host memory, in bytes."""
    disk_peak_bytes = 0
    """The peak of the store's bytes in use."""
    stall_seconds = 0.0
    """How long the computing thread waited for space in this tier."""
    note = ""
    """A fallback that the tier uses, with its reason."""
    capacity_bytes: int | None = None
    """The most bytes that the tier can hold; ``None`` if no limit is known."""

    def unfilled_bytes(self) -> int:
        """Return how many of the store's bytes in use are reserved but not filled yet."""
        return 0

    @property
    @abstractmethod
    def used_bytes(self) -> int:
        """Bytes in use. If they shrink, a full tier may have space again."""

    @abstractmethod
    def begin(self, block: Block) -> tuple[Backing, Transfer]:
        """Begin to write ``block`` from its own memory, which the transfer owns.

        Raises ``StashFullError`` if there is no space; nothing has begun then.
        """

    @abstractmethod
    def fetch(self, backing: Any, *, ahead: bool) -> Load:
        """Begin to load the bytes of a backing that this tier created.

        Args:
            backing: the backing that :meth:`begin` returned.
            ahead: whether the load is ahead of need.

        Raises ``MemoryError`` or ``torch.OutOfMemoryError`` if there is no memory for the bytes; nothing has
        begun then.
        """

    def poll(self) -> None:
        """Continue loads whose first stage has ended."""
        return None

    def begin_waiting(self) -> None:
        """Begin transfers that wait for others."""
        return None

    def sweep(self) -> None:
        """Release what ended transfers no longer use, so that the counts are current."""
        return None

    def defer(self, cleanup: Any) -> None:
        """Release a dead backing's buffer and slot once no copy uses them.

        Not called for a tier without buffers.
        """
        return None

    def forget(self) -> None:
        """Forget all blocks, since none is alive."""
        return None

    def resume(self, transfer: Any) -> None:
        """Begin a transfer that may not have reached a worker. A device's own copy needs no restart."""
        return None

    def close(self) -> None:
        """Release unused resources."""
        return None

    def restore(self, blocks: list[Block], cleanups: list[Any]) -> None:
        """Rebuild counts and queues from the living blocks: see ``_core/session``.

        Args:
            blocks: the living blocks of this device, oldest first.
            cleanups: of all their backings and loads, including dead ones that are not settled yet.
        """
        return None
