"""The resident set: which blocks stay in place within the ``keep`` budget, and which are evicted first.

The newest blocks stay, up to the limit; older blocks are evicted. On an accelerator copies begin some bytes
below the limit, but memory is freed only beyond the limit or if the device runs short of memory. A block that
is still in place when backward needs it need not be loaded.
"""

from __future__ import annotations

from .._device.memory import DeviceMemory
from .._runtime.trace import EventLog
from .._runtime.weak import WeakQueue
from .._saved.block import Block, BlockCleanup
from .._saved.placement import Lost, Resident
from .._torch.engine import current_node

__all__ = ["ResidentSet", "is_resident"]


class ResidentSet:
    """Counts the blocks that are in place. The caller holds the stash's lock.

    Args:
        event_log: receives events of blocks that are saved, return, or are lost.
        limit: the most bytes that stay in place; ``None``: no limit. May be changed.
        early: on an accelerator, how many bytes below ``limit`` copies begin.
        memory: the free memory of the accelerator; ``None`` on the CPU.
    """

    def __init__(
        self,
        event_log: EventLog,
        *,
        limit: int | None = 0,
        early: int = 0,
        memory: DeviceMemory | None = None,
    ) -> None:
        self.event_log = event_log
        self.limit = limit
        self._early = early
        self.memory = memory
        self._ceiling: int | None = (
            None  # the most that `limit` may become, once the device ran out of memory
        )
        self.short_bytes = 0  # bytes that the device lacked at the last check
        self.queue = WeakQueue[Block](is_resident)  # blocks that may be evicted, oldest first
        self.nbytes = self.peak_bytes = 0
        self.is_planned = False
        """Whether a plan decides what is evicted. Then no copy begins early or lingers in memory."""

    def admit(self, block: Block) -> None:
        """Add a new block, which is in place."""
        block.cleanup.resident_bytes = block.nbytes
        self.nbytes += block.nbytes
        if self.event_log.on and not block.entries:
            self.saved(block)

    def saved(self, block: Block) -> None:
        """Emit the event for a new block."""
        cause = "backward" if current_node() is not None else ""
        self.event_log.emit("save", *block.facts, cause=cause)

    def leave(self, block: Block) -> None:
        """Remove a block that is being written or is lost."""
        cleanup = block.cleanup
        self.nbytes -= cleanup.resident_bytes
        cleanup.resident_bytes = 0

    def take_back(self, block: Block) -> None:
        """Restore a block that could not be written. It stays in place."""
        alias = block.placement.alias
        assert alias is not None
        block.placement = Resident(alias)
        cleanup = block.cleanup
        self.nbytes += block.nbytes - cleanup.resident_bytes
        cleanup.resident_bytes = block.nbytes
        if self.event_log.on:
            self.event_log.emit("return", *block.facts)

    def lose(self, block: Block) -> None:
        """Mark a block as lost: modified before a whole copy was known to exist. Backward will raise."""
        block.placement = Lost(block.storage_version.probe._version)
        self.leave(block)
        if self.event_log.on:
            self.event_log.emit("lose", *block.facts)

    def most(self, nbytes: int, leaving: int) -> int | None:
        """Return the target for resident bytes after adding ``nbytes``, with ``leaving`` bytes in flight.

        ``None``: unlimited.
        """
        memory = self.memory
        if memory is None:
            return self.limit
        if memory.device.is_capturing():
            return None  # the device cannot be queried during a graph capture
        early = 0 if self.is_planned else self._early
        most = None if self.limit is None else max(0, self.limit - early)
        if most != 0:  # if it is 0, everything is evicted anyway
            self.short_bytes = memory.shortage(nbytes)
            if self.short_bytes > leaving:
                left = max(0, self.nbytes + leaving - self.short_bytes)
                most = left if most is None else min(most, left)
        return most

    def wants_room(self, leaving: int) -> bool:
        """Return whether completed copies should free their sources now. ``leaving`` bytes are in flight."""
        if self.memory is None or self.short_bytes or self.is_planned:
            return True
        return self.limit is not None and self.nbytes + leaving > self.limit

    def set_limit(self, limit: int | None) -> None:
        """Set the most bytes that stay in place, and forget what was learned from running out of memory."""
        self.limit, self._ceiling = limit, None

    def follow(self, free_bytes: int) -> None:
        """Keep half of the free memory, counting what is already kept, from now on."""
        half = (self.nbytes + free_bytes) // 2
        self.limit = half if self._ceiling is None else min(half, self._ceiling)

    def halve(self) -> int | None:
        """Halve the limit after the device ran out of memory.

        Returns the new limit; ``None`` if nothing was kept or there is no device.
        """
        if self.memory is None:
            return None
        self.memory.forget_failures()
        kept = self.peak_bytes if self.limit is None else min(self.limit, self.peak_bytes)
        if not kept:
            return None
        self.limit = self._ceiling = kept // 2
        return self.limit

    def restore(self, blocks: list[Block], waiting: set[int], cleanups: list[BlockCleanup]) -> None:
        """Rebuild the counts and queues from the living blocks: see ``_core/session``.

        Args:
            blocks: the living blocks, oldest first.
            waiting: the ``id`` of each block that waits for its operation to end.
            cleanups: of all blocks, including dead ones that are not settled yet.
        """
        self.queue = WeakQueue[Block](is_resident)
        for block in blocks:
            if not block.placement.is_kept:
                block.cleanup.resident_bytes = 0
            elif block.cleanup.resident_bytes and id(block) not in waiting:
                self.queue.append(block)
        self.nbytes = sum(cleanup.resident_bytes for cleanup in cleanups)


def is_resident(block: Block) -> int:
    """Return whether a block is still in place and counted."""
    return block.cleanup.resident_bytes
