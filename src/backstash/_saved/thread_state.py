"""The state that one thread has with a stash.

Each thread has its own state for four reasons:

- Counters: the path for small tensors must not take a lock.
- An allowance: how many bytes the thread may save before it asks a planner again
  (:meth:`ThreadState.may_leave`).
- Ownership of copies: the thread that made a tensor may write to it in place while a worker copies it, and the
  version is raised only after the bytes have changed. So only that thread, when it next enters the stash, may
  check the version and accept the copy as whole. After the thread has ended, any thread may.
- Blocks that wait: an operation saves its inputs before it runs, and may still fill one that it allocated
  itself (``rrelu``'s noise) without raising the version. So a block of a tensor without ``grad_fn`` stays in
  place until its operation has ended, which is when the thread has made a later node or leaves the stash. A
  block that is expected to be saved again waits for that save (see ``save_counts``).
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from .._torch.hook_stack import Scope

__all__ = ["Counts", "ThreadState"]


@dataclass(frozen=True, slots=True)
class Counts:
    """The counts of saved tensors of one thread, or of several."""

    saves: int = 0
    """Tensors that took the slow path."""
    small_saves: int = 0
    """Tensors that the fast path kept in memory because they are small."""
    small_bytes: int = 0
    """The bytes of the small tensors."""
    nested_saves: int = 0
    """Tensors that nested calls kept in memory (see ``_runtime/critical_section``)."""
    nested_bytes: int = 0
    """The bytes of the tensors of nested calls."""
    parameter_saves: int = 0
    """Parameters and views of them."""
    parameter_bytes: int = 0
    """The bytes of these tensors."""
    fitting_saves: int = 0
    """Tensors that the fast path kept in memory because a plan keeps them."""
    fitting_bytes: int = 0
    """The bytes of their storages."""
    times_off: int = 0
    """How often the stash removed its hooks for the rest of a context."""

    def __add__(self, other: Counts) -> Counts:
        names = [each.name for each in fields(Counts)]
        return Counts(*(getattr(self, name) + getattr(other, name) for name in names))


class ThreadState:
    """The state that one thread has with a stash."""

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
        "parameter_bytes",
        "parameter_saves",
        "reported_bytes",
        "saves",
        "scopes",
        "small_bytes",
        "small_saves",
        "tape",
        "thread",
        "times_off",
        "waiting",
    )

    def __init__(self) -> None:
        self.thread = weakref.ref(threading.current_thread())  # weak: it may end
        self.scopes: list[Scope] = []  # hook pairs that this thread has pushed and not yet popped
        self.restart()

    def restart(self) -> None:
        """Clear the queues and the counters. Called at construction and in a forked child."""
        self.waiting: deque[tuple[weakref.ref[Any], bool]] = (
            deque()
        )  # blocks; whether to evict each at once
        self.expecting: deque[weakref.ref[Any]] = deque()  # blocks that wait for another save
        self.latest: deque[tuple[weakref.ref[Any], Tensor]] = deque(maxlen=4)
        """The newest blocks and the memory that each was saved from, while the stash learns what to recompute:
        the input of an operation, which may have been evicted, stays available until its result is saved."""
        self.tape: Any = None
        """The recorder of this thread's operations, if something may be recomputed."""
        self.operation = 0  # the graph's next sequence number when the last of them was saved
        self.saves = self.small_saves = self.small_bytes = 0  # see Counts
        self.nested_saves = self.nested_bytes = 0
        self.parameter_saves = self.parameter_bytes = 0
        self.fitting_saves = self.fitting_bytes = 0
        self.fitting_storages: deque[int] = deque(maxlen=8)
        """The latest storages saved without a block: saving one again takes no more memory."""
        self.times_off, self.off_pass = 0, -1  # and the last pass in which hooks were removed
        self.large_bytes = self.reported_bytes = 0  # without small storages; and those reported
        self.may_leave(-1)

    def may_leave(self, nbytes: int, device: torch.device | None = None, until: int = 0) -> None:
        """Allow this thread to save ``nbytes`` of storages on ``device`` in memory without asking a planner.
        The allowance holds while the session's ``uses`` equals ``until``; -1 bytes withdraws it."""
        self.allowed_bytes, self.allowed_on, self.allowed_until = nbytes, device, until
        self.granted_bytes = nbytes
        if nbytes < 0:
            self.fitting_storages.clear()

    def take_used_bytes(self) -> int:
        """Return the bytes saved under the allowance since :meth:`may_leave`, and withdraw it."""
        used = self.granted_bytes - self.allowed_bytes
        self.allowed_bytes = self.granted_bytes = -1
        return used

    def uncounted_bytes(self) -> int:
        """Return the bytes of storages, without small ones, that were saved since the last call. A storage
        that was saved twice counts twice."""
        before, self.reported_bytes = self.reported_bytes, self.large_bytes
        return self.large_bytes - before

    def leave_out(self, nbytes: int) -> None:
        """Leave this much out of :meth:`uncounted_bytes`: the stash holds it for a replay, and the program did
        not save it. If negative, include it."""
        self.reported_bytes += nbytes

    @property
    def counts(self) -> Counts:
        """The counts of this thread so far."""
        return Counts(*(getattr(self, each.name) for each in fields(Counts)))

    def is_alive(self) -> bool:
        """Whether the thread has not ended."""
        thread = self.thread()
        return thread is not None and thread.is_alive()

    def may_judge(self, other: ThreadState) -> bool:
        """Return whether this thread, inside the stash, may accept a copy that ``other``'s thread began."""
        return other is self or not other.is_alive()
