"""Which parameters, or plain tensors, a name means."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import TypeAlias

import torch
from torch import nn

from ..errors import UsageError
from ._errors import NoMatchError
from ._names import near
from ._paths import join, walk

__all__ = ["Target", "named_tensors", "select_tensors"]

Target: TypeAlias = nn.Module | Mapping[str, torch.Tensor]


def named_tensors(target: Target) -> dict[str, torch.Tensor]:
    """The parameters of a module by path, each once; a mapping of tensors as it is.

    Raises:
        UsageError: for anything else.
    """
    if isinstance(target, nn.Module):
        return _parameters(target)
    if isinstance(target, Mapping) and all(isinstance(t, torch.Tensor) for t in target.values()):
        return dict(target)
    raise UsageError(
        f"model={type(target).__name__} has no gradients to hook; allowed: a torch.nn.Module, or a "
        'dict of tensors by name, such as {"y": y}'
    )


def _parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for _, site in walk(model):
        for name, parameter in site.module._parameters.items():
            if parameter is not None and id(parameter) not in seen:
                seen.add(id(parameter))
                found[join(site.path, name)] = parameter
    return found


def select_tensors(
    target: Target, names: str | Iterable[str] | None, *, argument: str = "names"
) -> dict[str, torch.Tensor]:
    """The tensors that require a gradient and that ``names`` (paths or globs; ``None`` is all) select.

    Raises:
        NoMatchError: for a name that matches nothing, or only tensors that require no gradient.
    """
    every = named_tensors(target)
    trainable = {name: tensor for name, tensor in every.items() if tensor.requires_grad}
    if names is None:
        if not trainable:
            raise NoMatchError(
                f"none of the {len(every)} tensors requires a gradient; call requires_grad_()"
            )
        return trainable
    chosen: set[str] = set()
    for name in [names] if isinstance(names, str) else names:
        chosen |= _matching(name, every, trainable, argument)
    return {name: tensor for name, tensor in trainable.items() if name in chosen}


def _matching(
    pattern: str, every: dict[str, torch.Tensor], trainable: dict[str, torch.Tensor], argument: str
) -> set[str]:
    found = {name for name in every if name == pattern or fnmatchcase(name, pattern)}
    if not found:
        raise NoMatchError(f"{argument}: {pattern!r} matches no parameter; {near(pattern, every)}")
    if usable := found & trainable.keys():
        return usable
    raise NoMatchError(
        f"{argument}: {pattern!r} matches only tensors that require no gradient "
        f"({', '.join(sorted(found)[:4])}); call requires_grad_() on them first"
    )
