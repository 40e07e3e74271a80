"""The tape of a whole context: what a block that was saved in it can be computed from."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor

from .._saved.entry import Entry, WrapperEntry
from .._torch.schemas import ALLOCATES, Operation
from .operations import Memory, Op, Outside, Place, State, is_small, leaf_of
from .tape import Tape

__all__ = ["ContextTape"]

_TOO_FAR = "it takes {} operations to compute it from saved tensors, more than {}"


class ContextTape(Tape):  # type: ignore[no-untyped-call]
    """Record the operations of a context.

    It holds only tensors that the program holds anyway, and does not replay slow operations such as matrix
    products and convolutions. It skips what is computed without a graph.

    Args:
        most: the longest chain of operations from a held value to a state.
    """

    is_of_context = True

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most
        self.number = -1
        """Number of its step."""
        self.is_marked = False
        """Whether it ends when the outermost running module returns."""

    def _reason_of(self, operation: Operation, op: Op, args: Any, result: Any) -> str:
        reason = super()._reason_of(operation, op, args, result)
        if not reason and (depth := _depth(op)) > self._most:
            reason = _TOO_FAR.format(depth, self._most)
        return reason

    def _made(
        self,
        op: Op,
        device: torch.device,
        reason: str,
        key: int,
        *,
        result: int = -1,
        argument: int | str | None = None,
    ) -> State:
        state = super()._made(op, device, reason, key, result=result, argument=argument)
        if state.maker is not None:
            state.depth = _depth(op)
        return state

    def _lose(self, operands: Mapping[Place, Outside]) -> None:
        for each in list(operands.values()):
            each.is_lost = each.copy is None

    def _forget(self, operation: Operation, args: Any, kwargs: Any) -> None:
        if operation.writes:
            self.stop()

    def _hold(self, memory: Memory | None, tensor: Tensor, op: Op) -> Outside:
        outside = self._outside_at(memory.state if memory is not None else None, tensor)
        op.before.append(outside)
        return outside

    def _new_places(self) -> MutableMapping[Place, Outside]:
        return weakref.WeakValueDictionary()

    def _new_outside(
        self, tensor: Tensor, place: Place, state: State | None, *, is_random: bool
    ) -> Outside:
        outside, leaf = Outside(tensor, place, state, is_random=is_random), leaf_of(tensor)
        outside.leaf = weakref.ref(leaf) if leaf is not None else None
        if state is not None and is_small(tensor):
            outside.kept = weakref.ref(tensor.untyped_storage())
        return outside

    def note_packed(self, tensor: Tensor, packed: object) -> None:
        """Record that the stash saved ``tensor`` as ``packed``: replays can now start from it."""
        if type(packed) is not Entry:
            root = tensor if tensor._base is None else tensor._base
            # What has a part of a memory to itself does not count writes to the rest.
            if type(packed) is not WrapperEntry and root.nbytes == root.untyped_storage().nbytes():
                self._note_saved(tensor, None)
            return
        block = packed.block
        source = block.storage_version
        is_whole = not block.is_copy and not source.is_parted and packed.source is source
        if is_whole and not block.is_rounded and packed.check is None:
            self._note_saved(tensor, block)

    def _note_saved(self, tensor: Tensor, block: Any) -> None:
        """Record that ``block`` holds all of the tensor's memory, or, with ``None``, that autograd holds it
        unpacked."""
        memory = self._memory(tensor)
        if memory is None or memory.state.reason == ALLOCATES:
            return
        state = memory.state
        state.depth = 0
        if block is not None:
            state.saved = weakref.ref(block)
        elif state.saved is None:
            state.saved = weakref.ref(tensor.untyped_storage())
        state.maker = None  # it is held from now on: the operations before it are not needed


def _depth(op: Op) -> int:
    return 1 + max((each.state.depth for each in op.reads), default=0)
