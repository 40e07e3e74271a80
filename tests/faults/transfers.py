"""Faults under the store: system calls that fail, move less than they were asked to, or are interrupted."""

from __future__ import annotations

import errno
import os
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any


class Faults:
    """``os.pwrite`` and ``os.preadv`` as a bad disk would have them.

    Args:
        rng: decides when.
        fails, short, interrupted: how likely each call fails with ``number``; moves only a part, down to
            one aligned unit; or is interrupted once before (what Python itself answers to ``EINTR`` is to
            call again, so a caller never sees it: here it is a short transfer of the smallest kind).
        calls: which system calls.
    """

    def __init__(
        self,
        rng: random.Random,
        *,
        fails: float = 0.0,
        short: float = 0.0,
        interrupted: float = 0.0,
        number: int = errno.EIO,
        calls: Sequence[str] = ("pwrite", "preadv"),
    ) -> None:
        self._rng = rng
        self._fails, self._short, self._interrupted = fails, short, interrupted
        self._number = number
        self._calls = calls
        self.counts: Counter[str] = Counter()

    def put_under(self, monkeypatch: Any) -> None:
        """Until ``monkeypatch`` is undone."""
        pwrite, preadv = os.pwrite, os.preadv

        def write(fd: int, data: Any, at: int) -> int:
            return pwrite(fd, self._cut("pwrite", data), at)

        def read(fd: int, parts: Any, at: int) -> int:
            return preadv(fd, [self._cut("preadv", parts[0])], at)

        monkeypatch.setattr(os, "pwrite", write)
        monkeypatch.setattr(os, "preadv", read)

    def _cut(self, call: str, data: Any) -> memoryview:
        whole = memoryview(data).cast("B")
        if call not in self._calls:
            return whole
        if self._rng.random() < self._fails:
            self.counts["failed"] += 1
            raise OSError(self._number, os.strerror(self._number))
        units = len(whole) // 4096
        if units > 1 and self._rng.random() < self._interrupted:
            self.counts["interrupted"] += 1
            return whole[:4096]
        if units > 1 and self._rng.random() < self._short:
            self.counts["short"] += 1
            return whole[: 4096 * self._rng.randrange(1, units)]
        return whole
