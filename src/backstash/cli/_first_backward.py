"""Draw the graph of a script's first backward when it begins, before anything in the graph is freed."""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch import nn

from ..errors import UsageError
from ..report import draw

__all__ = ["FirstBackward"]


class FirstBackward:
    """Replace ``torch.autograd.backward`` until its first call, which draws the graph.

    ``Tensor.backward`` calls that function too. The graph of a script that only calls ``torch.autograd.grad``
    is not drawn.
    """

    def __init__(self) -> None:
        self.section: dict[str, str] = {}
        """The page's ``graph``, or its ``graph_text`` without Graphviz; empty if nothing was drawn."""
        self.note = "no graph: torch.autograd.backward was not called"
        """Why there is no picture."""
        self._own: Any = torch.autograd.backward
        self._stand_in: Any = self._called
        torch.autograd.backward = self._stand_in

    def _called(self, tensors: Any, *args: Any, **kwargs: Any) -> Any:
        self.remove()
        try:
            drawing = draw(tensors, _largest_module())
            self.section, self.note = {"graph_text": str(drawing)}, ""
            self.section = {"graph": drawing.to_svg()}
        except UsageError as error:
            self.note = f"the graph as text: {error}"
        except Exception as error:  # the script continues; its own errors come from backward
            self.note = f"no graph: {type(error).__name__}: {error}"
        return self._own(tensors, *args, **kwargs)

    def remove(self) -> None:
        """Restore torch's own function. A second call does nothing."""
        if torch.autograd.backward is self._stand_in:
            torch.autograd.backward = self._own


def _largest_module() -> nn.Module | None:
    """Return the outermost module with the most parameters, whose parameter names the drawing uses."""
    modules = [each for each in gc.get_objects() if issubclass(type(each), nn.Module)]
    inner = {id(child) for module in modules for child in module.children()}
    outer = [module for module in modules if id(module) not in inner]
    return max(outer, key=lambda module: sum(1 for _ in module.parameters()), default=None)
