"""Giving freed memory back to the system, inside somebody else's process.

glibc keeps what is freed: after a forward pass whose tensors all went to disk, most of their memory can
still be resident. ``malloc_trim`` returns it. That changes no setting of the process, and costs some
milliseconds and the page faults of the next user of the memory, so it is done once for every so many
bytes let go, on a worker thread. Other allocators reuse what is freed and are left alone, but where a budget
for the process's memory would be exceeded: then :meth:`Trimmer.release` has them give back what is free.

The heap is also advised to lie in huge pages (``madvise``), which is no setting either: what was given back
and is used again then costs a page fault for each 2 MiB instead of each 4 KiB. The advice is of the addresses
that the heap has, and is repeated as the heap grows.

Under ``backstash run``, which owns its process, glibc is also set up for large steps
(:attr:`Trimmer.may_tune`): tensors come from one heap in huge pages, which keeps what is freed and uses it
again. That happens at the first trim, so a program that moves little keeps the allocator that it has.

``BACKSTASH_TRIM`` in the environment is the number of bytes between two trims (``"256MiB"``); ``0``
never trims or advises. ``docs/explanation/memory.md`` compares allocators.

Two other rules were tried. Trimming only where resident memory exceeds what it was after any earlier trim
saves few page faults: right after a trim the least is resident, and each step grows beyond that. Without
trimming, a step of a ResNet spent 0.20 instead of 0.59 seconds in the kernel, and its peak was a fifth higher.
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
# mallopt: no tensor is mapped by itself, the heap never shrinks by itself, and grows by 64 MiB.
_TUNED = {"M_MMAP_MAX": (-4, 0), "M_TRIM_THRESHOLD": (-1, -1), "M_TOP_PAD": (-2, 64 << 20)}


class Trimmer:
    """Counts bytes that were let go; now and then advises the heap of huge pages, and trims.

    Args:
        submit: runs a function on a worker.

    Raises:
        SizeError: ``BACKSTASH_TRIM`` is no size.
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
        """Whether glibc may be set, for the rest of the process, to use again what is freed."""

    def freed(self, nbytes: int) -> None:
        """``nbytes`` were let go, or are about to be."""
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
        """Have the allocator give back what is free, in this call: some milliseconds."""
        if self._release is not None:
            self._freed = 0
            self._release(0)


class _Heap:
    """The addresses that the C library's main heap takes by ``sbrk``, from ``start`` on."""

    def __init__(self, libc: Any, start: int) -> None:
        self._libc = libc
        self._start = start

    @classmethod
    def find(cls, maps: str = "/proc/self/maps") -> _Heap | None:
        """This process's; ``None`` where there is none, or where nothing can be advised."""
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
        """Ask for huge pages wherever the heap has come to; a system that has none refuses."""
        end = self._libc.sbrk(0) or 0
        if end > self._start:  # all of it: where it shrank and grew again, the advice is gone
            self._libc.madvise(self._start, end - self._start, mmap.MADV_HUGEPAGE)


def _tune() -> None:
    """Set glibc; a variable of the environment that sets the same is left alone."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return
    for name, (parameter, value) in _TUNED.items():
        if f"{name.replace('M_', 'MALLOC_', 1)}_" not in os.environ:
            mallopt(parameter, value)


def _malloc_trim() -> Callable[[int], Any] | None:
    """glibc's ``malloc_trim``, where glibc is what allocates and gives nothing back by itself."""
    if preloaded_allocator() or "MALLOC_MMAP_THRESHOLD_" in os.environ:
        return None
    try:
        trim: Callable[[int], Any] = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError, TypeError):
        return None
    return trim


def _release_of(allocator: str) -> Callable[[int], Any] | None:
    """The call by which a preloaded allocator gives back what is free; its argument is 0."""
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
    except (OSError, AttributeError, TypeError):  # another version of it: nothing is given back
        pass
    return None
