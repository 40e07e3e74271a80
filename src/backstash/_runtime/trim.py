"""Giving freed memory back to the system, inside somebody else's process.

glibc keeps what is freed: after a forward pass whose tensors all went to disk, most of their memory can
still be resident. ``malloc_trim`` returns it. That changes no setting of the process, and costs some
milliseconds and the page faults of the next user of the memory, so it is done once for every so many
bytes let go, on a worker thread. Other allocators reuse what is freed and are left alone.

``BACKSTASH_TRIM`` in the environment is the number of bytes between two trims (``"256MiB"``); ``0``
never trims. ``docs/design.md`` has what was measured.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from typing import Any

from ..stores._buffer_pool import preloaded_allocator
from ..units import parse_bytes

__all__ = ["Trimmer"]

_EVERY_BYTES = 256 << 20


class Trimmer:
    """Counts bytes that were let go and trims now and then.

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
        self._freed = 0

    def freed(self, nbytes: int) -> None:
        """``nbytes`` were let go, or are about to be."""
        if self._trim is None:
            return
        self._freed += nbytes
        if self._freed >= self._every:
            self._freed = 0
            self._submit(self._trim, 0)


def _malloc_trim() -> Callable[[int], Any] | None:
    """glibc's ``malloc_trim``, where glibc is what allocates and gives nothing back by itself."""
    if preloaded_allocator() or "MALLOC_MMAP_THRESHOLD_" in os.environ:
        return None
    try:
        trim: Callable[[int], Any] = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError, TypeError):
        return None
    return trim
