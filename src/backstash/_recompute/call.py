"""One forward of a region: what is discarded, and its recomputation in backward.

Every kind of result is checked. When a result of certain operations on certain shapes is first to be discarded,
it is recomputed at the end of the forward and compared bit for bit. Later, a fingerprint of some bytes of each
discarded tensor is recorded, and the recomputed tensor must have the same one.
"""

from __future__ import annotations

import functools
import os
import threading
import weakref
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .._plan.cuts import CallGraph, CallOperation
from .._saved.entry import replayed_otherwise
from .._saved.held import Held
from .._saved.thread_state import ThreadState
from .._saved.view import dense, reason_to_stay
from .._text import clean
from .._torch.dispatch import innermost_mode, pause_mode, resume_mode, without_function_modes
from .._torch.engine import queue_callback, sequence_number, task_or_none
from .._torch.modules import as_if_running, module_path, running_modules
from .._torch.schemas import RANDOM, argument_of, operation_of
from .._torch.storages import storage_identity, storage_of
from ..codecs._base import integers
from ..errors import InplaceError
from .operations import Op, Place, State, operands_of, place_of, unpacked
from .region_state import RegionState
from .replay import Timed, replay
from .route import Discard, ForwardTape
from .tape import UNSEEN, Tape

if TYPE_CHECKING:
    from .._budget.planned import Planned

__all__ = ["Call", "put_back"]

_ONLY_WORKSPACE = (
    "it is a workspace, and no other result of its operation is large enough to be compared"
)
_OTHER_BITS = "recomputing it gives different bits"


_Saved = tuple["Held", Tensor, int, "list[nn.Module] | None"]
"""A tensor that was saved, with the number of the save in its call, and the modules that were running; ``None``
for one that a route is expected to discard, which does not need them."""


class Call:
    """One forward of a region: its pack hook, and the recomputation of what it discarded.

    Args:
        region: the region.
        modules: the running modules, the region's own last.
        thread_state: of the thread.
        frame: of the module's call.
        inputs: the packed inputs, held as long as they may be needed.
        planned: the plan's instructions; ``None`` without a plan.
    """

    def __init__(
        self,
        region: RegionState,
        modules: list[nn.Module],
        thread_state: ThreadState,
        frame: FrameType | None,
        inputs: list[object],
        planned: Planned | None = None,
    ) -> None:
        self.region = region
        self.frame = frame
        self._modules: list[nn.Module] = modules
        self._pack = region.admission.hook(thread_state)
        self._pack_exact = region.admission.hook_exact(thread_state)
        self._pack_smaller = (
            region.admission.hook_packing(thread_state) if planned is None else self._pack_exact
        )
        if planned is not None and planned.left_bytes is not None:
            leaving = region.admission.hook_leaving(thread_state, planned.left_bytes)
            self._pack = self._pack_exact = self._pack_smaller = leaving
        self._task = task_or_none()
        self.kind: object = None
        """See :meth:`RegionState.is_at_rest`; ``None``: the forward is recorded in any case."""
        self._is_in_context = bool(thread_state.scopes)
        self._saves_are_small = True  # whether all that it has saved is small
        self._count = 0
        self._held: list[weakref.ref[Held]] = []
        self._sampled = (
            region.next_sampled()
        )  # on an accelerator, the number of the tensor to sample
        self._is_thorough = region.is_thorough
        self._discarded = 0
        self._discarded_bytes = 0
        self._counted: set[tuple[int, Place]] = set()  # states and places in _discarded_bytes
        self._unknown: list[tuple[Held, Tensor, int]] = []  # yet to be compared: with their memory
        self._traced: list[
            tuple[int, Held]
        ] = []  # what is only recorded, by the number of the save
        self._unfilled: list[_Saved] = []  # whose operation may not have ended
        self._filled: list[_Saved] = []  # whose has
        self._inputs = inputs
        self._planned = planned
        self._keeps = planned is not None and planned.forward is not None
        self._tries = planned is None or planned.may_try
        self._lock = os.getpid(), threading.RLock()
        follows = not self._keeps and not region.session.event_log.on
        stays = planned.stays if planned is not None else frozenset()
        self.tape: ForwardTape | None = ForwardTape(region.routes if follows else None, stays)
        # Who names a module promises not to change what it reads.
        self.tape.reads_unsaved = not region.is_found
        self._thread_state = thread_state
        self._outer: Tape | None = None  # the context's tape, which this one replaces meanwhile
        self._is_paused = False  # whether the tape is popped until the end of this hook

    # Forward.

    def begin(self, outer: Tape | None) -> None:
        """Start recording; ``outer`` is the context's tape, which does not see this forward."""
        assert self.tape is not None
        self.tape.frame = self.frame
        self._outer, self._thread_state.tape = outer, self.tape
        self.tape.enter()

    def steps_aside(self) -> None:
        """Record that a transform of ``torch.func`` runs without hooks."""
        self.region.admission.stepped_aside()

    def __call__(self, tensor: Tensor) -> object:
        """Pack a tensor that autograd saves while the module runs."""
        tape, thread_state = self.tape, self._thread_state
        assert tape is not None
        try:
            storage = tensor.untyped_storage()
            tape.saved[storage_identity(storage), tensor._version] = weakref.ref(storage)
        except (NotImplementedError, RuntimeError):  # see storage_of()
            pass
        was_recording, tape.is_recording = tape.is_recording, False
        try:
            # What is discarded does not reach the stash's hook, which otherwise does this.
            if thread_state.waiting and thread_state.operation != sequence_number():
                if not self.region.session.section.is_nested():
                    self._pause()
                    self.region.admission.settle(thread_state)
            if self._filled:
                self._settle(tape)
            number, self._count = self._count, self._count + 1
            if self._keeps:
                return self._save_recorded(tensor, number, tape)
            discard = tape.discards.get(number)
            if discard is not None and tape.is_as(discard, tensor) and task_or_none() == self._task:
                return self._discard_as(discard, tensor, tape)
            return self._save(tensor, number, tape)
        finally:
            if self._is_paused:
                self._is_paused = False
                resume_mode(tape)
            tape.is_recording = was_recording

    def _pause(self) -> None:
        """Pop the tape until the end of this hook, since operations are about to be called. It does not record
        them either way, but a call through it takes long."""
        if not self._is_paused and innermost_mode() is self.tape is not None:
            pause_mode(None)
            self._is_paused = True

    def _leave_out(self, since: int, saved: Tensor | None = None) -> None:
        """Of what was counted as saved since ``since``, count only ``saved``: a step that is recorded then
        counts what another one does, whatever was packed for a replay and when."""
        storage = storage_of(saved) if type(saved) is Tensor else None
        nbytes = storage.nbytes() if storage is not None else 0
        if nbytes < self.region.session.min_bytes:
            nbytes = 0
        self._thread_state.leave_out(self._thread_state.large_bytes - since - nbytes)

    def _save_recorded(self, tensor: Tensor, number: int, tape: ForwardTape) -> object:
        """Save as :meth:`_save` does, in a step that is recorded."""
        planned, saved_bytes = self._planned, self._thread_state.large_bytes
        assert planned is not None
        began = planned.hook_begins()
        try:
            return self._save(tensor, number, tape)
        finally:
            planned.hook_took(began)
            self._leave_out(saved_bytes, tensor)

    def _save(self, tensor: Tensor, number: int, tape: ForwardTape) -> object:
        root = tensor if tensor._base is None else tensor._base
        if type(root) is nn.Parameter or (root.is_leaf and root.requires_grad):
            if not (tensor.is_leaf or self._is_paused):
                self._pause()
            kept = self.region.admission.keep_parameter(tensor, self._thread_state)
            if kept is not None:
                self._thread_state.saves += 1
                return kept
        if type(tensor) is not Tensor or task_or_none() != self._task:
            # A backward within the forward that retains its graph saves the tensors it unpacked.
            return self._pack_own(tensor)
        try:
            nbytes = tensor.untyped_storage().nbytes()
        except (NotImplementedError, RuntimeError):  # see storage_of()
            return self._pack_own(tensor)
        if nbytes < self.region.session.min_bytes and not tensor.requires_grad:
            return self._pack_own(tensor)  # see may_discard()
        state = tape.state_of(tensor)
        if number not in tape.large and self.region.admission.may_discard(tensor):
            tape.note_large(number)
        if state is None or reason_to_stay(tensor):
            return self._pack_own(tensor)
        if tensor.requires_grad:
            if state.reason:  # one that may still be filled is checked later
                return self._refuse(tensor, state.reason)
        elif _is_workspace(tensor) and (self._is_thorough or not _may_replay_workspace(state)):
            return self._pack_own(tensor)  # a replay may leave other bytes where nothing is written
        if not self.region.admission.may_discard(tensor):
            return self._pack_own(tensor)
        self._saves_are_small = False
        held = Held(self, state, place_of(tensor), tensor)
        if not tensor.requires_grad:
            # An operation may save a tensor before it fills it: check it when the operation has ended.
            held.packed = tensor, tensor._version
            modules = running_modules() if number not in tape.discards else None
            self._unfilled.append((held, tensor, number, modules))
            tape.recorded = self._note_filled
            return held
        if not self._is_paused:
            self._pause()
        return self._handled(held, tensor, number, tape)

    def _discard_as(
        self, discard: Discard, tensor: Tensor, tape: ForwardTape, held: Held | None = None
    ) -> object:
        """Discard a tensor as the route says. ``held``: what autograd holds for it already."""
        needs = tape.hold_for(discard, tensor, self._hold_operand)
        if isinstance(needs, str):
            return self._refuse(tensor, needs)
        state = discard.state
        self._saves_are_small = False
        if held is None:
            held = Held(self, state, discard.place, tensor)
        held.packed, held.needs = None, needs
        if self._discarded == self._sampled or self._is_thorough or tensor.is_cpu:
            held.fingerprint = self._sample(tensor)
        else:
            self._discarded += 1
        which = state.number, discard.place
        if which not in self._counted:
            self._counted.add(which)
            self._discarded_bytes += held.nbytes
        self._held.append(weakref.ref(held))
        if self._planned is not None and self._planned.stays:
            self._planned.note_discarded(tensor, state.number)
        return held

    def _handled(self, held: Held, tensor: Tensor, number: int, tape: ForwardTape) -> object:
        """Return ``held``, or the packed tensor if it cannot be discarded."""
        planned = self._planned
        if planned is not None and number in planned.stays:
            packed = self._pack(tensor)
            tape.take_as_given(tensor)
            return packed
        if held.state is None:
            reason = UNSEEN
        elif self._keeps and planned is not None:
            return self._trace(held, tensor, number, planned)
        else:
            reason = self._discard(held, tensor, number, tape)
            if planned is not None and planned.stays and not reason:
                planned.note_discarded(tensor, held.state.number)
        return self._refuse(tensor, reason) if reason else held

    def _trace(self, held: Held, tensor: Tensor, number: int, planned: Planned) -> object:
        """Hold a tensor of a forward that is only recorded."""
        tape = self.tape
        assert tape is not None
        reason = tape.want(held.state, tensor, self._hold_operand)
        if reason:
            return self._refuse(tensor, reason)
        packed = planned.pack(number, tensor, self._pack)
        self._traced.append((number, held))
        region = self.region  # what a replay takes is measured for each
        if self._tries and (held.state.key not in region.known or region.graph is None):
            held.packed = packed
            self._unknown.append((held, tensor.detach(), tensor._version))
            return held
        return packed

    def _refuse(self, tensor: Tensor, reason: str) -> object:
        if reason != UNSEEN:  # which is usually an input of the module
            self.region.count(reason, tensor.nbytes)
        packs = self._may_pack(tensor, is_random=reason.endswith(RANDOM))
        packed = self._pack_own(tensor, self._pack_smaller if packs else self._pack)
        if self.tape is not None:
            self.tape.take_as_given(tensor)  # what is computed from it needs no more than it
        return packed

    def _pack_own(self, tensor: Tensor, pack: Callable[[Tensor], object] | None = None) -> object:
        """Hold a tensor that no replay computes."""
        if not self._is_paused:
            self._pause()
        self._saves_are_small = self._saves_are_small and self._is_small(tensor)
        packed = (pack or self._pack)(tensor)
        if self._planned is not None and self._keeps:
            self._planned.note_own(packed)
        return packed

    def _is_small(self, tensor: Tensor) -> bool:
        """Whether a tensor stays in place, recorded or not. Outside of every context, a small part of a large
        storage would not reach the stash."""
        storage = storage_of(tensor) if type(tensor) is Tensor else None
        if storage is None:
            return False
        nbytes = tensor.nbytes if self._is_in_context else storage.nbytes()
        return bool(nbytes < self.region.session.min_bytes)

    def _hold_operand(self, tensor: Tensor, is_random: bool) -> object:
        if not self._is_paused:
            self._pause()
        root = tensor if tensor._base is None else tensor._base
        # ``leaf.data = other`` gives the leaf other memory, so only that of now is held.
        if type(root) is nn.Parameter or (root.is_leaf and root.requires_grad):
            packed = self.region.admission.keep_parameter(tensor, self._thread_state)
            if tensor.is_leaf:
                return tensor.detach(), tensor._version
            if packed is not None:
                return packed
        if tensor.is_leaf:
            tensor = tensor.detach()
        packs = self._may_pack(tensor, is_random=is_random)
        pack = self._pack_smaller if packs else self._pack_exact
        modules = self._modules_that_saved(tensor)
        if modules is None:
            packed = pack(tensor)
        else:
            with as_if_running(modules):
                packed = pack(tensor)
        if self._planned is not None and self._keeps:
            self._planned.note_operand(packed)
        return packed

    def _modules_that_saved(self, tensor: Tensor) -> list[nn.Module] | None:
        """Return the modules that were running when a tensor was saved that is still to be packed."""
        storage = storage_of(tensor)
        if storage is None:
            return None
        for _, saved, _, modules in (*self._filled, *self._unfilled):
            if storage_identity(saved.untyped_storage()) == storage_identity(storage):
                return modules
        return None

    def _may_pack(self, tensor: Tensor, *, is_random: bool) -> bool:
        # Not on the simulated accelerator: there the tensor was overwritten before its copy had ended.
        return is_random and tensor.device.type == "cpu"

    def _discard(self, held: Held, tensor: Tensor, number: int, tape: ForwardTape) -> str:
        """Discard the tensor, or hold it until it has been compared. Return why it cannot be discarded, or
        ``""``."""
        region, state = self.region, held.state
        reason = region.refused.get(state.key, "")
        if reason:
            return reason
        reason = tape.want(state, tensor, self._hold_operand)
        if reason:
            return reason
        held.needs = tape.needs_of(state)
        tape.note_discarded(number, state, held.place)
        if state.key in region.known:
            held.packed = None
            held.fingerprint = self._sample(tensor)
            self._count_discarded(held)
        else:
            alias = tensor.detach()
            held.packed = alias, tensor._version
            self._unknown.append((held, alias, tensor._version))
        self._held.append(weakref.ref(held))
        return ""

    def _sample(self, tensor: Tensor) -> Any:
        """Return what a replay of ``tensor`` will be compared with; ``None``: nothing."""
        region, number = self.region, self._discarded
        self._discarded += 1
        if _is_workspace(tensor):
            return None
        if number != self._sampled and not (tensor.is_cpu or self._is_thorough):
            return None
        if not self._is_paused:
            self._pause()
        tiers = region.tiers_of(tensor.device)
        if tiers is None:
            return region.sample(tensor)
        is_sampled = self._is_thorough or number == self._sampled
        return region.mark(tensor, tiers.device) if is_sampled else None

    def _count_discarded(self, held: Held) -> None:
        which = held.state.number, held.place
        if which not in self._counted:
            self._counted.add(which)
            self._discarded_bytes += held.nbytes

    def _note_filled(self) -> None:
        """Look up the states of these tensors: the operation that saved them has ended."""
        tape, (unfilled, self._unfilled) = self.tape, (self._unfilled, [])
        assert tape is not None
        for held, tensor, *_ in unfilled:
            held.state = tape.state_of(tensor)
        self._filled += unfilled

    def _settle(self, tape: ForwardTape) -> None:
        """Discard the tensors that were filled after they were saved."""
        if not self._is_paused:
            self._pause()
        while self._filled:
            # The others stay in the list: this one may hold one of them as an operand.
            held, tensor, number, modules = self._filled.pop(0)
            if held.packed[1] != tensor._version:
                # Changed in place, which is an error in plain PyTorch, too. It may have a graph now.
                held.packed = tensor.detach(), held.packed[1]
                continue
            discard = tape.discard_of(number, held)
            if discard is not None:
                packed = self._discard_as(discard, tensor, tape, held)
            else:
                with as_if_running(modules):
                    packed = self._handled(held, tensor, number, tape)
            if packed is not held:
                held.packed = packed

    def leave_tape(self) -> None:
        """Stop recording: the forward ends."""
        if self.tape is not None:
            self.tape.leave()

    def end(self, *, in_order: bool) -> None:
        """End the forward, after :meth:`leave_tape`; ``in_order``: it raised no error."""
        tape = self.tape
        assert tape is not None
        tape.recorded = None
        self.frame = None
        put_back(self._thread_state, self._outer)
        self._outer = None
        saved_bytes = self._thread_state.large_bytes
        try:
            self._note_filled()
            self._settle(tape)
            if self._keeps:
                self._leave_out(saved_bytes)
        except BaseException:
            tape.end()
            raise
        finally:
            self.tape = None
        planned, region = self._planned, self.region
        unknown, self._unknown = self._unknown, []
        traced, self._traced = self._traced, []
        if planned is not None:
            planned.leave(in_order=in_order and not unknown)
        if unknown and self._tries:
            paused = planned.pause() if planned is not None else None
            timed = Timed(planned.mark) if planned is not None and self._keeps else None
            reason = self._compare(unknown, tape, timed)
            if (
                timed is not None
                and planned is not None
                and not reason
                and len(traced) == len(unknown)
            ):
                region.graph = _graph_of(traced, timed, planned.seconds_between)
            if planned is not None:
                planned.end_trial(paused)
                if not reason:
                    planned.was_alike()
        if in_order and not unknown:
            tape.make_route()
        tape.end()
        region.discards = self._discarded
        if in_order:
            region.note_saves(self.kind, are_small=self._saves_are_small)
        self._counted.clear()
        region.admission.discarded_bytes += self._discarded_bytes

    def _compare(
        self, unknown: list[tuple[Held, Tensor, int]], tape: ForwardTape, timed: Timed | None
    ) -> str:
        """Replay what was discarded and free what compares equal. Return why some of it does not, or ``""``."""
        region = self.region
        # Skip tensors changed in place: using them in backward is an error in plain PyTorch, too.
        same = [each for each in unknown if each[1]._version == each[2]]
        try:
            targets = [(held.state, held.place) for held, _, _ in same]
            if timed is not None and self._planned is not None:
                self._planned.keep_busy()
            values = replay(targets, lambda each: tape.value_of(each, region.unpack), timed)
        except InplaceError:
            raise  # a value differs from plain PyTorch's
        except Exception as error:  # raised by a kernel
            first_line = str(error).partition("\n")[0]
            values, reason = [], f"recomputing it raised {type(error).__name__}: {first_line}"
        else:
            reason = ""
        alike = [True] * len(values) + [False] * (len(same) - len(values))
        makers: dict[Op | None, bool] = {}  # whether what an operation made is the same, so far
        for at, ((held, alias, _), value) in enumerate(zip(same, values, strict=False)):
            if not _is_workspace(alias):
                alike[at] = _are_same(alias, value)
                makers[held.state.maker] = alike[at] and makers.get(held.state.maker, True)
        for at, (held, alias, _) in enumerate(same[: len(values)]):
            if _is_workspace(alias):
                alike[at] = makers.get(held.state.maker, False)
        for (held, alias, _), is_alike in zip(same, alike, strict=True):
            if is_alike:
                region.known.add(held.state.key)
                if not self._keeps:
                    held.packed = None
                    held.fingerprint = self._sample(alias)
                    self._count_discarded(held)
                continue
            why = reason or _OTHER_BITS
            if not reason and _is_workspace(alias) and held.state.maker not in makers:
                why = _ONLY_WORKSPACE
            region.refused[held.state.key] = why
            region.count(why, alias.nbytes)
            if not self._keeps:
                held.packed = self._pack(alias)
        return "" if all(alike) else reason or _OTHER_BITS

    # Backward.

    @property
    def name(self) -> str:
        """The module's path."""
        return clean(module_path(self._modules))

    def value(self, held: Held) -> Any:
        """Return what the stash packed ``held`` as, or the recomputed tensor with its version."""
        if held.packed is not None:
            return held.packed
        if self.region.session.section.is_nested():
            # This call interrupts another one: do not wait, and do not change shared state.
            return self._compute([held])[0]
        if self._lock[0] != os.getpid():  # in a forked process
            self._lock = os.getpid(), threading.RLock()
        with self._lock[1]:
            task = task_or_none()
            if held.made is None:
                self._make(held, task)
            made, held.made, held.used_in = held.made, None, task
            return made

    def _make(self, held: Held, task: int) -> None:
        wanted = [held]
        if task != -1:
            for ref in self._held:
                each = ref()
                if each is None or each is held or each.packed is not None or each.made is not None:
                    continue
                if each.used_in != task:
                    wanted.append(each)
            if len(wanted) > 1:
                queue_callback(_Drop(self._held))
        for each, made in zip(wanted, self._compute(wanted), strict=True):
            each.made = made

    def _compute(self, wanted: list[Held]) -> list[tuple[Tensor, int]]:
        region = self.region
        try:
            targets = [(each.state, each.place) for each in wanted]
            held = operands_of([each.needs for each in wanted if each.needs is not None])
            values = replay(targets, functools.partial(unpacked, held, region.unpack))
        except InplaceError as error:
            raise InplaceError(
                f"the tensors that {self.name} saved were discarded and cannot be recomputed: {error}"
            ) from error
        for each, value in zip(wanted, values, strict=True):
            if each.fingerprint is not None:
                region.compare(
                    each.fingerprint, value, replayed_otherwise(self.name, tuple(each.shape))
                )
        return [(value, value._version) for value in values]


class _Drop:
    """Free, at the end of a backward, the tensors that it recomputed and did not use."""

    def __init__(self, held: list[weakref.ref[Held]]) -> None:
        self._held = held

    def __call__(self) -> None:
        for ref in self._held:
            each = ref()
            if each is not None:
                each.made = None


def _graph_of(
    traced: list[tuple[int, Held]], timed: Timed, between: Callable[[Any, Any], float]
) -> CallGraph:
    """Return the operations that were timed, and what was saved of what they make.

    Nothing, if what was saved is a part of a memory whose other parts were written later, like the gates of a
    recurrent cell: holding a part of it does not spare what made the others, so no part of the call is cheaper.
    """
    operations = tuple(
        CallOperation(
            between(began, ended),
            tuple(each.number for each in op.reads),
            tuple(each.number for each in op.made),
        )
        for op, began, ended in timed.taken
    )
    written: set[int] = set()
    for op, *_ in timed.taken:
        for made in op.made:
            if made.argument is not None:
                written.add(argument_of(op.args, op.kwargs, made.argument).number)
    saves = [(number, held.state.number) for number, held in traced]
    return CallGraph(operations, () if written & {value for _, value in saves} else tuple(saves))


def _are_same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same bits."""
    with without_function_modes(), torch.no_grad():
        return torch.equal(integers(dense(one)), integers(dense(other)))


def _is_workspace(tensor: Tensor) -> bool:
    """Whether a tensor may be a library's workspace, as oneDNN's LSTM has one: not all of it is written."""
    is_of_bytes = tensor.dtype is torch.uint8 and tensor.dim() == 1
    return is_of_bytes and tensor.nbytes == tensor.untyped_storage().nbytes()


def _may_replay_workspace(state: State) -> bool:
    """Whether a replay may make a workspace: other results of its operation are then compared instead of it."""
    return state.maker is not None and operation_of(state.maker.func).has_workspace


def put_back(thread_state: ThreadState, tape: Tape | None) -> None:
    """Make ``tape``, the context's, the thread's tape again."""
    thread_state.tape = tape
    if tape is not None and tape.is_recording:
        tape.enter()
