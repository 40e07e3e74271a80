"""Enter a stash in the threads that a script starts, such as the replicas of ``nn.DataParallel``."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from .. import Stash

__all__ = ["Threads"]


class Threads:
    """Make each thread that starts from now on run within ``stash``, until :meth:`remove`."""

    def __init__(self, stash: Stash) -> None:
        self._before = before = threading.Thread.start
        pid = os.getpid()

        def start(thread: threading.Thread) -> None:
            # A forked process runs as if started from plain Python.
            undo = _hold(stash, thread) if os.getpid() == pid else None
            try:
                before(thread)
            except BaseException:
                if undo is not None:
                    undo()
                raise

        self._own = start
        threading.Thread.start = start  # type: ignore[method-assign, assignment]

    def remove(self) -> None:
        """Stop: threads that start from now on run without the stash."""
        if threading.Thread.start is self._own:
            threading.Thread.start = self._before  # type: ignore[method-assign]


def _hold(stash: Stash, thread: threading.Thread) -> Callable[[], None]:
    """Make ``thread.run`` run within ``stash``; return a function that undoes that.

    It is undone as soon as the thread runs. Otherwise the replacement of ``run`` would be part of a reference
    cycle, and the thread would stay alive until garbage collection.
    """
    attributes, run = vars(thread), thread.run
    own = {name: attributes[name] for name in ("run",) if name in attributes}

    def undo() -> None:
        attributes.pop("run", None)
        attributes.update(own)

    def held() -> None:
        undo()
        try:
            with stash:
                run()
        except BaseException:
            _hide_own_frames()
            raise

    attributes["run"] = held
    return undo


def _hide_own_frames() -> None:
    """Remove frames of this file from the traceback that ``threading`` prints next."""
    hook = threading.excepthook

    def show(args: threading.ExceptHookArgs) -> None:
        threading.excepthook = hook
        at = args.exc_traceback
        while at is not None and at.tb_next is not None:
            if at.tb_next.tb_frame.f_code.co_filename == __file__:
                at.tb_next = at.tb_next.tb_next
            at = at.tb_next
        hook(args)

    threading.excepthook = show
