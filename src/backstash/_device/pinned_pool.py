"""The host tier's memory: buffers in a few large slabs of pinned memory, within a budget of actual bytes.

PyTorch rounds a pinned allocation up to a power of two, and its first use costs milliseconds. A slab is mapped
once with huge pages and registered with the device, and its buffers are reused for any shape. So the budget
counts actual bytes, and buffers begin at page boundaries, from where direct writes to disk need no copy. If
existing memory cannot be registered (only CUDA can, and not everywhere), the slab is one pinned allocation of
PyTorch's, of a power of two, so that nothing is rounded.

A released buffer stays as it is for the next request of its size, since a step mostly requests what the step
before released. Other sizes get its memory only if no slab has space otherwise.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from ..stores._base import PAGE_BYTES
from ..stores._buffer_pool import mapped
from ..stores._leases import Leases

__all__ = ["PinnedBuffer", "PinnedPool", "Pins"]

_SLAB_BYTES = 256 << 20


class Pins(Protocol):
    """Pins host memory: an accelerator's device (see ``_device/accelerator.Device``)."""

    def pin(self, memory: Tensor) -> str:
        """Page-lock a slab's memory. Return why that was refused, or ``""``."""

    def unpin(self, memory: Tensor) -> None:
        """Undo :meth:`pin` after every copy has ended. May be called for memory that is not pinned."""

    def pinned(self, nbytes: int) -> Tensor | str:
        """Return ``nbytes`` (a power of two) of pinned memory, or why there is none."""

    def give_back(self, memory: Tensor) -> None:
        """Free the memory that :meth:`pinned` returned, after every copy has ended."""


class _Slab:
    """Memory that was pinned in one piece, and its taken extents. It is unpinned when the slab is freed."""

    __slots__ = ("__weakref__", "free", "leases", "memory")

    def __init__(self, memory: Tensor, undo: Callable[[Tensor], None]) -> None:
        self.memory = memory
        self.leases = Leases(unit_bytes=PAGE_BYTES)
        self.free = weakref.finalize(self, undo, memory)

    def take(self, nbytes: int) -> PinnedBuffer | None:
        buffer = PinnedBuffer(self)
        offset = self.leases.take(buffer, nbytes)
        if self.leases.extents.end_bytes <= self.memory.numel():
            buffer.offset, buffer.memory = offset, self.memory[offset : offset + nbytes]
            return buffer
        self.leases.free(offset)
        return None


class PinnedBuffer:
    """A part of a slab. ``memory`` is its bytes, a flat ``uint8`` tensor that begins at a page."""

    __slots__ = ("__weakref__", "memory", "offset", "slab")

    def __init__(self, slab: _Slab) -> None:
        self.slab = slab
        self.offset: int  # set, like memory, once the extent is taken
        self.memory: Tensor


class PinnedPool:
    """Buffers of pinned memory. The caller holds its lock.

    Args:
        budget: the most bytes of all slabs; ``None``: no limit. A function is called now and before each new
            slab. It returns how many bytes the slabs may grow by.
        pins: pins the slabs.
    """

    def __init__(self, budget: int | Callable[[], int] | None, pins: Pins) -> None:
        self._more = budget if callable(budget) else None
        self.budget = budget() if callable(budget) else budget
        self._unasked_bytes = 0  # requested in vain since the last call of the function
        self._pins = pins
        self._slabs: list[_Slab] = []
        self._idle: dict[int, list[PinnedBuffer]] = {}  # released buffers, by size
        self._idle_bytes = 0  # of these, in whole pages
        self.slab_peak_bytes = 0
        self.note = ""
        self.refusal = ""  # why the system had no memory at the last request

    @property
    def slab_bytes(self) -> int:
        """Bytes of all slabs."""
        return sum(slab.memory.numel() for slab in self._slabs)

    @property
    def used_bytes(self) -> int:
        """Bytes of all buffers in use, in whole pages."""
        return sum(slab.leases.extents.used_bytes for slab in self._slabs) - self._idle_bytes

    def could_hold(self, nbytes: int) -> bool:
        """Return whether ``nbytes`` are within the budget."""
        if self.budget is None:
            return True
        needed = _pages(nbytes)
        if needed > self.budget:
            self._ask(needed)
        return needed <= self.budget

    def take(self, nbytes: int, *, may_grow: bool = True) -> PinnedBuffer | None:
        """Return a buffer for ``nbytes``, or ``None`` if the budget or the system has none.

        ``may_grow=False`` uses only memory that is already pinned.
        """
        idle = self._idle.get(nbytes)
        if idle:
            self._idle_bytes -= _pages(nbytes)
            return idle.pop()
        buffer = self._cut(nbytes)
        if buffer is None and self._idle:
            self._free_idle()
            buffer = self._cut(nbytes)
        if buffer is not None or not may_grow:
            return buffer
        added = self._add_slab(nbytes)
        return added.take(nbytes) if added is not None else None

    def _cut(self, nbytes: int) -> PinnedBuffer | None:
        for slab in self._slabs:
            if slab.memory.numel() - slab.leases.extents.used_bytes < nbytes:
                continue
            buffer = slab.take(nbytes)
            if buffer is not None:
                return buffer
        return None

    def give(self, buffer: PinnedBuffer) -> None:
        """Take a buffer back. Nothing may read or write it any more."""
        nbytes = buffer.memory.numel()
        self._idle.setdefault(nbytes, []).append(buffer)
        self._idle_bytes += _pages(nbytes)

    def _free_idle(self) -> None:
        """Free released buffers, so that their memory can be cut for other sizes."""
        idle, self._idle, self._idle_bytes = self._idle, {}, 0
        for buffers in idle.values():
            for buffer in buffers:
                buffer.slab.leases.free(buffer.offset)

    def settle(self) -> None:
        """Take back buffers whose owners have died: see :class:`Leases`."""
        for slab in self._slabs:
            slab.leases.settle()

    def restore(self) -> None:
        """Repair the counts after an interrupt."""
        self._free_idle()
        self.settle()

    def trim(self) -> None:
        """Unpin and free every slab without buffers."""
        self._free_idle()
        for slab in [slab for slab in self._slabs if not slab.leases.extents.used_bytes]:
            self._slabs.remove(slab)
            slab.free()

    def _add_slab(self, nbytes: int) -> _Slab | None:
        least = _pages(nbytes)
        size = max(least, _SLAB_BYTES)
        self._ask(least)
        if self.budget is not None:
            if self.budget - self.slab_bytes < least:
                self.trim()  # empty slabs of sizes that are no longer requested
            size = min(size, (self.budget - self.slab_bytes) // PAGE_BYTES * PAGE_BYTES)
            if size < least:
                return None
        try:
            memory = mapped(size)
        except MemoryError as error:
            self.refusal = str(error)
            return None
        self.refusal, undo = "", self._pins.unpin
        try:
            refusal = self._pins.pin(memory)
            own = self._pinned(size, least, refusal) if refusal else None
            if own is not None:
                memory, undo = own, self._pins.give_back
            slab = _Slab(memory, undo)
        except BaseException:  # an interrupt may come after the memory was pinned
            undo(memory)
            raise
        self._slabs.append(slab)
        self.slab_peak_bytes = max(self.slab_peak_bytes, self.slab_bytes)
        return slab

    def _pinned(self, size: int, least: int, refusal: str) -> Tensor | None:
        """Return pinned memory of about ``size`` in place of memory that could not be pinned, or ``None``."""
        rounded = 1 << (size - 1).bit_length()
        if self.budget is not None and self.slab_bytes + rounded > self.budget:
            rounded //= 2
        too_large = "the budget allows no power of two that is large enough"
        own = self._pins.pinned(rounded) if rounded >= least else too_large
        if isinstance(own, Tensor) and own.data_ptr() % PAGE_BYTES:
            own = "its memory is not page-aligned"
        if isinstance(own, str):
            why = f"{refusal}; PyTorch's allocator: {own}"
            self.note = (
                self.note
                or f"host memory is not pinned ({why}): copies do not overlap with compute"
            )
            return None
        self.note = self.note or f"host memory is pinned by PyTorch's allocator ({refusal})"
        return own

    def _ask(self, nbytes: int) -> None:
        """Update a budget that follows the system's spare memory.

        This does not happen at each request without a buffer: a pool may be full for long, and a query takes
        0.2 ms.
        """
        if self._more is None or self.budget is None:
            return
        self._unasked_bytes += nbytes
        if nbytes <= self.budget - self.slab_bytes or self._unasked_bytes >= _SLAB_BYTES:
            self._unasked_bytes = 0
            self.budget = self.slab_bytes + max(0, self._more())


def _pages(nbytes: int) -> int:
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES
