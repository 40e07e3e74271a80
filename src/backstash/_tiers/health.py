"""The health of a tier: whether it is full or has failed, and which blocks wait for space in it.

A block that finds no space stays where it is and is *deferred*: it is tried again only when there may be
space, because something left the tier or a step has ended. A tier that failed to write receives nothing more.
Reports show the last refusal and the number of refusals. The first refusal is a warning, or an error with
``on_full="raise"``.
"""

from __future__ import annotations

import errno
import warnings
from collections.abc import Callable, Iterator

from .._runtime.weak import WeakQueue
from .._saved.block import Block
from .._text import level_of_program
from ..errors import StashError, StashFullError, StashIOError, StashWarning
from .base import LowerTier
from .resident import ResidentSet, is_resident

__all__ = ["Notes", "TierHealth"]


class Notes:
    """The fallbacks that reports mention: the last note of each kind, and how many there were."""

    def __init__(self) -> None:
        self._by_kind: dict[str, tuple[str, int]] = {}

    def add(self, kind: str, text: str) -> None:
        """Replace the note of ``kind`` by ``text``, and count it."""
        _, count = self._by_kind.get(kind, ("", 0))
        self._by_kind[kind] = text, count + 1

    def __contains__(self, kind: str) -> bool:
        return kind in self._by_kind

    def __iter__(self) -> Iterator[str]:
        for text, count in tuple(self._by_kind.values()):
            yield text if count == 1 else f"{text} (the last of {count} such notes)"


class TierHealth:
    """Remembers what a tier refused. The caller holds the stash's lock.

    Args:
        resident: receives deferred blocks again when there may be space.
        tier: the tier that blocks go to; ``None``: there is none.
        raises: whether a refusal raises an error in the forward pass.
    """

    def __init__(self, resident: ResidentSet, tier: LowerTier | None, *, raises: bool) -> None:
        self._resident = resident
        self._tier = tier
        self._raises = raises
        self.deferred = WeakQueue[Block](is_resident)  # blocks that found no space, oldest first
        self.is_well = True
        """Whether nothing was refused, so that :meth:`refuses` need not be called."""
        # The tier's used bytes when it was last full, and the smallest size that it refused.
        self._full_at: tuple[int, int] | None = None
        self._broken: Callable[[], StashError] | None = None  # set after a failed write
        self.notes = Notes()

    def refuses(self, nbytes: int) -> bool:
        """Return whether the tier would refuse ``nbytes``. Raises ``StashError`` with ``on_full="raise"``."""
        if self._broken is not None:
            if self._raises:
                raise self._broken()
            return True
        if self._full_at is None:
            return False
        used_bytes, least = self._full_at
        assert self._tier is not None
        if self._tier.used_bytes < used_bytes:
            self.try_again()  # space was freed, which deferred blocks may use, too
            return False
        return nbytes >= least and not self._raises

    def try_again(self) -> None:
        """Retry deferred blocks: a step has ended, or space was freed, perhaps by another process."""
        if self._full_at is not None:
            self._full_at = None
            self.is_well = self._broken is None
            self._resident.queue.take_before(self.deferred)

    def full(self, error: StashFullError, nbytes: int) -> None:
        """Record that there was no space for ``nbytes``. Raises ``error`` with ``on_full="raise"``."""
        assert self._tier is not None
        self._full_at = self._tier.used_bytes, nbytes
        self.is_well = False
        self._emit(error)

    def broke(self, failure: BaseException) -> None:
        """Record that a write failed."""
        number = getattr(failure, "errno", None) or errno.EIO
        kind = StashFullError if number == errno.ENOSPC else StashIOError
        text = str(failure)
        # A new error each time: a stored exception would keep alive the frames that it passed through.
        self.is_well = False
        self._broken = lambda: kind(number, f"{text}; nothing more is written there")
        if not self._raises:
            self._emit(self._broken())

    def _emit(self, error: StashError) -> None:
        if self._raises:
            raise error
        note, kind = f"kept in memory: {error}", "broken" if self._broken is not None else "full"
        is_first = "broken" not in self.notes and "full" not in self.notes
        self.notes.add(kind, note)
        if is_first:
            warnings.warn(note, StashWarning, stacklevel=level_of_program())

    def restore(self) -> None:
        """Forget the deferred blocks (see ``_core/session``). All blocks in place will be tried again."""
        self.deferred = WeakQueue[Block](is_resident)
        self._full_at = None
        self.is_well = self._broken is None
