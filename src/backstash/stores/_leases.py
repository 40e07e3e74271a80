"""Extents, each lent to an object for as long as that lives: nothing is lost that nobody gave back."""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any

from ._extents import Extents

__all__ = ["Leases"]


class Leases:
    """:class:`Extents` whose truth is who has one. Not locked: the caller holds its lock.

    An interrupt may come between the taking of an extent and the moment when anybody owns it, and in the
    middle of the free lists. So an owner's death gives its extent back, and free lists that were left half
    done are made anew from the owners that are alive.
    """

    __slots__ = ("_dirty", "_dropped", "_extents", "_lent")

    def __init__(self, *, unit_bytes: int) -> None:
        self._extents = Extents(unit_bytes=unit_bytes)
        self._lent: dict[int, weakref.KeyedRef[tuple[int, int], Any]] = {}  # by offset
        self._dropped: deque[weakref.KeyedRef[tuple[int, int], Any]] = deque()
        self._dirty = False

    @property
    def end_bytes(self) -> int:
        """See :attr:`Extents.end_bytes`."""
        return self._extents.end_bytes

    @property
    def used_bytes(self) -> int:
        """See :attr:`Extents.used_bytes`."""
        return self._extents.used_bytes

    @property
    def in_order(self) -> bool:
        """Whether :meth:`settle` has nothing to do."""
        return not (self._dirty or self._dropped)

    def take(self, owner: object, nbytes: int) -> int:
        """Take ``nbytes`` for ``owner`` and return the offset."""
        self.settle()
        self._dirty = True
        offset = self._extents.take(nbytes)
        # The callback is the deque's own: it may come on any thread in the middle of anything.
        self._lent[offset] = weakref.KeyedRef(owner, self._dropped.append, (offset, nbytes))
        self._dirty = False
        return offset

    def free(self, offset: int) -> None:
        """Give back what was taken at ``offset``; nothing happens where that was done."""
        self.settle()
        ref = self._lent.get(offset)
        if ref is not None:
            self._free(ref)

    def _free(self, ref: weakref.KeyedRef[tuple[int, int], Any]) -> None:
        offset, nbytes = ref.key
        self._dirty = True
        del self._lent[offset]
        self._extents.free(offset, nbytes)
        self._dirty = False

    def settle(self) -> None:
        """Mend what was left half done, and take back what the dead had."""
        if self._dirty:
            self._extents.restore(ref.key for ref in self._lent.values())
            self._dirty = False
        while self._dropped:
            ref = self._dropped[0]
            if self._lent.get(ref.key[0]) is ref:
                self._free(ref)
            self._dropped.popleft()
