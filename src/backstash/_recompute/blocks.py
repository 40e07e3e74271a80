"""Recompute single blocks: replay the operations that lead to a block from values that are held anyway.

A :class:`Replay` is a part of a tape. Its *operands* are entries of other blocks, of which the recomputed block
owns copies; tensors that autograd holds unpacked, such as parameters; and copies of small tensors.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .._saved.block import Block
from .._saved.entry import Entry
from .._saved.placement import Derivation, NotAtHandError
from .._saved.view import ALIGNMENT_BYTES, extent_bytes
from .._torch.dispatch import without_dispatch, without_function_modes
from .._torch.schemas import argument_of
from .._torch.storages import storage_identity
from .operations import Made, Op, Outside, Place, State, place_of
from .replay import Given, Values, run, view_of
from .tape import UNSEEN, Tape

__all__ = ["MOST_OPERATIONS", "NOT_HELD", "InPlace", "Replay", "Slice", "slice_of"]

MOST_OPERATIONS = 16
"""The longest chain of operations from the blocks saved before it to a recomputed block."""
MOST_BLOCKS = 4
"""The longest chain of recomputed blocks: backward may need all of them at once."""
_TOO_MANY = "it would be number {} in a chain of recomputed tensors, of at most {}"
NOT_HELD = "the tensors that it is computed from are not saved"
_MOST_COPIED_BYTES = 256 * 2**10  # for one replay ahead of need


class InPlace:
    """An operand in the program's own memory, which the program may free and restore, as FSDP does.

    Args:
        owner: the tensor with that memory: a parameter, or an alias of a tensor that autograd holds unpacked.
        place: the operand's place in the memory that ``owner`` has when the operand is read.
    """

    __slots__ = ("_end", "_owner", "_place", "dtype", "shape")

    def __init__(self, owner: Tensor, place: Place) -> None:
        self._owner = owner
        self._place = place
        self.dtype, self.shape = place[0], torch.Size(place[1])
        meta = torch.empty_strided(place[1], place[2], dtype=self.dtype, device="meta")
        self._end = extent_bytes(meta)[1] + place[3] * self.dtype.itemsize

    def value(self) -> Tensor | None:
        """Return the operand, or ``None`` if its memory is freed."""
        storage = self._owner.untyped_storage()
        if self._end > storage.nbytes():
            return None
        return view_of(storage, self._owner.device, self._place)

    def data_ptr(self) -> int:
        """Return the address of the first element."""
        begin: int = self._owner.untyped_storage().data_ptr()
        offset: int = self._place[3]
        skipped = offset * int(self.dtype.itemsize)
        return begin + skipped

    def stride(self) -> tuple[int, ...]:
        """Return the operand's strides."""
        return tuple(self._place[2])


class _NotHeldError(Exception):
    """An operand is not held."""


class Slice:
    """The operations that compute one tensor, copied so that they need nothing of their tape.

    Args:
        state: the state that they compute.
        place: the tensor's place in it.
        give: return the held operand at a place in a state, or the one for an :class:`Outside`; ``None`` if it
            has to be computed, too.
    """

    def __init__(
        self,
        state: State,
        place: Place,
        give: Callable[[State | None, Place, Outside | None], object | None],
    ) -> None:
        self.operands: list[Any] = []
        self._number, self._place = state.number, place
        self._give = give
        self._seeds: dict[
            int, int
        ] = {}  # state number to the index of the operand that an operation writes
        self._ops: list[Op] = []
        todo, seen = [state.maker], set()
        while todo:
            op = todo.pop()
            if op is None:
                raise _NotHeldError
            if op not in seen:
                seen.add(op)
                new, before = self._copy_of(op)
                self._ops.append(new)
                todo += before
        self._ops.sort(key=lambda op: op.index)
        self.name = str(state.maker.func) if state.maker is not None else ""
        del self._give

    def _copy_of(self, op: Op) -> tuple[Op, list[Op | None]]:
        """Return ``op`` with held values replaced by operands, and the operations that it needs."""
        new, before = Op(op.func, op.index), list[Op | None]()
        new.is_grad_enabled, new.settings, new.made = op.is_grad_enabled, op.settings, op.made
        places = (each.argument for each in op.made)
        written = [argument_of(op.args, op.kwargs, each) for each in places if each is not None]
        new.args = [self._operand(each, written, new, before) for each in op.args]
        for name, each in op.kwargs.items():
            new.kwargs[name] = self._operand(each, written, new, before)
        return new, before

    def _operand(self, value: Any, written: list[Any], new: Op, before: list[Op | None]) -> Any:
        kind = type(value)
        if kind is list or kind is tuple:
            return kind([self._operand(each, written, new, before) for each in value])
        if kind is Outside:
            given = self._give(value.state, value.kind[0], value)
            if given is None:
                raise _NotHeldError
            return Given(self._index(given))
        if kind is not Made:
            return value
        is_written = any(each is value for each in written)
        if value.number not in self._seeds or not is_written:
            given = self._give(value.state, _FLAT if is_written else value.place, None)
            if given is not None and not is_written:
                return Given(self._index(given))
            if given is not None:
                self._seeds[value.number] = self._index(given)
            else:
                before.append(value.state.maker)
        made = copy.copy(value)
        del made.state  # which refers to the operations before it
        new.reads.append(made)
        return made

    def _index(self, operand: object) -> int:
        for at, each in enumerate(self.operands):
            if each is operand or _is_same(each, operand):
                return at
        self.operands.append(operand)
        return len(self.operands) - 1

    def run(self, given: Sequence[Tensor]) -> Tensor:
        """Compute the tensor from the value of each operand."""
        values = Values({self._number: [self._place]}, _no_outside)
        values.given = given
        for number, at in self._seeds.items():
            values.tensors[number] = given[at].clone()
        run(self._ops, values)
        return values.found[self._number, self._place]


_FLAT: Place = ()
"""All of a memory, as a one-dimensional tensor."""


def _no_outside(outside: Outside) -> Tensor:
    raise AssertionError("a part of a tape is given all that it needs")


def _is_same(one: object, other: object) -> bool:
    """Whether two operands are the same view of the same memory."""
    if type(one) is InPlace and type(other) is InPlace:
        return one._owner is other._owner and one._place == other._place
    if type(one) is not Entry or type(other) is not Entry or one.block is not other.block:
        return False
    return _view_of(one) == _view_of(other)


def _view_of(entry: Entry) -> tuple[Any, ...]:
    return entry.dtype, entry.shape, entry.stride, entry.offset_bytes, entry.conj, entry.neg


def slice_of(
    tape: Tape,
    tensor: Tensor,
    give: Callable[[State | None, Place, Outside | None], object | None],
) -> tuple[Slice | None, str]:
    """Return the operations that compute ``tensor``; or ``None`` and the reason why it cannot be recomputed."""
    state = tape.state_of(tensor)
    if state is None:
        return None, UNSEEN
    if state.reason:
        return None, state.reason
    try:
        return Slice(state, place_of(tensor), give), ""
    except _NotHeldError:
        return None, NOT_HELD


class Replay:
    """The operations that recompute one block.

    Args:
        part: the operations, taken from a tape.
        made: the tensor that they compute, which fills its storage.
        state: the state that they compute.
    """

    sources: tuple[Tensor | None, ...] = ()
    """The tensor that each operand was saved from, while it is alive; used for one comparison."""

    def __init__(self, part: Slice, made: Tensor, state: State) -> None:
        self._slice = part
        self._state = state
        self._layout = made.shape, made.stride()
        self.operands = tuple(part.operands)
        self.threads = torch.get_num_threads()
        self.depth: int = 1 + max(map(_depth_of, self.operands), default=0)

    def result(self, values: Sequence[Tensor]) -> Tensor:
        """Recompute the block from its operands' values; return all elements in memory order."""
        result = self._slice.run(values)
        return result.as_strided((result.numel(),), (1,))

    def key(self, block: Block) -> tuple[Any, ...]:
        """Return what decides the result's bits, other than the operands' bits: equal for replays of one
        class."""
        return (
            block.cleanup.module,
            block.saves.number,
            self._state.key,
            block.storage_version.version,
            *((each.dtype, each.shape, _stride_of(each), _residue(each)) for each in self.operands),
            (block.dtype, *self._layout, block.address % ALIGNMENT_BYTES),
            self.threads,
        )

    def reason_against(self, block: Block) -> str:
        """Return why ``block``, which is complete and in place, cannot be recomputed; ``""`` if it can."""
        source = block.storage_version
        if block.is_copy or source.is_parted:
            return "only a part of its storage was saved"
        if (
            self._state.is_over
        ):  # running statistics: the operation that saves them also writes them
            return "it was changed since it was saved"
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
        if self.depth > MOST_BLOCKS:
            return _TOO_MANY.format(self.depth, MOST_BLOCKS)
        return ""

    def given(self) -> list[Tensor] | None:
        """Return the values of all operands if all are in place, else ``None``."""
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

    def values(self, operands: Sequence[Any]) -> list[Tensor] | None:
        """Return ``operands`` detached, or ``None`` if the memory of one is freed."""
        with without_function_modes(), without_dispatch():
            found = [each.value() if type(each) is InPlace else each for each in operands]
            there = [each.detach() for each in found if each is not None]
        return there if len(there) == len(found) else None

    def derivation(self, block: Block, fingerprint: Any) -> Derivation:
        """Return the derivation that recomputes ``block``, whose bytes have this fingerprint, from entries of
        its own."""
        owned = (_owned(each) if type(each) is Entry else each for each in self.operands)
        return _Recomputation(self, block.dtype, tuple(owned), fingerprint)

    def __repr__(self) -> str:
        return f"recomputing {self._slice.name}"


class _Recomputation(Derivation):
    """Derive a block's bytes by calling ``replay`` again.

    Args:
        replay: a replay whose result was once compared bit for bit.
        dtype: type of the result.
        operands: entries that this object owns, and tensors in place.
        fingerprint: of the discarded bytes.
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
        """See :meth:`Derivation.given`; ``None`` if an operand in place has lost its memory."""
        return self._replay.values(
            [unpack(each) if type(each) is Entry else each for each in self._operands]
        )

    def given_ahead(self, unpack: Callable[[Any], Tensor]) -> list[Tensor]:
        """See :meth:`Derivation.given_ahead`. Copies the operands in place: the program may free their memory
        (``resize_``), as FSDP does."""
        given = self.given(unpack)
        if given is None:
            raise NotAtHandError
        at_risk = [at for at, each in enumerate(self._operands) if type(each) is not Entry]
        if sum(given[at].nbytes for at in at_risk) > _MOST_COPIED_BYTES:
            raise NotAtHandError
        for at in at_risk:
            given[at] = given[at].clone()
        return given

    def make(self, given: Any, out: Tensor) -> None:
        """See :meth:`Derivation.make`. Without operands it writes zeros, which fail the fingerprint check."""
        if given is None:
            out.zero_()
        else:
            out.copy_(self._replay.result(given))

    def whole(self, given: Any, address: int) -> Tensor | None:
        """See :meth:`Derivation.whole`."""
        if given is None:
            return None
        result = self._replay.result(given)
        storage = result.untyped_storage()
        is_own = all(
            storage_identity(each.untyped_storage()) != storage_identity(storage) for each in given
        )
        if not is_own or storage.nbytes() != result.nbytes:
            result = result.clone()
        if (result.data_ptr() - address) % ALIGNMENT_BYTES and result.device.type == "cpu":
            return None
        return result.view(torch.uint8)

    def __repr__(self) -> str:
        return repr(self._replay)


def _owned(operand: Entry) -> Entry:
    entry = copy.copy(operand)
    entry.turn = 0
    entry.block.entries += 1
    return entry


def _depth_of(operand: Any) -> int:
    return int(operand.block.depth) if type(operand) is Entry else 0


def _stride_of(operand: Any) -> tuple[int, ...]:
    return tuple(operand.stride if type(operand) is Entry else operand.stride())


def _residue(operand: Any) -> int:
    if type(operand) is Entry:
        return int(operand.block.address + operand.offset_bytes) % ALIGNMENT_BYTES
    return int(operand.data_ptr()) % ALIGNMENT_BYTES
