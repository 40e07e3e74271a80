"""Hooks for the gradient that comes through one use of a tensor, and through no other use.

A hook on a leaf gets the gradient of every use, stays after the graph is freed, and would be registered again
by every call. A hook on an input also gets the gradient of every use. So each use gets a view of the tensor,
with the hook on the view. But an in-place operation on a view takes that view, with its hooks, out of the
graph. For a module that changes its input in place, a second hook counts instead: the one on the tensor as it
was before the call.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

import torch

from .._torch.versions import version_of
from ._registration import Registration
from ._tree import map_leaves, tensors_in

__all__ = ["GradHook", "InputUses", "own_output"]

GradHook = Callable[[torch.Tensor], Any]


def own_output(output: Any, inputs: Any) -> Any:
    """Return the output with a view in place of each tensor that requires a gradient and is not the call's own:
    a leaf, or one of the inputs, as ``nn.Identity`` returns it."""
    if not torch.is_grad_enabled():
        return output
    given = {id(each) for each in tensors_in(inputs)}

    def view(tensor: torch.Tensor) -> torch.Tensor:
        is_own = not tensor.is_leaf and id(tensor) not in given
        return tensor if is_own or not tensor.requires_grad else tensor.view_as(tensor)

    return map_leaves(view, output)


class InputUses:
    """The input tensors of one call, hooked for the gradient that comes through that call."""

    __slots__ = ("_changed", "_registration", "_uses")

    def __init__(self, registration: Registration) -> None:
        self._registration = registration
        self._uses: list[tuple[torch.Tensor, int | None]] = []  # with the version before the call
        self._changed: set[int] = set()  # which of them the call changed in place

    def begin(self, inputs: Any, hook_of: Callable[[int], GradHook]) -> Any:
        """Return the inputs to call the module with; ``hook_of(i)`` is the hook of their i-th tensor."""
        index = count()

        def view(tensor: torch.Tensor) -> torch.Tensor:
            hook = hook_of(next(index))
            if not (tensor.requires_grad and torch.is_grad_enabled()):
                return tensor
            return self._hooked(tensor, hook)

        return map_leaves(view, inputs)

    def _hooked(self, tensor: torch.Tensor, hook: GradHook) -> torch.Tensor:
        changed, use = self._changed, len(self._uses)
        self._uses.append((tensor, version_of(tensor)))
        alias = tensor.view_as(tensor)
        if not tensor.is_leaf:
            self._registration.activation(tensor, lambda g: hook(g) if use in changed else None)
        self._registration.activation(alias, lambda g: None if use in changed else hook(g))
        return alias

    def end(self) -> None:
        """Record which tensors the call changed in place, after it has returned."""
        for use, (tensor, version) in enumerate(self._uses):
            if version_of(tensor) != version:
                self._changed.add(use)
        self._uses.clear()
