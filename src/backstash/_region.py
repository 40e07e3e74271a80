"""Regions: what a whole module's forward saves is let go, and its forward is run again in backward.

``torch.utils.checkpoint`` does this with what a function is given. Here the inputs are the stash's entries, and
what the second run saves is the stash's again: budgets hold for it, and it can be unpacked any number of times.
Nothing is taken on faith. The bytes of each tensor that is let go have a fingerprint, and what the second run
makes must have the same one, so a weight, a buffer or a global that was changed since raises. The first forward
of each class (the same training modes, inputs, autocast and settings) is run again at once and compared before
anything is let go; what cannot be run again alike stays, with the reason.

The idea of numbering the saves of a run, and of leaving the second one after the last that is wanted, is that
of ``torch.utils.checkpoint(use_reentrant=False)``.
"""

from __future__ import annotations

import itertools
import os
import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from ._admission import Admission
from ._device.base import Device
from ._device.fingerprint import fingerprint
from ._hook_scope import Hook, newest_scope
from ._plan.regions import ONCE
from ._planned_region import TOLD_RATE, Once, Planned
from ._saved.access_order import ForwardPass
from ._saved.entry import rerun_otherwise
from ._saved.held import Held, kind_of
from ._saved.thread_state import ThreadState
from ._saved.view import dense, reason_to_stay
from ._session import Session
from ._text import clean
from ._torch.checkpoints import is_of_checkpoint
from ._torch.dispatch import (
    count_dispatch_modes,
    count_function_modes,
    without_dispatch_modes,
    without_function_modes,
)
from ._torch.dynamo import leave_untraced, untraced
from ._torch.engine import sequence_number, task_or_none
from ._torch.hook_stack import current_pair, own_pack
from ._torch.module_state import is_used_up, unchanged
from ._torch.modules import call_frame, module_path, running_modules
from ._torch.rerun import (
    Conditions,
    NoCollectives,
    are_weights_replaced,
    foreign_hook,
    signature_of,
)
from ._torch.storages import storage_identity
from ._torch.trees import tree_flatten, tree_unflatten
from ._torch.versions import version_of
from .errors import InplaceError, StashError

__all__ = ["Held", "Region"]

_REFUSED = "not recomputed: "
_CHANGEABLE = (
    "it is given an object that its forward may change, such as a cache (transformers makes none with "
    "use_cache=False)"
)
_UNCHANGING = (Tensor, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


class _StopError(BaseException):
    """Leaves a second run; no ``except Exception`` of the module's stops it."""


class _Fingerprints:
    """Of what one run saves, each storage once. A tensor without a gradient function may yet be filled by the
    operation that saves it (see ``thread_state``), so its bytes are looked at when a later one saves.

    Args:
        session: of the stash.
        use: called with each one, its tensor, its mark (``None``: it has none, or was changed since) and its
            version when it was saved.
        planned: is told what fingerprints take.
    """

    def __init__(
        self,
        session: Session,
        use: Callable[[Held, Tensor, Any, int], None],
        planned: Planned | None = None,
    ) -> None:
        self._session = session
        self._use = use
        self._planned = planned
        self._known: dict[tuple[int, int], tuple[weakref.ref[Tensor], int, Any]] = {}
        self._waiting: list[tuple[Held, Tensor, int]] = []
        self._operation = 0  # the graph's next sequence number when the last of them was saved

    def add(self, held: Held, tensor: Tensor) -> None:
        """One more."""
        if tensor.requires_grad:
            self._use(held, tensor, self._mark(tensor), tensor._version)
        else:
            self._waiting.append((held, tensor, tensor._version))
            self._operation = sequence_number()

    @property
    def is_waiting(self) -> bool:
        """Whether one may yet be filled."""
        return bool(self._waiting)

    def finish(self, *, ended: bool = False) -> None:
        """Look at those whose operation has ended; ``ended``: all have."""
        if not self._waiting or (not ended and self._operation == sequence_number()):
            return
        waiting, self._waiting = self._waiting, []
        for held, tensor, version in waiting:
            mark = self._mark(tensor) if tensor._version == version else None
            self._use(held, tensor, mark, version)

    def _mark(self, tensor: Tensor) -> Any:
        storage, base = tensor.untyped_storage(), tensor._base
        # Those that share it under version counters of their own (the gates of an LSTM's cell) change apart.
        is_part = base is None and tensor.nbytes < storage.nbytes()
        identity = storage_identity(storage), int(tensor.storage_offset()) if is_part else -1
        owner = tensor if base is None else base
        known = self._known.get(identity)
        if known is not None and known[0]() is owner and known[1] == tensor._version:
            return known[2]
        device, planned = _device_of(self._session, tensor), self._planned
        if device is not None:
            device.prepare_marks()
        paused = planned.pause() if planned is not None else None
        with torch.no_grad():
            if device is not None:
                mark = device.mark(storage, device.stream())
            elif is_part:
                mark = fingerprint(dense(tensor).untyped_storage())
            else:
                mark = fingerprint(storage)
        if planned is not None:
            planned.told(paused)
        self._known[identity] = weakref.ref(owner), tensor._version, mark
        return mark


def _device_used(module: nn.Module, args: tuple[Any, ...]) -> torch.device:
    """That of its first parameter, or where it has none, of its first argument."""
    for each in (*itertools.islice(module.parameters(), 1), *args):
        if isinstance(each, Tensor):
            return each.device
    return torch.device("cpu")


def _device_of(session: Session, tensor: Tensor) -> Device | None:
    """The accelerator of ``tensor``; ``None`` for the CPU."""
    tiers = session.tiers_of(tensor.device)
    return None if isinstance(tiers, str) else tiers.device


class Run:
    """One forward of a region; the pack hook while it runs, and what its second run needs.

    Args:
        region: whose forward it is.
        module: the region's, or a replica of it.
        args: it was called with.
        kwargs: likewise.
        conditions: that were in force when it began.
        key: of its class.
        outer: the modules around it, outermost first.
        inputs: what each leaf of its arguments is packed to, see :func:`_packed`.
        planned: what a plan wants of it; ``None``: there is none.
    """

    def __init__(
        self,
        region: Region,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        conditions: Conditions,
        key: tuple[Any, ...],
        outer: list[nn.Module],
        thread_state: ThreadState,
        inputs: list[tuple[Any, bool | None]],
        planned: Planned | None = None,
    ) -> None:
        self.region = region
        self.module = module
        self.outer = outer
        self.key = key
        self.is_known = key in region.classes
        self.conditions = conditions
        self._pack = region.admission.hook(thread_state)
        self._task = task_or_none()
        self._thread_state = thread_state
        self._count = 0
        self._held: list[weakref.ref[Held]] = []
        self.let_go_bytes = 0
        leaves, self._structure = tree_flatten((args, kwargs))
        self.inputs = {
            storage_identity(each.untyped_storage()) for each in leaves if type(each) is Tensor
        }
        # While the class is not known: the inputs, to run again with, and their versions.
        self._given = [] if self.is_known else [*leaves]
        self._watched = [] if self.is_known else [*leaves, *module.parameters()]
        self._versions = [version_of(each) for each in self._watched]
        self._leaves = inputs
        self._planned = planned
        # Whether what it saves is held, since it is only recorded; and whether it runs again, to be compared.
        self._keeps = planned is not None and planned.forward is not None
        self._is_tried = not self.is_known and (planned is None or planned.may_try)
        self._fingerprints: _Fingerprints | None = _Fingerprints(
            region.session, self._let_go, planned
        )

    # The first run.

    def steps_aside(self) -> None:
        """A transform of ``torch.func`` runs without hooks."""
        self.region.admission.stepped_aside()

    def __call__(self, tensor: Tensor) -> object:
        """The pack hook while the module runs."""
        planned = self._planned
        if planned is None or planned.forward is None:
            return self._save(tensor)
        began = planned.hook_begins()
        try:
            return self._save(tensor)
        finally:
            planned.hook_took(began)

    def _save(self, tensor: Tensor) -> object:
        fingerprints = self._fingerprints
        assert fingerprints is not None
        fingerprints.finish()
        number, self._count = self._count, self._count + 1
        planned = self._planned
        if not self._may_go(tensor) or (planned is not None and planned.stays_at(number)):
            return self._pack(tensor)
        if task_or_none() != self._task:
            # A backward in the middle of the forward, whose graph is kept, saves what was handed out to it.
            return self._pack(tensor)
        held = Held(self, number, tensor)
        if self._keeps and planned is not None:
            held.packed = planned.pack(number, tensor, self._pack)
        elif not self.is_known:
            held.packed = self._hold_meanwhile(tensor)
        if self._is_tried or not self._keeps:
            self._held.append(weakref.ref(held))
            fingerprints.add(held, tensor)
        return held

    def _hold_meanwhile(self, tensor: Tensor) -> object:
        """Hold what may not have to be held; no plan counts it."""
        thread_state = self._thread_state
        thread_state.is_tried = True
        try:
            return self._pack(tensor)
        finally:
            thread_state.is_tried = False

    def _may_go(self, tensor: Tensor) -> bool:
        if type(tensor) is not Tensor or reason_to_stay(tensor):
            return False
        storage = tensor.untyped_storage()
        if storage_identity(storage) in self.inputs:  # the entry of the input holds it
            return False
        if tensor.dtype is torch.uint8 and tensor.dim() == 1 and tensor.nbytes == storage.nbytes():
            return False  # a library's workspace (oneDNN's LSTM), of which nobody writes every byte
        return self.region.admission.may_go(tensor)

    def _let_go(self, held: Held, tensor: Tensor, mark: Any, version: int) -> None:
        if mark is None and held.packed is None:
            is_same = tensor._version == version
            held.packed = self._pack(tensor) if is_same else (tensor.detach(), version)
        held.told = mark
        if mark is not None and (not self._keeps or self._is_tried):
            self.let_go_bytes += tensor.untyped_storage().nbytes()

    def end(self, *, in_order: bool) -> None:
        """The forward has ended; ``in_order``: without an error."""
        # What has been refers to this run: it would outlive its graph, until the collector comes.
        fingerprints, self._fingerprints = self._fingerprints, None
        assert fingerprints is not None
        fingerprints.finish(ended=True)
        region, given, self._given = self.region, self._given, []
        watched, self._watched = self._watched, []
        planned = self._planned
        if planned is not None:
            planned.leave(in_order=in_order and self.is_known)
        if self._is_tried:
            reason = "its forward did not end" if not in_order else ""
            if [version_of(each) for each in watched] != self._versions:
                reason = "its forward changes its input in place, or a parameter"
            held = [
                each for ref in self._held if (each := ref()) is not None and each.told is not None
            ]
            if not reason and held:
                paused = planned.pause() if planned is not None else None
                reason = self._compared(held, given)
                if planned is not None:
                    region.again_seconds = planned.end_trial(paused)
            if reason:
                region.refuse(self, reason if in_order else "", self.let_go_bytes)
                return
            region.classes.add(self.key)
            if planned is not None:
                planned.was_alike(self.let_go_bytes)
            if self._keeps:
                return
            for each in held:
                each.packed = None
        if self._keeps:
            return
        region.admission.let_go_bytes += self.let_go_bytes

    def _compared(self, held: list[Held], given: list[Any]) -> str:
        """Why a second run is not known to be alike; ``""``: it is."""
        marks = _Marks(self.region.session)

        def compare(each: Held, tensor: Tensor, mark: Any) -> object:
            return _noted(tensor) if marks.are_alike(each, tensor, mark) else None

        try:
            refused = self._again(held, compare, self._thread_state, given)
        except InplaceError:
            raise  # something is not what plain PyTorch's is
        except Exception as error:  # the module's own
            return f"{self.name}'s forward cannot be run twice: {type(error).__name__}: {error}"
        if refused:
            return refused
        why = marks.difference()
        return f"{self.name}'s forward, run twice, {why}" if why else ""

    # The second one.

    @property
    def name(self) -> str:
        """The module's path."""
        return clean(module_path([*self.outer, self.module]))

    def value(self, held: Held, thread_state: ThreadState) -> Any:
        """What ``held`` was packed to; the module's forward runs again where it was let go."""
        lock = self.region.lock()
        if not lock.acquire(blocking=not self.region.session.section.is_nested()):
            raise StashError(
                f"{self.name} runs again in another thread, and a signal's handler or a finalizer that came in "
                "the middle of the stash cannot wait for it: go backward outside of it"
            )
        try:
            # None once the forward has ended: else this is a backward within it.
            if held.packed is None and self._fingerprints is not None:
                self._fingerprints.finish(ended=True)
            if held.packed is None:
                self._make_again(thread_state)
        finally:
            lock.release()
        return held.packed

    def _make_again(self, thread_state: ThreadState) -> None:
        region, unpack = self.region, self.region.unpack
        pack = region.admission.hook(thread_state)
        wanted = [each for ref in self._held if (each := ref()) is not None and each.packed is None]
        marks = _Marks(region.session)

        def take(each: Held, tensor: Tensor, mark: Any) -> object:
            if not marks.are_alike(each, tensor, mark):
                return None
            packed = _noted(tensor) if region.admission.closed else pack(tensor)
            made.append((each, packed))
            return packed

        made: list[tuple[Held, Any]] = []
        before = thread_state.outer, thread_state.apart
        thread_state.outer, thread_state.apart = self.outer, ForwardPass(None)
        try:
            given = [
                packed if requires is None else unpack(packed) for packed, requires in self._leaves
            ]
            refused = self._again(wanted, take, thread_state, given)
        finally:
            thread_state.outer, thread_state.apart = before
        if refused:
            raise rerun_otherwise(self.name, refused)
        if why := marks.difference():
            raise rerun_otherwise(self.name, why)
        for each, packed in made:
            each.packed = packed

    def _again(
        self,
        wanted: list[Held],
        use: Callable[[Held, Tensor, Any], object],
        thread_state: ThreadState,
        given: list[Any],
    ) -> str:
        """Run the forward again with the leaves of its arguments ``given`` until ``use`` has had all of
        ``wanted``; why not all were had, or ``""``.

        ``use`` returns what the second run's own graph is to hold of the tensor; ``None``: it has other bytes.
        """
        region = self.region
        by_number = {each.number: each for each in wanted}
        last = max(by_number)
        numbers = itertools.count()
        refused: list[str] = []

        def stop(reason: str = "") -> None:
            refused.extend([reason] if reason else [])
            raise _StopError

        used: dict[int, object] = {}

        def had(each: Held, tensor: Tensor, mark: Any, version: int) -> None:
            packed = use(each, tensor, mark) if mark is not None else None
            if packed is None:
                stop(f"{self.name}'s forward, run twice, gives other bits")
            used[each.number] = packed
            del by_number[each.number]

        fingerprints = _Fingerprints(region.session, had)

        def pack(tensor: Tensor) -> object:
            fingerprints.finish()
            number = next(numbers)
            if not by_number:
                stop()
            each = by_number.get(number)
            if each is not None:
                if type(tensor) is not Tensor or kind_of(tensor) != each.kind:
                    stop(f"{self.name}'s forward, run twice, saves other tensors")
                fingerprints.add(each, tensor)
                if number == last and not fingerprints.is_waiting:
                    stop()
            # Its memory is held by no more than what was made of it, which may leave before the run ends.
            packed = used.get(number)
            used.clear()
            return _noted(tensor) if packed is None else packed

        values = [
            each if requires is None else each.detach().requires_grad_(requires)
            for each, (_, requires) in zip(given, self._leaves, strict=True)
        ]
        args, kwargs = tree_unflatten(values, self._structure)
        with ExitStack() as stack:
            # Modes around backward are not forward's: those of dispatch, there were none then.
            stack.enter_context(without_function_modes())
            stack.enter_context(without_dispatch_modes())
            changes = stack.enter_context(unchanged(self.module, deep=not self.is_known))
            if changes.text:  # an iterator
                return f"{self.name}'s forward may change what is in {changes.text}"
            stack.enter_context(self.conditions.again())
            if not self.is_known and torch.distributed.is_available():
                if torch.distributed.is_initialized():
                    told = f"{self.name} communicates with other processes"
                    stack.enter_context(NoCollectives(lambda: stop(told)))
            stack.callback(setattr, thread_state, "runs_again", thread_state.runs_again)
            stack.callback(thread_state.may_leave, -1)  # what it may leave as it is, is its own
            thread_state.may_leave(-1)
            thread_state.runs_again = True
            stack.enter_context(saved_tensors_hooks(pack, region.unpack))
            try:
                self.module(*args, **kwargs)
                fingerprints.finish(ended=True)
            except _StopError:
                pass
        if changes.lost:
            raise InplaceError(
                f"{self.name}'s forward changes what is in {changes.lost}, and a second run of it has changed "
                "it once more, which cannot be put back. Do not recompute() this module"
            )
        if changes.text:
            return f"{self.name}'s forward changes what is in {changes.text}"
        if not refused and by_number:
            return f"{self.name}'s forward, run twice, saves fewer tensors"
        return refused[0] if refused else ""


def _is_sharded(module: nn.Module) -> bool:
    fsdp = sys.modules.get("torch.distributed.fsdp")  # not imported: nothing is sharded
    kind = getattr(fsdp, "FSDPModule", None)
    return kind is not None and any(isinstance(part, kind) for part in module.modules())


def _packed(leaves: list[Any], pack: Callable[[Tensor], object]) -> list[tuple[Any, bool | None]]:
    """Of each leaf: what it is packed to, and whether it requires a gradient; or the leaf."""
    return [
        (pack(each), each.requires_grad) if _is_packed(each) else (each, None) for each in leaves
    ]


def _is_packed(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and not isinstance(leaf, nn.Parameter)


class _Marks:
    """Those of the two runs: compared at once on the CPU, and together on each accelerator.

    Args:
        session: of the stash.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._pairs: dict[Device, list[tuple[Any, Any]]] = {}

    def are_alike(self, held: Held, tensor: Tensor, mark: Any) -> bool:
        """Whether ``tensor``, with this mark, has the bytes that ``held`` had; of an accelerator's,
        :meth:`difference` tells it."""
        device = _device_of(self._session, tensor)
        if device is None:
            return bool(held.told == mark)
        self._pairs.setdefault(device, []).append((held.told, mark))
        return True

    def difference(self) -> str:
        """In what the second run differs on an accelerator, for which the host waits once; ``""``: in nothing.

        Backward does not go on before: an optimizer in a hook, or another process, may use what it makes before
        it ends.
        """
        with without_function_modes(), without_dispatch_modes(), torch.no_grad():
            for device, pairs in self._pairs.items():
                check = device.compare_marks(pairs)
                if check is None:
                    return f"cannot be compared: {device.name} has no memory or no means for it"
                if check.differs():
                    return "gives other bits"
        return ""


def _noted(tensor: Tensor) -> tuple[Tensor, int]:
    """As it is, with its version."""
    return (tensor if tensor.is_leaf else tensor.detach()), tensor._version


class _RegionHook(Hook):
    """Before or after the forward of a region; an object, as :class:`Hook` is.

    The region lives as long as its stash, or a graph that it has to run again for. Afterwards the hook does
    nothing.
    """

    def __init__(self, region: Region, act: Callable[..., None]) -> None:
        super().__init__(act)
        self._region = weakref.ref(region)

    @property
    def region(self) -> Region | None:
        """Whose it is; ``None``: it is no more."""
        return self._region()

    @untraced
    def __call__(self, *given: Any) -> None:
        """See ``register_forward_pre_hook`` and ``register_forward_hook``."""
        region = self._region()
        if region is not None:
            self._act(region, call_frame(), *given)

    def __deepcopy__(self, memo: dict[int, Any]) -> _RegionHook:
        """A copied module shares the region."""
        return self

    def __reduce__(self) -> Any:
        raise TypeError(
            "a module that a stash recomputes cannot be pickled: remove() what recompute() returned first"
        )


class Region:
    """A module whose forward is run again in backward instead of what it saves being held.

    Args:
        module: that gets two hooks.
        session: of the stash.
        admission: of the stash.
        thread_state: gives that of this thread.
        enter: pushes a pack hook for a frame.
        leave: pops it.
        unpack: of the stash.
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
    ) -> None:
        self._enter, self._leave = enter, leave
        self.session = session
        self.admission = admission
        self.unpack = unpack
        self.classes: set[tuple[Any, ...]] = set()
        """Those whose second run was alike."""
        self.told_rate = TOLD_RATE
        """Seconds that noting a byte takes."""
        self.again_seconds = 0.0
        """What the second run took that was compared last, where a step was measured."""
        self._refused: dict[tuple[Any, ...], str] = {}
        self._thread_state = thread_state
        self._lock = os.getpid(), threading.RLock()
        self.handles = (
            module.register_forward_pre_hook(_RegionHook(self, Region._begin), with_kwargs=True),
            module.register_forward_hook(
                _RegionHook(self, Region._end), prepend=True, always_call=True
            ),
        )

    def lock(self) -> Any:
        """Held while the module runs again: its buffers are put back then. Another process has another one."""
        if self._lock[0] != os.getpid():
            self._lock = os.getpid(), threading.RLock()
        return self._lock[1]

    def refuse(self, run: Run, reason: str, nbytes: int) -> None:
        """From now on, what the forward of such a class saves is treated as without a region."""
        if reason:
            self._refused[run.key] = reason
            self._count(reason, nbytes)

    def _count(self, reason: str, nbytes: int) -> None:
        with self.session.lock:
            self.admission.count_left(_REFUSED + reason, nbytes)

    def _begin(
        self, frame: FrameType | None, module: nn.Module, args: Any, kwargs: dict[str, Any]
    ) -> None:
        thread_state = self._thread_state()
        if not torch.is_grad_enabled() or thread_state.runs_again:
            return
        newest_scope(thread_state)  # clears those that an interrupt has left
        inside = any(isinstance(scope.hooks.pack_hook, Run | Once) for scope in thread_state.scopes)
        if inside or self.session.section.is_nested():
            return
        began = self.session.region_hook_begins()  # a step may begin here, which takes its time
        running = running_modules(frame)
        planned = Planned.of(self, [*thread_state.outer, *running], _device_used(module, args))
        reason = self._reason_against(module)
        if reason:
            self._count(reason, 0)
            return
        leaves = tree_flatten((args, kwargs))[0]
        if not all(isinstance(each, _UNCHANGING) for each in leaves):
            self._count(_CHANGEABLE, 0)
            return
        tensors = [each for each in leaves if isinstance(each, Tensor)]
        if any(each.layout is not torch.strided for each in tensors):
            self._count("it is given a sparse tensor", 0)
            return
        weights = [*module.parameters()]
        if not all(isinstance(each, nn.Parameter) for each in weights) or are_weights_replaced():
            self._count("its weights are replaced for this call, as functional_call does", 0)
            return
        devices = {each.device for each in (*tensors, *weights[:1])}
        others = sorted((each for each in devices if each.type not in ("cpu", "meta")), key=str)
        for device in others:
            tiers = self.session.tiers_of(device)
            if isinstance(tiers, str) or tiers.device is None or tiers.device.is_capturing():
                self._count(f"{device} cannot be asked now", 0)
                return
        shape = (
            signature_of(module),
            count_function_modes(),
            tuple((each.dtype, each.dim(), each.requires_grad, type(each)) for each in tensors),
        )
        conditions = Conditions(others)
        key = (*shape, *conditions.key)
        refused = self._refused.get(key)
        if refused is not None:
            self._count(refused, 0)
            return
        outer = [*thread_state.outer, *running[:-1]]
        pack = self.admission.hook(thread_state)
        inputs = _packed(leaves, pack)
        if planned is not None:
            if len(devices) > 1:
                planned = None  # each of them has a plan of its own
            elif planned.begin() == ONCE:
                self._enter(frame, Once(pack, self.admission, inputs))
                return
        run = Run(self, module, args, kwargs, conditions, key, outer, thread_state, inputs, planned)
        self._enter(frame, run)
        if planned is not None:
            self.session.hook_took("region hook", began)
            planned.enter(run.inputs, (packed for packed, _ in inputs))

    def _reason_against(self, module: nn.Module) -> str:
        pair = current_pair()
        if pair is not None and is_of_checkpoint(own_pack(pair)):
            return "torch.utils.checkpoint is around it, and runs it again itself"
        hook = foreign_hook(module, self._is_own)
        if hook and not foreign_hook(
            module, lambda each: isinstance(each, _RegionHook) or self._is_own(each)
        ):
            return (
                "another stash recomputes it, or a module in it: remove() what that one's recompute() "
                "returned"
            )
        if hook and _is_sharded(module):
            return (
                "fully_shard has hooks on the module, or on one in it, that gather weights: recompute the "
                "modules inside the sharded ones"
            )
        if hook:
            return f"the module has another {hook} hook, which a second run would call again"
        held = (each for part in module.modules() for each in vars(part).values())
        if any(map(is_used_up, held)):
            return "the module has an iterator or a random number generator of its own"
        if count_dispatch_modes() > 0:
            return "a dispatch mode of the program's is active, which would see what is noted"
        return ""

    def _is_own(self, hook: Any) -> bool:
        """Whether it is a stash's, and not that of another stash which recomputes the module, too."""
        if not isinstance(hook, _RegionHook):
            return isinstance(hook, Hook)
        region = hook.region
        return region is None or region.session is self.session

    def _end(self, frame: FrameType | None, module: nn.Module, args: Any, output: Any) -> None:
        thread_state = self._thread_state()
        scope = newest_scope(thread_state)
        if scope is None or scope.frame is not frame:
            return
        run = scope.hooks.pack_hook
        if isinstance(run, Run | Once):
            self._leave(frame)
        if isinstance(run, Run):
            run.end(in_order=output is not None)


leave_untraced(__name__)  # with what was imported by it
