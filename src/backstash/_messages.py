"""What backward is told when a saved tensor cannot be given to it: which one, whose, why, and what to do."""

from __future__ import annotations

from typing import Any

import torch

from ._saved.entry import Entry
from ._text import clean
from .errors import InplaceError, StashCorruptError, StashIOError

__all__ = ["changed", "unreadable"]


def changed(shape: Any, dtype: torch.dtype, module: str, versions: str) -> InplaceError:
    """A saved tensor was modified in place, and plain PyTorch would say so too."""
    node = torch._C._current_autograd_node()
    where = (
        clean(module)
        or "a module that is not known for tensors below min_bytes (min_bytes=0 tells)"
    )
    return InplaceError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"{_named(shape, dtype, where)}"
        f"{' for ' + node.name() if node is not None else ''} {versions}. "
        "Change a clone, or change it before it is saved."
    )


def unreadable(entry: Entry, error: StashIOError) -> StashIOError:
    """The store could not give back a saved tensor's bytes; of ``error``'s kind and number."""
    name = _named(entry.shape, entry.dtype, clean(entry.block.cleanup.module) or "no module")
    if isinstance(error, StashCorruptError):
        remedy = (
            "its value is lost: run this step's forward again; other graphs are not affected, and what is "
            "damaged again and again is the disk"
        )
    else:
        remedy = "nothing was changed: the same backward may be tried again, or forward run again"
    return type(error)(error.errno, f"{error.strerror}. It was {name}: {remedy}.")


def _named(shape: Any, dtype: torch.dtype, module: str) -> str:
    kind = str(dtype).removeprefix("torch.")
    return f"the {kind} tensor of shape {tuple(shape)} that {module} saved"
