"""Hold what replays read: the operands of a forward's tape that no replay computes."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .._torch.optimizer_steps import OPTIMIZER_STEPS, read_now, watch_optimizer_steps
from .._torch.schemas import Operation
from .._torch.storages import storage_identity
from .operations import (
    Memory,
    Needs,
    Op,
    Outside,
    Place,
    State,
    copied,
    fingerprint_of,
    is_small,
    place_of,
    unpacked,
    version_of,
)
from .tape import ALIAS, CHANGED, UNSEEN, Tape

__all__ = ["HoldingTape"]

_UNSAVED = "it depends on a tensor that PyTorch does not save and that programs may change"
_RANDOM = "it depends on random numbers that PyTorch does not save"
_LARGE = "it depends on a tensor that PyTorch does not save, and which takes more than half as much"
_WIDE = "it depends on inputs that PyTorch does not save, and which take more"
_INFERENCE = "it depends on a tensor made in inference mode, whose changes PyTorch does not count"


class HoldingTape(Tape):  # type: ignore[no-untyped-call]
    """The tape of one forward. While it records, it refers to each operand that no replay computes. Once a
    tensor is discarded, it has the stash hold those that a replay of the tensor reads."""

    def __init__(self) -> None:
        super().__init__()
        self.saved: dict[tuple[int, int], weakref.ref[torch.UntypedStorage]] = {}
        """The storages, by identity and version, that autograd saved in a forward: the stash holds them anyway.
        If the program changes one before backward, plain PyTorch raises an error, too."""
        self.reads_unsaved = True
        """Whether a replay may read others without a copy."""
        self.tensors: dict[Outside, Tensor] = {}
        """A forward's operands, while the tape records and their memory is not overwritten."""
        self._held: dict[Outside, list[Any]] = {}  # those that are held: see Needs
        self._needs: dict[Op, Needs] = {}  # by the operations whose operands are held
        watch_optimizer_steps()
        self._step = OPTIMIZER_STEPS.latest  # before the forward
        self._latest: list[Op] = []  # what the latest call of want() added to these
        self.given: dict[State, State] = {}
        """What :meth:`take_as_given` replaced, and by what."""
        self.outside_states: dict[Outside, State | None] = {}
        """The state of each operand, if a route is made."""

    def stop(self) -> None:
        """See :meth:`Tape.stop`."""
        super().stop()
        for each in (self.saved, self.tensors, self._held, self._needs):
            each.clear()

    def _forget(self, operation: Operation, args: Any, kwargs: Any) -> None:
        super()._forget(operation, args, kwargs)
        if operation.writes:
            for each in [each for each in self.tensors if each not in self._held]:
                del self.tensors[each]

    def _lose(self, operands: Mapping[Place, Outside]) -> None:
        tensors, held = self.tensors, self._held
        for each in list(operands.values()):
            if (tensor := tensors.get(each)) is not None:
                if each in held and self._shows(tensor, each):
                    held[each][0] = copied(tensor)
                del tensors[each]

    def _hold(self, memory: Memory | None, tensor: Tensor, op: Op) -> Outside:
        state = memory.state if memory is not None else None
        outside = self._outside_at(state, tensor)
        # Another forward that did the same may have the operand, too.
        if outside not in self._held:
            if memory is None:
                outside.seen = self._seen(tensor)
            elif outside not in self.tensors:
                self._note_unsaved(outside, memory, tensor)
            self.tensors.setdefault(outside, tensor)
        if self.steps is not None:
            self.outside_states[outside] = state
        op.before.append(outside)
        return outside

    def _note_unsaved(self, outside: Outside, memory: Memory, tensor: Tensor) -> None:
        """Note whether the forward computed this operand, and refer no longer to those before that it computed
        and that no operation saved: the program may have freed them."""
        if outside.is_random:
            outside.unsaved = _RANDOM
        elif memory.state.reason == ALIAS:
            outside.unsaved = ALIAS
        elif memory.is_made:
            outside.unsaved = _LARGE
        elif not (tensor if tensor._base is None else tensor._base).is_leaf:
            # An input of the module, which the program may free after the forward.
            outside.unsaved = _WIDE
            return
        if not outside.unsaved:
            return
        for each in [each for each in self.tensors if each.unsaved and each not in self._held]:
            tensor = self.tensors[each]
            if each.unsaved != _WIDE and not (is_small(tensor) or self._is_held_anyway(tensor)):
                del self.tensors[each]

    def _shows(self, tensor: Tensor, operand: Outside) -> bool:
        """Whether a tensor still shows what the operation read. Once the memory was written to unseen, a later
        operation that reads it begins another state."""
        if not operand.kind[0]:
            return operand.seen == self._seen(tensor)
        state = self.state_of(tensor)
        if state is None or state.outside is None:
            return False
        since = self._step
        if OPTIMIZER_STEPS.latest is not since and OPTIMIZER_STEPS.have_written(tensor, since):
            return False
        # ``tensor.data = other`` gives the same tensor another place.
        return place_of(tensor) == operand.kind[0] and state.outside.get(operand.kind[0]) is operand

    def _seen(self, tensor: Tensor) -> object:
        # A sparse tensor does not count what is written through values().
        return version_of(tensor), self._outer_writes

    def _is_held_anyway(self, tensor: Tensor) -> bool:
        """Whether autograd saves ``tensor``, so that holding it for a replay takes no memory. Otherwise what
        was computed from it is held, unless that takes much more."""
        # An operation may save what it then fills.
        return self._was_saved(tensor) or self._was_saved(tensor, earlier=1)

    def _was_saved(self, tensor: Tensor, earlier: int = 0) -> bool:
        which = storage_identity(tensor.untyped_storage()), version_of(tensor) - earlier
        known = self.saved.get(which)
        return known is not None and known() is not None  # else the storage is another one

    def _new_outside(
        self, tensor: Tensor, place: Place, state: State | None, *, is_random: bool
    ) -> Outside:
        return Outside(tensor, place, None, is_random=is_random)

    def take_as_given(self, tensor: Tensor) -> None:
        """The stash holds ``tensor``, and will: what is computed from it is replayed from that, and not from
        what has led to it."""
        state = self.state_of(tensor)
        if state is not None and not state.reason:
            given = self.given.get(state)
            if given is None:
                given = State(tensor.device, UNSEEN)
                self.given[state] = given
            self._memories[storage_identity(tensor.untyped_storage())].state = given

    def want(self, state: State, tensor: Tensor, pack: Callable[[Tensor, bool], object]) -> str:
        """Hold what a replay of ``state`` needs.

        Args:
            state: the state to be discarded.
            tensor: the tensor that has it.
            pack: hold a tensor in the stash; its second argument is whether the tensor holds random numbers.

        Returns:
            Why it cannot be discarded; ``""`` if it can.
        """
        if state.reason:
            return state.reason
        new = self._latest = self._leading_to(state)
        needed = [each for op in new for each in op.before]
        reason = self.hold(needed, tensor, pack)
        if not reason:
            before = [state.maker, *(each.state.maker for op in new for each in op.reads)]
            self.note_needs(new, needed, before)
        return reason

    def note_needs(
        self, ops: Collection[Op], needed: Iterable[Outside], before: Iterable[Op | None]
    ) -> None:
        """Record that the operands of ``ops`` are held.

        Args:
            ops: the operations.
            needed: their operands.
            before: the operations that lead to what they read. All others are known.
        """
        if not ops:
            return
        held, known = self._held, self._needs
        led = [known[each] for each in before if each is not None and each in known]
        needs = Needs({each: held[each] for each in needed}, led)
        for each in ops:
            known[each] = needs

    def value_of(self, outside: Outside, unpack: Callable[[Any], Tensor]) -> Tensor:
        """Return an operand while the tape records."""
        tensor = self.tensors.get(outside)
        return unpacked(self._held, unpack, outside) if tensor is None else tensor.detach()

    def needs_of(self, state: State) -> Needs | None:
        """Return what a replay of ``state`` needs, after :meth:`want`."""
        return self._needs[state.maker] if state.maker is not None else None

    def hold(
        self, needed: Collection[Outside], discarded: Tensor, pack: Callable[[Tensor, bool], object]
    ) -> str:
        """Hold these operands: see :meth:`want`. What only a replay needs may take half of
        what ``discarded`` takes, and with the module's inputs as much."""
        tensors, held = self.tensors, self._held
        copies: set[Outside] = set()
        only_for_replays: dict[int, int] = {}  # bytes by the identity of the storage
        for each in needed:
            if each in held:
                continue
            tensor = tensors.get(each)
            if tensor is None and each.unsaved:
                return each.unsaved
            if tensor is None or not self._shows(tensor, each):
                return CHANGED  # perhaps by another thread
            try:
                _ = tensor.is_leaf
            except RuntimeError:  # a view without a graph, of what has got one since
                return CHANGED
            # The program may write a buffer before backward; that is no error if autograd did not save it.
            is_inference = tensor.is_inference()
            if each.unsaved and not (is_small(tensor) or self._is_held_anyway(tensor)):
                storage = tensor.untyped_storage()
                which, nbytes = storage_identity(storage), storage.nbytes()
                if each.unsaved == _WIDE:  # a later operation may save the rest of the memory
                    nbytes = min(only_for_replays.get(which, 0) + tensor.nbytes, nbytes)
                only_for_replays[which] = nbytes
                # An expanded tensor has fewer elements in memory.
                most_bytes = min(discarded.nbytes, discarded.untyped_storage().nbytes())
                if each.unsaved != _WIDE:
                    most_bytes = most_bytes // 2 if each.unsaved == _LARGE else -1
                if sum(only_for_replays.values()) > most_bytes:
                    return each.unsaved
            elif each.is_random and not is_inference and self._is_held_anyway(tensor):
                continue
            if not tensor.requires_grad and is_small(tensor):
                copies.add(each)
            elif is_inference:
                return _INFERENCE
            elif not self.reads_unsaved and not self._was_saved(tensor):
                if not is_small(tensor, also_trained=True):
                    return _UNSAVED
                copies.add(each)
        for each in needed:
            if each in held:
                continue  # it may be an operand of two operations
            tensor = tensors[each]
            if each in copies:
                with self.aside():
                    held[each] = [copied(tensor), None]
            else:
                was: Any = None
                if not (tensor.requires_grad or each.is_random):
                    was = fingerprint_of(tensor)
                # On an accelerator, steps show the writes to a frozen parameter.
                root = tensor if tensor._base is None else tensor._base
                if tensor.requires_grad or (was is None and type(root) is nn.Parameter):
                    was = read_now(tensor)
                held[each] = [pack(tensor, each.is_random), was]
        return ""

    def _leading_to(self, state: State) -> list[Op]:
        """Return the operations that lead to ``state``, except those whose operands are held."""
        found: list[Op] = []
        todo, seen = [state], set[Op]()
        while todo:
            op = todo.pop().maker
            if op is None or op in self._needs or op in seen:
                continue
            seen.add(op)
            found.append(op)
            for each in op.reads:
                todo.append(each.state)
        return found
