"""Recomputing: a saved tensor is computed again, by the operation that made it, from an input that is held.

A :class:`Replay` is the codec of a block whose payload is no block of its own: it is the block of the
operation's input, which the operation saved itself. The recomputed block owns an entry of it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._saved.block import Block
from .._saved.entry import Entry
from .._saved.placement import Recomputed
from .._saved.view import ALIGNMENT_BYTES
from .._torch.node_saves import raw_of, scalar_of
from ..codecs import Codec, Encoded

__all__ = ["Replay", "replay_of"]


class _Rule(NamedTuple):
    """How an operation of one input is called again."""

    call: Any
    """With the input, the scalars, and ``out``."""
    scalars: tuple[str, ...] = ()
    """That the node keeps, by the names of the arguments."""


# Each of these operations saves its input itself, and computes each element of its result from one of it.
_RULES = {
    "GeluBackward0": _Rule(torch.ops.aten.gelu.out, ("approximate",)),
    "SiluBackward0": _Rule(torch.ops.aten.silu.out),
    "MishBackward0": _Rule(torch.ops.aten.mish.out),
    "HardswishBackward0": _Rule(torch.ops.aten.hardswish.out),
    "LeakyReluBackward0": _Rule(torch.ops.aten.leaky_relu.out, ("negative_slope",)),
}


class Replay(Codec):
    """One operation that is called again.

    Args:
        name: of its node.
        scalars: by the names of its arguments.
        operand: the entry of its input.
        source: the memory its input was saved from, where that is alive: to be compared with once.
    """

    def __init__(
        self, name: str, scalars: dict[str, Any], operand: Entry, source: Tensor | None
    ) -> None:
        self._name = name
        self._scalars = scalars
        self.operand: Entry = operand
        self.source: Tensor | None = source

    def encode(self, values: Tensor) -> Encoded | str:
        """See :meth:`Codec.encode`; what is made smaller here is nothing but the block."""
        raise AssertionError("a replay has no payload of its own")

    def decode(self, payload: Tensor | None, recipe: Any, out: Tensor) -> None:
        """See :meth:`Codec.decode`; ``payload`` is the operation's input."""
        assert payload is not None
        # An overload with "out" is known to no autocast, and takes no memory of its own.
        _RULES[self._name].call(payload, **self._scalars, out=out.view(payload.shape))

    def key(self, block: Block) -> tuple[Any, ...]:
        """What decides the bits of the result beside the input's: alike for two replays of one class."""
        operand = self.operand
        scalars = tuple(self._scalars.items())
        places = (operand.block.address + operand.offset_bytes, block.address)
        residues = tuple(place % ALIGNMENT_BYTES for place in places)
        threads = torch.get_num_threads()
        module = block.cleanup.module
        return module, self._name, scalars, operand.dtype, operand.shape, residues, threads

    def reason_against(self, block: Block) -> str:
        """Why ``block``, which is complete and in place, cannot be recomputed; ``""``: it can."""
        operand = self.operand
        source = operand.block.placement
        if block.origin is not block.storage_version:
            return "only a part of its storage was saved"
        if operand.block is block or operand.nbytes != block.nbytes or operand.dtype != block.dtype:
            return "its input is laid out in another way"
        if operand.block.storage_version.changed or source.lost_at is not None:
            return "its input was changed in place"
        if isinstance(source, Recomputed) or isinstance(operand.block.codec, Replay):
            return "its input is recomputed itself"
        return ""

    def owned(self) -> Entry:
        """An entry of the input for a recomputed block to own."""
        entry = copy.copy(self.operand)
        entry.turn = 0
        entry.block.entries += 1
        return entry

    def __repr__(self) -> str:
        return f"{self._name.removesuffix('Backward0')} computed again"


def replay_of(tensor: Tensor, mark: Any, latest: Iterable[tuple[Any, Tensor]]) -> Replay | str:
    """How the storage of ``tensor`` can be computed again, or why it cannot.

    Args:
        tensor: that autograd saves.
        mark: of the stash's blocks; another stash's entry is not relied on.
        latest: references to the newest blocks, and the memory that each was saved from.
    """
    base = tensor._base
    made = tensor if base is None else base
    node: Any = made.grad_fn
    if node is None:
        return "it was made by no operation that autograd knows"
    if tensor.device.type != "cpu":
        return "on an accelerator nothing is recomputed yet"
    rule = _RULES.get(node.name())
    if rule is None:
        return f"there is no rule for {node.name()}"
    if made._version != 0:
        return "it was changed in place"
    if made.dtype != tensor.dtype or not made.is_contiguous() or made.storage_offset():
        return "its layout has no rule"
    operand = getattr(raw_of(node, "self"), "data", None)
    if type(operand) is not Entry or operand.block.cleanup.mark is not mark:
        return "the input of its operation is not held by this stash"
    is_plain = operand.region is None and not operand.conj and not operand.neg
    if not is_plain or operand.shape != made.shape or operand.stride != made.stride():
        return "its input is laid out in another way"
    if operand.is_rounded or operand.check is not None:
        return "its input may come back with other bits"
    scalars = {name: scalar_of(node, name) for name in rule.scalars}
    if None in scalars.values():
        return "this PyTorch does not tell how its operation was called"
    sources = [source for block, source in latest if block() is operand.block]
    return Replay(node.name(), scalars, operand, sources[0] if sources else None)
