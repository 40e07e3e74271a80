"""What this process holds, by the system's account and by Python's."""

from __future__ import annotations

import ctypes
import gc
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from backstash import Disk, Stash

from .footprint import footprint

__all__ = ["Held", "anonymous_bytes", "held"]


def _trim() -> Callable[[int], Any]:
    trim: Callable[[int], Any] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return trim or (lambda _: None)


def anonymous_bytes() -> int:
    """Resident memory of the process that no file is behind, after all that can be given back was."""
    gc.collect()
    _trim()(0)
    with open("/proc/self/status", encoding="ascii") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("RssAnon:"))


@dataclass(frozen=True, slots=True)
class Held:
    """One moment of a process with a stash."""

    anonymous_bytes: int
    """Resident, after ``malloc_trim``."""
    descriptors: int
    """That are open."""
    threads: int
    """Of the process, the system's count."""
    objects: int
    """Python objects that the garbage collector knows."""
    bookkeeping: int
    """Python objects that the stash reaches."""
    host_bytes: int
    """Pinned slabs of the stash."""
    file_bytes: int
    """Size of the extent file."""
    file_block_bytes: int
    """What the file system has allocated for it."""


def held(stash: Stash) -> Held:
    """This moment."""
    stash.stats()  # settles what died
    store = stash._store
    file = os.fstat(store._file.fd) if isinstance(store, Disk) else None
    anonymous = anonymous_bytes()
    return Held(
        anonymous_bytes=anonymous,
        descriptors=len(os.listdir("/proc/self/fd")),
        threads=len(os.listdir("/proc/self/task")),
        objects=len(gc.get_objects()),
        bookkeeping=footprint(stash)[0],
        host_bytes=sum(pool.slab_bytes for pool in stash._config.pools),
        file_bytes=file.st_size if file else 0,
        file_block_bytes=file.st_blocks * 512 if file else 0,
    )
