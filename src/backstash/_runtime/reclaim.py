"""Deferred reclamation: what an object leaves to be settled when it dies.

An object may die on any thread in the middle of anything, so its end only appends a *cleanup* to a queue that
a later call drains: its slot on disk, its buffer in host memory, its share of the budgets. Finalizers run no
Python: autograd runs a ``__del__`` when it frees a node, and an interrupt (Ctrl-C) delivered inside one would
be printed and lost, together with what the ``__del__`` was to do. So ``__del__`` is a *slot*, which each
instance fills with a call of C: ``partial(reclaim_queue.append, cleanup)``.

A cleanup holds counts, slots and events of the device, and no memory of a tensor: what died gives its memory
back at once.

The queue also owns every cleanup that has a lease (see ``stores/_leases``) until it is settled. Else the
collector, where it finds a load or a backing in a cycle, such as that of an error and the frames of its
traceback, would take the lease's owner for dead first and run the ``__del__`` that brings it back after that:
the extent would be lent twice.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Any

__all__ = ["Cleanup", "Ledger", "ReclaimQueue"]


class Ledger(ABC):
    """What is counted for the tensors of one device, as far as an object that died takes part in it."""

    @abstractmethod
    def subtract(
        self, *, resident_bytes: int = 0, inflight_bytes: int = 0, again_bytes: int = 0
    ) -> None:
        """So many bytes are no longer in place, no longer on their way down, or no longer held for another
        backward of their graph."""

    @abstractmethod
    def defer(self, cleanup: Cleanup) -> None:
        """Give back the host buffer and the slot of ``cleanup`` when no copy uses them any more."""


class Cleanup(ABC):
    """What one dead object leaves; kept small, since each block has one or two."""

    __slots__ = ("loaded_bytes", "mark", "number")

    mark: object
    """The reclaim queue's, by which the objects of one stash are known."""
    number: int
    """Of the device whose tiers count it."""
    loaded_bytes: int
    """That the prefetch budget counts for it."""
    again_bytes: int = 0
    """Those of them that no running backward waits for, but perhaps the next of a retained graph."""

    @property
    def facts(self) -> tuple[int, int, str] | None:
        """What events say of a block that the stash counts: its bytes, its number, and its module."""
        return None

    def is_busy(self) -> bool:
        """Whether a worker still uses its slot, so that it must be settled later."""
        return False

    def free_slot(self, store: object, wait: Callable[[Any], object]) -> bool:
        """Release its slot in ``store`` at once, after ``wait`` for a transfer that still runs into it; whether
        it had one."""
        return False

    @abstractmethod
    def settle(self, ledger: Ledger) -> None:
        """Give everything back. Counts are struck out before they are subtracted, so never twice."""


class ReclaimQueue(deque[Cleanup]):
    """The cleanups of what died. All of one stash have its ``mark``, and do not own the queue."""

    __slots__ = ("leased", "mark")

    leased: set[Cleanup]
    """The cleanups that have a lease, until they are settled."""

    def __init__(self) -> None:
        super().__init__()
        self.leased = set()
        self.mark = object()
