"""A table that owns nothing, and whose entries go without running Python."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Hashable
from typing import Generic, TypeVar

__all__ = ["Weakly"]

_K = TypeVar("_K", bound=Hashable)
_V = TypeVar("_V")


class Weakly(Generic[_K, _V]):
    """Keys to values that live elsewhere.

    As ``weakref.WeakValueDictionary``, whose entries are removed by a callback in Python: autograd runs it
    when it frees a node, and a Ctrl-C that is delivered there is printed and forgotten. This one's callback
    is a deque's own ``append``.
    """

    __slots__ = ("_gone", "_is_gone", "_refs")

    def __init__(self) -> None:
        self._refs: dict[_K, weakref.KeyedRef[_K, _V]] = {}
        self._gone: deque[weakref.KeyedRef[_K, _V]] = deque()
        self._is_gone = self._gone.append  # bound once, not for each entry

    def get(self, key: _K) -> _V | None:
        """The value, if it is alive."""
        ref = self._refs.get(key)
        return ref() if ref is not None else None

    def __setitem__(self, key: _K, value: _V) -> None:
        while self._gone:
            ref = self._gone.popleft()
            if self._refs.get(ref.key) is ref:
                del self._refs[ref.key]
        self._refs[key] = weakref.KeyedRef(value, self._is_gone, key)
