"""Every error that backstash raises, as one tree.

::

    StashError
    ├── SizeError            (ValueError)    a size that cannot be read
    ├── UsageError           (RuntimeError)  contexts left in the wrong order, a stash used where it cannot work
    │   ├── StashClosedError                 a closed stash or store was asked for more
    │   └── StashForkedError                 a forked process asked for what another process's stash holds
    ├── InplaceError         (RuntimeError)  a saved tensor was changed in place before backward used it
    └── StashIOError         (OSError)       a store could not write or read
        ├── StashFullError                   a tier has no space, and ``on_full="raise"``
        └── StashCorruptError                a store read back other bytes than it wrote

Each class also derives from the builtin exception that PyTorch or the operating system would raise for the
same fault, so code that catches the builtin one catches ours. A move that fails leaves the tensor where it was.
"""

from __future__ import annotations

__all__ = [
    "BudgetError",
    "InplaceError",
    "SizeError",
    "StashClosedError",
    "StashCorruptError",
    "StashError",
    "StashForkedError",
    "StashFullError",
    "StashIOError",
    "StashWarning",
    "UsageError",
]


class StashError(Exception):
    """The base class of every exception that backstash raises."""


class SizeError(StashError, ValueError):
    """A size is not an int of bytes or a string such as ``"512MiB"``. The message says what is allowed."""


class UsageError(StashError, RuntimeError):
    """A call, or the order of calls, cannot work. The message gives the remedy."""


class BudgetError(StashError, RuntimeError):
    """With ``strict=True``: a step exceeded a budget that cannot be kept, or three steps exceeded one that can.

    The forward pass of the next step raises it. The message names a budget that can be kept. The stash can
    still be used: it continues as without ``strict``, and raises again after the next such step.
    """


class StashClosedError(UsageError):
    """A closed stash was entered or received a tensor, or a closed store was used."""


class StashForkedError(UsageError):
    """A forked process went backward through a graph of its parent process.

    What that graph saved is on the parent's disk or in its host memory, and the parent still uses that space.
    Go backward in the process that ran forward, or run forward in the child too. The parent's graph is not
    damaged. In the child, saved tensors that stayed in memory can still be used.
    """


class InplaceError(StashError, RuntimeError):
    """A saved tensor was modified by an in-place operation, and the value that was saved is lost.

    Backward raises it where plain PyTorch raises ``RuntimeError`` for the same program. It also raises it if a
    recomputed tensor differs from the original.
    """


class StashIOError(StashError, OSError):
    """A store failed to write or read.

    ``errno`` is the operating system's error number. After a failed write the tensor is still in memory.
    After a failed read the bytes are still in the store, and the same backward may be tried again.
    """


class StashFullError(StashIOError):
    """A store or a tier has no space for a block.

    A stash raises it from the forward pass with ``on_full="raise"``; the block stays in memory.
    """


class StashCorruptError(StashIOError):
    """Bytes that were read back do not match the checksum from when they were written.

    Only ``Disk(verify=True)`` computes checksums. The tensor's value is lost; other graphs are not affected.
    """


class StashWarning(UserWarning):
    """A stash took a fallback: results are exact, but slower, or tensors are held elsewhere than asked."""
