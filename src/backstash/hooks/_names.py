"""Which modules, parameters or plain tensors a name selects."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import TypeAlias

import torch
from torch import nn

from .._torch.module_parts import own_parameters
from ..errors import UsageError
from ._errors import NoMatchError
from ._paths import Site, join, unwrap, walk

__all__ = ["Names", "Selector", "Target", "named_tensors", "near", "select", "select_tensors"]


Selector: TypeAlias = str | type[nn.Module] | nn.Module | Callable[[str, nn.Module], bool]
Names: TypeAlias = Selector | Iterable[Selector]


def select(model: nn.Module, names: Names | None, *, argument: str = "names") -> list[Site]:
    """Return the modules that ``names`` select, each once, in the model's order.

    Args:
        model: the module to search; wrappers are looked through.
        names: one selector, or an iterable of them: a path (``"layer4"``), a glob whose ``*`` also
            crosses dots (``"layer3.*"``), a module class, a module, or ``callable(path, module)``. ``None``
            selects every module.
        argument: what the argument is called in the error message.

    Raises:
        NoMatchError: for a selector that matches nothing, or only containers that are never called.
    """
    every = list(walk(model))
    chosen: dict[int, Site] = {}
    for selector in [nn.Module] if names is None else _as_selectors(names, argument):
        found = [site for _, site in every if _matches(selector, site)]
        found = found or [site for raw, site in every if raw == selector]
        usable = [site for site in found if site.callable]
        if not usable:
            raise NoMatchError(_explain(selector, found, every, model, argument))
        for site in usable:
            chosen.setdefault(id(site.module), site)
    in_order = dict.fromkeys(id(site.module) for _, site in every)
    return [chosen[key] for key in in_order if key in chosen]


def _as_selectors(names: Names, argument: str) -> list[Selector]:
    if isinstance(names, (str, type, nn.Module)) or callable(names):
        return [names]
    if isinstance(names, Iterable):
        return [item for name in names for item in _as_selectors(name, argument)]
    raise NoMatchError(
        f"{argument}={names!r} cannot select modules; allowed: a path, a glob, a module class, "
        "a module, callable(path, module) -> bool, or a list of these"
    )


def _matches(selector: Selector, site: Site) -> bool:
    if isinstance(selector, str):
        return selector == site.path or fnmatchcase(site.path, selector)
    if isinstance(selector, type):
        return isinstance(site.module, selector)
    if isinstance(selector, nn.Module):
        return unwrap(selector) is site.module
    return bool(selector(site.path, site.module))


def _explain(
    selector: Selector,
    found: list[Site],
    every: list[tuple[str, Site]],
    model: nn.Module,
    argument: str,
) -> str:
    what = f"{argument}: {selector!r}"
    if found:
        kinds = sorted({type(site.module).__name__ for site in found})
        if all(isinstance(site.module, torch.jit.ScriptModule) for site in found):
            return f"{what} is scripted or traced: PyTorch allows no hooks there; hook the module around it"
        child = f"{found[0].path}.*" if found[0].path else "*"
        return f"{what} matches only {', '.join(kinds)}, which is never called; name what is in it: {child!r}"
    kind = type(unwrap(model)).__name__
    if isinstance(selector, str):
        return f"{what} matches no module of {kind}; {near(selector, [s.path for _, s in every])}"
    if isinstance(selector, type):
        classes = sorted({type(site.module).__name__ for _, site in every})
        return f"{what} is the class of no module of {kind}; {near(selector.__name__, classes)}"
    return f"{what} matches no module of {kind}; it has {len(every)} modules, the first ones: " + (
        ", ".join(repr(site.path) for _, site in every[:4])
    )


def near(name: str, known: Iterable[str]) -> str:
    """Return the end of an error message: known names similar to ``name``, or else the first ones."""
    names = [item for item in dict.fromkeys(known) if item]
    tails = {item.rpartition(".")[2]: item for item in reversed(names)}
    close = difflib.get_close_matches(name, names, n=4, cutoff=0.5)
    close += [tails[t] for t in difflib.get_close_matches(name.rpartition(".")[2], tails, n=2)]
    if close:
        return "near: " + ", ".join(repr(item) for item in dict.fromkeys(close))
    more = f", … ({len(names)} in all)" if len(names) > 8 else ""
    return "there are: " + ", ".join(repr(item) for item in names[:8]) + more


Target: TypeAlias = nn.Module | Mapping[str, torch.Tensor]


def named_tensors(target: Target) -> dict[str, torch.Tensor]:
    """Return the parameters of a module by path, each once; or the given mapping of tensors as a dict.

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
        for name, parameter in own_parameters(site.module):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                found[join(site.path, name)] = parameter
    return found


def select_tensors(
    target: Target, names: str | Iterable[str] | None, *, argument: str = "names"
) -> dict[str, torch.Tensor]:
    """Return the tensors that ``names`` (paths or globs; ``None`` is all) select and that require a gradient.

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
