"""The graph of a script's first backward, drawn as it begins and before anything in it is freed."""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch import nn

from ..report import draw

__all__ = ["FirstBackward"]


class FirstBackward:
    """Stands in for ``torch.autograd.backward`` until it is called once; ``Tensor.backward`` calls that too.

    A script that takes gradients by ``torch.autograd.grad`` alone is not seen.
    """

    def __init__(self) -> None:
        self.svg = ""
        """The picture; empty until the first backward, and where it could not be drawn."""
        self.note = "no graph: torch.autograd.backward was not called"
        """Why there is no picture."""
        self._own: Any = torch.autograd.backward
        self._stand_in: Any = self._called
        torch.autograd.backward = self._stand_in

    def _called(self, tensors: Any, *args: Any, **kwargs: Any) -> Any:
        self.remove()
        try:
            self.svg = draw(tensors, _largest_module()).to_svg()
            self.note = ""
        except (
            Exception
        ) as error:  # the script's own job goes on, and its own errors come from backward
            self.note = f"no graph: {type(error).__name__}: {error}"
        return self._own(tensors, *args, **kwargs)

    def remove(self) -> None:
        """Put torch's own back. A second call does nothing."""
        if torch.autograd.backward is self._stand_in:
            torch.autograd.backward = self._own


def _largest_module() -> nn.Module | None:
    """The module with the most parameters of those there are, so that the drawing knows their names."""
    modules = [each for each in gc.get_objects() if issubclass(type(each), nn.Module)]
    inner = {id(child) for module in modules for child in module.children()}
    outer = [module for module in modules if id(module) not in inner]
    return max(outer, key=lambda module: sum(1 for _ in module.parameters()), default=None)
