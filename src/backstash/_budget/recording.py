"""The steps that one planner has measured: what is told of them, and of which class each block is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from .._plan.regions import Regions
from .._plan.trace import Option
from .guard import MemoryGuard
from .meter import Meter
from .record import StepRecord

__all__ = ["StepRecording"]

_GIVEN_BACK_BYTES = 64 << 20
_OF_BLOCKS = ("save", "use", "free")


class EventSource(Protocol):
    """Tells what happens to blocks: see :class:`EventLog`."""

    def start(self, hear: Callable[[tuple[Any, ...]], None]) -> object: ...

    def stop(self, hear: Callable[[tuple[Any, ...]], None]) -> object: ...


class StepRecording:
    """Of one planner. What is told comes from the stash's event log, while it is on.

    Args:
        event_log: of the stash.
        meter: of the device.
        regions: see :attr:`Planner.regions`.
        guard: gives memory back.
        gives_back: see :attr:`gives_back`.
    """

    def __init__(
        self,
        event_log: EventSource,
        meter: Meter,
        regions: Regions | None,
        guard: MemoryGuard,
        *,
        gives_back: bool,
    ) -> None:
        self._event_log, self._meter, self._regions = event_log, meter, regions
        self._guard = guard
        self.gives_back = gives_back
        """Whether nothing moves: then all that backward frees was in memory, and the allocator keeps it. It is
        given back every so often, or it would be taken for memory that is not the stash's."""
        self._freed_bytes = 0  # since then
        self.is_on = self._has_ended = False
        self.begin_step()

    def start(self) -> None:
        """Measure from now on; of a step that has begun, the rest. After :meth:`end`, nothing."""
        if self._has_ended:
            return
        self._meter.forget()
        if self._regions is not None:
            self._regions.take()
        if not self.is_on:
            self.is_on = True
            self._event_log.start(self._hear)
        self._meter.start()

    def stop(self) -> None:
        """Measure no more. A second call does nothing."""
        if self.is_on:
            self.is_on = False
            self._event_log.stop(self._hear)
        self._meter.stop()

    def end(self) -> None:
        """Measure no more, whatever comes: the stash is closed."""
        self._has_ended = True
        self.stop()

    def begin_step(self) -> None:
        """A step begins, or is measured anew from here on."""
        self._groups: dict[int, str] = {}
        self._offers: dict[int, dict[str, Option]] = {}
        self._again: dict[int, int] = {}
        self._saves: dict[int, int] = {}

    def note_class(self, serial: int, group: str) -> None:
        """Of the block of this number; ``""``: it is not known yet."""
        if self.is_on:
            self._groups[serial] = group

    def note_prices(self, serial: int, prices: Mapping[str, Option | None]) -> None:
        """What each way of holding the block with this number takes; ``None``: it cannot be held so."""
        self._offers[serial] = {
            name: option for name, option in prices.items() if option is not None
        }

    def note_saved_again(self, serial: int, counted: int) -> None:
        """The block of this number was saved once more, when the step had ``counted`` of them."""
        if self.is_on:
            self._again[serial] = counted
            self._saves[serial] = self._saves.get(serial, 1) + 1
            if self._regions is not None:
                self._regions.saved_again(serial)

    def end_step(self, anew_bytes: int) -> StepRecord:
        """Of the step before, in which up to ``anew_bytes`` had to be taken from the system once more."""
        regions = self._regions
        record = StepRecord(
            self._meter.take(),
            self._groups,
            self._offers,
            self._again,
            self._saves,
            regions.take() if regions is not None else [],
            regions.all_stays if regions is not None else {},
        )
        grown = record.peak_bytes - record.samples[0][1] if record.samples else 0
        record.anew_seconds = self._meter.anew_seconds(min(anew_bytes, max(0, grown)))
        return record

    def _hear(self, told: tuple[Any, ...]) -> None:
        """See :meth:`EventLog.start`."""
        if told[0] in _OF_BLOCKS and told[4] not in self._groups:
            return  # of another device, or of a step before
        self._meter.hear(told)
        if not self.gives_back:
            return
        if told[0] == "free":
            self._freed_bytes += told[3]
        elif told[0] == "use" and self._freed_bytes >= _GIVEN_BACK_BYTES:
            self._freed_bytes, paused = 0, self._meter.pause()
            self._guard.trim()
            self._meter.resume(paused)
