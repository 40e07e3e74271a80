"""Policies: decide which saved tensor goes to which tier, and which is packed.

A policy is any ``callable(SavedTensor) -> Action | None``. A stash calls it in forward for each saved tensor
that can be moved; ``None`` leaves the choice to the stash's default. If a policy raises, so does the forward
pass, and the tensor is not saved. The functions below return policies, so they can be nested.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

import torch

from ._text import shown
from .codecs import EXACT, Codec
from .errors import UsageError
from .units import parse_bytes

__all__ = ["Action", "CodecChoice", "Policy", "SavedTensor", "by_module", "first", "larger_than"]

MIN_BYTES = 64 << 10
"""Tensors with smaller storages stay in place, unless a budget cannot be kept otherwise."""
_TIERS = ("keep", "host", "disk", "pack", "recompute")


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """The description of a tensor that autograd is about to save; it does not hold the tensor."""

    shape: tuple[int, ...]
    """Its size in each dimension, in elements."""
    dtype: torch.dtype
    """Its element type."""
    device: torch.device
    """The device that has its memory."""
    nbytes: int
    """The bytes of its elements. The storage of a view may be larger; an expanded tensor's may be smaller."""
    is_parameter: bool
    """Whether it is an ``nn.Parameter``, another leaf that requires a gradient, or a view of either."""
    is_leaf: bool
    """Whether it is a leaf of the graph, as a parameter, an input, a mask or an index is."""
    module: str
    """The path of the module whose forward saves it, ``"blocks.3.mlp"``; ``""`` outside any module."""
    index: int
    """How many tensors autograd gave to the stash on this thread before this one."""


@dataclass(frozen=True, slots=True)
class Action:
    """Describe what a stash does with a saved tensor.

    Raises:
        UsageError: ``tier`` is not a tier, ``codec`` is not a codec, or they contradict each other.

    >>> Action("disk")
    Action(tier='disk', codec=None)
    """

    tier: Literal["keep", "host", "disk", "pack", "recompute"]
    """What happens to the tensor.

    ``"keep"``: it stays in memory, and no limit counts it.

    ``"host"``: an accelerator's tensor moves to host memory at once, also while ``keep`` has space. A CPU
    tensor is in host memory and stays.

    ``"disk"``: it moves to disk at once, an accelerator's tensor through host memory.

    ``"pack"``: it is stored in fewer bytes, by ``codec``. The result is in memory, counts as ``keep``, and
    moves down like any other block.

    ``"recompute"``: it is discarded, and computed again in backward by the operations of PyTorch that made it,
    from other saved tensors and parameters. Slow operations (products of matrices, convolutions, attention,
    decompositions) and random operations are not repeated. If an operand was changed since, or the result
    differs in any bit, backward raises ``InplaceError``; for an accelerator's tensors when backward ends.

    A tensor that cannot be packed or recomputed is handled as with ``None``, and ``stats().left`` says why."""

    codec: Codec | None = None
    """The codec that packs the tensor before it moves. ``None``: with ``"pack"`` the exact codecs
    (:data:`backstash.codecs.EXACT`), otherwise no codec. Not allowed with ``"keep"`` or ``"recompute"``."""

    def __post_init__(self) -> None:
        if self.tier not in _TIERS:
            raise UsageError(
                f"Action tier={shown(self.tier)}: allowed are {', '.join(map(repr, _TIERS))}"
            )
        if self.codec is not None and not isinstance(self.codec, Codec):
            raise UsageError(f"Action codec={shown(self.codec)}: allowed is a Codec, or None")
        if self.codec is not None and self.tier == "keep":
            raise UsageError(
                'Action("keep") has no codec: the tensor stays as it is; Action("pack", codec) packs it'
            )

        if self.codec is not None and self.tier == "recompute":
            raise UsageError('Action("recompute") has no codec: nothing is stored')

    @property
    def packs_by(self) -> Codec | None:
        """The codec that packs the tensor, or ``None``."""
        return EXACT if self.codec is None and self.tier == "pack" else self.codec


Policy = Callable[[SavedTensor], "Action | None"]
"""A value for ``Stash(policy=)``: called for each saved tensor; returns ``None`` for the default."""

CodecChoice = Codec | Callable[[SavedTensor], Codec | None]
"""A value for ``Stash(codec=)``: one codec for all, or a function that chooses for each saved tensor."""


def first(*policies: Policy) -> Policy:
    """Return a policy that returns the action of the first of ``policies`` that returns one, else ``None``.

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
    """Return a policy that returns the action of the first glob that matches the module's path, else ``None``.

    Args:
        actions: globs and their actions, in the order in which they are tried. A ``*`` also matches dots, and
            letters match in their own case only.

    >>> policy = by_module({"blocks.*.mlp": Action("disk"), "head*": Action("keep")})
    """
    rules = tuple(actions.items())

    def choose(saved: SavedTensor) -> Action | None:
        return next((action for glob, action in rules if fnmatchcase(saved.module, glob)), None)

    return choose


def larger_than(size: int | str, action: Action) -> Policy:
    """Return a policy that returns ``action`` for tensors of at least ``size``, else ``None``.

    Args:
        size: an int of bytes, or a string such as ``"1MiB"``; compared with ``SavedTensor.nbytes``.
        action: for those tensors.

    Raises:
        SizeError: ``size`` is not a size.

    >>> policy = larger_than("1MiB", Action("disk"))
    """
    nbytes = parse_bytes(size, name="larger_than")

    def choose(saved: SavedTensor) -> Action | None:
        return action if saved.nbytes >= nbytes else None

    return choose
