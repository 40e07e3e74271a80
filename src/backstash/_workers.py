"""Threads that move bytes: the standard library's pool, begun when first needed, and a way without it."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

__all__ = ["Workers"]


class Workers:
    """Runs calls on up to ``threads`` threads, or at once on the caller's where no thread can be had.

    The threads end by themselves when this object dies. In a forked process, where they do not exist,
    calls run at once.
    """

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._pool: ThreadPoolExecutor | None = None
        self._pid = os.getpid()
        self.note = ""

    def submit(self, function: Callable[..., None], *args: Any) -> Future[None]:
        """Begin ``function(*args)`` and return its future."""
        if not self.note and os.getpid() == self._pid:
            try:
                if self._pool is None:
                    self._pool = ThreadPoolExecutor(self._threads, "backstash")
                return self._pool.submit(function, *args)
            except RuntimeError as error:  # no more threads, or the interpreter is ending
                self.note = f"no worker thread ({error}): moves run on the computing thread"
        done: Future[None] = Future()
        try:
            function(*args)
            done.set_result(None)
        except BaseException as error:
            done.set_exception(error)
        return done

    def close(self) -> None:
        """Wait for what has begun, and end the threads."""
        if self._pool is not None and os.getpid() == self._pid:
            self._pool.shutdown(wait=True)
