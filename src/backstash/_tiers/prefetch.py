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

from .._device.memory import DeviceMemory
from .._runtime.critical_section import CriticalSection
from .._runtime.trace import EventLog, profiled
from .._runtime.weak import WeakQueue
from .._runtime.workers import Work
from .._saved.block import Block
from .._saved.entry import Entry
from ..stores._buffer_pool import BufferPool
from .backing import DiskBacking, DiskLoad, SegmentBacking
from .host import HostTier
from .host_backing import HostBacking, HostLoad

__all__ = ["PoolSource", "Prefetcher"]

_LOOKS_IN_A_WINDOW = 128  # ahead, at most, while as many bytes are used as the window holds

AnyBacking: TypeAlias = DiskBacking | HostBacking
AnyLoad: TypeAlias = DiskLoad | HostLoad


class Prefetcher:
    """Keeps the ``prefetch`` budget. Methods are called under ``lock`` unless they say otherwise."""

    def __init__(
        self,
        begin: Callable[[Work], None],
        source: PoolSource | HostTier,
        lock: Any,
        section: CriticalSection,
        freed: Callable[[int], None],
        event_log: EventLog,
        *,
        prefetch: int,
        memory: DeviceMemory | None = None,
    ) -> None:
        self._begin_work = begin
        self._source = source
        self._lock = lock
        self._section = section
        self._freed = freed
        self._event_log = event_log
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
        with self._lock, self._section:
            ready = self._at_hand(entry)
        if ready is not None:
            return ready
        backing = block.backing
        assert backing is not None
        while True:
            load = self._load_of(backing, block)
            with self._lock, self._section:
                ready = self._at_hand(entry)  # another thread may have served the block meanwhile
                if ready is not None:
                    return ready
                memory = load.memory
                if memory._version == 0:  # else that thread's backward changed what it was given
                    block.arrival = load.arrival
                    self._root(block, backing, memory)
                    return self._serve(entry)

    def _at_hand(self, entry: Entry) -> Tensor | None:
        block, backing = entry.block, entry.block.backing
        if block.root is not None:
            if block.root._version == block.root_version:
                return self._serve(entry)
            self._drop(
                block
            )  # a custom backward changed what it was given: fresh bytes for the next
        if isinstance(backing, SegmentBacking) and backing.buffer is not None:
            self._root(block, backing, backing.buffer)
            return self._serve(entry)
        return None

    def _root(self, block: Block, backing: AnyBacking, memory: Tensor) -> None:
        """Make the one storage that all of the block's views share, and hold it for them."""
        if isinstance(backing, SegmentBacking):
            # A copy: what is handed out may be changed, and the segment's other blocks live beside it.
            low = block.address % 64
            nbytes = -(-(low + block.nbytes) // 64) * 64
            root = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
            source = memory.data_ptr() + block.offset
            ctypes.memmove(root.data_ptr() + low, source, block.nbytes)
            backing.wanted -= 1
        else:
            low, root = backing.skew, memory
            backing.wanted = 0
        if backing.wanted <= 0:
            self._drop(backing)
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

    def _hold(self, holder: AnyBacking | Block) -> None:
        holder.cleanup.loaded_bytes = holder.nbytes
        self.ahead_bytes += holder.cleanup.loaded_bytes
        self._window.append(holder)

    def _drop(self, holder: AnyBacking | Block) -> None:
        holder.let_go()
        self.ahead_bytes -= holder.cleanup.loaded_bytes
        self._freed(holder.cleanup.loaded_bytes)
        holder.cleanup.loaded_bytes = 0

    def _begin(self, backing: AnyBacking, *, ahead: bool) -> AnyLoad:
        load = self._source.fetch(backing, ahead=ahead)  # type: ignore[arg-type]
        backing.load = load
        backing.wanted = backing.blocks
        self._hold(backing)
        self.read_bytes += backing.nbytes
        return load

    def _load_of(self, backing: AnyBacking, block: Block) -> AnyLoad:
        """The parcel's bytes in memory, read by this thread unless they are there or coming."""
        with self._lock, self._section:
            load = backing.load
            mine = load is None
            if load is None:
                self.misses += 1
                self._used_bytes = self._prefetch  # it is high time to look ahead
                load = self._begin_now(backing)
            elif backing.ahead:
                backing.ahead = False
                self.hits += 1
        began = time.perf_counter()
        try:
            with profiled("stall on the way up", block.cleanup.module):
                if load.needs_worker:  # where no worker has begun, it is made here
                    self._runner(load, backing.nbytes, block, "demand" if mine else "ahead")()
                error = self._end_of(load)
        finally:
            self.stall_seconds += time.perf_counter() - began
            if self._event_log.on:
                self._event_log.emit("stall", 0, *block.facts[1:], cause="unpack", began=began)
        if error is None:
            return load
        with self._lock, self._section:
            if backing.load is load:
                self._drop(backing)
        if mine:
            raise error
        return self._load_of(backing, block)  # one ahead of need failed: ask again, and be told

    def _begin_now(self, backing: AnyBacking) -> AnyLoad:
        try:
            return self._begin(backing, ahead=False)
        except torch.OutOfMemoryError:
            self._shrink(to_bytes=0)  # what was read ahead is needed later, this now
            return self._begin(backing, ahead=False)

    def _end_of(self, load: AnyLoad) -> BaseException | None:
        try:
            return load.exception()
        except torch.OutOfMemoryError:
            with self._lock, self._section:
                self._shrink(to_bytes=0)
            return load.exception()

    def ahead(self, block: Block) -> None:
        """After ``block`` was used: ask for what comes next, as far as the window goes."""
        self._shrink(to_bytes=self._prefetch, using=block)
        self._source.poll()
        self._used_bytes += block.nbytes
        if self._used_bytes < self._prefetch // _LOOKS_IN_A_WINDOW:
            return  # small ones, and what comes next was asked for
        self._used_bytes = 0
        for following in block.forward_pass.successors(block.index):
            backing = following.backing
            if following.alias is not None or backing is None or backing.load is not None:
                continue
            if following.tiers is not block.tiers:
                continue
            if following.root is not None or following.turn >= max(block.turn, 1):
                continue  # at hand, or used in this pass: the node that runs now holds it still
            if isinstance(backing, SegmentBacking) and backing.buffer is not None:
                continue
            goes_beyond = self.ahead_bytes + backing.nbytes > self._prefetch
            if goes_beyond and not self._may_go_beyond(backing.nbytes):
                break
            if self._memory is not None and not self._memory.has(backing.nbytes):
                break
            try:
                load = self._begin(backing, ahead=True)
            except (MemoryError, torch.OutOfMemoryError):
                break
            backing.ahead = True
            if goes_beyond:
                self._beyond = weakref.ref(backing)
            if load.needs_worker:
                self._begin_work(Work(self._runner(load, backing.nbytes, following, "ahead")))
            elif self._event_log.on:
                self._event_log.emit("read", backing.nbytes, *_named(following), cause="ahead")
        self.ahead_peak_bytes = max(self.ahead_peak_bytes, self.ahead_bytes)

    def _runner(self, load: AnyLoad, nbytes: int, block: Block, cause: str) -> Callable[[], object]:
        if not self._event_log.on:
            return load.run
        return functools.partial(_run_and_emit, self._event_log, load, nbytes, _named(block), cause)

    def _may_go_beyond(self, nbytes: int) -> bool:
        """Whether a parcel that is larger than the window may come ahead all the same: one at a time."""
        if not self._source.reads_one_beyond or not 0 < self._prefetch < nbytes:
            return False
        one = self._beyond() if self._beyond is not None else None
        return one is None or not one.cleanup.loaded_bytes

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

    def restore(self, holders: list[AnyBacking | Block]) -> None:
        """Make the books anew from what there is: see ``_session``.

        Args:
            holders: the blocks and parcels that are alive, oldest first.
        """
        self._window = WeakQueue[Any](_is_held)
        for holder in holders:
            holds = holder.root if isinstance(holder, Block) else holder.load
            holder.cleanup.loaded_bytes = holder.nbytes if holds is not None else 0
            if holder.cleanup.loaded_bytes:
                self._window.append(holder)

    def forked(self, lock: Any) -> None:
        """In a forked process: let go of what is held, since reads that had begun never end."""
        self._lock = lock
        while self._window:
            holder = self._window.popleft()
            if holder is not None:
                self._drop(holder)


def _is_held(holder: AnyBacking | Block) -> int:
    return holder.cleanup.loaded_bytes


def _named(block: Block) -> tuple[int, str]:
    return (-1, "") if isinstance(block.backing, SegmentBacking) else block.facts[1:]


def _run_and_emit(
    event_log: EventLog, load: AnyLoad, nbytes: int, what: tuple[int, str], cause: str
) -> None:
    began = time.perf_counter()
    if not load.run():
        return  # another thread has, and told
    event_log.emit("read", nbytes, *what, cause=cause, began=began)


class PoolSource:
    """Where the CPU's parcels come back to: memory of the pool, read to by a worker or the one who waits."""

    reads_one_beyond = False
    """Whether a block larger than the ``prefetch`` window is read ahead all the same, one at a time."""

    def __init__(self, pool: BufferPool) -> None:
        self._pool = pool

    def fetch(self, backing: DiskBacking, *, ahead: bool) -> DiskLoad:
        """Memory for the parcel, and its reading, which somebody has to run."""
        return DiskLoad(backing, self._pool.take(backing.skew + backing.nbytes))

    def poll(self) -> None:
        """Nothing has to be sent on."""
