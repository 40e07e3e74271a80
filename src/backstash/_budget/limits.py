"""The limits that a planner sets on one device: bytes that may stay in place, and the transfer windows."""

from __future__ import annotations

from collections.abc import Callable

from .._plan.simulate import NO_WINDOWS, Windows
from .._tiers.device_tiers import DeviceTiers

__all__ = ["Limits"]


class Limits:
    """Set and restore the limits of one device's tiers, from the first step on.

    Args:
        given_windows: the windows that the caller set, which do not change; ``None``: a planner sets the
            window.
    """

    def __init__(self, given_windows: tuple[int | None, int | None]) -> None:
        self.given_windows = given_windows
        self.windows = NO_WINDOWS
        """The current windows."""
        self.resident: int | None = None
        """Most bytes that may stay in place. A step may lower the limit for itself."""
        self.unplanned = 0
        """The same in a step that saves a block that the plan does not know."""
        self._before = NO_WINDOWS  # before the first step
        self._bound: DeviceTiers | None = None

    @property
    def tiers(self) -> DeviceTiers:
        """The device's tiers. A step must have begun."""
        assert self._bound is not None
        return self._bound

    def begin_step(
        self, tiers: DeviceTiers, has_room: Callable[[int], bool], ran_out: Callable[..., str]
    ) -> None:
        """Begin a step on the device's tiers.

        Args:
            tiers: of the device.
            has_room: return whether memory for this many bytes is left; called before it is allocated.
            ran_out: called when the device is out of memory; return a text for reports.
        """
        before, self._bound = self._bound, tiers
        if before is None:
            inflight, prefetch = tiers.evictor.inflight, tiers.prefetcher.ahead
            self._before = Windows(inflight.window_bytes, prefetch.window_bytes)
        elif before is not tiers:  # a forked process has others
            self.set_windows(self.windows)
            self.set_resident(self.resident)
        tiers.evictor.resident.is_planned = True
        tiers.evictor.ran_out = ran_out
        tiers.prefetcher.ahead.has_room = tiers.packer.has_room = has_room

    def end(self) -> None:
        """Restore the device's limits from before the first step."""
        tiers = self._bound
        if tiers is not None:
            tiers.evictor.resident.is_planned = False
            tiers.evictor.ran_out = None
            tiers.prefetcher.ahead.has_room = tiers.packer.has_room = None
            tiers.evictor.inflight.window_bytes, tiers.prefetcher.ahead.window_bytes = self._before

    def held_bytes(self) -> int:
        """Return the bytes of the device's memory that the stash holds, in-flight transfers included."""
        tiers = self._bound
        if tiers is None:
            return 0
        held = tiers.evictor.resident.nbytes + tiers.evictor.inflight.nbytes
        held += tiers.prefetcher.ahead.nbytes
        return held + (tiers.device.unfinished_bytes() if tiers.device is not None else 0)

    def set_windows(self, windows: Windows) -> None:
        """Set the windows, except those that the caller gave."""
        inflight, prefetch = (
            given if given is not None else chosen
            for given, chosen in zip(self.given_windows, windows, strict=True)
        )
        self.windows = Windows(inflight, prefetch)
        self.tiers.evictor.inflight.window_bytes = inflight
        self.tiers.prefetcher.ahead.window_bytes = prefetch

    def set_resident(self, limit: int | None) -> None:
        """Set the limit for this and later steps."""
        self.resident = limit
        self.tiers.evictor.resident.set_limit(limit)

    def lift_resident(self) -> None:
        """Remove the limit for the rest of the step."""
        self.tiers.evictor.resident.set_limit(None)

    def lower_resident(self, limit: int) -> None:
        """Lower the limit for the rest of the step, if it is higher."""
        resident = self.tiers.evictor.resident
        if resident.limit is None or limit < resident.limit:
            resident.set_limit(limit)
