"""Reusable memory for bytes in transit: page-aligned mappings with huge pages.

A direct read into a fresh ``torch.empty`` reaches a third of the disk's speed, because the kernel maps 4 KiB
pages one by one. A private anonymous mapping with ``MADV_HUGEPAGE`` avoids that, and reusing a mapping costs
nothing. So buffers are mappings, and a mapping returns to the pool when the last tensor that uses it dies.

If the process runs on an allocator that reuses freed memory (tcmalloc, preloaded), that memory is already
resident, and the pool would only add to it. There, ``torch.empty`` is used instead.
"""

from __future__ import annotations

import functools
import mmap
import weakref
from collections import deque

import torch

from ._base import PAGE_BYTES

__all__ = ["BufferPool", "mapped", "own_memory", "preloaded_allocator"]

_HUGE_BYTES = 2 << 20
_HEAP_BYTES = 256 << 10  # from this size on tcmalloc returns whole pages
_ALLOCATORS = {  # by the beginning of the library's name
    "libtcmalloc": "tcmalloc",
    "libjemalloc": "jemalloc",
    "libmimalloc": "mimalloc",
    "libtbbmalloc_proxy": "tbb",
}


@functools.cache
def preloaded_allocator() -> str:
    """Return the allocator that replaces the C library's in this process; ``""`` if none is known."""
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
            mapped = maps.read()
    except OSError:
        return ""
    return next((name for file, name in _ALLOCATORS.items() if file in mapped), "")


def _class_of(nbytes: int) -> int:
    """Return the size of the mapping for ``nbytes``, chosen so that similar sizes share mappings."""
    if nbytes >= _HUGE_BYTES:
        return -(-nbytes // _HUGE_BYTES) * _HUGE_BYTES
    return max(PAGE_BYTES, 1 << (nbytes - 1).bit_length())


def _map(nbytes: int) -> mmap.mmap:
    if not hasattr(mmap, "MAP_PRIVATE"):
        return mmap.mmap(-1, nbytes)
    mapping = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if nbytes >= _HUGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            mapping.madvise(mmap.MADV_HUGEPAGE)
        except OSError:  # a kernel without huge pages: slower, but the same bytes
            pass
    return mapping


def mapped(nbytes: int) -> torch.Tensor:
    """Return a flat ``uint8`` tensor of exactly ``nbytes`` (whole pages) in a new mapping with huge pages.

    Raises ``MemoryError`` if the system has no memory.
    """
    try:
        mapping = _map(nbytes)
        if hasattr(mmap, "MADV_DONTFORK"):
            mapping.madvise(
                mmap.MADV_DONTFORK
            )  # a device writes here: no child may share the pages
        return torch.frombuffer(memoryview(mapping), dtype=torch.uint8)
    except OSError as error:
        raise MemoryError(f"no memory for {nbytes} bytes: {error}") from error


def own_memory(nbytes: int, address: int) -> tuple[torch.Tensor, int]:
    """Return a new flat ``uint8`` tensor outside any pool, and the offset in it at which ``nbytes`` are
    aligned like ``address``, modulo a page."""
    memory = torch.empty(nbytes + PAGE_BYTES, dtype=torch.uint8, device="cpu")
    return memory, (address - memory.data_ptr()) % PAGE_BYTES


class BufferPool:
    """Provides page-aligned ``uint8`` tensors, and keeps up to ``idle_bytes`` of freed ones for reuse.

    The caller holds its lock.

    Args:
        idle_bytes: the most bytes that are kept for reuse; more are returned to the system.
    """

    def __init__(self, *, idle_bytes: int) -> None:
        self._idle_limit = idle_bytes
        self._heap_reuses = preloaded_allocator() == "tcmalloc"
        self._idle_bytes = 0
        self._idle: dict[int, list[mmap.mmap]] = {}
        self._lent: dict[int, tuple[weakref.ref[memoryview], mmap.mmap]] = {}
        self._back: deque[weakref.ref[memoryview]] = deque()

    @property
    def idle_bytes(self) -> int:
        """Bytes that are kept for reuse."""
        self._collect()
        return self._idle_bytes

    def take(self, nbytes: int) -> torch.Tensor:
        """Return a one-dimensional ``uint8`` CPU tensor of at least ``nbytes``, page-aligned, not zeroed.

        Its mapping returns to the pool when the last tensor that shares its storage is gone. Raises
        ``MemoryError`` if the system has no memory.
        """
        self._collect()
        if self._heap_reuses and nbytes >= _HEAP_BYTES:
            memory = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
            if memory.data_ptr() % PAGE_BYTES == 0:
                return memory
        size = _class_of(nbytes)
        waiting = self._idle.get(size)
        if waiting:
            mapping = waiting.pop()
            self._idle_bytes -= size
        else:
            try:
                mapping = _map(size)
            except OSError as error:
                raise MemoryError(f"no memory for a buffer of {size} bytes: {error}") from error
        view = memoryview(mapping)
        # The callback may run on any thread at any point of a program, so it only appends.
        ref = weakref.ref(view, self._back.append)
        self._lent[id(ref)] = ref, mapping
        return torch.frombuffer(view, dtype=torch.uint8)

    def restore(self) -> None:
        """Repair the state that an interrupted call left."""
        self._collect()
        for key in [key for key, (view, _) in self._lent.items() if view() is None]:
            del self._lent[key]
        self._idle_bytes = sum(size * len(idle) for size, idle in self._idle.items())

    def trim(self) -> None:
        """Return every idle mapping to the system."""
        self._collect()
        self._idle.clear()
        self._idle_bytes = 0

    def _collect(self) -> None:
        while self._back:
            lent = self._lent.pop(id(self._back[0]), None)
            self._back.popleft()
            if lent is None:  # an interrupt came before the entry was stored
                continue
            mapping = lent[1]
            size = len(mapping)
            if self._idle_bytes + size <= self._idle_limit:
                self._idle.setdefault(size, []).append(mapping)
                self._idle_bytes += size
