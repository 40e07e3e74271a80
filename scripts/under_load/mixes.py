"""Mixes of tiers, with budgets so small that every one of them is reached, and what those promise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from backstash import Stash
from backstash.testing import TwinDevice, stash_on

from .programs import LARGEST_BYTES

KIB, MIB = 1 << 10, 1 << 20


@dataclass(frozen=True, slots=True)
class Mix:
    """A stash to be made, and the budgets that it is to hold."""

    make: Callable[[str], Stash]
    """From the disk's directory to a stash."""
    keep: int | None
    """The most bytes in place, between operations; ``None``: no limit."""
    inflight: int
    """The most bytes on their way down."""
    host: int = 0
    """The most bytes of host memory."""

    def broken_by(self, stats: Any, *, running_bytes: int) -> str:
        """Which budget ``stats`` shows exceeded; ``""`` for none.

        Args:
            running_bytes: what operations that still run on other threads may have saved: that is in place
                whatever the budget says, and theirs.
        """
        keep = None if self.keep is None else self.keep + running_bytes
        held = (
            ("keep_peak_bytes", keep),
            ("inflight_peak_bytes", self.inflight),
            ("inflight_bytes", self.inflight),
            ("host_peak_bytes", self.host),
        )
        return "; ".join(
            f"{name} is {getattr(stats, name)} with a budget of {most}"
            for name, most in held
            if most is not None and getattr(stats, name) > most
        )


def _mix(*, twin: float | None = None, disk: bool = True, **budgets: Any) -> Mix:
    options = {"min_bytes": 0, "keep": 0, "inflight": 128 * MIB, **budgets}

    def make(directory: str) -> Stash:
        if disk:
            return _on(twin, disk=directory, **options)
        return _on(twin, **options)

    host, inflight = 0, options["inflight"]
    if twin is not None:
        host = options["host"]
        inflight = max(inflight, LARGEST_BYTES)  # a larger block is alone in the window
    return Mix(make, keep=options["keep"], inflight=inflight, host=host)


def _on(twin: float | None, **options: Any) -> Stash:
    if twin is None:
        return Stash(**options)
    return stash_on(TwinDevice(chance=twin, seed=1), **options)


MIXES = {
    "in place": _mix(keep=None),
    "keep, disk": _mix(keep=256 * KIB, inflight=256 * KIB, prefetch=256 * KIB),
    "disk": _mix(inflight=0),
    "in flight": _mix(),
    "tiny windows": _mix(inflight=4 * KIB, prefetch=4 * KIB),
    "host": _mix(twin=0.3, disk=False, host=256 * MIB, inflight=256 * KIB),
    "keep, host": _mix(twin=0.1, disk=False, keep=512 * KIB, host=256 * MIB, inflight=256 * KIB),
    "host, disk": _mix(twin=0.3, host=8 * MIB, inflight=256 * KIB, prefetch=256 * KIB),
    "tiny host, disk": _mix(twin=0.5, host=MIB, inflight=16 * KIB, prefetch=16 * KIB),
}
