"""Making the books anew, after an interrupt may have left them in the middle of an entry.

A ``KeyboardInterrupt`` can come between any two calls, a ``MemoryError`` in most of them. What is *true* is
changed by single steps that neither can divide: what a block, a parcel or their remains hold. All sums,
queues and free lists follow from it. So whoever next takes the lock after a thread that did not leave in
good order makes those anew, from every object that is alive, which Python's collector knows.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from ._blocks import Block
from ._host_parcels import HostParcel
from ._remains import BlockRemains, HostRemains, ParcelRemains

if TYPE_CHECKING:
    from ._books import Books
    from ._lanes import Lane
    from ._sides import Side

__all__ = ["repair"]


def repair(books: Books, lanes: Iterable[Lane]) -> None:
    """Make the books anew. The caller holds the lock.

    Args:
        lanes: of the threads that have used the stash.
    """
    kinds = (Block, BlockRemains, ParcelRemains, HostRemains)
    # What gc.freeze() has taken out of the collector's sight is not found: nobody freezes a live graph.
    mine = [
        each
        for each in gc.get_objects()
        if type(each) in kinds and _mark_of(each) is books.grave.mark
    ]
    remains = [each for each in mine if not isinstance(each, Block)]
    blocks = [each for each in mine if isinstance(each, Block) and each.remains.serial >= 0]
    blocks.sort(key=lambda block: block.remains.serial)
    waiting = {id(block) for lane in lanes for ref, _ in lane.waiting if (block := ref())}
    for side in books.sides:
        _restore(side, [block for block in blocks if block.side is side], waiting, remains)
    books.blocks_alive = sum(_is_counted(each) for each in remains)


def _restore(side: Side, blocks: list[Block], waiting: set[int], remains: list[Any]) -> None:
    mine = [each for each in remains if each.number == side.number]
    parcels = list({id(block.parcel): block.parcel for block in blocks if block.parcel}.values())
    side.down.restore(blocks, waiting, mine)
    side.up.restore([*parcels, *blocks])
    side.up.ahead_bytes = sum(each.held for each in mine)
    if side.host is not None:
        of_host = [each for each in parcels if isinstance(each, HostParcel)]
        side.host.restore(of_host, [each for each in mine if isinstance(each, HostRemains)])


def _mark_of(each: Any) -> Any:
    try:
        return (each.remains if isinstance(each, Block) else each).mark
    except AttributeError:  # it was not made to its end
        return None


def _is_counted(each: Any) -> bool:
    return isinstance(each, BlockRemains) and each.serial >= 0
