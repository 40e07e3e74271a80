"""The way up: bytes come back once for all the views that want them, and ahead of need when they can.

What was read is held while entries still wait for it, or while it was read ahead and nobody has come yet.
What is held counts against ``prefetch``; beyond that the oldest is dropped, which costs a second read and
nothing else, since the bytes below are never taken away before the last entry dies. Only the block in use
is never dropped, so that q, k and v cut from one projection come from one read however large it is.
"""

from __future__ import annotations

import ctypes
import functools
import time
import weakref
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ._blocks import Block
from ._device_memory import DeviceMemory
from ._entry import Entry
from ._events import Tape, profiled
from ._guard import Guard
from ._host import HostTier
from ._host_parcels import HostParcel, HostReading
from ._parcels import Parcel, Reading, Segment
from ._queue import WeakQueue
from ._workers import Work
from .stores._memory import Pool

__all__ = ["PoolSource", "Up"]

_LOOKS_IN_A_WINDOW = 128  # ahead, at most, while as many bytes are used as the window holds

AnyParcel: TypeAlias = Parcel | HostParcel
AnyReading: TypeAlias = Reading | HostReading


class Up:
    """Keeps the ``prefetch`` budget. Methods are called under ``lock`` unless they say otherwise."""

    def __init__(
        self,
        begin: Callable[[Work], None],
        source: PoolSource | HostTier,
        lock: Any,
        guard: Guard,
        freed: Callable[[int], None],
        tape: Tape,
        *,
        prefetch: int,
        memory: DeviceMemory | None = None,
    ) -> None:
        self._begin_work = begin
        self._source = source
        self._lock = lock
        self._guard = guard
        self._freed = freed
        self._tape = tape
        self._prefetch = prefetch
        self._memory = memory  # of an accelerator; the CPU's pool says itself when it has none
        self._used_bytes = 0  # by backward, since what comes next was looked at
        self._window = WeakQueue[Any](_is_held)  # oldest first
        self._beyond: weakref.ref[Any] | None = None  # the one parcel that may exceed the window
        self.ahead_bytes = self.ahead_peak_bytes = 0
        self.read_bytes = 0
        self.stall_seconds = 0.0
        self.hits = self.misses = 0

    def view(self, entry: Entry) -> Tensor:
        """The saved view, from memory or from below. Not under the lock: it waits for the disk.

        Raises ``StashIOError`` when the store cannot give the bytes; the entry stays whole.
        """
        block = entry.block
        with self._lock, self._guard:
            ready = self._at_hand(entry)
        if ready is not None:
            return ready
        parcel = block.parcel
        assert parcel is not None
        while True:
            reading = self._reading_of(parcel, block)
            with self._lock, self._guard:
                ready = self._at_hand(entry)  # another thread may have served the block meanwhile
                if ready is not None:
                    return ready
                memory = reading.memory
                if memory._version == 0:  # else that thread's backward changed what it was given
                    block.arrival = reading.arrival
                    self._root(block, parcel, memory)
                    return self._serve(entry)

    def _at_hand(self, entry: Entry) -> Tensor | None:
        block, parcel = entry.block, entry.block.parcel
        if block.root is not None:
            if block.root._version == block.root_version:
                return self._serve(entry)
            self._drop(
                block
            )  # a custom backward changed what it was given: fresh bytes for the next
        if isinstance(parcel, Segment) and parcel.buffer is not None:
            self._root(block, parcel, parcel.buffer)
            return self._serve(entry)
        return None

    def _root(self, block: Block, parcel: AnyParcel, memory: Tensor) -> None:
        """Make the one storage that all of the block's views share, and hold it for them."""
        if isinstance(parcel, Segment):
            # A copy: what is handed out may be changed, and the segment's other blocks live beside it.
            low = block.address % 64
            nbytes = -(-(low + block.nbytes) // 64) * 64
            root = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
            source = memory.data_ptr() + block.offset
            ctypes.memmove(root.data_ptr() + low, source, block.nbytes)
            parcel.wanted -= 1
        else:
            low, root = parcel.skew, memory
            parcel.wanted = 0
        if parcel.wanted <= 0:
            self._drop(parcel)
        # Only now, and in one go: whoever comes after an interrupt finds all of it or nothing.
        block.root, block.root_low, block.root_version = root, low, root._version
        block.turn += 1
        block.served = 0
        self._hold(block)

    def _serve(self, entry: Entry) -> Tensor:
        block = entry.block
        assert block.root is not None
        if block.arrival is not None:
            block.arrival.order()
        view = entry.view_of(block.root, block.root_low)
        if entry.turn != block.turn:
            entry.turn = block.turn
            block.served += 1
        if block.served >= block.entries:  # every entry has had its use: the next one reads again
            self._drop(block)
        return view

    # Memory that is held: by a parcel until its blocks have come for it, then by each block.

    def _hold(self, holder: AnyParcel | Block) -> None:
        holder.remains.held = holder.nbytes
        self.ahead_bytes += holder.remains.held
        self._window.append(holder)

    def _drop(self, holder: AnyParcel | Block) -> None:
        holder.let_go()
        self.ahead_bytes -= holder.remains.held
        self._freed(holder.remains.held)
        holder.remains.held = 0

    def _begin(self, parcel: AnyParcel, *, ahead: bool) -> AnyReading:
        reading = self._source.fetch(parcel, ahead=ahead)  # type: ignore[arg-type]
        parcel.reading = reading
        parcel.wanted = parcel.blocks
        self._hold(parcel)
        self.read_bytes += parcel.nbytes
        return reading

    def _reading_of(self, parcel: AnyParcel, block: Block) -> AnyReading:
        """The parcel's bytes in memory, read by this thread unless they are there or coming."""
        with self._lock, self._guard:
            reading = parcel.reading
            mine = reading is None
            if reading is None:
                self.misses += 1
                self._used_bytes = self._prefetch  # it is high time to look ahead
                reading = self._begin_now(parcel)
            elif parcel.ahead:
                parcel.ahead = False
                self.hits += 1
        began = time.perf_counter()
        try:
            with profiled("stall on the way up", block.remains.module):
                if reading.needs_worker:  # where no worker has begun, it is made here
                    self._runner(reading, parcel.nbytes, block, "demand" if mine else "ahead")()
                error = self._end_of(reading)
        finally:
            self.stall_seconds += time.perf_counter() - began
            if self._tape.on:
                self._tape.tell("stall", 0, *block.facts[1:], cause="unpack", began=began)
        if error is None:
            return reading
        with self._lock, self._guard:
            if parcel.reading is reading:
                self._drop(parcel)
        if mine:
            raise error
        return self._reading_of(parcel, block)  # one ahead of need failed: ask again, and be told

    def _begin_now(self, parcel: AnyParcel) -> AnyReading:
        try:
            return self._begin(parcel, ahead=False)
        except torch.OutOfMemoryError:
            self._shrink(to_bytes=0)  # what was read ahead is needed later, this now
            return self._begin(parcel, ahead=False)

    def _end_of(self, reading: AnyReading) -> BaseException | None:
        try:
            return reading.exception()
        except torch.OutOfMemoryError:
            with self._lock, self._guard:
                self._shrink(to_bytes=0)
            return reading.exception()

    def ahead(self, block: Block) -> None:
        """After ``block`` was used: ask for what comes next, as far as the window goes."""
        self._shrink(to_bytes=self._prefetch, using=block)
        self._source.poll()
        self._used_bytes += block.nbytes
        if self._used_bytes < self._prefetch // _LOOKS_IN_A_WINDOW:
            return  # small ones, and what comes next was asked for
        self._used_bytes = 0
        for following in block.round.successors(block.index):
            parcel = following.parcel
            if following.alias is not None or parcel is None or parcel.reading is not None:
                continue
            if following.side is not block.side:
                continue
            if following.root is not None or following.turn >= max(block.turn, 1):
                continue  # at hand, or used in this pass: the node that runs now holds it still
            if isinstance(parcel, Segment) and parcel.buffer is not None:
                continue
            goes_beyond = self.ahead_bytes + parcel.nbytes > self._prefetch
            if goes_beyond and not self._may_go_beyond(parcel.nbytes):
                break
            if self._memory is not None and not self._memory.has(parcel.nbytes):
                break
            try:
                reading = self._begin(parcel, ahead=True)
            except (MemoryError, torch.OutOfMemoryError):
                break
            parcel.ahead = True
            if goes_beyond:
                self._beyond = weakref.ref(parcel)
            if reading.needs_worker:
                self._begin_work(Work(self._runner(reading, parcel.nbytes, following, "ahead")))
            elif self._tape.on:
                self._tape.tell("read", parcel.nbytes, *_named(following), cause="ahead")
        self.ahead_peak_bytes = max(self.ahead_peak_bytes, self.ahead_bytes)

    def _runner(
        self, reading: AnyReading, nbytes: int, block: Block, cause: str
    ) -> Callable[[], object]:
        if not self._tape.on:
            return reading.run
        return functools.partial(_run_and_tell, self._tape, reading, nbytes, _named(block), cause)

    def _may_go_beyond(self, nbytes: int) -> bool:
        """Whether a parcel that is larger than the window may come ahead all the same: one at a time."""
        if not self._source.reads_one_beyond or not 0 < self._prefetch < nbytes:
            return False
        one = self._beyond() if self._beyond is not None else None
        return one is None or not one.remains.held

    def _shrink(self, *, to_bytes: int, using: Block | None = None) -> None:
        """Bring what is held under ``to_bytes``, the longest held first; what is in use stays."""
        window, stay = self._window, []
        beyond = self._beyond() if self._beyond is not None and to_bytes else None
        while len(window) > 1 and self.ahead_bytes > to_bytes:
            holder = window.popleft()
            if holder is None:
                continue
            if holder is using or holder is beyond:
                stay.append(holder)
            else:
                self._drop(holder)
        for holder in reversed(stay):
            window.appendleft(holder)

    def forget(self) -> None:
        """No block is alive any more."""
        self._window.clear()

    def restore(self, holders: list[AnyParcel | Block]) -> None:
        """Make the books anew from what there is: see ``_repair``.

        Args:
            holders: the blocks and parcels that are alive, oldest first.
        """
        self._window = WeakQueue[Any](_is_held)
        for holder in holders:
            holds = holder.root if isinstance(holder, Block) else holder.reading
            holder.remains.held = holder.nbytes if holds is not None else 0
            if holder.remains.held:
                self._window.append(holder)

    def forked(self, lock: Any) -> None:
        """In a forked process: let go of what is held, since reads that had begun never end."""
        self._lock = lock
        while self._window:
            holder = self._window.popleft()
            if holder is not None:
                self._drop(holder)


def _is_held(holder: AnyParcel | Block) -> int:
    return holder.remains.held


def _named(block: Block) -> tuple[int, str]:
    return (-1, "") if isinstance(block.parcel, Segment) else block.facts[1:]


def _run_and_tell(
    tape: Tape, reading: AnyReading, nbytes: int, what: tuple[int, str], cause: str
) -> None:
    began = time.perf_counter()
    if not reading.run():
        return  # another thread has, and told
    tape.tell("read", nbytes, *what, cause=cause, began=began)


class PoolSource:
    """Where the CPU's parcels come back to: memory of the pool, read to by a worker or the one who waits."""

    reads_one_beyond = False
    """Whether a block larger than the ``prefetch`` window is read ahead all the same, one at a time."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def fetch(self, parcel: Parcel, *, ahead: bool) -> Reading:
        """Memory for the parcel, and its reading, which somebody has to run."""
        return Reading(parcel, self._pool.take(parcel.skew + parcel.nbytes))

    def poll(self) -> None:
        """Nothing has to be sent on."""
