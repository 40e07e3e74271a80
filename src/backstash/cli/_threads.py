"""Enters a stash in the threads that a script starts, such as the replicas of ``nn.DataParallel``."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable

from .. import Stash

__all__ = ["Threads"]


class Threads:
    """Makes each thread that starts from now on run within ``stash``, until :meth:`remove`."""

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
        """Stop: threads that start from now on run without the stash."""
        if threading.Thread.start is self._own:
            threading.Thread.start = self._before  # type: ignore[method-assign]


def _held(stash: Stash, run: Callable[[], None]) -> None:
    with stash:
        run()
