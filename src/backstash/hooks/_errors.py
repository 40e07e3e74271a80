"""The exceptions and the warning of the hooks, under :class:`backstash.errors.StashError`.

::

    UsageError (RuntimeError)
    ├── NoMatchError     (LookupError)         a name matches no module, parameter or tensor
    └── NotCapturedError (KeyError)            asked for something that was not captured
    NonFiniteError       (FloatingPointError)  find_nonfinite found a NaN or an infinity

``InplaceError`` is raised when a captured tensor is read that was changed in place after its capture.
"""

from __future__ import annotations

from ..errors import StashError, StashWarning, UsageError

__all__ = ["HookWarning", "NoMatchError", "NonFiniteError", "NotCapturedError"]


class NoMatchError(UsageError, LookupError):
    """A name, glob, class or callable selected nothing; the message lists similar names.

    Nothing was registered.
    """


class NotCapturedError(UsageError, KeyError):
    """A capture does not hold the value that was read; the message says why and what to do."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class NonFiniteError(StashError, FloatingPointError):
    """A forward or a backward produced a NaN or an infinity; the message names the module and the cause."""


class HookWarning(StashWarning):
    """A hook never fired, or will not fire in a compiled graph; the message has the remedy."""
