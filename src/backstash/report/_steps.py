"""Where training steps end: where an optimizer stepped, or where the user says."""

from __future__ import annotations

import functools
import time
import weakref
from collections.abc import Callable
from typing import Any

from torch.optim import optimizer as torch_optimizer

from .._torch.dynamo import not_compiled

__all__ = ["StepMarks"]


class StepMarks:
    """Moments that end a step, each with its label, until :meth:`remove`.

    Where several optimizers step (one for each network, or one for each parameter), the first one that was
    seen to step ends the steps and the others do not.

    Args:
        optimizers: listen to every optimizer's ``step()``. Marks of the user's own are taken either way.
        then: is called after each mark.

    >>> import torch
    >>> weight = torch.zeros(3, requires_grad=True)
    >>> optimizer = torch.optim.SGD([weight], lr=0.1)
    >>> marks = StepMarks()
    >>> optimizer.step()
    >>> marks.mark("by hand")
    >>> marks.remove()
    >>> [label for _, label in marks.moments]
    ['1', 'by hand']
    """

    def __init__(self, *, optimizers: bool = True, then: Callable[[], None] | None = None) -> None:
        self.moments: list[tuple[float, str]] = []
        """``time.perf_counter()`` and label of each."""
        self._then = then
        self._leader: weakref.ref[Any] | None = None
        self._handle: Any = None
        if optimizers:
            heard = functools.partial(_hear, weakref.ref(self))
            self._handle = torch_optimizer.register_optimizer_step_post_hook(heard)

    def mark(self, label: str = "") -> None:
        """A step ends now."""
        self.moments.append((time.perf_counter(), label or str(len(self.moments) + 1)))
        if self._then is not None:
            self._then()

    def heard(self, optimizer: Any) -> None:
        """An optimizer has stepped."""
        if self._leader is None or self._leader() is None:
            self._leader = weakref.ref(optimizer)
        if self._leader() is optimizer:
            self.mark()

    def remove(self) -> None:
        """Listen to no optimizer any more. A second call does nothing."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None


@not_compiled  # a compiled step would warn of the clock
def _hear(marks: weakref.ref[StepMarks], optimizer: Any, args: Any, kwargs: Any) -> None:
    alive = marks()
    if alive is not None:
        alive.heard(optimizer)
