"""What every tier below a device's own memory is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from .._runtime.transfer import Transfer
from .._saved.block import Block
from .._saved.placement import Backing, Load

__all__ = ["LowerTier"]


class LowerTier(ABC):
    """Where the blocks of one device go when they leave its memory. The caller holds the stash's lock."""

    runs_ahead: bool
    """Whether compute goes on while a block larger than the window is written, and whether a block larger
    than the ``prefetch`` window is read ahead all the same, one at a time."""
    host_bytes = 0
    """Bytes of pinned host memory in use."""
    host_peak_bytes = 0
    """The most bytes of host memory that were pinned."""
    disk_peak_bytes = 0
    """The most bytes of the store that were in use."""
    stall_seconds = 0.0
    """How long the computing thread waited for room here."""
    note = ""
    """A fallback that was taken, with its reason."""
    capacity_bytes: int | None = None
    """The most bytes that it can hold; ``None``: no limit is known."""

    def unfilled_bytes(self) -> int:
        """Of the store's bytes in use, those that are reserved for what is yet to come."""
        return 0

    @property
    @abstractmethod
    def used_bytes(self) -> int:
        """Bytes in use, by which health sees that there may be room again."""

    @abstractmethod
    def begin(self, block: Block) -> tuple[Backing, Transfer]:
        """Begin to write ``block`` from its own memory, which the transfer owns.

        Raises ``StashFullError`` where there is no room; nothing has begun then.
        """

    @abstractmethod
    def fetch(self, backing: Any, *, ahead: bool) -> Load:
        """Begin to bring back the bytes of a backing that this tier made.

        Args:
            backing: of a block that :meth:`begin` was given.
            ahead: of need.

        Raises ``MemoryError`` or ``torch.OutOfMemoryError`` where there is no memory for them; nothing has
        begun then.
        """

    def poll(self) -> None:
        """Send on what has come part of its way."""
        return None

    def sweep(self) -> None:
        """Take back what transfers that ended no longer use, so that figures are of now."""
        return None

    def defer(self, cleanup: Any) -> None:
        """Give back a dead backing's buffer and slot when no copy uses them any more.

        A tier without buffers is given none.
        """
        return None

    def forget(self) -> None:
        """No block is alive any more."""
        return None

    def resume(self, transfer: Any) -> None:
        """Begin a transfer of this tier that was perhaps given to no worker; a device's goes on by itself."""
        return None

    def close(self) -> None:
        """Give back what nothing uses."""
        return None

    def restore(self, blocks: list[Block], cleanups: list[Any]) -> None:
        """Rebuild counts and queues from what there is: see ``_session``.

        Args:
            blocks: of this device that are alive, oldest first.
            cleanups: of all their backings and loads, the dead ones that are yet to be settled too.
        """
        return None
