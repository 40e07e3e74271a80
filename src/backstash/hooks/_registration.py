"""Hooks that are registered together and removed together.

Each hook function counts its calls in a :class:`HookRecord`, which it has as an attribute. With it ``hooks_on``
recognizes the hooks of this package, and a handle knows which of its hooks never fired.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from .._text import level_of_program
from .._torch.hook_dicts import plain_function
from ._paths import Site

__all__ = ["HookRecord", "Registration", "record_of"]

_ATTRIBUTE = "__backstash_record__"


@dataclass(slots=True)
class HookRecord:
    """A hook of this package, and how often it fired."""

    kind: str
    path: str
    registration: Registration
    fired: int = 0


def record_of(function: object) -> HookRecord | None:
    """Return the record of a hook function of this package; ``None`` for other functions."""
    return getattr(function, _ATTRIBUTE, None)


class Registration:
    """The hooks of one handle."""

    __slots__ = (
        "_graph_hooks",
        "_prune_at",
        "_undo",
        "owner",
        "records",
        "registered_at",
        "since",
    )

    def __init__(self, owner: str) -> None:
        self.owner = owner
        frame = sys._getframe(level_of_program() - 1)
        self.registered_at = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        self.since = time.time()
        self.records: list[HookRecord] = []
        self._undo: list[Callable[[], object]] = []
        self._graph_hooks: list[RemovableHandle] = []
        self._prune_at = 256

    @contextmanager
    def all_or_none(self) -> Iterator[None]:
        """The block in which hooks are registered; any exception that leaves it removes all of them."""
        try:
            yield
        except BaseException:
            self.remove()
            raise

    def record(self, kind: str, path: str) -> HookRecord:
        """Add a record without a hook. Its owner counts."""
        made = HookRecord(kind, path, self)
        self.records.append(made)
        return made

    def counted(self, kind: str, path: str, hook: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``hook`` as a function that counts its calls in a new record."""
        record = self.record(kind, path)

        @wraps(plain_function(hook))
        def counting(*args: Any) -> Any:
            record.fired += 1
            return hook(*args)

        setattr(counting, _ATTRIBUTE, record)
        return counting

    def forward(self, site: Site, hook: Callable[..., Any], *, always_call: bool = False) -> None:
        """Register a forward hook on a module; it gets the keyword inputs too."""
        hook = self.counted("forward", site.path, hook)
        register = site.module.register_forward_hook
        self.on_remove(register(hook, with_kwargs=True, always_call=always_call).remove)

    def forward_pre(self, site: Site, hook: Callable[..., Any]) -> None:
        """Register a forward pre-hook on a module; it gets the keyword inputs too."""
        hook = self.counted("forward pre", site.path, hook)
        self.on_remove(site.module.register_forward_pre_hook(hook, with_kwargs=True).remove)

    def gradient(self, name: str, tensor: torch.Tensor, hook: Callable[..., Any]) -> None:
        """Register a hook on a tensor's gradient, before it is accumulated."""
        hook = self.counted("gradient", name, hook)
        self.on_remove(tensor.register_hook(hook).remove)  # type: ignore[no-untyped-call]

    def accumulated(self, name: str, tensor: torch.Tensor, hook: Callable[..., Any]) -> None:
        """Register a hook on a leaf, after its ``.grad`` was accumulated."""
        hook = self.counted("accumulated gradient", name, hook)
        self.on_remove(tensor.register_post_accumulate_grad_hook(hook).remove)  # type: ignore[no-untyped-call]

    def activation(self, tensor: torch.Tensor, hook: Callable[[torch.Tensor], Any]) -> None:
        """Register a hook on the gradient of a graph's tensor; it goes with the graph or in :meth:`remove`."""
        handles = self._graph_hooks
        if len(handles) >= self._prune_at:
            alive = [handle for handle in handles if handle.hooks_dict_ref() is not None]
            handles[:] = alive
            self._prune_at = 256 + 2 * len(alive)
        handles.append(tensor.register_hook(hook))  # type: ignore[no-untyped-call]

    def on_remove(self, undo: Callable[[], object]) -> None:
        """Call ``undo()`` in :meth:`remove`; what was added last is called first."""
        self._undo.append(undo)

    def remove(self) -> None:
        """Remove every hook of this registration and no other; calling it again does nothing."""
        while self._graph_hooks:
            self._graph_hooks.pop().remove()
        while self._undo:
            self._undo.pop()()
