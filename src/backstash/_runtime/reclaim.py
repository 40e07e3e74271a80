"""Deferred cleanup of objects that die.

An object may die on any thread at any point of a program. So its finalizer only appends a *cleanup* to a
queue, and a later call of the stash processes the queue: it releases the object's disk slot, its host buffer,
and its share of the budgets. Finalizers run no Python code: autograd runs a ``__del__`` when it frees a node,
and an interrupt (Ctrl-C) delivered inside one would be printed and lost, together with the rest of the
``__del__``. So ``__del__`` is a *slot* that each instance fills with a C call:
``partial(reclaim_queue.append, cleanup)``.

A cleanup holds counts, slots and device events, but no tensor memory: a dead object's memory is free at once.

The queue also owns every cleanup that has a lease (see ``stores/_leases``) until the cleanup is settled.
Otherwise, if the garbage collector found a load or a backing in a reference cycle (such as an error and the
frames of its traceback), it would treat the lease's owner as dead first and then run the ``__del__`` that
brings the owner back. The extent would be lent twice.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Any

__all__ = ["Cleanup", "Ledger", "ReclaimQueue"]


class Ledger(ABC):
    """The byte counts of one device, from which the bytes of dead objects are subtracted."""

    @abstractmethod
    def subtract(
        self, *, resident_bytes: int = 0, inflight_bytes: int = 0, again_bytes: int = 0
    ) -> None:
        """Subtract bytes that are no longer in place, no longer being written, or no longer held for another
        backward of their graph."""

    @abstractmethod
    def defer(self, cleanup: Cleanup) -> None:
        """Release the host buffer and the slot of ``cleanup`` once no copy uses them."""


class Cleanup(ABC):
    """What remains to be released for one dead object. Kept small, since each block has one or two."""

    __slots__ = ("loaded_bytes", "mark", "number")

    mark: object
    """The mark of the reclaim queue, which identifies the objects of one stash."""
    number: int
    """The number of the device whose tiers count the object."""
    loaded_bytes: int
    """The bytes that the prefetch budget counts for it."""
    again_bytes: int = 0
    """The part of ``loaded_bytes`` that is held only for another backward of a retained graph."""

    facts: tuple[int, int, str] | None = None
    """A block's bytes, number and module, for events; ``None`` if the stash does not count it."""
    may_be_busy = False
    """Whether :meth:`is_busy` is to be called."""

    def is_busy(self) -> bool:
        """Return whether a worker still uses the slot, so that the cleanup must be settled later."""
        return False

    def free_slot(self, store: object, wait: Callable[[Any], object]) -> bool:
        """Release the slot in ``store`` now, after calling ``wait`` for a transfer that still writes to it.
        Return whether there was a slot."""
        return False

    @abstractmethod
    def settle(self, ledger: Ledger) -> None:
        """Release everything. Counts are reset before they are subtracted, so that none counts twice."""


class ReclaimQueue(deque[Cleanup]):
    """The cleanups of dead objects. The cleanups of one stash share its ``mark`` and do not own the queue."""

    __slots__ = ("leased", "mark")

    leased: set[Cleanup]
    """The cleanups that hold a lease and are not settled yet."""

    def __init__(self) -> None:
        super().__init__()
        self.leased = set()
        self.mark = object()
