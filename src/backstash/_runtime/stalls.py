"""How long the computing thread waited on the way down, counted where it waits."""

from __future__ import annotations

import time

from .trace import EventLog, profiled
from .transfer import Transfer

__all__ = ["Stalls"]


class Stalls:
    """Counts the seconds of each wait for a transfer's source, an interrupted one too.

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
