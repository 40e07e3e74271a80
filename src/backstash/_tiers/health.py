"""The health of a tier: whether it is full or has failed, and which blocks wait for room in it.

A block that finds no room stays where it is and is *deferred*: it is tried again only when there may be room
again, since something left the tier or a step has ended. A tier whose write failed is given nothing more.
Reports have the last refusal and how many there were, and the first is a warning; with ``on_full="raise"`` it
is an error.
"""

from __future__ import annotations

import errno
import warnings
from collections.abc import Callable, Iterator
from typing import Protocol

from .._runtime.weak import WeakQueue
from .._saved.block import Block
from .._text import level_of_program
from ..errors import StashError, StashFullError, StashIOError, StashWarning
from .resident import ResidentSet, is_resident

__all__ = ["Notes", "TierHealth"]


class _Tier(Protocol):
    @property
    def used_bytes(self) -> int: ...


class Notes:
    """What reports say of fallbacks: the last note of each kind, and how many there were."""

    def __init__(self) -> None:
        self._told: dict[str, tuple[str, int]] = {}

    def add(self, kind: str, text: str) -> None:
        """Say ``text`` in place of what was said of ``kind`` before."""
        _, count = self._told.get(kind, ("", 0))
        self._told[kind] = text, count + 1

    def __contains__(self, kind: str) -> bool:
        return kind in self._told

    def __iter__(self) -> Iterator[str]:
        for text, count in tuple(self._told.values()):
            yield text if count == 1 else f"{text} (the last of {count} such notes)"


class TierHealth:
    """Remembers what a tier refused. The caller holds the stash's lock.

    Args:
        resident: gets deferred blocks back, to be tried again.
        tier: where the blocks go; ``None``: nowhere.
        raises: whether a refusal is an error of the forward pass.
    """

    def __init__(self, resident: ResidentSet, tier: _Tier | None, *, raises: bool) -> None:
        self._resident = resident
        self._tier = tier
        self._raises = raises
        self.deferred = WeakQueue[Block](is_resident)  # found no room; oldest first
        self.is_well = True
        """Whether nothing was refused, so that :meth:`refuses` need not be asked."""
        # Bytes used when the tier last had no room, and the size of the smallest block that it refused.
        self._full_at: tuple[int, int] | None = None
        self._broken: Callable[[], StashError] | None = None  # after a failed write nothing goes
        self.notes = Notes()

    def refuses(self, nbytes: int) -> bool:
        """Whether the tier would take no ``nbytes``. Raises ``StashError`` with ``on_full="raise"``."""
        if self._broken is not None:
            if self._raises:
                raise self._broken()
            return True
        if self._full_at is None:
            return False
        used_bytes, least = self._full_at
        assert self._tier is not None
        if self._tier.used_bytes < used_bytes:
            self.try_again()  # room came back, for deferred blocks too
            return False
        return nbytes >= least and not self._raises

    def try_again(self) -> None:
        """There may be room again: a step has ended, and another process may have made it."""
        if self._full_at is not None:
            self._full_at = None
            self.is_well = self._broken is None
            self._resident.queue.take_before(self.deferred)

    def full(self, error: StashFullError, nbytes: int) -> None:
        """There was no room for ``nbytes``. Raises ``error`` with ``on_full="raise"``."""
        assert self._tier is not None
        self._full_at = self._tier.used_bytes, nbytes
        self.is_well = False
        self._emit(error)

    def broke(self, failure: BaseException) -> None:
        """A write failed."""
        number = getattr(failure, "errno", None) or errno.EIO
        kind = StashFullError if number == errno.ENOSPC else StashIOError
        text = str(failure)
        # Made anew each time: a kept exception would keep the frames that it passed through.
        self.is_well = False
        self._broken = lambda: kind(number, f"{text}; nothing more is sent there")
        if not self._raises:
            self._emit(self._broken())

    def _emit(self, error: StashError) -> None:
        if self._raises:
            raise error
        note, kind = f"left in place: {error}", "broken" if self._broken is not None else "full"
        is_first = "broken" not in self.notes and "full" not in self.notes
        self.notes.add(kind, note)
        if is_first:
            warnings.warn(note, StashWarning, stacklevel=level_of_program())

    def restore(self) -> None:
        """Forget what was deferred: see ``_session``. All blocks that are in place are tried again."""
        self.deferred = WeakQueue[Block](is_resident)
        self._full_at = None
        self.is_well = self._broken is None
