"""Steps that save too little to be worth moving: they stay in memory, as PyTorch has it.

Moving takes memory as well: two windows, and pieces that the C library's allocator cannot use again. Where a
step saves less than that, it is better left alone. What a step saves is known at its end. So the first step is
held in blocks that may still leave, and so is one that saves more than the last; a step like a small one before
it keeps a few blocks, which tell where the step is, and the rest costs what it costs without a stash.
"""

from __future__ import annotations

from .resident import ResidentSet

__all__ = ["SMALL_STEP_BYTES", "SmallSteps"]

SMALL_STEP_BYTES = 96 << 20
"""What ``backstash run`` takes for too little: moving less took more memory than it freed in most programs of
``scripts/gallery``."""
_ANCHORS = 3  # blocks of a step before the rest is left alone


class SmallSteps:
    """Sets the limit of one device's resident set by what its steps save. The caller holds the stash's lock.

    Args:
        resident: whose limit is ``most_bytes`` while steps are small, and else 0.
        most_bytes: what a small step saves at most.
    """

    def __init__(self, resident: ResidentSet, most_bytes: int) -> None:
        self._resident = resident
        self.most_bytes = most_bytes
        self._last_bytes = (
            self._bytes
        ) = -1  # that the last step and this one saved; -1: there was none
        self._blocks = 0  # of this step
        resident.set_limit(most_bytes)

    @property
    def is_small(self) -> bool:
        """Whether this step is taken for a small one, as the last was."""
        return max(self._last_bytes, self._bytes) <= self.most_bytes

    def saved(self, nbytes: int, *, is_block: bool = True) -> None:
        """Bytes were saved in this step, as a block or as they are."""
        self._bytes += nbytes
        self._blocks += is_block
        if self._bytes > self.most_bytes:
            self._resident.set_limit(0)

    def begin_step(self) -> None:
        """A step begins, and no block of those before is alive: what was left in place with it may be, too."""
        self._last_bytes, self._bytes, self._blocks = self._bytes, 0, 0
        self._resident.set_limit(self.most_bytes if self.is_small else 0)

    def may_leave_bytes(self, threads: int) -> int:
        """How many bytes each of so many threads may save as they are before this is asked again; -1: none."""
        if self._last_bytes < 0 or not self.is_small or self._blocks < _ANCHORS:
            return -1
        return (self.most_bytes - self._bytes) // threads
