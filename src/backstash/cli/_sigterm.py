"""What is to be done before SIGTERM, by which schedulers end a job, ends the process.

By default the signal ends a process at once. A handler of Python's own would be seen by the script
(``signal.getsignal``; some trainers then leave out theirs), and would wait until the main thread has
computed what it computes. So the handler is ``faulthandler``'s: written in C, it runs at once, writes to
a pipe that a thread reads, and is none of those that Python shows. A handler that the script sets
replaces it: then the end is the script's own.

It writes nothing on a thread that Python does not know yet. While the main thread starts another it holds its
signals back, and the system may give the signal to that one: then it is lost, and the next one is answered.
"""

from __future__ import annotations

import _thread
import faulthandler
import fcntl
import os
import signal
import threading
import time
from collections.abc import Callable

__all__ = ["BeforeTermination"]

_MOST_SECONDS = 5.0  # schedulers send SIGKILL after ten or more


class BeforeTermination:
    """Calls ``then`` when SIGTERM comes and would end the process, which it does after that.

    Until :meth:`remove`. Where the script has a handler, ignores the signal, or is a forked process,
    nothing is called. ``then`` is called on a thread that ``threading`` does not list, and has five seconds.
    """

    def __init__(self, then: Callable[[], None]) -> None:
        self._then = then
        self._lock = threading.Lock()
        self._forking = 0
        self._pid = os.getpid()
        self._writing: int | None = None
        if not hasattr(faulthandler, "register") or not _would_end_the_process():
            return
        reading, self._writing = map(_above_the_standard_ones, os.pipe())
        os.set_blocking(self._writing, False)
        _thread.start_new_thread(self._wait, (reading,))
        # A signal to a child that has not yet let go of the handler would be taken for one to this process.
        os.register_at_fork(before=self._fork, after_in_parent=self._forked)
        self._listen()

    def remove(self) -> None:
        """Call nothing any more. A second call does nothing."""
        with self._lock:
            writing, self._writing = self._writing, None
        if writing is not None:
            _let_go()
            os.close(writing)

    def _listen(self) -> None:
        if self._writing is not None and _would_end_the_process():
            faulthandler.register(signal.SIGTERM, file=self._writing, all_threads=False)

    def _fork(self) -> None:
        if os.getpid() != self._pid:  # whose lock may have been held by a thread that is not here
            return
        with self._lock:
            self._forking += 1
            _let_go()

    def _forked(self) -> None:
        if os.getpid() != self._pid:
            return
        with self._lock:
            self._forking -= 1
            if not self._forking:
                self._listen()

    def _wait(self, reading: int) -> None:
        came = os.read(reading, 1)
        os.close(reading)
        if came:
            _thread.start_new_thread(_end_after, (_MOST_SECONDS,))
            try:
                self._then()
            finally:
                _end_after(0.0)


def _would_end_the_process() -> bool:
    return signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def _let_go() -> None:
    """Give the signal its default again, unless the script has set a handler."""
    if _would_end_the_process():
        faulthandler.unregister(signal.SIGTERM)


def _end_after(seconds: float) -> None:
    time.sleep(seconds)
    _let_go()
    os.kill(os.getpid(), signal.SIGTERM)


def _above_the_standard_ones(fd: int) -> int:
    """The same file by a descriptor above 2: what is closed there, a program may write to all the same."""
    own = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3)
    os.close(fd)
    return own
