"""Every error that backstash raises, as one tree.

::

    StashError
    ├── SizeError            (ValueError)    a size that cannot be read
    ├── UsageError           (RuntimeError)  contexts left in the wrong order, a stash used where it cannot work
    │   └── StashClosedError                 a closed stash or store was asked for more
    ├── InplaceError         (RuntimeError)  a saved tensor was changed in place before backward used it
    └── StashIOError         (OSError)       a store could not write or read
        ├── StashFullError                   no room below, and ``on_full="raise"``
        └── StashCorruptError                bytes came back that are not the bytes that were written

Each class also derives from the builtin that PyTorch or the operating system would raise for the same
fault, so that code which already catches that one keeps working.
"""

from __future__ import annotations

__all__ = [
    "InplaceError",
    "SizeError",
    "StashClosedError",
    "StashCorruptError",
    "StashError",
    "StashFullError",
    "StashIOError",
    "StashWarning",
    "UsageError",
]


class StashError(Exception):
    """The root of everything that backstash raises."""


class SizeError(StashError, ValueError):
    """A size that is not a count of bytes; the message says what is allowed."""


class UsageError(StashError, RuntimeError):
    """A stash was used in a way that cannot work; the message gives the remedy."""


class StashClosedError(UsageError):
    """A closed stash or store was asked to hold or to give back something."""


class InplaceError(StashError, RuntimeError):
    """A saved tensor was modified by an in-place operation and its value can no longer be known.

    Raised from backward, where plain PyTorch raises ``RuntimeError`` for the same program.
    """


class StashIOError(StashError, OSError):
    """A store failed to write or read. What was in memory before the failed move is still there."""


class StashFullError(StashIOError):
    """A tier has no room for a block and the caller asked for an error; the block stays in place."""


class StashCorruptError(StashIOError):
    """Bytes that were read back do not match the checksum taken when they were written."""


class StashWarning(UserWarning):
    """A stated fallback: the result is still exact, and something is slower or held elsewhere."""
