"""Threads that move bytes, and the moves: each made once, by a worker or by the thread that needs it.

Not ``concurrent.futures``, for the sake of Ctrl-C: its futures and its pool guard their state by locks that
are taken and given back in Python, and an interrupt that comes just then leaves them locked for ever. Here
every lock is taken by a ``with`` statement on a lock of C, which no interrupt can come between, and nothing
waits for a message that may not have been sent.
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
    """One call, made once, by any thread. To wait for it is to make it, unless another thread does already.

    So it may be queued twice or, where its thread was interrupted or cannot be had, not at all. In a forked
    process nobody makes it: the thread that did may be the other process's alone.
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
        """Make the call, or wait for the thread that makes it; whether it was made here.

        What is not of type ``catch``, an interrupt, ends the call: it is made anew by the next who asks.
        """
        waits = moving.waits
        depth = len(waits)
        moving.calls += 1  # no call between this and "try", in which an interrupt could come
        try:
            waits.append(self)  # first: a handler may fork before the question, or after it
            if self._process is not _process[0]:
                return self._refuse()
            with self._running:
                waits.pop()
                if self._process is not _process[0] and not self._running.locked():
                    self._running.acquire()  # forked just here: see _after_fork
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
            "bytes that the process from which this one was forked moves: go backward in that process, "
            "or run the forward in this one"
        )
        self._call, self.finished = None, True
        return True

    def forked(self) -> None:
        """In a forked process whose one thread waits for this: let it go on."""
        if self._running.locked():
            self._running.release()

    def done(self) -> bool:
        """Whether it has been made, or failed."""
        return self.finished

    def ended(self) -> bool:
        """See :meth:`done`: it moves its bytes before it returns."""
        return self.finished

    def wait(self) -> None:
        """Wait for its end."""
        self.exception()

    def exception(self) -> BaseException | None:
        """Wait for its end; the error, if there was one."""
        if not self.finished:
            self.run()
        return self.error

    def cancel(self) -> bool:
        """Call it off; whether that came before it began."""
        self.cancelled = True
        if self._running.locked() or self.finished:
            return False
        self._call = None  # with the memory that it owns: a worker may come for it much later
        return True


def _drop_frames(error: BaseException | None) -> None:
    """An error is kept until somebody looks; its frames, and their callers', would hold the memory."""
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


class Workers:
    """Up to ``threads`` threads that do what is submitted; none where no thread can be started.

    The threads end when this object is closed or dies. Where there are none (none could be started, after
    ``close``, in a forked process), what is submitted is done at once by the caller.
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
        """Whether what is begun is done by a thread of theirs, as far as is known."""
        return not (self._closed or self.note or os.getpid() != self._pid)

    def submit(self, function: Callable[..., object], *args: Any) -> Work:
        """Begin ``function(*args)`` and return what can be waited for."""
        work = Work(function, *args)
        self.begin(work)
        return work

    def begin(self, work: Work) -> None:
        """Hand ``work`` to a thread. The caller, which needs to know its end, owns it already."""
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
        # A daemon, since an interrupt here may leave it unknown; _end_all sees those off that are known.
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
        """Wait for what has begun, and end the threads. A second call does nothing."""
        self._closed = True
        if os.getpid() != self._pid:
            return
        self._queue.put(None)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()


def _serve(queue: SimpleQueue[Work | None]) -> None:
    """On a worker: do what comes, until ``None`` does, which is for every thread of the queue."""
    while (work := queue.get()) is not None:
        work.run(catch=BaseException)
        del work  # it would be held until the next one
    queue.put(None)


_all: weakref.WeakSet[Workers] = weakref.WeakSet()
_process = [object()]  # another one in each forked process


def _after_fork() -> None:
    """In a forked process: nobody runs what the other process's threads ran, so nobody waits for its end.

    A signal's handler may fork while its thread waits for the lock of a move that a worker makes. The worker
    is not in this process, and would never give the lock back.
    """
    _process[0] = object()
    for work in moving.waits:
        work.forked()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


@atexit.register
def _end_all() -> None:
    """Before the interpreter goes: daemons that still move bytes then would be stopped anywhere."""
    for workers in list(_all):
        workers.close()
