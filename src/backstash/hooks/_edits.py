"""The edits of a capture: changes of modules' outputs and inputs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from torch import nn

from ..errors import UsageError
from ._names import Selector, select
from ._paths import Site

__all__ = ["Change", "Edit", "changes", "first_of", "with_first"]

Change: TypeAlias = Callable[..., Any]
Edit: TypeAlias = Change | Mapping[Selector, Change]


def changes(
    model: nn.Module, sites: list[Site], edit: Edit | None, argument: str
) -> list[tuple[Site, Change]]:
    """Return each edited module with its change: all captured modules, or those that a dict names.

    Raises:
        UsageError: a change is not callable.
        NoMatchError: a name of the dict matches nothing.
    """
    if edit is None:
        return []
    if not callable(edit) and not isinstance(edit, Mapping):
        raise UsageError(
            f"{argument}={edit!r}: allowed are callable(value), callable(value, input), and a dict of them"
        )
    named = edit.items() if isinstance(edit, Mapping) else [(sites, edit)]
    found: list[tuple[Site, Change]] = []
    for name, change in named:
        if not callable(change):
            raise UsageError(
                f"{argument}[{name!r}]={change!r} is not callable; give callable(value)"
            )
        chosen = sites if name is sites else select(model, name, argument=argument)  # type: ignore[arg-type]
        found += [(site, _with_input(change)) for site in chosen]
    return found


def _with_input(change: Change) -> Change:
    """Return ``change`` as ``callable(value, input)``, even if it takes only the value."""
    return change if _required(change) >= 2 else lambda value, _: change(value)


def _required(change: Change) -> int:
    try:
        parameters = inspect.signature(change).parameters.values()
    except (TypeError, ValueError):
        return 1  # a builtin, such as torch.zeros_like
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(p.kind in positional and p.default is p.empty for p in parameters)


def first_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return the first input: the first positional one or, without any, the first keyword one."""
    return args[0] if args else next(iter(kwargs.values()), None)


def with_first(
    value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the inputs with ``value`` in place of the first one."""
    if args:
        return (value, *args[1:]), kwargs
    return args, {**kwargs, next(iter(kwargs)): value} if kwargs else kwargs
