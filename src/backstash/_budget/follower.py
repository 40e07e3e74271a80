"""What is done with each block of a step, and with each forward of a module that may be recomputed.

The plan that is followed says so; until there is one, the step that is measured does. What is saved after the
last block that a plan lets go of is left alone (:meth:`Follower.may_leave_bytes`). From time to time the memory
is looked at; a block that is then admitted may have to go.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable

from torch import Tensor

from .._plan.choices import Choices, ClassOf
from .._plan.regions import AGAIN, ONCE, TRACED, Regions, name_of
from .._plan.table import REGION
from .._saved.block import Block
from ..plan import Plan
from .first_steps import FirstSteps
from .guard import MemoryGuard
from .limits import Limits
from .recording import StepRecording
from .shape import StepShape

__all__ = ["Follower"]

_ANCHORS = 4  # blocks that each step begins with, whose uses tell when its backward runs
_LOOKS = 4  # the part of the memory left that is saved between two looks at it, where all fits


class Follower:
    """Follows the plan of one planner, and decides where that has none. Its methods want the stash's lock.

    Args:
        plan: as far as it is made.
        tier: the name of the action that moves a block down; ``None``: nothing can move.
        regions: see :attr:`Planner.regions`.
        limits: of the device.
        guard: of its memory.
        look_bytes: that are saved between two looks at the memory.
        shape: of the step.
        recording: of the step, while it is measured.
        first_steps: that are measured before there is a plan.
        begin_larger: called where this step may be larger than the one that was planned for, with the bytes of
            both at the same place.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        tier: str | None,
        regions: Regions | None,
        limits: Limits,
        guard: MemoryGuard,
        look_bytes: int,
        shape: StepShape,
        recording: StepRecording,
        first_steps: FirstSteps,
        begin_larger: Callable[[int, int], None],
    ) -> None:
        self.plan = plan
        """What is known now."""
        self.choices: Choices | None = None
        """Of the plan; ``None``: there is none yet."""
        self.has_exceeded = False
        """Whether a step under a plan exceeded the budget."""
        self._tier = tier
        self._regions = regions
        self._limits, self._guard, self._shape = limits, guard, shape
        self._recording, self._first_steps = recording, first_steps
        self._begin_larger = begin_larger
        self._class_of = ClassOf()
        self._look_bytes = look_bytes
        self._unlooked_bytes = 0
        self._largest_bytes = 0  # of a block in a step that keeps what fits
        self._asked = 0  # how often it was asked in this step whether more may stay
        # Forwards of this step that were to be recomputed and are not: what they save is to move.
        self._refused: set[tuple[str, int]] = set()

    def begin_step(self) -> None:
        """Nothing was saved in this step yet."""
        self._asked = 0
        self._refused.clear()
        self._class_of.begin_step()
        if self.choices is not None:
            self.choices.begin_step()

    def begin_first(self) -> None:
        """This step keeps what fits."""
        self._largest_bytes = 0
        self._guard.hold_back(0)

    def follow(self, plan: Plan) -> None:
        """From the next step on; what it says of modules, at once."""
        self.plan = plan
        self.choices = Choices((each.name, each.choices) for each in plan.classes)
        self._recording.gives_back = False
        if self._regions is not None:
            self._regions.follow(
                {
                    each.name: [name == REGION for name, n in each.choices for _ in range(n)]
                    for each in plan.regions
                },
                {
                    (each.name, at): frozenset(numbers)
                    for each in plan.regions
                    for at, numbers in enumerate(each.stays)
                },
            )

    def apply_loaded(self) -> None:
        """A step begins under a loaded plan, which sets the limits."""
        plan = self.plan
        self._limits.set_windows((plan.inflight_bytes, plan.prefetch_bytes))
        self._limits.resident = self._limits.unplanned = plan.resident_bytes
        self._limits.set_resident(plan.resident_bytes)

    # Per block.

    def count(self, block: Block) -> None:
        """A block is being admitted, by the plan or by a policy: see whether the step is larger than any that
        was planned for."""
        is_planned = self.choices is not None and self.plan.state != "loaded"
        larger = self._shape.count(block.nbytes, is_planned=is_planned)
        if larger is not None:
            self._begin_larger(*larger)
        self._recording.note_class(block.cleanup.serial, "")

    def may_leave_bytes(self, threads: int, *, is_block: bool = True) -> int:
        """How many bytes may be saved and stay in place before this is asked again; -1: none.

        Where everything fits, or all stays that is saved from here on, only the first blocks of a step, and
        then one for a part of the memory that is left, are admitted as blocks: the rest costs what it costs
        without a stash.

        Args:
            threads: that may each save so much.
            is_block: whether what was saved last is one.
        """
        self._asked += is_block
        shape = self._shape
        if not self._leaves_alone(shape.counted) or self._asked <= _ANCHORS:
            return -1
        more = shape.asked_more() if self.plan.state != "loaded" else None
        if more is not None:
            self._begin_larger(*more)
            if shape.is_larger:
                return -1
        nbytes = self._guard.part_of_what_is_left(_LOOKS, threads)
        if nbytes < 0:
            self._asked = -sys.maxsize  # no more in this step: each block has the memory looked at
        return shape.bytes_to_next_look(nbytes)

    def fits_unseen(self) -> bool:
        """See :meth:`Controller.fits_unseen`."""
        plan, shape = self.plan, self._shape
        if plan.state != "left alone" or plan.predicted is None or self.has_exceeded:
            return False
        if self._recording.is_on or shape.is_larger or shape.expects_larger:
            return False
        if self._regions is not None and self._regions.has_any:
            return False  # they are tried, and compared
        return self._guard.fits_unseen(
            shape.most_asked_bytes, plan.predicted.peak_bytes, is_known=shape.begins_as_known
        )

    def choose(self, block: Block, tensor: Tensor) -> str:
        """The tier that a block goes to at once; ``""``: it stays, as far as the limit allows."""
        if self._keeps_what_fits and block.nbytes > self._largest_bytes:
            self._largest_bytes = block.nbytes
            self._guard.hold_back(block.nbytes)
        self._look_after(block.nbytes)
        if self._leaves_alone(self._shape.counted - 1):
            return "recompute" if self._must_recompute(block) else ""
        group = self._class_of.next(block.cleanup.module, _made_by(tensor), block.nbytes)
        self._recording.note_class(block.cleanup.serial, group)
        name = self._choose(group)
        if name == "all" and self._tier is None:
            return "recompute"
        if name in ("recompute", "pack"):
            return name
        if name not in ("keep", ""):
            return self.instead
        return "recompute" if self._must_recompute(block) else ""

    def note_discarded(self, path: str, tensor: Tensor, nbytes: int) -> None:
        """A forward of which a part is recomputed has discarded what the module at ``path`` saved."""
        self._class_of.next(path, _made_by(tensor), nbytes)

    @property
    def recomputes(self) -> bool:
        """Whether the plan has blocks recomputed, or may have to."""
        if self.choices is None:
            return False
        if self._shape.is_larger or self._shape.expects_larger:
            return True
        return self.plan.state != "left alone" and (self._tier is None or self.choices.recompute)

    @property
    def instead(self) -> str:
        """The tier of a block that was to be recomputed or packed and cannot be; ``""``: it stays."""
        return self._tier or ""

    # Per forward of a module that may be recomputed.

    def begin_forward(self, path: str, inside: Iterable[str]) -> tuple[str, int]:
        """One begins, of the module at ``path``: its name, and its place among those of that name.

        Args:
            path: of the module.
            inside: where no other module calls it, the paths of those in it: they do not begin with its own.
        """
        assert self._regions is not None
        name = name_of(path)
        index = self._regions.begin(name)
        if self._regions.is_repeated(path):
            self._class_of.begin_again([path, *inside])
        follows = self.choices is not None and self.plan.state != "left alone"
        if follows and self._regions.runs_again(name, index):
            self._refused.add((name, index))
        return name, index

    def way_of(self, name: str, index: int) -> str:
        """What is done with it, once it is known what it is given."""
        assert self._regions is not None
        if self._shape.is_larger or self.choices is None:
            self._regions.meet(name)
            return TRACED if self._recording.is_on else ONCE
        if self.plan.state == "left alone":
            return ONCE
        self._refused.discard((name, index))
        return AGAIN if self._regions.runs_again(name, index) else ONCE

    def _choose(self, group: str) -> str:
        if self._keeps_what_fits:
            return "keep"
        if self._shape.is_larger:
            return "all"
        if self.choices is None:
            mode = self._first_steps.mode
            is_moved = mode == "all" or (mode == "half" and self._shape.counted % 2)
            return "all" if is_moved else "keep"
        matched = self.choices.matched
        choice = self.choices.next(group, of_any_size=self._shape.begins_as_known)
        if choice is not None and self.choices.matched == matched:
            # Its size is another than the plan's: what the windows were not to hold is no room for blocks.
            self._limits.lower_resident(max(self._limits.unplanned, self.plan.resident_bytes))
        if choice is None:
            if self._recomputes_unknown:
                return "recompute"
            # Nothing is known of when it is needed: the oldest go, with both windows taken to be full.
            self._limits.lower_resident(self._limits.unplanned)
            self._shape.is_unknown = True
            return "keep"
        # A region that was to be recomputed and is not: what it saves moves.
        return self.instead if choice == REGION else choice

    def _must_recompute(self, block: Block) -> bool:
        """Whether a block that was to stay is more than the limit, and nothing can move to make room."""
        if self._tier is not None or self.choices is None:
            return False
        resident = self._limits.tiers.evictor.resident
        return resident.limit is not None and resident.nbytes + block.nbytes > resident.limit

    @property
    def _keeps_what_fits(self) -> bool:
        if self._shape.is_larger:
            return self._first_steps.keeps_larger
        return self.choices is None and self._first_steps.mode == "fits"

    def looks_in_backward(self, nbytes: int) -> bool:
        """Backward uses so many bytes of a block: in a step that keeps what fits, look at the memory. Returns
        whether fewer blocks may stay than do."""
        if not self._keeps_what_fits:
            return False
        self._look_after(nbytes)
        resident = self._limits.tiers.evictor.resident
        return resident.limit is not None and resident.nbytes > resident.limit

    def _look_after(self, nbytes: int) -> None:
        """Look at the memory, where enough was saved since the last time. Where it comes near the budget, less
        stays for the rest of the step."""
        self._unlooked_bytes -= nbytes
        if self._unlooked_bytes >= 0:
            return
        self._unlooked_bytes = self._look_bytes
        over = self._guard.over()
        if over:
            self._limits.lower_resident(max(0, self._limits.tiers.evictor.resident.nbytes - over))

    def _leaves_alone(self, counted: int) -> bool:
        """Whether what is saved after so many blocks of this step stays, and nothing is done about it."""
        shape = self._shape
        if self._recording.is_on or shape.is_larger or shape.is_unknown or self._recomputes_unknown:
            return False
        if self._refused:
            return False
        if self._first_steps.mode in ("left", "sampled"):
            return True
        if self.plan.state == "loaded" and self.choices is not None:
            if not self.choices.matched:  # else it would not be known whether it is this model's
                return False
        left_after = self.plan.left_after
        return left_after is not None and counted >= left_after

    @property
    def _recomputes_unknown(self) -> bool:
        """Whether what the plan does not know is let go: nothing can move when there is too much of it."""
        return self._tier is None and (self.plan.state != "left alone" or self.has_exceeded)


def _made_by(tensor: Tensor) -> str:
    """The operation that made it, as a class names it."""
    node = tensor.grad_fn
    return node.name() if node is not None else "no operation"
