"""A queue and a table of weak references. An object that dies leaves them without running Python code."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from ..stores._leases import KeyedRef

__all__ = ["WeakQueue", "WeakTable"]

_T = TypeVar("_T")
_LEAST = 64  # shorter queues are not swept


class WeakQueue(Generic[_T]):
    """A queue of weak references, oldest first. The caller holds the lock.

    Items may die or be served elsewhere while nothing is taken from the front, for example if a budget is
    never reached. So each time the queue has doubled, it removes items that are dead or no longer wanted. An
    append costs the same at any length.

    Args:
        wanted: returns whether a living item still belongs in the queue.
    """

    __slots__ = ("_sweep_at", "_wanted", "refs")

    def __init__(self, wanted: Callable[[_T], object]) -> None:
        self.refs: deque[weakref.ref[_T]] = deque()  # empty if nothing is queued
        self._sweep_at = _LEAST
        self._wanted = wanted

    def append(self, item: _T) -> None:
        """Put ``item`` at the end."""
        if len(self.refs) >= self._sweep_at:
            self._sweep()
        self.refs.append(weakref.ref(item))

    def appendleft(self, item: _T) -> None:
        """Put ``item`` at the front."""
        self.refs.appendleft(weakref.ref(item))

    def popleft(self) -> _T | None:
        """Remove the oldest item. Return it, or ``None`` if dead or unwanted. ``IndexError`` if empty."""
        item = self.refs.popleft()()
        return item if item is not None and self._wanted(item) else None

    def clear(self) -> None:
        """Remove all items."""
        if self.refs:
            self.refs = deque()
            self._sweep_at = _LEAST

    def take_before(self, other: WeakQueue[_T]) -> None:
        """Move all items of ``other`` to the front of this queue."""
        refs, other.refs = other.refs, deque()
        self.refs.extendleft(reversed(refs))

    def _sweep(self) -> None:
        wanted = self._wanted
        # The queue is set aside first: a finalizer that the garbage collector runs now may append an item.
        refs, self.refs = self.refs, deque()
        alive = [ref for ref in refs if (item := ref()) is not None and wanted(item)]
        self.refs = deque([*alive, *self.refs])
        self._sweep_at = max(_LEAST, 2 * len(self.refs))


_K = TypeVar("_K", bound=Hashable)
_V = TypeVar("_V")


class WeakTable(Generic[_K, _V]):
    """A mapping from keys to weakly referenced values.

    It replaces ``weakref.WeakValueDictionary``, which removes entries by a Python callback: autograd runs that
    callback when it frees a node, and a Ctrl-C that arrives there is printed and lost. Here the callback is
    ``deque.append``, a C function.
    """

    __slots__ = ("_gone", "_is_gone", "refs")

    def __init__(self) -> None:
        self.refs: dict[_K, KeyedRef[_V]] = {}
        self._gone: deque[KeyedRef[_V]] = deque()
        self._is_gone = self._gone.append  # bound once, not for each entry

    def get(self, key: _K) -> _V | None:
        """Return the value, or ``None`` if it is dead or unknown."""
        ref = self.refs.get(key)
        return ref() if ref is not None else None

    def __setitem__(self, key: _K, value: _V) -> None:
        while self._gone:
            ref = self._gone.popleft()
            if self.refs.get(ref.key) is ref:
                del self.refs[ref.key]
        ref = KeyedRef(value, self._is_gone)
        ref.key = key
        self.refs[key] = ref
