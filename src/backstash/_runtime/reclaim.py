"""What an object leaves to be settled when it dies: its place on disk or in host memory, its share of budgets.

It may die on any thread in the middle of anything, so its end only appends to a queue that a later call
drains. It must also be deaf to Ctrl-C. An interrupt that comes while autograd computes in C++ is delivered
where Python next looks for one; were that a ``__del__`` written in Python, which autograd runs when it
frees a node, the interpreter would print the interrupt and forget it, together with what the ``__del__``
was to do. So ``__del__`` is a *slot*, which each instance fills with a call of C on its own remains:
``partial(reclaim_queue.append, cleanup)``.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .._device.base import Copy
    from .._device.pinned_pool import PinnedBuffer
    from ..stores import Slot, Store
    from .workers import Work

__all__ = ["BlockCleanup", "DiskCleanup", "HostCleanup", "ReclaimQueue", "on_death"]


class ReclaimQueue(deque[Any]):
    """The queue of what died. ``mark`` is on all remains of one stash, which do not own the queue."""

    __slots__ = ("mark",)

    def __init__(self) -> None:
        super().__init__()
        self.mark = object()


def on_death(reclaim_queue: ReclaimQueue, cleanup: object) -> Callable[[], None]:
    """What an object's ``__del__`` is to be, so that its end appends ``cleanup`` and runs no Python."""
    return functools.partial(reclaim_queue.append, cleanup)


class BlockCleanup:
    """Of a block: what the budgets count for it."""

    __slots__ = ("loaded_bytes", "mark", "module", "nbytes", "number", "resident_bytes", "serial")

    def __init__(self, reclaim_queue: ReclaimQueue, number: int, nbytes: int) -> None:
        self.mark = reclaim_queue.mark
        self.number = number  # of the side that it is of
        self.nbytes = nbytes
        self.resident_bytes = 0  # bytes that the keep budget counts
        self.loaded_bytes = 0  # bytes that the read-ahead budget counts
        self.serial = -1  # among all blocks of the stash, once it is one of them
        self.module = ""


class DiskCleanup:
    """Of a parcel or a segment: its slot in the store, and who may still write there."""

    __slots__ = ("inflight_bytes", "loaded_bytes", "mark", "number", "slot", "store", "writing")

    def __init__(self, reclaim_queue: ReclaimQueue, store: Store, slot: Slot) -> None:
        self.mark = reclaim_queue.mark
        self.number = 0  # only the CPU's blocks have one
        self.store = store
        self.slot: Slot | None = slot
        self.writing: Work | None = None
        self.loaded_bytes = 0  # bytes that the read-ahead budget counts
        self.inflight_bytes = 0  # bytes that count as in flight although nothing writes them yet


class HostCleanup:
    """Of what lay in host memory: a room, and a slot on disk, and who may still use them."""

    __slots__ = ("brought", "buffer", "loaded_bytes", "mark", "number", "slot", "work", "writing")

    def __init__(
        self, reclaim_queue: ReclaimQueue, number: int, buffer: PinnedBuffer | None
    ) -> None:
        self.mark = reclaim_queue.mark
        self.number = number  # of the side that it is of
        self.buffer = buffer
        self.slot: Slot | None = None
        self.writing: Copy | None = None  # down, to the room
        self.brought: Copy | None = None  # the last copy up from it
        self.work: Work | None = None  # of a worker that writes from the room or reads to it
        self.loaded_bytes = 0  # bytes that the read-ahead budget counts

    def at_rest(self) -> bool:
        """Whether nothing uses it any more."""
        if self.work is not None and not (self.work.done() or self.work.cancel()):
            return False
        return all(copy is None or copy.ended() for copy in (self.writing, self.brought))

    def wait(self) -> None:
        """Wait until nothing uses it."""
        if self.work is not None and not self.work.cancel():
            self.work.exception()
        for copy in (self.writing, self.brought):
            if copy is not None:
                copy.wait()
