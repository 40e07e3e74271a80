"""Simulate one step by the rules of eviction and readahead: its time and its peak memory.

The stash writes the blocks that move after their saves, in order, with at most ``inflight`` bytes in flight. A
save that finds the window full waits for the oldest write. At each use, the stash reads the next blocks in the
order of their uses, with at most ``prefetch`` bytes held ahead. A block that is used while it is being written
is still in memory and is not read.

Where the host runs ahead of the device, it sees no write end. Then nothing is freed before the window is full,
and the blocks that are in the window when backward begins are used in place and held until the end of the step.

A recomputed region has none of its members in memory until backward first uses one. Then the replay makes all
that are not freed yet, and each stays until its free. The small tensors that the region discards with them
follow the same rule. What only the replay reads is held until then, even if a recorded step freed it earlier.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .trace import Moment, Option, Trace

__all__ = ["NO_WINDOWS", "Forecast", "Windows", "simulate"]


class Windows(NamedTuple):
    """Most bytes in flight to the tier below, and most bytes read back ahead of their use."""

    inflight_bytes: int
    prefetch_bytes: int


NO_WINDOWS = Windows(0, 0)


@dataclass(frozen=True, slots=True)
class Forecast:
    """The predicted time and memory of a step."""

    step_seconds: float
    """Seconds from one step's first save to the next one's."""
    peak_bytes: int
    """Peak memory of the step."""
    stall_seconds: float
    """Part of the step's time in which the computing thread waits for a transfer."""
    resident_peak_bytes: int
    """Most bytes of saved tensors in place at once."""
    peak_moment: int
    """Index of the moment before which the peak occurs; the number of moments if it occurs after the last."""
    moved_bytes: int
    """Bytes written to the tier below, and read back."""


def _order(trace: Trace, region_of: Mapping[int, int], moved: Collection[int]) -> list[int]:
    """Return the moved blocks in the order in which backward needs them. A region's inputs come before the
    first use of a member."""
    used = (each.block for each in trace.moments if each.kind == "use")
    if not region_of:
        return list(dict.fromkeys(block for block in used if block in moved))
    order: dict[int, None] = {}
    for block in used:
        region = region_of.get(block)
        given = trace.regions[region].inputs if region is not None else ()
        order |= dict.fromkeys(each for each in (*given, block) if each in moved)
    return list(order)


class _Step:
    """A step that is being simulated: the time so far, and the memory that it holds.

    Args:
        trace: see :func:`simulate`, also for the next two.
        choices: of each block.
        windows: of the two directions.
        order: the moved blocks, in the order in which backward needs them.
        clock: the seconds before the first moment.
    """

    __slots__ = (
        "_down_free", "_down_rate", "_made", "_next_read", "_order", "_ready", "_up_free", "_up_rate",
        "_windows", "_written_at", "ahead", "choices", "clock", "in_memory", "inflight", "peak",
        "peak_moment", "resident", "resident_peak", "runs_ahead", "stalled", "writing",
    )  # fmt: skip

    def __init__(
        self,
        trace: Trace,
        choices: Sequence[Option],
        windows: Windows,
        order: Sequence[int],
        clock: float,
    ) -> None:
        self.choices = choices
        self.clock = clock
        self.stalled = 0.0
        self.resident = self.inflight = self.ahead = self.resident_peak = 0
        self.peak = self.peak_moment = 0
        self.runs_ahead = trace.runs_ahead
        self.writing: deque[tuple[float, int]] = deque()
        """The end of each write, and its block, oldest first."""
        self.in_memory: set[int] = set()
        """The blocks that were used while they were being written."""
        self._windows, self._order = windows, order
        self._down_rate, self._up_rate = trace.links.down_rate, trace.links.up_rate
        self._down_free = self._up_free = 0.0  # when each link is free
        self._written_at: dict[int, float] = {}
        self._ready: dict[int, float] = {}  # when each read ends
        self._made: set[int] = set()  # blocks that were used
        self._next_read = 0  # in the order

    def look(self, other_bytes: int, at: int) -> None:
        """Compare the memory held before the moment ``at`` with the peak."""
        now = other_bytes + self.resident + self.inflight + self.ahead
        if now > self.peak:
            self.peak, self.peak_moment = now, at

    def wait(self, until: float) -> None:
        """Wait for a transfer."""
        if until > self.clock:
            self.stalled += until - self.clock
            self.clock = until

    def end_writes(self) -> None:
        """Free the blocks that have been written by now."""
        writing = self.writing
        while writing and writing[0][0] <= self.clock:
            self.inflight -= self.choices[writing.popleft()[1]].moved_bytes

    def save(self, block: int, option: Option, other_bytes: int, at: int) -> None:
        """Save a block, at the moment ``at``."""
        self.clock += option.save_seconds
        self.resident += option.resident_bytes
        self.resident_peak = max(self.resident_peak, self.resident)
        nbytes, most, writing = option.moved_bytes, self._windows.inflight_bytes, self.writing
        if not nbytes:
            return
        while writing and self.inflight + nbytes > most:
            end, oldest = writing.popleft()
            self.inflight -= self.choices[oldest].moved_bytes
            self.wait(end)
        self._down_free = max(self._down_free, self.clock) + nbytes / self._down_rate
        self._written_at[block] = self._down_free
        writing.append((self._down_free, block))
        self.inflight += nbytes
        if nbytes > most and not self.runs_ahead:
            # It is written within the save, and in memory until that ends.
            self.look(other_bytes, at + 1)
            writing.pop()
            self.inflight -= nbytes
            self.wait(self._down_free)

    def use(self, block: int, option: Option) -> None:
        """Use a block in backward for the first time."""
        self.clock += option.use_seconds
        self.ahead += option.made_bytes
        self._made.add(block)
        self.use_what_is_written()
        if option.moved_bytes:
            self.wait(self.read(block))

    def use_what_is_written(self) -> None:
        """Where the host runs ahead, use the blocks in place that are being written as backward begins."""
        if self.runs_ahead:
            self.in_memory.update(block for _, block in self.writing)

    def free(self, block: int, option: Option) -> None:
        """Free a block."""
        self.resident -= option.resident_bytes
        if block in self._ready:
            self.ahead -= option.moved_bytes
        if block in self._made:
            self.ahead -= option.made_bytes

    def read(self, block: int) -> float:
        """Return when a moved block is in memory again; begin to read it if that has not begun yet."""
        if self._written_at.get(block, 0.0) > self.clock:
            self.in_memory.add(block)
        if block in self.in_memory:
            return 0.0
        if block not in self._ready:
            self._begin_read(block, self.choices[block].moved_bytes)
        return self._ready[block]

    def _begin_read(self, block: int, nbytes: int) -> None:
        self._up_free = max(self._up_free, self.clock) + nbytes / self._up_rate
        self._ready[block] = self._up_free
        self.ahead += nbytes

    def look_ahead(self) -> None:
        """Begin to read the next blocks, as far as the window allows."""
        order, at = self._order, self._next_read
        while at < len(order):
            block = order[at]
            if block not in self._ready and block not in self.in_memory:
                nbytes = self.choices[block].moved_bytes
                if self._written_at.get(block, 0.0) > self.clock:
                    break
                if self.ahead + nbytes > self._windows.prefetch_bytes:
                    break
                self._begin_read(block, nbytes)
            at += 1
        self._next_read = at


class _Replays:
    """The recomputed regions of a step that is being simulated.

    Args:
        trace: of the step.
        again: the recomputed regions, as indices in ``trace.regions``.
    """

    def __init__(self, trace: Trace, again: Collection[int]) -> None:
        regions = self._regions = trace.regions
        self._blocks = trace.blocks
        saves = trace.span("save") if again else {}
        self.region_of = {block: at for at in again for block in regions[at].members}
        """The region of each member."""
        self._first = {regions[at].members[0] for at in again}
        self._last = {max(regions[at].members, key=saves.__getitem__) for at in again}
        # By operand, the region whose replay is the last to read it: backward replays them in reverse.
        self.reader = {
            at: each for each in sorted(again, reverse=True) for at in regions[each].operands
        }
        """The region that reads each operand last."""
        self.small_bytes = 0
        """The bytes of small tensors that are discarded now."""
        self._without: set[int] = set()  # the regions of these
        self._alive: set[int] = set()  # members
        self._made: dict[int, int] = {}  # recomputed members, and their bytes
        self._done: set[int] = set()  # regions
        self._read_later: dict[int, list[int]] = {}  # operands that the recorded step has freed

    def save(self, step: _Step, block: int) -> None:
        """Save a member: nothing is held of it."""
        at = self.region_of[block]
        self._alive.add(block)
        if block in self._first:
            step.clock += self._regions[at].save_seconds
        if block in self._last:
            self._without.add(at)
            self.small_bytes += self._regions[at].small_bytes

    def use(self, step: _Step, block: int, moment: Moment, number: int) -> None:
        """Use a member, at the moment of this number: the first use replays its region."""
        if block not in self._alive or block in self._made:
            return
        at, choices = self.region_of[block], step.choices
        region = self._regions[at]
        step.use_what_is_written()
        for each in region.inputs:
            if choices[each].moved_bytes:
                step.wait(step.read(each))
        step.clock += region.use_seconds
        made = {each: self._blocks[each].nbytes for each in region.members if each in self._alive}
        self._made |= made
        step.resident += sum(made.values())
        self._done.add(at)
        for each in self._read_later.pop(at, ()):
            step.resident -= choices[each].resident_bytes
        self._fill(at)
        step.resident_peak = max(step.resident_peak, step.resident)
        step.look(moment.other_bytes + region.beside_bytes - self.small_bytes, number + 1)

    def free(self, step: _Step, block: int) -> None:
        """Free a member."""
        self._alive.discard(block)
        step.resident -= self._made.pop(block, 0)
        self._fill(self.region_of[block])

    def _fill(self, at: int) -> None:
        """Count the small tensors of a region as held again."""
        if at in self._without:
            self._without.discard(at)
            self.small_bytes -= self._regions[at].small_bytes

    def still_needs(self, block: int) -> bool:
        """Whether a replay has yet to read an operand, which is then held until that."""
        at = self.reader[block]
        if at in self._done:
            return False
        self._read_later.setdefault(at, []).append(block)
        return True


def simulate(
    trace: Trace, choices: Sequence[Option], windows: Windows, again: Collection[int] = ()
) -> Forecast:
    """Run the step with one option for each block.

    Args:
        trace: the step.
        choices: the option of each block, in the order of ``trace.blocks``; for members of a recomputed region,
            an option that holds nothing.
        windows: of the two directions.
        again: the recomputed regions, as indices in ``trace.regions``.
    """
    only_replayed = {operand for region in trace.regions for operand in region.operands}
    all_stay = all(
        choice.resident_bytes == (0 if at in only_replayed else block.nbytes)
        for at, (choice, block) in enumerate(zip(choices, trace.blocks, strict=True))
    )
    replays = _Replays(trace, again)
    region_of, reader = replays.region_of, replays.reader
    order = _order(
        trace, region_of, {block for block, each in enumerate(choices) if each.moved_bytes}
    )
    step = _Step(trace, choices, windows, order, trace.extra_seconds(all_stay=all_stay))
    writing = step.writing
    for at, moment in enumerate(trace.moments):
        block, kind = moment.block, moment.kind
        other_bytes = moment.other_bytes - replays.small_bytes
        step.look(other_bytes, at)
        step.clock += moment.seconds
        if writing and not step.runs_ahead:
            step.end_writes()
        if kind == "save":
            if block in region_of:
                replays.save(step, block)
            else:
                step.save(block, choices[block], other_bytes, at)
        elif kind == "use":
            if block in region_of:
                replays.use(step, block, moment, at)
            else:
                step.use(block, choices[block])
            step.look_ahead()
        elif block in region_of:
            replays.free(step, block)
        elif block not in reader or not replays.still_needs(block):
            step.free(block, choices[block])
    step.clock += trace.tail_seconds
    step.look(trace.tail_other_bytes - replays.small_bytes, len(trace.moments))
    return Forecast(
        step.clock,
        step.peak + (trace.beside_left_bytes if all_stay else 0),
        step.stalled,
        step.resident_peak,
        step.peak_moment,
        sum(each.moved_bytes for each in choices),
    )
