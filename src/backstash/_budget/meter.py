"""What a step takes: memory and time, of the process or of another device, while the step is measured.

The system's peak of the process is of its whole life: to reset it would take it from the program and from other
tools. Where it rises, though, it is known what was held since it was last asked for.
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

Sample = tuple[float, int, int]  # when in seconds, the bytes that are held, of these the stash's

_STATM = "/proc/self/statm"  # its second number: resident pages (proc(5))
_INTERVAL_SECONDS = 0.001  # between two samples
_MOST_INTERVAL_SECONDS = 0.005
_SAMPLES = (
    500  # of a step: to wake a thread a thousand times a second slows what computes beside it
)
_TRIES = 4
_TRIED_BYTES = 2 << 20  # touched to learn how long a page fault takes
_MOST_SAMPLES = 600_000  # of a step; after them none is taken until these are


@dataclass(frozen=True, slots=True)
class Measured:
    """What was measured of one step."""

    began: float
    """When, in seconds of the device's own time."""
    ended: float
    told: list[tuple[Any, ...]]
    """Events as the event log tells them, in order, by the device's time."""
    samples: list[Sample]
    """Of memory, in order, likewise."""
    known_peak_bytes: int = 0
    """The most bytes that were held, where something knows it better than the samples do; else 0."""
    looking_seconds: float = 0.0
    """Of the step, that only a measured one takes: told as waits, too."""


class Meter(ABC):
    """Measures steps on one device.

    Args:
        ours: the bytes of the device's memory that the stash holds now.
    """

    def __init__(self, ours: Callable[[], int]) -> None:
        self._ours = ours
        self._samples: deque[Sample] = deque()
        self._recent = [
            0
        ]  # the most that was sampled since it was asked for; one list for each such time
        self._stop: threading.Event | None = None
        self._interval_seconds = _INTERVAL_SECONDS

    @abstractmethod
    def now(self) -> int:
        """The bytes that are held."""

    @abstractmethod
    def begin_step(self) -> float:
        """A step begins. Returns the seconds of the last one of which they are known."""

    @property
    @abstractmethod
    def known_peak_bytes(self) -> int:
        """The most bytes held in the step that has just ended, where the device knows that; else 0."""

    @abstractmethod
    def ever_peak_bytes(self) -> int | None:
        """The most bytes that were ever held; ``None`` where that is not known."""

    @abstractmethod
    def hear(self, told: tuple[Any, ...]) -> None:
        """See :meth:`EventLog.start`: while a step is measured."""

    @abstractmethod
    def hook_begins(self) -> Any:
        """For :meth:`hook_took`."""

    @abstractmethod
    def hook_took(self, kind: str, began: Any) -> None:
        """Hear of what the stash did for a block, from ``began`` to now: for as long the device may have had
        nothing to compute."""

    @abstractmethod
    def pause(self) -> Any:
        """What is done from now on is no part of the step, until :meth:`resume` is given what this returns."""

    @abstractmethod
    def resume(self, paused: Any) -> float:
        """See :meth:`pause`. Returns the seconds in between; a host that is ahead waits for the device."""

    def anew_seconds(self, nbytes: int) -> float:
        """What it adds to a step to take so many bytes from the system that were given back to it before."""
        return 0.0

    @abstractmethod
    def take(self) -> Measured:
        """What was measured of the step that :meth:`begin_step` has just ended, which is then forgotten."""

    @abstractmethod
    def forget(self) -> None:
        """Forget what was measured so far."""

    def start(self) -> None:
        """Sample from now on, in a thread: at first every millisecond, and at most that often. A second call
        does nothing.

        Where no thread can be started, only what :meth:`mark` is asked for is sampled.
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
        """End the sampling. A second call does nothing."""
        if self._stop is not None:
            self._stop.set()
            self._stop = None

    @property
    def is_sampling(self) -> bool:
        """Whether :meth:`start` was called, and :meth:`stop` was not."""
        return self._stop is not None

    def forked(self) -> None:
        """In a forked process: the thread is the other's, and so may be what it holds of its event."""
        self._stop = None

    def mark(self) -> Sample:
        """A sample of this moment. What the stash holds may change while the memory is read: then both are read
        again, a few times."""
        ours = self._ours()
        for _ in range(_TRIES):
            before, held, ours = ours, self.now(), self._ours()
            if ours == before:
                break
        sample = (time.perf_counter(), held, max(ours, before))
        self._samples.append(sample)
        recent = self._recent  # a sampling thread that is late writes to the list before
        recent[0] = max(recent[0], held)
        return sample

    def sampled_peak_bytes(self) -> int:
        """The most that was held, of what was sampled and is not taken yet; 0: nothing was."""
        return max((held for _, held, _ in list(self._samples)), default=0)

    def take_highest(self) -> int:
        """The most that was sampled since this was asked last; 0: nothing was."""
        recent, self._recent = self._recent, [0]
        return recent[0]

    def raised_peak_bytes(self) -> int:
        """The most that was ever held, if that is more than it was when this was asked last; else 0, or where
        only samples tell."""
        return 0

    def _take_samples(self) -> list[Sample]:
        return sorted(taken(self._samples))


class ProcessMeter(Meter):
    """Resident memory of this process, and the time of the computing thread.

    Args:
        ours: the bytes of it that the stash holds now.

    Raises:
        UsageError: the system has no ``/proc``.
    """

    known_peak_bytes = 0  # the samples are all that is known

    def __init__(self, ours: Callable[[], int] = int) -> None:
        super().__init__(ours)
        self._page_bytes = os.sysconf("SC_PAGE_SIZE")
        self._told: deque[tuple[Any, ...]] = deque()
        self._began = self._ended = 0.0  # of the step before, which is where this one begins
        self._faults = 0  # page faults of the step before
        self._faults_before = _page_faults()  # and of all before this one
        self._peak_bytes = _peak_bytes()
        self._ever_bytes: int | None = self._peak_bytes  # ``None``: another tool has reset it
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

    def begin_step(self) -> float:
        """See :meth:`Meter.begin_step`."""
        faults, self._faults_before = self._faults_before, _page_faults()
        self._faults = self._faults_before - faults
        self._began, self._ended = self._ended, self.mark()[0]
        if not self.is_sampling:  # nobody takes them
            self._told.clear()
            self._samples.clear()
        seconds = self._ended - self._began if self._began else 0.0
        self._interval_seconds = min(
            max(_INTERVAL_SECONDS, seconds / _SAMPLES), _MOST_INTERVAL_SECONDS
        )
        return seconds

    def raised_peak_bytes(self) -> int:
        """See :meth:`Meter.raised_peak_bytes`. A process that begins with the peak of the one that started it,
        as Linux has it, tells nothing below that; nor does one whose peak another tool has reset."""
        peak_bytes = _peak_bytes()
        if peak_bytes <= self._peak_bytes:
            return 0
        self._peak_bytes = peak_bytes
        return peak_bytes

    def ever_peak_bytes(self) -> int | None:
        """See :meth:`Meter.ever_peak_bytes`: what the system says, if it never said less before."""
        ever_bytes = _peak_bytes()
        if self._ever_bytes is not None and ever_bytes >= self._ever_bytes:
            self._ever_bytes = ever_bytes
        else:
            self._ever_bytes = None
        return self._ever_bytes

    def hear(self, told: tuple[Any, ...]) -> None:
        """See :meth:`Meter.hear`."""
        self._told.append(told)

    def hook_begins(self) -> float:
        """See :meth:`Meter.hook_begins`."""
        return time.perf_counter()

    def hook_took(self, kind: str, began: float) -> None:
        """See :meth:`Meter.hook_took`."""
        self.hear((kind, began, time.perf_counter() - began, 0, -1))

    def pause(self) -> float:
        """See :meth:`Meter.pause`."""
        return time.perf_counter()

    def resume(self, paused: float) -> float:
        """See :meth:`Meter.resume`: as a wait."""
        seconds = time.perf_counter() - paused
        self.hear(("stall", paused, seconds, 0, -1))
        return seconds

    def anew_seconds(self, nbytes: int) -> float:
        """See :meth:`Meter.anew_seconds`: the page faults of a first touch, as long as they are now, and as
        many as the step had."""
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
        told = taken(self._told)
        measured = Measured(self._began, self._ended, told, self._take_samples())
        self.mark()
        return measured

    def forget(self) -> None:
        """See :meth:`Meter.forget`."""
        self.take()


def _peak_bytes() -> int:
    """The most that this process ever held; getrusage(2) says it in KiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def _page_faults() -> int:
    """That this process had, without those that read from a disk."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def taken(queue: deque[Any]) -> list[Any]:
    """What ``queue`` had, which other threads may append to meanwhile."""
    had = []
    while queue:
        had.append(queue.popleft())
    return had


def _sample(stop: threading.Event, of: weakref.ref[Meter]) -> None:
    """Until it is told to stop, or its meter is gone."""
    interval_seconds = _INTERVAL_SECONDS
    while not stop.wait(interval_seconds):
        meter = of()
        if meter is None:
            return
        if len(meter._samples) < _MOST_SAMPLES:
            meter.mark()
        interval_seconds = meter._interval_seconds
        del meter  # not held while this waits
