"""The backings of an accelerator's blocks, in host memory or on disk, and the loads that bring them back.

A host buffer outlives everything that reads or writes it. The buffer of a dead backing or load is *deferred*
(see ``host_buffers``): it is released when its copies and its write have ended.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from .._device.base import Completion, Copy, Device
from .._device.pinned_pool import PinnedBuffer
from .._runtime.critical_section import CriticalSection
from .._runtime.reclaim import Cleanup, Ledger, ReclaimQueue
from .._runtime.workers import Work
from .._saved.placement import Backing, Load
from ..stores import Slot, Store
from ..stores._buffer_pool import own_memory

__all__ = ["BufferLoad", "HostBacking", "HostCleanup", "HostLoad"]


class HostCleanup(Cleanup):
    """What remains of a dead backing or load: a host buffer, a disk slot, and their transfers."""

    __slots__ = ("brought", "buffer", "slot", "staged", "work", "written")

    def __init__(
        self, reclaim_queue: ReclaimQueue, number: int, buffer: PinnedBuffer | None
    ) -> None:
        self.mark = reclaim_queue.mark
        self.number = number
        self.loaded_bytes = 0
        self.buffer = buffer
        self.staged: Tensor | None = None  # host memory outside the pool, while a copy reads it
        self.slot: Slot | None = None
        self.written: Completion | None = None  # the end of the copy from the device to the buffer
        self.brought: Completion | None = None  # the end of the last copy from it to the device
        self.work: Work | None = None  # a worker's write from the buffer, or its read to it

    def at_rest(self) -> bool:
        """Return whether nothing uses the buffer and the slot any more."""
        if self.work is not None and not (self.work.finished or self.work.cancel()):
            return False
        return (self.written is None or self.written.ended()) and (
            self.brought is None or self.brought.ended()
        )

    def wait(self) -> None:
        """Wait until nothing uses the buffer and the slot."""
        if self.work is not None and not self.work.cancel():
            self.work.exception()
        for completion in (self.written, self.brought):
            if completion is not None:
                completion.wait()

    def settle(self, ledger: Ledger) -> None:
        """See :meth:`Cleanup.settle`."""
        ledger.defer(self)


class HostBacking(Backing):
    """A block's bytes below its device: in a host buffer, on disk, or in both.

    ``cleanup.buffer`` is ``None`` once the bytes are only on disk. ``cleanup.slot`` is their place on disk,
    and ``cleanup.work`` is the write to it, until the end of that write was noticed.
    """

    __slots__ = ("__del__", "cleanup", "store")
    __del__: Callable[[], None]

    def __init__(
        self,
        reclaim_queue: ReclaimQueue,
        number: int,
        buffer: PinnedBuffer,
        written: Completion,
        store: Store | None = None,
    ) -> None:
        self.cleanup: HostCleanup = HostCleanup(reclaim_queue, number, buffer)
        self.cleanup.written = written
        self.store = store
        self.__del__ = functools.partial(reclaim_queue.append, self.cleanup)
        reclaim_queue.leased.add(self.cleanup)
        self.nbytes = buffer.memory.numel()
        self.load: Load | None = None
        self.skew = 0
        self.ahead = False
        self.blocks = 1
        self.wanted = 0

    @property
    def tier(self) -> str:
        """See :attr:`Backing.tier`."""
        return "host" if self.cleanup.buffer is not None else "disk"

    def read_separately(
        self, offset: int, address: int, nbytes: int, device: torch.device
    ) -> tuple[Tensor, int]:
        """See :meth:`Backing.read_separately`. The host waits for the copies."""
        below = self.cleanup
        while (buffer := below.buffer) is not None:
            if below.written is not None:
                below.written.wait()
            memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
            memory.copy_(buffer.memory)
            if below.buffer is buffer:  # else the buffer was given to another block meanwhile
                return memory, 0
        slot, store = below.slot, self.store
        assert slot is not None and store is not None
        staged, low = own_memory(nbytes, 0)
        store.read(slot, staged.data_ptr() + low)
        memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
        memory.copy_(staged[low : low + nbytes])
        return memory, 0

    def storage_for(
        self, offset: int, address: int, nbytes: int, memory: Tensor
    ) -> tuple[Tensor, int]:
        """See :meth:`Backing.storage_for`: the memory itself."""
        self.wanted = 0
        return memory, 0


class BufferLoad(Load):
    """A load of bytes to the device from the host buffer that has them. The backing keeps the buffer.

    Args:
        copy: the copy to the device, which has begun.
    """

    __slots__ = ("arrival", "memory")
    work = None
    is_ready = True

    def __init__(self, copy: Copy) -> None:
        self.arrival = copy
        self.memory = copy.memory

    def exception(self) -> None:
        """See :meth:`Load.exception`: ``None``, since nothing was read."""


class HostLoad(Load):
    """A load of bytes from disk to a host buffer, and from there to the device.

    The buffer is released when it is no longer needed.

    Args:
        device: the device to load to.
        section: the critical section of the stash.
        cleanup: holds that buffer, and receives the read and the copy.
        read: reads the bytes to ``staged``.
        staged: host memory.
        ahead: whether a worker makes ``read``.
    """

    __slots__ = (
        "__del__",
        "__weakref__",
        "_ahead",
        "_copy",
        "_device",
        "_section",
        "_staged",
        "cleanup",
        "read",
        "work",
    )
    __del__: Callable[[], None]

    def __init__(
        self,
        device: Device,
        section: CriticalSection,
        reclaim_queue: ReclaimQueue,
        cleanup: HostCleanup,
        read: Work,
        staged: Tensor,
        *,
        ahead: bool,
    ) -> None:
        self.cleanup = cleanup
        self.__del__ = functools.partial(reclaim_queue.append, cleanup)
        reclaim_queue.leased.add(cleanup)
        cleanup.work = read
        self.read = read
        self._device = device
        self._section = section
        self._ahead = ahead
        self._staged = staged
        self._copy: Copy | None = None
        self.work: Work | None = read

    @property
    def arrival(self) -> Copy | None:  # type: ignore[override]
        """The copy to the device, once it has begun."""
        return self._copy

    @property
    def memory(self) -> Tensor:  # type: ignore[override]
        """See :attr:`Load.memory`: the bytes on the device."""
        assert self._copy is not None
        return self._copy.memory

    @property
    def is_ready(self) -> bool:
        """See :attr:`Load.is_ready`: the device orders each use of the memory after the copy."""
        return self._copy is not None

    def send(self) -> None:
        """Begin the copy to the device, if it has not begun. The caller holds the lock."""
        if self._copy is None:
            copy = self._device.up(self._staged, None)
            self.cleanup.brought = copy.completion
            self._copy = copy

    def arrive(self) -> bool:
        """Wait until the bytes are on the device, if that is possible. The caller holds the lock.

        Does not wait for a read that another thread makes itself, since that thread may be waiting for the
        caller.
        """
        if self._copy is None:
            if not self._ahead or self.read.exception() is not None:
                return False
            try:
                self.send()
            except torch.OutOfMemoryError:
                return False
            assert self._copy is not None
        self._copy.wait()
        return True

    def take_buffer(self) -> PinnedBuffer | None:
        """Take the buffer that the bytes were read to if the copy from it has ended; else return ``None``."""
        if self._copy is None or not self._copy.ended():
            return None
        buffer, self.cleanup.buffer = self.cleanup.buffer, None
        return buffer

    def has_come(self) -> bool:
        """Return whether the read from disk has ended without an error."""
        return self.read.finished and self.read.error is None

    def exception(self) -> BaseException | None:
        """See :meth:`Load.exception`. Begins the copy to the device, but does not wait for it."""
        error = self.read.exception()
        if error is not None:
            self.cleanup.work = (
                None  # it has ended, and once raised its error's frames own this load
            )
        elif self._copy is None:
            with self._section.lock:
                self.send()
        return error
