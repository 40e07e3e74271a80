"""Group what prices cannot distinguish: blocks with equal options at the same moments, and regions of equal
parts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from .simulate import NO_WINDOWS, Forecast, Windows, simulate
from .trace import Option, Trace, TracedRegion

__all__ = [
    "REGION",
    "Composite",
    "Group",
    "Problem",
    "Table",
    "absent_operands",
    "added_seconds",
    "held_blocks",
    "left_blocks",
]

REGION = "region"
"""The choice of the members of a recomputed region."""


@dataclass(slots=True)
class Problem:
    """The problem to solve; the arguments are those of :func:`backstash._plan.solve.solve`."""

    trace: Trace
    budget: int
    windows: Windows = NO_WINDOWS
    """Of the two directions. The budget has to hold them, in forward and in backward."""
    saves: dict[int, int] = field(init=False, default_factory=dict)
    frees: dict[int, int] = field(init=False, default_factory=dict)
    uses: dict[int, int] = field(init=False, default_factory=dict)
    first_use: int = field(init=False, default=0)
    regions: tuple[TracedRegion, ...] = field(init=False, default=())
    region_of: dict[int, int] = field(init=False, default_factory=dict)
    """By block, the region that it is a member of."""
    returns: list[int] = field(init=False, default_factory=list)
    """Of each region, the index of the first moment at which one of its members is used."""
    without_small: list[range] = field(init=False, default_factory=list)
    """Of each region, if it is recomputed, the moments before which its small tensors are not in memory: from
    the last save of its members to the first use or free of one."""
    untouched: list[Option] = field(init=False, default_factory=list)
    """Each block's option if it stays, unmanaged."""
    leaves: bool = field(init=False, default=False)
    """Whether blocks saved after the last block that does not stay are unmanaged."""
    ends: list[int] = field(init=False, default_factory=list)
    """Of each block, the number of blocks after which it is not saved again."""

    def __post_init__(self) -> None:
        moments = self.trace.moments
        self.saves, self.frees = self.trace.span("save"), self.trace.span("free")
        uses = self.uses = self.trace.span("use")
        self.first_use = min(uses.values(), default=len(moments))
        self.untouched = [Option(block.nbytes) for block in self.trace.blocks]
        blocks = range(len(self.untouched))
        # The stash sees a block's save after n blocks only if it still manages saves then.
        again = (each.saved_until + 1 if each.saved_until else 0 for each in self.trace.blocks)
        self.ends = [max(at + 1, end) for at, end in enumerate(again)]
        # If nothing can move, the stash manages every block: it may have to recompute any.
        self.leaves = any(each.moved_bytes for at in blocks for _, each in self.options(at))
        self.regions = self.trace.regions
        for at, region in enumerate(self.regions):
            self.region_of |= dict.fromkeys(region.members, at)
            used = (uses[each] for each in region.members if each in uses)
            self.returns.append(min(used, default=len(moments)))
            last = max(self.saves[each] for each in region.members)
            frees = (self.frees[each] for each in region.members if each in self.frees)
            self.without_small.append(
                range(last + 1, min(self.returns[-1], *frees, len(moments)) + 1)
            )

    def options(self, block: int) -> list[tuple[str, Option]]:
        """Return the options of a block, other than its region's. Of equal ones, the first is chosen."""
        return [*self.trace.blocks[block].options.items()]

    def is_alive(self, block: int, at: int) -> bool:
        """Whether the block is saved and not freed in the interval before this moment."""
        return self.saves[block] < at <= self.frees.get(block, len(self.trace.moments))

    def held_bytes(self, block: int, option: Option, at: int | None) -> int:
        """Return the bytes that a block held by this option has in memory in the interval before this moment.

        ``None``: before its use. From its use to its free, a moved block is back in memory, and so is what was
        unpacked or recomputed.
        """
        if at is None or at <= self.uses.get(block, len(self.trace.moments)):
            return option.resident_bytes
        return option.resident_bytes + option.made_bytes + option.moved_bytes

    def returned_bytes(self, region: int, at: int) -> int:
        """Return the bytes that a recomputed region has in memory in the interval before this moment. They are
        negative while its small tensors are discarded."""
        if at in self.without_small[region]:
            return -self.regions[region].small_bytes
        if at <= self.returns[region]:
            return 0
        members, blocks = self.regions[region].members, self.trace.blocks
        return sum(blocks[each].nbytes for each in members if self.is_alive(each, at))

    def capacity(self, at: int) -> int:
        """Return the bytes that may be resident in the interval before this moment."""
        moments = self.trace.moments
        other = moments[at].other_bytes if at < len(moments) else self.trace.tail_other_bytes
        return self.budget - other - self.windows[at > self.first_use]

    def option(self, block: int, name: str) -> Option:
        """Return the option that a name stands for; a region's is empty, since the region has its own costs."""
        return _NOTHING if name == REGION else self.trace.blocks[block].options[name]

    def left_after(self, choices: Sequence[str]) -> int | None:
        """Return the number of blocks after which the stash need not manage saves: those up to the last block
        that does not stay, and up to the last save of such a block. ``None``: it has to manage all."""
        if not self.leaves:
            return None
        ends = (self.ends[at] for at, name in enumerate(choices) if name != "keep")
        return max(ends, default=0)

    def taken(self, choices: Sequence[str]) -> list[Option]:
        """Return the options that these names stand for. All after the last that does not stay are unmanaged,
        and so are those of :func:`left_blocks`; of the inputs of such calls one save is managed, and the others
        are not."""
        last = self.left_after(choices)
        if last is None:
            last = len(choices)
        taken = [self.option(block, name) for block, name in enumerate(choices[:last])]
        taken += self.untouched[last:]
        for block in left_blocks(self.trace, choices, with_inputs=True):
            taken[block] = self.untouched[block]
        return taken

    def running_again(self, choices: Sequence[str]) -> list[int]:
        """Return the regions that these choices recompute."""
        return [at for at, each in enumerate(self.regions) if choices[each.members[0]] == REGION]

    def least_resident(self, block: int) -> str:
        """Return the name of the option that holds the fewest bytes of the block."""
        options = self.options(block)
        return min(options, key=lambda each: (each[1].resident_bytes, each[1].moved_bytes))[0]

    def forecast(self, choices: Sequence[str]) -> Forecast:
        """Simulate the step with these choices."""
        again, taken = self.running_again(choices), self.taken(choices)
        for block in absent_operands(self.regions, again):
            taken[block] = _NOTHING
        return simulate(self.trace, taken, self.windows, again)


_NOTHING = Option(0)


def absent_operands(regions: Sequence[TracedRegion], again: Collection[int]) -> set[int]:
    """Return the blocks that a step does not have which recomputes only these regions."""
    absent, present, again = set[int](), set[int](), set(again)
    for at, region in enumerate(regions):
        if region.operands:
            (present if at in again else absent).update(region.operands)
    return absent - present


def left_blocks(trace: Trace, choices: Sequence[str], *, with_inputs: bool = False) -> set[int]:
    """Return the blocks of the calls that need no managing: all that these hold or read stays in place. Of a
    call that is recomputed, these are what its replay reads and what it does not discard. Later saves of them
    are unmanaged, too, wherever they are. There are none if no call is recomputed, since no hook then sees
    where a call begins.

    Args:
        trace: of the step.
        choices: for each block.
        with_inputs: whether to return the inputs of these calls, too.
    """
    found = set[int]()
    if REGION not in choices:
        return found
    for each in trace.regions:
        held = held_blocks(each, choices)
        if all(choices[at] == "keep" for at in (*held, *each.inputs, *each.others)):
            found.update(held, each.inputs if with_inputs else ())
    return found


def held_blocks(call: TracedRegion, choices: Sequence[str]) -> list[int]:
    """Return the blocks that a call has with these choices and that nothing outside it has before."""
    members = (*call.members, *call.held)
    held = [*call.own, *call.shared, *(at for at in members if choices[at] != REGION)]
    return held + [*call.operands] * any(choices[at] == REGION for at in members)


def added_seconds(now: Option, then: Option, link_seconds: float) -> float:
    """Return the seconds that the option ``then`` adds compared with ``now``, with transfers at the link's
    price. A hidden transfer is nearly free."""
    per_byte = max(link_seconds, 1e-13)
    return (
        then.save_seconds
        + then.use_seconds
        - now.save_seconds
        - now.use_seconds
        + per_byte * (then.moved_bytes - now.moved_bytes)
    )


@dataclass(slots=True)
class Group:
    """Blocks that no price distinguishes."""

    options: list[tuple[str, Option]]
    at: tuple[int, ...]
    """The moments at which they are alive, as indices."""
    count: int = 0
    """Number of these blocks, without members of regions."""


@dataclass(slots=True)
class Composite:
    """Regions that no price distinguishes. Each is recomputed, or every member has a choice of its own."""

    seconds: float
    returned: tuple[int, ...]
    """Bytes that are in memory again at each moment."""
    parts: tuple[tuple[int, int], ...]
    """The groups of its members, and the number of members in each."""
    regions: list[int] = field(default_factory=list)


class Table:
    """The groups and composites of a problem at some moments."""

    def __init__(self, problem: Problem, moments: Sequence[int]) -> None:
        found: dict[tuple[tuple[tuple[str, Option], ...], tuple[int, ...]], int] = {}
        self.groups: list[Group] = []
        self.group_of: list[int] = []
        for block in range(len(problem.trace.blocks)):
            options = problem.options(block)
            alive = tuple(index for index, at in enumerate(moments) if problem.is_alive(block, at))
            at = found.setdefault((tuple(options), alive), len(self.groups))
            if at == len(self.groups):
                self.groups.append(Group(options, alive))
            self.group_of.append(at)
            self.groups[at].count += block not in problem.region_of
        composites: dict[tuple[float, tuple[int, ...], tuple[tuple[int, int], ...]], Composite] = {}
        for index, region in enumerate(problem.regions):
            key = (
                region.save_seconds + region.use_seconds,
                tuple(problem.returned_bytes(index, at) for at in moments),
                tuple(sorted(Counter(self.group_of[each] for each in region.members).items())),
            )
            composites.setdefault(key, Composite(*key)).regions.append(index)
        self.composites = [*composites.values()]
