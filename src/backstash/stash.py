"""The stash: connects autograd's saved-tensor hooks with policy, budgets and tiers.

:meth:`Stash.pack` admits a tensor (large enough, not a parameter, exactly movable) and finds its storage's
block. The block is placed, and evicted to a lower tier when the budget requires it. :meth:`Stash.unpack` checks
the version while the bytes are in place, and loads them otherwise. An entry lives as long as autograd refers to
it. Its death only appends to a queue, which the next call drains. ``docs/explanation/architecture.md``
describes the layers and the terms.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from ._core.admission import Admission
from ._core.hook_scope import Attachment, abandon, enter_scope, leave_scope, newest_scope
from ._core.session import Session
from ._core.stats import Stats, collect
from ._core.way_back import WayBack, changed
from ._runtime.critical_section import CriticalSection
from ._runtime.reclaim import ReclaimQueue
from ._runtime.trace import EventLog, Levels, Recording
from ._runtime.trim import Trimmer
from ._runtime.workers import Workers
from ._saved.compiled import COMPILED_NODE, WholeGraph
from ._saved.entry import Entry, WrapperEntry
from ._saved.handout import RETURNS_NONE, hand_out
from ._saved.held import Held
from ._text import html_text, shown
from ._tiers.device_tiers import TierConfig, TierSizes
from ._tiers.windows import MOST_BYTES
from ._torch.dispatch import count_dispatch_modes
from ._torch.dynamo import leave_untraced
from ._torch.engine import current_node
from ._torch.func_transforms import REFUSAL
from ._torch.modules import compiled_around, module_that_has
from ._torch.storages import has_other_owners
from .codecs import Codec
from .errors import (
    StashClosedError,
    StashError,
    StashWarning,
    UsageError,
)
from .launcher import ByRank, of_this_rank
from .policy import Action, CodecChoice, Policy
from .stores import Disk, Store
from .stores._buffer_pool import BufferPool
from .units import format_bytes, parse_bytes, parse_limit, with_unit

if TYPE_CHECKING:
    from ._core.controller import Controller
    from ._recompute.found_modules import FoundModules
    from ._recompute.region import Region
    from .plan import Plan

__all__ = ["Stash"]

_F = TypeVar("_F", bound=Callable[..., Any])
_IDLE_BYTES = 32 << 20
_AUTO = ', or "auto"'


class Stash:
    """Hold what autograd saves for backward within byte budgets, with bit-identical gradients.

    Use it as a context manager around a forward pass, as a decorator, or attached to a module. It may be
    entered again, nested, and used from any thread. Backward may run anywhere, also outside.

    Args:
        budget: the most memory at any moment of a step, in place of ``keep``. On an accelerator it limits the
            memory of the device's tensors (``torch.accelerator.memory_allocated``), on each device; otherwise
            the resident bytes of the process. ``"auto"``: the bytes held plus those that can be allocated, less
            a twentieth. The first steps are measured. If not everything fits, the cheapest choice within the
            budget is then made for each class of saved tensors; :attr:`plan` shows it. What fits stays in
            memory. A plan chooses ``inflight`` and ``prefetch`` if they are ``"auto"``. If the plan is for an
            accelerator, CPU tensors are held as with ``keep="auto"``.
        keep: bytes that may stay in memory, on each device. The oldest saved tensors beyond it move down.
            ``None``: no limit. ``"auto"``: half of (free + already kept) memory, evaluated at each step. A step
            starts at the first save after a backward, or when nothing is held. On an accelerator, blocks are
            evicted early when memory is low. After an out-of-memory error inside the context, the limit is
            halved, so that the step can be tried again.
        host: bytes of pinned host memory for each accelerator's tensors, including what the pool holds idle.
            ``"auto"``: half of what the machine or its control group can spare, for all accelerators together,
            evaluated again as it fills. Each process of a launcher has an equal part of the machine, as with
            ``keep``. CPU tensors do not use it.
        disk: ``None``, a directory, a :class:`Disk`, or ``True`` for the directory on a disk of this machine
            that has the most space. Without one, CPU tensors stay in memory.
        policy: ``callable(SavedTensor) -> Action | None``. ``None`` from it means the default.
        codec: stores in fewer bytes what the default would move: a :class:`~backstash.codecs.Codec`, or
            ``callable(SavedTensor) -> Codec | None``. ``None``: bytes do not change. A tensor that the codec
            refuses moves unchanged, and ``stats().left`` says why.
        min_bytes: smaller tensors stay in memory; :meth:`recompute` discards results of 16 KiB and more.
            ``"auto"``: 64 KiB; with ``budget`` 16 KiB in the first step, and later if the budget cannot be kept
            otherwise.
        inflight: bytes that may be in flight to a lower tier, their memory not yet freed. ``"auto"``: for CPU
            tensors an eighth of what a step saves, at least the two largest blocks and at most 128 MiB; for an
            accelerator 128 MiB.
        prefetch: bytes that may be read back before they are used, including what later operations of the same
            backward use again. ``"auto"``: as ``inflight``. One larger block that is used again (a mask that
            every layer saves) is held in addition; with 0 none is. What finds no space is read again.
        on_full: ``"keep"`` leaves a block in memory if the tier below has no space, and warns once.
            ``"raise"`` raises :class:`~backstash.errors.StashFullError` from the forward pass.
        name: the name in reports.
        plan: a :class:`~backstash.plan.Plan`, or the file of one. It is followed from the first step on, and
            nothing is measured.
        recompute: what a budget may recompute. ``"auto"``: the results of PyTorch's operations, and with a tier
            below also whole calls of modules, which backstash finds. Modules: what they save, as
            :meth:`recompute` does it, also without a budget. ``False``: nothing, whatever a policy returns.
        verify: how recomputed tensors are compared with the originals. The first time that certain operations
            on certain shapes are recomputed, all bits are compared. Later, a fingerprint of all bytes is
            compared of single tensors that a policy or plan discarded. In a recomputed call of a module,
            ``"auto"`` compares up to 4 KiB of each tensor; on an accelerator up to 1 MiB of one tensor in about
            every fourth call. ``"always"``: all bytes of these, too. ``"first"``: nothing.
        strict: raise :class:`~backstash.errors.BudgetError` if a step exceeds a budget that no plan can keep,
            or three steps exceed one that a plan was to keep. Default ``False``.

    The stash removes its hooks for the rest of a context if a step of twice the size would fit. It also does so
    if the step begins like those before it, and these left a tenth of the budget free, or 16 saved the same and
    left free what the peaks of the last four differed by. ``stats().hooks_off`` counts how often. Then the
    saved tensors are in no other figure. A tensor that was changed in place raises PyTorch's own
    ``RuntimeError``. A step that suddenly saves more may exceed the budget, and so may the next few; a note
    says so. The hooks stay on in a context that had several steps the last time (the first time, only its first
    step is seen), in attached modules, with ``policy``, ``codec`` or :meth:`recompute`, inside other hooks, and
    while a report records.

    Sizes are ints of bytes or strings with a unit, ``"512MiB"`` or ``"2GB"``. A ``budget`` or ``keep`` of 1 to
    4,095 without a unit is refused. The exception is ``budget=1``, which asks what any budget would cost. In a
    job of many processes ``keep``, ``host``, ``disk`` and ``budget`` may differ by rank: pass a mapping,
    ``{0: "4GiB", 1: "2GiB"}``, or a function of the rank, which is called once, here. The rank is the
    launcher's, or the one of ``torch.distributed``.

    Raises:
        UsageError: a mapping by rank has no entry for this rank, or the process has no rank.
        SizeError: a size that cannot be read.
        StashIOError: the directory cannot hold a file.

    >>> import tempfile
    >>> x = torch.randn(300, 300, requires_grad=True)
    >>> with tempfile.TemporaryDirectory() as directory, Stash(disk=directory) as stash:
    ...     loss = x.sin().exp().sum()
    ...     loss.backward()
    >>> stash.stats().written_bytes  # exp's result; the leaf x stays where it is
    360000
    """

    def __init__(
        self,
        budget: ByRank[int | str | None] = None,
        *,
        keep: ByRank[int | str | None] = 0,
        host: ByRank[int | str | None] = "auto",
        disk: ByRank[str | os.PathLike[str] | Store | bool | None] = None,
        policy: Policy | None = None,
        codec: CodecChoice | None = None,
        min_bytes: int | str = "auto",
        inflight: int | str = "auto",
        prefetch: int | str = "auto",
        on_full: Literal["keep", "raise"] = "keep",
        name: str | None = None,
        plan: str | os.PathLike[str] | Plan | None = None,
        recompute: Literal["auto", False] | nn.Module | Iterable[nn.Module] = "auto",
        verify: Literal["auto", "always", "first"] = "auto",
        strict: bool = False,
    ) -> None:
        _check_choices(name, policy, codec, on_full, verify)
        most: int | str | None = of_this_rank(budget, "budget")
        keep_limit: int | str | None = of_this_rank(keep, "keep")
        _check_planned(most, plan, keep_limit)
        if not isinstance(most, int) or most != 1:  # budget=1 measures what any budget would cost
            with_unit(most, name="budget")
        with_unit(keep_limit, name="keep")
        if keep_limit != "auto":
            keep_limit = parse_limit(keep_limit, name="keep", also=_AUTO)
        pinned: int | str | None = of_this_rank(host, "host")
        host_bytes = -1 if pinned == "auto" else parse_limit(pinned, name="host", also=_AUTO)
        named = _modules_of(recompute)
        self.name = name
        least = (
            None if min_bytes == "auto" else parse_bytes(min_bytes, name="min_bytes", also=_AUTO)
        )
        windows = (
            None if inflight == "auto" else parse_bytes(inflight, name="inflight", also=_AUTO),
            None if prefetch == "auto" else parse_bytes(prefetch, name="prefetch", also=_AUTO),
        )
        inflight_bytes, prefetch_bytes = (MOST_BYTES if each is None else each for each in windows)
        below: str | os.PathLike[str] | Store | bool | None = of_this_rank(disk, "disk")
        self._owns_store = not isinstance(below, Store)
        self._store = _store(below)
        self._section = CriticalSection(self._store)
        self._event_log = EventLog(functools.partial(_levels_of, weakref.ref(self)))
        is_planned = most is not None or plan is not None
        self._sizes = TierSizes(
            host=host_bytes,
            inflight=inflight_bytes,
            prefetch=prefetch_bytes,
            follows=(windows[0] is None, windows[1] is None),
            on_full=on_full,
            # A plan's predictions count recomputing and unpacking as time of the computing thread.
            makes_ahead=not is_planned,
        )
        self._begin()
        controller_for = None
        if is_planned:
            from ._budget.making import planners_of  # imported late: most programs do not need it

            controller_for = planners_of(
                self._event_log,
                most,
                plan,
                windows,
                trim=functools.partial(_trim, weakref.ref(self)),
                has_disk=self._store is not None,
                has_host=host_bytes != 0,
                strict=strict,
            )
        self._session = Session(
            self._config,
            # With a plan: the limit for devices that the plan is not for.
            keep="auto" if is_planned else keep_limit,
            min_bytes=least,
            controller_for=controller_for,
        )
        recorder = None
        if recompute is not False and (policy is not None or is_planned):
            from ._recompute.recorder import Recorder

            attach = functools.partial(_attach, weakref.ref(self)) if is_planned else None
            recorder = Recorder(self._session, asks=policy is not None, attach=attach)
        self._recorder = recorder
        self._recomputes, self._verify = recompute is not False, verify
        self._admission = Admission(self._session, policy=policy, codec=codec, recorder=recorder)
        levels = self._event_log.levels  # does not refer to this stash
        # Bytes that are being written count where their space is reserved.
        self._whole_graph = WholeGraph(
            lambda: sum(levels()[each] for each in (0, 2, 3)), prefetch_bytes
        )
        self._way_back = WayBack(self._session, self._admission)
        self._is_closing = False  # close() was nested; the next call that is not completes it
        self._regions: set[Region] = set()  # the modules' hooks refer to them only weakly
        # Keys of states whose replay was bit-equal; keys of the others, with the reason.
        self._compared: tuple[set[int], dict[int, str]] = set(), {}
        _all.add(self)
        if named:
            self.recompute(*named)

    def _begin(self) -> None:
        """Create the threads, memory and tiers of this process."""
        self._workers = Workers(self._store.threads if self._store is not None else 1)
        self._makers = Workers(1)
        self._pool = BufferPool(idle_bytes=_IDLE_BYTES)
        self._trimmer = Trimmer(self._workers.submit)
        self._config = TierConfig(
            self._store,
            self._workers.begin,
            self._makers,
            ReclaimQueue(),
            self._section,
            self._event_log,
            self._pool,
            self._trimmer.freed,
            self._sizes,
        )

    def _forked(self) -> None:
        """Reset in a forked process: in-flight transfers, moved blocks and counts belong to the parent.

        Threads and locks of the parent are not touched. Graphs that the parent made are recognized by the mark
        of their blocks' reclaim queue (see :meth:`WayBack.tensor_of`).
        """
        self._section.forked()
        self._is_closing = False
        self._begin()
        store = self._store
        self._session.restart(self._config)
        for planner in self._session.planners.values():
            planner.forked()
        usable = store is None or store.begins_anew_when_forked
        self._admission.restart("" if usable else _NO_STORE)

    # Entering and leaving.

    def __enter__(self) -> Stash:
        thread_state, outer = self._session.thread_state(), None
        try:
            outer = newest_scope(thread_state)
            self._enter(None)
            caller = sys._getframe(1)
            if caller.f_globals is globals():  # entered by the wrapper in __call__
                caller = caller.f_back or caller
            site = caller.f_code, caller.f_lasti
            self._admission.hooks_off.entered(thread_state.scopes[-1], site)
        except BaseException:  # after an interrupt here, __exit__ is not called: pop the pair
            inner = newest_scope(thread_state)
            if inner is not None and inner is not outer:
                abandon(thread_state, inner)
            if self._recorder is not None:
                self._recorder.left(thread_state)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        scope = None
        try:
            scope = newest_scope(self._session.thread_state())
            self._leave(None)
            if scope is not None:
                self._admission.hooks_off.left(scope)
        except StashError:
            raise
        except BaseException:  # an interrupt: __exit__ is not called again, so pop the pair
            thread_state = self._session.thread_state()
            if scope is None or scope in thread_state.scopes:
                leave_scope(thread_state)
            raise
        if isinstance(error, torch.OutOfMemoryError) and not self._section.is_nested():
            with self._session.section.lock, self._session.section:
                self._session.ease()
        if isinstance(error, RuntimeError) and REFUSAL in str(error):
            raise UsageError(_REMEDY) from error

    def _enter(self, frame: FrameType | None, pack: Any = None) -> None:
        if self._admission.closed:
            raise StashClosedError(
                f"stash {self.name or ''} is closed: make a new one".replace("  ", " ")
            )
        thread_state = self._session.thread_state()
        recorder = self._recorder
        if pack is None:
            pack = self._admission.hook(thread_state)
            pack.steps_aside = self._admission.stepped_aside
        else:
            recorder = None
        enter_scope(thread_state, pack, self.unpack, frame)
        if recorder is not None:
            recorder.entered(thread_state, frame)

    def _leave(self, frame: FrameType | None) -> None:
        thread_state = self._session.thread_state()
        try:
            leave_scope(thread_state, frame)
        finally:
            if self._recorder is not None:
                self._recorder.left(thread_state)
        if self._section.is_nested():
            return
        with self._session.section.lock, self._session.section:
            self._session.settle(thread_state, ended=True)
            self._session.review(thread_state, len(thread_state.expecting))
            self._session.complete(thread_state)
            self._session.try_again()
        if self._is_closing:
            self.close()

    def __call__(self, fn: _F) -> _F:
        """Wrap ``fn`` so that each call runs under the stash: ``@stash``, ``stash(MyFunction.apply)``.

        Raises:
            UsageError: ``fn`` is a generator, coroutine or async generator function, or an object that is
                called as one. Its body does not run inside the call.
        """
        if not callable(fn):
            raise UsageError(
                f"stash({shown(fn)}): allowed is a callable; for a context write `with stash:`"
            )
        if any(is_kind(each) for is_kind in _RUN_LATER for each in (fn, type(fn).__call__)):
            raise UsageError(
                f"stash({shown(fn)}): a generator's or coroutine's body runs outside the call; write "
                "`with stash:` around the forward in it"
            )

        @functools.wraps(fn)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            with self:
                return fn(*args, **kwargs)

        return wrapped  # type: ignore[return-value]

    def attach(self, module: nn.Module) -> Attachment:
        """Hold what ``module``'s forward saves from now on, wherever it is called.

        Returns a handle with ``remove()``, also a context manager.

        >>> model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        >>> stash = Stash()
        >>> with stash.attach(model[1]):
        ...     loss = model(torch.ones(2, 4)).sum()
        """
        if not isinstance(module, nn.Module):
            raise UsageError(
                f"attach({shown(module)}): allowed is an nn.Module; wrap a function by stash(fn)"
            )
        if compiled_around(module):
            warnings.warn(
                f"attach({type(module).__name__}): runs inside torch.compile, and a graph that was compiled "
                "before this call ignores it, so nothing of it is held; attach before the first compiled "
                "call, or call torch.compiler.reset() after this one, or attach what torch.compile returned",
                StashWarning,
                stacklevel=2,
            )
        return Attachment.of(module, self._enter, self._leave)

    def recompute(self, *modules: nn.Module) -> Attachment:
        """Discard what the forward of each of ``modules`` saves, and replay its operations in backward.

        This takes the place of activation checkpointing (``torch.utils.checkpoint``), but runs none of the
        program's Python twice. A tape records the operations that PyTorch calls in forward. The ones that lead
        to a saved tensor are called again, with the same arguments and settings. The stash holds the
        parameters, the inputs of the modules, and what cannot be replayed, like any other saved tensor;
        ``stats().left`` says why.

        Use it for modules of a few layers, such as the blocks of a transformer, because backward holds what one
        call saves at once. If one module is inside another, only the outer one counts. You need not enter the
        stash. With a ``budget`` and a ``disk`` the plan decides which calls of the modules are recomputed, and
        ``plan.regions`` shows it; with a ``budget`` alone all are.

        The first time that a result of certain operations on certain shapes is discarded, it is replayed at the
        end of the forward, and compared bit for bit. The idea of recomputing operation by operation is from DTR
        (Kirisame et al., ICLR 2021).

        Args:
            modules: each gets two hooks.

        Returns:
            A handle with ``remove()``, which is also a context manager. Tensors that were discarded before stay
            discarded. When the stash and the handle are dropped, the hooks do nothing any more.

        Raises:
            UsageError: one is not an ``nn.Module``, or has no forward, as an ``nn.ModuleList``.

        Backward raises ``InplaceError`` if a weight, or an input of a module, was changed in place since
        forward. The graph does not change then.

        >>> model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)))
        >>> stash = Stash(min_bytes=0)
        >>> with stash.recompute(*model):
        ...     model(torch.ones(8, 64)).sum().backward()
        >>> stash.stats().recomputed_bytes  # each GELU's input
        8192
        """
        from ._torch.module_parts import has_forward  # imported late: most programs do not need it

        for module in modules:
            if not isinstance(module, nn.Module):
                raise UsageError(
                    f"recompute({shown(module)}): allowed are modules, for example recompute(*model.blocks)"
                )
            if not has_forward(module):
                raise UsageError(
                    f"recompute() of a {type(module).__name__}, which has no forward: give the modules in it, "
                    "for example recompute(*model.blocks)"
                )
        if not self._recomputes:
            raise UsageError("recompute() of a stash that was made with recompute=False")
        if self._recorder is not None:
            self._recorder.only_modules = True
        regions = self._regions_of(modules)
        self._regions.update(regions)
        handles: list[Any] = []
        for region in regions:
            handles += [*region.handles, _Region(self._regions, region)]
        return Attachment(
            ", ".join(dict.fromkeys(type(each).__name__ for each in modules)), handles
        )

    def _regions_of(self, modules: Sequence[nn.Module], *, found: bool = False) -> list[Region]:
        from ._recompute.region import Region  # imported late: most programs do not need it

        return [
            Region(
                module,
                self._session,
                self._admission,
                self._session.thread_state,
                self._enter,
                self._leave,
                self.unpack,
                *self._compared,
                verify=self._verify,
                is_found=found,
            )
            for module in modules
        ]

    def set_keep(self, keep: int | str | None) -> None:
        """Change the ``keep`` limit.

        What exceeds a lower limit moves when the next tensor is saved.

        Args:
            keep: as for the constructor.

        Raises:
            SizeError: a size that cannot be read.
        """
        limit = keep if keep == "auto" else parse_limit(keep, name="keep", also=_AUTO)
        if self._section.is_nested():
            self._session.limit(limit)  # without the lock: each assignment is atomic
            return
        with self._section.lock:
            self._session.limit(limit)

    def __deepcopy__(self, memo: dict[int, Any]) -> Stash:
        """Return the stash itself: a copied model shares the stash that is attached to it."""
        return self

    def __reduce__(self) -> Any:
        raise TypeError(
            "a Stash cannot be pickled: remove() what it is attached to before saving a model"
        )

    # Saving.

    def pack(self, tensor: Tensor) -> object:
        """Return what autograd holds in place of ``tensor``, for use as a pack hook. See :meth:`unpack`."""
        return self._admission.hook(self._session.thread_state())(tensor)

    # Loading.

    def unpack(self, packed: Any) -> Tensor:
        """Return the tensor that :meth:`pack` received, to the bit.

        Raises:
            InplaceError: the tensor was modified in place, and its saved value is lost.
            StashIOError: the store cannot read the bytes; a later call may succeed.
        """
        if count_dispatch_modes():
            from ._recompute.tape import leave_for_backward

            leave_for_backward()  # a tape of this or another stash may be active
        kind = type(packed)
        if kind is Tensor and packed._version == 0:  # nearly every small tensor
            return packed if type(current_node()) in RETURNS_NONE else hand_out(packed)
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(
                False
            ):  # tensors made in inference mode have no version to check
                return self.unpack(packed)
        if kind is Held:
            packed = packed.call.value(packed)
            kind = type(packed)
        if kind is tuple and packed[0]._version == packed[1]:  # nearly every other tensor in place
            tensor = packed[0]
            return tensor if type(current_node()) in RETURNS_NONE else hand_out(tensor)
        if kind is Entry:
            node = current_node()
            if type(node).__name__ == COMPILED_NODE and not self._whole_graph.is_said:
                self._look_at_compiled(node, packed)
            if self._is_closing:
                self.close()
            way_back = self._way_back
            view = (way_back.timed_tensor_of if self._event_log.on else way_back.tensor_of)(packed)
            if type(node) in RETURNS_NONE:
                return view
            view = view.detach()  # a view would keep its base alive
            # If it was loaded for this use alone, its memory has no other owner.
            return hand_out(view) if has_other_owners(view) else view
        if kind is WrapperEntry:
            rebuilt: Tensor = packed.rebuild(self.unpack)
            return rebuilt if type(current_node()) in RETURNS_NONE else hand_out(rebuilt)
        tensor, version, *where = packed if kind is tuple else (packed, 0)
        if tensor._version != version:
            module = (
                (where and where[0]) or module_that_has(tensor) or ("no module" if where else "")
            )
            raise changed(tensor.shape, tensor.dtype, module, tensor._version, version)
        return tensor if type(current_node()) in RETURNS_NONE else hand_out(tensor)

    def _look_at_compiled(self, node: object, entry: Entry) -> None:
        if self._whole_graph.has_most(node, entry.block):
            warnings.warn(_WHOLE, StashWarning, stacklevel=3)

    # Reading, and closing.

    def stats(self) -> Stats:
        """Return what the stash has done and holds, as one frozen record.

        In a signal handler or a finalizer in the middle of another call, it does not wait. A block that is
        moving at that moment may be counted in two places or in none.
        """
        if self._section.is_nested():
            return self._collect(nested=True)
        if self._is_closing:
            self.close()
        thread_state = self._session.thread_state()
        with self._session.section.lock, self._session.section:
            self._session.complete(thread_state)
            self._session.drain()
            return self._collect()

    def _collect(self, *, nested: bool = False) -> Stats:
        return collect(
            self.name,
            self._session,
            self._admission,
            self._store,
            self._workers.note,
            nested=nested,
        )

    @property
    def plan(self) -> Plan | None:
        """The plan for each class of saved tensors, with its predicted and measured cost.

        ``None`` without ``budget`` and ``plan``. While steps are measured its ``state`` is ``"measuring"``.
        """
        planner = self._planner
        return planner.plan if planner is not None else None

    @property
    def _planner(self) -> Controller | None:
        return next(iter(self._session.planners.values()), None)

    def record(self, *, limit: int | None = None) -> Recording:
        """Record what the stash does, event by event, until the handle's ``remove()`` or its context's end.

        An event takes some hundred bytes of memory. Without a recording there is no cost. In a context whose
        hooks are already off, saves are recorded from the next context on.

        Args:
            limit: the number of events after which the recording ends; ``None``: no limit.

        >>> import tempfile
        >>> x = torch.randn(300, 300, requires_grad=True)
        >>> with tempfile.TemporaryDirectory() as directory, Stash(disk=directory) as stash:
        ...     with stash.record() as recording:
        ...         x.exp().sum().backward()
        >>> [(event.kind, event.nbytes) for event in recording.events if event.kind in ("save", "use")]
        [('save', 360000), ('use', 360000)]
        """
        return Recording(self._event_log, limit)

    def close(self) -> None:
        """Accept no more tensors, end the threads, and release the store. A second call does nothing.

        What live graphs hold stays readable, and the file is deleted with the last of them. A :class:`Disk`
        that the caller made stays open until the caller closes it. In a signal handler or a finalizer in the
        middle of another call, this only stops accepting tensors; the next call does the rest.
        """
        self._admission.closed = True  # the rest may be interrupted, and a second call repeats it
        self._session.uses += 1  # no thread leaves a tensor in place unseen from here on
        self._is_closing = self._section.is_nested()
        if self._is_closing:
            return
        for planner in self._session.planners.values():
            planner.close()
        if self._recorder is not None:
            self._recorder.set_modules(on=False)
        self._workers.close()
        self._makers.close()
        thread_state = self._session.thread_state()
        with self._session.section.lock, self._session.section:
            self._session.complete(thread_state)
            self._session.drain()
            self._pool.trim()
            for tiers in self._session.device_tiers:
                if tiers.device is not None and tiers.tier is not None:
                    tiers.evictor.inflight.finish(thread_state)
                    tiers.tier.close()
            if self._owns_store and self._store is not None and not self._session.blocks_alive:
                self._store.close()

    def __repr__(self) -> str:
        planner, limit = self._planner, ""
        if planner is not None:
            plan = planner.latest_plan  # without waiting for one that is being made
            limit = f"budget={format_bytes(plan.budget_bytes)}, plan={plan.state!r}, "
            if plan.measured is not None:
                limit += f"peak={format_bytes(plan.measured.peak_bytes)}, "
        blocks = self._session.blocks_alive
        return f"Stash(name={self.name!r}, {limit}store={self._store!r}, blocks={blocks})"

    def _repr_html_(self) -> str:
        plan = self.plan
        shown = [html_text(repr(self)), self.stats()._repr_html_()]
        return "".join(shown if plan is None else [*shown, plan._repr_html_()])


_WHOLE = (
    "one compiled graph saves more than half of this step, and its backward needs all of that at once, "
    "so the peak hardly falls: compile block by block, `for block in model.blocks: block.compile()`"
)
_NO_STORE = "this store cannot be used in a forked process: make a new stash there"
_REMEDY = (
    "torch.func.grad, vjp, jacrev and hessian cannot run while saved-tensors hooks other than a "
    "stash's are active: call them outside of those hooks, or use torch.autograd.grad"
)


def _store(disk: str | os.PathLike[str] | Store | bool | None) -> Store | None:
    """Return the store that ``disk=`` names."""
    if disk is None or disk is False:
        return None
    if isinstance(disk, Store):
        return disk
    if disk is not True:
        return Disk(disk)
    from .scratch import scratch  # imported late: most programs name a directory

    found = scratch()
    if found is None:
        raise UsageError(
            "disk=True: no directory on a disk of this machine was found ($TMPDIR or /tmp, /scratch, /var/tmp "
            "and the working directory were tried); give disk=DIRECTORY"
        )
    return Disk(found[0])


_RUN_LATER = (
    inspect.iscoroutinefunction,
    inspect.isgeneratorfunction,
    inspect.isasyncgenfunction,
)


def _modules_of(recompute: object) -> tuple[nn.Module, ...]:
    """Return the modules that ``recompute=`` names."""
    if recompute is False or (isinstance(recompute, str) and recompute == "auto"):
        return ()
    if isinstance(recompute, nn.Module):
        return (recompute,)
    try:
        modules: tuple[Any, ...] = tuple(recompute)  # type: ignore[arg-type]
    except TypeError:
        modules = ()
    if not modules or not all(isinstance(each, nn.Module) for each in modules):
        raise UsageError(
            f'recompute={shown(recompute)}: allowed are "auto", False, a module, and modules, for example '
            "recompute=model.blocks"
        )
    return modules


def _check_choices(
    name: object, policy: object, codec: object, on_full: object, verify: object
) -> None:
    if not (name is None or isinstance(name, str)):
        raise UsageError(f"name={shown(name)}: allowed is a string, or None")
    if policy is not None and not callable(policy):
        hint = f"; for all tensors: lambda saved: {policy!r}" if isinstance(policy, Action) else ""
        raise UsageError(
            f"policy={shown(policy)}: allowed is a callable of a SavedTensor, or None{hint}"
        )
    is_class = isinstance(codec, type)
    if codec is not None and (is_class or not (isinstance(codec, Codec) or callable(codec))):
        raise UsageError(
            f"codec={shown(codec)}: allowed is a Codec, for example backstash.codecs.EXACT, a callable of "
            "a SavedTensor, or None"
        )
    if not (isinstance(on_full, str) and on_full in ("keep", "raise")):
        raise UsageError(f'on_full={shown(on_full)}: allowed are "keep" and "raise"')
    if not (isinstance(verify, str) and verify in ("auto", "always", "first")):
        raise UsageError(f'verify={shown(verify)}: allowed are "auto", "always" and "first"')


def _check_planned(budget: object, plan: object, keep: object) -> None:
    if budget is None and plan is None:
        return
    if keep != 0:
        raise UsageError(
            f"keep={shown(keep)} with {'budget' if plan is None else 'plan'}=: allowed is one of them; "
            "the plan decides what is kept"
        )
    if budget is not None and plan is not None:
        raise UsageError("budget= with plan=: allowed is one of them; a plan has its own budget")


class _Region:
    """Keep a region alive until it is removed.

    Args:
        kept: the stash's regions.
        region: one of them.
    """

    def __init__(self, kept: set[Region], region: Region) -> None:
        self._kept, self._region = kept, region

    def remove(self) -> None:
        """Drop the region; a handle like those of its module's hooks."""
        self._kept.discard(self._region)


def _attach(stash: weakref.ref[Stash], modules: Sequence[nn.Module]) -> FoundModules | None:
    """Record the forwards of modules that the program did not name."""
    from ._recompute.found_modules import FoundModules

    alive = stash()
    if alive is None:
        return None
    return FoundModules([*zip(modules, alive._regions_of(modules, found=True), strict=True)])


def _trim(stash: weakref.ref[Stash]) -> None:
    """Return free memory of the process to the system. The caller holds the lock."""
    alive = stash()
    if alive is not None:
        alive._pool.trim()
        alive._trimmer.release()


def _levels_of(stash: weakref.ref[Stash]) -> Levels:
    alive = stash()
    if alive is None:
        return 0, 0, 0, 0, 0
    all_tiers, store = alive._session.device_tiers, alive._store
    unfilled = sum(tiers.tier.unfilled_bytes() for tiers in all_tiers if tiers.tier is not None)
    return (
        sum(tiers.evictor.resident.nbytes for tiers in all_tiers),
        sum(tiers.evictor.inflight.nbytes for tiers in all_tiers),
        sum(tiers.tier.host_bytes for tiers in all_tiers if tiers.tier is not None),
        store.used_bytes - unfilled if store is not None else 0,
        sum(tiers.prefetcher.ahead.nbytes for tiers in all_tiers),
    )


_all: weakref.WeakSet[Stash] = weakref.WeakSet()


def _after_fork() -> None:
    for stash in list(_all):
        stash._forked()


if hasattr(os, "register_at_fork"):  # runs after the stores' hooks: they were imported before
    os.register_at_fork(after_in_child=_after_fork)

leave_untraced(__name__)
