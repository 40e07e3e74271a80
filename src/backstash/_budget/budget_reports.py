"""Report a budget that cannot be kept, or that steps exceeded: as a warning or an error."""

from __future__ import annotations

import warnings

from .._text import level_of_program
from ..errors import BudgetError, StashWarning
from ..units import format_bytes

__all__ = ["BudgetReports"]

_MARGIN = 50  # an excess of up to 1/50 of the budget is not reported
_WARNED_AT = 3  # steps that exceeded the budget, although it was planned again
_LARGER = "The plan fits the largest measured step, and these steps needed more memory"
_LOADED = "A loaded plan is never changed; give budget= instead to have a plan made"


class BudgetReports:
    """Report each thing once. With ``strict``, :meth:`check` raises it.

    Args:
        budget: in bytes.
        name: of the budget, for the texts.
        strict: whether exceeding the budget is an error.
    """

    def __init__(self, budget: int, name: str, *, strict: bool) -> None:
        self._budget, self._name, self._strict = budget, name, strict
        self.notes: dict[str, None] = {}
        """The notes for ``stats().notes``."""
        self.exceeding = 0
        """The number of steps under a plan that exceeded the budget."""
        self._too_small: str | None = None  # the note that the budget cannot be kept
        self._is_warned = False  # of that
        self._unseen, self._unseen_bytes = "", 0  # the note of note_unseen(), and its bytes
        self._refusal: str | None = None  # the message of the error that check() raises

    @property
    def is_too_small(self) -> bool:
        """Whether it was reported that the budget cannot be kept."""
        return self._too_small is not None

    def warn_too_small(self, why: str) -> None:
        """Report that the budget cannot be kept, in place of an earlier report. Only the first one warns. A
        step may keep the budget nevertheless."""
        note = f"{self._name} cannot be kept: {why}"
        if note in self.notes:
            return
        self.forget_too_small()
        self._too_small = note
        if not self._is_warned:
            self._is_warned = True
            self._warn(note)
        self.notes[note] = None

    def forget_too_small(self) -> None:
        """Withdraw that report: steps kept the budget."""
        if self._too_small is not None:
            self.notes.pop(self._too_small, None)
            self._too_small = None

    def count(self, highest_bytes: int, *, is_loaded: bool) -> None:
        """Count an ended step if it held too much."""
        margin = 0 if self._strict else self._budget // _MARGIN
        if highest_bytes <= self._budget + margin:
            return
        self.exceeding += 1
        if self._strict and self._too_small is not None:
            self._refusal = self._too_small
        elif self.exceeding == _WARNED_AT and (
            self._strict or not self.notes.keys() - {self._unseen}
        ):
            note = (
                f"{self._name} was exceeded in {_WARNED_AT} steps; the last one held "
                f"{format_bytes(highest_bytes)}. {_LOADED if is_loaded else _LARGER}"
            )
            if self._strict:
                self.notes[note], self._refusal = None, note
            else:
                self._warn(note)

    def note_unseen(self, highest_bytes: int) -> None:
        """Note that a step whose saves were not all seen, or what followed it, held too much. It counts as no
        step that exceeded the budget, since that is not known."""
        if highest_bytes > max(self._budget + self._budget // _MARGIN, self._unseen_bytes):
            self.notes.pop(self._unseen, None)
            self._unseen_bytes = highest_bytes
            self._unseen = (
                f"{self._name} was exceeded: a step whose hooks were off, or what followed it, held up to "
                f"{format_bytes(highest_bytes)}"
            )
            self.notes[self._unseen] = None

    def check(self) -> None:
        """Raise what an ended step was found to be.

        Raises:
            BudgetError: a step exceeded a budget that cannot be kept, or three steps exceeded one that can.
        """
        if self._refusal is not None:
            refusal, self._refusal = self._refusal, None
            raise BudgetError(refusal)

    def _warn(self, note: str) -> None:
        if note not in self.notes:
            self.notes[note] = None
            warnings.warn(note, StashWarning, stacklevel=level_of_program())
