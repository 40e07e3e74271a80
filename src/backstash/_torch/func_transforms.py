"""Stepping aside for ``torch.func``, whose reverse-mode transforms allow no saved-tensor hooks.

``grad``, ``vjp``, ``jacrev`` and ``hessian`` disable hooks while they run, which is an error where a pair is
active on the thread: a script that runs alone would end under ``backstash run``. So the two calls by which
hooks are disabled and enabled again are replaced, from the first time that a pair of ours is pushed. If all
pairs of the thread are ours and it is a transform that asks, they are taken off until hooks are enabled
again: what the transform saves stays where it is, as without us. A pair that is to be pushed inside a
transform is not: :func:`stepped_aside_for`. A pair is ours if its pack hook, or the
object whose method that is, has a method ``steps_aside``, which is called each time; so is ``comes_back``
afterwards, where it has one.

For whoever else asks, and where another's pair is active, the calls do what they did, but for one thing: a
refusal leaves hooks as enabled as they were. Torch disables them and then raises, and the tracer of
``torch.compile`` did not enable them again: every later pair of the process was refused.

``torch._C._autograd._saved_tensors_hooks_disable``, ``_enable`` and ``_get_disabled_error_message`` are in
torch 2.11 to 2.15. Where one is missing, transforms are refused as before.
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
"""In the message by which transforms disable hooks."""

_autograd: Any = torch._C._autograd
_disable: Any = optional("torch._C._autograd._saved_tensors_hooks_disable", None)
_enable: Any = optional("torch._C._autograd._saved_tensors_hooks_enable", None)
_message: Any = optional("torch._C._autograd._saved_tensors_hooks_get_disabled_error_message", None)
_top: Any = optional("torch._C._autograd._top_saved_tensors_default_hooks", None)


class _Local(threading.local):
    def __init__(self) -> None:
        self.aside: list[Pair] = []  # the newest first


_local = _Local()


def let_transforms_pass() -> None:
    """Replace the two calls, where they are not replaced yet. Called before a pair of ours is pushed."""
    if _autograd._saved_tensors_hooks_disable is _disable and None not in (_enable, _message, _top):
        _autograd._saved_tensors_hooks_disable = _step_aside
        _autograd._saved_tensors_hooks_enable = _come_back


def stepped_aside_for(pack: Any) -> bool:
    """Whether a transform that allows no hooks runs on this thread: ``pack`` is told, and not to be pushed."""
    if _message is None or REFUSAL not in (_message() or ""):
        return False
    _told(Pair(pack, pack))()
    return True


def left_aside(pack: Any) -> bool:
    """Take the newest pair of ``pack`` out of those that stand aside on this thread; whether there was one."""
    found = next((pair for pair in _local.aside if own_pack(pair) is pack), None)
    if found is not None:
        _local.aside.remove(found)
    return found is not None


def _step_aside(message: str, fail_if_non_empty: bool = True) -> None:
    before = _message()
    if fail_if_non_empty and REFUSAL in message and before is None:
        take_all(_local.aside)
        if None in map(_told, _local.aside):  # another's is active, too: the refusal is torch's own
            _push_back()
    try:
        _disable(message, fail_if_non_empty)
    except BaseException:
        _come_back() if before is None else _disable(before, False)
        raise
    for pair in _local.aside if before is None else ():
        _told(pair)()


def _told(pair: Pair) -> Any:
    """What is to be told that ``pair`` steps aside; ``None`` for another's pair."""
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
    # A compiled graph names the call that it makes by these.
    _ours.__module__, _ours.__name__ = "torch._C._autograd", getattr(_theirs, "__name__", "")
