"""Sides: the CPU, and each accelerator whose tensors a stash has been given, each with its own budgets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .._device.accelerator import accelerator
from .._device.base import Device
from .._device.memory import DeviceMemory
from .._device.pinned_pool import PinnedPool
from .._runtime.critical_section import CriticalSection
from .._runtime.reclaim import ReclaimQueue
from .._runtime.trace import EventLog
from .._runtime.workers import Work
from ..memory import spare_bytes
from ..stores import Store
from ..stores._buffer_pool import BufferPool
from .disk import DiskTier
from .eviction import Evictor
from .health import TierHealth
from .host import HostTier
from .host_writeback import HostWriteback
from .inflight import InflightWrites
from .prefetch import PoolSource, Prefetcher
from .resident import ResidentSet
from .segments import Segments

__all__ = ["DeviceTiers", "TierConfig"]


class DeviceTiers:
    """One device's ways down and up.

    Args:
        number: which of the stash's sides it is; the CPU's is 0.
        grave: where what dies is appended.
        has_tier: whether there is a tier below.
        device: what drives it; ``None`` for the CPU.
        host: its host tier, on an accelerator.
    """

    __slots__ = ("device", "evictor", "has_tier", "host", "number", "prefetcher", "reclaim_queue")

    def __init__(
        self,
        number: int,
        down: Evictor,
        up: Prefetcher,
        reclaim_queue: ReclaimQueue,
        *,
        has_tier: bool,
        device: Device | None = None,
        host: HostTier | None = None,
    ) -> None:
        self.number = number
        self.evictor = down
        self.prefetcher = up
        self.reclaim_queue = reclaim_queue
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
class TierConfig:
    """What every side of a stash is made from."""

    store: Store | None
    """The disk tier."""
    begin: Callable[[Work], None]
    """Hands a piece of work to a worker."""
    reclaim_queue: ReclaimQueue
    """Where what dies is appended."""
    lock: Any
    """The stash's."""
    section: CriticalSection
    """Told who writes."""
    event_log: EventLog
    """Told of everything, where somebody records."""
    host: int | None
    """The ``host`` budget in bytes, for each device; -1: for all of them, half of what there is to spare."""
    inflight: int
    """The window on the way down, likewise."""
    prefetch: int
    """The window on the way up, likewise."""
    on_full: str
    """``"keep"`` or ``"raise"``."""
    pools: list[PinnedPool] = field(default_factory=list)
    """Of the devices so far."""

    def cpu(self, pool: BufferPool, freed: Callable[[int], None]) -> DeviceTiers:
        """The side of CPU tensors: their own memory, then the disk."""
        resident = ResidentSet(self.event_log)
        health = TierHealth(resident, self.store, raises=self.on_full == "raise")
        inflight = InflightWrites(
            resident, health, freed, self.event_log, window_bytes=self.inflight
        )
        disk = segments = None
        if self.store is not None:
            disk = DiskTier(self.store, self.begin, self.reclaim_queue, inflight, self.event_log)
            segments = Segments(disk, pool, resident, inflight, self.event_log)
        down = Evictor(resident, health, inflight, disk=disk, segments=segments)
        up = Prefetcher(
            self.begin,
            PoolSource(pool),
            self.lock,
            self.section,
            freed,
            self.event_log,
            prefetch=self.prefetch,
        )
        return DeviceTiers(0, down, up, self.reclaim_queue, has_tier=self.store is not None)

    def accelerator(self, device: Device, number: int) -> DeviceTiers:
        """The side of a device's tensors: its memory, pinned host memory, then the disk."""
        budget = self._more_host if self.host == -1 else self.host
        pool = PinnedPool(budget, device)
        self.pools.append(pool)
        early = self.inflight
        writeback = HostWriteback(
            pool, self.store, self.begin, self.reclaim_queue, number=number, early=early
        )
        host = HostTier(device, pool, writeback, self.reclaim_queue, self.lock, number=number)
        memory = DeviceMemory(device)
        resident = ResidentSet(self.event_log, early=early, memory=memory)
        health = TierHealth(resident, host, raises=self.on_full == "raise")
        inflight = InflightWrites(
            resident, health, _ignore, self.event_log, window_bytes=self.inflight
        )
        down = Evictor(resident, health, inflight, host=host)
        up = Prefetcher(
            self.begin,
            host,
            self.lock,
            self.section,
            _ignore,
            self.event_log,
            prefetch=self.prefetch,
            memory=memory,
        )
        return DeviceTiers(
            number, down, up, self.reclaim_queue, has_tier=self.host != 0, device=device, host=host
        )

    def _more_host(self) -> int:
        """Bytes that all pools together may have beyond what they have: then as much is left to spare."""
        return (spare_bytes() - sum(pool.slab_bytes for pool in self.pools)) // 2

    def tiers_of(self, device: torch.device, number: int) -> DeviceTiers | str:
        """The side of an accelerator, or the reason why it has none."""
        driver = accelerator(device)
        return driver if isinstance(driver, str) else self.accelerator(driver, number)


def _ignore(nbytes: int) -> None:
    """An accelerator's allocator uses again what is freed."""
