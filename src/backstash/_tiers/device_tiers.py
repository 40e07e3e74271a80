"""The tiers of one device: of the CPU, or of an accelerator whose tensors a stash manages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from .._device.accelerator import accelerator
from .._device.base import Device
from .._device.memory import DeviceMemory
from .._device.pinned_pool import PinnedPool
from .._runtime.critical_section import CriticalSection
from .._runtime.reclaim import Cleanup, Ledger, ReclaimQueue
from .._runtime.trace import EventLog
from .._runtime.workers import Work, Workers
from .._saved.block import Block
from ..memory import spare_bytes
from ..stores import Store
from ..stores._buffer_pool import BufferPool
from .ahead import AheadSet, ViewServer
from .base import LowerTier
from .disk import DiskTier
from .eviction import Evictor
from .health import TierHealth
from .host import HostTier
from .host_backing import HostCleanup
from .host_writeback import HostWriteback
from .inflight import InflightWrites
from .making import MadeAhead
from .packing import Packer
from .prefetch import Prefetcher
from .resident import ResidentSet
from .segments import Segments
from .windows import FollowingWindows

__all__ = ["DeviceTiers", "TierConfig", "TierSizes"]


class DeviceTiers(Ledger):
    """One device's memory and the tier below it, with their own budgets.

    Args:
        number: the number of the device in the stash; the CPU's is 0.
        evictor: writes blocks to the tier below.
        prefetcher: loads blocks.
        packer: packs and decodes blocks.
        tier: the tier below the device's memory; ``None`` if there is none.
        device: the driver of the device; ``None`` for the CPU.
        windows: sets the windows as blocks are saved; ``None``: they are fixed.
    """

    def __init__(
        self,
        number: int,
        evictor: Evictor,
        prefetcher: Prefetcher,
        packer: Packer,
        *,
        tier: LowerTier | None,
        device: Device | None = None,
        windows: FollowingWindows | None = None,
    ) -> None:
        self.windows = windows
        self.number = number
        self.evictor = evictor
        self.packer = packer
        self.prefetcher = prefetcher
        self.tier = tier
        self.device = device

    def subtract(
        self, *, resident_bytes: int = 0, inflight_bytes: int = 0, again_bytes: int = 0
    ) -> None:
        """See :meth:`Ledger.subtract`."""
        self.evictor.resident.nbytes -= resident_bytes
        self.evictor.inflight.nbytes -= inflight_bytes
        self.prefetcher.ahead.again_bytes -= again_bytes

    def defer(self, cleanup: Cleanup) -> None:
        """See :meth:`Ledger.defer`."""
        assert self.tier is not None
        self.tier.defer(cleanup)

    def forget(self) -> None:
        """Forget all blocks, since none is alive."""
        self.evictor.forget()
        self.prefetcher.ahead.forget()
        if self.tier is not None:
            self.tier.forget()

    def restore(
        self, blocks: list[Block], waiting: set[int], cleanups: dict[type, list[Any]]
    ) -> None:
        """Rebuild the counts and queues from the living blocks: see ``_core/session``.

        Args:
            blocks: the living blocks of this device, oldest first.
            waiting: the ``id`` of each block that waits for its operation to end.
            cleanups: of this device by class, including those of dead objects.
        """
        begun = self.evictor.restore(blocks, waiting, cleanups)
        if self.tier is not None:
            self.tier.restore(blocks, cleanups[HostCleanup])
            for transfer in begun:  # that may not have reached a worker
                self.tier.resume(transfer)
        backings = {id(block.placement.backing): block.placement.backing for block in blocks}
        alive = [each for each in backings.values() if each is not None]
        self.prefetcher.ahead.restore(alive, blocks, cleanups)


@dataclass(frozen=True, slots=True)
class TierSizes:
    """What the user of a stash gave for the tiers of each device, in bytes."""

    host: int | None
    """The ``host`` budget; -1: all devices share half of the spare host memory."""
    inflight: int
    """The window for writes."""
    prefetch: int
    """The window for loads."""
    follows: tuple[bool, bool]
    """Whether each window follows what a step saves (:class:`FollowingWindows`). For the CPU only."""
    on_full: str
    """``"keep"`` or ``"raise"``."""
    makes_ahead: bool
    """Whether derived blocks may be computed ahead of need."""


@dataclass(frozen=True, slots=True)
class TierConfig:
    """The shared parts from which a stash builds the tiers of each device."""

    store: Store | None
    """The disk tier's store."""
    begin: Callable[[Work], None]
    """Hands a :class:`Work` to a worker."""
    makers: Workers
    """One thread, which computes derived blocks ahead of need."""
    reclaim_queue: ReclaimQueue
    """Receives the cleanups of dead objects."""
    section: CriticalSection
    """The critical section of the stash."""
    event_log: EventLog
    """Receives all events, while there is a recording."""
    pool: BufferPool
    """Provides memory for reads from disk on the CPU."""
    freed: Callable[[int], None]
    """Called with the number of bytes of CPU memory that were freed."""
    sizes: TierSizes
    pools: list[PinnedPool] = field(default_factory=list)
    """The pinned pools of the devices so far."""

    def tiers(self, device: Device | None, number: int) -> DeviceTiers:
        """Return the tiers of the CPU (``None``: memory, then disk) or of an accelerator (device memory,
        pinned host memory, then disk)."""
        disk = self._disk_tier() if device is None else None
        tier = disk if device is None else self._host_tier(device, number)
        memory = DeviceMemory(device) if device is not None else None
        early = self.sizes.inflight if device is not None else 0
        freed = self.freed if device is None else _ignore
        resident = ResidentSet(self.event_log, early=early, memory=memory)
        health = TierHealth(resident, tier, raises=self.sizes.on_full == "raise")
        inflight = InflightWrites(
            resident, health, freed, self.event_log, window_bytes=self.sizes.inflight
        )
        segments = None  # small blocks share writes to a store; host memory takes them one by one
        if disk is not None:
            segments = Segments(disk, self.pool, resident, inflight, self.event_log)
        is_off = device is not None or not self.sizes.makes_ahead
        ahead = AheadSet(freed, window_bytes=self.sizes.prefetch, memory=memory)
        server = ViewServer(ahead, memory)
        made = MadeAhead(self.makers, self.pool, ahead, server, self.event_log, is_off=is_off)
        packer = Packer(
            resident, self.reclaim_queue, self.section, self.pool, device=device, made=made
        )
        evictor = Evictor(resident, health, inflight, tier=tier, segments=segments)
        prefetcher = Prefetcher(self.begin, tier, ahead, server, made, self.section, self.event_log)
        windows = None
        if device is None and any(self.sizes.follows):
            down, up = self.sizes.follows
            windows = FollowingWindows(inflight if down else None, ahead if up else None)
        return DeviceTiers(
            number, evictor, prefetcher, packer, tier=tier, device=device, windows=windows
        )

    def _disk_tier(self) -> DiskTier | None:
        if self.store is None:
            return None
        return DiskTier(self.store, self.begin, self.reclaim_queue, self.event_log, self.pool)

    def _host_tier(self, device: Device, number: int) -> LowerTier | None:
        if self.sizes.host == 0:
            return None
        budget = self._more_host if self.sizes.host == -1 else self.sizes.host
        pool = PinnedPool(budget, device)
        self.pools.append(pool)
        writeback = HostWriteback(
            pool,
            self.store,
            self.begin,
            self.reclaim_queue,
            number=number,
            early=self.sizes.inflight,
        )
        return HostTier(device, pool, writeback, self.reclaim_queue, self.section, number=number)

    def _more_host(self) -> int:
        """Return how many bytes all pools may grow by, so that as many stay spare."""
        return (spare_bytes() - sum(pool.slab_bytes for pool in self.pools)) // 2

    def tiers_of(self, device: torch.device, number: int) -> DeviceTiers | str:
        """Return the tiers of an accelerator, or the reason why it has none."""
        driver = accelerator(device)
        return driver if isinstance(driver, str) else self.tiers(driver, number)


def _ignore(nbytes: int) -> None:
    """Do nothing: an accelerator's allocator reuses freed memory."""
