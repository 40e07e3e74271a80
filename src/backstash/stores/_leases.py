"""Extents, each lent to an object for as long as that lives: an extent that was not given back is not lost."""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any, TypeVar

from ._extents import Extents

__all__ = ["KeyedRef", "Leases"]

_T = TypeVar("_T")


class KeyedRef(weakref.ref[_T]):
    """A weak reference with a ``key``, set by its maker.

    Unlike ``weakref.KeyedRef`` it is made without a call in Python, which counts where each saved tensor
    makes several.
    """

    __slots__ = ("key",)
    key: Any


class Leases:
    """:class:`Extents` whose truth is who has one. Not locked: the caller holds its lock.

    An interrupt may come between the taking of an extent and the moment when anybody owns it, and in the
    middle of the free lists. So an owner's death gives its extent back, and free lists that were left half
    done are made anew from the owners that are alive.
    """

    __slots__ = ("_dirty", "_drops", "_lent", "dropped", "extents")

    def __init__(self, *, unit_bytes: int) -> None:
        self.extents = Extents(unit_bytes=unit_bytes)
        self._lent: dict[int, KeyedRef[Any]] = {}  # by offset
        self.dropped: deque[KeyedRef[Any]] = deque()  # whose owners have died, to be settled
        self._drops = self.dropped.append  # bound once, not for each owner
        self._dirty = False

    @property
    def in_order(self) -> bool:
        """Whether :meth:`settle` has nothing to do."""
        return not (self._dirty or self.dropped)

    def take(self, owner: object, nbytes: int) -> int:
        """Take ``nbytes`` for ``owner`` and return the offset."""
        if self._dirty or self.dropped:
            self.settle()
        self._dirty = True
        offset = self.extents.take(nbytes)
        # The callback is the deque's own: it may come on any thread in the middle of anything.
        ref: KeyedRef[Any] = KeyedRef(owner, self._drops)
        ref.key = offset, nbytes
        self._lent[offset] = ref
        self._dirty = False
        return offset

    def free(self, offset: int) -> None:
        """Give back what was taken at ``offset``; nothing happens where that was done."""
        self.settle()
        ref = self._lent.get(offset)
        if ref is not None:
            self._free(ref)

    def _free(self, ref: KeyedRef[Any]) -> None:
        offset, nbytes = ref.key
        self._dirty = True
        del self._lent[offset]
        self.extents.free(offset, nbytes)
        self._dirty = False

    def settle(self) -> None:
        """Put in order what was left half done, and take back the extents of dead owners."""
        if self._dirty:
            self.extents.restore(ref.key for ref in self._lent.values())
            self._dirty = False
        while self.dropped:
            ref = self.dropped[0]
            if self._lent.get(ref.key[0]) is ref:
                self._free(ref)
            self.dropped.popleft()
