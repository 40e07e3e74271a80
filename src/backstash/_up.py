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
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor

from ._blocks import Block
from ._entry import Entry
from ._events import Tape, profiled
from ._parcels import Parcel, Segment
from .stores._memory import Pool

__all__ = ["Up"]


class Up:
    """Keeps the ``prefetch`` budget. Methods are called under ``lock`` unless they say otherwise."""

    def __init__(
        self,
        submit: Callable[..., Future[None]],
        pool: Pool,
        lock: Any,
        freed: Callable[[int], None],
        tape: Tape,
        *,
        prefetch: int,
    ) -> None:
        self._submit = submit
        self._pool = pool
        self._lock = lock
        self._freed = freed
        self._tape = tape
        self._prefetch = prefetch
        self._window: deque[weakref.ref[Parcel] | weakref.ref[Block]] = deque()  # oldest first
        self.ahead_bytes = self.ahead_peak_bytes = 0
        self.read_bytes = 0
        self.stall_seconds = 0.0
        self.hits = self.misses = 0

    def view(self, entry: Entry) -> Tensor:
        """The saved view, from memory or from below. Not under the lock: it waits for the disk.

        Raises ``StashIOError`` when the store cannot give the bytes; the entry stays whole.
        """
        block = entry.block
        with self._lock:
            ready = self._at_hand(entry)
        if ready is not None:
            return ready
        parcel = block.parcel
        assert parcel is not None
        while True:
            memory = self._memory_of(parcel, block)
            with self._lock:
                ready = self._at_hand(entry)  # another thread may have served the block meanwhile
                if ready is not None:
                    return ready
                if memory._version == 0:  # else that thread's backward changed what it was given
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

    def _root(self, block: Block, parcel: Parcel, memory: Tensor) -> None:
        """Make the one storage that all of the block's views share, and hold it for them."""
        if isinstance(parcel, Segment):
            # A copy: what is handed out may be changed, and the segment's other blocks live beside it.
            block.root_low = block.address % 64
            nbytes = -(-(block.root_low + block.nbytes) // 64) * 64
            block.root = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
            source = memory.data_ptr() + parcel.skew + block.offset
            ctypes.memmove(block.root.data_ptr() + block.root_low, source, block.nbytes)
            parcel.wanted -= 1
        else:
            block.root_low = parcel.skew
            block.root = memory
            parcel.wanted = 0
        if parcel.wanted <= 0:
            self._drop(parcel)
        block.root_version = block.root._version
        block.turn += 1
        block.served = 0
        self._hold(block)

    def _serve(self, entry: Entry) -> Tensor:
        block = entry.block
        assert block.root is not None
        view = entry.view_of(block.root, block.root_low)
        if entry.turn != block.turn:
            entry.turn = block.turn
            block.served += 1
        if block.served >= block.entries:  # every entry has had its use: the next one reads again
            self._drop(block)
        return view

    # Memory that is held: by a parcel until its blocks have come for it, then by each block.

    def _hold(self, holder: Parcel | Block) -> None:
        holder.held = holder.nbytes
        self.ahead_bytes += holder.held
        self._window.append(weakref.ref(holder))  # type: ignore[arg-type]

    def _drop(self, holder: Parcel | Block) -> None:
        holder.let_go()
        self.ahead_bytes -= holder.held
        self._freed(holder.held)
        holder.held = 0

    def _begin(self, parcel: Parcel) -> tuple[Tensor, Future[None]]:
        memory = self._pool.take(parcel.skew + parcel.nbytes)
        reading: Future[None] = Future()
        parcel.memory, parcel.reading = memory, reading
        parcel.wanted = parcel.blocks
        self._hold(parcel)
        self.read_bytes += parcel.nbytes
        return memory, reading

    def _memory_of(self, parcel: Parcel, block: Block) -> Tensor:
        """The parcel's bytes in memory, read by this thread unless they are there or coming."""
        with self._lock:
            memory, reading = parcel.memory, parcel.reading
            mine = memory is None or reading is None
            if memory is None or reading is None:
                self.misses += 1
                memory, reading = self._begin(parcel)
            elif parcel.ahead:
                parcel.ahead = False
                self.hits += 1
        began = time.perf_counter()
        try:
            with profiled("stall on the way up", block.module):
                if mine:
                    self._reader(block, "demand")(parcel, memory, reading)
                error = reading.exception()
        finally:
            self.stall_seconds += time.perf_counter() - began
            if self._tape.on:
                self._tape.tell("stall", 0, block.serial, block.module, cause="unpack", began=began)
        if error is None:
            return memory
        with self._lock:
            if parcel.reading is reading:
                self._drop(parcel)
        if mine:
            raise error
        return self._memory_of(parcel, block)  # a read ahead of need failed: ask again, and be told

    def ahead(self, block: Block) -> None:
        """After ``block`` was used: ask for what comes next, as far as the window goes."""
        self._shrink()
        for following in block.round.successors(block.index):
            parcel = following.parcel
            if following.alias is not None or parcel is None or parcel.memory is not None:
                continue
            if following.root is not None or following.turn >= max(block.turn, 1):
                continue  # at hand, or used in this pass: the node that runs now holds it still
            if isinstance(parcel, Segment) and parcel.buffer is not None:
                continue
            if self.ahead_bytes + parcel.nbytes > self._prefetch:
                break
            try:
                memory, reading = self._begin(parcel)
            except MemoryError:
                break
            parcel.ahead = True
            self._submit(self._reader(following, "ahead"), parcel, memory, reading)
        self.ahead_peak_bytes = max(self.ahead_peak_bytes, self.ahead_bytes)

    def _reader(self, block: Block, cause: str) -> Callable[[Parcel, Tensor, Future[None]], None]:
        if not self._tape.on:
            return _read
        what = (-1, "") if isinstance(block.parcel, Segment) else (block.serial, block.module)
        return functools.partial(_read_and_tell, self._tape, what, cause)

    def _shrink(self) -> None:
        """Bring what is held back under the budget, the longest held first; the newest is in use."""
        window = self._window
        while len(window) > 1 and self.ahead_bytes > self._prefetch:
            holder = window.popleft()()
            if holder is not None and holder.held:
                self._drop(holder)
        while window and ((first := window[0]()) is None or not first.held):
            window.popleft()

    def forked(self, lock: Any) -> None:
        """In a forked process: let go of what is held, since reads that had begun never end."""
        self._lock = lock
        while self._window:
            holder = self._window.popleft()()
            if holder is not None:
                self._drop(holder)


def _read(parcel: Parcel, memory: Tensor, reading: Future[None]) -> None:
    try:
        with profiled("read"):
            parcel.store.read(parcel.slot, memory.data_ptr() + parcel.skew)
    except BaseException as error:
        reading.set_exception(error)
    else:
        reading.set_result(None)


def _read_and_tell(
    tape: Tape,
    what: tuple[int, str],
    cause: str,
    parcel: Parcel,
    memory: Tensor,
    reading: Future[None],
) -> None:
    began = time.perf_counter()
    _read(parcel, memory, reading)
    tape.tell("read", parcel.nbytes, *what, cause=cause, began=began)
