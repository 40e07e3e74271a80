"""Whether slices of a storage come to be all of it: learned, so that they are held as one block.

A small slice of a large storage is copied, so that the rest is not held for its sake. A loop over time saves a
slice at each step, and in the end has copied the whole, at the cost of a copy at each save and each use. What
the slices of a storage came to in the last pass is expected of the one in its place: of as many bytes, saved in
slices as large by the same module, after as many others like it.

A wrong guess costs memory, that of the slices which are not saved, and nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["SliceCounts", "Slices"]

_MOST_STORAGES = 1 << 12  # in different places: with more, nothing is known of any
_MOST_SLICES = 1 << 16  # of a storage: of more nothing is learned


@dataclass(slots=True)
class _Tally:
    """What the slices of one storage came to."""

    saves: int = 0
    saved_bytes: int = 0
    """Of slices that begin in different places."""


class Slices:
    """Those of one storage.

    Args:
        expected: how many saves there will be of slices that make up the storage; 0: they may not.
        tally: of this storage.
    """

    __slots__ = ("_begins", "_tally", "expected")

    def __init__(self, expected: int, tally: _Tally) -> None:
        self.expected = expected
        self._tally = tally
        self._begins: set[int] = set()

    def is_new(self, begin: int) -> bool:
        """Whether none was saved that begins at this byte."""
        return begin not in self._begins

    def add(self, begin: int, nbytes: int) -> None:
        """One was saved that begins at byte ``begin``; ``nbytes`` count only where it is new."""
        tally = self._tally
        tally.saves += 1
        if begin not in self._begins and len(self._begins) < _MOST_SLICES:
            self._begins.add(begin)
            tally.saved_bytes += nbytes


class SliceCounts:
    """Learns of storages by their places in a pass. The caller holds the stash's lock."""

    def __init__(self) -> None:
        self._last: dict[tuple[str, int, int, int], _Tally] = {}
        self._begun: dict[tuple[str, int, int], int] = {}  # how many of a kind this pass has had
        self._pass = -1

    def begin(self, in_pass: int, module: str, storage_bytes: int, nbytes: int) -> Slices:
        """The first slice of a storage is being saved.

        Args:
            in_pass: the number of the pass.
            module: the path of the one that saves it.
            storage_bytes: of the whole.
            nbytes: of the slice.
        """
        if in_pass != self._pass:
            self._pass = in_pass
            self._begun.clear()
        kind = module, storage_bytes, nbytes
        number = self._begun.get(kind, 0)
        self._begun[kind] = number + 1
        if len(self._last) >= _MOST_STORAGES:
            self._last.clear()
        last = self._last.get((*kind, number))
        tally = self._last[(*kind, number)] = _Tally()
        is_all = last is not None and last.saved_bytes >= storage_bytes
        return Slices(last.saves if last is not None and is_all else 0, tally)
