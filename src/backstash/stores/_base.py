"""What a store is: a place for bytes, addressed by slots."""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

__all__ = ["PAGE_BYTES", "Slot", "Store", "is_mine"]

PAGE_BYTES = 4096
"""A page of memory: a source and a target of one slot have the same address modulo this."""


is_mine = operator.methodcaller("_is_owned")
"""Whether this thread has an ``RLock``: what ``threading.Condition`` asks of it, in one call of C."""


class _Weak:
    __slots__ = ("__weakref__",)


@dataclass(slots=True, eq=False)
class Slot(_Weak):
    """Space for one run of bytes in a store. Made by :meth:`Store.reserve`, and only that store reads it."""

    nbytes: int
    """How many bytes it holds."""
    offset: int = 0
    """Where in the store its first byte lies."""
    checksum: int | None = None
    """What the store computed over the bytes when it wrote them, where it does."""
    head: bytes = b""
    """First bytes that stay in memory, because the store moves aligned units only."""
    tail: bytes = b""
    """Last bytes that stay in memory, likewise."""
    staged: bool = False
    """Whether the bytes that stay in memory have been copied for the write that comes next."""
    file: Any = None
    """Where the store keeps it, for a store that begins empty in a forked process."""


class Store(ABC):
    """A place that holds bytes outside the tensor they came from.

    ``reserve`` and ``release`` are called under the stash's lock and must not wait for I/O. ``write`` and
    ``read`` are called on any thread, several at a time on different slots, and release the GIL while
    they wait. A store never interprets bytes: it gets an address and a length.

    A source for ``write`` and a target for ``read`` of the same slot have the same address modulo 4096, a
    page.
    """

    name: str
    """What messages call it."""
    threads: int
    """How many calls of ``write`` or ``read`` at a time are worth while."""
    notes: tuple[str, ...]
    """Fallbacks that were taken, each with its reason."""
    max_bytes: int | None = None
    """The most bytes that it holds at once, which plans count with; ``None``: no limit is known."""
    lock: Any = None
    """The ``threading.RLock`` that ``reserve``, ``release`` and ``used_bytes`` take, if any: a stash that
    a signal's handler or a finalizer calls while its thread holds it asks nothing of the store."""
    begins_anew_when_forked = False
    """Whether a forked process may go on to use it: it holds nothing there at first, and touches nothing of
    the other process's. Else a stash in the forked process leaves in place what it would have moved."""

    @abstractmethod
    def reserve(self, nbytes: int) -> Slot:
        """Return a slot for ``nbytes``. Raises ``StashFullError`` when there is no space."""

    def stage(self, slot: Slot, address: int) -> None:
        """Copy what ``write`` would have to touch itself. Called before it, by the thread whose memory it is.

        ``write`` runs later on another thread, when a storage that was resized may have left ``address``:
        a system call then fails, a read by the process itself would end it. Does nothing by default.
        """
        return None

    @abstractmethod
    def write(self, slot: Slot, address: int) -> None:
        """Copy ``slot.nbytes`` bytes from ``address``.

        Raises ``StashIOError``; the slot may then be released or written again.
        """

    @abstractmethod
    def read(self, slot: Slot, address: int) -> None:
        """Copy the slot's bytes to ``address``.

        Raises ``StashIOError``; the slot is unchanged and may be read again.
        """

    @abstractmethod
    def release(self, slot: Slot) -> None:
        """Free the slot's space."""

    @property
    @abstractmethod
    def used_bytes(self) -> int:
        """Bytes reserved at present, rounding included."""

    @abstractmethod
    def close(self) -> None:
        """Free everything. A second call does nothing; reads and writes after it raise ``StashClosedError``."""
