"""Whether slices of a storage come to be all of it: learned, so that they are held as one block.

A small slice of a large storage is copied, so that the rest is not held for its sake. A loop over time saves a
slice at each step, and in the end has copied the whole, at the cost of a copy at each save and each use. What
the slices of the last storage came to, of as many bytes and saved by the same module, is expected of the next.

A wrong guess costs memory, that of the slices which are not saved, and nothing else.
"""

from __future__ import annotations

__all__ = ["SliceCounts", "Slices"]

_MOST_CLASSES = 1 << 12  # of storages: with more, nothing is known of any
_MOST_SLICES = 1 << 16  # of a storage: of more nothing is learned


class Slices:
    """Of one storage, those that were saved."""

    __slots__ = ("_bytes_at", "_saved_bytes", "expected")

    def __init__(self, expected: int) -> None:
        self.expected = expected
        """How many saves there will be of slices that make up the storage; 0: they may not."""
        self._bytes_at: dict[int, int] = {}  # by where a slice begins, in elements
        self._saved_bytes = 0

    def add(self, offset: int, nbytes: int) -> None:
        """One was saved, perhaps not for the first time."""
        if offset not in self._bytes_at and len(self._bytes_at) < _MOST_SLICES:
            self._bytes_at[offset] = nbytes
            self._saved_bytes += nbytes

    def saves_of(self, storage_bytes: int) -> int:
        """How many slices were saved, if these are all of the storage; else 0."""
        return len(self._bytes_at) if self._saved_bytes >= storage_bytes else 0


class SliceCounts:
    """Learns of each class of storages. The caller holds the stash's lock."""

    def __init__(self) -> None:
        self._last: dict[tuple[str, int], Slices] = {}

    def begin(self, module: str, storage_bytes: int) -> Slices:
        """The first slice of a storage is being saved, by the module of this path."""
        key = module, storage_bytes
        last = self._last.get(key)
        if len(self._last) >= _MOST_CLASSES:
            self._last.clear()
        slices = Slices(last.saves_of(storage_bytes) if last is not None else 0)
        self._last[key] = slices
        return slices
