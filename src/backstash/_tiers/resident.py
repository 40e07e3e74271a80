"""The resident set: which blocks stay in place within the ``keep`` budget, and which leave first.

The newest blocks stay up to the limit; the oldest beyond it go. On an accelerator copies begin some bytes
before the limit is reached, and memory is let go only beyond it, or where the device runs short: a block
that is still in place when backward comes need not be brought back.
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
        event_log: gets the blocks that come, return and are lost.
        limit: the most bytes that stay; ``None``: no limit. May be set.
        early: on an accelerator, how many bytes below ``limit`` copies begin.
        memory: what the accelerator has free; ``None`` on the CPU.
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
            None  # of a limit that follows, since the device ran out of memory
        )
        self.short_bytes = 0  # bytes that the device lacked when it was last asked
        self.queue = WeakQueue[Block](is_resident)  # that may go, oldest first
        self.nbytes = self.peak_bytes = 0
        self.is_planned = False
        """Whether a plan says what leaves: then none leaves early, and what was copied is let go at once."""

    def admit(self, block: Block) -> None:
        """A new block, in place."""
        block.cleanup.resident_bytes = block.nbytes
        self.nbytes += block.nbytes
        if self.event_log.on and not block.entries:
            self.saved(block)

    def saved(self, block: Block) -> None:
        """Tell whoever records of a new block."""
        cause = "backward" if current_node() is not None else ""
        self.event_log.emit("save", *block.facts, cause=cause)

    def hold(self, payload: Block) -> None:
        """What a block was packed to, in place."""
        payload.cleanup.resident_bytes = payload.nbytes
        self.nbytes += payload.nbytes

    def leave(self, block: Block) -> None:
        """It is on its way down, or lost, and no longer counted."""
        cleanup = block.cleanup
        self.nbytes -= cleanup.resident_bytes
        cleanup.resident_bytes = 0

    def take_back(self, block: Block) -> None:
        """It could not be moved, and stays where it was."""
        alias = block.placement.alias
        assert alias is not None
        block.placement = Resident(alias)
        cleanup = block.cleanup
        self.nbytes += block.nbytes - cleanup.resident_bytes
        cleanup.resident_bytes = block.nbytes
        if self.event_log.on:
            self.event_log.emit("return", *block.facts)

    def lose(self, block: Block) -> None:
        """Its bytes were changed before a whole copy was known to exist: backward will raise."""
        block.placement = Lost(block.storage_version.probe._version)
        self.leave(block)
        if self.event_log.on:
            self.event_log.emit("lose", *block.facts)

    def most(self, nbytes: int, leaving: int) -> int | None:
        """Target resident bytes after admitting ``nbytes``, with ``leaving`` bytes in flight.

        ``None``: unlimited.
        """
        memory = self.memory
        if memory is None:
            return self.limit
        if memory.device.is_capturing():
            return None  # nothing may be asked of the device
        early = 0 if self.is_planned else self._early
        most = None if self.limit is None else max(0, self.limit - early)
        if most != 0:  # else all goes anyway
            self.short_bytes = memory.shortage(nbytes)
            if self.short_bytes > leaving:
                left = max(0, self.nbytes + leaving - self.short_bytes)
                most = left if most is None else min(most, left)
        return most

    def wants_room(self, leaving: int) -> bool:
        """Whether completed copies should release their source memory now, with ``leaving`` bytes in flight."""
        if self.memory is None or self.short_bytes or self.is_planned:
            return True
        return self.limit is not None and self.nbytes + leaving > self.limit

    def set_limit(self, limit: int | None) -> None:
        """The most bytes that stay from now on, whatever was learned."""
        self.limit, self._ceiling = limit, None

    def follow(self, free_bytes: int) -> None:
        """From now on keep half of the memory that is free, with what is kept already."""
        half = (self.nbytes + free_bytes) // 2
        self.limit = half if self._ceiling is None else min(half, self._ceiling)

    def halve(self) -> int | None:
        """The device ran out of memory: keep half of what was kept from now on, at most.

        Returns the new limit; ``None`` where nothing was kept, or there is no device.
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
        """Rebuild what follows from what there is: see ``_session``.

        Args:
            blocks: that are alive, oldest first.
            waiting: the ``id`` of each that waits for its operation's end.
            cleanups: of all blocks, the dead ones that are yet to be settled too.
        """
        self.queue = WeakQueue[Block](is_resident)
        for block in blocks:
            if not block.placement.is_kept:
                block.cleanup.resident_bytes = 0
            elif block.cleanup.resident_bytes and id(block) not in waiting:
                self.queue.append(block)
        self.nbytes = sum(cleanup.resident_bytes for cleanup in cleanups)


def is_resident(block: Block) -> int:
    """Whether it is in place still, and counted."""
    return block.cleanup.resident_bytes
