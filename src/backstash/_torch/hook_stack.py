"""The thread's stack of hook pairs: read it, and remove a pair that is not on top.

This is the only module that uses torch's private calls for default hooks. A pair is identified by its *owner*,
an attribute of the object whose method was pushed. A wrapper that replaces a pair refers to it as
``__wrapped__``.

A hook that leaves a context during backward leaves it only in the engine's copy of the stack: afterwards the
pair is back. Such a pair is marked ``left``, and a context around it may be left without an error.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from ..errors import UsageError

__all__ = [
    "Pair",
    "Scope",
    "Site",
    "current_pair",
    "own_pack",
    "pop_owned",
    "push",
    "replace_current",
    "take_all",
    "take_off",
    "take_out",
]

_autograd: Any = torch._C._autograd
_top: Any = getattr(_autograd, "_top_saved_tensors_default_hooks", None)


Site = tuple[CodeType, int]
"""A statement: its code object, and the offset in it."""


class Pair(NamedTuple):
    """A pack hook and its unpack hook."""

    pack: Callable[[Tensor], Any]
    unpack: Callable[[Any], Tensor]


@dataclass(slots=True, eq=False)
class Scope:
    """A hook pair that a thread has pushed."""

    hooks: saved_tensors_hooks
    """The pair, as torch's own context manager."""
    frame: FrameType | None
    """The frame of the module call that it covers; ``None`` for a ``with`` statement."""
    is_aside: bool = False
    """Whether it was not pushed because it was entered inside a transform that allows no hooks."""
    is_off: bool = False
    """Whether it was taken off the stack, so that later saves are PyTorch's own: see :func:`take_off`."""
    site: Site | None = None
    """The ``with`` statement that entered it."""
    passes: int = 0
    """How many forward passes had begun when it was entered."""


def push(pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> None:
    """Make a pair the current one. Raises ``RuntimeError`` if hooks are disabled."""
    _autograd._push_saved_tensors_default_hooks(pack, unpack)


def current_pair() -> Pair | None:
    """Return the pair that a save on this thread would use now."""
    if _top is None:
        raise UsageError(
            f"torch {torch.__version__} does not report which saved-tensors hooks are active "
            "(torch._C._autograd._top_saved_tensors_default_hooks); use torch 2.11 to 2.15, or plain "
            "saved_tensors_hooks without compose, only, skip or allow_mutation_on_saved_tensors"
        )
    top = _top(True)
    return None if top is None else Pair(*top)


def own_pack(pair: Pair) -> Callable[[Tensor], Any]:
    """Return the pack hook that its context pushed, even if a wrapper replaces it."""
    return getattr(pair.pack, "__wrapped__", pair.pack)


def _entered(pair: Pair) -> Any:
    return getattr(own_pack(pair), "__self__", None)


def take_out(is_wanted: Callable[[Pair], bool]) -> list[Pair] | None:
    """Remove the newest pair for which ``is_wanted`` is true from this thread's stack, and no other.

    Returns the pairs that were above it, newest first, which stay; ``None`` if no pair is wanted, and then
    nothing changes. An interrupt changes nothing, or leaves the pair removed. If torch does not expose the
    stack, the top pair is popped.
    """
    above: list[Pair] = []
    if _top is None:
        _autograd._pop_saved_tensors_default_hooks()
        return above
    try:
        while (top := _top(True)) is not None:
            pair = Pair(*top)
            found = is_wanted(pair)
            above += (
                () if found else (pair,)
            )  # no call between this and the pop: nothing interrupts
            _autograd._pop_saved_tensors_default_hooks()
            if found:
                return above
        return None
    finally:
        for other in reversed(above):
            push(*other)


def pop_owned(owner: object, what: str) -> None:
    """Remove the newest pair of ``owner``.

    Raises:
        UsageError: it is not on top (it is removed anyway, and those above it stay), or it is not on this
            thread's stack (nothing changes).
    """

    def is_owned(pair: Pair) -> bool:
        entered = _entered(pair)
        if getattr(entered, "owner", None) is not owner:
            return False
        entered.left = True
        return True

    above = take_out(is_owned)
    if above is None:
        raise UsageError(
            f"{what} was exited where it is not active: it was exited more often than entered, exited "
            "on another thread, or popped by another context; the active hooks are unchanged"
        )
    still_entered = [other for other in above if not getattr(_entered(other), "left", False)]
    if still_entered:
        raise UsageError(
            f"{what} was exited before {len(still_entered)} context(s) entered inside it: exit "
            "contexts in the reverse order (its hooks were removed, the others stay active)"
        )


def take_off(scope: Scope) -> bool:
    """Pop the pair of ``scope`` if it is the only one on this thread's stack. Return whether it was.

    If there were others, a pair below would get the saves instead, or the context of a pair above would pop
    the wrong pair. ``scope`` is left as usual later, whether its pair is on the stack or not.
    """
    if _top is None or scope.is_aside:
        return False
    top = _top(True)
    if top is None or top[0] is not scope.hooks.pack_hook:
        return False
    scope.is_off = (
        True  # before the pop: an interrupt leaves a pair that is found when its scope is left
    )
    _autograd._pop_saved_tensors_default_hooks()
    if _top(True) is not None:
        push(scope.hooks.pack_hook, scope.hooks.unpack_hook)
        scope.is_off = False
    return scope.is_off


def replace_current(pair: Pair) -> None:
    """Replace the current pair by ``pair``, which the context that pushed the current one will pop."""
    _autograd._pop_saved_tensors_default_hooks()
    push(*pair)


def take_all(pairs: list[Pair] | None = None) -> list[Pair]:
    """Empty this thread's stack and return its pairs, newest first, appended to ``pairs``."""
    pairs = [] if pairs is None else pairs
    while (pair := current_pair()) is not None:
        pairs += (pair,)  # no call between this and the pop: nothing interrupts
        _autograd._pop_saved_tensors_default_hooks()
    return pairs
