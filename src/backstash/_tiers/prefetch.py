"""Loads on demand, and readahead: bytes come back once for all the views that want them.

What was read is held while entries still wait for it, or while it was read ahead of need. What is held counts
against ``prefetch``; beyond that the oldest is dropped, which costs a second read and nothing else, since the
bytes below are never taken away before the last entry dies. The block in use is never dropped, so that q, k
and v cut from one projection come from one read however large it is. Nor is one block that is larger than the
window while entries of it wait, such as a mask that every layer saves: it is held beside the window, one at a
time, instead of being read for each layer.

A backward that retains its graph is perhaps followed by another, as where a pipeline's schedule takes the
gradients of a stage's input first and those of its weights later. What such a backward has read stays while
the window has room for it, until that other one has used it. A read ahead of need may take half of the window
from what stays so, the rest only what is needed now. The newest goes first: who comes first is served first,
and whoever goes through more than fits, again and again, would find nothing if the oldest went.
"""

from __future__ import annotations

import functools
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .._device.fingerprint import fingerprint
from .._device.memory import DeviceMemory
from .._runtime.critical_section import CriticalSection
from .._runtime.reclaim import Cleanup
from .._runtime.trace import EventLog, profiled
from .._runtime.weak import WeakQueue
from .._runtime.workers import Work
from .._saved.block import Block, BlockCleanup, Loaded
from .._saved.entry import Entry, written_unseen
from .._saved.placement import Backing, Derivation, Load, NotAtHandError
from .._torch.dispatch import without_dispatch_modes, without_function_modes
from .._torch.engine import current_node, keeps_graph, task_or_none
from .base import LowerTier
from .making import Maker, Making, is_changed

__all__ = ["Prefetcher"]

_LOOKS_IN_A_WINDOW = 128  # ahead, at most, while as many bytes are used as the window holds


class Prefetcher:
    """Keeps the ``prefetch`` budget. Methods are called inside ``section`` unless they say otherwise.

    Args:
        begin_work: hands a piece of work to a worker.
        tier: that has the bytes; ``None`` where nothing ever moves.
        maker: of derived blocks ahead of need.
        section: the stash's.
        freed: is given the number of bytes that were let go.
        event_log: gets reads and stalls, where somebody records.
        prefetch: the budget in bytes.
        memory: of an accelerator; the CPU's pool says itself when it has none.
    """

    def __init__(
        self,
        begin_work: Callable[[Work], None],
        tier: LowerTier | None,
        maker: Maker,
        section: CriticalSection,
        freed: Callable[[int], None],
        event_log: EventLog,
        *,
        prefetch: int,
        memory: DeviceMemory | None = None,
    ) -> None:
        self._begin_work = begin_work
        self._tier = tier
        self._maker = maker
        self._section = section
        self._freed = freed
        self._event_log = event_log
        self.window_bytes = prefetch
        self._memory = memory
        self.has_room: Callable[[int], bool] | None = None
        """Says whether so many bytes may come ahead of need; ``None``: as far as the window goes."""
        self._used_bytes = 0  # by backward, since what comes next was looked at
        self._window = WeakQueue[Any](_is_loaded)  # oldest first
        self._again = WeakQueue[Block](
            _is_for_another
        )  # backward, oldest first; in the window, too
        self._beyond: weakref.ref[Any] | None = None  # the one backing that may exceed the window
        self._beside: weakref.ref[Block] | None = None  # the one block that is held beside it
        self.ahead_bytes = self.ahead_peak_bytes = 0
        self.again_bytes = 0
        """Those of ``ahead_bytes`` that only another backward of a retained graph would want."""
        self.read_bytes = 0
        self.stall_seconds = 0.0
        self.hits = self.misses = 0

    def at_hand(self, entry: Entry) -> Tensor | None:
        """The saved view, where the block's bytes are in memory."""
        block = entry.block
        loaded = block.loaded
        if loaded is not None:
            if loaded.is_good:
                return self._serve(entry, block, loaded)
            # A custom backward changed what it was given, or another backward asks for it: once more.
            self._drop_block(block)
        backing = block.placement.backing
        if backing is not None and backing.buffer is not None:
            return self._take(entry, block, backing, backing.buffer, None)
        return None

    def load(self, block: Block) -> tuple[Load, bool]:
        """The load that brings a block's bytes, begun if it was not; and whether it was begun here."""
        backing = block.placement.backing
        assert backing is not None
        load = backing.load
        if load is None:
            self.misses += 1
            self._used_bytes = self.window_bytes  # it is high time to look ahead
            return self._begin_now(backing), True
        if backing.ahead:
            backing.ahead = False
            self.hits += 1
        return load, False

    def view(self, entry: Entry, load: Load, *, mine: bool) -> Tensor:
        """The saved view from below. Outside the section: it waits for the load.

        Args:
            entry: whose view it is.
            load: from :meth:`load`, as ``mine``.

        Raises ``StashIOError`` when the store cannot give the bytes; the entry stays whole.
        """
        block, section = entry.block, self._section
        backing = block.placement.backing
        assert backing is not None
        while True:
            error = None if load.is_ready else self._wait(load, backing, block, mine)
            if error is not None and mine:
                raise error
            with section.lock, section:
                if block.loaded is not None:  # another thread has served the block meanwhile
                    ready = self.at_hand(entry)
                    if ready is not None:
                        self.ahead(block)
                        return ready
                # One ahead of need that failed is begun again, and so is one whose memory another
                # thread's backward has changed.
                if error is None and load.memory._version == 0:
                    view = self._take(entry, block, backing, load.memory, load.arrival)
                    self.ahead(block)
                    return view
                load, mine = self.load(block)

    def serve_decoded(self, entry: Entry, root: Tensor, low: int, arrival: Any) -> Tensor:
        """The saved view of a packed block, whose bytes begin at ``low`` of ``root``. Outside the section."""
        block, section = entry.block, self._section
        with section.lock, section:
            view = self.at_hand(entry)  # another thread may have decoded the block meanwhile
            if view is None:
                self._drop_making(block)
                view = self._take(entry, block, None, root, arrival, low)
            self._used_bytes = self.window_bytes  # it is high time to look ahead
            self.ahead(block)
        return view

    # Derived blocks that a worker makes ahead of need.

    def made(
        self, entry: Entry, derivation: Derivation, used: Callable[[Entry], None]
    ) -> Tensor | None:
        """The saved view of a derived block that was begun ahead of need; ``None``: it is to be made now.
        Outside the section: it waits.

        Args:
            entry: of the block.
            derivation: of it.
            used: is given each entry that it was made from.
        """
        block, section = entry.block, self._section
        making: Making | None = block.making
        if making is None:
            return None
        if not making.work.finished:
            self._wait_for(making, block)
        with section.lock, section:
            if block.making is making:
                view = self._take_made(entry, block, making, derivation)
                if view is None:
                    return None
                for each in derivation.entries:
                    used(each)
            else:  # another thread has come for it, or it was dropped
                view = self.at_hand(entry)
            if view is not None:
                self.hits += 1
                self._used_bytes = self.window_bytes  # few are begun at a time
                self.ahead(block)
            return view

    def _wait_for(self, making: Making, block: Block) -> None:
        began = time.perf_counter()
        try:
            with profiled("stall on the way up", block.cleanup.module):
                making.work.wait()
        finally:
            self.stall_seconds += time.perf_counter() - began
            if self._event_log.on:
                self._event_log.emit("stall", 0, *block.facts[1:], cause="unpack", began=began)

    def _take_made(
        self, entry: Entry, block: Block, making: Making, derivation: Derivation
    ) -> Tensor | None:
        """The saved view of what has been made; ``None``: it is not what it was, or raises an error."""
        self._drop_making(block)
        if not making.is_good:
            self._maker.was_bad(making)
            return None
        if is_changed(derivation):
            return None
        return self._take(entry, block, None, making.root, None, making.low)

    def _drop_making(self, block: Block) -> None:
        if block.making is not None:
            block.making = None
            self._forget_bytes(block.cleanup)

    def _make_ahead(self, block: Block, derivation: Derivation) -> bool:
        """Begin to make ``block`` ahead of need, where what it is made from is at hand; whether there was
        room."""
        maker = self._maker
        if self.ahead_bytes > self.window_bytes + self._beside_bytes() - block.nbytes:
            return False
        if self.has_room is not None and not self.has_room(block.nbytes):
            return False
        if not all(map(self._is_at_hand, derivation.entries)) or is_changed(derivation):
            return True
        try:
            with without_function_modes(), torch.no_grad():
                given = derivation.given_ahead(self._for_another)
            making = maker.prepare(block, derivation, given)
        except NotAtHandError:
            return True
        except MemoryError:
            return False
        block.making = making
        self._hold(block)
        maker.begin(making)
        return True

    def _is_at_hand(self, entry: Entry) -> bool:
        """Whether the bytes are in memory, without waiting for them or comparing them."""
        block = entry.block
        placement, loaded = block.placement, block.loaded
        if placement.alias is not None:
            return not block.has_moved
        if loaded is not None:
            return loaded.is_good
        if block.making is not None:
            return bool(block.making.is_good)
        backing = placement.backing
        load = backing.load if backing is not None else None
        return load is not None and load.is_ready and not (block.matched or load.memory._version)

    def _for_another(self, entry: Entry) -> Tensor:
        """The view of an entry that is at hand, whose use it is."""
        block = entry.block
        placement, making = block.placement, block.making
        if placement.alias is not None:
            return entry.view_in_place(placement.alias)
        view = self.at_hand(entry)
        if view is None and making is not None and placement.derivation is not None:
            view = self._take_made(entry, block, making, placement.derivation)
        elif view is None and placement.backing is not None and placement.backing.load is not None:
            load = placement.backing.load
            view = self._take(entry, block, placement.backing, load.memory, load.arrival)
        if view is None:
            raise NotAtHandError
        return view

    def _take(
        self,
        entry: Entry,
        block: Block,
        backing: Backing | None,
        memory: Tensor,
        arrival: Any,
        low: int = 0,
    ) -> Tensor:
        """Make the one storage that all of the block's views share, and serve the first of them.

        Without a ``backing``, it is ``memory``, in which the block begins at ``low``.
        """
        root = memory
        if backing is not None:
            root, low = backing.storage_for(block.offset, block.address, block.nbytes, memory)
            if block.matched and not backing.is_shared:
                self._check(entry, block, root, low, arrival)
            if backing.wanted <= 0:
                self._drop_backing(backing)
        block.turn += 1
        if block.entries == 1 and not (keeps_graph() and current_node()):  # nothing to hold
            entry.turn, block.served = block.turn, 1
            if arrival is not None:
                arrival.order()
            return entry.view_of(root, low)
        block.served = 0
        if root.dtype != entry.dtype:
            with without_function_modes(), without_dispatch_modes():
                root = entry.in_its_dtype(root)  # once for all entries
        # One assignment: an interrupt finds all of it or nothing.
        derivation = block.placement.derivation
        is_asked = self._memory is not None and derivation is not None and derivation.fingerprint
        loaded = block.loaded = Loaded(root, low, arrival, task_or_none() if is_asked else -1)
        slices = block.storage_version.slices
        if slices is not None and slices.expected:
            # In use, not ahead of need: each slice would have to read all of it.
            return self._serve(entry, block, loaded)
        self._hold(block)
        if block.nbytes > self.window_bytes > 0 and self._may_stay_beside(block):
            self._beside = weakref.ref(block)
        return self._serve(entry, block, loaded)

    def _check(self, entry: Entry, block: Block, root: Tensor, low: int, arrival: Any) -> None:
        """A save relied on these bytes: the memory had them when they left, and again when it was saved.

        Between the two, while they were being copied, it may have had others.
        """
        storage, nbytes = root.untyped_storage(), block.nbytes
        if self._memory is None:
            differs = block.fingerprint != fingerprint(storage, low, nbytes)
        else:
            if arrival is not None:
                arrival.order()
            check = self._memory.device.compare(block.fingerprint, storage, low, nbytes)
            differs = check is None or check.differs()
        if differs:
            raise written_unseen(entry)

    def _serve(self, entry: Entry, block: Block, loaded: Loaded) -> Tensor:
        if loaded.arrival is not None:
            loaded.arrival.order()
        view = entry.view_of(loaded.root, loaded.low)
        cleanup = block.cleanup
        if cleanup.again_bytes:  # this is the other backward
            self._wanted_now(block)
        if entry.turn != block.turn:
            entry.turn = block.turn
            block.served += 1
        if block.served >= block.entries and not self._stays(block):
            self._drop_block(block)  # every entry has had its use: the next one reads again
        return view

    # What stays for another backward of a graph that is retained.

    def _stays(self, block: Block) -> bool:
        """Whether ``block``, whose entries have all had their use, may stay; then it does."""
        if not (keeps_graph() and current_node()):
            return False
        if self._memory is not None and not self._memory.has(0):
            return False
        if self.has_room is not None and not self.has_room(0):
            return False
        block.cleanup.again_bytes = block.nbytes
        self.again_bytes += block.nbytes
        self._again.append(block)
        return True

    def _wanted_now(self, block: Block) -> None:
        self._forget_again(block.cleanup)
        block.turn += 1
        block.served = 0

    def _forget_again(self, cleanup: BlockCleanup) -> None:
        self.again_bytes -= cleanup.again_bytes
        cleanup.again_bytes = 0

    def _give_way(self, to_bytes: int) -> None:
        """Bring what is held under ``to_bytes``, as far as what stays for another backward goes."""
        refs = self._again.refs
        while refs and self.ahead_bytes > to_bytes:
            block = refs.pop()()
            if block is not None and block.cleanup.again_bytes:
                self._drop_block(block)

    # Memory that is held: by a backing until its blocks have come for it, then by each block.

    def _hold(self, holder: Any) -> None:
        holder.cleanup.loaded_bytes = holder.nbytes
        self.ahead_bytes += holder.nbytes
        self._window.append(holder)

    def _drop_block(self, block: Block) -> None:
        block.loaded = block.making = None
        self._forget_again(block.cleanup)
        self._forget_bytes(block.cleanup)

    def _drop_backing(self, backing: Backing) -> None:
        backing.load = None
        backing.ahead = False
        if backing.cleanup.loaded_bytes:
            self._forget_bytes(backing.cleanup)

    def _forget_bytes(self, cleanup: Cleanup) -> None:
        nbytes = cleanup.loaded_bytes
        self.ahead_bytes -= nbytes
        cleanup.loaded_bytes = 0
        self._freed(nbytes)

    def _begin(self, backing: Backing, *, ahead: bool) -> Load:
        assert self._tier is not None
        load = self._tier.fetch(backing, ahead=ahead)
        backing.load = load
        backing.wanted = backing.blocks
        self._hold(backing)
        self.read_bytes += backing.nbytes
        return load

    def _wait(self, load: Load, backing: Backing, block: Block, mine: bool) -> BaseException | None:
        """Wait for a load, made by this thread where no worker has begun it; the error, if there was one."""
        began = time.perf_counter()
        try:
            with profiled("stall on the way up", block.cleanup.module):
                if load.work is not None:
                    self._runner(load.work, backing, block, "demand" if mine else "ahead")()
                error = self._end_of(load)
        finally:
            self.stall_seconds += time.perf_counter() - began
            if self._event_log.on:
                self._event_log.emit("stall", 0, *block.facts[1:], cause="unpack", began=began)
        if error is not None:
            with self._section.lock, self._section:
                if backing.load is load:
                    self._drop_backing(backing)
        return error

    def _begin_now(self, backing: Backing) -> Load:
        try:
            return self._begin(backing, ahead=False)
        except torch.OutOfMemoryError:
            self._shrink(to_bytes=0)  # what was read ahead is needed later, this now
            return self._begin(backing, ahead=False)

    def _end_of(self, load: Load) -> BaseException | None:
        try:
            return load.exception()
        except torch.OutOfMemoryError:
            with self._section.lock, self._section:
                self._shrink(to_bytes=0)
            return load.exception()

    def ahead(self, block: Block) -> None:
        """After ``block`` was used: ask for what comes next, as far as the window goes."""
        if self.ahead_bytes > self.window_bytes:
            self._shrink(to_bytes=self.window_bytes, using=block)
        makes = self._maker.has_derived
        if self._tier is None:
            if not makes:
                return
        elif self._tier.runs_ahead:
            self._tier.poll()
        self._used_bytes += block.nbytes // max(1, block.entries)  # each of them is used
        if self._used_bytes < self.window_bytes // _LOOKS_IN_A_WINDOW:
            return  # small ones, and what comes next was asked for
        self._used_bytes = 0
        makes = makes and self._maker.has_time()
        number, turn = block.number, max(block.turn, 1)
        for ref in block.forward_pass.successors(block.index):
            following = ref()
            if following is None or following.number != number:
                continue
            placement = following.placement
            if makes and (derived := _derived(following, turn)) is not None:
                if not self._make_ahead(*derived):
                    break
                makes = self._maker.has_time()
            backing = placement.backing
            if placement.alias is not None or backing is None or backing.load is not None:
                continue
            if following.loaded is not None or following.turn >= turn:
                continue  # at hand, or used in this pass: the node that runs now holds it still
            if backing.buffer is None and not self._begin_ahead(following, backing):
                break
        if self.ahead_bytes > self.ahead_peak_bytes:
            self.ahead_peak_bytes = self.ahead_bytes

    def _begin_ahead(self, block: Block, backing: Backing) -> bool:
        """Begin to read ahead of need; whether there was room."""
        room = self.window_bytes + self._beside_bytes() - backing.nbytes
        if self.ahead_bytes > room and self.ahead_bytes - self.again_bytes <= room // 2:
            self._give_way(room)
        goes_beyond = self.ahead_bytes > room
        if goes_beyond and not self._may_go_beyond(backing.nbytes):
            return False
        if self._memory is not None and not self._memory.has(backing.nbytes):
            return False
        if self.has_room is not None and not self.has_room(backing.nbytes):
            return False
        try:
            load = self._begin(backing, ahead=True)
        except (MemoryError, torch.OutOfMemoryError):
            return False
        backing.ahead = True
        if goes_beyond:
            self._beyond = weakref.ref(backing)
        work, is_recorded = load.work, self._event_log.on
        if work is not None:
            runner = self._runner(work, backing, block, "ahead") if is_recorded else None
            self._begin_work(work if runner is None else Work(runner))
        elif is_recorded:
            self._event_log.emit("read", backing.nbytes, *_named(block), cause="ahead")
        return True

    def _runner(
        self, work: Work, backing: Backing, block: Block, cause: str
    ) -> Callable[[], object]:
        if not self._event_log.on:
            return work.run
        facts = (backing.nbytes, *_named(block))
        return functools.partial(_run_and_emit, self._event_log, work, facts, cause)

    def _may_go_beyond(self, nbytes: int) -> bool:
        """Whether a backing that is larger than the window may come ahead all the same: one at a time."""
        if self._tier is None or not self._tier.runs_ahead or not 0 < self.window_bytes < nbytes:
            return False
        one = self._beyond() if self._beyond is not None else None
        return one is None or not one.cleanup.loaded_bytes

    def _may_stay_beside(self, block: Block) -> bool:
        """Whether ``block`` may be held beside the window: no other of its forward pass is.

        One of another pass, of which backward has left entries unused, gives way.
        """
        one = self._beside() if self._beside is not None else None
        return one is None or one.loaded is None or one.forward_pass is not block.forward_pass

    def _beside_bytes(self) -> int:
        one = self._beside() if self._beside is not None else None
        return one.cleanup.loaded_bytes if one is not None else 0

    def _shrink(self, *, to_bytes: int, using: Block | None = None) -> None:
        """Bring what is held under ``to_bytes``, the longest held first; what is in use stays.

        The block beside the window stays too, and is not counted, unless all has to go.
        """
        window = self._window
        stay: list[Any] = []
        beyond = self._beyond() if self._beyond is not None and to_bytes else None
        beside = self._beside() if self._beside is not None and to_bytes else None
        if beside is not None:
            to_bytes += beside.cleanup.loaded_bytes
        self._give_way(to_bytes)
        while window.refs and len(window.refs) + len(stay) > 1 and self.ahead_bytes > to_bytes:
            holder = window.popleft()
            if holder is None:
                continue
            if holder is using or holder is beyond or holder is beside:
                stay.append(holder)
            else:
                holder.let_go()
                self._forget_bytes(holder.cleanup)
        for holder in reversed(stay):
            window.appendleft(holder)

    def let_go(self) -> None:
        """Let go of what is held: the device ran out of memory. Outside the section."""
        with self._section.lock, self._section:
            self._shrink(to_bytes=0)

    def forget(self) -> None:
        """No block is alive any more."""
        self._window.clear()
        self._again.clear()

    def restore(self, backings: list[Backing], blocks: list[Block]) -> None:
        """Rebuild what follows from what there is: see ``_session``.

        Args:
            backings: that are alive, oldest first.
            blocks: that are alive, oldest first.
        """
        self._window = WeakQueue[Any](_is_loaded)
        self._again = WeakQueue[Block](_is_for_another)
        for backing in backings:
            backing.cleanup.loaded_bytes = backing.nbytes if backing.load is not None else 0
            if backing.cleanup.loaded_bytes:
                self._window.append(backing)
        for block in blocks:
            cleanup = block.cleanup
            is_held = block.loaded is not None or block.making is not None
            cleanup.loaded_bytes = block.nbytes if is_held else 0
            cleanup.again_bytes = min(cleanup.again_bytes, cleanup.loaded_bytes)
            if cleanup.loaded_bytes:
                self._window.append(block)
            if cleanup.again_bytes:
                self._again.append(block)


def _is_loaded(holder: Any) -> int:
    return int(holder.cleanup.loaded_bytes)


def _is_for_another(block: Block) -> int:
    return block.cleanup.again_bytes


def _derived(block: Block, turn: int) -> tuple[Block, Derivation] | None:
    """``block``, or what it is the payload of, if that is derived and neither at hand nor used in this pass."""
    one = block.packs() if block.packs is not None else block
    derivation = one.placement.derivation if one is not None else None
    if one is None or derivation is None or one.turn >= turn:
        return None
    return None if one.loaded is not None or one.making is not None else (one, derivation)


def _named(block: Block) -> tuple[int, str]:
    backing = block.placement.backing
    return (-1, "") if backing is not None and backing.is_shared else block.facts[1:]


def _run_and_emit(event_log: EventLog, work: Work, facts: tuple[int, int, str], cause: str) -> None:
    began = time.perf_counter()
    if work.run():  # else another thread has, and recorded it
        event_log.emit("read", *facts, cause=cause, began=began)
