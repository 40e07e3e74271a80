"""Hooks that were registered together, and go together.

Each hook has a :class:`HookRecord`, which its function carries as an attribute: that is how
``hooks_on`` knows ours from others', and how an exit can say what never fired.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from ._paths import Site

__all__ = ["HookRecord", "Make", "Registration", "record_of"]

_ATTRIBUTE = "__backstash_record__"


class HookRecord:
    """What is known of one of our hooks."""

    __slots__ = ("fired", "kind", "owner", "path", "registered_at", "since")

    def __init__(self, kind: str, path: str, owner: str, registered_at: str, since: float) -> None:
        self.kind = kind
        self.path = path
        self.owner = owner
        self.registered_at = registered_at
        self.since = since
        self.fired = 0


Make = Callable[[HookRecord], Callable[..., Any]]


def record_of(function: object) -> HookRecord | None:
    """The record of one of our hook functions; ``None`` for a function that is not ours."""
    return getattr(function, _ATTRIBUTE, None)


def _caller() -> str:
    """``file:line`` of the nearest frame outside this package."""
    package = __name__.rpartition(".")[0]
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(package):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


class Registration:
    """The hooks of one handle. ``make`` is given the hook's record and returns the hook."""

    __slots__ = (
        "_graph_hooks",
        "_hooks",
        "_prune_at",
        "owner",
        "records",
        "registered_at",
        "since",
    )

    def __init__(self, owner: str) -> None:
        self.owner = owner
        self.registered_at = _caller()
        self.since = time.time()
        self.records: list[HookRecord] = []
        self._hooks: list[RemovableHandle] = []
        self._graph_hooks: list[RemovableHandle] = []
        self._prune_at = 256

    @contextmanager
    def all_or_none(self) -> Iterator[None]:
        """Registers inside this block; if it is left by any exception, every hook is taken back."""
        try:
            yield
        except BaseException:
            self.remove()
            raise

    def record(self, kind: str, path: str) -> HookRecord:
        """A record alone, for something to be expected that is no hook of a module or a parameter."""
        made = HookRecord(kind, path, self.owner, self.registered_at, self.since)
        self.records.append(made)
        return made

    def _made(self, kind: str, path: str, make: Make) -> Callable[..., Any]:
        record = HookRecord(kind, path, self.owner, self.registered_at, self.since)
        hook = make(record)
        setattr(hook, _ATTRIBUTE, record)
        self.records.append(record)
        return hook

    def forward(
        self,
        site: Site,
        make: Make,
        *,
        counts: str = "forward",
        with_kwargs: bool = False,
        always_call: bool = False,
    ) -> None:
        """A forward hook on a module; ``counts`` is what its record counts, in words."""
        hook = self._made(counts, site.path, make)
        self._hooks.append(
            site.module.register_forward_hook(
                hook, with_kwargs=with_kwargs, always_call=always_call
            )
        )

    def forward_pre(self, site: Site, make: Make, *, counts: str = "forward pre") -> None:
        """A forward pre-hook on a module, given the keyword inputs too."""
        hook = self._made(counts, site.path, make)
        self._hooks.append(site.module.register_forward_pre_hook(hook, with_kwargs=True))

    def gradient(self, name: str, tensor: torch.Tensor, make: Make) -> None:
        """A hook on a tensor's gradient, before it is accumulated."""
        hook = self._made("gradient", name, make)
        self._hooks.append(tensor.register_hook(hook))  # type: ignore[no-untyped-call]

    def accumulated(self, name: str, tensor: torch.Tensor, make: Make) -> None:
        """A hook on a leaf, after its ``.grad`` was accumulated."""
        hook = self._made("accumulated gradient", name, make)
        self._hooks.append(tensor.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]

    def activation(self, tensor: torch.Tensor, hook: Callable[[torch.Tensor], Any]) -> None:
        """A hook on the gradient of a tensor of the graph. It dies with the graph, or in `remove`."""
        handles = self._graph_hooks
        if len(handles) >= self._prune_at:
            alive = [handle for handle in handles if handle.hooks_dict_ref() is not None]
            handles[:] = alive
            self._prune_at = 256 + 2 * len(alive)
        handles.append(tensor.register_hook(hook))  # type: ignore[no-untyped-call]

    def remove(self) -> None:
        """Takes back every hook of this registration, and no other. Any number of times."""
        for hooks in (self._hooks, self._graph_hooks):
            while hooks:
                hooks.pop().remove()
