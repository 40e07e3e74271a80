"""A warning for hooks that ``torch.compile`` ignores.

A compiled graph contains the hooks that were registered when it was traced. PyTorch ignores hooks that are
registered later and does not say so (it skips the guards on them).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable

import torch
from torch import nn

from .._text import level_of_program
from .._torch.module_parts import is_compiled
from ._errors import HookWarning
from ._paths import Site

__all__ = ["warn_if_compiled"]


def warn_if_compiled(model: nn.Module, sites: Iterable[Site], *, owner: str) -> None:
    """Warn with the remedy if any of ``sites`` runs inside a compiled region of ``model``."""
    if torch.compiler.is_compiling():
        return
    regions = [module for module in model.modules() if is_compiled(module)]
    inside = {id(module) for region in regions for module in region.modules()}
    caught = [site.label for site in sites if id(site.module) in inside]
    if not caught:
        return
    more = f" and {len(caught) - 4} more" if len(caught) > 4 else ""
    warnings.warn(
        f"{owner}: {', '.join(caught[:4])}{more} runs inside torch.compile, and a graph compiled before "
        "this call ignores its hooks; call torch.compiler.reset() after registering, or hook and run the "
        "model that was given to torch.compile",
        HookWarning,
        stacklevel=level_of_program(),
    )
