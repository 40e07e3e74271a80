"""Keep everything in memory in steps that save too little for moving to pay off.

Moving needs memory, too: two windows, and fragments that the C library's allocator cannot reuse. If a step
saves less than that, keeping its tensors in memory is better. How much a step saves is known only at its end.
So the first step is held in blocks that can still be evicted, and so is a step that saves more than the last
one. A step that follows a small step keeps only its first few blocks, which mark its position; the rest is
saved as without a stash.

Of small blocks a step may save twice as much: glibc takes them from its heap, and hardly reuses the gaps that
they leave. That was measured of one program (time_sequence in ``benchmarks/results/soak/gallery.txt``).
"""

from __future__ import annotations

from .resident import ResidentSet

__all__ = ["SMALL_STEP_BYTES", "SmallSteps"]

SMALL_STEP_BYTES = 96 << 20
"""The limit that ``backstash run`` uses for small steps: below it, moving took more memory than it freed in
most programs of ``scripts/gallery``."""
_SMALL_BLOCK = 128 << 10  # what glibc maps separately at first: M_MMAP_THRESHOLD
_ANCHORS = 3  # blocks at the beginning of a step, before the rest is kept without blocks


class SmallSteps:
    """Sets the limit of one device's resident set by what its steps save. The caller holds the stash's lock.

    Args:
        resident: the resident set. Its limit is what a small step may save while steps are small, and
            otherwise 0.
        most_bytes: the most bytes that a small step saves; twice that in small blocks.
    """

    def __init__(self, resident: ResidentSet, most_bytes: int) -> None:
        self._resident = resident
        self.most_bytes = most_bytes
        self._limit = most_bytes  # or twice that, by the blocks of the last step that saved many
        self._last_bytes = (
            self._bytes
        ) = -1  # bytes that the last step and this one saved; -1: there was none
        self._blocks = self._block_bytes = 0  # of this step
        resident.set_limit(most_bytes)

    @property
    def is_small(self) -> bool:
        """Whether this step counts as small so far, and so did the last one."""
        return max(self._last_bytes, self._bytes) <= self._limit

    def saved(self, nbytes: int, *, is_block: bool = True) -> None:
        """Record that bytes were saved in this step, with or without a block."""
        self._bytes += nbytes
        if is_block:
            self._blocks += 1
            self._block_bytes += nbytes
        if self._bytes > self.most_bytes:
            if self._blocks > _ANCHORS:
                are_small = self._block_bytes < _SMALL_BLOCK * self._blocks
                self._limit = self.most_bytes * (2 if are_small else 1)
            self._resident.set_limit(self._limit if self.is_small else 0)

    def begin_step(self) -> None:
        """Begin a step. No block of earlier steps is alive."""
        self._last_bytes, self._bytes = self._bytes, 0
        self._blocks = self._block_bytes = 0
        self._resident.set_limit(self._limit if self.is_small else 0)

    def may_leave_bytes(self, threads: int) -> int:
        """Return how many bytes each of ``threads`` may save without a block before asking again; -1: none."""
        if self._last_bytes < 0 or not self.is_small or self._blocks < _ANCHORS:
            return -1
        return (self._limit - self._bytes) // threads
