"""What one thread keeps with a stash.

Four things are kept per thread. Counters, because the path for small tensors must not take a lock. Likewise
how much may be saved before a planner has to be asked again: see :meth:`ThreadState.may_leave`. And
ownership: a copy that runs beside the thread that made the tensor may be torn by an in-place operation of
that thread, whose version is raised only after the bytes have changed. So only that thread, when it next
enters the stash, or anybody once it has ended, may look at the version and declare the copy whole.

And blocks that wait. An operation saves its inputs before it runs, and may still fill one that it made
for itself (``rrelu``'s noise), which raises no version. So a block without a gradient function waits in
place until its operation has ended: until this thread has made a later node, or leaves the stash.

One that is expected to be saved again waits for that: see ``save_counts``.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .._torch.hook_stack import Scope

__all__ = ["Counts", "ThreadState"]


@dataclass(frozen=True, slots=True)
class Counts:
    """What one thread, or several, gave to a stash."""

    saves: int = 0
    """Tensors given to the slow path."""
    small_saves: int = 0
    """Tensors left by the fast path."""
    small_bytes: int = 0
    """The bytes of those."""
    nested_saves: int = 0
    """Tensors left by calls in the middle of another."""
    nested_bytes: int = 0
    """The bytes of those."""
    fitting_saves: int = 0
    """Tensors left by the fast path since a plan leaves them alone."""
    fitting_bytes: int = 0
    """The bytes of their storages."""
    times_off: int = 0
    """How often the hooks were taken off for the rest of a context."""

    def __add__(self, other: Counts) -> Counts:
        return Counts(
            self.saves + other.saves,
            self.small_saves + other.small_saves,
            self.small_bytes + other.small_bytes,
            self.nested_saves + other.nested_saves,
            self.nested_bytes + other.nested_bytes,
            self.fitting_saves + other.fitting_saves,
            self.fitting_bytes + other.fitting_bytes,
            self.times_off + other.times_off,
        )


class ThreadState:
    """What one thread keeps with a stash."""

    __slots__ = (
        "allowed_bytes",
        "allowed_on",
        "allowed_until",
        "expecting",
        "fitting_bytes",
        "fitting_saves",
        "fitting_storages",
        "granted_bytes",
        "large_bytes",
        "latest",
        "nested_bytes",
        "nested_saves",
        "off_pass",
        "operation",
        "saves",
        "scopes",
        "small_bytes",
        "small_saves",
        "tape",
        "thread",
        "times_off",
        "told_bytes",
        "waiting",
    )

    def __init__(self) -> None:
        self.thread = weakref.ref(threading.current_thread())  # weak: it may end
        self.scopes: list[Scope] = []  # hook pairs that this thread has pushed and not yet popped
        self.restart()

    def restart(self) -> None:
        """Nothing waits, and nothing is counted: at first, and in a forked process."""
        self.waiting: deque[tuple[weakref.ref[Any], bool]] = (
            deque()
        )  # blocks; whether to go at once
        self.expecting: deque[weakref.ref[Any]] = deque()  # likewise, that will be saved again
        self.latest: deque[tuple[weakref.ref[Any], Tensor]] = deque(maxlen=4)
        """While recomputing is learnt, the newest blocks and the memory they were saved from: an operation's
        input, which may have left, is there until what was computed from it is saved."""
        self.tape: Any = None
        """What records this thread's operations, where something may be recomputed."""
        self.operation = 0  # the graph's next sequence number when the last of them was saved
        self.saves = self.small_saves = self.small_bytes = 0  # see Counts
        self.nested_saves = self.nested_bytes = 0
        self.fitting_saves = self.fitting_bytes = 0
        self.fitting_storages: deque[int] = deque(maxlen=8)
        """The latest that were saved as they are: to save one of them again takes no more memory."""
        self.times_off, self.off_pass = 0, -1  # and the forward pass in which they were last
        self.large_bytes = self.told_bytes = 0  # of all storages but small ones; and of these, told
        self.may_leave(-1)

    def may_leave(self, nbytes: int, device: torch.device | None = None, until: int = 0) -> None:
        """So many bytes of storages of ``device`` may be saved as they are, without a planner being asked;
        ``until``: as long as the session's ``uses`` is this. -1: none."""
        self.allowed_bytes, self.allowed_on, self.allowed_until = nbytes, device, until
        self.granted_bytes = nbytes
        if nbytes < 0:
            self.fitting_storages.clear()

    def take_used_bytes(self) -> int:
        """How many bytes were saved as they are since :meth:`may_leave`; none may be from now on."""
        used = self.granted_bytes - self.allowed_bytes
        self.allowed_bytes = self.granted_bytes = -1
        return used

    def uncounted_bytes(self) -> int:
        """Of the storages that were saved since this was asked last, but for small ones; one that was saved
        twice counts twice."""
        told, self.told_bytes = self.told_bytes, self.large_bytes
        return self.large_bytes - told

    @property
    def counts(self) -> Counts:
        """What this thread has given so far."""
        return Counts(
            self.saves,
            self.small_saves,
            self.small_bytes,
            self.nested_saves,
            self.nested_bytes,
            self.fitting_saves,
            self.fitting_bytes,
            self.times_off,
        )

    def is_alive(self) -> bool:
        """Whether the thread has not ended."""
        thread = self.thread()
        return thread is not None and thread.is_alive()

    def may_judge(self, other: ThreadState) -> bool:
        """Whether this thread, now inside the stash, may judge a copy that ``other``'s thread began."""
        return other is self or not other.is_alive()
