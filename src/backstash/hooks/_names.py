"""Which modules a name means: paths, globs, classes, modules and callables."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from typing import TypeAlias

from torch import nn

from ._errors import NoMatchError
from ._paths import Site, unwrap, walk

__all__ = ["Names", "Selector", "near", "select"]

Selector: TypeAlias = str | type[nn.Module] | nn.Module | Callable[[str, nn.Module], bool]
Names: TypeAlias = Selector | Iterable[Selector]


def select(model: nn.Module, names: Names, *, argument: str = "names") -> list[Site]:
    """The modules that ``names`` select, each once, in the model's order.

    Args:
        model: the module to search; wrappers are looked through.
        names: one selector, or an iterable of them: a path (``"layer4"``), a glob whose ``*`` also
            crosses dots (``"layer3.*"``), a module class, a module, or ``callable(path, module)``.
        argument: what the argument is called in the error message.

    Raises:
        NoMatchError: for a selector that matches nothing, or only containers that are never called.
    """
    every = list(walk(model))
    chosen: dict[int, Site] = {}
    for selector in _as_selectors(names, argument):
        found = [site for _, site in every if _matches(selector, site)]
        found = found or [site for raw, site in every if raw == selector]
        usable = [site for site in found if site.callable]
        if not usable:
            raise NoMatchError(_explain(selector, found, every, model, argument))
        for site in usable:
            chosen.setdefault(id(site.module), site)
    order = {id(site.module): index for index, (_, site) in reversed(list(enumerate(every)))}
    return sorted(chosen.values(), key=lambda site: order[id(site.module)])


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
    """The near misses of ``name``, as the end of an error message."""
    names = [item for item in dict.fromkeys(known) if item]
    tails = {item.rpartition(".")[2]: item for item in reversed(names)}
    close = difflib.get_close_matches(name, names, n=4, cutoff=0.5)
    close += [tails[t] for t in difflib.get_close_matches(name.rpartition(".")[2], tails, n=2)]
    if close:
        return "near: " + ", ".join(repr(item) for item in dict.fromkeys(close))
    more = f", … ({len(names)} in all)" if len(names) > 8 else ""
    return "there are: " + ", ".join(repr(item) for item in names[:8]) + more
