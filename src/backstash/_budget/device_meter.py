"""Measure a step on an accelerator: the memory of its tensors, and the device's own time.

The host runs ahead, so its clock cannot time a step. While a step is measured, events on the computing stream
record when it reaches each save and use, and when copies begin and end. Memory figures come from the allocator,
which counts in the host's order.

What was held *between* two events follows from the allocator's counts since the first. If there were few
allocations, all of them may have been alive at once; if there were many, a thread's samples decide. The meter
reads the allocator's own peak and never resets it, since it belongs to the program.
"""

from __future__ import annotations

import functools
import itertools
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .._device.base import Device, MemoryFigures
from .meter import Measured, Meter, Sample, taken

__all__ = ["DeviceMeter"]

_OF_BLOCKS = ("save", "use", "free")
_BOUNDS = ("enter", "leave")  # of a module's forward
_TICK = 1e-9  # seconds, so that no two events have the same time
_STEPS_AHEAD = 16  # steps by which no host is ahead of its device
_FEW = 16  # up to so many allocations between two events may all have been alive at once


@dataclass(frozen=True, slots=True)
class _Noted:
    """A save, use or free of a block; or, without ``figures``, a bound of a module's forward, a hook, a copy or
    a wait."""

    event: tuple[Any, ...]
    mark: Any
    """Its point in time on the device."""
    until: Any = None
    """End of the hook, copy or wait, or of the host's reading of the memory figures."""
    figures: MemoryFigures | None = None
    ours: int = 0
    host_seconds: float = 0.0
    """The host's time of the event."""


class DeviceMeter(Meter):
    """Measure the tensor memory and the time of one accelerator.

    Args:
        device: the accelerator.
        ours: return the bytes of its memory that the stash holds.
    """

    def __init__(self, device: Device, ours: Callable[[], int]) -> None:
        super().__init__(ours)
        self._device = device
        self._noted: deque[_Noted] = deque()
        # Of the last steps, on both clocks.
        self._begins: deque[tuple[Any, float]] = deque(maxlen=_STEPS_AHEAD)
        self._last_peak = self._known_peak = 0
        self._ever_bytes = 0  # the highest of all readings
        self._highest = 0  # known peak of this step
        self._origin: MemoryFigures | None = None  # at the last take() or forget()

    @property
    def known_peak_bytes(self) -> int:
        """See :meth:`Meter.known_peak_bytes`: the allocator's peak, if the step raised it."""
        return self._known_peak

    def ever_peak_bytes(self) -> int:
        """See :meth:`Meter.ever_peak_bytes`."""
        self._look()
        return self._ever_bytes

    def now(self) -> int:
        """See :meth:`Meter.now`."""
        return self._look().held_bytes

    def _look(self) -> MemoryFigures:
        """Read the allocator's figures. A changed peak belongs to this step: it has risen, or the program
        resets it in each step."""
        figures = self._device.memory()
        if figures.peak_bytes != self._last_peak:
            self._highest = max(self._highest, figures.peak_bytes)
        self._last_peak = figures.peak_bytes
        self._ever_bytes = max(self._ever_bytes, figures.peak_bytes)
        self._highest = max(self._highest, figures.held_bytes)
        return figures

    def begin_step(self) -> float:
        """See :meth:`Meter.begin_step`.

        If the host is ahead, return the seconds of the last step whose end the device has passed; if it has
        passed none, the host's time.
        """
        figures = self._look()
        self._known_peak, self._highest = self._highest, figures.held_bytes
        begins = self._begins
        begins.append((self._device.time_mark(), time.perf_counter()))
        for (until, _), (since, _) in itertools.pairwise(reversed(begins)):
            if self._device.has_passed(until):
                return self._device.seconds_between(since, until)
        return begins[-1][1] - begins[-2][1] if len(begins) > 1 else 0.0

    def note(self, event: tuple[Any, ...]) -> None:
        """See :meth:`Meter.note`."""
        if event[0] not in (*_OF_BLOCKS, *_BOUNDS) or self._device.is_capturing():
            return
        if event[0] in _BOUNDS:
            self._noted.append(_Noted(event, self._device.time_mark()))
            return
        mark, figures, ours = self._device.time_mark(), self._look(), self._ours()
        now, until = time.perf_counter(), self._device.time_mark()
        self._noted.append(_Noted(event, mark, until, figures, ours, now))

    def hook_begins(self) -> Any:
        """See :meth:`Meter.hook_begins`."""
        if not self.is_sampling or self._device.is_capturing():
            return None
        return self._device.time_mark()

    def hook_took(self, kind: str, began: Any) -> None:
        """See :meth:`Meter.hook_took`. If the host is ahead of the device, the marks pass at once; otherwise
        the device is idle while the hook runs."""
        if began is not None and not self._device.is_capturing():
            event = (kind, 0.0, 0.0, 0, -1)
            self._noted.append(_Noted(event, began, self._device.time_mark()))

    def _on_time(self, kind: str, since: Any, until: Any, nbytes: int) -> None:
        self._noted.append(_Noted((kind, 0.0, 0.0, nbytes, -1), since, until))

    def start(self) -> None:
        """See :meth:`Meter.start`."""
        # Pinned memory refers to the device until it is freed, and the meter must not keep that memory alive.
        self._device.on_time = functools.partial(_note_time, weakref.ref(self))
        super().start()

    def stop(self) -> None:
        """See :meth:`Meter.stop`."""
        self._device.on_time = None
        super().stop()

    def pause(self) -> Any:
        """See :meth:`Meter.pause`."""
        on_time, self._device.on_time = self._device.on_time, None
        return self._device.time_mark(), on_time

    def resume(self, paused: Any) -> float:
        """See :meth:`Meter.resume`."""
        since, self._device.on_time = paused
        until = self._device.time_mark()
        if self.is_sampling:
            self._on_time("stall", since, until, 0)
        return self._device.seconds_between(since, until)

    def forget(self) -> None:
        """See :meth:`Meter.forget`."""
        taken(self._noted)
        self._take_samples()
        self._origin = self._device.memory()
        self.mark()

    def take(self) -> Measured:
        """See :meth:`Meter.take`. The host waits for the device."""
        noted, samples = taken(self._noted), self._take_samples()
        begins, before = self._begins, self._origin
        (began, _), (ended, _) = begins[-2], begins[-1]
        seconds = self._device.seconds_between
        events: list[tuple[Any, ...]] = []
        at, last, result = 0.0, before or self._device.memory(), list[Sample]()
        ours_before = samples[0][2] if samples else 0
        result.append((0.0, max(last.held_bytes, ours_before), ours_before))
        waiting, looking_seconds = deque(samples), 0.0
        for each in noted:
            if each.figures is None and each.until is None:
                at = max(at + _TICK, seconds(began, each.mark))
                events.append((each.event[0], at, 0.0, *each.event[3:]))
                continue
            if each.figures is None:
                start = seconds(began, each.mark)
                duration = max(0.0, seconds(each.mark, each.until))
                events.append((each.event[0], start, duration, *each.event[3:]))
                continue
            at = max(at + _TICK, seconds(began, each.mark))
            events.append((each.event[0], at, 0.0, *each.event[3:]))
            looked = max(0.0, seconds(each.mark, each.until))  # the device was idle
            events.append(("stall", at, looked, 0, -1))
            looking_seconds += looked
            between = list[Sample]()
            while waiting and waiting[0][0] <= each.host_seconds:
                between.append(waiting.popleft())
            other = _other_between(last, each, ours_before, between)
            result.append((at, other + each.ours, each.ours))
            last, ours_before = each.figures, each.ours
        self._origin = self._device.memory()
        end = seconds(began, ended)
        rest = [held - ours for _, held, ours in waiting]
        result.append((end, max([last.held_bytes - ours_before, *rest]) + ours_before, ours_before))
        self.mark()
        return Measured(0.0, end, events, result, self._known_peak, looking_seconds)


def _note_time(
    of: weakref.ref[DeviceMeter], kind: str, since: Any, until: Any, nbytes: int
) -> None:
    """See :attr:`Device.on_time`."""
    meter = of()
    if meter is not None:
        meter._on_time(kind, since, until, nbytes)


def _other_between(
    last: MemoryFigures, noted: _Noted, ours_before: int, samples: list[Sample]
) -> int:
    """Return the most memory that is not the stash's between two events.

    Up to a save, the saved tensor counts as its operation's memory. Before a use the stash may have freed or
    read blocks since the event before.
    """
    now = noted.figures
    assert now is not None
    is_save = noted.event[0] == "save"
    ours = ours_before if is_save else max(ours_before, noted.ours)
    known = [now.held_bytes - noted.ours, *(held - ours for _, held, ours in samples)]
    if is_save:
        known.append(now.held_bytes - ours_before)
    if now.peak_bytes != last.peak_bytes:
        known.append(now.peak_bytes - ours)
    elif now.allocations - last.allocations <= _FEW:
        grown = last.held_bytes + now.ever_bytes - last.ever_bytes
        known.append(min(grown, now.peak_bytes) - ours)
    return max(0, *known)
