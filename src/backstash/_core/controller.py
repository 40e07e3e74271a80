"""What decides for one device how each block is held, in place of a fixed budget.

A plan for a budget is one: see :mod:`backstash._budget`, which is loaded only where a budget or a plan is
given.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from .._saved.block import Block
from .._tiers.device_tiers import DeviceTiers

__all__ = ["Controller", "Prices"]

Prices = Callable[[], Mapping[str, Any]]
"""Tries each way of holding a block, and returns what it takes by the action's name; ``None``: it cannot be
held so."""


class Controller(ABC):
    """Of one device. The caller holds the stash's lock, but for what says otherwise."""

    min_bytes: int
    """The smallest storage that moves, where the caller of the stash does not say."""
    notes: dict[str, None]
    """What ``stats().notes`` says of it."""
    modules_wanted: bool | None = None
    """Whether modules that nobody named are to be recorded from now on, or not any more; ``None``: as it is."""

    # The step.

    @abstractmethod
    def begin_step(self, tiers: DeviceTiers) -> None:
        """The first block of a step is being admitted to ``tiers``; the step before has ended."""

    @abstractmethod
    def check(self) -> None:
        """Raise what a step that has ended was found to be, where the caller of the stash wants it.

        Raises:
            BudgetError: it exceeded the budget.
        """

    @property
    @abstractmethod
    def matches_nothing(self) -> bool:
        """Whether it decides for another program: nothing that this one saves is known to it."""

    # A block.

    @abstractmethod
    def count_saved(self, nbytes: int) -> None:
        """Storages of so many bytes were saved in this step, each counted as often as it was."""

    @abstractmethod
    def count(self, block: Block) -> None:
        """A block is admitted for which a policy has decided."""

    @abstractmethod
    def choose(self, block: Block, tensor: Tensor, prices: Prices) -> str:
        """A block is admitted: what is done with it.

        Args:
            block: that holds ``tensor``.
            tensor: that is saved.
            prices: may be called once.

        Returns:
            ``"disk"`` or ``"host"``: it goes there at once; ``"pack"``; ``"recompute"``; ``""``: it stays, as
            far as the limit of the resident set allows.
        """

    @property
    @abstractmethod
    def instead(self) -> str:
        """What is done with a block that was to be recomputed and cannot be; as :meth:`choose` returns it."""

    @abstractmethod
    def may_leave_bytes(self, threads: int, *, is_block: bool = True) -> int:
        """How many bytes may be saved and stay in place before this is asked again; -1: none.

        Args:
            threads: that may each save so much.
            is_block: whether what was saved last is one.
        """

    @abstractmethod
    def saved_again(self, block: Block) -> None:
        """A block that is held was saved once more."""

    @abstractmethod
    def note_used(self, nbytes: int) -> bool:
        """Backward uses so many bytes of a block. Returns whether fewer blocks may stay than do."""

    @abstractmethod
    def fits_unseen(self) -> bool:
        """Whether the rest of this step fits although nobody looks at what it saves."""

    @abstractmethod
    def take_rest_as_known(self) -> None:
        """Nobody looks at the rest of this step."""

    # What may be recomputed.

    @abstractmethod
    def may_recompute(self, *, has_ended: bool) -> bool:
        """Whether something may be recomputed of what is saved now; ``has_ended``: of the step that begins with
        the next block."""

    @property
    @abstractmethod
    def counts_modules(self) -> bool:
        """Whether it is to be counted what each module saves."""

    @abstractmethod
    def plan_forward(
        self, region: Any, modules: Sequence[nn.Module], tiers: DeviceTiers
    ) -> Any | None:
        """What is done with one forward of a module that may be recomputed: see
        :class:`~backstash._recompute.region.Planned`; ``None``: it is recomputed. Takes the lock itself."""

    # Time, without the lock.

    @abstractmethod
    def hook_begins(self) -> Any:
        """For :meth:`hook_took`."""

    @abstractmethod
    def region_hook_begins(self) -> Any:
        """For :meth:`hook_took` of a ``"region hook"``, for which an accelerator may have to wait."""

    @abstractmethod
    def hook_took(self, kind: str, began: Any) -> None:
        """``"pack hook"`` or ``"unpack hook"``, for a block, or ``"region hook"``, from ``began`` to now."""

    @abstractmethod
    def recording_took(self, seconds: float) -> None:
        """So long operations were recorded since the last block."""

    # Its end.

    @property
    @abstractmethod
    def plan(self) -> Any:
        """The :class:`~backstash.plan.Plan`. Waits for one that is being made, without the lock."""

    @property
    @abstractmethod
    def latest_plan(self) -> Any:
        """The same, which waits for nothing."""

    @abstractmethod
    def close(self) -> None:
        """Measure no more."""

    @abstractmethod
    def retire(self) -> None:
        """Measure no more, and leave the device as it was: nobody decides for it from now on."""

    @abstractmethod
    def forked(self) -> None:
        """In a forked process: the threads are the other's, and so is an accelerator."""
