"""What lies below an accelerator: parcels in host memory or on disk, and their bytes on the way back.

A room outlives everything that reads or writes it: what a parcel or a reading leaves behind when it dies
is *buried* (see ``_buffers``), and its room given back when its copies and its write have ended.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .._device.base import Copy
from .._device.pinned_pool import PinnedBuffer
from .._runtime.reclaim import HostCleanup, ReclaimQueue, on_death
from .._runtime.trace import profiled
from .._runtime.workers import Work
from ..stores import Slot, Store

if TYPE_CHECKING:
    from .host import HostTier

__all__ = ["HostBacking", "HostLoad"]


class HostBacking:
    """A block's bytes below its device: in a room of host memory, on disk, or in both.

    ``cleanup.buffer`` is ``None`` once they are on disk alone; ``cleanup.slot`` is where they lie there, or
    will when ``cleanup.work`` has ended: the write, until somebody has looked at its end.
    """

    __slots__ = (
        "__del__",
        "__weakref__",
        "ahead",
        "blocks",
        "cleanup",
        "load",
        "nbytes",
        "skew",
        "wanted",
    )
    __del__: Callable[[], None]

    def __init__(
        self, reclaim_queue: ReclaimQueue, number: int, buffer: PinnedBuffer, copy: Copy
    ) -> None:
        self.cleanup = HostCleanup(reclaim_queue, number, buffer)
        self.cleanup.writing = copy
        self.__del__ = on_death(reclaim_queue, self.cleanup)
        self.nbytes = buffer.memory.numel()
        self.load: HostLoad | None = None
        self.skew = 0
        self.ahead = False
        self.blocks = 1
        self.wanted = 0

    @property
    def tier(self) -> str:
        """Where its bytes are."""
        return "host" if self.cleanup.buffer is not None else "disk"

    def let_go(self) -> None:
        """Drop the memory that was brought back; the room or the disk still has the bytes."""
        self.load = None
        self.ahead = False


class HostLoad:
    """Bytes on their way back to the device: from a room at once, or first from disk to one.

    ``buffer`` is given back when it is no longer needed.
    """

    __slots__ = (
        "__del__",
        "__weakref__",
        "_ahead",
        "_read",
        "_staged",
        "cleanup",
        "host",
        "needs_worker",
    )
    __del__: Callable[[], None]

    def __init__(
        self,
        host: HostTier,
        slot: Slot | None,
        staged: Tensor,
        buffer: PinnedBuffer | None,
        *,
        ahead: bool,
    ) -> None:
        self.cleanup = HostCleanup(host.reclaim_queue, host.number, buffer)
        self.__del__ = on_death(host.reclaim_queue, self.cleanup)
        self._read = self.cleanup.work = Work(_read_up, host.disk, slot, staged)
        self.host = host
        self._ahead = ahead  # a worker reads it
        self._staged = staged
        self.needs_worker = slot is not None

    @property
    def arrival(self) -> Copy | None:
        """The copy to the device, once it has begun."""
        return self.cleanup.brought

    @property
    def memory(self) -> Tensor:
        """The bytes on the device, once :meth:`exception` has answered ``None``."""
        assert self.arrival is not None
        return self.arrival.memory

    def run(self) -> bool:
        """Read from disk, on whichever thread comes first; whether it was this one."""
        return self._read.run()

    def send(self, after: Copy | None = None) -> None:
        """Begin the copy to the device, if it has not begun. The caller holds the lock."""
        if self.arrival is None:
            self.cleanup.brought = self.host.device.up(self._staged, after)

    def arrive(self) -> bool:
        """Wait until it is on the device, where that can be waited for. The caller holds the lock.

        Not for a read that another thread makes itself, which may be waiting for the caller.
        """
        if self.arrival is None:
            if not self._ahead or self._read.exception() is not None:
                return False
            try:
                self.send()
            except torch.OutOfMemoryError:
                return False
            assert self.arrival is not None
        self.arrival.wait()
        return True

    def take_buffer(self) -> PinnedBuffer | None:
        """The room that it read to, once its copy to the device has ended: it is not needed any more."""
        if self.arrival is None or not self.arrival.ended():
            return None
        buffer, self.cleanup.buffer = self.cleanup.buffer, None
        return buffer

    def has_come(self) -> bool:
        """Whether the disk has been read, without an error."""
        return self._read.done() and self._read.exception() is None

    def exception(self) -> BaseException | None:
        """Wait for the disk and begin the copy; the error, if there was one. The host waits for no copy."""
        error = self._read.exception()
        if error is None:
            with self.host.lock:
                self.send()
        return error


def _read_up(disk: Store | None, slot: Slot | None, memory: Tensor) -> None:
    """Read from disk; nothing to do for what is in host memory."""
    if disk is not None and slot is not None:
        with profiled("read"):
            disk.read(slot, memory.data_ptr())
