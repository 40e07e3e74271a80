"""Standing in for every hook pair that a thread pushes while a report is made.

Only the innermost pair sees a save. A pair that is pushed inside the report's context would hide what it
saves, so the call by which all of Python pushes pairs is replaced while there is a listener, on any thread,
and put back when there is none. It stands in for pairs of the listener's own thread only.

The call, ``torch._C._autograd._push_saved_tensors_default_hooks``, is in torch 2.11 to 2.15. Where it is
missing, entering a report raises ``UsageError``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .lookup import required

__all__ = ["Pack", "StandIn", "Unpack", "is_listening", "listen", "push_unseen", "stop_listening"]

Pack = Callable[[Tensor], Any]
Unpack = Callable[[Any], Tensor]
StandIn = Callable[[Pack, Unpack], tuple[Pack, Unpack]]

_autograd: Any = torch._C._autograd
_PATH = "torch._C._autograd._push_saved_tensors_default_hooks"
_NAME = _PATH.rpartition(".")[2]
_lock = threading.Lock()
_local = threading.local()
_state: dict[str, Any] = {
    "count": 0,
    "real": required(_PATH, "sees what other hooks save"),
}


def _push(pack: Pack, unpack: Unpack) -> None:
    for stand_in in getattr(_local, "listeners", ()):
        pack, unpack = stand_in(pack, unpack)
    _state["real"](pack, unpack)


def _current() -> Any:
    return getattr(_autograd, _NAME, _state["real"])


def push_unseen(pack: Pack, unpack: Unpack) -> None:
    """Push a pair as it is, past all listeners."""
    (_state["real"] if _state["count"] else _current())(pack, unpack)


def listen(stand_in: StandIn) -> None:
    """Replace each pair that this thread pushes by ``stand_in(pack, unpack)``, from now on."""
    with _lock:
        if _state["count"] == 0:
            _state["real"] = _current()
            setattr(_autograd, _NAME, _push)
        _state["count"] += 1
    _local.listeners = (*getattr(_local, "listeners", ()), stand_in)


def is_listening(stand_in: StandIn) -> bool:
    """Whether this thread's pairs are replaced by ``stand_in``."""
    return stand_in in getattr(_local, "listeners", ())


def stop_listening(stand_in: StandIn) -> None:
    """No longer replace pairs by ``stand_in``. On the thread that began."""
    _local.listeners = tuple(each for each in _local.listeners if each is not stand_in)
    with _lock:
        _state["count"] -= 1
        # Whoever replaced the call after us keeps theirs; ours then only hands on.
        if _state["count"] == 0 and _current() is _push:
            setattr(_autograd, _NAME, _state["real"])
