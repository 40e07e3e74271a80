"""Worker threads that move bytes, and the moves. A worker or the thread that needs a move makes it, once.

This module does not use ``concurrent.futures``, because of Ctrl-C: its futures and its pool take and release
their locks in Python code, and an interrupt at that point leaves a lock locked forever. Here every lock is
implemented in C and taken by a ``with`` statement, so no interrupt can come between. And nothing waits for a
message that might never have been sent.
"""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from ..errors import StashForkedError
from .critical_section import moving
from .transfer import Transfer

__all__ = ["Work", "Workers"]


class Work(Transfer):
    """One call that any thread may make, once. Waiting for it makes it, unless another thread does.

    So a ``Work`` may be queued twice, or not at all if its thread was interrupted or could not be started. In
    a forked child it is never made: the thread that makes it may exist only in the parent.
    """

    ends_in_order = False
    __slots__ = ("__weakref__", "_call", "_process", "_running", "cancelled", "error", "finished")

    def __init__(self, function: Callable[..., object], *args: Any) -> None:
        self._process = _process[0]
        self._call: tuple[Callable[..., object], tuple[Any, ...]] | None = (function, args)
        self._running = threading.Lock()
        self.cancelled = False
        self.finished = False
        self.error: BaseException | None = None

    def run(self, *, catch: type[BaseException] = Exception) -> bool:
        """Make the call, or wait for the thread that is making it. Return whether this thread made it.

        An exception that is not of type ``catch``, such as an interrupt, propagates; the next caller then
        makes the call again.
        """
        waits = moving.waits
        depth = len(waits)
        moving.calls += 1  # no call between this and "try", so that no interrupt can come between
        try:
            waits.append(self)  # before the check, since a handler may fork before or after it
            if self._process is not _process[0]:
                return self._refuse()
            with self._running:
                waits.pop()
                if self._process is not _process[0] and not self._running.locked():
                    self._running.acquire()  # a fork happened just here: see _after_fork
                if self.finished:
                    return False
                if self._process is not _process[0]:
                    return self._refuse()
                call = self._call
                if not self.cancelled and call is not None:
                    function, args = call
                    try:
                        function(*args)
                    except catch as error:
                        self.error = error
                        _drop_frames(error)
                self._call = None
                self.finished = True
                return True
        finally:
            del waits[depth:]
            moving.calls -= 1

    def _refuse(self) -> bool:
        self.error = StashForkedError(
            "the parent process of this fork is moving these bytes: run backward in the parent "
            "process, or run forward again in this process"
        )
        self._call, self.finished = None, True
        return True

    def forked(self) -> None:
        """Free the lock in a forked child whose only thread waits for this move."""
        if self._running.locked():
            self._running.release()

    def done(self) -> bool:
        """Return whether the call was made or failed."""
        return self.finished

    def ended(self) -> bool:
        """See :meth:`done`. The bytes have been moved when the call returns."""
        return self.finished

    def wait(self) -> None:
        """Wait for the end of the call."""
        self.exception()

    def exception(self) -> BaseException | None:
        """Wait for the end of the call. Return its error, if there was one."""
        if not self.finished:
            self.run()
        return self.error

    def cancel(self) -> bool:
        """Cancel the call. Return whether it had not begun."""
        self.cancelled = True
        if self._running.locked() or self.finished:
            return False
        self._call = None  # frees the memory that it owns: a worker may pop this much later
        return True


def _drop_frames(error: BaseException | None) -> None:
    """Remove the tracebacks of a stored error, since their frames would keep tensor memory alive."""
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


class Workers:
    """Up to ``threads`` worker threads.

    The threads end when this object is closed or dies. If there are none (after ``close``, in a forked child,
    or because none could be started), the caller runs what it submits.
    """

    def __init__(self, threads: int) -> None:
        self._most = threads
        self._queue: SimpleQueue[Work | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._pid = os.getpid()
        self._closed = False
        self.note = ""
        weakref.finalize(self, self._queue.put, None)
        _all.add(self)

    @property
    def is_open(self) -> bool:
        """Whether submitted work is expected to run on a worker thread."""
        return not (self._closed or self.note or os.getpid() != self._pid)

    def submit(self, function: Callable[..., object], *args: Any) -> Work:
        """Begin ``function(*args)`` and return a :class:`Work` to wait for."""
        work = Work(function, *args)
        self.begin(work)
        return work

    def begin(self, work: Work) -> None:
        """Pass ``work`` to a worker thread. The caller, which needs to know when it ends, already owns it."""
        if self._closed or os.getpid() != self._pid:
            work.run()
            return
        if len(self._threads) < self._most:
            self._start_one()
        if self._threads:
            self._queue.put(work)
        else:
            work.run()

    def _start_one(self) -> None:
        name = f"backstash_{len(self._threads)}"
        # A daemon, since an interrupt here may leave the thread unregistered. _end_all joins the others.
        thread = threading.Thread(target=_serve, args=(self._queue,), name=name, daemon=True)
        try:
            thread.start()
        except (
            RuntimeError,
            MemoryError,
        ) as error:  # no more threads, or the interpreter is ending
            self._most = len(self._threads)
            if not self._most:
                self.note = f"no worker thread ({error}): moves run on the computing thread"
            return
        self._threads.append(thread)

    def close(self) -> None:
        """Wait for the work that has begun, and end the threads. A second call does nothing."""
        self._closed = True
        if os.getpid() != self._pid:
            return
        self._queue.put(None)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()


def _serve(queue: SimpleQueue[Work | None]) -> None:
    """Run the queued work on a worker thread until ``None`` arrives, which ends every thread of the queue."""
    while (work := queue.get()) is not None:
        work.run(catch=BaseException)
        del work  # else it would stay alive until the next one
    queue.put(None)


_all: weakref.WeakSet[Workers] = weakref.WeakSet()
_process = [object()]  # replaced in each forked child


def _after_fork() -> None:
    """Free the locks of moves in a forked child. The parent's workers do not exist here, so no move would end.

    A signal handler may fork while its thread waits for the lock of a move that a worker makes. That worker
    does not exist in the child and would never release the lock.
    """
    _process[0] = object()
    for work in moving.waits:
        work.forked()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


@atexit.register
def _end_all() -> None:
    """Close all workers before the interpreter exits and stops daemon threads in the middle of moves."""
    for workers in list(_all):
        workers.close()
