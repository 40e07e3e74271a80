"""Hooks for the gradient that comes through one use of a tensor, and through no other use.

A hook on a leaf gets the gradient of every use, stays after the graph is freed, and would be registered again
by every call. A hook on an input also gets the gradient of every use. So each use gets a view of the tensor,
with the hook on the view. But an in-place operation on a view takes that view, with its hooks, out of the
graph. For a module that changes its input in place, a second hook counts instead: the one on the tensor as it
was before the call.
"""

from __future__ import annotations

from collections.abc import Callable
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


class _Use:
    """One tensor as the input of one call."""

    __slots__ = ("changed", "tensor", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor: torch.Tensor | None = tensor
        self.version = version_of(tensor)
        self.changed = False

    def hook(self, hook: GradHook, *, if_changed: bool) -> GradHook:
        """Return ``hook`` for the case that the module changed the tensor in place, or that it did not."""

        def chosen(gradient: torch.Tensor) -> Any:
            return hook(gradient) if self.changed is if_changed else None

        return chosen


class InputUses:
    """The input tensors of one call, hooked for the gradient that comes through that call."""

    __slots__ = ("_registration", "_uses")

    def __init__(self, registration: Registration) -> None:
        self._registration = registration
        self._uses: list[_Use] = []

    def begin(self, inputs: Any, hook_of: Callable[[int], GradHook]) -> Any:
        """Return the inputs to call the module with; ``hook_of(i)`` is the hook of their i-th tensor."""
        index = -1

        def view(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal index
            index += 1
            if not (tensor.requires_grad and torch.is_grad_enabled()):
                return tensor
            return self._hooked(tensor, hook_of(index))

        return map_leaves(view, inputs)

    def _hooked(self, tensor: torch.Tensor, hook: GradHook) -> torch.Tensor:
        use = _Use(tensor)
        self._uses.append(use)
        if not tensor.is_leaf:
            self._registration.activation(tensor, use.hook(hook, if_changed=True))
        alias = tensor.view_as(tensor)
        self._registration.activation(alias, use.hook(hook, if_changed=False))
        return alias

    def end(self) -> None:
        """Record which tensors the call changed in place, after it has returned."""
        for use in self._uses:
            if use.tensor is not None:
                use.changed = version_of(use.tensor) != use.version
                use.tensor = None
        self._uses.clear()
