"""Loads on demand and ahead of need. Each load serves all views that need the bytes."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from .._runtime.critical_section import CriticalSection
from .._runtime.trace import EventLog, profiled
from .._runtime.workers import Work
from .._saved.block import Block
from .._saved.entry import Entry
from .._saved.placement import Backing, Derivation, Load
from .ahead import AheadSet, ViewServer
from .base import LowerTier
from .making import MadeAhead

__all__ = ["Prefetcher"]

_LOOKS_IN_A_WINDOW = 128  # at most so many look-aheads while a window's bytes are used


class Prefetcher:
    """Loads blocks from the tier below. Methods are called inside ``section`` unless they say otherwise.

    Args:
        begin_work: hands a :class:`Work` to a worker.
        tier: holds the bytes; ``None`` if nothing ever moves.
        ahead: holds the loaded bytes.
        server: returns the views of entries.
        made: computes derived blocks ahead of need.
        section: the critical section of the stash.
        event_log: receives reads and stalls, while there is a recording.
    """

    def __init__(
        self,
        begin_work: Callable[[Work], None],
        tier: LowerTier | None,
        ahead: AheadSet,
        server: ViewServer,
        made: MadeAhead,
        section: CriticalSection,
        event_log: EventLog,
    ) -> None:
        self._begin_work = begin_work
        self._tier = tier
        self.ahead = ahead
        self._made = made
        self._take = server.take
        self.at_hand = server.at_hand
        """Returns the saved view of an entry, if the block's bytes are in memory."""
        self._section = section
        self._event_log = event_log
        self._used_bytes = 0  # by backward, since the last look-ahead
        self.read_bytes = 0
        self.stall_seconds = 0.0
        self.hits = self.misses = 0

    def load(self, block: Block) -> tuple[Load, bool]:
        """Return the load of a block's bytes, begun if necessary, and whether this call began it."""
        backing = block.placement.backing
        assert backing is not None
        load = backing.load
        if load is None:
            self.misses += 1
            self._used_bytes = self.ahead.window_bytes  # so that the next use looks ahead
            return self._begin_now(backing), True
        if backing.ahead:
            backing.ahead = False
            self.hits += 1
        return load, False

    def view(self, entry: Entry, load: Load, *, mine: bool) -> Tensor:
        """Return the saved view from the tier below. Called outside the section: it waits for the load.

        Args:
            entry: the entry of the view.
            load: the first result of :meth:`load`; ``mine`` is the second.

        Raises ``StashIOError`` if the store cannot read the bytes; the entry stays valid.
        """
        block, section = entry.block, self._section
        backing = block.placement.backing
        assert backing is not None
        while True:
            error = None if load.is_ready else self._wait(load, backing, block, mine)
            if error is not None and mine:
                raise error
            with section.lock, section:
                if block.loaded is not None:  # another thread has loaded the block meanwhile
                    ready = self.at_hand(entry)
                    if ready is not None:
                        self.look_ahead(block)
                        return ready
                # A load ahead of need that failed begins again, and so does one whose memory was modified by
                # another thread's backward.
                if error is None and load.memory._version == 0:
                    view = self._take(entry, block, backing, load.memory, load.arrival)
                    self.look_ahead(block)
                    return view
                load, mine = self.load(block)

    def made(
        self, entry: Entry, derivation: Derivation, used: Callable[[Entry], None]
    ) -> Tensor | None:
        """Return the saved view of a derived block whose computation began ahead of need; ``None`` if it has
        to be computed now. Called outside the section: it waits.

        Args:
            entry: an entry of the block.
            derivation: how to compute the block.
            used: called with each entry that it was computed from.
        """
        block, section = entry.block, self._section
        making = block.making
        if making is None:
            return None
        if not making.work.finished:
            with self._stall(block):
                making.work.wait()
        with section.lock, section:
            if block.making is making:
                view = self._made.take(entry, block, making, derivation)
                if view is None:
                    return None
                for each in derivation.entries:
                    used(each)
            else:  # another thread has taken it, or it was discarded
                view = self.at_hand(entry)
            if view is not None:
                self.hits += 1
                self._used_bytes = self.ahead.window_bytes  # few are begun at a time
                self.look_ahead(block)
            return view

    def serve_decoded(self, entry: Entry, root: Tensor, low: int, arrival: Any) -> Tensor:
        """Return the saved view of a derived block at ``low`` of ``root``. Called outside the section."""
        block, section = entry.block, self._section
        with section.lock, section:
            view = self.at_hand(entry)  # another thread may have decoded the block
            if view is None:
                self._made.drop(block)
                view = self._take(entry, block, None, root, arrival, low)
            self._used_bytes = self.ahead.window_bytes  # so that look_ahead does not return early
            self.look_ahead(block)
        return view

    def look_ahead(self, block: Block) -> None:
        """Begin to load the blocks that are expected after ``block``, as far as the window allows."""
        ahead = self.ahead
        if ahead.nbytes > ahead.window_bytes:
            ahead.shrink(to_bytes=ahead.window_bytes, using=block)
        makes = self._made.has_derived and not self._made.is_off
        if self._tier is None:
            if not makes:
                return
        elif self._tier.runs_ahead:
            self._tier.poll()
        self._used_bytes += block.nbytes // max(1, block.entries)  # each entry is used
        if self._used_bytes < ahead.window_bytes // _LOOKS_IN_A_WINDOW:
            return  # few bytes were used since the last look-ahead
        self._used_bytes = 0
        begun = self.read_bytes
        makes = makes and self._made.has_time()
        number, turn = block.number, max(block.turn, 1)
        for ref in block.forward_pass.successors(block.index):
            following = ref()
            if following is None or following.number != number:
                continue
            placement = following.placement
            if makes and (derived := _derived(following, turn)) is not None:
                if not self._made.begin(*derived):
                    break
                makes = self._made.has_time()
            backing = placement.backing
            if placement.alias is not None or backing is None or backing.load is not None:
                continue
            if following.loaded is not None or following.turn >= turn:
                continue  # in memory, or used in this pass: the node that runs now still holds it
            if backing.buffer is None and not self._begin_ahead(following, backing):
                break
        if self._tier is not None and self.read_bytes != begun:
            self._tier.begin_waiting()
        ahead.peak_bytes = max(ahead.peak_bytes, ahead.nbytes)

    def free(self) -> None:
        """Free all loaded bytes, since the device ran out of memory. Called outside the section."""
        with self._section.lock, self._section:
            self.ahead.shrink(to_bytes=0)

    # One load.

    def _begin(self, backing: Backing, *, ahead: bool) -> Load:
        assert self._tier is not None
        load = self._tier.fetch(backing, ahead=ahead)
        backing.load = load
        backing.wanted = backing.blocks
        self.ahead.hold(backing)
        self.read_bytes += backing.nbytes
        return load

    def _begin_now(self, backing: Backing) -> Load:
        try:
            return self._begin(backing, ahead=False)
        except torch.OutOfMemoryError:
            self.ahead.shrink(to_bytes=0)  # bytes read ahead are needed later; these are needed now
            return self._begin(backing, ahead=False)

    def _begin_ahead(self, block: Block, backing: Backing) -> bool:
        """Begin to read ahead of need. Return whether there was space."""
        assert self._tier is not None
        ahead, nbytes = self.ahead, backing.nbytes
        goes_beyond = not ahead.make_room(nbytes)
        if goes_beyond and not (self._tier.runs_ahead and ahead.may_go_beyond(nbytes)):
            return False
        if not ahead.has_memory(nbytes):
            return False
        try:
            load = self._begin(backing, ahead=True)
        except (MemoryError, torch.OutOfMemoryError):
            return False
        backing.ahead = True
        if goes_beyond:
            ahead.goes_beyond(backing)
        work, is_recorded = load.work, self._event_log.on
        if work is not None:
            runner = self._runner(work, backing, block, "ahead") if is_recorded else None
            self._begin_work(work if runner is None else Work(runner))
        elif is_recorded:
            self._event_log.emit("read", nbytes, *_named(block), cause="ahead")
        return True

    def _wait(self, load: Load, backing: Backing, block: Block, mine: bool) -> BaseException | None:
        """Wait for a load, or make it if no worker has begun it. Return the error, if there was one."""
        with self._stall(block):
            if load.work is not None:
                self._runner(load.work, backing, block, "demand" if mine else "ahead")()
            error = self._end_of(load)
        if error is not None:
            with self._section.lock, self._section:
                if backing.load is load:
                    self.ahead.drop_backing(backing)
        return error

    @contextmanager
    def _stall(self, block: Block) -> Iterator[None]:
        """Count the time inside this context as backward waiting for ``block``."""
        began = time.perf_counter()
        try:
            with profiled("stall on the way up", block.cleanup.module):
                yield
        finally:
            self.stall_seconds += time.perf_counter() - began
            if self._event_log.on:
                self._event_log.emit("stall", 0, *block.facts[1:], cause="unpack", began=began)

    def _end_of(self, load: Load) -> BaseException | None:
        try:
            return load.exception()
        except torch.OutOfMemoryError:
            self.free()
            return load.exception()

    def _runner(
        self, work: Work, backing: Backing, block: Block, cause: str
    ) -> Callable[[], object]:
        if not self._event_log.on:
            return work.run
        facts = (backing.nbytes, *_named(block))
        return functools.partial(_run_and_emit, self._event_log, work, facts, cause)


def _derived(block: Block, turn: int) -> tuple[Block, Derivation] | None:
    """Return ``block``, or the block that it is the payload of, if this pass must still compute that."""
    packs = block.cleanup.packs
    one = packs() if packs is not None else block
    derivation = one.placement.derivation if one is not None else None
    if one is None or derivation is None or one.turn >= turn:
        return None
    return None if one.loaded is not None or one.making is not None else (one, derivation)


def _named(block: Block) -> tuple[int, str]:
    backing = block.placement.backing
    return (-1, "") if backing is not None and backing.is_shared else block.facts[1:]


def _run_and_emit(event_log: EventLog, work: Work, facts: tuple[int, int, str], cause: str) -> None:
    began = time.perf_counter()
    if work.run():  # otherwise another thread has run and recorded it
        event_log.emit("read", *facts, cause=cause, began=began)
