"""A lane: one thread's side of a stash.

Two things are kept per thread. Counters, because the path for small tensors must not take a lock. And
ownership: a copy that runs beside the thread that made the tensor may be torn by an in-place operation of
that thread, whose version is raised only after the bytes have changed. So only that thread, when it next
enters the stash, or anybody once it has ended, may look at the version and declare the copy whole.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ._scopes import Scope

__all__ = ["Lane"]


class Lane:
    """What one thread keeps with a stash."""

    __slots__ = ("saves", "scopes", "small_bytes", "small_saves", "thread")

    def __init__(self) -> None:
        self.thread = threading.current_thread()
        self.scopes: list[Scope] = []  # hook pairs that this thread has pushed and not yet popped
        self.saves = 0  # tensors given to the slow path
        self.small_saves = 0  # tensors left by the fast path
        self.small_bytes = 0

    def may_land(self, other: Lane) -> bool:
        """Whether this thread, now inside the stash, may judge a copy that ``other``'s thread began."""
        return other is self or not other.thread.is_alive()
