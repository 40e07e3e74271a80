"""An interpreter must not end while a thread of autograd's engine still holds something of Python's.

From PyTorch 2.13 on each backward lends its engine a copy of the caller's ``contextvars``. The last
thread to release a backward frees that copy. Often this is the thread of a device, shortly after ``backward()``
has returned. Where that is the program's last act, the thread asks for an interpreter that is ending, is
stopped amid C++, and the process aborts: "terminate called without an active exception", with plain PyTorch as
well.
"""

from __future__ import annotations

import atexit
import contextvars
import os
import time
import weakref
from collections.abc import Callable, Iterable

import torch

__all__ = ["wait_at_exit", "wait_until_idle"]

_HELD: contextvars.ContextVar[object] = contextvars.ContextVar("held")


class _Mark:
    """What a backward holds, and can be seen to be gone."""


def wait_until_idle(devices: Iterable[torch.device]) -> None:
    """Wait until the engine's thread of each device has released every backward that has returned.

    A thread releases one backward before it takes up the next, so one more is asked of each, in a context of
    its own, and waited for until that is gone.
    """
    for device in devices:
        mark = _Mark()
        context = contextvars.copy_context()
        context.run(_backward, device, mark)
        gone = weakref.ref(mark)
        del mark, context
        while gone() is not None:
            time.sleep(0.0005)


def wait_at_exit(devices: Callable[[], Iterable[torch.device]]) -> None:
    """Wait as the last thing that this process does; its children, which have no such threads, do not.

    Args:
        devices: asked then: those that may have such a thread.
    """
    if torch.__version__ >= (2, 13):
        process = os.getpid()
        atexit.register(lambda: wait_until_idle(devices()) if os.getpid() == process else None)


def _backward(device: torch.device, mark: _Mark) -> None:
    _HELD.set(mark)
    torch.ones((), device=device, requires_grad=True).exp().backward()
