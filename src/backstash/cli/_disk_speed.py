"""Measure how fast a directory's disk is, with the store that a stash would use."""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from ..stores import Disk, Slot

__all__ = ["DiskSpeed", "has_unnamed_files", "measure"]

_SLOT_BYTES = 16 << 20
_HUGE_PAGE_BYTES = 2 << 20
_MOST_SECONDS = 6.0  # for one pass: a slow disk is measured on fewer bytes


@dataclass(frozen=True, slots=True)
class DiskSpeed:
    """One directory's measured speed."""

    nbytes: int
    """Number of bytes that each figure was measured on."""
    first_write_bytes_per_second: float
    """Rate of writing to space that the file system has only just allocated."""
    write_bytes_per_second: float
    """Rate of overwriting bytes, as every step after the first does."""
    read_bytes_per_second: float
    """Rate of reading back, bypassing the page cache if direct I/O works."""
    direct: bool
    """Whether direct I/O works."""
    unnamed: bool
    """Whether the file system can create files without a name."""
    notes: tuple[str, ...]
    """The store's fallbacks, with reasons."""


def measure(directory: str, nbytes: int) -> DiskSpeed:
    """Write, overwrite and read back up to ``nbytes`` in ``directory``, and leave nothing there.

    Args:
        directory: an existing, writable directory.
        nbytes: most bytes to write; at least 16 MiB are written.

    Raises:
        StashIOError: no file can be created in the directory, or it is full.
    """
    disk = Disk(directory)
    try:
        with _random_bytes(_SLOT_BYTES) as address:
            slots = [disk.reserve(_SLOT_BYTES) for _ in range(max(1, nbytes // _SLOT_BYTES))]
            slots, first = _timed(disk.write, slots, address, disk.threads)
            slots, again = _timed(disk.write, slots, address, disk.threads)
            slots, read = _timed(disk.read, slots, address, disk.threads)
        unnamed = has_unnamed_files(directory)
        total = len(slots) * _SLOT_BYTES
        return DiskSpeed(total, first, again, read, disk.direct, unnamed, disk.notes)
    finally:
        disk.close()


def has_unnamed_files(directory: str) -> bool:
    """Whether ``directory``'s file system can create files that never have a name."""
    try:
        os.close(os.open(directory, os.O_RDWR | os.O_TMPFILE, 0o600))
    except (OSError, AttributeError):
        return False
    return True


@contextmanager
def _random_bytes(nbytes: int) -> Iterator[int]:
    """Yield the address of ``nbytes`` of random bytes, which a disk cannot compress, in huge pages if
    possible."""
    memory = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(AttributeError, OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    for _ in range(nbytes // _HUGE_PAGE_BYTES):
        memory.write(os.urandom(_HUGE_PAGE_BYTES))
    yield ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _timed(
    move: Callable[[Slot, int], None],
    slots: list[Slot],
    address: int,
    threads: int,
) -> tuple[list[Slot], float]:
    """Move the slots until the time is up; return the moved ones, and bytes per second."""
    started = time.perf_counter()
    done: list[Slot] = []
    for at in range(0, len(slots), threads):
        # All threads share one source and target: the disk is measured, not the contents.
        part = slots[at : at + threads]
        _at_once([functools.partial(move, slot, address) for slot in part])
        done += part
        if time.perf_counter() - started > _MOST_SECONDS:
            break
    return done, len(done) * _SLOT_BYTES / (time.perf_counter() - started)


def _at_once(calls: Sequence[Callable[[], None]]) -> None:
    """Make each call in a thread of its own; raise the error of one that failed.

    ``concurrent.futures`` accepts no work once the interpreter has begun to end.
    """
    errors: list[BaseException] = []

    def make(call: Callable[[], None]) -> None:
        try:
            call()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=make, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
