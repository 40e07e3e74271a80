"""Recomputing: a saved tensor is computed again, by the operation that made it, from an input that is held.

A :class:`Replay` is the codec of a block whose payload is no block of its own: it is the block of the
operation's input, which the operation saved itself. The recomputed block owns an entry of it. Or there is none,
where a parameter is cast: the graph holds that.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
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
    """One operation that is called again."""

    source: Tensor | None = None
    """The memory its input was saved from, where that is alive: to be compared with once."""

    def encode(self, values: Tensor) -> Encoded | str:
        """See :meth:`Codec.encode`; what is made smaller here is nothing but the block."""
        raise AssertionError("a replay has no payload of its own")

    @abstractmethod
    def key(self, block: Block) -> tuple[Any, ...]:
        """What decides the bits of the result beside the input's: alike for two replays of one class."""

    @abstractmethod
    def reason_against(self, block: Block) -> str:
        """Why ``block``, which is complete and in place, cannot be recomputed; ``""``: it can."""

    @property
    @abstractmethod
    def input(self) -> Tensor | None:
        """What the operation is to be given, where that is in place."""

    @abstractmethod
    def owned(self) -> Entry | None:
        """An entry of the input for a recomputed block to own."""


class _Operation(Replay):
    """An operation of one input, which it saved itself.

    Args:
        name: of its node.
        scalars: by the names of its arguments.
        operand: the entry of its input.
    """

    def __init__(self, name: str, scalars: dict[str, Any], operand: Entry) -> None:
        self._name = name
        self._scalars = scalars
        self._operand = operand

    def decode(self, payload: Tensor | None, recipe: Any, out: Tensor) -> None:
        """See :meth:`Codec.decode`; ``payload`` is the operation's input."""
        assert payload is not None
        # An overload with "out" is known to no autocast, and takes no memory of its own.
        _RULES[self._name].call(payload, **self._scalars, out=out.view(payload.shape))

    def key(self, block: Block) -> tuple[Any, ...]:
        """See :meth:`Replay.key`."""
        operand = self._operand
        scalars = tuple(self._scalars.items())
        places = (operand.block.address + operand.offset_bytes, block.address)
        return self._name, scalars, operand.dtype, operand.shape, *_about(block, places)

    def reason_against(self, block: Block) -> str:
        """See :meth:`Replay.reason_against`."""
        operand = self._operand
        source = operand.block.placement
        if block.origin is not block.storage_version:
            return _PART
        if operand.block is block or operand.nbytes != block.nbytes or operand.dtype != block.dtype:
            return "its input is laid out in another way"
        if operand.block.storage_version.changed or source.lost_at is not None:
            return "its input was changed in place"
        if isinstance(source, Recomputed) or isinstance(operand.block.codec, Replay):
            return "its input is recomputed itself"
        return ""

    @property
    def input(self) -> Tensor | None:
        """See :attr:`Replay.input`."""
        block = self._operand.block
        alias = block.placement.alias
        source = alias if alias is not None else self.source
        if source is None or source.untyped_storage().data_ptr() != block.address:
            return None
        return self._operand.view_of(source, 0)

    def owned(self) -> Entry:
        """See :meth:`Replay.owned`."""
        entry = copy.copy(self._operand)
        entry.turn = 0
        entry.block.entries += 1
        return entry

    def __repr__(self) -> str:
        return f"{self._name.removesuffix('Backward0')} computed again"


class _ParameterCast(Replay):
    """A parameter in another dtype, as autocast makes it. The graph holds the parameter anyway.

    Args:
        parameter: contiguous, on the CPU.
    """

    def __init__(self, parameter: Tensor) -> None:
        self._parameter = parameter

    def decode(self, payload: Tensor | None, recipe: Any, out: Tensor) -> None:
        """See :meth:`Codec.decode`. Where the parameter has no memory any more, or another shape, zeros,
        whose fingerprint tells."""
        given = self.input
        if given is not None and given.numel() == out.numel():
            out.view(given.shape).copy_(given)
        else:
            out.zero_()

    def key(self, block: Block) -> tuple[Any, ...]:
        """See :meth:`Replay.key`."""
        parameter = self._parameter
        places = (parameter.data_ptr(), block.address)
        return _CAST, parameter.dtype, block.dtype, parameter.shape, *_about(block, places)

    def reason_against(self, block: Block) -> str:
        """See :meth:`Replay.reason_against`."""
        if block.origin is not block.storage_version:
            return _PART
        if self.input is None or self._parameter.numel() * block.dtype.itemsize != block.nbytes:
            return "its input is laid out in another way"
        return ""

    @property
    def input(self) -> Tensor | None:
        """See :attr:`Replay.input`; ``None`` where its memory was taken away, as FSDP does."""
        given = self._parameter.detach()
        is_plain = given.device.type == "cpu" and given.is_contiguous()
        needed = (given.storage_offset() + given.numel()) * given.element_size()
        return given if is_plain and given.untyped_storage().nbytes() >= needed else None

    def owned(self) -> None:
        """See :meth:`Replay.owned`."""

    def __repr__(self) -> str:
        return "a parameter's cast made again"


_CAST = "ToCopyBackward0"
_PART = "only a part of its storage was saved"


def _about(block: Block, places: tuple[int, int]) -> tuple[Any, ...]:
    residues = tuple(place % ALIGNMENT_BYTES for place in places)
    return block.cleanup.module, residues, torch.get_num_threads()


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
    rule, parameter = _RULES.get(node.name()), _parameter_of(node)
    if rule is None and parameter is None:
        return f"there is no rule for {node.name()}"
    if made._version != 0:
        return "it was changed in place"
    if made.dtype != tensor.dtype or not made.is_contiguous() or made.storage_offset():
        return "its layout has no rule"
    if rule is None:
        return _ParameterCast(parameter)
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
    replay = _Operation(node.name(), scalars, operand)
    for block, source in latest:
        if block() is operand.block:
            replay.source = source
    return replay


def _parameter_of(node: Any) -> Any:
    """The leaf of which ``node`` is a cast; ``None`` where it is something else."""
    if node.name() != _CAST:
        return None
    leaf = getattr(node.next_functions[0][0], "variable", None)
    return leaf if type(leaf) in (Tensor, torch.nn.Parameter) else None
