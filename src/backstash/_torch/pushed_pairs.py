"""Replace every hook pair that a thread pushes while a report is recorded.

Only the innermost pair sees a save. A pair pushed inside the report's context would hide the tensors that it
saves. So while any thread has a listener, the function by which Python code pushes pairs is replaced. It is
restored when there is none. A listener receives only pairs of its own thread.

The function, ``torch._C._autograd._push_saved_tensors_default_hooks``, exists in torch 2.11 to 2.15. If it is
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
    """Push a pair unchanged, without calling the listeners."""
    (_state["real"] if _state["count"] else _current())(pack, unpack)


def listen(stand_in: StandIn) -> None:
    """From now on, replace each pair that this thread pushes by ``stand_in(pack, unpack)``."""
    with _lock:
        if _state["count"] == 0:
            _state["real"] = _current()
            setattr(_autograd, _NAME, _push)
        _state["count"] += 1
    _local.listeners = (*getattr(_local, "listeners", ()), stand_in)


def is_listening(stand_in: StandIn) -> bool:
    """Return whether ``stand_in`` replaces this thread's pairs."""
    return stand_in in getattr(_local, "listeners", ())


def stop_listening(stand_in: StandIn) -> None:
    """Stop replacing pairs by ``stand_in``. Call it on the thread that called :func:`listen`."""
    _local.listeners = tuple(each for each in _local.listeners if each is not stand_in)
    with _lock:
        _state["count"] -= 1
        # If another library has replaced the function since, its replacement stays; ours only forwards then.
        if _state["count"] == 0 and _current() is _push:
            setattr(_autograd, _NAME, _state["real"])
