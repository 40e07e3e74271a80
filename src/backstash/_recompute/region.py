"""Regions: modules whose saved tensors are discarded and recomputed in backward by replaying their operations.

A tape records the operations while the module runs (see ``tape``). Autograd's saved tensors that the tape can
replay are discarded; the stash treats the others as usual. What a replay needs is held as entries of the stash,
so it counts toward budgets.

Every kind of result is checked. When a result of certain operations on certain shapes is first to be discarded,
the region recomputes it at the end of the forward and compares it bit for bit. Later, the region records a
fingerprint of some bytes of each discarded tensor, and the recomputed tensor must have the same one.
"""

from __future__ import annotations

import itertools
import os
import random
import threading
import weakref
from collections.abc import Callable, Iterable
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from .._core.admission import Admission
from .._core.hook_scope import Hook, newest_scope
from .._core.session import Session
from .._device.base import Device
from .._device.fingerprint import fingerprint
from .._plan.cuts import CallGraph, CallOperation
from .._saved.entry import replayed_otherwise
from .._saved.held import Held
from .._saved.thread_state import ThreadState
from .._saved.view import dense, extent_bytes, raw_alias, reason_to_stay
from .._text import clean
from .._tiers.device_tiers import DeviceTiers
from .._torch.checkpoints import is_of_checkpoint
from .._torch.dispatch import (
    count_dispatch_modes,
    innermost_mode,
    pause_mode,
    resume_mode,
    without_function_modes,
)
from .._torch.dynamo import leave_untraced, untraced
from .._torch.engine import queue_callback, sequence_number, task_or_none
from .._torch.hook_stack import current_pair, own_pack
from .._torch.modules import as_if_running, call_frame, is_running, module_path, running_modules
from .._torch.schemas import RANDOM
from .._torch.storages import storage_identity, storage_of
from .._torch.trees import tree_flatten
from ..codecs._base import integers
from ..errors import InplaceError
from .operations import Place, operands_of, place_of, unpacked
from .replay import Timed, replay
from .route import Discard, ForwardTape, Routes
from .tape import UNSEEN, Tape

if TYPE_CHECKING:
    from .._budget.planned import Planned

__all__ = ["FoundModules", "Region"]

_REFUSED = "not recomputed: "
_OTHER_BITS = "recomputing it gives different bits"
_SAMPLED_BYTES, _SAMPLED_ON_DEVICE = 4 << 10, 1 << 20
_SAMPLED_CALLS = 4  # on an accelerator, one tensor of each this many forwards
_seeds = itertools.count()


_Saved = tuple["Held", Tensor, int, list[nn.Module]]
"""A tensor that was saved, with the number of the save in its call, and the modules that were running."""


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
        region: Region,
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
        self._count = 0
        self._held: list[weakref.ref[Held]] = []
        self._sampled = (
            region.next_sampled()
        )  # on an accelerator, the number of the tensor to sample
        self._is_thorough = region.is_thorough
        self._discarded = 0
        self._discarded_bytes = 0
        self._counted: set[tuple[int, Place]] = set()  # states and places in _discarded_bytes
        # The storages that were saved, with versions. Who names a module promises not to change what it reads.
        self._saved: set[tuple[int, int]] | None = set() if region.is_found else None
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
        tape, planned = self.tape, self._planned
        assert tape is not None
        if self._saved is not None:
            try:
                identity = storage_identity(tensor.untyped_storage())
            except (NotImplementedError, RuntimeError):  # see storage_of()
                pass
            else:
                self._saved.add((identity, tensor._version))
        was_recording, tape.is_recording = tape.is_recording, False
        saved_bytes = self._thread_state.large_bytes
        try:
            # What is discarded does not reach the stash's hook, which otherwise does this.
            state = self._thread_state
            if state.waiting and state.operation != sequence_number():
                if not self.region.session.section.is_nested():
                    self._pause()
                    self.region.admission.settle(state)
            if self._filled:
                self._settle(tape)
            if planned is None or planned.forward is None:
                return self._save(tensor, tape)
            began = planned.hook_begins()
            try:
                return self._save(tensor, tape)
            finally:
                planned.hook_took(began)
                self._leave_out(saved_bytes, tensor)
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

    def _save(self, tensor: Tensor, tape: ForwardTape) -> object:
        number, self._count = self._count, self._count + 1
        if (route := tape.route) is not None and number in route.saves:
            discard = route.saves[number]
            if tape.discards(discard, tensor) and task_or_none() == self._task:
                return self._discard_as(discard, tensor, tape)
        base = tensor._base
        if tensor.is_leaf or (base is not None and (base.is_leaf or type(base) is not Tensor)):
            kept = self.region.admission.keep_parameter(tensor, self._thread_state)
            if kept is not None:
                self._thread_state.saves += 1
                return kept
        if type(tensor) is not Tensor or task_or_none() != self._task:
            # A backward within the forward that retains its graph saves the tensors it unpacked.
            return self._pack_own(tensor)
        state = tape.state_of(tensor)
        if state is None or reason_to_stay(tensor):
            return self._pack_own(tensor)
        if tensor.requires_grad:
            if state.reason:  # one that may still be filled is checked later
                return self._refuse(tensor, state.reason)
        elif tensor.dtype is torch.uint8 and _is_workspace(tensor):
            return self._pack_own(tensor)
        if not self.region.admission.may_discard(tensor):
            return self._pack_own(tensor)
        held = Held(self, state, place_of(tensor), tensor)
        if not self._is_paused:
            self._pause()
        if not tensor.requires_grad:
            # An operation may save a tensor before it fills it: check it when the operation has ended.
            held.packed = tensor.detach(), tensor._version
            self._unfilled.append((held, tensor, number, running_modules()))
            tape.recorded = self._note_filled
            return held
        return self._handled(held, tensor, number, tape)

    def _discard_as(self, discard: Discard, tensor: Tensor, tape: ForwardTape) -> object:
        """Discard a tensor as the route says."""
        needs = tape.hold_for(discard, self._hold_operand, self._saved)
        if isinstance(needs, str):
            return self._refuse(tensor, needs)
        state = discard.state
        held = Held(self, state, discard.place, tensor)
        held.needs = needs
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
        reason = tape.want(held.state, self._hold_operand, self._saved)
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
        return self._pack_own(tensor, self._pack_smaller if packs else self._pack)

    def _pack_own(self, tensor: Tensor, pack: Callable[[Tensor], object] | None = None) -> object:
        """Hold a tensor that no replay computes."""
        if not self._is_paused:
            self._pause()
        packed = (pack or self._pack)(tensor)
        if self._planned is not None and self._keeps:
            self._planned.note_own(packed)
        return packed

    def _hold_operand(self, tensor: Tensor, is_random: bool) -> object:
        if not (tensor.is_leaf or self._is_paused):
            self._pause()
        packed = self.region.admission.keep_parameter(tensor, self._thread_state)
        if packed is not None:
            return packed
        self._pause()
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
        discard = tape.discard_of(number, state, held.place)
        if discard is not None:
            needs = tape.hold_for(discard, self._hold_operand, self._saved)
            if isinstance(needs, str):
                return needs
            held.needs = needs
        else:
            reason = tape.want(state, self._hold_operand, self._saved)
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
        if number != self._sampled and not (tensor.is_cpu or self._is_thorough):
            return None
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
        self._pause()
        while self._filled:
            # The others stay in the list: this one may hold one of them as an operand.
            held, tensor, number, modules = self._filled.pop(0)
            if held.packed[1] != tensor._version:
                continue  # changed in place, which is an error in plain PyTorch, too
            with as_if_running(modules):
                packed = self._handled(held, tensor, number, tape)
            if packed is not held:
                held.packed = packed

    def end(self, *, in_order: bool) -> None:
        """End the forward; ``in_order``: it raised no error."""
        tape = self.tape
        assert tape is not None
        tape.leave()
        tape.recorded = None
        self.frame = None
        _put_back(self._thread_state, self._outer)
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
        self._counted.clear()
        if self._saved is not None:
            self._saved.clear()
        region.admission.discarded_bytes += self._discarded_bytes

    def _compare(
        self, unknown: list[tuple[Held, Tensor, int]], tape: Tape, timed: Timed | None
    ) -> str:
        """Compute it again, and let go of what is the same. Why some is not; ``""``: all is."""
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
            values, reason = [], f"recomputing it raised {type(error).__name__}: {error}"
        else:
            reason = ""
        alike = [True] * len(values) + [False] * (len(same) - len(values))
        for at, ((_, alias, _), value) in enumerate(zip(same, values, strict=False)):
            alike[at] = _are_same(alias, value)
        for (held, alias, _), is_alike in zip(same, alike, strict=True):
            if is_alike:
                region.known.add(held.state.key)
                if not self._keeps:
                    held.packed = None
                    held.fingerprint = self._sample(alias)
                    self._count_discarded(held)
                continue
            why = reason or _OTHER_BITS
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
            values = replay(targets, lambda each: unpacked(held[each], region.unpack))
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
    """Return the operations that were timed, and what was saved of what they make."""
    operations = tuple(
        CallOperation(
            between(began, ended),
            tuple(each.number for each in op.reads),
            tuple(each.number for each in op.made),
        )
        for op, began, ended in timed.taken
    )
    return CallGraph(operations, tuple((number, held.state.number) for number, held in traced))


def _are_same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same bits."""
    with without_function_modes(), torch.no_grad():
        return torch.equal(integers(dense(one)), integers(dense(other)))


def _window(tensor: Tensor, number: int) -> tuple[int, int]:
    """Return some adjacent bytes of a tensor, as offset and size. Successive numbers pass through all of it."""
    itemsize = tensor.element_size()
    first, size = int(tensor.storage_offset()), 1
    runs: list[tuple[int, int]] = []
    if tensor.is_contiguous():
        size = tensor.numel()
    else:
        for stride, length in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
            if stride == size and not runs:
                size *= length
            elif stride and length > 1:
                runs.append((stride, length))
    most = _SAMPLED_BYTES // itemsize
    number, at = divmod(number, -(-size // most))
    for stride, length in runs:
        number, index = divmod(number, length)
        first += index * stride
    return (first + at * most) * itemsize, min(most, size - at * most) * itemsize


def _is_workspace(tensor: Tensor) -> bool:
    """Whether a tensor of bytes may be a library's workspace, as oneDNN's LSTM has one: not all is written."""
    return tensor.dim() == 1 and tensor.nbytes == tensor.untyped_storage().nbytes()


def _device_used(module: nn.Module, args: tuple[Any, ...]) -> torch.device:
    """Return the device of the first parameter; without parameters, of the first argument."""
    for each in (*itertools.islice(module.parameters(), 1), *args):
        if isinstance(each, Tensor):
            return each.device
    return torch.device("cpu")


def _once(pack: Any, admission: Admission, inputs: list[Any]) -> Callable[[Tensor], object]:
    """Return ``pack``, a hook of the stash, as that of a region that is not recomputed in this call.

    The region's inputs are packed as if the region were recomputed, so that they are of the same class, and are
    held while it runs.
    """
    pack.steps_aside, pack.region_inputs = admission.stepped_aside, inputs
    return pack  # type: ignore[no-any-return]


def _is_of_region(pack: object) -> bool:
    """Whether a pack hook was pushed by a region."""
    return isinstance(pack, Call) or hasattr(pack, "region_inputs")


class _RegionHook(Hook):
    """A hook before or after the forward of a region; an object, as :class:`Hook` is.

    A region lives as long as its stash, or as a graph with tensors that the region discarded. After that the
    hook does nothing.
    """

    def __init__(self, region: Region, act: Callable[..., None]) -> None:
        super().__init__(act)
        self._region = weakref.ref(region)

    @untraced
    def __call__(self, *given: Any) -> None:
        """See ``register_forward_pre_hook`` and ``register_forward_hook``."""
        region = self._region()
        if region is not None:
            self._act(region, call_frame(), *given)


class Region:
    """A module whose saved tensors are recomputed in backward instead of being held.

    Args:
        module: the module, which gets two hooks.
        session: the stash's session.
        admission: the stash's admission.
        thread_state: return the state of this thread.
        enter: push a pack hook for a frame.
        leave: pop it.
        unpack: the stash's unpack hook.
        known: keys of the states that compared equal, in all regions of the stash.
        refused: keys of the states that did not, and why.
        verify: see :class:`~backstash.Stash`.
        is_found: whether the stash chose the module and the program did not name it. Such a module gets no
            hooks (see :class:`FoundModules`), and its replays do not rely on tensors that plain PyTorch does
            not save.
    """

    def __init__(
        self,
        module: nn.Module,
        session: Session,
        admission: Admission,
        thread_state: Callable[[], ThreadState],
        enter: Callable[..., None],
        leave: Callable[[FrameType | None], None],
        unpack: Callable[[Any], Tensor],
        known: set[int],
        refused: dict[int, str],
        *,
        verify: str,
        is_found: bool = False,
    ) -> None:
        self._verify, self.is_found = verify, is_found
        self.is_thorough = verify == "always"
        """Whether every replay is compared in all its bytes."""
        self._enter, self._leave = enter, leave
        self.session = session
        self.admission = admission
        self.unpack = unpack
        self.known = known
        self.refused = refused
        self.graph: CallGraph | None = None
        """The operations of the replay that was compared last, where a step was measured."""
        self.routes = Routes()
        self._samples = 0
        self._random = random.Random(next(_seeds))
        self.discards = 0
        """The number of tensors that the last forward discarded."""
        self._thread_state = thread_state
        self.handles: tuple[RemovableHandle, ...] = ()
        if not is_found:
            self.handles = (
                module.register_forward_pre_hook(_RegionHook(self, Region.begin), with_kwargs=True),
                module.register_forward_hook(
                    _RegionHook(self, Region.end), prepend=True, always_call=True
                ),
            )

    def count(self, reason: str, nbytes: int) -> None:
        """Count bytes that are not recomputed, with the reason."""
        with self.session.lock:
            self.admission.count_left(_REFUSED + reason, nbytes)

    def next_sampled(self) -> int:
        """Return which tensor of the next forward to compare on an accelerator; -1: none."""
        if self._verify == "first" or not self.discards:
            return -1
        return int(self._random.random() * self.discards * _SAMPLED_CALLS)

    def tiers_of(self, device: torch.device) -> DeviceTiers | None:
        """Return the tiers of an accelerator; ``None`` for the CPU, or if the stash does not manage it."""
        tiers = self.session.known_tiers.get(device)
        if tiers is None or isinstance(tiers, str) or tiers.device is None:
            return None
        return tiers

    def mark(self, tensor: Tensor, device: Device | None) -> tuple[int, Any] | None:
        """Return a mark of some bytes of a tensor on an accelerator, and which they are."""
        if device is None or device.is_capturing():
            return None
        self._samples += 1
        part = self._part(tensor, self._samples)
        mark = device.mark(part[0], device.stream(), *part[1:])
        return None if mark is None else (self._samples, mark)

    def _part(self, tensor: Tensor, number: int) -> tuple[torch.UntypedStorage, int, int]:
        low = int(tensor.storage_offset()) * tensor.element_size()
        if low % 4 or not tensor.is_contiguous():  # a mark begins at a multiple of 4
            tensor, low = dense(raw_alias(tensor)), 0
        storage, nbytes = tensor.untyped_storage(), tensor.nbytes
        if self.is_thorough:
            return storage, low, nbytes
        at = number % -(-nbytes // _SAMPLED_ON_DEVICE) * _SAMPLED_ON_DEVICE
        return storage, low + at, min(_SAMPLED_ON_DEVICE, nbytes - at)

    def compare(self, sampled: tuple[int, Any], value: Tensor, error: InplaceError) -> None:
        """Raise ``error`` if ``value`` differs from the tensor that was sampled; on an accelerator when the
        backward ends."""
        tiers = self.tiers_of(value.device)
        if tiers is None or tiers.device is None:
            if self.sample(value, sampled[0]) != sampled:
                raise error
            return
        check = tiers.device.compare(sampled[1], *self._part(value, sampled[0]))
        if check is None:
            raise torch.OutOfMemoryError("no memory to compare a recomputed tensor")
        tiers.packer.ask_at_the_end(error, check)

    def sample(self, tensor: Tensor, at: int = -1) -> tuple[int, object] | None:
        """Return a fingerprint of some bytes of a CPU tensor, and which they are. They change with each call
        unless ``at`` gives them; ``verify="always"`` covers all bytes."""
        if not tensor.is_cpu or self._verify == "first":
            return None
        if self._verify == "always":
            low, high = extent_bytes(tensor)
            if high - low == tensor.nbytes:
                return 0, fingerprint(tensor.untyped_storage(), low, tensor.nbytes)
            return 0, fingerprint(dense(raw_alias(tensor)).untyped_storage())
        if at < 0:
            self._samples += 1
            at = self._samples
        return at, fingerprint(tensor.untyped_storage(), *_window(tensor, at))

    def begin(
        self, frame: FrameType | None, module: nn.Module, args: Any, kwargs: dict[str, Any]
    ) -> None:
        leave_stale_tapes()
        thread_state = self._thread_state()
        if not torch.is_grad_enabled():
            return
        newest_scope(thread_state)  # removes scopes that an interrupt left behind
        if self.is_found and not thread_state.scopes:
            return  # outside of every context
        inside = any(_is_of_region(scope.hooks.pack_hook) for scope in thread_state.scopes)
        if inside or self.session.section.is_nested():
            return
        began = self.session.region_hook_begins()  # a step may begin here, which takes time
        running = running_modules(frame)
        planned = self._planned(running, _device_used(module, args))
        outer = thread_state.tape
        if outer is not None:
            outer.leave()
        reason = _reason_against()
        if reason:
            self.count(reason, 0)
            _put_back(thread_state, outer)
            return
        pack = self.admission.hook(thread_state)
        inputs: list[Tensor] = []
        packed: list[object] = []
        if planned is not None:
            leaves = tree_flatten((args, kwargs))[0]
            inputs = [
                each for each in leaves if type(each) is Tensor and storage_of(each) is not None
            ]
            saved_bytes = thread_state.large_bytes
            packed = [pack(each) for each in inputs]
            thread_state.leave_out(thread_state.large_bytes - saved_bytes)
            if thread_state.tape is not outer:  # packing the inputs began a tape
                outer = thread_state.tape
                if outer is not None:
                    outer.leave()
            if not planned.begin():
                if planned.left_bytes is not None:
                    pack = self.admission.hook_leaving(thread_state, planned.left_bytes)
                self._enter(frame, _once(pack, self.admission, packed))
                _put_back(thread_state, outer)
                return
        call = Call(self, running, thread_state, frame, packed, planned)
        self._enter(frame, call)
        if planned is not None:
            self.session.hook_took("region hook", began)
            planned.enter([storage_identity(each.untyped_storage()) for each in inputs], packed)
        call.begin(outer)

    def _planned(self, modules: list[nn.Module], device: torch.device) -> Planned | None:
        """Return the plan's instructions; ``None`` if no plan covers ``device``, so that everything is
        recomputed."""
        tiers = self.session.tiers_of(device)
        if isinstance(tiers, str):
            return None
        controller = self.session.planners.get(tiers.number)
        if controller is None:
            return None
        planned: Planned | None = controller.plan_forward(self, modules, tiers)
        return planned

    def end(self, frame: FrameType | None, module: nn.Module, args: Any, output: Any) -> None:
        """End the call after its forward: see ``register_forward_hook``."""
        leave_stale_tapes()
        scope = newest_scope(self._thread_state())
        if scope is None or scope.frame is not frame:
            return
        call = scope.hooks.pack_hook
        if _is_of_region(call):
            self._leave(frame)
        if isinstance(call, Call):
            call.end(in_order=output is not None)


_ending: set[FoundModules] = set()  # removed, but a forward of theirs may still run


class FoundModules:
    """Begin and end the forwards of modules that the program did not name.

    These modules get no hooks of their own: PyTorch runs a module with hooks differently (an encoder layer in
    evaluation), and pickles and scripts its hooks with it. Instead, two global module hooks check whether a
    module is one of these.

    Args:
        regions: the modules with their regions.
    """

    def __init__(self, regions: list[tuple[nn.Module, Region]]) -> None:
        self.regions = {id(module): (weakref.ref(module), region) for module, region in regions}
        """By the ``id`` of a module: the module and its region."""
        self._begins = register_module_forward_pre_hook(_FoundHook(self, FoundModules._begin))
        self._ends = register_module_forward_hook(
            _FoundHook(self, FoundModules._end), always_call=True
        )
        self._is_removed = False
        self._beginning: list[None] = []  # forwards that begin now, on any thread
        weakref.finalize(self, _remove_all, (self._begins, self._ends)).atexit = False

    def remove(self) -> None:
        """Begin no more forwards. Those that have begun still end."""
        self._is_removed = True
        self._begins.remove()
        _ending.add(self)
        self._end_if_idle()

    def _end_if_idle(self) -> None:
        sessions = {region.session for _, region in self.regions.values()}
        scopes = [s for session in sessions for each in session.thread_states for s in each.scopes]
        is_idle = not any(_is_of_region(each.hooks.pack_hook) for each in scopes)
        if is_idle and not self._beginning:
            self._ends.remove()
            _ending.discard(self)

    def region_of(self, module: nn.Module) -> Region | None:
        """The region of a module; ``None`` if it has none."""
        known = self.regions.get(id(module))
        return known[1] if known is not None and known[0]() is module else None

    def _begin(self, region: Region, module: nn.Module, args: Any) -> None:
        frame = call_frame()
        if frame is None:
            return
        # A new plan may remove this object before the forward has a scope.
        self._beginning.append(None)
        try:
            region.begin(frame, module, args, frame.f_locals.get("kwargs") or {})
        finally:
            self._beginning.pop()
            if self._is_removed:
                self._end_if_idle()

    def _end(self, region: Region, module: nn.Module, args: Any, output: Any) -> None:
        region.end(call_frame(), module, args, output)
        if self._is_removed:
            self._end_if_idle()


class _FoundHook(Hook):
    """One of the two global hooks. It does nothing once its stash is gone."""

    def __init__(self, found: FoundModules, act: Callable[..., None]) -> None:
        super().__init__(act)
        self._found = weakref.ref(found)

    @untraced
    def __call__(self, *given: Any) -> None:
        """See ``register_module_forward_hook``."""
        found = self._found()
        if found is not None and id(given[0]) in found.regions:
            region = found.region_of(given[0])
            if region is not None:
                self._act(found, region, *given)


def _remove_all(handles: Iterable[RemovableHandle]) -> None:
    for each in handles:
        each.remove()


def _put_back(thread_state: ThreadState, tape: Tape | None) -> None:
    """Make ``tape``, the context's, the thread's tape again."""
    thread_state.tape = tape
    if tape is not None and tape.is_recording:
        tape.enter()


def _reason_against() -> str:
    """Return why nothing can be recorded now, or ``""``."""
    pair = current_pair()
    if pair is not None and is_of_checkpoint(own_pack(pair)):
        return "it is inside torch.utils.checkpoint, which already recomputes it"
    if isinstance(innermost_mode(), Tape):
        return (
            "another stash recomputes it: call remove() on the handle that its recompute() returned"
        )
    if count_dispatch_modes() > 0:
        return (
            "a dispatch mode of the program's is active, which may change what operations compute"
        )
    return ""


def leave_stale_tapes() -> None:
    """Pop the tapes of forwards that ended without a hook, for example after an interrupt."""
    while isinstance(tape := innermost_mode(), Tape) and tape.frame is not None:
        if is_running(tape.frame):
            return
        tape.leave()
        tape.end()


leave_untraced(__name__)  # including what this module imports
