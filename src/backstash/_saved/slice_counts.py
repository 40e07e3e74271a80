"""Predict whether the saved slices of a storage will cover all of it, so that one block can hold the storage.

A small slice of a large storage is copied, so that the slice does not keep the whole storage alive. But a loop
over time may save a slice at each step until it has saved everything, at the cost of a copy at each save and
at each use. The prediction for a storage is what happened to the storage in the same place of the last pass.
The place is given by the module, the storage's size, the slice's size, and how many storages like it came
before.

A wrong prediction costs the memory of the slices that are not saved; results do not change.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["SliceCounts", "Slices"]

_MOST_STORAGES = 1 << 12  # places that are remembered; beyond this number all are forgotten
_MOST_SLICES = 1 << 16  # of a storage; later slices are not counted


@dataclass(slots=True)
class _Tally:
    """The saved slices of one storage, added up."""

    saves: int = 0
    saved_bytes: int = 0
    """The bytes of slices that begin at different offsets."""


class Slices:
    """The slices of one storage.

    Args:
        expected: how many slices are expected, if they will cover the storage; 0 if that is not expected.
        tally: where the slices of this storage are added up.
    """

    __slots__ = ("_begins", "_tally", "expected")

    def __init__(self, expected: int, tally: _Tally) -> None:
        self.expected = expected
        self._tally = tally
        self._begins: set[int] = set()

    def is_new(self, begin: int) -> bool:
        """Return whether no slice was saved so far that begins at byte ``begin``."""
        return begin not in self._begins

    def add(self, begin: int, nbytes: int) -> None:
        """Add a slice that begins at byte ``begin``. Only the first slice there adds its ``nbytes``."""
        tally = self._tally
        tally.saves += 1
        if begin not in self._begins and len(self._begins) < _MOST_SLICES:
            self._begins.add(begin)
            tally.saved_bytes += nbytes


class SliceCounts:
    """Learn from the last pass which storages are saved completely. The caller holds the stash's lock."""

    def __init__(self) -> None:
        self._last: dict[tuple[str, int, int, int], _Tally] = {}
        self._begun: dict[tuple[str, int, int], int] = {}  # storages of a kind, this pass
        self._pass = -1

    def begin(self, in_pass: int, module: str, storage_bytes: int, nbytes: int) -> Slices:
        """Return the record for a storage whose first slice is being saved.

        Args:
            in_pass: the number of the pass.
            module: the path of the module that saves the slice.
            storage_bytes: the size of the storage, in bytes.
            nbytes: the size of the slice, in bytes.
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
