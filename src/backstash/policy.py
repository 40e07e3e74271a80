"""What goes where: a policy looks at a saved tensor's description and names an action.

A policy is any ``callable(SavedTensor) -> Action | None``; ``None`` leaves the choice to the default. The
combinators below are policies themselves, so they nest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

import torch

from .errors import UsageError
from .units import parse_bytes

__all__ = ["Action", "Policy", "SavedTensor", "by_module", "first", "larger_than"]

_TIERS = ("keep", "host", "disk")


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """A tensor that autograd is about to save, described."""

    shape: tuple[int, ...]
    """Its sizes."""
    dtype: torch.dtype
    """Its element type."""
    device: torch.device
    """Where it is."""
    nbytes: int
    """Its elements' bytes; a view may need more or less of its storage."""
    is_parameter: bool
    """Whether it is an ``nn.Parameter``, another leaf that requires a gradient, or a view of one."""
    is_leaf: bool
    """Whether it is a leaf of the graph: a parameter, an input, a mask, an index."""
    module: str
    """The path of the module whose forward saved it; ``""`` outside any module."""
    index: int
    """How many tensors this stash was given before it on this thread."""


@dataclass(frozen=True, slots=True)
class Action:
    """What to do with a saved tensor.

    >>> Action("disk")
    Action(tier='disk')
    """

    tier: Literal["keep", "host", "disk"]
    """``"keep"``: leave it where it is, outside the budgets. ``"host"``: an
    accelerator's tensor moves to host memory at once; for a CPU tensor the same as ``"keep"``, since it is
    there already. ``"disk"``: move it down at once, all the way."""

    def __post_init__(self) -> None:
        if self.tier not in _TIERS:
            raise UsageError(
                f"Action tier={self.tier!r}: allowed are {', '.join(map(repr, _TIERS))}"
            )


Policy = Callable[[SavedTensor], "Action | None"]


def first(*policies: Policy) -> Policy:
    """The action of the first policy that names one.

    >>> policy = first(by_module({"head": Action("keep")}), larger_than("1MiB", Action("disk")))
    """

    def choose(saved: SavedTensor) -> Action | None:
        for policy in policies:
            action = policy(saved)
            if action is not None:
                return action
        return None

    return choose


def by_module(actions: Mapping[str, Action]) -> Policy:
    """The action of the first glob that matches the module's path, as ``{"blocks.*.mlp": Action("disk")}``."""
    rules = tuple(actions.items())

    def choose(saved: SavedTensor) -> Action | None:
        return next((action for glob, action in rules if fnmatchcase(saved.module, glob)), None)

    return choose


def larger_than(size: int | str, action: Action) -> Policy:
    """``action`` for tensors of at least ``size``, and no choice for others."""
    nbytes = parse_bytes(size, name="larger_than")

    def choose(saved: SavedTensor) -> Action | None:
        return action if saved.nbytes >= nbytes else None

    return choose
