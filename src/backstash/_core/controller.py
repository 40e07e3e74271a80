"""The interface that decides for one device how each block is held, in place of a fixed budget.

A plan for a budget implements it: see :mod:`backstash._budget`, which is loaded only if a budget or a plan is
given.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor, nn

from .._saved.block import Block
from .._tiers.device_tiers import DeviceTiers

__all__ = ["Controller", "StepClock", "Ways"]


class Ways(Protocol):
    """The ways to make a block smaller while it is added."""

    def prices(self) -> Mapping[str, Any]:
        """Try each way. Return its cost by the action's name; ``None``: impossible."""

    def can_recompute(self) -> bool:
        """Return whether the block can be recomputed."""


class StepClock(ABC):
    """Excludes the stash's own time from the steps that a controller measures. Needs no lock."""

    @abstractmethod
    def hook_begins(self) -> Any:
        """Return the starting point for :meth:`hook_took`."""

    @abstractmethod
    def region_hook_begins(self) -> Any:
        """Return the starting point for :meth:`hook_took` of a ``"region hook"``. May wait for a device."""

    @abstractmethod
    def hook_took(self, kind: str, began: Any) -> None:
        """Record the time since ``began`` of a ``"pack hook"``, ``"unpack hook"`` or ``"region hook"``."""


class Controller(ABC):
    """Decides for one device. The caller holds the stash's lock, unless a method says otherwise."""

    clock: StepClock
    """The time of the steps that it measures."""
    min_bytes: int
    """The smallest storage that moves, unless the user of the stash sets it."""
    notes: dict[str, None]
    """The notes for ``stats().notes``."""
    modules_wanted: bool | None = None
    """Whether to begin or stop recording modules that the user did not name; ``None``: no change."""

    # The step.

    @abstractmethod
    def begin_step(self, tiers: DeviceTiers) -> None:
        """Begin a step: its first block is being added to ``tiers``, and the step before has ended.

        Raises:
            BudgetError: an ended step exceeded the budget, and the user of the stash asked for an error. The
                step has begun nevertheless.
        """

    @property
    @abstractmethod
    def matches_nothing(self) -> bool:
        """Whether the plan is for another program: it knows nothing that this one saves."""

    # A block.

    @abstractmethod
    def count_saved(self, nbytes: int) -> None:
        """Count the bytes of storages that were saved in this step, each as often as it was saved."""

    @abstractmethod
    def choose(
        self, block: Block, tensor: Tensor, modules: Sequence[nn.Module], ways: Ways | None
    ) -> str:
        """Decide what to do with a block that is being added.

        Args:
            block: the block, which holds ``tensor``.
            tensor: the saved tensor.
            modules: the modules that are running, outermost first.
            ways: to make it smaller; ``None``: a policy has decided, and the block is only counted.

        Returns:
            ``"disk"`` or ``"host"``: it moves there at once; ``"pack"``; ``"recompute"``; ``""``: it stays, as
            far as the limit of the resident set allows.
        """

    @abstractmethod
    def may_leave_bytes(self, threads: int) -> int:
        """Return how many bytes may be saved and stay in place before the next call; -1: none.

        Args:
            threads: the number of threads that may each save that much.
        """

    @abstractmethod
    def saved_again(self, block: Block) -> None:
        """Record that a held block was saved once more."""

    @abstractmethod
    def note_used(self, nbytes: int) -> bool:
        """Record that backward uses so many bytes of a block. Return whether fewer blocks may stay than do."""

    @abstractmethod
    def fits_unseen(self) -> bool:
        """Return whether the rest of this step fits, even if nothing that it saves is checked."""

    @abstractmethod
    def take_rest_as_known(self) -> None:
        """Assume that the rest of this step, which no hook sees, is as planned."""

    # Recomputation.

    @abstractmethod
    def may_recompute(self, *, has_ended: bool) -> bool:
        """Return whether something that is saved now may be recomputed. ``has_ended``: the question is about
        the step that begins with the next block."""

    @property
    @abstractmethod
    def counts_modules(self) -> bool:
        """Whether the bytes that each module saves are to be counted."""

    @abstractmethod
    def plan_forward(
        self, region: Any, modules: Sequence[nn.Module], tiers: DeviceTiers
    ) -> Any | None:
        """Return the plan for one forward of a module that may be recomputed (see
        :class:`~backstash._budget.planned.Planned`), or ``None`` to recompute it. Takes the lock itself."""

    # Its plan and its end.

    @property
    @abstractmethod
    def plan(self) -> Any:
        """The :class:`~backstash.plan.Plan`. Waits for one that is being computed, without the lock."""

    @property
    @abstractmethod
    def latest_plan(self) -> Any:
        """The latest plan, without waiting."""

    @abstractmethod
    def close(self, *, is_replaced: bool = False) -> None:
        """Stop measuring. ``is_replaced``: it no longer decides for the device, whose settings are restored."""

    @abstractmethod
    def forked(self) -> None:
        """Reset in a forked child, where the parent's threads and accelerator are not available."""
