"""What moves bytes (a call that a worker makes, or a copy that a device was given), and the waits for it."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod

from .trace import EventLog, profiled

__all__ = ["Stalls", "Transfer"]


class Transfer(ABC):
    """Bytes on their way from one memory to another.

    A disk write or read is one (:class:`~backstash._runtime.workers.Work`), a copy of an accelerator is
    another (:class:`~backstash._device.base.Copy`).
    """

    __slots__ = ()

    ends_in_order: bool
    """Whether it ends after those of its kind that began before it, as the copies of one stream do."""
    error: BaseException | None
    """Why it failed, once it has ended; a device's copy does not fail once it has begun."""

    @abstractmethod
    def done(self) -> bool:
        """Whether its source may be let go: it has ended, or what follows on its source waits for it."""

    @abstractmethod
    def ended(self) -> bool:
        """Whether the bytes have arrived, or it failed."""

    @abstractmethod
    def exception(self) -> BaseException | None:
        """Wait until it is :meth:`done`; the error, if there was one."""

    @abstractmethod
    def wait(self) -> None:
        """Wait until it has :meth:`ended`, on a thread that computes nothing."""

    @abstractmethod
    def cancel(self) -> bool:
        """Call it off; whether that came before it began."""


class Stalls:
    """Counts the seconds that the computing thread waited on the way down, an interrupted wait too.

    Args:
        event_log: gets each stall, where somebody records.
    """

    __slots__ = ("_event_log", "seconds")

    def __init__(self, event_log: EventLog) -> None:
        self._event_log = event_log
        self.seconds = 0.0

    def wait(self, transfer: Transfer) -> None:
        """Wait until the source of ``transfer`` may be let go."""
        if transfer.done():
            return
        began = time.perf_counter()
        try:
            with profiled("stall on the way down"):
                transfer.exception()
        finally:
            self.seconds += time.perf_counter() - began
            if self._event_log.on:
                self._event_log.emit("stall", 0, cause="pack", began=began)
