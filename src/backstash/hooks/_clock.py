"""Detect when a backward begins and ends, from the hooks that fire in it."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

from .._torch.engine import queue_callback
from .._torch.nested_backward import outermost_function

__all__ = ["BackwardClock"]


class _End:
    """The callback that the engine runs last in one backward; freed uncalled if that backward raises.

    The first hook may fire in a backward inside of another one, that of a reentrant checkpoint. Then the end is
    queued once the node that began it has run, in the outer backward.
    """

    __slots__ = ("__weakref__", "_again", "_removable", "_run")

    def __init__(self, run: Callable[[], None]) -> None:
        self._run = run
        self._again = True
        self._removable: Any = None

    def queue(self) -> None:
        """Be called at the end of the outermost backward of this thread."""
        outer = outermost_function()
        if outer is None:
            queue_callback(self)
            return
        ends: list[_End] = []

        def after(*_: object) -> None:
            while ends:
                end = ends.pop()
                end._removable.remove()
                queue_callback(end)

        self._removable = outer.register_hook(after)
        # If the inner backward raises, the end is freed uncalled, as in the outer one.
        queue_callback(partial(ends.append, self))

    def __call__(self) -> None:
        # Queued again once: DDP and FSDP finish their gradients in callbacks of the same backward, which may
        # run after the first call of this one.
        if self._again:
            self._again = False
            queue_callback(self)
        else:
            self._run()


class BackwardClock:
    """Calls ``on_begin`` at the first hook of each backward that calls ``begin()``, and ``on_end`` at its end.

    A backward that raises ends without ``on_end``: the engine drops the callback, and that resets
    ``running``. A backward inside another one (reentrant checkpointing) belongs to the outer one.
    """

    __slots__ = ("_end", "_lock", "_on_begin", "_on_end", "backwards", "running")

    def __init__(self, *, on_begin: Callable[[], None], on_end: Callable[[], None]) -> None:
        self._on_begin = on_begin
        self._on_end = on_end
        self._end: weakref.ref[_End] | None = None
        # The engine has a thread for each device, so two hooks may be first at the same time.
        self._lock = threading.Lock()
        self.backwards = 0
        """How many backwards have begun."""
        self.running = False
        """Whether such a backward is running."""

    def begin(self) -> None:
        """Record that a backward runs, if no hook has done so yet. Called from inside a hook."""
        if self.running:
            return
        with self._lock:
            if self.running:
                return
            self._on_begin()
            end = _End(self._closed)
            end.queue()
            self.backwards += 1
            self.running = True
            self._end = weakref.ref(end, self._dropped)

    def _dropped(self, _: weakref.ref[_End]) -> None:
        # Runs in a weak reference's callback, on the thread that frees a failed backward: only assign here.
        self.running = False

    def _closed(self) -> None:
        self._end = None
        self.running = False
        self._on_end()
