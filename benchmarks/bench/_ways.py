"""The ways to hold what a forward pass saves: a stash, PyTorch's own, the tutorial's recipe."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from backstash import Action, SavedTensor, Stash
from backstash.codecs import EXACT

from ._workloads import Around, call

__all__ = ["WAYS", "Way", "recipe"]

_RECIPE_MIN_ELEMENTS = 1000

Way = tuple[Callable[[], AbstractContextManager[Any]], Around]
"""A function that makes the context to enter for each forward pass, and what to put around each block."""


class _OwnedFile:
    """A file with a random name that is removed when autograd drops its owner."""

    def __init__(self, directory: str) -> None:
        self.path = os.path.join(directory, uuid.uuid4().hex)

    def __del__(self) -> None:
        os.unlink(self.path)


def recipe(directory: str) -> saved_tensors_hooks:
    """Hooks that ``torch.save`` each tensor of 1000 or more elements to a file of its own.

    From the description in PyTorch's tutorial "Hooks for autograd saved tensors".
    """

    def pack(tensor: Tensor) -> Tensor | _OwnedFile:
        if tensor.numel() < _RECIPE_MIN_ELEMENTS:
            return tensor
        file = _OwnedFile(directory)
        torch.save(tensor, file.path)
        return file

    def unpack(held: Tensor | _OwnedFile) -> Tensor:
        if isinstance(held, Tensor):
            return held
        tensor: Tensor = torch.load(held.path, weights_only=True)
        return tensor

    return saved_tensors_hooks(pack, unpack)


def _checkpointed(block: nn.Module, x: Tensor) -> Tensor:
    y: Tensor = checkpoint(block, x, use_reentrant=False)
    return y


def _stash(directory: str, min_bytes: int) -> Way:
    return _under(Stash(disk=directory, min_bytes=min_bytes, name="bench"))


def _under(stash: Stash) -> Way:
    return lambda: stash, call


def _regions(stash: Stash) -> Way:
    known: set[int] = set()

    def around(block: nn.Module, x: Tensor) -> Tensor:
        if id(block) not in known:
            known.add(id(block))
            stash.recompute(block)
        return call(block, x)

    return lambda: stash, around


def _pack(saved: SavedTensor) -> Action:
    return Action("pack")


def _recompute(saved: SavedTensor) -> Action:
    return Action("recompute")


WAYS: dict[str, Callable[[str, int], Way]] = {
    "nothing": lambda directory, min_bytes: (nullcontext, call),
    "save_on_cpu": lambda directory, min_bytes: (save_on_cpu, call),
    "recipe": lambda directory, min_bytes: (lambda: recipe(directory), call),
    "checkpoint": lambda directory, min_bytes: (nullcontext, _checkpointed),
    "stash": _stash,
    "pack": lambda directory, min_bytes: _under(
        Stash(disk=directory, policy=_pack, min_bytes=min_bytes, name="bench")
    ),
    "pack-memory": lambda directory, min_bytes: _under(
        Stash(keep=None, policy=_pack, min_bytes=min_bytes, name="bench")
    ),
    "recompute": lambda directory, min_bytes: _under(
        Stash(disk=directory, policy=_recompute, min_bytes=min_bytes, name="bench")
    ),
    "recompute-memory": lambda directory, min_bytes: _under(
        Stash(policy=_recompute, min_bytes=min_bytes, name="bench")
    ),
    "recompute-pack": lambda directory, min_bytes: _under(
        Stash(disk=directory, policy=_recompute, codec=EXACT, min_bytes=min_bytes, name="bench")
    ),
    "regions": lambda directory, min_bytes: _regions(Stash(min_bytes=min_bytes, name="bench")),
    "regions-disk": lambda directory, min_bytes: _regions(
        Stash(keep="256MiB", disk=directory, min_bytes=min_bytes, name="bench")
    ),
}
"""From name to a function of the disk's directory and the stash's ``min_bytes``."""
