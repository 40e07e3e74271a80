"""The interface of a store: a place for bytes, addressed by slots."""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

__all__ = ["PAGE_BYTES", "Slot", "Store", "is_mine"]

PAGE_BYTES = 4096
"""The size of a memory page. The source and the target of one slot have the same address modulo this."""


is_mine = operator.methodcaller("_is_owned")
"""Return whether this thread holds an ``RLock``, in one C call, as ``threading.Condition`` does."""


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
    """The checksum that the store computed when it wrote the bytes, if it does so."""
    head: bytes = b""
    """First bytes that stay in memory, because the store moves aligned units only."""
    tail: bytes = b""
    """Last bytes that stay in memory for the same reason."""
    staged: bool = False
    """Whether ``head`` and ``tail`` have been copied for the next write."""
    file: Any = None
    """The store's file, for a store that begins empty in a forked process."""


class Store(ABC):
    """A place that holds bytes outside the tensor they came from.

    ``reserve`` and ``release`` are called under the stash's lock and must not wait for I/O. ``write`` and
    ``read`` are called on any thread, several at a time on different slots, and release the GIL while
    they wait. A store never interprets bytes: it gets an address and a length.

    A source for ``write`` and a target for ``read`` of the same slot have the same address modulo 4096, a
    page.
    """

    name: str
    """The store's name in messages."""
    threads: int
    """The useful number of simultaneous calls of ``write`` or ``read``."""
    notes: tuple[str, ...]
    """Fallbacks that the store uses, each with its reason."""
    max_bytes: int | None = None
    """The most bytes that it holds at once, for use by plans; ``None`` if no limit is known."""
    lock: Any = None
    """The ``threading.RLock`` that ``reserve``, ``release`` and ``used_bytes`` take, if any. If a signal
    handler or a finalizer runs while its thread holds this lock, the stash does not call the store."""
    begins_anew_when_forked = False
    """Whether a forked process may use it: the store is empty there at first and does not touch the parent's
    bytes. If false, a stash in a forked process keeps in memory what it would have moved."""

    @abstractmethod
    def reserve(self, nbytes: int) -> Slot:
        """Return a slot for ``nbytes``. Raises ``StashFullError`` when there is no space."""

    def stage(self, slot: Slot, address: int) -> None:
        """Copy the bytes that ``write`` would have to read itself. Called before it, by the owning thread.

        ``write`` runs later on another thread, when a storage that was resized may have left ``address``: a
        system call then fails, but a direct read would crash the process. Does nothing by default.
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
