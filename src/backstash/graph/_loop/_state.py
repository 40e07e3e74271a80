"""A loop's state: its leaves, their fingerprint, and snapshots of them in a stash."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..._device.fingerprint import fingerprint as storage_fingerprint
from ..._torch.tensors import is_wrapper_subclass
from ..._torch.trees import tree_flatten, tree_unflatten
from ...errors import UsageError
from ...stash import Stash
from ._surroundings import RandomState

__all__ = ["StepSnapshot", "StepState", "fingerprint", "flatten"]

_PLAIN = (
    int, float, complex, bool, str, bytes, type(None), enum.Enum, torch.dtype, torch.device, torch.Size,
)  # fmt: skip


class StepState:
    """One state as a flat sequence of leaves and their tree structure."""

    __slots__ = ("leaves", "structure")

    def __init__(self, leaves: Sequence[Any], structure: Any) -> None:
        self.leaves = tuple(leaves)
        self.structure = structure

    @property
    def tensors(self) -> list[Tensor]:
        """Its tensors, in order. A tensor that occurs twice is listed twice."""
        return [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]

    @property
    def nbytes(self) -> int:
        """The bytes of its tensors, each counted once."""
        return sum(each.nbytes for each in {id(each): each for each in self.tensors}.values())

    def whole(self) -> Any:
        """Return the original object."""
        return tree_unflatten(list(self.leaves), self.structure)

    def replaced(self, leaves: Mapping[int, Any]) -> StepState:
        """Return the state with some leaves replaced, given by the ``id`` of the old leaf."""
        return StepState([leaves.get(id(leaf), leaf) for leaf in self.leaves], self.structure)


def flatten(value: Any, name: str) -> StepState:
    """Return ``value`` as a state. Raises ``UsageError`` for a leaf that might contain tensors."""
    leaves, structure = tree_flatten(value)
    for leaf in leaves:
        if not isinstance(leaf, (Tensor, *_PLAIN)):
            raise UsageError(
                f"{name} holds a {type(leaf).__name__}: allowed are tensors, numbers, strings and None in "
                "tuples, lists, dictionaries and what else is registered with torch.utils._pytree"
            )
        if isinstance(leaf, Tensor) and leaf.is_inference():
            raise UsageError(f"{name} holds a tensor made in inference mode: make it outside")
        if is_wrapper_subclass(leaf):
            raise UsageError(
                f"{name} holds a {type(leaf).__name__}, a tensor whose data are other tensors: give these, and "
                "make it from them inside of the step"
            )
    return StepState(leaves, structure)


class StepSnapshot:
    """The state before a step, held as blocks of a stash, with the state of the random number generators."""

    __slots__ = ("_random", "_stash", "_state")

    def __init__(self, stash: Stash, state: StepState, random: RandomState) -> None:
        self._stash = stash
        self._random = random
        distinct = {id(tensor): tensor for tensor in state.tensors}
        self._state = state.replaced(
            {key: _PackedLeaf(stash, tensor) for key, tensor in distinct.items()}
        )

    def load(self) -> tuple[StepState, RandomState]:
        """Return the state, bit for bit and without a graph, and the state of the random number generators.

        A tensor that was a leaf is a leaf again. Raises the errors of :meth:`Stash.unpack`.
        """
        distinct = {id(leaf): leaf for leaf in self._state.leaves if isinstance(leaf, _PackedLeaf)}
        loaded = {key: leaf.load(self._stash) for key, leaf in distinct.items()}
        return self._state.replaced(loaded), self._random


class _PackedLeaf:
    """A tensor of a snapshot."""

    __slots__ = ("_is_leaf", "_packed", "_requires_grad")

    def __init__(self, stash: Stash, tensor: Tensor) -> None:
        self._packed = stash.pack(tensor.detach())
        self._requires_grad, self._is_leaf = tensor.requires_grad, tensor.is_leaf

    def load(self, stash: Stash) -> Tensor:
        leaf = stash.unpack(self._packed).detach().requires_grad_(self._requires_grad)
        return leaf if self._is_leaf else leaf.view_as(leaf)


def fingerprint(values: Sequence[Any]) -> int:
    """Return a number that differs if a bit of ``values`` differs, except with a chance of 1 in 2**64."""
    return hash(tuple(map(_hashable, values)))


def _hashable(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return repr(value)
    found = value.detach()
    if found.layout is torch.sparse_coo:
        parts = [found.coalesce().indices(), found.coalesce().values()]
    elif found.layout is not torch.strided:
        parts = [found.to_dense()]
    else:
        parts = [found]
    return value.dtype, value.shape, value.requires_grad, *map(_bytes_fingerprint, parts)


def _bytes_fingerprint(tensor: Tensor) -> object:
    plain = tensor.resolve_conj().resolve_neg().contiguous().cpu()
    first = int(plain.storage_offset()) * plain.element_size()
    return storage_fingerprint(plain.untyped_storage(), first, plain.nbytes)
