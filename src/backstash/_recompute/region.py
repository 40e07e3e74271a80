"""Regions: modules whose saved tensors are discarded and recomputed in backward by replaying their operations.

A tape records the operations while the module runs (see ``tape``). Autograd's saved tensors that the tape can
replay are discarded; the stash treats the others as usual. What a replay needs is held as entries of the stash,
so it counts toward budgets.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from .._core.admission import Admission
from .._core.hook_scope import Hook, newest_scope
from .._core.session import Session
from .._saved.thread_state import ThreadState
from .._torch.checkpoints import is_of_checkpoint
from .._torch.dispatch import count_dispatch_modes, dual_level, innermost_mode
from .._torch.dynamo import leave_untraced, untraced
from .._torch.hook_stack import current_pair, own_pack
from .._torch.modules import call_frame, is_running, running_modules
from .._torch.storages import storage_identity, storage_of
from .._torch.trees import tree_flatten
from .call import Call, put_back
from .region_state import RegionState
from .tape import Tape

if TYPE_CHECKING:
    from .._budget.planned import Planned

__all__ = ["Region", "is_of_region"]

_MOST_LOOKED_AT = 64


def is_of_region(pack: object) -> bool:
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


class Region(RegionState):
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
            hooks (see ``found_modules``), and its replays do not rely on tensors that plain PyTorch does
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
        super().__init__(
            session, admission, unpack, known, refused, verify=verify, is_found=is_found
        )
        self._enter, self._leave = enter, leave
        self._thread_state = thread_state
        self.handles: tuple[RemovableHandle, ...] = ()
        if not is_found:
            self.handles = (
                module.register_forward_pre_hook(_RegionHook(self, Region.begin), with_kwargs=True),
                module.register_forward_hook(
                    _RegionHook(self, Region.end), prepend=True, always_call=True
                ),
            )

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
        inside = any(is_of_region(scope.hooks.pack_hook) for scope in thread_state.scopes)
        if inside or self.session.section.is_nested():
            return
        kind: object = None
        if self.saves_are_small and not self.session.planners:
            kind = bool(thread_state.scopes), *_kind_of(module, args, kwargs)
            if self.is_at_rest(kind):
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
            put_back(thread_state, outer)
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
                put_back(thread_state, outer)
                return
        call = Call(self, running, thread_state, frame, packed, planned)
        call.kind = kind
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
        if isinstance(call, Call):
            call.leave_tape()  # what is packed now would take it for a mode of the program's
        if is_of_region(call):
            self._leave(frame)
        if isinstance(call, Call):
            call.end(in_order=output is not None)


def _kind_of(module: nn.Module, args: Any, kwargs: Any) -> list[object]:
    """Return what usually decides how much a forward saves: equal for forwards that save as much.

    Of long or deep inputs only the first are looked at."""
    kind: list[object] = [module.training]
    todo = [args, kwargs.values()]
    for some in itertools.islice(todo, _MOST_LOOKED_AT):
        for each in itertools.islice(some, _MOST_LOOKED_AT):
            if type(each) is Tensor and not each.is_nested:
                kind += each.shape, each.dtype, each.requires_grad
            elif type(each) in (tuple, list):
                todo.append(each)
            elif type(each) is dict:
                todo.append(each.values())
            else:
                kind.append(each if type(each) in (int, bool, str) else type(each))
    kind += [each.requires_grad for each in module.parameters()]
    return kind


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
    if dual_level() >= 0:
        return "forward-mode AD computes some tangents differently while operations are recorded"
    return ""


def leave_stale_tapes() -> None:
    """Pop the tapes of forwards that ended without a hook, for example after an interrupt."""
    while isinstance(tape := innermost_mode(), Tape) and tape.frame is not None:
        if is_running(tape.frame):
            return
        tape.leave()
        tape.end()


leave_untraced(__name__)  # including what this module imports
