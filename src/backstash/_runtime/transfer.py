"""Transfers of bytes, which a worker or a device makes, and the waits for them."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod

from .trace import EventLog, profiled

__all__ = ["Stalls", "Transfer"]


class Transfer(ABC):
    """A transfer of bytes from one memory to another.

    Two kinds exist: a disk write or read (:class:`~backstash._runtime.workers.Work`), and an accelerator's
    copy (:class:`~backstash._device.base.Copy`).
    """

    __slots__ = ()

    ends_in_order: bool
    """Whether transfers of this kind end in the order in which they began, as the copies of one stream do."""
    error: BaseException | None
    """The error, if it has ended and failed. A device's copy does not fail once it has begun."""
    was_skipped = False
    """Whether it copied nothing, since its source was resized before it began. Read it once the transfer is
    done."""

    @abstractmethod
    def done(self) -> bool:
        """Return whether its source may be freed: it has ended, or later users of the source wait for it."""

    @abstractmethod
    def ended(self) -> bool:
        """Return whether the bytes have arrived, or the transfer failed."""

    @abstractmethod
    def exception(self) -> BaseException | None:
        """Wait until it is :meth:`done`. Return the error, if there was one."""

    @abstractmethod
    def wait(self) -> None:
        """Wait until it has :meth:`ended`. Called on a thread that does not compute."""

    @abstractmethod
    def cancel(self) -> bool:
        """Cancel it. Return whether it had not begun."""


class Stalls:
    """Counts the seconds that the computing thread waited for writes, including interrupted waits.

    Args:
        event_log: receives each stall, while there is a recording.
    """

    __slots__ = ("_event_log", "seconds")

    def __init__(self, event_log: EventLog) -> None:
        self._event_log = event_log
        self.seconds = 0.0

    def wait(self, transfer: Transfer) -> None:
        """Wait until the source of ``transfer`` may be freed."""
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
