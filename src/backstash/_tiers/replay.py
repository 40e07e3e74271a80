"""Recomputing: a saved tensor is computed again, by the operations that made it, from what is held anyway.

A :class:`Replay` is the codec of a block whose payload is no block of its own. Its *operands* are: entries of
other blocks, which the operations saved themselves and of which the recomputed block owns copies; and tensors
that the graph holds in place, as parameters and what is too small to move.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .._saved.block import Block
from .._saved.entry import Entry
from .._saved.placement import Recipe, Recomputed
from .._saved.view import ALIGNMENT_BYTES, StridedRegion, extent_bytes
from .._torch.engine import output_metadata
from .._torch.node_saves import raw_of, scalar_of
from ..codecs import Encoded
from .operations import RESULT, RULES, Rule

__all__ = ["MOST_OPERATIONS", "Replay", "replay_of"]

MOST_OPERATIONS = 4
"""How many operations one after another a tensor may be away from what is held: a normalization that a model
writes out in bfloat16 is three, and what multiplies it the fourth."""

_NO_GRAPH = "it was made by no operation that autograd knows"
_NOT_HELD = "the input of its operation is not held by this stash"
_PLAIN = (Tensor, nn.Parameter)


class _Unknown(Exception):
    """Why a tensor cannot be computed again."""


class _Operation:
    """An operation, and where each of its operands comes from: a place among a replay's, another operation,
    or ``None``, for one that it was not given."""

    def __init__(
        self, name: str, rule: Rule, operands: tuple[Any, ...], scalars: Mapping[str, Any]
    ) -> None:
        self.name = name
        self._rule = rule
        self._operands = operands
        self._scalars = scalars
        inner = (each.depth for each in operands if isinstance(each, _Operation))
        self.depth: int = rule.is_computed + max(inner, default=0)

    def run(self, values: Sequence[Tensor], out: Tensor | None = None) -> Tensor:
        """The result from a replay's operands, in ``out`` where that is given."""
        given = [
            each.run(values)
            if isinstance(each, _Operation)
            else None
            if each is None
            else values[each]
            for each in self._operands
        ]
        return self._rule.call(given, self._scalars, out)

    def __repr__(self) -> str:
        scalars = "".join(f", {name}={value!r}" for name, value in self._scalars.items())
        return f"{self.name}({', '.join(map(repr, self._operands))}{scalars})"


class Replay(Recipe):
    """Operations that are called again.

    Args:
        operation: the last one.
        made: what it made, which fills its storage.
        operands: entries, and tensors that the graph holds.
    """

    sources: tuple[Tensor | None, ...] = ()
    """The memory that each operand was saved from, where that is alive: to be compared with once."""

    def __init__(self, operation: _Operation, made: Tensor, operands: tuple[Any, ...]) -> None:
        self._operation = operation
        self._shape, self._stride = made.shape, made.stride()
        self.operands = operands
        self._kinds = [(each.dtype, each.shape) for each in operands]
        self.depth: int = operation.depth + max(map(_depth_of, operands), default=0)

    def encode(self, values: Tensor) -> Encoded | str:
        """See :meth:`Codec.encode`; what is made smaller here is nothing but the block."""
        raise AssertionError("a replay has no payload of its own")

    def decode(self, payload: Any, recipe: Any, out: Tensor) -> None:
        """See :meth:`Codec.decode`; ``payload`` is the value of each operand, or ``None``, where one has no
        memory any more: then zeros, whose fingerprint tells."""
        if payload is None:
            out.zero_()
        else:
            self._operation.run(payload, out.as_strided(self._shape, self._stride))

    def key(self, block: Block) -> tuple[Any, ...]:
        """What decides the bits of the result beside the operands': alike for two replays of one class."""
        return (
            block.cleanup.module,
            block.number_in_module,
            repr(self._operation),
            block.storage_version.version,
            *((each.dtype, each.shape, _stride_of(each), _residue(each)) for each in self.operands),
            (block.dtype, self._shape, self._stride, block.address % ALIGNMENT_BYTES),
            torch.get_num_threads(),
        )

    def reason_against(self, block: Block) -> str:
        """Why ``block``, which is complete and in place, cannot be recomputed; ``""``: it can."""
        if block.origin is not block.storage_version:
            return "only a part of its storage was saved"
        for operand in self.operands:
            if type(operand) is not Entry:
                continue
            if operand.block is block:
                return "its input is in the same storage"
            if operand.block.placement.lost_at is not None or operand.block.storage_version.changed:
                return "its input was changed in place"
        if self.depth > MOST_OPERATIONS:
            return (
                f"it is {self.depth} operations away from what is held, more than {MOST_OPERATIONS}"
            )
        return ""

    def given(self) -> list[Tensor] | None:
        """The values of all operands, where they are in place."""
        found = []
        for at, operand in enumerate(self.operands):
            value = operand
            if type(operand) is Entry:
                block = operand.block
                alias = block.placement.alias
                source = alias if alias is not None or not self.sources else self.sources[at]
                if source is None or source.untyped_storage().data_ptr() != block.address:
                    return None
                value = operand.view_of(source, 0)
            found.append(value)
        return self.values(found)

    def values(self, operands: Sequence[Tensor]) -> list[Tensor] | None:
        """``operands`` without their graphs; ``None`` where one in place was given another shape, or its
        memory taken away, as FSDP does."""
        for each, kind in zip(operands, self._kinds, strict=True):
            if (each.dtype, each.shape) != kind:
                return None
            if extent_bytes(each)[1] > each.untyped_storage().nbytes():
                return None
        return [each.detach() for each in operands]

    def owned(self) -> tuple[Any, ...]:
        """The operands for a recomputed block to own: entries of its own in place of entries."""
        return tuple(_owned(each) if type(each) is Entry else each for each in self.operands)

    def __repr__(self) -> str:
        return f"{self._operation.name.removesuffix('Backward0')} computed again"


def _owned(operand: Entry) -> Entry:
    entry = copy.copy(operand)
    entry.turn = 0
    entry.block.entries += 1
    return entry


def _depth_of(operand: Any) -> int:
    if type(operand) is not Entry:
        return 0
    block = operand.block
    placement, codec = block.placement, block.codec
    if isinstance(placement, Recomputed):
        codec = placement.codec
    return codec.depth if isinstance(codec, Replay) else 0


def _stride_of(operand: Any) -> tuple[int, ...]:
    return tuple(operand.stride if type(operand) is Entry else operand.stride())


def _residue(operand: Any) -> int:
    if type(operand) is Entry:
        return int(operand.block.address + operand.offset_bytes) % ALIGNMENT_BYTES
    return int(operand.data_ptr()) % ALIGNMENT_BYTES


def replay_of(
    tensor: Tensor,
    mark: Any,
    latest: Iterable[tuple[Any, Tensor]],
    modules: Sequence[nn.Module] = (),
    *,
    unsaved: bool = True,
) -> Replay | str:
    """How the storage of ``tensor`` can be computed again, or why it cannot.

    Args:
        tensor: that autograd saves.
        mark: of the stash's blocks; another stash's entry is not relied on.
        latest: references to the newest blocks, and the memory that each was saved from.
        modules: that run now, outermost first.
        unsaved: whether a parameter may be relied on that no operation saved. Plain PyTorch does not mind
            where it is changed before backward.
    """
    base = tensor._base
    made = tensor if base is None else base
    node: Any = made.grad_fn
    if node is None:
        return _NO_GRAPH
    if tensor.device.type != "cpu":
        return "on an accelerator nothing is recomputed yet"
    if node.name() not in RULES:
        return f"there is no rule for {node.name()}"
    if made.output_nr != 0:  # a normalization's statistics
        return f"it is no first result of {node.name()}"
    if made.dtype != tensor.dtype or not _fills(made):
        return "its layout has no rule"
    search = _Search(mark, modules, unsaved)
    try:
        operation = search.operation(node, made.dtype, made.shape, 0)
    except _Unknown as reason:
        return str(reason)
    replay = Replay(operation, made, tuple(search.operands))
    memory = {block(): source for block, source in latest}
    replay.sources = tuple(
        memory.get(each.block) if type(each) is Entry else None for each in search.operands
    )
    return replay


def _fills(made: Tensor) -> bool:
    """Whether every byte of its storage is an element's, once."""
    if made.storage_offset() or made.nbytes != made.untyped_storage().nbytes():
        return False
    return made.is_contiguous() or StridedRegion(made).nbytes == made.nbytes


class _Search:
    """Looks in the graph for what a tensor can be computed from."""

    def __init__(self, mark: Any, modules: Sequence[nn.Module], unsaved: bool) -> None:
        self._mark = mark
        self._unsaved = unsaved
        self._modules = modules
        self.operands: list[Any] = []

    def operation(
        self, node: Any, dtype: torch.dtype, shape: Sequence[int], depth: int
    ) -> _Operation:
        """What ``node`` is of, with its operands.

        Args:
            node: of the graph.
            dtype: of its result.
            shape: likewise.
            depth: how many operations come after it.
        """
        name = node.name()
        rule = RULES.get(name)
        if rule is None:
            raise _Unknown(f"there is no rule for {name}")
        depth += rule.is_computed
        if depth > MOST_OPERATIONS:
            raise _Unknown(_NOT_HELD)
        edges = node.next_functions
        names = rule.operands or ("",) * len(edges)
        operands = [
            self._operand(node, each, edges[at], depth, optional=each in rule.optional)
            for at, each in enumerate(names)
        ]
        if "bias" in names and operands[names.index("bias")] is None:
            has_weight = operands[names.index("weight")] is not None
            if has_weight and raw_of(node, "bias") is None:
                raise _Unknown(_NOT_HELD)  # a frozen one is on no edge
        operands += [
            self._operand(node, each, (None, 0), depth, optional=each in rule.optional)
            for each in rule.others
        ]
        scalars = {each: _signed(scalar_of(node, each)) for each in rule.scalars}
        if None in scalars.values():
            raise _Unknown("this PyTorch does not tell how its operation was called")
        if rule.eps and (eps := self._eps(node, scalars)) is not None:
            scalars["eps"] = eps
        if rule.takes_result:
            scalars |= {"dtype": dtype, "shape": tuple(shape)}
        return _Operation(name, rule, tuple(operands), scalars)

    def _operand(
        self, node: Any, name: str, edge: tuple[Any, int], depth: int, *, optional: bool
    ) -> Any:
        packed = _packed(node, name) if name else None
        if packed is not None:
            return self._held(packed)
        child, number = edge
        if child is None:
            if optional:
                return None
            raise _Unknown(_NOT_HELD)
        leaf = getattr(child, "variable", None)
        if leaf is not None:
            # Not saved, so that a program may change it before backward; a parameter seldom, and a bias not
            # without the weight beside it, which is saved.
            if not isinstance(leaf, nn.Parameter) or not (self._unsaved or name == "bias"):
                raise _Unknown(_NOT_HELD)
            return self._held(leaf)
        packed = _packed(child, RESULT) if number == 0 else None
        if packed is not None and child.name() in RULES:
            return self._held(packed)
        results = output_metadata(child)
        if number != 0 or len(results) == 0:
            raise _Unknown(_NOT_HELD)
        return self.operation(child, results[0].dtype, results[0].shape, depth)

    def _held(self, packed: Any) -> int:
        if type(packed) is tuple and packed and isinstance(packed[0], Tensor):
            packed = packed[0]  # what stays in place, and its version
        if type(packed) is Entry:
            if packed.block.cleanup.mark is not self._mark:
                raise _Unknown(_NOT_HELD)
            if packed.region is not None or packed.conj or packed.neg:
                raise _Unknown("its input is laid out in another way")
            if packed.is_rounded or packed.check is not None:
                raise _Unknown("its input may come back with other bits")
        elif type(packed) not in _PLAIN or not _is_usable(packed):
            raise _Unknown(_NOT_HELD)
        for at, each in enumerate(self.operands):
            if each is packed:
                return at
        self.operands.append(packed)
        return len(self.operands) - 1

    def _eps(self, node: Any, scalars: Mapping[str, Any]) -> float | None:
        """Of the module that ran the normalization, if one did."""
        for path in _modules_of(_packed(node, "result1")):
            try:
                found: Any = self._modules[0].get_submodule(path)
            except (AttributeError, IndexError):
                return None
            is_one = tuple(getattr(found, "normalized_shape", ())) == scalars["normalized_shape"]
            eps = getattr(found, "eps", None)
            return eps if is_one and isinstance(eps, float) else None
        return None


def _is_usable(tensor: Tensor) -> bool:
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
        return False
    return not (tensor.is_conj() or tensor.is_neg() or tensor.is_quantized or tensor.is_nested)


def _modules_of(packed: Any) -> Iterator[str]:
    if type(packed) is Entry:
        yield packed.block.cleanup.module
    elif type(packed) is tuple and len(packed) > 2:
        yield packed[2]


def _packed(node: Any, name: str) -> Any:
    """What ``node`` holds for its saved tensor ``name``; ``None``: nothing, or nothing that can be seen."""
    try:
        return getattr(raw_of(node, name), "data", None)
    except RuntimeError:
        return None


def _signed(scalar: Any) -> Any:
    """Dimensions, which PyTorch shows without a sign."""
    if isinstance(scalar, (tuple, list)):
        return tuple(map(_signed, scalar))
    is_negative = type(scalar) is int and scalar >= 1 << 63
    return scalar - (1 << 64) if is_negative else scalar
