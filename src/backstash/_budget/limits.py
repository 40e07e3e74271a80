"""The limits that a planner sets on one device: what may stay, and what may be on its way."""

from __future__ import annotations

from collections.abc import Callable

from .._tiers.device_tiers import DeviceTiers

__all__ = ["Limits"]

Windows = tuple[int, int]  # bytes that may be on their way down, and read ahead


class Limits:
    """Of one device's tiers, from the first step on.

    Args:
        given_windows: the windows that the caller set, which stay as they are; ``None``: a planner sets it.
    """

    def __init__(self, given_windows: tuple[int | None, int | None]) -> None:
        self.given_windows = given_windows
        self.windows: Windows = (0, 0)
        """As they are now."""
        self.planned_windows: Windows = (0, 0)
        """Of the plan that is followed."""
        self.resident: int | None = None
        """The bytes that may stay; in a step it may be lowered."""
        self.unplanned = 0
        """The same in a step that saves what the plan does not know."""
        self._before: Windows = (0, 0)  # before the first step
        self._bound: DeviceTiers | None = None

    @property
    def tiers(self) -> DeviceTiers:
        """The device's. A step must have begun."""
        assert self._bound is not None
        return self._bound

    def begin_step(
        self, tiers: DeviceTiers, has_room: Callable[[int], bool], ran_out: Callable[..., str]
    ) -> None:
        """A step begins.

        Args:
            tiers: of the device.
            has_room: whether memory for so many bytes is left, asked before it is taken.
            ran_out: called when the device has run out of memory; returns what reports say of it.
        """
        before, self._bound = self._bound, tiers
        if before is None:
            self._before = tiers.evictor.inflight.window_bytes, tiers.prefetcher.ahead.window_bytes
        elif before is not tiers:  # a forked process has others
            self.set_windows(self.windows)
            self.set_resident(self.resident)
        tiers.evictor.resident.is_planned = True
        tiers.evictor.ran_out = ran_out
        tiers.prefetcher.ahead.has_room = tiers.packer.has_room = has_room

    def end(self) -> None:
        """Leave the device as it was before the first step."""
        tiers = self._bound
        if tiers is not None:
            tiers.evictor.resident.is_planned = False
            tiers.evictor.ran_out = None
            tiers.prefetcher.ahead.has_room = tiers.packer.has_room = None
            tiers.evictor.inflight.window_bytes, tiers.prefetcher.ahead.window_bytes = self._before

    def held_bytes(self) -> int:
        """Bytes of the device's memory that the stash holds, with those under way."""
        tiers = self._bound
        if tiers is None:
            return 0
        held = tiers.evictor.resident.nbytes + tiers.evictor.inflight.nbytes
        held += tiers.prefetcher.ahead.nbytes
        return held + (tiers.device.unfinished_bytes() if tiers.device is not None else 0)

    def set_windows(self, windows: Windows) -> None:
        """From now on, but for those that are given."""
        inflight, prefetch = (
            given if given is not None else chosen
            for given, chosen in zip(self.given_windows, windows, strict=True)
        )
        self.windows = inflight, prefetch
        self.tiers.evictor.inflight.window_bytes = inflight
        self.tiers.prefetcher.ahead.window_bytes = prefetch

    def set_resident(self, limit: int | None) -> None:
        """From now on."""
        self.resident = limit
        self.tiers.evictor.resident.set_limit(limit)

    def lift_resident(self) -> None:
        """For the rest of the step, anything may stay."""
        self.tiers.evictor.resident.set_limit(None)

    def lower_resident(self, limit: int) -> None:
        """For the rest of the step, where it is higher."""
        resident = self.tiers.evictor.resident
        if resident.limit is None or limit < resident.limit:
            resident.set_limit(limit)
