"""Paths of modules, without the names that wrappers add.

A module's path is the one of ``named_modules()`` without the wrappers' names: ``torch.compile`` adds
``_orig_mod``, DDP and ``DataParallel`` add ``module``, FSDP and activation-checkpoint wrappers theirs.
A path therefore means the same module before and after the model is wrapped.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from .._text import clean
from .._torch.module_parts import has_forward, inside, own_children

__all__ = ["Site", "depth_of", "join", "unwrap", "walk"]


@dataclass(frozen=True, slots=True)
class Site:
    """A module and its path."""

    path: str
    """Dotted, without wrappers' prefixes; the model itself is ``""``."""
    module: nn.Module
    """The module inside its wrappers."""

    @property
    def label(self) -> str:
        """The path, as messages show it."""
        return clean(self.path) or "(model)"

    @property
    def callable(self) -> bool:
        """Whether the module has a forward that hooks can observe: containers such as ``ModuleList`` have none,
        and PyTorch allows no hooks on what is scripted or traced."""
        return has_forward(self.module) and not isinstance(self.module, torch.jit.ScriptModule)


def unwrap(module: nn.Module) -> nn.Module:
    """Return the module inside ``torch.compile``'s, DDP's, FSDP1's and checkpoint's wrappers."""
    while (inner := inside(module)) is not None:
        module = inner[1]
    return module


def walk(model: nn.Module) -> Iterator[tuple[str, Site]]:
    """Yield (path with wrappers' names, site) for every module; a shared module once for each path."""
    return _walk(model, "", "", ())


def join(path: str, name: str) -> str:
    """Return the path of the child or parameter ``name`` of the module at ``path``."""
    return f"{path}.{name}" if path else name


def depth_of(path: str) -> int:
    """How many modules a path goes through; 0 for the model."""
    return path.count(".") + 1 if path else 0


def _walk(
    module: nn.Module, raw: str, path: str, above: tuple[int, ...]
) -> Iterator[tuple[str, Site]]:
    if id(module) in above:
        return
    above = (*above, id(module))
    inner = inside(module)
    if inner is not None:
        yield from _walk(inner[1], join(raw, inner[0]), path, above)
        return
    yield raw, Site(path, module)
    for name, child in own_children(module):
        yield from _walk(child, join(raw, name), join(path, name), above)
