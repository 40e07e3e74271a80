"""The record of a measured step: its events, the class of each block, and the time of the stash's hooks."""

from __future__ import annotations

from typing import Any

from .._core.controller import StepClock
from .._plan.regions import Regions
from .._plan.trace import Option
from .._runtime.trace import EventLog
from .meter import Meter
from .record import StepRecord

__all__ = ["StepRecording"]

_OF_BLOCKS = ("save", "use", "free")


class StepRecording(StepClock):
    """Record the steps that one planner measures, from the events of the stash's log.

    Args:
        event_log: of the stash.
        meter: of the device.
        regions: see :attr:`Planner.regions`.
        is_process: whether the meter is the CPU's.
    """

    def __init__(
        self,
        event_log: EventLog,
        meter: Meter,
        regions: Regions | None,
        *,
        is_process: bool,
    ) -> None:
        self._event_log, self._meter, self._regions = event_log, meter, regions
        self._is_process = is_process
        self.is_on = self._has_ended = False
        self.begin_step()

    def start(self) -> None:
        """Start measuring; of a step that has begun, measure the rest. Does nothing after :meth:`end`."""
        if self._has_ended:
            return
        self._meter.forget()
        if self._regions is not None:
            self._regions.take()
        if not self.is_on:
            self.is_on = True
            self._event_log.start(self._note_event)
        self._meter.start()

    @property
    def is_shared(self) -> bool:
        """Whether the program records events, too: then all that may move is a block."""
        return self._event_log.listeners > self.is_on

    def stop(self) -> None:
        """Stop measuring. A second call does nothing."""
        if self.is_on:
            self.is_on = False
            self._event_log.stop(self._note_event)
        self._meter.stop()

    def end(self) -> None:
        """Stop measuring for good: the stash is closed."""
        self._has_ended = True
        self.stop()

    def begin_step(self) -> None:
        """Begin a step, or begin to measure one again from here on."""
        self._groups: dict[int, str] = {}
        self._offers: dict[int, dict[str, Option]] = {}
        self._again: dict[int, int] = {}
        self._copies: set[int] = set()

    def note_class(self, serial: int, group: str) -> None:
        """Record the class of a block; ``""`` if it is not known yet."""
        if self.is_on:
            self._groups[serial] = group

    def note_copy(self, serial: int) -> None:
        """Record that the memory of a block was saved before in this step, and had moved."""
        if self.is_on:
            self._copies.add(serial)

    def note_options(self, serial: int, options: dict[str, Option]) -> None:
        """Record the ways to hold a block, other than staying and moving."""
        self._offers[serial] = options

    def note_saved_again(self, serial: int, counted: int) -> None:
        """Record that a block was saved once more, when the step had ``counted`` blocks."""
        if self.is_on:
            self._again[serial] = counted
            if self._regions is not None:
                self._regions.saved_again(serial)

    def end_step(self, returned_bytes: int) -> StepRecord:
        """Return the record of the ended step, which had to allocate up to ``returned_bytes`` again from the
        system."""
        regions = self._regions
        record = StepRecord(
            self._meter.take(),
            self._groups,
            self._offers,
            self._again,
            self._copies,
            regions.take() if regions is not None else [],
            regions.all_stays if regions is not None else {},
        )
        grown = record.peak_bytes - record.samples[0][1] if record.samples else 0
        record.fault_seconds = self._meter.fault_seconds(min(returned_bytes, max(0, grown)))
        return record

    def _note_event(self, event: tuple[Any, ...]) -> None:
        """See :meth:`EventLog.start`."""
        if event[0] in _OF_BLOCKS and event[4] not in self._groups:
            return  # of another device, or of an earlier step
        self._meter.note(event)

    def hook_begins(self) -> Any:
        """See :meth:`StepClock.hook_begins`."""
        return self._meter.hook_begins()

    def region_hook_begins(self) -> Any:
        """See :meth:`StepClock.region_hook_begins`."""
        return None if self._is_process else self._meter.hook_begins()

    def hook_took(self, kind: str, began: Any) -> None:
        """See :meth:`StepClock.hook_took`."""
        if self.is_on and began is not None:
            self._meter.hook_took(kind, began)
