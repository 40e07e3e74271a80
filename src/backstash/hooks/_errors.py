"""What the hooks raise and warn with, under :class:`backstash.errors.StashError`.

::

    UsageError (RuntimeError)
    ├── NoMatchError     (LookupError)         a name matches no module, parameter or tensor
    └── NotCapturedError (KeyError)            asked for something that was not captured
    NonFiniteError       (FloatingPointError)  find_nonfinite found a NaN or an infinity

``InplaceError`` is raised for a captured tensor that was changed in place after its capture.
"""

from __future__ import annotations

from ..errors import StashError, StashWarning, UsageError

__all__ = ["HookWarning", "NoMatchError", "NonFiniteError", "NotCapturedError"]


class NoMatchError(UsageError, LookupError):
    """A name, glob, class or callable selected nothing; the message has the near misses.

    Nothing was registered.
    """


class NotCapturedError(UsageError, KeyError):
    """A value was asked for that the capture does not hold; the message says why and what to do."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class NonFiniteError(StashError, FloatingPointError):
    """A forward or a backward made a NaN or an infinity; the message says which module, and how."""


class HookWarning(StashWarning):
    """A hook that will not do, or did not do, what it was registered for, with the remedy."""
