"""The loaded bytes that are held in memory, and the views of them.

Bytes that were loaded or computed are held while entries still need them, or if they came ahead of need. They
count against ``prefetch``. Beyond that the oldest are freed, which costs only a second read, since the bytes
in the tier below stay until the last entry dies. The block in use is never freed, so q, k and v cut from one
projection come from one read, however large it is. The same holds for one block that is larger than the window
while its entries need it, such as a mask that every layer saves: it is held in addition to the window, one
block at a time, instead of being read for each layer.

A backward that retains its graph may be followed by another one. For example, a pipeline schedule may compute
the gradients of a stage's input first and those of its weights later. Bytes that such a backward has loaded
stay while the window has space for them, until the other backward has used them. A read ahead of need may take
half of the window from them; only a read that is needed now may take the rest. The newest are freed first: a
loop over more bytes than fit would never find its next block if the oldest were freed.
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
    """Holds the loaded memory: of a backing until its blocks have taken their bytes, then of each block. Keeps
    the ``prefetch`` budget. The caller holds the stash's lock.

    Args:
        freed: called with the number of bytes that were freed.
        window_bytes: the budget.
        memory: the memory of an accelerator; ``None`` for the CPU, whose pool raises if there is none.
    """

    def __init__(
        self, freed: Callable[[int], None], *, window_bytes: int, memory: DeviceMemory | None
    ) -> None:
        self._freed = freed
        self._memory = memory
        self.window_bytes = window_bytes
        self.has_room: Callable[[int], bool] | None = None
        """Returns whether so many bytes may be loaded ahead of need; ``None``: only the window limits them."""
        self._window = WeakQueue[Any](_is_loaded)  # oldest first
        self._again = WeakQueue[Block](_is_for_another)  # oldest first; also in the window
        self._beyond: weakref.ref[Any] | None = None  # the one backing that may exceed the window
        self._extra: weakref.ref[Block] | None = None  # the one block held in addition to it
        self.nbytes = self.peak_bytes = 0
        self.again_bytes = 0
        """The part of :attr:`nbytes` that only another backward of a retained graph would need."""

    def hold(self, holder: Any) -> None:
        """Count the bytes of a block or a backing as held."""
        holder.cleanup.loaded_bytes = holder.nbytes
        self.nbytes += holder.nbytes
        self._window.append(holder)

    def drop_block(self, block: Block) -> None:
        """Free the loaded bytes of ``block``."""
        block.free()
        self._forget_again(block.cleanup)
        self.forget_bytes(block.cleanup)

    def drop_backing(self, backing: Backing) -> None:
        """Free the loaded bytes of ``backing``."""
        backing.load = None
        backing.ahead = False
        if backing.cleanup.loaded_bytes:
            self.forget_bytes(backing.cleanup)

    def forget_bytes(self, cleanup: Cleanup) -> None:
        """Stop counting the loaded bytes of ``cleanup``, which were freed."""
        nbytes = cleanup.loaded_bytes
        self.nbytes -= nbytes
        cleanup.loaded_bytes = 0
        self._freed(nbytes)

    # Bytes ahead of need.

    def has_memory(self, nbytes: int) -> bool:
        """Return whether there is memory for so many bytes ahead of need, regardless of the window."""
        if self._memory is not None and not self._memory.has(nbytes):
            return False
        return self.has_room is None or self.has_room(nbytes)

    def fits(self, nbytes: int) -> bool:
        """Return whether the window has space for so many bytes more."""
        return self.nbytes <= self.window_bytes + self._extra_bytes() - nbytes

    def make_room(self, nbytes: int) -> bool:
        """Like :meth:`fits`, but may free half of the window from bytes for another backward."""
        room = self.window_bytes + self._extra_bytes() - nbytes
        if self.nbytes > room and self.nbytes - self.again_bytes <= room // 2:
            self._give_way(room)
        return self.nbytes <= room

    def may_go_beyond(self, nbytes: int) -> bool:
        """Return whether a backing larger than the window may be loaded ahead of need. One at a time may."""
        if not 0 < self.window_bytes < nbytes:
            return False
        one = self._beyond() if self._beyond is not None else None
        return one is None or not one.cleanup.loaded_bytes

    def goes_beyond(self, backing: Backing) -> None:
        """Record that ``backing``, larger than the window, is loaded ahead of need."""
        self._beyond = weakref.ref(backing)

    def hold_served(self, block: Block) -> None:
        """Hold the loaded bytes of ``block``. If it is larger than the window, and no other block of its
        forward pass has that place, it is held in addition to the window. A block of another pass, of which
        backward left entries unused, loses the place.
        """
        self.hold(block)
        if block.nbytes <= self.window_bytes or self.window_bytes <= 0:
            return
        one = self._extra() if self._extra is not None else None
        if one is None or one.loaded is None or one.forward_pass is not block.forward_pass:
            self._extra = weakref.ref(block)

    def _extra_bytes(self) -> int:
        one = self._extra() if self._extra is not None else None
        return one.cleanup.loaded_bytes if one is not None else 0

    # Bytes for another backward of a retained graph.

    def stays(self, block: Block) -> bool:
        """Return whether ``block``, whose entries were all used, stays for another backward."""
        if not (keeps_graph() and current_node()) or not self.has_memory(0):
            return False
        block.cleanup.again_bytes = block.nbytes
        self.again_bytes += block.nbytes
        self._again.append(block)
        return True

    def wanted_now(self, block: Block) -> None:
        """Record that the other backward uses ``block``."""
        self._forget_again(block.cleanup)
        block.turn += 1
        block.served = 0

    def _forget_again(self, cleanup: BlockCleanup) -> None:
        self.again_bytes -= cleanup.again_bytes
        cleanup.again_bytes = 0

    def _give_way(self, to_bytes: int) -> None:
        """Free bytes that are held for another backward until at most ``to_bytes`` are held."""
        refs = self._again.refs
        while refs and self.nbytes > to_bytes:
            block = refs.pop()()
            if block is not None and block.cleanup.again_bytes:
                self.drop_block(block)

    # All held bytes.

    def shrink(self, *, to_bytes: int, using: Block | None = None) -> None:
        """Free the bytes that were held longest until at most ``to_bytes`` are held. Bytes in use stay.

        The block in addition to the window stays, too, and does not count, unless ``to_bytes`` is 0.
        """
        window = self._window
        stay: list[Any] = []
        beyond = self._beyond() if self._beyond is not None and to_bytes else None
        extra = self._extra() if self._extra is not None and to_bytes else None
        if extra is not None:
            to_bytes += extra.cleanup.loaded_bytes
        self._give_way(to_bytes)
        while window.refs and len(window.refs) + len(stay) > 1 and self.nbytes > to_bytes:
            holder = window.popleft()
            if holder is None:
                continue
            if holder is using or holder is beyond or holder is extra:
                stay.append(holder)
            else:
                holder.free()
                self.forget_bytes(holder.cleanup)
        for holder in reversed(stay):
            window.appendleft(holder)

    def forget(self) -> None:
        """Forget all blocks, since none is alive."""
        self._window.clear()
        self._again.clear()

    def restore(
        self, backings: list[Backing], blocks: list[Block], cleanups: dict[type, list[Any]]
    ) -> None:
        """Rebuild the counts and queues from the living blocks: see ``Session``.

        Args:
            backings: the living backings, oldest first.
            blocks: the living blocks, oldest first.
            cleanups: by class, including those of dead objects.
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
    """Returns the views of entries whose bytes are in memory. The caller holds the stash's lock.

    Args:
        ahead: holds the bytes.
        memory: the memory of an accelerator; ``None`` for the CPU.
    """

    def __init__(self, ahead: AheadSet, memory: DeviceMemory | None) -> None:
        self._ahead = ahead
        self._memory = memory

    def at_hand(self, entry: Entry) -> Tensor | None:
        """Return the saved view if the block's bytes are in memory."""
        block = entry.block
        loaded = block.loaded
        if loaded is not None:
            if loaded.is_good:
                return self._serve(entry, block, loaded)
            # A custom backward modified the bytes, or another backward needs them: load or compute them again.
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
        """Create the storage that all views of the block share, and return the view of ``entry``.

        Without a ``backing``, it is the storage of ``memory``, in which the block begins at ``low``.
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
        # A single assignment, so that an interrupt finds all of it or nothing.
        derivation = block.placement.derivation
        is_asked = self._memory is not None and derivation is not None and derivation.fingerprint
        loaded = block.loaded = Loaded(root, low, arrival, task_or_none() if is_asked else -1)
        slices = block.storage_version.slices
        if slices is None or not slices.expected:
            # Not for a block of expected slices: the window must not free it, since each slice would read all
            # of it again.
            self._ahead.hold_served(block)
        return self._serve(entry, block, loaded)

    def _check(self, entry: Entry, mark: Mark, root: Tensor, low: int, arrival: Any) -> None:
        """Check loaded bytes that a later save relied on. They matched when the block left memory and when it
        was saved again, but the memory may have held other bytes while it was copied.
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
        if block.cleanup.again_bytes:  # this backward is the other one
            self._ahead.wanted_now(block)
        if entry.turn != block.turn:
            entry.turn = block.turn
            block.served += 1
        if block.served >= block.entries and not self._ahead.stays(block):
            self._ahead.drop_block(block)  # every entry was used: the next use loads it again
        return view


def _is_loaded(holder: Any) -> int:
    return int(holder.cleanup.loaded_bytes)


def _is_for_another(block: Block) -> int:
    return block.cleanup.again_bytes
