"""One hook, as a fact."""

from __future__ import annotations

import functools
import time
from dataclasses import dataclass
from typing import Any

from .._text import clean
from ._registration import record_of

__all__ = ["HookInfo", "Inventory"]


@dataclass(frozen=True, slots=True)
class HookInfo:
    """One hook on a module, on a parameter, or on all modules."""

    kind: str
    """``"forward"``, ``"forward pre"``, ``"gradient"``, ``"accumulated gradient"``, ``"global forward"``, …"""
    path: str
    """The path of the module or parameter it is on; ``""`` is the model, ``"*"`` is everything."""
    ours: bool
    """Whether backstash.hooks registered it."""
    owner: str
    """``backstash.hooks.<function>`` for ours; else the module that defines the hook's function."""
    function: str
    """The qualified name of the hook's function."""
    where: str
    """``file:line``: for ours the call that registered it, else where its function is; ``""`` if in C."""
    since: float | None
    """When it was registered, in seconds since the epoch; ``None`` if unknown, as for others' hooks."""
    fired: int | None
    """How often it fired; ``None`` if unknown, as for others' hooks."""

    @classmethod
    def of(cls, kind: str, path: str, function: Any) -> HookInfo:
        """What can be told of a hook's function."""
        record = record_of(function)
        plain = _plain(function)
        name = getattr(plain, "__qualname__", type(plain).__qualname__)
        if record is not None:
            owner = f"backstash.hooks.{record.owner}"
            where, since, fired = record.registered_at, record.since, record.fired
            return cls(kind, path, True, owner, name, where, since, fired)
        owner = getattr(plain, "__module__", None) or type(plain).__module__
        return cls(kind, path, False, owner, name, _where(plain), None, None)

    def __str__(self) -> str:
        since = (
            "since ?"
            if self.since is None
            else time.strftime("since %H:%M:%S", time.localtime(self.since))
        )
        fired = "fired: unknown" if self.fired is None else f"fired: {self.fired}"
        place = self.path or "(model)"
        who = f"{self.owner} ({self.where or self.function})"
        return clean(f"{place}: {self.kind}, {who}, {since}, {fired}")


def _plain(function: Any) -> Any:
    """The function inside partials, bound methods, and torch's own wrapper of hooks."""
    while True:
        inner = function.func if isinstance(function, functools.partial) else None
        inner = inner or getattr(function, "__func__", None)
        if inner is None and type(function).__name__ == "_WrappedHook":
            inner = getattr(function, "hook", None)
        if inner is None:
            return function
        function = inner


def _where(function: Any) -> str:
    call = vars(type(function)).get("__call__")
    code = getattr(function, "__code__", None) or getattr(call, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code is not None else ""


class Inventory(tuple[HookInfo, ...]):
    """The hooks that were found; ``str()`` is a table of lines."""

    __slots__ = ()

    def __str__(self) -> str:
        return "\n".join(map(str, self)) if self else "no hooks"
