"""A queue and a table that own nothing: an object that dies leaves them without running Python."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from ..stores._leases import KeyedRef

__all__ = ["WeakQueue", "WeakTable"]

_T = TypeVar("_T")
_LEAST = 64  # entries below which a queue is not swept


class WeakQueue(Generic[_T]):
    """Weak references, oldest first. Not locked: the caller holds its lock.

    An item may die or be served elsewhere while nothing is taken from the front, as behind a budget that is
    never reached. So each time the queue has doubled, items that are dead or no longer wanted are taken out:
    an append costs the same however long the queue is.

    Args:
        wanted: whether a living item still belongs here.
    """

    __slots__ = ("_sweep_at", "_wanted", "refs")

    def __init__(self, wanted: Callable[[_T], object]) -> None:
        self.refs: deque[weakref.ref[_T]] = deque()  # empty where nothing waits
        self._sweep_at = _LEAST
        self._wanted = wanted

    def append(self, item: _T) -> None:
        """Put ``item`` at the end."""
        if len(self.refs) >= self._sweep_at:
            self._sweep()
        self.refs.append(weakref.ref(item))

    def appendleft(self, item: _T) -> None:
        """Put ``item`` before all others."""
        self.refs.appendleft(weakref.ref(item))

    def popleft(self) -> _T | None:
        """Take out the oldest; ``None`` if it is dead or no longer wanted. ``IndexError``: there is none."""
        item = self.refs.popleft()()
        return item if item is not None and self._wanted(item) else None

    def clear(self) -> None:
        """Nothing is left that could wait here."""
        if self.refs:
            self.refs = deque()
            self._sweep_at = _LEAST

    def take_before(self, other: WeakQueue[_T]) -> None:
        """Put all that waits in ``other`` before what waits here, and leave that empty."""
        refs, other.refs = other.refs, deque()
        self.refs.extendleft(reversed(refs))

    def _sweep(self) -> None:
        wanted = self._wanted
        # Set aside first: a finalizer that the collector runs meanwhile may append.
        refs, self.refs = self.refs, deque()
        alive = deque(ref for ref in refs if (item := ref()) is not None and wanted(item))
        alive.extend(self.refs)
        self.refs = alive
        self._sweep_at = max(_LEAST, 2 * len(self.refs))


_K = TypeVar("_K", bound=Hashable)
_V = TypeVar("_V")


class WeakTable(Generic[_K, _V]):
    """Keys to values that live elsewhere.

    As ``weakref.WeakValueDictionary``, whose entries are removed by a callback in Python: autograd runs it
    when it frees a node, and a Ctrl-C that is delivered there is printed and forgotten. This one's callback
    is a deque's own ``append``.
    """

    __slots__ = ("_gone", "_is_gone", "refs")

    def __init__(self) -> None:
        self.refs: dict[_K, KeyedRef[_V]] = {}
        self._gone: deque[KeyedRef[_V]] = deque()
        self._is_gone = self._gone.append  # bound once, not for each entry

    def get(self, key: _K) -> _V | None:
        """The value, if it is alive."""
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
