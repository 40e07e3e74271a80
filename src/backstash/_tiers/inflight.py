"""The window on the way down: writes that began and have not landed.

What is in flight is written straight from the tensor's memory, which stays alive until then. It *lands*
when a thread that may judge the copy (see ``_saved/thread_state``) finds that the write has ended and the version has
not changed: only then is the memory let go. A version that changed in between means that nobody can know
which bytes were written: the block is lost, and backward raises if it ever asks for it. A write that failed
leaves the block where it was.
"""

from __future__ import annotations

import time
import weakref
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass

from .._device.base import Copy
from .._runtime.reclaim import DiskCleanup
from .._runtime.trace import EventLog, profiled
from .._runtime.workers import Work
from .._saved.block import Block
from .._saved.thread_state import ThreadState
from .backing import SegmentBacking
from .health import TierHealth
from .resident import ResidentSet

__all__ = ["InflightWrites"]


@dataclass(slots=True, eq=False)
class _Write:
    """A write that began and has not landed. It does not own the block: a dead one just lands empty."""

    cargo: weakref.ref[Block] | weakref.ref[SegmentBacking]
    nbytes: int
    thread_state: (
        ThreadState | None
    )  # whose tensor it is; None for bytes that are the stash's own copy
    writing: Work | Copy


class InflightWrites:
    """Keeps the ``inflight`` budget. The caller holds the stash's lock.

    Args:
        keep: what is in place, where a block may return to.
        refusals: is told of a write that failed.
        freed: is told of bytes that were let go.
        tape: is told what lands and who waits, where somebody records.
        window_bytes: the budget.
    """

    def __init__(
        self,
        resident: ResidentSet,
        health: TierHealth,
        freed: Callable[[int], None],
        event_log: EventLog,
        *,
        window_bytes: int,
    ) -> None:
        self._resident = resident
        self._health = health
        self._freed = freed
        self._event_log = event_log
        self.window_bytes = window_bytes
        self._inflight: deque[_Write] = deque()  # oldest first
        self._count_of = Counter[ThreadState | None]()  # how many of them are whose
        self._dead: deque[object] = deque()  # of copies, since all of them were looked at
        self._dies = self._dead.append  # where a block dies no Python may run: see _runtime/reclaim
        # Also what was copied into a segment that nobody writes yet.
        self.nbytes = self.peak_bytes = 0
        self.written_bytes = 0
        self.stall_seconds = 0.0

    @property
    def is_one(self) -> bool:
        """Whether there is a window, and one write alone is in it."""
        return self.window_bytes > 0 and len(self._inflight) == 1

    def has_room(self, nbytes: int) -> bool:
        """Whether ``nbytes`` more fit into the window."""
        return self.nbytes + nbytes <= self.window_bytes

    def count(self, nbytes: int) -> None:
        """So many are on their way from now on."""
        self.written_bytes += nbytes
        self.nbytes += nbytes

    def add(self, block: Block, writing: Work | Copy) -> None:
        """The write from a block's own memory has begun."""
        self._inflight.append(self._write_of(block, writing))
        self._count_of[block.thread_state] += 1
        self.count(block.nbytes)

    def _write_of(self, block: Block, writing: Work | Copy) -> _Write:
        is_copy = isinstance(writing, Copy)
        cargo = weakref.ref(block, self._dies) if is_copy else weakref.ref(block)
        return _Write(cargo, block.nbytes, block.thread_state, writing)

    def add_segment(self, segment: SegmentBacking, writing: Work) -> None:
        """The write of a segment, whose bytes are counted, begins."""
        left = segment.cleanup
        self._inflight.append(_Write(weakref.ref(segment), left.inflight_bytes, None, writing))
        self._count_of[None] += 1
        left.inflight_bytes = 0  # the flight counts them now

    def make_room(self, nbytes: int, thread_state: ThreadState) -> None:
        """Wait until ``nbytes`` more fit into the window, or nothing in it can be waited for."""
        self._empty_to(self.window_bytes - nbytes, thread_state)

    def let_go(self, nbytes: int, thread_state: ThreadState) -> None:
        """Let the memory of so many bytes go now, as far as that can be waited for."""
        self._empty_to(self.nbytes - nbytes, thread_state)

    def _empty_to(self, nbytes: int, thread_state: ThreadState) -> None:
        while self.nbytes > nbytes:
            mine = next((f for f in self._inflight if _judged_by(thread_state, f)), None)
            if mine is None:
                return
            self.wait(mine.writing)
            self.complete(thread_state, all_that_ended=True)

    def wait(self, writing: Work | Copy) -> None:
        """Wait for one write, and count the time."""
        if writing.done():
            return
        began = time.perf_counter()
        try:
            with profiled("stall on the way down"):
                writing.exception()
        finally:
            self.stall_seconds += time.perf_counter() - began
            if self._event_log.on:
                self._event_log.emit("stall", 0, cause="pack", began=began)

    def finish(self, thread_state: ThreadState) -> None:
        """Wait for every copy that has begun, and land what this thread may judge."""
        for write in self._inflight:
            if isinstance(write.writing, Copy):
                write.writing.wait()
        self.complete(thread_state, all_that_ended=True)

    def complete(self, thread_state: ThreadState, *, all_that_ended: bool = False) -> None:
        """Let go of the memory of every write that has ended, as far as this thread may judge it.

        On an accelerator only as far as ``keep`` asks for it, unless ``all_that_ended``: what is still
        there when backward comes need not be brought back.
        """
        inflight, passed = self._inflight, deque[_Write]()
        looks_at_all = 2 * len(self._dead) >= len(inflight)
        if looks_at_all:
            self._dead.clear()
        try:
            while inflight:
                write = inflight.popleft()
                passed.append(write)  # until it has landed
                cargo, is_mine = write.cargo(), _judged_by(thread_state, write)
                lingers = (
                    not all_that_ended
                    and cargo is not None
                    and not self._resident.wants_room(self.nbytes)
                )
                if is_mine and not lingers and (write.writing.done() or _abandoned(write)):
                    if cargo is not None:
                        self._complete_one(cargo, write)
                    self._end(passed.pop())
                    continue
                # A device's copies end in order: after one that has not ended, none has. Nor need a thread
                # that has none of its own look at those of others, or anybody at those that stay. Only
                # the dead among them are let go, each time that they may be half of all.
                has_not_ended = is_mine and not lingers
                of_no_concern = not all_that_ended and (
                    lingers or thread_state not in self._count_of
                )
                if isinstance(write.writing, Copy) and (
                    has_not_ended or (of_no_concern and not looks_at_all)
                ):
                    break
        finally:
            inflight.extendleft(reversed(passed))

    def _end(self, write: _Write) -> None:
        if isinstance(write.writing, Copy):
            write.writing.release()
        self.nbytes -= write.nbytes
        self._count_of[write.thread_state] -= 1
        if not self._count_of[write.thread_state]:
            del self._count_of[write.thread_state]
        self._freed(write.nbytes)

    def _complete_one(self, cargo: Block | SegmentBacking, write: _Write) -> None:
        writing = write.writing
        failure = None
        if not isinstance(writing, Copy):
            failure = writing.exception()
        if isinstance(cargo, Block) and cargo.has_moved:
            self._resident.take_back(cargo)  # whatever was written, or could not be
        elif isinstance(cargo, SegmentBacking):
            if failure is None:
                cargo.buffer = None
            else:
                self._health.broke(failure)
        elif failure is not None:
            self._resident.take_back(cargo)
            self._health.broke(failure)
        elif cargo.storage_version.changed:
            self._resident.lose(cargo)
        else:
            cargo.alias = None
            # What lands while it is copied is safe from the streams that wait, not from any other.
            cargo.unsure = isinstance(writing, Copy) and not writing.ended()
            if self._event_log.on:
                self._event_log.emit("land", *cargo.facts)

    def measure(self) -> None:
        """Between operations: while one runs, its tensors are the caller's."""
        self.peak_bytes = max(self.peak_bytes, self.nbytes)

    def restore(
        self, blocks: list[Block], segments: list[SegmentBacking], cleanup: list[DiskCleanup]
    ) -> list[Work]:
        """Make the books anew from what there is: see ``_session``.

        Args:
            blocks: that are alive, oldest first.
            segments: that carry some of them; all have a write but the one that is being filled.
            remains: of all parcels, the dead ones that are yet to be settled too.

        Returns the writes that perhaps no worker was given.
        """
        known = {id(cargo): write for write in self._inflight if (cargo := write.cargo())}
        inflight = deque(write for write in self._inflight if write.cargo() is None)
        for block in blocks:
            if block.alias is not None and block.backing is not None:
                writing = block.backing.cleanup.writing
                inflight.append(known.get(id(block)) or self._write_of(block, writing))
        for segment in segments:
            left, write = segment.cleanup, known.get(id(segment))
            if segment.buffer is None or left.writing is None:
                continue
            if write is None and left.writing.error is None:
                write = _Write(weakref.ref(segment), left.inflight_bytes, None, left.writing)
            if write is not None:
                inflight.append(write)
                left.inflight_bytes = 0
        self._inflight = inflight
        self._count_of = Counter(write.thread_state for write in inflight)
        self.nbytes = sum(write.nbytes for write in inflight)
        self.nbytes += sum(left.inflight_bytes for left in cleanup)
        works = [write.writing for write in inflight if isinstance(write.writing, Work)]
        return [work for work in works if not work.done()]


def _abandoned(write: _Write) -> bool:
    """A dead block's write that has not begun is not worth doing."""
    return write.cargo() is None and write.writing.cancel()


def _judged_by(thread_state: ThreadState, write: _Write) -> bool:
    return (
        write.thread_state is None
        or thread_state.may_judge(write.thread_state)
        or write.cargo() is None
    )
