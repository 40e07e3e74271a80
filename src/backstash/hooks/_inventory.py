"""List every hook on a model: who registered it, where, since when, and how often it fired."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .._text import clean
from .._torch.hook_dicts import hooks_of, hooks_of_all_modules, plain_function
from .._torch.hook_stack import current_pair
from .._torch.module_parts import own_parameters
from ..errors import UsageError
from ._paths import join, walk
from ._registration import record_of

__all__ = ["HookInfo", "Inventory", "hooks_on"]


def hooks_on(model: nn.Module) -> Inventory:
    """List the hooks on a model: ours and others', on modules and parameters, and the global ones.

    Listed are: forward, forward pre-, backward, backward pre- and state-dict hooks of modules; tensor and
    post-accumulate hooks of parameters; the hooks for all modules; the pair of saved-tensor hooks that is
    active on this thread. Not listed are hooks that C++ code put on autograd nodes (DDP's reducer), and
    hooks on activations, which belong to the graph.

    For our hooks, the list says when and where they were registered and how often they fired. PyTorch
    keeps no such record of others' hooks: their ``since`` and ``fired`` are ``None``, and ``where`` is the
    place where the hook's function was defined.

    Args:
        model: the model; hooks on wrappers (DDP, compiled) are listed with the wrapped path.

    Returns:
        An :class:`Inventory`: a tuple of :class:`HookInfo`, empty without hooks; ``print`` shows a table.

    >>> import torch
    >>> from backstash.hooks import capture, hooks_on
    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    >>> with capture(model, "0"):
    ...     _ = model(torch.ones(1, 2))
    ...     [(hook.owner, hook.path, hook.kind, hook.fired) for hook in hooks_on(model)]
    [('backstash.hooks.capture', '0', 'forward', 1)]
    >>> hooks_on(model)
    ()
    """
    return Inventory(HookInfo.of(kind, path, function) for kind, path, function in _places(model))


@dataclass(frozen=True, slots=True)
class HookInfo:
    """One hook on a module, on a parameter, or on all modules."""

    kind: str
    """``"forward"``, ``"forward pre"``, ``"gradient"``, ``"accumulated gradient"``, ``"global forward"``, …"""
    path: str
    """The path of the module or parameter it is on; ``""`` is the model, ``"*"`` a global hook."""
    ours: bool
    """Whether backstash.hooks registered it."""
    owner: str
    """``backstash.hooks.<function>`` for ours; for others' the module that defines the hook's function."""
    function: str
    """The qualified name of the hook's function."""
    where: str
    """``file:line`` of the call that registered it (ours) or of its function; ``""`` for one in C."""
    since: float | None
    """When it was registered, in seconds since the epoch; ``None`` for others' hooks."""
    fired: int | None
    """How often it fired; ``None`` for others' hooks."""

    @classmethod
    def of(cls, kind: str, path: str, function: Any) -> HookInfo:
        """Return the facts about a hook, from its function."""
        record = record_of(function)
        plain = plain_function(function)
        name = getattr(plain, "__qualname__", type(plain).__qualname__)
        if record is not None:
            ours = record.registration
            owner = f"backstash.hooks.{ours.owner}"
            return cls(kind, path, True, owner, name, ours.registered_at, ours.since, record.fired)
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


def _where(function: Any) -> str:
    call = vars(type(function)).get("__call__")
    code = getattr(function, "__code__", None) or getattr(call, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code is not None else ""


class Inventory(tuple[HookInfo, ...]):
    """The hooks on a model, as a tuple; ``str()`` has one line for each."""

    __slots__ = ()

    def __str__(self) -> str:
        return "\n".join(map(str, self)) if self else "no hooks"


def _places(model: nn.Module) -> Iterator[tuple[str, str, Any]]:
    """Yield every hook: its kind, the path of what it is on (``"*"`` for global ones), its function."""
    paths: dict[int, str] = {}
    for _, site in walk(model):
        paths.setdefault(id(site.module), site.path)
    holders: dict[int, tuple[str, nn.Module | torch.Tensor]] = {}
    for raw, module in model.named_modules():
        path = paths.get(id(module), raw)
        holders[id(module)] = path, module
        for name, parameter in own_parameters(module):
            holders.setdefault(id(parameter), (join(path, name), parameter))
    for path, holder in holders.values():
        for kind, function in hooks_of(holder):
            yield kind, path, function
    for kind, function in hooks_of_all_modules():
        yield kind, "*", function
    pair = None
    with suppress(UsageError):  # if torch does not expose the pair, none is listed
        pair = current_pair()
    if pair is not None:
        yield "saved tensor pack", "*", pair.pack
        yield "saved tensor unpack", "*", pair.unpack
