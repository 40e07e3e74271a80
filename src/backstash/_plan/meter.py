"""How much memory the process holds, sampled while a step is measured.

The system's peak (``VmHWM``) cannot be used: to reset it would take it from the program and from other tools.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable

from ..errors import UsageError

__all__ = ["ProcessMeter", "Sample"]

Sample = tuple[float, int, int]  # time.perf_counter(), resident bytes, of these the stash's

_STATM = "/proc/self/statm"  # its second number: resident pages (proc(5))
_INTERVAL_SECONDS = 0.001
_TRIES = 4
_MOST_SAMPLES = (
    600_000  # of a step of ten minutes; the thread ends there, and what was sampled stays
)


class ProcessMeter:
    """Resident memory of this process.

    Args:
        ours: the bytes of it that the stash holds now.

    Raises:
        UsageError: the system has no ``/proc``.
    """

    def __init__(self, ours: Callable[[], int] = int) -> None:
        self._ours = ours
        self._page_bytes = os.sysconf("SC_PAGE_SIZE")
        self._samples: deque[Sample] = deque()
        self._stop: threading.Event | None = None
        try:
            self._last_bytes = self._read()
        except OSError as error:
            raise UsageError(
                f"budget= needs to know the process's resident memory, and {_STATM} cannot be read here "
                f"({error.strerror}); give keep= instead"
            ) from error

    def now(self) -> int:
        """Bytes that are resident; the last number that was read, where the process has no descriptor left."""
        try:
            self._last_bytes = self._read()
        except OSError:
            pass
        return self._last_bytes

    def _read(self) -> int:
        # Opened each time: a descriptor that stays open would be inherited, and show another process.
        file = os.open(_STATM, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return int(os.read(file, 128).split()[1]) * self._page_bytes
        finally:
            os.close(file)

    def start(self) -> None:
        """Sample about every millisecond from now on, in a thread. A second call does nothing."""
        if self._stop is None:
            stop = self._stop = threading.Event()
            arguments = (stop, weakref.ref(self))
            threading.Thread(
                target=_sample, args=arguments, name="backstash meter", daemon=True
            ).start()

    def stop(self) -> None:
        """End the sampling. A second call does nothing."""
        if self._stop is not None:
            self._stop.set()
            self._stop = None

    def mark(self) -> Sample:
        """A sample of this moment. What the stash holds may change while the process's memory is read: then
        both are read again, a few times."""
        ours = self._ours()
        for _ in range(_TRIES):
            before, held, ours = ours, self.now(), self._ours()
            if ours == before:
                break
        sample = (time.perf_counter(), held, max(ours, before))
        self._samples.append(sample)
        return sample

    def take(self) -> list[Sample]:
        """The samples since the last call, in order."""
        taken = []
        while self._samples:
            taken.append(self._samples.popleft())
        return sorted(taken)


def _sample(stop: threading.Event, of: weakref.ref[ProcessMeter]) -> None:
    """Until it is told to stop, or its meter is gone, or nobody took a sample for a long time."""
    while not stop.wait(_INTERVAL_SECONDS):
        meter = of()
        if meter is None or len(meter._samples) > _MOST_SAMPLES:
            return
        meter.mark()
        del meter  # not held while this waits
