"""Decide which saved tensors may move, and find or create the block of each."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from .._runtime.weak import WeakTable
from .._saved.block import Block, Reduction
from .._saved.entry import Entry, WrapperEntry
from .._saved.thread_state import ThreadState
from .._saved.view import StridedRegion, raw_alias, reason_to_stay, snapshot
from .._text import shown
from .._tiers.device_tiers import DeviceTiers
from .._tiers.packing import Packer, Replayable
from .._torch.modules import is_buffer, is_parameter, module_path, running_modules
from .._torch.storages import storage_identity
from .._torch.tensors import is_wrapper_subclass, wait_for_collective, wrapped_leaf_of
from ..codecs import EXACT, Codec
from ..errors import StashClosedError, UsageError
from ..policy import Action, CodecChoice, Policy, SavedTensor
from .hooks_off import HooksOff
from .identity import MOST_PARTS, Identities, Match, is_separate
from .session import Session

if TYPE_CHECKING:
    from .controller import Controller

__all__ = ["NESTED", "PARAMETER", "SMALL", "Admission"]

SMALL = "smaller than min_bytes"
_TRANSFORM = (
    "torch.func.grad, vjp, jacrev or hessian ran: hooks are not allowed inside, so what it saved is "
    "not known"
)
FITS = "it fits within the budget"
SMALL_STEP = "its step saves too little for moving to free memory"
NESTED = "saved by a signal handler or a finalizer that interrupted another call of the stash"
_COPIED = "smaller than min_bytes: copied, so that its large storage is not held"
_NO_TIER = "no tier below: give disk="
_NO_HOST = "no tier below: give host="
_CAPTURED = "a graph of the accelerator is being captured"
_LEAST_DISCARDED = 16 << 10  # bytes of a storage; what is recorded of one takes about 1,000
_REVIEWED_AT_ONCE = 2  # waiting blocks that are checked when a new one is added
PARAMETER = "a parameter or another leaf that requires a gradient, or a view of one"


class TapeSource(Protocol):
    """Records operations if something may be recomputed: see :mod:`backstash._recompute.recorder`."""

    def saves(self, thread_state: ThreadState) -> Any:
        """Return the active tape before a tensor is saved, or ``None``."""

    def replay_of(
        self, tensor: Tensor, thread_state: ThreadState, *, unsaved: bool = True
    ) -> tuple[Replayable | None, str]:
        """Return how to recompute the storage of ``tensor``, or ``None`` and the reason against it."""

    def entered(self, thread_state: ThreadState, frame: FrameType | None) -> None:
        """Record that this thread enters a context of the stash. ``frame`` is the frame of a module's call."""

    def left(self, thread_state: ThreadState) -> None:
        """Record that this thread has left a context."""

    def saw(self, modules: Sequence[nn.Module], path: str, nbytes: int) -> None:
        """Record that the last of these modules saved a block in the first step."""

    def set_modules(self, *, on: bool) -> None:
        """Set whether the forwards of modules that the user did not name may be recomputed."""


class _Choice(NamedTuple):
    """What to do with a tensor that may move."""

    tier: str = ""
    """The tier that the policy names; ``""``: the budgets decide."""
    codec: Codec | None = None
    """The codec that tries to pack it."""
    replay: Replayable | None = None
    """The replay that recomputes it, in place of ``codec``."""


class _Ways:
    """See :class:`Ways`: of a block that the admission is adding."""

    def __init__(
        self,
        admission: Admission,
        block: Block,
        tensor: Tensor,
        thread_state: ThreadState,
        packer: Packer,
    ) -> None:
        self._admission, self._packer = admission, packer
        self._block, self._tensor, self._thread_state = block, tensor, thread_state

    @functools.cached_property
    def replay(self) -> Replayable | None:
        """How to recompute the block."""
        return self._admission.replay_of(self._tensor, self._thread_state)

    def can_recompute(self) -> bool:
        """See :class:`Ways`."""
        return self.replay is not None

    def prices(self) -> dict[str, Any]:
        """See :class:`Ways`."""
        self._block.reduction = Reduction(self._tensor.dtype)
        found: dict[str, Any] = {"pack": self._packer.price(self._block, EXACT)}
        if self.replay is not None:
            found["recompute"] = self._packer.price_of_replay(self._block, self.replay)
        return found


_DEFAULT = _Choice()
_MOST_LATEST_BYTES = 64 << 20  # of the newest blocks' memory
_MORE_LEFT = 8  # a call that is left may save 1/8 more than when it was measured


class Admission:
    """Returns what autograd holds in place of each saved tensor, and counts tensors that stay in memory.

    Args:
        session: the state of the stash.
        policy: called for each tensor; ``None``: the default.
        codec: the codec for what the default moves, or a function that returns it.
        recorder: records operations, if something may be recomputed.
    """

    def __init__(
        self,
        session: Session,
        *,
        policy: Policy | None,
        codec: CodecChoice | None = None,
        recorder: TapeSource | None = None,
    ) -> None:
        self._session = session
        self._policy = policy
        self._codec = codec
        self.recorder = recorder
        self.hooks_off = HooksOff(session)
        self.closed = False
        self.restart()

    def restart(self, stays: str = "") -> None:
        """Forget all blocks, at construction or in a forked child. ``stays`` is why nothing moves now."""
        self._stays = stays
        self._recomputes, self._pass, self._holds_latest = False, -1, False
        self.identities = Identities()
        self._wrappers = WeakTable[int, WrapperEntry]()
        self.left: dict[str, list[int]] = {}  # by reason: number of tensors, and their bytes
        self.eligible_bytes = self.deduplicated_bytes = self.moved_again_bytes = 0
        self.discarded_bytes = 0  # by regions
        # The storages, without small ones, that calls of a step hold unmanaged, by identity; and which step.
        self._left: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._left_in = -1

    def hook(self, thread_state: ThreadState) -> Callable[[Tensor], object]:
        """Return the pack hook of one thread.

        For small tensors it takes no lock and creates no object of the stash's. The same holds in a step that
        a plan keeps in memory, except for some tensors that show the planner how far the step is.
        """
        large = self._pack_untaped if self.recorder is None else self._pack_large
        if self._policy is not None:
            return lambda tensor: large(tensor, thread_state)
        session, event_log = self._session, self._session.event_log

        def pack(tensor: Tensor) -> object:
            if type(tensor) is Tensor:
                try:
                    storage = tensor.untyped_storage()
                    nbytes = storage.nbytes()
                except (NotImplementedError, RuntimeError):  # sparse tensors have no storage
                    return large(tensor, thread_state)
                if nbytes < session.min_bytes:
                    thread_state.small_saves += 1
                    thread_state.small_bytes += nbytes
                else:
                    thread_state.large_bytes += nbytes
                    which = storage_identity(storage) + nbytes
                    more = 0 if which in thread_state.fitting_storages else nbytes
                    if (
                        more > thread_state.allowed_bytes
                        or thread_state.allowed_until != session.uses
                        or thread_state.allowed_on != tensor.device
                        or session.reclaim_queue
                        or event_log.on
                    ):
                        timed = self._pack_timed if event_log.on else large
                        return timed(tensor, thread_state, storage)
                    if more:
                        thread_state.allowed_bytes -= more
                        thread_state.fitting_storages.append(which)
                    thread_state.fitting_saves += 1
                    thread_state.fitting_bytes += nbytes
                version = tensor._version
                return tensor.detach() if version == 0 else (tensor.detach(), version)
            return large(tensor, thread_state)

        return pack

    def _pack_timed(
        self, tensor: Tensor, thread_state: ThreadState, storage: torch.UntypedStorage
    ) -> object:
        """Pack a tensor while a step is measured, and report the time, which must not count as computing."""
        began = self._session.hook_begins(tensor.device)
        try:
            return self._pack_large(tensor, thread_state, storage)
        finally:
            self._session.hook_took("pack hook", began)

    def hook_leaving(
        self, thread_state: ThreadState, most_bytes: int
    ) -> Callable[[Tensor], object]:
        """Like :meth:`hook_exact`, but leave tensors in place, unmanaged, as long as a call holds about as much
        as it did when it was measured: ``most_bytes``, and an eighth more. From then on they are managed."""
        hook = self.hook_exact(thread_state)
        min_bytes = self._session.min_bytes
        left_bytes = most_bytes + max(most_bytes // _MORE_LEFT, min_bytes)
        seen: set[int] = set()
        step = self._session.predictor.next_pass
        if step != self._left_in:
            self._left_in, self._left = step, {}
        left = self._left

        def pack(tensor: Tensor) -> object:
            nonlocal left_bytes
            root = tensor if tensor._base is None else tensor._base
            if type(root) is nn.Parameter or (root.is_leaf and root.requires_grad):
                kept = None if self.closed else self.keep_parameter(tensor, thread_state)
                if kept is not None:
                    return kept
            if type(tensor) is not Tensor or left_bytes < 0:
                return hook(tensor)
            try:
                storage = tensor.untyped_storage()
            except (NotImplementedError, RuntimeError):  # sparse tensors have no storage
                return hook(tensor)
            which = storage_identity(storage)
            if which not in seen:
                seen.add(which)
                nbytes = storage.nbytes()
                left_bytes -= nbytes
                if left_bytes < 0:
                    return hook(tensor)
                if nbytes >= min_bytes:
                    left[which] = weakref.ref(storage)
            # As in _unmanaged(), without its call.
            thread_state.fitting_saves += 1
            thread_state.fitting_bytes += tensor.nbytes
            version = tensor._version
            return tensor.detach() if version == 0 else (tensor.detach(), version)

        return pack

    def _is_left(self, storage: torch.UntypedStorage) -> bool:
        """Whether a call of this step holds this storage unmanaged: to move it would free nothing."""
        known = self._left.get(storage_identity(storage))
        if known is None or known() is None or self._policy is not None or self._codec is not None:
            return False
        session = self._session
        if session.reclaim_queue:
            with session.section.lock, session.section:
                session.drain()  # that may end the step
        return self._left_in == session.predictor.next_pass

    def hook_packing(self, thread_state: ThreadState) -> Callable[[Tensor], object]:
        """Like :meth:`hook_exact`, but pack tensors by :data:`EXACT`, unless there is a policy."""
        return lambda tensor: self._pack_large(tensor, thread_state, packs=True, exact=True)

    def hook_exact(self, thread_state: ThreadState) -> Callable[[Tensor], object]:
        """Like :meth:`hook`, but use no lossy codec: a replay reads these tensors."""
        if self._policy is None and self._codec is None:
            return self.hook(thread_state)
        return lambda tensor: self._pack_large(tensor, thread_state, exact=True)

    def _pack_large(
        self,
        tensor: Tensor,
        thread_state: ThreadState,
        storage: torch.UntypedStorage | None = None,
        *,
        packs: bool = False,
        exact: bool = False,
    ) -> object:
        recorder = self.recorder
        tape = recorder.saves(thread_state) if recorder is not None else None
        if tape is None:
            return self._pack_untaped(tensor, thread_state, storage, packs=packs, exact=exact)
        with tape.aside():
            packed = self._pack_untaped(tensor, thread_state, storage, packs=packs, exact=exact)
            tape.note_packed(tensor, packed)
            return packed

    def _pack_untaped(
        self,
        tensor: Tensor,
        thread_state: ThreadState,
        storage: torch.UntypedStorage | None = None,
        *,
        packs: bool = False,
        exact: bool = False,
    ) -> object:
        thread_state.saves += 1
        if self.closed:
            raise StashClosedError("a closed stash was asked to hold a tensor")
        session = self._session
        section = session.section
        if section.is_nested():
            thread_state.nested_saves += 1
            thread_state.nested_bytes += _nbytes_of(tensor)
            return _in_place(tensor, NESTED)
        root = tensor if tensor._base is None else tensor._base
        if type(root) is nn.Parameter or (root.is_leaf and root.requires_grad):
            kept = self.keep_parameter(tensor, thread_state)
            if kept is not None:
                return kept
        if type(tensor) is not Tensor:
            return self._pack_other(tensor, thread_state)
        device = tensor.device
        tiers = session.known_tiers.get(device) or session.tiers_of(device)
        if isinstance(tiers, str):
            return self._stay(tensor, tiers)
        reason, driver, cannot_move = self._stays, tiers.device, ""
        if not reason and driver is not None and driver.is_capturing():
            reason = _CAPTURED
        elif not reason and tiers.tier is None and tiers.number not in session.planners:
            cannot_move = _no_tier(tiers)
            if not (packs or self._policy or self._codec):
                reason = cannot_move
        reason = reason_to_stay(tensor, storage) or reason
        if reason:
            return self._stay(tensor, reason)
        if storage is None:
            storage = tensor.untyped_storage()
        if self._left and self._is_left(storage):
            thread_state.saves -= 1  # it is counted as one that fits
            return _unmanaged(tensor, thread_state)
        modules = running_modules()
        reason, choice = self._choose(tensor, storage, modules, thread_state, tiers)
        if exact and choice.codec is not None and not choice.codec.exact:
            choice = _Choice(choice.tier)
        if packs and not reason and choice is _DEFAULT and self._policy is None:
            choice = _Choice(codec=EXACT)
        if not reason and choice.codec is None and choice.replay is None:
            reason = cannot_move  # else it need not move
        if reason:
            return self._stay(tensor, reason)
        with section.lock, section:
            if session.reclaim_queue:
                session.drain()
            if thread_state.waiting:
                session.settle(thread_state)
            return self._pack_block(tensor, storage, thread_state, modules, tiers, choice)

    def _choose(
        self,
        tensor: Tensor,
        storage: torch.UntypedStorage,
        modules: list[nn.Module],
        thread_state: ThreadState,
        tiers: DeviceTiers,
    ) -> tuple[str, _Choice]:
        """Return why the tensor stays (``""`` if it does not), and what else to do with it."""
        base = tensor._base
        is_leaf_or_view = tensor.is_leaf and tensor.requires_grad
        if base is not None and (base.is_leaf or type(base) is not Tensor):
            is_leaf_or_view = is_leaf_or_view or _is_view_of_parameter(tensor, base)
        described, codec, recomputes = None, self._codec, False
        if self._policy is not None or not (codec is None or isinstance(codec, Codec)):
            described = SavedTensor(
                shape=tuple(tensor.shape),
                dtype=tensor.dtype,
                device=tensor.device,
                nbytes=tensor.nbytes,
                is_parameter=is_leaf_or_view,
                is_leaf=tensor.is_leaf,
                module=module_path(modules),
                index=thread_state.saves + thread_state.small_saves - 1,
            )
        if self._policy is not None and described is not None:
            action = _answer_of(self._policy, described, "policy")
            if action is not None:
                if not isinstance(action, Action):
                    raise UsageError(
                        f"the policy {self._policy!r} returned {shown(action)}: allowed is an Action, or None"
                    )
                # A CPU tensor is already in host memory.
                moves = action.tier == "disk" or (
                    action.tier == "host" and tiers.device is not None
                )
                if action.tier == "recompute":
                    recomputes = True
                elif action.tier != "pack":
                    return "" if moves else "the policy said so", _Choice(action.tier, action.codec)
                else:
                    codec = action.packs_by
        if is_leaf_or_view:
            return PARAMETER, _DEFAULT
        if storage.nbytes() < self._session.min_bytes:
            return SMALL, _DEFAULT
        if modules and is_buffer(storage_identity(storage), modules):
            return "a module's buffer, or a view of one", _DEFAULT
        if recomputes:
            self._recomputes = True
            replay, reason = None, "recompute=False"
            if self.recorder is not None:
                replay, reason = self.recorder.replay_of(tensor, thread_state)
            if replay is not None:
                return "", _Choice(replay=replay)
            with self._session.section.lock:
                self.count_left(f"not recomputed: {reason}", tensor.nbytes)
        if codec is None:
            return "", _DEFAULT
        return "", _Choice(codec=codec if isinstance(codec, Codec) else _asked(codec, described))

    def settle(self, thread_state: ThreadState) -> None:
        """Admit the blocks that wait in ``thread_state``, if the operation that saved them has ended."""
        session = self._session
        with session.section.lock, session.section:
            session.drain()
            session.settle(thread_state)

    def keep_parameter(self, tensor: Tensor, thread_state: ThreadState) -> object | None:
        """Return what autograd holds in place of a parameter, another leaf that gets a gradient, or a view of
        one; ``None`` for another tensor, or if there is a policy, which is asked for each tensor. A wrong
        ``None`` only costs time."""
        base = tensor if tensor._base is None else tensor._base
        kind = type(base)
        if kind is not nn.Parameter and (
            kind is not Tensor or not base.is_leaf or not base.requires_grad
        ):
            return None
        if self._policy is not None or (tensor is not base and type(tensor) is not Tensor):
            return None
        thread_state.parameter_saves += 1
        thread_state.parameter_bytes += (
            tensor.nbytes if tensor.layout is torch.strided else _nbytes_of(tensor)
        )
        version = tensor._version
        kept = tensor if tensor.is_leaf else tensor.detach()
        return kept if version == 0 else (kept, version)

    def may_discard(self, tensor: Tensor) -> bool:
        """Return whether a plain tensor that PyTorch's operations computed may be freed.

        The result of an operation may be smaller than what moves, since nothing is written and read for it.
        Other tensors may not: of noise for a part of a batch, for example, not every byte may have been
        written.
        """
        least = self._session.min_bytes
        if tensor.requires_grad:
            least = min(least, _LEAST_DISCARDED)
        if tensor.untyped_storage().nbytes() < least:
            return False
        session, device = self._session, tensor.device
        return not isinstance(session.known_tiers.get(device) or session.tiers_of(device), str)

    def _pack_block(
        self,
        tensor: Tensor,
        storage: torch.UntypedStorage,
        thread_state: ThreadState,
        modules: list[nn.Module],
        tiers: DeviceTiers,
        choice: _Choice,
    ) -> Entry:
        session, device = self._session, tiers.device
        stream = device.used(tensor) if device is not None else None
        found = self.identities.find(
            tensor,
            storage,
            modules,
            device,
            session.predictor.passes,
            codec=choice.codec,
            # On an accelerator, only backward would find that a part was written and saved after the block has
            # left memory. What is packed or recomputed is one part.
            may_part=device is None and choice == _DEFAULT,
        )
        block, region = found.block, found.region
        if block is not None:
            self._save_again(block, found, tensor, thread_state, tiers)
        else:
            if thread_state.expecting:
                session.review(thread_state, _REVIEWED_AT_ONCE)
            if region is not None:
                block = self._copy(found, region, tensor, thread_state, modules, tiers, choice)
            else:
                alias = raw_alias(tensor)
                block = Block(found.version, alias, session.reclaim_queue, tiers.number)
                block.stream = stream
                self._admit(block, tensor, thread_state, modules, tiers, choice, found.gone)
                known = found.version.block = weakref.ref(block)
                if self._recomputes:
                    self._hold_latest(thread_state, tiers.packer, known, alias)
        block.entries += 1
        if region is not None:
            skipped = region.residue * region.itemsize
            entry = Entry(block, tensor, skipped, None if region.is_dense else region)
        else:
            entry = Entry(block, tensor, int(tensor.storage_offset()) * tensor.element_size())
            entry.source = found.source
        if not isinstance(found.check, bool):
            entry.check = found.check
        return entry

    def _save_again(
        self,
        block: Block,
        found: Match,
        tensor: Tensor,
        thread_state: ThreadState,
        tiers: DeviceTiers,
    ) -> None:
        """Count a save that shares ``block``, and admit the block if this was its last expected save."""
        self._session.saved_again(block)
        if thread_state.expecting:
            self._session.review(thread_state, 1)
        if found.region is not None:
            self.deduplicated_bytes += found.region.nbytes
            return
        self.deduplicated_bytes += tensor.nbytes
        if not block.waits or not found.version.has_all_saves(block.saves):
            return
        if block.thread_state is thread_state:
            complete = tensor.requires_grad
            tiers.evictor.admit(block, at_once=bool(block.tier), complete=complete)
        else:
            tiers.evictor.adopt(block)

    def _copy(
        self,
        found: Match,
        region: StridedRegion,
        tensor: Tensor,
        thread_state: ThreadState,
        modules: list[nn.Module],
        tiers: DeviceTiers,
        choice: _Choice,
    ) -> Block:
        """Return a block of the copied region that was found."""
        session, source, copy = self._session, found.source, found.copy
        assert copy is not None and source.regions is not None
        block = Block(found.version, copy, session.reclaim_queue, tiers.number)
        if tiers.device is not None:
            block.stream = tiers.device.stream()
        # A part of a storage whose other parts are saved separately counts like a whole storage.
        is_part = is_separate(tensor) and region.nbytes * MOST_PARTS >= session.min_bytes
        if region.nbytes >= session.min_bytes or choice.tier or is_part:
            self._admit(block, tensor, thread_state, modules, tiers, choice, found.gone)
        else:
            self._keep_copy(block, region.nbytes, thread_state, tiers, tensor.device)
        source.regions[region.key] = weakref.ref(block)
        source.copied_bytes += region.nbytes
        return block

    def _hold_latest(
        self, thread_state: ThreadState, packer: Packer, block: weakref.ref[Block], alias: Tensor
    ) -> None:
        """Hold the memory of a new block until the next four are saved, at most 64 MiB and one block. This
        happens in the first forward pass and, after a replay was requested that is not known to be exact, until
        the end of the next pass."""
        if self._pass != self._session.predictor.passes:
            self._pass = self._session.predictor.passes
            self._holds_latest, packer.saw_unknown = packer.saw_unknown, False
        self._holds_latest = self._holds_latest or packer.saw_unknown
        if self._holds_latest and thread_state.scopes:
            latest = thread_state.latest
            latest.append((block, alias))
            nbytes = 0
            for _, each in latest:
                nbytes += each.untyped_storage().nbytes()
            while nbytes > _MOST_LATEST_BYTES and len(latest) > 1:
                nbytes -= latest.popleft()[1].untyped_storage().nbytes()

    def _keep_copy(
        self,
        block: Block,
        nbytes: int,
        thread_state: ThreadState,
        tiers: DeviceTiers,
        device: torch.device,
    ) -> None:
        """Add a copy of a region that is too small to move."""
        session = self._session
        session.add(block, thread_state)
        self.count_left(_COPIED, nbytes)
        planner = session.planner_at_work(tiers) if session.planners else None
        if planner is not None:
            self._allow(planner, thread_state, device)

    def _admit(
        self,
        block: Block,
        tensor: Tensor,
        thread_state: ThreadState,
        modules: list[nn.Module],
        tiers: DeviceTiers,
        choice: _Choice,
        gone: Block | None,
    ) -> None:
        session = self._session
        block.thread_state = thread_state
        if modules:
            block.cleanup.module = module_path(modules)
        session.add(block, thread_state)
        if gone is None:
            root = id(modules[0]) if modules else 0
            session.save_counts.begin(block, session.predictor.passes, root)
            slices = block.storage_version.slices
            if slices is not None and slices.expected:
                block.saves.expected = slices.expected
            elif not block.saves.expected:
                block.saves.expected = block.storage_version.assumed_saves(tensor.nbytes)
        else:
            session.save_counts.instead(block, gone)
            self.moved_again_bytes += block.nbytes
        self.eligible_bytes += block.nbytes
        planner = session.planner_of(tiers, thread_state) if session.planners else None
        if planner is not None:
            if thread_state.granted_bytes >= 0:
                thread_state.may_leave(-1)
            if self.recorder is not None:
                if planner.counts_modules:
                    self.recorder.saw(modules, block.cleanup.module, block.nbytes)
                if planner.modules_wanted is not None:
                    self.set_modules(planner)
            if choice == _DEFAULT:
                choice = self._planned(block, tensor, thread_state, modules, tiers, planner)
                self._allow(planner, thread_state, tensor.device)
            else:
                planner.choose(block, tensor, modules, None)
        elif session.small_steps is not None and choice == _DEFAULT and self._codec is None:
            storage = tensor.untyped_storage()
            which = storage_identity(storage) + storage.nbytes()
            session.leave_alone(tiers, thread_state, which)
        tier, codec, replay = choice
        is_copy = block.storage_version.origin is not None
        block.tier = tier
        if replay is not None or codec is not None:
            _reduce_by(block, tensor, choice, tiers.packer)
        if block.saves.done < block.saves.expected and not is_copy:
            tiers.evictor.expect(block)
        else:
            # A tensor that requires grad was computed by an operation that has ended. Another may have been
            # allocated by the current operation, which still fills it without raising its version, such as
            # rrelu's noise.
            complete = tensor.requires_grad or is_copy
            tiers.evictor.admit(block, at_once=bool(block.tier), complete=complete)

    def set_modules(self, planner: Controller) -> None:
        """Begin or stop recording modules that the user did not name, as the planner requests."""
        wanted, planner.modules_wanted = planner.modules_wanted, None
        if self.recorder is not None and wanted is not None:
            self.recorder.set_modules(on=wanted)

    def _allow(
        self,
        planner: Controller,
        thread_state: ThreadState,
        device: torch.device,
    ) -> None:
        """After a save: set how many bytes may be saved before the planner is asked again."""
        session = self._session
        if self._codec is None:  # a codec is asked for each tensor
            nbytes = planner.may_leave_bytes(len(session.thread_states))
            thread_state.may_leave(nbytes, device, session.uses)
            if nbytes >= 0 and self._policy is None:
                self.hooks_off.consider(thread_state)

    def _planned(
        self,
        block: Block,
        tensor: Tensor,
        thread_state: ThreadState,
        modules: list[nn.Module],
        tiers: DeviceTiers,
        controller: Controller,
    ) -> _Choice:
        """Return the controller's choice."""
        ways = _Ways(self, block, tensor, thread_state, tiers.packer)
        tier = controller.choose(block, tensor, modules, ways)
        if tier == "pack":
            return _Choice(codec=EXACT)
        return _Choice(replay=ways.replay) if tier == "recompute" else _Choice(tier)

    def replay_of(self, tensor: Tensor, thread_state: ThreadState) -> Replayable | None:
        """Return how to recompute the storage of ``tensor``; ``None``: it cannot be."""
        self._recomputes = True
        if self.recorder is None:
            return None
        return self.recorder.replay_of(tensor, thread_state, unsaved=False)[0]

    def _pack_other(self, tensor: Tensor, thread_state: ThreadState) -> object:
        """Pack a parameter or another subclass of ``torch.Tensor``."""
        if isinstance(tensor, nn.Parameter):
            return self._stay(tensor, PARAMETER)
        name = type(tensor).__name__
        if not is_wrapper_subclass(tensor):
            return self._stay(
                tensor, f"a {name}, which does not list its inner tensors (__tensor_flatten__)"
            )
        tiers = self._session.tiers_of(tensor.device)
        if isinstance(tiers, str):
            return self._stay(tensor, tiers)
        reason = _no_tier(tiers)
        if reason:
            return self._stay(tensor, reason)
        if _is_parameter(tensor):
            return self._stay(tensor, PARAMETER)
        wait_for_collective(tensor)
        with self._session.section.lock:
            known = self._wrappers.get(id(tensor))
        if known is not None and known.is_of(tensor) and not known.is_rounded:
            return known
        # Inner tensors are copied, since in-place changes of them may not raise their own versions.
        entry = WrapperEntry(
            tensor, lambda part: self._pack_inner(tensor, part, thread_state, tiers)
        )
        with self._session.section.lock:
            self._wrappers[id(tensor)] = entry
        return entry

    def _pack_inner(
        self, wrapper: Tensor, part: Tensor, thread_state: ThreadState, tiers: DeviceTiers
    ) -> object:
        """Pack one of the inner tensors of ``wrapper``."""
        if wrapper.is_nested and not (part.is_floating_point() or part.is_complex()):
            # Two nested tensors have the same shape only if they share the tensor of offsets.
            return self._stay(part, "the offsets of a nested tensor")
        if type(part) is Tensor and part.device == wrapper.device and tiers.device is not None:
            tiers.device.used(part)
        if type(part) is not Tensor or reason_to_stay(part):
            return self.hook(thread_state)(part.detach().clone())
        return self.hook(thread_state)(snapshot(part))

    def stepped_aside(self) -> None:
        """Record that a transform of ``torch.func`` runs without the hooks. What it saves is unknown."""
        with self._session.section.lock:
            self.count_left(_TRANSFORM, 0)

    def _stay(self, tensor: Tensor, reason: str) -> object:
        """Keep ``tensor`` in memory, with its version, and count it under ``reason``."""
        with self._session.section.lock:
            self.count_left(reason, _nbytes_of(tensor))
        return _in_place(tensor, reason)

    def count_left(self, reason: str, nbytes: int) -> None:
        """Count a tensor that stays in memory for ``reason``. The caller holds the stash's lock."""
        left = self.left.setdefault(reason, [0, 0])
        left[0] += 1
        left[1] += nbytes


def _unmanaged(tensor: Tensor, thread_state: ThreadState) -> object:
    """Return what autograd holds for a tensor that stays because the plan keeps it, and count it."""
    thread_state.fitting_saves += 1
    thread_state.fitting_bytes += tensor.nbytes
    version = tensor._version
    return tensor.detach() if version == 0 else (tensor.detach(), version)


def _in_place(tensor: Tensor, reason: str) -> object:
    """Return what autograd holds for a tensor that stays: the tensor, its version, and perhaps its module."""
    kept = tensor
    if not tensor.is_leaf:  # the output of an operation would keep itself alive through its node
        alias = tensor.detach()
        if type(alias) is type(tensor):
            kept = alias
    version = tensor._version
    if reason is not PARAMETER:
        return kept, version, module_path(running_modules())
    return kept if version == 0 else (kept, version)


def _no_tier(tiers: DeviceTiers) -> str:
    if tiers.device is not None and tiers.device.is_capturing():
        return _CAPTURED
    if tiers.tier is not None:
        return ""
    return _NO_TIER if tiers.device is None else _NO_HOST


def _answer_of(asked: Callable[[SavedTensor], Any], saved: SavedTensor, what: str) -> Any:
    """Call a function of the program. A ``TypeError`` is converted, since PyTorch's operators (``x @ y``)
    would replace it with one about their operands, and its message would be lost."""
    try:
        return asked(saved)
    except TypeError as error:
        raise UsageError(f"the {what} {asked!r} raised TypeError: {error}") from error


def _asked(
    choose: Callable[[SavedTensor], Codec | None], saved: SavedTensor | None
) -> Codec | None:
    """Return the codec that the stash's ``codec`` function chooses for one tensor."""
    assert saved is not None
    codec = _answer_of(choose, saved, "codec")
    if codec is not None and not isinstance(codec, Codec):
        raise UsageError(
            f"the codec for {saved} is {shown(codec)}: allowed is a Codec, for example "
            "backstash.codecs.EXACT, or None"
        )
    return codec


def _is_parameter(tensor: Tensor) -> bool:
    """Return whether ``tensor`` is a leaf that gets a gradient, a parameter (even frozen), or a view of one."""
    if _gets_gradient(tensor):
        return True
    base = tensor._base
    return base is not None and _is_view_of_parameter(tensor, base)


def _is_view_of_parameter(tensor: Tensor, base: Tensor) -> bool:
    """Return whether ``tensor``, a view of ``base``, is a view of such a leaf or parameter."""
    if _gets_gradient(base):
        return True
    return base.is_leaf and tensor.requires_grad and wrapped_leaf_of(tensor, base) is not None


def _reduce_by(block: Block, tensor: Tensor, choice: _Choice, packer: Packer) -> None:
    """Have ``block`` packed, or freed and later recomputed, once it is complete."""
    codec, replay = choice.codec, choice.replay
    reduction = block.reduction = Reduction(tensor.dtype)
    if replay is not None:
        reduction.apply = functools.partial(packer.discard, replay)
        reduction.depth = replay.depth
    elif codec is not None:
        reduction.apply = functools.partial(packer.pack, codec)
        reduction.rounds = not codec.exact
        reduction.is_whole = block.is_copy or _fills_its_storage(tensor)


def _fills_its_storage(tensor: Tensor) -> bool:
    """Return whether every element of the storage has a value: ``tensor`` has all elements, or is a view of
    such a tensor that autograd made."""
    nbytes, base = tensor.untyped_storage().nbytes(), tensor._base
    whole = tensor if base is None or not base.requires_grad else base
    if whole.nbytes != nbytes or whole.dtype != tensor.dtype:
        return False
    return whole.is_contiguous() or StridedRegion(whole).nbytes == nbytes


def _gets_gradient(tensor: Tensor) -> bool:
    if tensor.is_leaf and tensor.requires_grad:
        return True
    return type(tensor) is not Tensor and is_parameter(tensor)


def _nbytes_of(tensor: Tensor) -> int:
    try:
        return int(tensor.nbytes)
    except (RuntimeError, NotImplementedError, TypeError, AttributeError):
        return 0
