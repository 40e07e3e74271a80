"""Extents that are each lent to an object for its lifetime, so that none is lost."""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any, TypeVar

from ._extents import Extents

__all__ = ["KeyedRef", "Leases"]

_T = TypeVar("_T")


class KeyedRef(weakref.ref[_T]):
    """A weak reference with a ``key``, set by its creator.

    Unlike ``weakref.KeyedRef``, creating one makes no Python call, which matters since each saved tensor needs
    several.
    """

    __slots__ = ("key",)
    key: Any


class Leases:
    """:class:`Extents` that are freed when their owners die. The caller holds its lock.

    An interrupt may come after an extent was taken and before anything owns it, or in the middle of an update
    of the free lists. So an owner's death frees its extent, and inconsistent free lists are rebuilt from the
    owners that are alive.
    """

    __slots__ = ("_dirty", "_drops", "_lent", "dropped", "extents")

    def __init__(self, *, unit_bytes: int) -> None:
        self.extents = Extents(unit_bytes=unit_bytes)
        self._lent: dict[int, KeyedRef[Any]] = {}  # by offset
        self.dropped: deque[KeyedRef[Any]] = deque()  # of dead owners, to be settled
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
        # The callback is the deque's own append, since it may run on any thread at any point of a program.
        ref: KeyedRef[Any] = KeyedRef(owner, self._drops)
        ref.key = offset, nbytes
        self._lent[offset] = ref
        self._dirty = False
        return offset

    def free(self, offset: int) -> None:
        """Free the extent at ``offset``. Does nothing if it is free already."""
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
        """Repair the free lists if a call was interrupted, and free the extents of dead owners."""
        if self._dirty:
            self.extents.restore(ref.key for ref in self._lent.values())
            self._dirty = False
        while self.dropped:
            ref = self.dropped[0]
            if self._lent.get(ref.key[0]) is ref:
                self._free(ref)
            self.dropped.popleft()
