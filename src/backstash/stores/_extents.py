"""Free and taken extents of a file: integers only, no I/O.

The method is a two-level segregated fit (Masmano et al., "TLSF", ECRTS 2004). Free extents are binned by size
(a power of two split in sixteen), so taking, freeing and joining neighbours take the same time for any number
of extents. An extent from a higher bin than requested is split, and the rest is freed. Freed neighbours are
joined. Free space at the end of the file is dropped, so a file whose blocks all died is empty again.

Every extent of a higher bin is large enough; an extent of the request's own bin may be. So the oldest few of
its own bin are tried first: training frees and requests the same sizes again and again, and must reuse their
holes.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

__all__ = ["Extents"]

_SPLIT_BITS = 4
_LOOKED_AT = 16  # extents of the request's own bin that are tried


def _bin_of(nunits: int) -> int:
    """Return the bin of a free extent of ``nunits``."""
    level = nunits.bit_length() - 1
    if level < _SPLIT_BITS:
        return nunits
    return (level << _SPLIT_BITS) + (nunits >> (level - _SPLIT_BITS))


def _bin_that_fits(nunits: int) -> int:
    """Return the lowest bin in which every extent holds ``nunits``."""
    level = nunits.bit_length() - 1
    if level >= _SPLIT_BITS:
        nunits += (1 << (level - _SPLIT_BITS)) - 1
    return _bin_of(nunits)


class Extents:
    """Takes and frees extents of a file, counted in bytes, in multiples of ``unit_bytes``.

    Not locked: the caller holds its lock.

    >>> extents = Extents(unit_bytes=4096)
    >>> first, second = extents.take(5000), extents.take(4096)
    >>> first, second, extents.end_bytes, extents.used_bytes
    (0, 8192, 12288, 12288)
    >>> extents.free(first, 5000); extents.take(4096), extents.end_bytes
    (0, 12288)
    """

    def __init__(self, *, unit_bytes: int) -> None:
        self._unit = unit_bytes
        self.end_bytes = 0
        """Where the last taken extent ends: the least size that the file must have."""
        self.used_bytes = 0
        """Bytes taken, each extent rounded up to the unit."""
        self._size_at: dict[int, int] = {}  # first unit of a free extent -> its length
        self._start_before: dict[int, int] = {}  # one past a free extent -> its first unit
        self._bins: dict[int, dict[int, None]] = {}  # bin -> first units, in order of freeing
        self._occupied = 0  # bit b is set when bin b has an extent

    @property
    def free_count(self) -> int:
        """The number of free extents between taken ones: a measure of fragmentation."""
        return len(self._size_at)

    def take(self, nbytes: int) -> int:
        """Take ``nbytes`` (rounded up to the unit) and return the offset in bytes."""
        unit = self._unit
        nunits = -(-nbytes // unit) or 1
        self.used_bytes += nunits * unit
        start = self._find(nunits) if self._occupied else None
        if start is None:
            offset_bytes = self.end_bytes
            self.end_bytes += nunits * unit
            return offset_bytes
        size = self._remove(start)
        if size > nunits:
            self._insert(start + nunits, size - nunits)
        return start * unit

    def free(self, offset_bytes: int, nbytes: int) -> None:
        """Free what :meth:`take` returned for ``nbytes``."""
        start, size = offset_bytes // self._unit, -(-nbytes // self._unit) or 1
        self.used_bytes -= size * self._unit
        before = self._start_before.get(start)
        if before is not None:
            size += self._remove(before)
            start = before
        if start + size in self._size_at:
            size += self._remove(start + size)
        if (start + size) * self._unit == self.end_bytes:
            self.end_bytes = start * self._unit
        else:
            self._insert(start, size)

    def restore(self, taken: Iterable[tuple[int, int]]) -> None:
        """Start again with these extents taken: pairs of an offset and ``nbytes``."""
        self.used_bytes = self._occupied = end = 0
        for each in (self._size_at, self._start_before, self._bins):
            each.clear()
        for offset_bytes, nbytes in sorted(taken):
            start, size = offset_bytes // self._unit, -(-nbytes // self._unit) or 1
            if start > end:
                self._insert(end, start - end)
            end = start + size
            self.used_bytes += size * self._unit
        self.end_bytes = end * self._unit

    def _find(self, nunits: int) -> int | None:
        for start in islice(self._bins.get(_bin_of(nunits), ()), _LOOKED_AT):
            if self._size_at[start] >= nunits:
                return start
        fitting = self._occupied >> _bin_that_fits(nunits)
        if not fitting:
            return None
        lowest = (fitting & -fitting).bit_length() - 1 + _bin_that_fits(nunits)
        return next(iter(self._bins[lowest]))

    def _insert(self, start: int, size: int) -> None:
        self._size_at[start] = size
        self._start_before[start + size] = start
        index = _bin_of(size)
        self._bins.setdefault(index, {})[start] = None
        self._occupied |= 1 << index

    def _remove(self, start: int) -> int:
        size = self._size_at.pop(start)
        del self._start_before[start + size]
        index = _bin_of(size)
        members = self._bins[index]
        del members[start]
        if not members:
            self._occupied &= ~(1 << index)
        return size
