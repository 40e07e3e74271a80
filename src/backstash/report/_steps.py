"""Find where training steps end: when an optimizer has stepped, or when the user calls ``mark``."""

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
    """The moments at which training steps end, each with a label, until :meth:`remove`.

    If there are several optimizers (one for each network, or one for each parameter), a step ends whenever the
    optimizer that stepped first steps again.

    Args:
        optimizers: whether optimizers end steps; :meth:`mark` always does. Default ``True``.
        then: a function that is called after the end of each step. Default ``None``.

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
        """(``time.perf_counter()``, label) of the end of each step."""
        self._then = then
        self._leader: weakref.ref[Any] | None = None
        self._handle: Any = None
        if optimizers:
            hook = functools.partial(_optimizer_stepped, weakref.ref(self))
            self._handle = torch_optimizer.register_optimizer_step_post_hook(hook)

    def mark(self, label: str = "") -> None:
        """End a step now. ``label`` is its name; the default is its number, from 1."""
        self.moments.append((time.perf_counter(), label or str(len(self.moments) + 1)))
        if self._then is not None:
            self._then()

    def heard(self, optimizer: Any) -> None:
        """End a step if ``optimizer``, which has stepped, is the one that stepped first."""
        if self._leader is None or self._leader() is None:
            self._leader = weakref.ref(optimizer)
        if self._leader() is optimizer:
            self.mark()

    def remove(self) -> None:
        """Remove the hook on optimizers. A second call does nothing."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None


@not_compiled  # compiling it would warn about the clock
def _optimizer_stepped(
    marks: weakref.ref[StepMarks], optimizer: Any, args: Any, kwargs: Any
) -> None:
    alive = marks()
    if alive is not None:
        alive.heard(optimizer)
