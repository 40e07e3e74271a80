"""Recomputing: a saved tensor is computed again, by the operations that made it, from what is held anyway.

A :class:`Replay` calls them again. Its *operands* are entries of other blocks, which the operations saved
themselves and of which the recomputed block owns copies; and tensors that the graph holds in place, as
parameters and what is too small to move.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .._saved.block import Block
from .._saved.entry import Entry
from .._saved.placement import Derivation, NotAtHandError
from .._saved.view import ALIGNMENT_BYTES, StridedRegion, extent_bytes
from .._torch.made_by import (
    MOST_OPERATIONS,
    NOT_HELD,
    Operation,
    UnknownOperandError,
    in_place,
    made_by,
)

__all__ = ["Recomputation", "Replay", "replay_of"]

_MOST_COPIED_BYTES = 256 * 2**10  # for one replay ahead of need
_threads_lock = threading.RLock()  # a signal's handler may go backward in the middle of a replay
_is_changed = False


class Replay:
    """Operations that are called again.

    Args:
        operation: the last one.
        made: what it made, which fills its storage.
        operands: entries, and tensors that the graph holds.
    """

    sources: tuple[Tensor | None, ...] = ()
    """The memory that each operand was saved from, where that is alive: to be compared with once."""

    def __init__(self, operation: Operation, made: Tensor, operands: tuple[Any, ...]) -> None:
        self._operation = operation
        self._shape, self._stride = made.shape, made.stride()
        self.operands = operands
        self.threads = torch.get_num_threads()
        self._kinds = [(each.dtype, each.shape) for each in operands]
        self.depth: int = operation.depth + max(map(_depth_of, operands), default=0)

    def run(self, values: Sequence[Tensor], out: Tensor) -> None:
        """Compute it again, from the value of each operand, to ``out``."""
        with _threads(self.threads):
            self._operation.run(values, out.as_strided(self._shape, self._stride))

    def key(self, block: Block) -> tuple[Any, ...]:
        """What decides the bits of the result beside the operands': alike for two replays of one class."""
        return (
            block.cleanup.module,
            block.number_in_module,
            repr(self._operation),
            block.storage_version.version,
            *((each.dtype, each.shape, _stride_of(each), _residue(each)) for each in self.operands),
            (block.dtype, self._shape, self._stride, block.address % ALIGNMENT_BYTES),
            self.threads,
        )

    def reason_against(self, block: Block) -> str:
        """Why ``block``, which is complete and in place, cannot be recomputed; ``""``: it can."""
        source = block.storage_version
        if block.origin is not source or source.is_parted:
            return "only a part of its storage was saved"
        for operand in self.operands:
            if type(operand) is not Entry:
                continue
            if operand.block is block:
                return "its input is in the same storage"
            if operand.block.number != block.number:
                return "its input is on another device"
            if operand.block.stream != block.stream:
                return "its input was made on another stream"
            if operand.block.placement.lost_at is not None or operand.source.changed:
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
                value = operand.view_in_place(source)
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


class Recomputation(Derivation):
    """The bytes are what ``replay`` computes again.

    Args:
        replay: that was bit-equal once.
        dtype: of what it makes.
        operands: its own entries, and tensors in place.
        fingerprint: of the bytes that were let go.
    """

    __slots__ = ("_operands", "_replay", "dtype", "fingerprint", "threads")
    where = "recomputed"

    def __init__(
        self, replay: Replay, dtype: torch.dtype, operands: tuple[Any, ...], fingerprint: Any
    ) -> None:
        self._replay = replay
        self._operands = operands
        self.dtype = dtype
        self.fingerprint = fingerprint
        self.threads = replay.threads

    @property
    def entries(self) -> tuple[Entry, ...]:
        """See :attr:`Derivation.entries`."""
        return tuple(each for each in self._operands if type(each) is Entry)

    def given(self, unpack: Callable[[Any], Tensor]) -> list[Tensor] | None:
        """See :meth:`Derivation.given`; ``None``: an operand in place has no memory any more."""
        return self._replay.values(
            [unpack(each) if type(each) is Entry else each for each in self._operands]
        )

    def given_ahead(self, unpack: Callable[[Any], Tensor]) -> list[Tensor]:
        """See :meth:`Derivation.given_ahead`. Parameters and parts of storages that the program holds are
        copied: it may take their memory away (``resize_``), as FSDP does."""
        given = self.given(unpack)
        if given is None:
            raise NotAtHandError
        copied = [at for at, each in enumerate(self._operands) if _may_go(each)]
        if sum(given[at].nbytes for at in copied) > _MOST_COPIED_BYTES:
            raise NotAtHandError
        for at in copied:
            given[at] = given[at].clone()
        return given

    def make(self, given: Any, out: Tensor) -> None:
        """See :meth:`Derivation.make`; zeros, whose fingerprint tells, where nothing is given."""
        if given is None:
            out.zero_()
        else:
            self._replay.run(given, out)

    def __repr__(self) -> str:
        return repr(self._replay)


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """As many threads for PyTorch's operations as forward had: how elements are divided among them decides
    which of these vector code computes. It is a setting of the process; one replay at a time changes it."""
    global _is_changed
    if torch.get_num_threads() == count and not _is_changed:
        yield
        return
    with _threads_lock:
        before = torch.get_num_threads(), _is_changed
        try:
            _is_changed = True
            torch.set_num_threads(count)
            yield
        finally:
            torch.set_num_threads(before[0])
            _is_changed = before[1]


def _may_go(operand: Any) -> bool:
    """Whether it is in memory that a program may take away while it goes on."""
    if type(operand) is Entry:
        return False
    fills = operand.nbytes == operand.untyped_storage().nbytes()
    return isinstance(operand, nn.Parameter) or not fills


def _owned(operand: Entry) -> Entry:
    entry = copy.copy(operand)
    entry.turn = 0
    entry.block.entries += 1
    return entry


def _depth_of(operand: Any) -> int:
    if type(operand) is not Entry:
        return 0
    return int(operand.block.depth)


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
) -> tuple[Replay | None, str]:
    """How the storage of ``tensor`` can be computed again; or ``None``, and why it cannot.

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

    def take(packed: Any) -> Any:
        """An entry of this stash, or a tensor in place."""
        packed = _inside(packed)
        if type(packed) is tuple and packed:
            packed = packed[0]  # what stays in place, and its version
        if type(packed) is not Entry:
            return in_place(packed)
        if packed.block.cleanup.mark is not mark:
            raise UnknownOperandError(NOT_HELD)
        if packed.region is not None or packed.conj or packed.neg:
            raise UnknownOperandError("its input is laid out in another way")
        if packed.is_rounded or packed.check is not None:
            raise UnknownOperandError("its input may come back with other bits")
        return packed

    try:
        operation, operands = made_by(made, take, _module_of, modules, unsaved=unsaved)
    except UnknownOperandError as reason:
        return None, str(reason)
    if made.dtype != tensor.dtype or not _fills(made):
        return None, "its layout has no rule"
    replay = Replay(operation, made, operands)
    memory = {block(): source for block, source in latest}
    replay.sources = tuple(
        memory.get(each.block) if type(each) is Entry else None for each in operands
    )
    return replay, ""


def _fills(made: Tensor) -> bool:
    """Whether every byte of its storage is an element's, once."""
    if made.storage_offset() or made.nbytes != made.untyped_storage().nbytes():
        return False
    return made.is_contiguous() or StridedRegion(made).nbytes == made.nbytes


def _inside(packed: Any) -> Any:
    """What a report that is being made has put around what autograd holds."""
    while getattr(type(packed), "adds_nothing", False):
        packed = packed.packed_inside
    return packed


def _module_of(packed: Any) -> str:
    packed = _inside(packed)
    if type(packed) is Entry:
        return packed.block.cleanup.module
    return packed[2] if type(packed) is tuple and len(packed) > 2 else ""
