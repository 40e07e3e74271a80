"""Keep a saved tensor in place, with the version check that autograd skips under saved-tensor hooks."""

from __future__ import annotations

import functools
import operator
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..errors import InplaceError

__all__ = [
    "HeldVersion",
    "Routed",
    "changed_in_place",
    "inplace_error",
    "running_node",
    "same_counter",
    "version_of",
]

_call = operator.methodcaller("__call__")

_set_versions: Any = getattr(torch._C._autograd, "_unsafe_set_version_counter", None)
_has_interpreter_lock: bool = getattr(sys, "_is_gil_enabled", lambda: True)()


def same_counter(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors of equal version share a counter (a view or ``detach``; not ``.data``).

    Torch has no query for this. So the counter of ``one`` is raised for a moment and restored. This relies on
    the GIL, which keeps other threads from reading the version in that moment. Without a GIL, or if torch
    lacks the call, the answer is ``False``, which costs a copy but never gives a wrong value.
    """
    if _set_versions is None or not _has_interpreter_lock:
        return False
    version = one._version
    # Consecutive C calls without a bytecode in between, where Python could switch threads: another thread
    # would see an in-place change that did not happen.
    steps = (
        functools.partial(_set_versions, (one,), (version + 1,)),
        functools.partial(getattr, other, "_version"),
        functools.partial(_set_versions, (one,), (version,)),
    )
    _, raised, _ = map(_call, steps)
    return bool(raised == version + 1)


def version_of(value: object) -> int | None:
    """Return a tensor's version; ``None`` if it has none (not a tensor, or created in inference mode)."""
    if not isinstance(value, Tensor) or value.is_inference():
        return None
    return value._version


def running_node() -> str:
    """Return ``" for MulBackward0"`` while a node of a graph is running on this thread, else ``""``."""
    current = getattr(torch._C, "_current_autograd_node", None)
    node = current() if current is not None else None
    return f" for {node.name()}" if node is not None else ""


def inplace_error(what: str, found: int | None, saved: int | None, remedy: str) -> InplaceError:
    """Return the error for a saved tensor that was modified in place, in PyTorch's words.

    Args:
        what: the name of the tensor.
        found: the version it has now.
        saved: the version it was saved at.
        remedy: what the user can do.
    """
    return InplaceError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"{what}{running_node()} is at version {found}; expected version {saved} instead. {remedy}"
    )


def changed_in_place(tensor: Tensor, version: int | None) -> InplaceError:
    """Return the error for a saved tensor whose value has changed."""
    kind = str(tensor.dtype).removeprefix("torch.")
    what = f"a saved {kind} tensor of shape {tuple(tensor.shape)}"
    remedy = "Change a clone, or use allow_mutation_on_saved_tensors."
    return inplace_error(what, version_of(tensor), version, remedy)


class HeldVersion:
    """A saved tensor kept in place: an alias without its graph, and the version it must still have."""

    __slots__ = ("alias", "version")

    def __init__(self, tensor: Tensor) -> None:
        self.alias = tensor.detach()  # an operation's output would keep its own node alive
        self.version = version_of(tensor)

    @property
    def packed_inside(self) -> Tensor:
        """The tensor, for callers that read without unpacking."""
        return self.alias

    def get(self) -> Tensor:
        """Return the tensor. Raises ``InplaceError`` if it was modified since."""
        if self.version is not None and self.alias._version != self.version:
            raise changed_in_place(self.alias, self.version)
        return self.alias


class Routed:
    """What autograd holds: a packed object, and the unpack hook that reads it."""

    __slots__ = ("unpack", "value")

    def __init__(self, unpack: Callable[[Any], Tensor], value: Any) -> None:
        self.unpack = unpack
        self.value = value

    @property
    def packed_inside(self) -> Any:
        """The packed object, for callers that read without unpacking."""
        return self.value

    def get(self) -> Tensor:
        """Return the tensor by calling its unpack hook."""
        return self.unpack(self.value)
