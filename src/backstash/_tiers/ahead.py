"""What came back up and is held, and the views that entries are given of it.

Bytes that were read or made are held while entries still wait for them, or while they came ahead of need. What
is held counts against ``prefetch``; beyond that the oldest is dropped, which costs a second read and nothing
else, since the bytes below are never taken away before the last entry dies. The block in use is never dropped,
so that q, k and v cut from one projection come from one read however large it is. Nor is one block that is
larger than the window while entries of it wait, such as a mask that every layer saves: it is held beside the
window, one at a time, instead of being read for each layer.

A backward that retains its graph is perhaps followed by another, as where a pipeline's schedule takes the
gradients of a stage's input first and those of its weights later. What such a backward has read stays while
the window has room for it, until that other one has used it. A read ahead of need may take half of the window
from what stays so, the rest only what is needed now. The newest goes first: who comes first is served first,
and whoever goes through more than fits, again and again, would find nothing if the oldest went.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor

from .._device.fingerprint import fingerprint
from .._device.memory import DeviceMemory
from .._runtime.reclaim import Cleanup
from .._runtime.weak import WeakQueue
from .._saved.block import Block, BlockCleanup, Loaded, Mark
from .._saved.entry import Entry, written_unseen
from .._saved.placement import Backing
from .._torch.dispatch import without_dispatch_modes, without_function_modes
from .._torch.engine import current_node, keeps_graph, task_or_none

__all__ = ["AheadSet", "ViewServer"]


class AheadSet:
    """The memory that came back up: of a backing until its blocks have come for it, then of each block. Keeps
    the ``prefetch`` budget. The caller holds the stash's lock.

    Args:
        freed: is given the number of bytes that were let go.
        window_bytes: the budget.
        memory: of an accelerator; the CPU's pool says itself when it has none.
    """

    def __init__(
        self, freed: Callable[[int], None], *, window_bytes: int, memory: DeviceMemory | None
    ) -> None:
        self._freed = freed
        self._memory = memory
        self.window_bytes = window_bytes
        self.has_room: Callable[[int], bool] | None = None
        """Says whether so many bytes may come ahead of need; ``None``: as far as the window goes."""
        self._window = WeakQueue[Any](_is_loaded)  # oldest first
        self._again = WeakQueue[Block](_is_for_another)  # oldest first; in the window, too
        self._beyond: weakref.ref[Any] | None = None  # the one backing that may exceed the window
        self._beside: weakref.ref[Block] | None = None  # the one block that is held beside it
        self.nbytes = self.peak_bytes = 0
        self.again_bytes = 0
        """Those of :attr:`nbytes` that only another backward of a retained graph would want."""

    def hold(self, holder: Any) -> None:
        """A block, or a backing, holds its bytes from now on."""
        holder.cleanup.loaded_bytes = holder.nbytes
        self.nbytes += holder.nbytes
        self._window.append(holder)

    def drop_block(self, block: Block) -> None:
        """It holds none any more."""
        block.free()
        self._forget_again(block.cleanup)
        self.forget_bytes(block.cleanup)

    def drop_backing(self, backing: Backing) -> None:
        """It holds none any more."""
        backing.load = None
        backing.ahead = False
        if backing.cleanup.loaded_bytes:
            self.forget_bytes(backing.cleanup)

    def forget_bytes(self, cleanup: Cleanup) -> None:
        """What this counted was let go."""
        nbytes = cleanup.loaded_bytes
        self.nbytes -= nbytes
        cleanup.loaded_bytes = 0
        self._freed(nbytes)

    # What may come ahead of need.

    def has_memory(self, nbytes: int) -> bool:
        """Whether there is memory for so many bytes ahead of need, whatever the window is."""
        if self._memory is not None and not self._memory.has(nbytes):
            return False
        return self.has_room is None or self.has_room(nbytes)

    def fits(self, nbytes: int) -> bool:
        """Whether the window holds so many bytes more."""
        return self.nbytes <= self.window_bytes + self._beside_bytes() - nbytes

    def make_room(self, nbytes: int) -> bool:
        """The same; half of the window may be taken from what only another backward would want."""
        room = self.window_bytes + self._beside_bytes() - nbytes
        if self.nbytes > room and self.nbytes - self.again_bytes <= room // 2:
            self._give_way(room)
        return self.nbytes <= room

    def may_go_beyond(self, nbytes: int) -> bool:
        """Whether a backing that is larger than the window may come ahead all the same: one at a time."""
        if not 0 < self.window_bytes < nbytes:
            return False
        one = self._beyond() if self._beyond is not None else None
        return one is None or not one.cleanup.loaded_bytes

    def goes_beyond(self, backing: Backing) -> None:
        """It does."""
        self._beyond = weakref.ref(backing)

    def hold_served(self, block: Block) -> None:
        """Hold what a block is served from; beside the window, where it is larger than that and no other block
        of its forward pass is held there. One of another pass, of which backward has left entries unused, gives
        way."""
        self.hold(block)
        if block.nbytes <= self.window_bytes or self.window_bytes <= 0:
            return
        one = self._beside() if self._beside is not None else None
        if one is None or one.loaded is None or one.forward_pass is not block.forward_pass:
            self._beside = weakref.ref(block)

    def _beside_bytes(self) -> int:
        one = self._beside() if self._beside is not None else None
        return one.cleanup.loaded_bytes if one is not None else 0

    # What stays for another backward of a graph that is retained.

    def stays(self, block: Block) -> bool:
        """Whether ``block``, whose entries have all had their use, may stay; then it does."""
        if not (keeps_graph() and current_node()) or not self.has_memory(0):
            return False
        block.cleanup.again_bytes = block.nbytes
        self.again_bytes += block.nbytes
        self._again.append(block)
        return True

    def wanted_now(self, block: Block) -> None:
        """The other backward has come for it."""
        self._forget_again(block.cleanup)
        block.turn += 1
        block.served = 0

    def _forget_again(self, cleanup: BlockCleanup) -> None:
        self.again_bytes -= cleanup.again_bytes
        cleanup.again_bytes = 0

    def _give_way(self, to_bytes: int) -> None:
        """Bring what is held under ``to_bytes``, as far as what stays for another backward goes."""
        refs = self._again.refs
        while refs and self.nbytes > to_bytes:
            block = refs.pop()()
            if block is not None and block.cleanup.again_bytes:
                self.drop_block(block)

    # All of it.

    def shrink(self, *, to_bytes: int, using: Block | None = None) -> None:
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
        while window.refs and len(window.refs) + len(stay) > 1 and self.nbytes > to_bytes:
            holder = window.popleft()
            if holder is None:
                continue
            if holder is using or holder is beyond or holder is beside:
                stay.append(holder)
            else:
                holder.free()
                self.forget_bytes(holder.cleanup)
        for holder in reversed(stay):
            window.appendleft(holder)

    def forget(self) -> None:
        """No block is alive any more."""
        self._window.clear()
        self._again.clear()

    def restore(
        self, backings: list[Backing], blocks: list[Block], cleanups: dict[type, list[Any]]
    ) -> None:
        """Rebuild what follows from what there is: see ``Session``.

        Args:
            backings: that are alive, oldest first.
            blocks: that are alive, oldest first.
            cleanups: by their class, the dead ones' too.
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
        self.nbytes = sum(each.loaded_bytes for some in cleanups.values() for each in some)
        self.again_bytes = sum(each.again_bytes for each in cleanups[BlockCleanup])


class ViewServer:
    """Gives entries the views of what is in memory. The caller holds the stash's lock.

    Args:
        ahead: holds it.
        memory: of an accelerator; ``None`` for the CPU.
    """

    def __init__(self, ahead: AheadSet, memory: DeviceMemory | None) -> None:
        self._ahead = ahead
        self._memory = memory

    def at_hand(self, entry: Entry) -> Tensor | None:
        """The saved view, where the block's bytes are in memory."""
        block = entry.block
        loaded = block.loaded
        if loaded is not None:
            if loaded.is_good:
                return self._serve(entry, block, loaded)
            # A custom backward changed what it was given, or another backward asks for it: once more.
            self._ahead.drop_block(block)
        backing = block.placement.backing
        if backing is not None and backing.buffer is not None:
            return self.take(entry, block, backing, backing.buffer, None)
        return None

    def take(
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
            mark = block.mark
            if mark is not None and mark.matched and not backing.is_shared:
                self._check(entry, mark, root, low, arrival)
            if backing.wanted <= 0:
                self._ahead.drop_backing(backing)
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
        if slices is None or not slices.expected:
            # Otherwise in use, not ahead of need: each slice would have to read all of it.
            self._ahead.hold_served(block)
        return self._serve(entry, block, loaded)

    def _check(self, entry: Entry, mark: Mark, root: Tensor, low: int, arrival: Any) -> None:
        """A save relied on these bytes: the memory had them when they left, and again when it was saved.

        Between the two, while they were being copied, it may have had others.
        """
        storage, nbytes = root.untyped_storage(), entry.block.nbytes
        if self._memory is None:
            differs = mark.value != fingerprint(storage, low, nbytes)
        else:
            if arrival is not None:
                arrival.order()
            check = self._memory.device.compare(mark.value, storage, low, nbytes)
            differs = check is None or check.differs()
        if differs:
            raise written_unseen(entry)

    def _serve(self, entry: Entry, block: Block, loaded: Loaded) -> Tensor:
        if loaded.arrival is not None:
            loaded.arrival.order()
        view = entry.view_of(loaded.root, loaded.low)
        if block.cleanup.again_bytes:  # this is the other backward
            self._ahead.wanted_now(block)
        if entry.turn != block.turn:
            entry.turn = block.turn
            block.served += 1
        if block.served >= block.entries and not self._ahead.stays(block):
            self._ahead.drop_block(block)  # every entry has had its use: the next one reads again
        return view


def _is_loaded(holder: Any) -> int:
    return int(holder.cleanup.loaded_bytes)


def _is_for_another(block: Block) -> int:
    return block.cleanup.again_bytes
