"""Sides: the CPU, and each accelerator whose tensors a stash has been given, each with its own budgets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ._device_memory import DeviceMemory
from ._disk import DiskTier
from ._down import Down
from ._events import Tape
from ._flights import Flights
from ._guard import Guard
from ._host import HostTier
from ._keep import Keep
from ._refusals import Refusals
from ._remains import Grave
from ._segments import Segments
from ._spills import Spills
from ._streams import Device, accelerator
from ._up import PoolSource, Up
from ._workers import Work
from .memory import spare_bytes
from .stores import Store
from .stores._host import HostPool
from .stores._memory import Pool

__all__ = ["Plan", "Side"]


class Side:
    """One device's ways down and up.

    Args:
        number: which of the stash's sides it is; the CPU's is 0.
        grave: where what dies is appended.
        has_tier: whether there is a tier below.
        device: what drives it; ``None`` for the CPU.
        host: its host tier, on an accelerator.
    """

    __slots__ = ("device", "down", "grave", "has_tier", "host", "number", "up")

    def __init__(
        self,
        number: int,
        down: Down,
        up: Up,
        grave: Grave,
        *,
        has_tier: bool,
        device: Device | None = None,
        host: HostTier | None = None,
    ) -> None:
        self.number = number
        self.down = down
        self.up = up
        self.grave = grave
        self.has_tier = has_tier
        self.device = device
        self.host = host

    def stream(self) -> Any:
        """The stream that is current on this thread; ``None`` on the CPU."""
        return self.device.stream() if self.device is not None else None

    def used(self, tensor: Tensor) -> None:
        """See :meth:`Device.used`; nothing on the CPU."""
        if self.device is not None:
            self.device.used(tensor)


@dataclass(frozen=True, slots=True)
class Plan:
    """What every side of a stash is made from."""

    store: Store | None
    """The disk tier."""
    begin: Callable[[Work], None]
    """Hands a piece of work to a worker."""
    grave: Grave
    """Where what dies is appended."""
    lock: Any
    """The stash's."""
    guard: Guard
    """Told who writes."""
    tape: Tape
    """Told of everything, where somebody records."""
    host: int | None
    """The ``host`` budget in bytes, for each device; -1: for all of them, half of what there is to spare."""
    inflight: int
    """The window on the way down, likewise."""
    prefetch: int
    """The window on the way up, likewise."""
    on_full: str
    """``"keep"`` or ``"raise"``."""
    pools: list[HostPool] = field(default_factory=list)
    """Of the devices so far."""

    def cpu(self, pool: Pool, freed: Callable[[int], None]) -> Side:
        """The side of CPU tensors: their own memory, then the disk."""
        keep = Keep(self.tape)
        refusals = Refusals(keep, self.store, raises=self.on_full == "raise")
        flights = Flights(keep, refusals, freed, self.tape, window_bytes=self.inflight)
        disk = segments = None
        if self.store is not None:
            disk = DiskTier(self.store, self.begin, self.grave, flights, self.tape)
            segments = Segments(disk, pool, keep, flights, self.tape)
        down = Down(keep, refusals, flights, disk=disk, segments=segments)
        up = Up(
            self.begin,
            PoolSource(pool),
            self.lock,
            self.guard,
            freed,
            self.tape,
            prefetch=self.prefetch,
        )
        return Side(0, down, up, self.grave, has_tier=self.store is not None)

    def accelerator(self, device: Device, number: int) -> Side:
        """The side of a device's tensors: its memory, pinned host memory, then the disk."""
        budget = self._more_host if self.host == -1 else self.host
        pool = HostPool(budget, device)
        self.pools.append(pool)
        early = self.inflight
        spills = Spills(pool, self.store, self.begin, self.grave, number=number, early=early)
        host = HostTier(device, pool, spills, self.grave, self.lock, number=number)
        memory = DeviceMemory(device)
        keep = Keep(self.tape, early=early, memory=memory)
        refusals = Refusals(keep, host, raises=self.on_full == "raise")
        flights = Flights(keep, refusals, _ignore, self.tape, window_bytes=self.inflight)
        down = Down(keep, refusals, flights, host=host)
        up = Up(
            self.begin,
            host,
            self.lock,
            self.guard,
            _ignore,
            self.tape,
            prefetch=self.prefetch,
            memory=memory,
        )
        return Side(number, down, up, self.grave, has_tier=self.host != 0, device=device, host=host)

    def _more_host(self) -> int:
        """Bytes that all pools together may have beyond what they have: then as much is left to spare."""
        return (spare_bytes() - sum(pool.slab_bytes for pool in self.pools)) // 2

    def side_of(self, device: torch.device, number: int) -> Side | str:
        """The side of an accelerator, or the reason why it has none."""
        driver = accelerator(device)
        return driver if isinstance(driver, str) else self.accelerator(driver, number)


def _ignore(nbytes: int) -> None:
    """An accelerator's allocator uses again what is freed."""
