"""Call a function before SIGTERM, by which schedulers end a job, ends the process.

By default the signal ends a process at once. The script would see a Python handler (``signal.getsignal``; some
trainers then do not install theirs), and such a handler would wait until the main thread finishes its current
operation. So this module uses ``faulthandler``'s handler. It is written in C, runs at once, writes to a pipe
that a thread reads, and is invisible to ``signal.getsignal``. A handler that the script sets replaces it; then
the script decides how it ends.

The handler writes nothing on a thread that Python does not know yet. While the main thread starts another
thread, it blocks its signals, and the system may deliver the signal to the new thread. Then the signal is lost,
and the next one works.
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

_MOST_SECONDS = 5.0  # schedulers send SIGKILL after ten seconds or more


class BeforeTermination:
    """Call ``then`` when SIGTERM would end the process, and then let it end, until :meth:`remove`.

    ``then`` is not called if the script has a handler or ignores the signal, or in a forked process. It is
    called on a thread that ``threading`` does not list, and has five seconds.
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
        # Otherwise a signal to a child that still has the handler would look like one to this process.
        os.register_at_fork(before=self._fork, after_in_parent=self._forked)
        self._listen()

    def remove(self) -> None:
        """Stop. A second call does nothing."""
        with self._lock:
            writing, self._writing = self._writing, None
        if writing is not None:
            _let_go()
            os.close(writing)

    def _listen(self) -> None:
        if self._writing is not None and _would_end_the_process():
            faulthandler.register(signal.SIGTERM, file=self._writing, all_threads=False)

    def _fork(self) -> None:
        if os.getpid() != self._pid:  # in a fork, a thread that is gone may hold the lock
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
    """Restore the signal's default, unless the script has set a handler."""
    if _would_end_the_process():
        faulthandler.unregister(signal.SIGTERM)


def _end_after(seconds: float) -> None:
    time.sleep(seconds)
    _let_go()
    os.kill(os.getpid(), signal.SIGTERM)


def _above_the_standard_ones(fd: int) -> int:
    """Return the same file with a descriptor above 2: programs may write to 0 to 2 even after closing them."""
    own = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3)
    os.close(fd)
    return own
