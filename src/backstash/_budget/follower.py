"""Decide for each block of a step, and each forward of a module that may be recomputed, what to do with it.

The plan decides; before there is one, the mode of the step that is measured does. Blocks after the last one
that a plan does not keep are unmanaged (:meth:`Follower.may_leave_bytes`). The memory is still read from time
to time, and a block that is then admitted may have to move.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence

from torch import Tensor, nn

from .._plan.choices import Choices, ClassOf
from .._plan.regions import LEFT, ONCE, TRACED, Regions, name_of
from .._plan.simulate import Windows
from .._plan.table import REGION
from .._saved.block import Block
from ..plan import Plan
from .first_steps import FirstSteps
from .guard import MemoryGuard
from .limits import Limits
from .recording import StepRecording
from .shape import StepShape

__all__ = ["Follower"]

_ANCHORS = 4  # first blocks of a step, whose uses show when its backward runs
_LOOKS = 4  # if all fits, the memory is read each time 1/4 of what is left has been saved


class Follower:
    """Follow the plan of one planner, and decide where the plan does not. Call its methods with the stash's
    lock held.

    Args:
        plan: the plan so far.
        tier: the name of the action that moves a block down; ``None``: nothing can move.
        regions: see :attr:`Planner.regions`.
        limits: of the device.
        guard: of its memory.
        look_bytes: bytes saved between two readings of the memory.
        shape: of the step.
        recording: of the step, while it is measured.
        first_steps: the steps before the first plan.
        begin_larger: called if this step may be larger than the planned one, with the bytes of both at the same
            point.
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
        """The current plan."""
        self.choices: Choices | None = None
        """The plan's choices; ``None`` if there is no plan yet."""
        self._tier = tier
        self._regions = regions
        self._limits, self._guard, self._shape = limits, guard, shape
        self._recording, self._first_steps = recording, first_steps
        self._begin_larger = begin_larger
        self._class_of = ClassOf()
        self._look_bytes = look_bytes
        self._unlooked_bytes = 0
        self._largest_bytes = 0  # largest block in a step that keeps what fits
        self._asked = 0  # calls of may_leave_bytes() in this step
        self._is_over = False  # whether more was held in this step than planned
        # Forwards of this step that the plan recomputes but that are not: what they save has to move.
        self._refused: set[tuple[str, int]] = set()

    @property
    def is_loaded(self) -> bool:
        """Whether the plan was loaded: it never changes."""
        return self.plan.state == "loaded"

    @property
    def is_left(self) -> bool:
        """Whether everything fits, so that all blocks stay in place, unmanaged."""
        return self.plan.state == "left alone"

    @property
    def is_too_small(self) -> bool:
        """Whether no choice keeps the budget, so that everything moves that can."""
        return self.plan.state == "too small"

    @property
    def windows(self) -> Windows:
        """The windows of the plan."""
        return Windows(self.plan.inflight_bytes, self.plan.prefetch_bytes)

    def begin_step(self) -> None:
        """Begin a step, in which nothing was saved yet."""
        self._asked, self._is_over = 0, False
        self._refused.clear()
        self._class_of.begin_step()
        if self.choices is not None:
            self.choices.begin_step()

    def begin_first(self) -> None:
        """Begin a step that keeps what fits."""
        self._largest_bytes = 0
        self._guard.hold_back(0)

    def follow(self, plan: Plan) -> None:
        """Follow this plan from the next step on; its choices for modules apply at once."""
        self.plan = plan
        self.choices = Choices((each.name, each.choices) for each in plan.classes)
        if self._regions is not None:
            self._regions.follow(
                {
                    each.name: [name for name, n in each.choices for _ in range(n)]
                    for each in plan.regions
                },
                {
                    (each.name, at): frozenset(numbers)
                    for each in plan.regions
                    for at, numbers in enumerate(each.stays)
                },
                {each.name: each.left_bytes for each in plan.regions},
            )

    def apply_loaded(self) -> None:
        """Set the limits of a loaded plan at the start of a step."""
        self._limits.set_windows(self.windows)
        self._limits.unplanned = self.plan.resident_bytes
        self._limits.set_resident(self.plan.resident_bytes)

    # Per block.

    def count(self, block: Block) -> None:
        """Count a block that the plan or a policy admits, and check whether the step is larger than any planned
        one."""
        is_planned = self.choices is not None and not self.is_loaded
        is_again = block.saves.done > 1
        larger = self._shape.count(block.nbytes, is_planned=is_planned, is_again=is_again)
        if larger is not None:
            self._begin_larger(*larger)
        if self._recording.is_on:
            self._recording.note_class(block.cleanup.serial, "")
            if is_again:
                self._recording.note_copy(block.cleanup.serial)

    def may_leave_bytes(self, threads: int) -> int:
        """Return how many bytes may be saved without becoming blocks until the next call; -1: none.

        If everything fits, or all later saves of the step stay in place, only the first tensors of a step are
        admitted as blocks, and then one for each part of the free memory. The others cost what they cost
        without a stash.

        Args:
            threads: the number of threads that may each save this much.
        """
        self._asked += 1
        shape = self._shape
        if not self._leaves_alone(shape.counted) or self._asked <= _ANCHORS:
            return -1
        more = None if self.is_loaded else shape.asked_more()
        if more is not None:
            self._begin_larger(*more)
            if shape.is_larger:
                return -1
        nbytes = self._guard.part_of_what_is_left(_LOOKS, threads)
        if nbytes < 0:
            self._asked = -sys.maxsize  # no more in this step: the memory is read at each block
        return shape.bytes_to_next_look(nbytes)

    def fits_unseen(self) -> bool:
        """See :meth:`Controller.fits_unseen`."""
        plan, shape = self.plan, self._shape
        if not self.is_left or plan.predicted is None:
            return False
        if self._recording.is_on or shape.is_larger or shape.expects_larger:
            return False
        if self._regions is not None and self._regions.has_any:
            return False  # they are tried, and compared
        return self._guard.fits_unseen(
            shape.most_held_bytes,
            plan.predicted.peak_bytes,
            is_known=shape.begins_as_known,
            is_steady=shape.is_steady,
        )

    def choose(self, block: Block, tensor: Tensor, modules: Sequence[nn.Module]) -> str:
        """Return the tier that a block moves to at once; ``""`` if it stays, as far as the limit allows."""
        is_planned = self.choices is not None and not self._shape.is_larger
        if not is_planned and self._keeps_what_fits and block.nbytes > self._largest_bytes:
            self._largest_bytes = block.nbytes
            self._guard.hold_back(block.nbytes)
        self._unlooked_bytes -= block.nbytes
        if self._unlooked_bytes < 0:
            self._look()
        if self._leaves_alone(self._shape.counted - 1):
            return ""
        group = self._class(block.cleanup.module, tensor, block.nbytes, modules)
        if self._recording.is_on:
            self._recording.note_class(block.cleanup.serial, group)
        name = self._choose(group)
        if name in ("recompute", "pack"):
            return name
        if name not in ("keep", ""):
            return self.instead
        return "recompute" if self._must_recompute(block) else ""

    def note_discarded(
        self, path: str, tensor: Tensor, nbytes: int, modules: Sequence[nn.Module]
    ) -> None:
        """A forward of which a part is recomputed has discarded what the module at ``path`` saved."""
        self._class(path, tensor, nbytes, modules)

    def _class(self, path: str, tensor: Tensor, nbytes: int, modules: Sequence[nn.Module]) -> str:
        root = id(modules[0]) if modules else 0
        return self._class_of.next(path, _made_by(tensor), nbytes, root)

    @property
    def recomputes(self) -> bool:
        """Whether the plan recomputes blocks, or may have to."""
        if self.choices is None:
            return False
        if self._shape.is_larger or self._shape.expects_larger:
            return True
        return not self.is_left and (self._tier is None or self.choices.recompute)

    @property
    def instead(self) -> str:
        """The tier for a block that was to be recomputed or packed and cannot be; ``""`` if it stays."""
        return self._tier or ""

    # Per forward of a module that may be recomputed.

    def begin_forward(self, path: str, inside: Iterable[str]) -> tuple[str, int]:
        """Begin a forward of the module at ``path``. Return its name, and its index among the step's forwards
        of that name.

        Args:
            path: of the module.
            inside: if no other module calls it, the paths of its submodules, which do not begin with its own
                path.
        """
        assert self._regions is not None
        name = name_of(path)
        index = self._regions.begin(name)
        if self._regions.is_repeated(path):
            self._class_of.begin_again([path, *inside])
        follows = self.choices is not None and not self.is_left
        if follows and self._regions.runs_again(name, index):
            self._refused.add((name, index))
        return name, index

    def way_of(self, name: str, index: int) -> str:
        """Return what to do with the forward, once its inputs are packed."""
        assert self._regions is not None
        if self._shape.is_larger or self.choices is None:
            self._regions.note_name(name)
            return TRACED if self._recording.is_on else ONCE
        if self.is_left:
            return ONCE
        self._refused.discard((name, index))
        if self._regions.runs_again(name, index):
            return REGION
        return ONCE if self.left_bytes(name, index) is None else LEFT

    def left_bytes(self, name: str, index: int) -> int | None:
        """Return the bytes that the forward may hold unmanaged; ``None`` if it is managed. For a forward that
        :meth:`way_of` finds planned."""
        assert self._regions is not None
        nbytes = self._regions.left_bytes(name, index)
        if nbytes is None:
            return None
        # If more is held than planned, even what was to stay may have to move.
        if self._is_over or self._recording.is_shared:
            self._shape.manages_more = True
            return None
        return nbytes

    def _choose(self, group: str) -> str:
        if self.choices is not None and not self._shape.is_larger:
            return self._choose_planned(self.choices, group)
        if self._keeps_what_fits:
            return "keep"
        mode = "all" if self._shape.is_larger else self._first_steps.mode
        is_moved = mode == "all" or (mode == "half" and self._shape.counted % 2)
        return (self._tier or "recompute") if is_moved else "keep"

    def _choose_planned(self, choices: Choices, group: str) -> str:
        matched = choices.matched
        choice = choices.next(group, of_any_size=self._shape.begins_as_known)
        if choice is not None and choices.matched == matched:
            # Its size differs from the plan's: blocks of such sizes do not get the windows' unused space.
            self._limits.lower_resident(max(self._limits.unplanned, self.plan.resident_bytes))
        if choice is None:
            if self._recomputes_unknown:
                return "recompute"
            # It is unknown when backward needs it: the oldest blocks move, and both windows count as full.
            self._limits.lower_resident(self._limits.unplanned)
            self._shape.is_unknown = True
            return "keep"
        # The plan recomputes its region, but the region does not: move the block.
        return self.instead if choice == REGION else choice

    def _must_recompute(self, block: Block) -> bool:
        """Whether a block that was to stay would exceed the limit, and nothing can move to make space."""
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
        """Read the memory if this step keeps what fits, when backward uses ``nbytes`` of a block. Return
        whether more blocks are in place than may be."""
        if self.choices is not None and not self._shape.is_larger:
            return False  # the plan decides
        if not self._keeps_what_fits:
            return False
        self._unlooked_bytes -= nbytes
        if self._unlooked_bytes < 0:
            self._look()
        resident = self._limits.tiers.evictor.resident
        return resident.limit is not None and resident.nbytes > resident.limit

    def _look(self) -> None:
        """Read the memory. If it comes near the budget, fewer blocks stay for the rest of the step."""
        self._unlooked_bytes = self._look_bytes
        over = self._guard.over()
        if over:
            self._is_over = True
            resident_bytes = self._limits.tiers.evictor.resident.nbytes
            self._guard.note_lowered(min(over, resident_bytes))
            self._limits.lower_resident(max(0, resident_bytes - over))

    def _leaves_alone(self, counted: int) -> bool:
        """Whether saves after this many blocks of the step stay in place, unmanaged."""
        shape = self._shape
        if self._recording.is_on or shape.is_larger or shape.is_unknown or self._refused:
            return False
        if self._tier is None and self._recomputes_unknown:
            return False
        if self._first_steps.mode in ("left", "sampled"):
            return True
        if self.is_loaded and self.choices is not None:
            if not self.choices.matched:  # the plan may be for another model
                return False
        left_after = self.plan.left_after
        return left_after is not None and counted >= left_after

    @property
    def _recomputes_unknown(self) -> bool:
        """Whether to recompute blocks that the plan does not know, because nothing could move if they were too
        many."""
        return self._tier is None and not self.is_left


def _made_by(tensor: Tensor) -> str:
    """The operation that made it, as a class names it."""
    node = tensor.grad_fn
    return node.name() if node is not None else "no operation"
