"""A plan's instructions for one forward of a region: whether it is recomputed, and what is recorded of it.

While a step is measured, no region is recomputed. What it saves is held as usual, which shows what that costs
and which of it is also saved outside the region. A replay is tried and compared.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Protocol

from torch import Tensor, nn

from .._core.controller import StepClock
from .._core.session import Session
from .._plan.cuts import CallGraph
from .._plan.regions import LEFT, ONCE, TRACED, Forward, Regions
from .._plan.table import REGION
from .._saved.entry import Entry
from .._tiers.device_tiers import DeviceTiers
from .._torch.modules import child_names, module_path, running_modules
from .._torch.storages import storage_identity
from .follower import Follower

__all__ = ["Planned", "RecomputedRegion"]

_AHEAD_SECONDS = 5e-3  # as the host needs for the operations of a large module


class RecomputedRegion(Protocol):
    """A module whose calls may be recomputed."""

    session: Session
    graph: CallGraph | None


class _Planner(Protocol):
    """See :class:`~backstash._budget.planner.Planner`."""

    follower: Follower
    regions: Regions | None

    def note_forward(self, kind: str, forward: Forward) -> bool: ...

    def may_try(self, name: str) -> bool: ...

    def pause(self) -> Any: ...

    def resume(self, paused: Any) -> float: ...

    def end_trial(self, paused: Any) -> None: ...

    @property
    def clock(self) -> StepClock: ...


class Planned:
    """One forward of a region, under a planner that decides whether it is recomputed.

    Args:
        region: the region.
        planner: of its device.
        tiers: of its device.
        modules: the running modules, the region's own last.
    """

    def __init__(
        self,
        region: RecomputedRegion,
        planner: _Planner,
        tiers: DeviceTiers,
        modules: Sequence[nn.Module],
    ) -> None:
        self._region = region
        self._planner = planner
        self._session = region.session
        self._device = tiers.device
        self.forward: Forward | None = None
        """The record of the forward, or ``None``. A recorded forward is not recomputed."""
        self.left_bytes: int | None = None
        """The bytes that the forward may hold unmanaged; ``None``: it is managed."""
        self.may_try = True
        """Whether the region may replay the forward now, to compare."""
        self._latest = -1  # newest block when it began
        self._is_whole = False
        self._discarded: set[int] = set()  # values, where a part of what is saved stays
        with self._session.section.lock, self._session.section:
            self._session.begin_step(tiers)
            inside = child_names(modules[0]) if len(modules) == 1 else ()
            self.name, self._index = planner.follower.begin_forward(module_path([*modules]), inside)
            self.stays = self._regions.stays(self.name, self._index)
            """The numbers of the saves to hold, because something outside the region saves the same storage."""

    def begin(self) -> bool:
        """Return whether the forward is recorded or recomputed; if not, its saved tensors are held as usual."""
        with self._session.section.lock, self._session.section:
            way = self._planner.follower.way_of(self.name, self._index)
            if way == TRACED:
                self.forward = self._regions.record(self.name, self._index)
                self.may_try = self._planner.may_try(self.name)
                self.stays = frozenset()
                self._latest = self._session.predictor.blocks - 1
            if way in (LEFT, REGION):
                self.left_bytes = self._planner.follower.left_bytes(self.name, self._index)
            return way not in (ONCE, LEFT)

    def enter(self, inputs: Collection[int], packed: Iterable[object]) -> None:
        """Begin the forward.

        Args:
            inputs: storages of the inputs, which are held.
            packed: what the stash packed the inputs as.
        """
        if self.forward is not None:
            for given in packed:
                if type(given) is Entry:
                    self.forward.inputs.append(given.block.cleanup.serial)
            with self._session.section.lock, self._session.section:
                for each in inputs:
                    self._regions.hold_small(each)
            self._planner.note_forward("enter", self.forward)

    @property
    def _regions(self) -> Regions:
        regions = self._planner.regions
        assert regions is not None
        return regions

    def hook_begins(self) -> Any:
        """Return the start of a hook, for :meth:`hook_took`."""
        return self._planner.clock.region_hook_begins()

    def hook_took(self, began: Any) -> None:
        """Exclude the time since ``began``, spent in the region's hook, from the step's computing."""
        self._planner.clock.hook_took("region hook", began)

    def leave(self, *, in_order: bool) -> None:
        """End the forward; ``in_order``: it raised no error and can be recomputed."""
        if self.forward is not None:
            # A forward that contains a backward spans two steps, so its time is unknown.
            self._is_whole = self._planner.note_forward("leave", self.forward)
            self.forward.can_run_again = in_order and self._is_whole
            with self._session.section.lock, self._session.section:
                self._regions.note_bytes(self.forward)
            self.forward.graph = self._region.graph

    def note_discarded(self, tensor: Tensor, value: int) -> None:
        """Record that a save was discarded of the value of this number, in a forward of which a part stays.

        The saves of a class are numbered by this. What is held unmanaged has no class."""
        if self.stays and self.left_bytes is None and value not in self._discarded:
            self._discarded.add(value)
            nbytes = tensor.untyped_storage().nbytes()
            if nbytes >= self._session.min_bytes:
                modules = running_modules()
                path = module_path(modules)
                with self._session.section.lock, self._session.section:
                    self._planner.follower.note_discarded(path, tensor, nbytes, modules)

    def pack(self, number: int, tensor: Tensor, pack: Callable[[Tensor], object]) -> object:
        """Hold a tensor of a forward that is only recorded."""
        packed = pack(tensor)
        if self.forward is None:
            return packed
        if type(packed) is Entry:
            block = packed.block
            serial = block.cleanup.serial
            is_new = serial > self._latest
            self._latest = max(self._latest, serial)
            self.forward.add(number, serial, block.nbytes, is_new=is_new)
        elif not self._session.section.is_nested():
            storage = tensor.untyped_storage()
            with self._session.section.lock, self._session.section:
                self._regions.add_small(self.forward, storage_identity(storage), storage.nbytes())
        return packed

    def note_own(self, packed: object) -> None:
        """Record that a forward that is only recorded saved what no replay computes."""
        if self.forward is not None and type(packed) is Entry:
            serial = packed.block.cleanup.serial
            self.forward.add_own(serial, is_new=serial > self._latest)
            self._latest = max(self._latest, serial)

    def keep_busy(self) -> None:
        """Keep the device busy while the host begins a replay whose operations are timed."""
        if self._device is not None:
            self._device.keep_busy(_AHEAD_SECONDS)

    def note_operand(self, packed: object) -> None:
        """Record that ``packed`` is held only so that a replay can read it, unless it was saved before."""
        if self.forward is not None and type(packed) is Entry:
            serial = packed.block.cleanup.serial
            if serial > self._latest:
                self.forward.operands.add(serial)
            elif serial in self.forward.own:
                self.forward.again[serial] += 1

    def mark(self) -> Any:
        """A point in time of the device that computes."""
        return time.perf_counter() if self._device is None else self._device.time_mark()

    def seconds_between(self, since: Any, until: Any) -> float:
        """What lies between two of these."""
        return until - since if self._device is None else self._device.seconds_between(since, until)

    def pause(self) -> Any:
        """Exclude what follows from a recorded step, until :meth:`end_trial`, which gets what this returns."""
        return self._planner.pause() if self.forward is not None else None

    def end_trial(self, paused: Any) -> None:
        """End a replay that was made to compare."""
        section = self._session.section
        if paused is None:
            return
        if section.is_nested():
            self._planner.resume(paused)
            return
        with section.lock, section:
            self._planner.end_trial(paused)

    def was_alike(self) -> None:
        """Record that a replay of the forward was bit-equal."""
        if self.forward is not None:
            self.forward.can_run_again = self._is_whole
            self.forward.graph = self._region.graph
