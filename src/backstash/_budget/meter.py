"""Measure a step's memory and time, of the process or of another device.

The system's peak of a process covers its whole life, and resetting it would affect the program and other tools.
But where the peak rises, it shows the most memory held since it was last read.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import resource
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..errors import UsageError

__all__ = ["Measured", "Meter", "ProcessMeter", "Sample", "taken"]

Sample = tuple[float, int, int]  # time in seconds, bytes held, bytes of these that are the stash's

_STATM = "/proc/self/statm"  # its second number: resident pages (proc(5))
_INTERVAL_SECONDS = 0.001  # between two samples
_MOST_INTERVAL_SECONDS = 0.005
_SAMPLES = 500  # of a step: waking a thread a thousand times a second slows the computing threads
_TRIES = 4
_TRIED_BYTES = 2 << 20  # touched to learn how long a page fault takes
_MOST_SAMPLES = 600_000  # of a step; sampling then stops until take()


@dataclass(frozen=True, slots=True)
class Measured:
    """The measurements of one step."""

    began: float
    """Start, in seconds of the device's own time."""
    ended: float
    events: list[tuple[Any, ...]]
    """Events as in the event log, in order, with the device's times."""
    samples: list[Sample]
    """Samples of the memory, in order, with the device's times."""
    known_peak_bytes: int = 0
    """Most bytes held, if a source better than the samples knows it; else 0."""
    looking_seconds: float = 0.0
    """Seconds that only a measured step takes; they are also in ``events``, as waits."""


class Meter(ABC):
    """Measure steps on one device.

    Args:
        ours: return the bytes of the device's memory that the stash holds.
    """

    def __init__(self, ours: Callable[[], int]) -> None:
        self._ours = ours
        self._samples: deque[Sample] = deque()
        self._recent = [0]  # the highest sample since take_highest(), which makes a new list
        self._stop: threading.Event | None = None
        self._interval_seconds = _INTERVAL_SECONDS

    @abstractmethod
    def now(self) -> int:
        """Return the bytes that are held."""

    @abstractmethod
    def begin_step(self) -> float:
        """Begin a step. Return the seconds of the last step whose time is known."""

    @property
    @abstractmethod
    def known_peak_bytes(self) -> int:
        """Most bytes held in the step that has just ended, if the device knows it; else 0."""

    @abstractmethod
    def ever_peak_bytes(self) -> int:
        """Return the most bytes ever held, as far as readings show. A peak that was reset before a reading
        is unknown."""

    @abstractmethod
    def note(self, event: tuple[Any, ...]) -> None:
        """Record an event of a measured step, see :meth:`EventLog.start`."""

    @abstractmethod
    def hook_begins(self) -> Any:
        """Return the start of a hook, for :meth:`hook_took`."""

    @abstractmethod
    def hook_took(self, kind: str, began: Any) -> None:
        """Record a hook of the stash that ran from ``began`` to now: the device may have been idle
        meanwhile."""

    @abstractmethod
    def pause(self) -> Any:
        """Exclude what follows from the step, until :meth:`resume`, which gets what this returns."""

    @abstractmethod
    def resume(self, paused: Any) -> float:
        """End a :meth:`pause`. Return its seconds; a host that is ahead waits for the device."""

    def fault_seconds(self, nbytes: int) -> float:
        """Return the seconds that a step takes to allocate this many bytes again that were returned to the
        system."""
        return 0.0

    @abstractmethod
    def take(self) -> Measured:
        """Return the measurements of the step that :meth:`begin_step` has just ended, and forget them."""

    @abstractmethod
    def forget(self) -> None:
        """Forget the measurements so far."""

    def start(self) -> None:
        """Start sampling in a thread, at first every millisecond and later less often. A second call does
        nothing.

        If no thread can be started, only :meth:`mark` takes samples.
        """
        if self._stop is None:
            stop = self._stop = threading.Event()
            arguments = (stop, weakref.ref(self))
            thread = threading.Thread(
                target=_sample, args=arguments, name="backstash meter", daemon=True
            )
            with contextlib.suppress(RuntimeError):  # no more threads, or the interpreter is ending
                thread.start()

    def stop(self) -> None:
        """Stop sampling. A second call does nothing."""
        if self._stop is not None:
            self._stop.set()
            self._stop = None

    @property
    def is_sampling(self) -> bool:
        """Whether sampling is on: :meth:`start` was called, and :meth:`stop` was not."""
        return self._stop is not None

    def forked(self) -> None:
        """Reset in a forked process, which does not have the thread and must not use its event."""
        self._stop = None

    def mark(self) -> Sample:
        """Take a sample now. If the stash's bytes change while the memory is read, read both again, a few
        times."""
        ours = self._ours()
        for _ in range(_TRIES):
            before, held, ours = ours, self.now(), self._ours()
            if ours == before:
                break
        sample = (time.perf_counter(), held, max(ours, before))
        self._samples.append(sample)
        recent = self._recent  # a late sampling thread writes to the previous list
        recent[0] = max(recent[0], held)
        return sample

    def sampled_peak_bytes(self) -> int:
        """Return the highest sample that was not taken yet; 0 if there is none."""
        return max((held for _, held, _ in list(self._samples)), default=0)

    def take_highest(self) -> int:
        """Return the highest sample since the last call; 0 if there is none."""
        recent, self._recent = self._recent, [0]
        return recent[0]

    def raised_peak_bytes(self) -> int:
        """Return the most bytes ever held if that has risen since the last call; else 0, or if only samples
        show it."""
        return 0

    def _take_samples(self) -> list[Sample]:
        return sorted(taken(self._samples))


class ProcessMeter(Meter):
    """Measure the resident memory of this process, and the time of the computing thread.

    Args:
        ours: return the bytes of it that the stash holds.

    Raises:
        UsageError: the system has no ``/proc``.
    """

    known_peak_bytes = 0  # only the samples show it

    def __init__(self, ours: Callable[[], int] = int) -> None:
        super().__init__(ours)
        self._page_bytes = os.sysconf("SC_PAGE_SIZE")
        self._events: deque[tuple[Any, ...]] = deque()
        self._began = self._ended = 0.0  # of the last step, at whose end this one begins
        self._faults = 0  # page faults of the step before
        self._faults_before = _page_faults()  # total before this step
        self._peak_bytes = _peak_bytes()
        try:
            self._last_bytes = self._read()
        except OSError as error:
            raise UsageError(
                f"budget= needs the process's resident memory, and {_STATM} cannot be read here "
                f"({error.strerror}); give keep= instead"
            ) from error

    def now(self) -> int:
        """Return the resident bytes; if the process has no free file descriptor, the last value read."""
        try:
            self._last_bytes = self._read()
        except OSError:
            pass
        return self._last_bytes

    def _read(self) -> int:
        # Opened each time: a forked process would inherit an open descriptor, which shows its parent.
        file = os.open(_STATM, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return int(os.read(file, 128).split()[1]) * self._page_bytes
        finally:
            os.close(file)

    def begin_step(self) -> float:
        """See :meth:`Meter.begin_step`."""
        faults, self._faults_before = self._faults_before, _page_faults()
        self._faults = self._faults_before - faults
        self._began, self._ended = self._ended, self.mark()[0]
        if not self.is_sampling:  # no one takes them
            self._events.clear()
            self._samples.clear()
        seconds = self._ended - self._began if self._began else 0.0
        self._interval_seconds = min(
            max(_INTERVAL_SECONDS, seconds / _SAMPLES), _MOST_INTERVAL_SECONDS
        )
        return seconds

    def raised_peak_bytes(self) -> int:
        """See :meth:`Meter.raised_peak_bytes`. On Linux a process begins with the peak of its parent; below
        that, and after another tool has reset the peak, this returns 0."""
        peak_bytes = _peak_bytes()
        if peak_bytes <= self._peak_bytes:
            return 0
        self._peak_bytes = peak_bytes
        return peak_bytes

    def ever_peak_bytes(self) -> int:
        """See :meth:`Meter.ever_peak_bytes`."""
        return max(self._peak_bytes, _peak_bytes())

    def note(self, event: tuple[Any, ...]) -> None:
        """See :meth:`Meter.note`."""
        self._events.append(event)

    def hook_begins(self) -> float:
        """See :meth:`Meter.hook_begins`."""
        return time.perf_counter()

    def hook_took(self, kind: str, began: float) -> None:
        """See :meth:`Meter.hook_took`."""
        self.note((kind, began, time.perf_counter() - began, 0, -1))

    def pause(self) -> float:
        """See :meth:`Meter.pause`."""
        return time.perf_counter()

    def resume(self, paused: float) -> float:
        """See :meth:`Meter.resume`. Recorded as a wait."""
        seconds = time.perf_counter() - paused
        self.note(("stall", paused, seconds, 0, -1))
        return seconds

    def fault_seconds(self, nbytes: int) -> float:
        """See :meth:`Meter.fault_seconds`: the current time of a page fault at a first touch, for at most as
        many faults as the step had."""
        with mmap.mmap(-1, _TRIED_BYTES) as memory:
            began = time.perf_counter()
            for at in range(0, _TRIED_BYTES, mmap.PAGESIZE):
                memory[at] = 0
            touched = time.perf_counter()
            for at in range(0, _TRIED_BYTES, mmap.PAGESIZE):
                memory[at] = 0
            again = time.perf_counter() - touched
        nbytes = min(nbytes, self._faults * mmap.PAGESIZE)
        return max(0.0, touched - began - again) * nbytes / _TRIED_BYTES

    def take(self) -> Measured:
        """See :meth:`Meter.take`."""
        events = taken(self._events)
        measured = Measured(self._began, self._ended, events, self._take_samples())
        self.mark()
        return measured

    def forget(self) -> None:
        """See :meth:`Meter.forget`."""
        self.take()


def _peak_bytes() -> int:
    """Return the most bytes that this process ever held; getrusage(2) reports KiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def _page_faults() -> int:
    """Return this process's page faults, without those that read from a disk."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def taken(queue: deque[Any]) -> list[Any]:
    """Remove and return the items of ``queue``; other threads may append meanwhile."""
    had = []
    while queue:
        had.append(queue.popleft())
    return had


def _sample(stop: threading.Event, of: weakref.ref[Meter]) -> None:
    """Take samples until ``stop`` is set or the meter is gone."""
    interval_seconds = _INTERVAL_SECONDS
    while not stop.wait(interval_seconds):
        meter = of()
        if meter is None:
            return
        if len(meter._samples) < _MOST_SAMPLES:
            meter.mark()
        interval_seconds = meter._interval_seconds
        del meter  # not held while this waits
