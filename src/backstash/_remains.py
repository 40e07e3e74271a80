"""What an object leaves to be settled when it dies: its place on disk or in host memory, its share of budgets.

It may die on any thread in the middle of anything, so its end only appends to a queue that a later call
drains. It must also be deaf to Ctrl-C. An interrupt that comes while autograd computes in C++ is delivered
where Python next looks for one; were that a ``__del__`` written in Python, which autograd runs when it
frees a node, the interpreter would print the interrupt and forget it, together with what the ``__del__``
was to do. So ``__del__`` is a *slot*, which each instance fills with a call of C on its own remains:
``partial(grave.append, remains)``.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ._streams import Copy
    from ._workers import Work
    from .stores import Slot, Store
    from .stores._host import Room

__all__ = ["BlockRemains", "Grave", "HostRemains", "ParcelRemains", "at_death"]


class Grave(deque[Any]):
    """The queue of what died. ``mark`` is on all remains of one stash, which do not own the queue."""

    __slots__ = ("mark",)

    def __init__(self) -> None:
        super().__init__()
        self.mark = object()


def at_death(grave: Grave, remains: object) -> Callable[[], None]:
    """What an object's ``__del__`` is to be, so that its end appends ``remains`` and runs no Python."""
    return functools.partial(grave.append, remains)


class BlockRemains:
    """Of a block: what the budgets count for it."""

    __slots__ = ("held", "kept", "mark", "module", "nbytes", "number", "serial")

    def __init__(self, grave: Grave, number: int, nbytes: int) -> None:
        self.mark = grave.mark
        self.number = number  # of the side that it is of
        self.nbytes = nbytes
        self.kept = 0  # bytes that the keep budget counts
        self.held = 0  # bytes that the read-ahead budget counts
        self.serial = -1  # among all blocks of the stash, once it is one of them
        self.module = ""


class ParcelRemains:
    """Of a parcel or a segment: its slot in the store, and who may still write there."""

    __slots__ = ("flown", "held", "mark", "number", "slot", "store", "writing")

    def __init__(self, grave: Grave, store: Store, slot: Slot) -> None:
        self.mark = grave.mark
        self.number = 0  # only the CPU's blocks have one
        self.store = store
        self.slot: Slot | None = slot
        self.writing: Work | None = None
        self.held = 0  # bytes that the read-ahead budget counts
        self.flown = 0  # bytes that count as in flight although nothing writes them yet


class HostRemains:
    """Of what lay in host memory: a room, and a slot on disk, and who may still use them."""

    __slots__ = ("brought", "held", "mark", "number", "room", "slot", "work", "writing")

    def __init__(self, grave: Grave, number: int, room: Room | None) -> None:
        self.mark = grave.mark
        self.number = number  # of the side that it is of
        self.room = room
        self.slot: Slot | None = None
        self.writing: Copy | None = None  # down, to the room
        self.brought: Copy | None = None  # the last copy up from it
        self.work: Work | None = None  # of a worker that writes from the room or reads to it
        self.held = 0  # bytes that the read-ahead budget counts

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
