"""The windows of ``inflight="auto"`` and ``prefetch="auto"``, which follow the size of a step.

A window lets disk transfers overlap computation. If a step saves little, a fixed window of 128 MiB holds all
of it, and the step's peak is plain PyTorch's plus the memory that is read into. So a window is an eighth
of what a step has saved, which overlaps the same share of a small step as of a large one.
"""

from __future__ import annotations

from .ahead import AheadSet
from .inflight import InflightWrites

__all__ = ["LEAST_BYTES", "MOST_BYTES", "FollowingWindows"]

MOST_BYTES = 128 << 20
"""The upper limit of each window."""
LEAST_BYTES = 4 << 20
"""The lower limit of each window: the size of one segment of small blocks."""
_PART = 8  # a window is this fraction of what a step saves


class FollowingWindows:
    """Sets the windows of one device's tiers as blocks are saved. The caller holds the stash's lock.

    Args:
        inflight: has the window for writes; ``None`` if the caller fixed its size.
        ahead: has the window for loads; ``None`` if the caller fixed its size.
    """

    def __init__(self, inflight: InflightWrites | None, ahead: AheadSet | None) -> None:
        self._windows = [each for each in (inflight, ahead) if each is not None]
        self._saved_bytes = self._largest_bytes = 0  # of this step: all blocks, and the largest
        self._most_saved_bytes = self._most_largest_bytes = 0  # of this step or the last
        self._set()

    def saved(self, nbytes: int) -> None:
        """Record that a block of ``nbytes`` was saved."""
        self._saved_bytes += nbytes
        self._largest_bytes = max(self._largest_bytes, nbytes)
        if self._saved_bytes > self._most_saved_bytes or nbytes > self._most_largest_bytes:
            self._most_saved_bytes = max(self._most_saved_bytes, self._saved_bytes)
            self._most_largest_bytes = max(self._most_largest_bytes, nbytes)
            self._set()

    def begin_step(self) -> None:
        """Begin a step. The windows stay as in the last step until this one saves more."""
        self._most_saved_bytes, self._saved_bytes = self._saved_bytes, 0
        self._most_largest_bytes, self._largest_bytes = self._largest_bytes, 0
        self._set()

    def _set(self) -> None:
        least = max(LEAST_BYTES, 2 * self._most_largest_bytes)
        nbytes = min(MOST_BYTES, max(least, self._most_saved_bytes // _PART))
        for each in self._windows:
            each.window_bytes = nbytes
