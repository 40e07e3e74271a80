"""Threads that a script starts are held as its main thread is: replicas of ``nn.DataParallel``, for one."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable

from .. import Stash

__all__ = ["Threads"]


class Threads:
    """What each thread that begins from now on saves is held by ``stash``, until :meth:`remove`."""

    def __init__(self, stash: Stash) -> None:
        self._before = before = threading.Thread.start
        pid = os.getpid()

        def start(thread: threading.Thread) -> None:
            if os.getpid() == pid:  # a forked process runs as if started from plain Python
                thread.run = functools.partial(_held, stash, thread.run)  # type: ignore[method-assign]
            before(thread)

        self._own = start
        threading.Thread.start = start  # type: ignore[method-assign, assignment]

    def remove(self) -> None:
        """Leave threads that begin from now on alone."""
        if threading.Thread.start is self._own:
            threading.Thread.start = self._before  # type: ignore[method-assign]


def _held(stash: Stash, run: Callable[[], None]) -> None:
    with stash:
        run()
