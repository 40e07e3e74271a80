"""Return freed memory to the operating system.

glibc keeps freed memory: after a forward pass whose tensors all went to disk, most of their memory can still
be resident. ``malloc_trim`` returns it. That changes no setting of the process. It costs some milliseconds,
and page faults for the next user of the memory. So a worker thread calls it once for every 256 MiB that were
freed. Other allocators reuse freed memory and are not trimmed, unless a budget for the process's memory would
be exceeded: then :meth:`Trimmer.release` makes them return what is free.

The stash also advises the heap to use huge pages (``madvise``), which changes no setting either. Memory that
was returned and is used again then costs one page fault for 2 MiB instead of 4 KiB. The advice is for the
current addresses of the heap, so it is repeated as the heap grows.

``backstash run`` owns its process, and there glibc is also configured for large steps
(:attr:`Trimmer.may_tune`): all tensors come from one heap in huge pages, which keeps freed memory and reuses
it. That happens at the first trim, so a program that moves little keeps the default configuration.

The environment variable ``BACKSTASH_TRIM`` sets the number of bytes between two trims (``"256MiB"``); ``0``
turns off trimming and the advice. ``docs/explanation/memory.md`` compares allocators.

Two alternatives were tried. Trimming only if resident memory exceeds what it was after an earlier trim saves
few page faults: resident memory is lowest right after a trim, and each step grows beyond that. Without
trimming, a step of a ResNet spent 0.20 instead of 0.59 seconds in the kernel, but its peak was a fifth higher.
The default has the lower peak.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable
from typing import Any

from ..stores._buffer_pool import preloaded_allocator
from ..units import parse_bytes

__all__ = ["Trimmer"]

_EVERY_BYTES = 256 << 20
_ADVISE_EVERY_BYTES = 64 << 20
# mallopt: never map a tensor separately, never shrink the heap automatically, and grow it by 64 MiB.
_TUNED = {"M_MMAP_MAX": (-4, 0), "M_TRIM_THRESHOLD": (-1, -1), "M_TOP_PAD": (-2, 64 << 20)}


class Trimmer:
    """Counts freed bytes. From time to time, advises the heap to use huge pages, and trims it.

    Args:
        submit: runs a function on a worker.

    Raises:
        SizeError: ``BACKSTASH_TRIM`` is not a size.
    """

    def __init__(self, submit: Callable[..., Any]) -> None:
        self._submit = submit
        self._every = parse_bytes(
            os.environ.get("BACKSTASH_TRIM", _EVERY_BYTES), name="BACKSTASH_TRIM"
        )
        self._trim = _malloc_trim() if self._every else None
        self._release = self._trim or (_release_of(preloaded_allocator()) if self._every else None)
        self._heap = _Heap.find() if self._trim else None
        self._freed = 0
        self._freed_since_advice = 0
        self.may_tune = False
        """Whether glibc may be configured, for the rest of the process, to reuse freed memory."""

    def freed(self, nbytes: int) -> None:
        """Count ``nbytes`` that were freed, or are about to be."""
        if self._trim is None:
            return
        self._freed += nbytes
        self._freed_since_advice += nbytes
        if self._heap is not None and self._freed_since_advice >= _ADVISE_EVERY_BYTES:
            self._freed_since_advice = 0
            self._heap.advise()
        if self._freed >= self._every:
            self._freed = 0
            if self.may_tune:
                self.may_tune = False
                _tune()
            self._submit(self._trim, 0)

    def release(self) -> None:
        """Make the allocator return its free memory, within this call. Takes some milliseconds."""
        if self._release is not None:
            self._freed = 0
            self._release(0)


class _Heap:
    """The addresses, from ``start`` on, that the C library's main heap takes by ``sbrk``."""

    def __init__(self, libc: Any, start: int) -> None:
        self._libc = libc
        self._start = start

    @classmethod
    def find(cls, maps: str = "/proc/self/maps") -> _Heap | None:
        """Return this process's heap; ``None`` if there is none or ``madvise`` is unavailable."""
        try:
            with open(maps, encoding="utf-8", errors="replace") as lines:
                start = next(int(line.partition("-")[0], 16) for line in lines if "[heap]" in line)
            libc = ctypes.CDLL(None)
            libc.sbrk.restype = ctypes.c_void_p
            libc.sbrk.argtypes = [ctypes.c_ssize_t]
            libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
            return cls(libc, start)
        except (OSError, StopIteration, AttributeError, TypeError):
            return None

    def advise(self) -> None:
        """Ask for huge pages for the whole heap. A system without them ignores or refuses the request."""
        end = self._libc.sbrk(0) or 0
        if end > self._start:  # all of it: regrown parts have lost the advice
            self._libc.madvise(self._start, end - self._start, mmap.MADV_HUGEPAGE)


def _tune() -> None:
    """Configure glibc. An environment variable that sets the same parameter takes precedence."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return
    for name, (parameter, value) in _TUNED.items():
        if f"{name.replace('M_', 'MALLOC_', 1)}_" not in os.environ:
            mallopt(parameter, value)


def _malloc_trim() -> Callable[[int], Any] | None:
    """Return glibc's ``malloc_trim``, if glibc is the allocator and is not set to return memory on its own."""
    if preloaded_allocator() or "MALLOC_MMAP_THRESHOLD_" in os.environ:
        return None
    try:
        trim: Callable[[int], Any] = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError, TypeError):
        return None
    return trim


def _release_of(allocator: str) -> Callable[[int], Any] | None:
    """Return the function that makes a preloaded allocator return its free memory. Its argument is 0."""
    try:
        process = ctypes.CDLL(None)
        if allocator == "tbb":  # oneTBB: TBBMALLOC_CLEAN_ALL_BUFFERS is 0
            process.scalable_allocation_command.argtypes = [ctypes.c_int, ctypes.c_void_p]
            return lambda _: process.scalable_allocation_command(0, None)
        if allocator == "tcmalloc":  # gperftools' malloc_extension_c.h
            release = process.MallocExtension_ReleaseFreeMemory
            release.argtypes, release.restype = [], None
            return lambda _: release()
        if allocator == "mimalloc":
            collect = process.mi_collect
            collect.argtypes, collect.restype = [ctypes.c_bool], None
            return lambda _: collect(True)
        if allocator == "jemalloc":  # 4096 is MALLCTL_ARENAS_ALL
            process.mallctl.argtypes = [ctypes.c_char_p, *[ctypes.c_void_p] * 3, ctypes.c_size_t]
            return lambda _: process.mallctl(b"arena.4096.purge", None, None, None, 0)
    except (OSError, AttributeError, TypeError):  # another version of it: no memory is returned
        pass
    return None
