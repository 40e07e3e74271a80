"""Remove the stash's hooks during ``torch.func`` transforms, which do not allow saved-tensor hooks.

``grad``, ``vjp``, ``jacrev`` and ``hessian`` disable hooks while they run, which is an error if a pair is
active on the thread: a script that works alone would fail under ``backstash run``. So the two calls that
disable and enable hooks are replaced when the stash first pushes a pair. If all pairs of the thread are the
stash's and a transform disables hooks, the pairs are removed until hooks are enabled again. What the transform
saves stays in memory, as without a stash. A pair entered inside a transform is not pushed: see
:func:`stepped_aside_for`. A pair belongs to the stash if its pack hook, or the object of which it is a method,
has a method ``steps_aside``. That method is called each time the pair is removed, and ``comes_back``, if there
is one, when it returns.

For other callers, and if another library's pair is active, the calls work as before, with one exception: a
refusal leaves hooks enabled if they were. Torch disables them and then raises, and the tracer of
``torch.compile`` did not enable them again, so that every later pair of the process was refused.

``torch._C._autograd._saved_tensors_hooks_disable``, ``_enable`` and ``_get_disabled_error_message`` exist in
torch 2.11 to 2.15. If one is missing, transforms are refused as before.
"""

from __future__ import annotations

import threading
from typing import Any

import torch

from .hook_stack import Pair, own_pack, take_all
from .lookup import optional
from .pushed_pairs import push_unseen

__all__ = ["REFUSAL", "left_aside", "let_transforms_pass", "stepped_aside_for"]

REFUSAL = "support saved tensor hooks"
"""A part of the message with which transforms disable hooks."""

_autograd: Any = torch._C._autograd
_disable: Any = optional("torch._C._autograd._saved_tensors_hooks_disable", None)
_enable: Any = optional("torch._C._autograd._saved_tensors_hooks_enable", None)
_message: Any = optional("torch._C._autograd._saved_tensors_hooks_get_disabled_error_message", None)
_top: Any = optional("torch._C._autograd._top_saved_tensors_default_hooks", None)


class _Local(threading.local):
    def __init__(self) -> None:
        self.aside: list[Pair] = []  # removed pairs, newest first


_local = _Local()


def let_transforms_pass() -> None:
    """Replace the two calls, if necessary. Called before the stash pushes a pair."""
    if _autograd._saved_tensors_hooks_disable is _disable and None not in (_enable, _message, _top):
        _autograd._saved_tensors_hooks_disable = _step_aside
        _autograd._saved_tensors_hooks_enable = _come_back


def stepped_aside_for(pack: Any) -> bool:
    """Return whether a transform without hooks runs on this thread. Then ``pack`` must not be pushed."""
    if _message is None or REFUSAL not in (_message() or ""):
        return False
    _removal_method(Pair(pack, pack))()
    return True


def left_aside(pack: Any) -> bool:
    """Forget the newest removed pair of ``pack`` on this thread. Return whether there was one."""
    found = next((pair for pair in _local.aside if own_pack(pair) is pack), None)
    if found is not None:
        _local.aside.remove(found)
    return found is not None


def _step_aside(message: str, fail_if_non_empty: bool = True) -> None:
    before = _message()
    if fail_if_non_empty and REFUSAL in message and before is None:
        take_all(_local.aside)
        if None in map(
            _removal_method, _local.aside
        ):  # another library's pair is active: let torch refuse
            _push_back()
    try:
        _disable(message, fail_if_non_empty)
    except BaseException:
        _come_back() if before is None else _disable(before, False)
        raise
    for pair in _local.aside if before is None else ():
        _removal_method(pair)()


def _removal_method(pair: Pair) -> Any:
    """Return the method to call when ``pair`` is removed; ``None`` for another library's pair."""
    return _of(pair, "steps_aside")


def _of(pair: Pair, name: str) -> Any:
    own = own_pack(pair)
    return getattr(own, name, getattr(getattr(own, "__self__", None), name, None))


def _come_back() -> None:
    _enable()
    _push_back()


def _push_back() -> None:
    while _local.aside:
        pair = _local.aside.pop()
        push_unseen(*pair)
        if (comes_back := _of(pair, "comes_back")) is not None:
            comes_back()


for _ours, _theirs in ((_step_aside, _disable), (_come_back, _enable)):
    # A compiled graph refers to the call by these names.
    _ours.__module__, _ours.__name__ = "torch._C._autograd", getattr(_theirs, "__name__", "")
