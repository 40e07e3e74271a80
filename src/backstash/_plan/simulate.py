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

from .trace import Option, Trace

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
    if not region_of:
        return [block for block in trace.uses() if block in moved]
    order: dict[int, None] = {}
    for block in trace.uses():
        region = region_of.get(block)
        given = trace.regions[region].inputs if region is not None else ()
        order |= dict.fromkeys(each for each in (*given, block) if each in moved)
    return list(order)


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
    links, latency = trace.links, trace.links.latency_seconds
    stalled = down_free = up_free = 0.0
    all_stay = all(
        each.resident_bytes == least.resident_bytes
        for each, least in zip(choices, trace.left_alone(), strict=True)
    )
    clock = trace.extra_seconds(all_stay=all_stay)
    resident = inflight = ahead = resident_peak = 0
    peak, peak_moment = 0, 0
    writing: deque[tuple[float, int]] = deque()  # (its end, its block), oldest first
    written_at: dict[int, float] = {}
    ready: dict[int, float] = {}
    in_memory: set[int] = set()  # used while it was being written
    made: set[int] = set()  # blocks that were used
    next_read = 0
    saves = trace.span("save") if again else {}
    region_of = {block: at for at in again for block in trace.regions[at].members}
    first_member = {trace.regions[at].members[0]: at for at in again}
    last_member = {max(trace.regions[at].members, key=saves.__getitem__): at for at in again}
    without: set[int] = set()  # regions whose small tensors are discarded now
    small = 0  # bytes of these tensors
    remade: dict[int, int] = {}  # recomputed members, and their bytes
    alive: set[int] = set()  # members
    # By operand, the region whose replay is the last to read it: backward replays them in reverse.
    reader = {
        at: each for each in sorted(again, reverse=True) for at in trace.regions[each].operands
    }
    read_later: dict[int, list[int]] = {}  # by region: operands that the recorded step has freed
    replayed: set[int] = set()  # regions
    order = _order(
        trace, region_of, {block for block, each in enumerate(choices) if each.moved_bytes}
    )

    def come_back(block: int) -> float:
        """Return when a moved block is in memory again; request it now if it was not requested yet."""
        nonlocal up_free, ahead
        if written_at.get(block, 0.0) > clock:
            in_memory.add(block)
        if block in in_memory:
            return 0.0
        if block not in ready:
            nbytes = choices[block].moved_bytes
            up_free = max(up_free, clock) + nbytes / links.up_rate + latency
            ready[block] = up_free
            ahead += nbytes
        return ready[block]

    for at, moment in enumerate(trace.moments):
        now = moment.other_bytes + resident + inflight + ahead - small
        if now > peak:
            peak, peak_moment = now, at
        clock += moment.seconds
        while writing and writing[0][0] <= clock and not trace.runs_ahead:
            inflight -= choices[writing.popleft()[1]].moved_bytes
        block = moment.block
        option = choices[block]
        if block in region_of:
            region = trace.regions[region_of[block]]
            if moment.kind == "save":
                alive.add(block)
                if block in first_member:
                    clock += region.save_seconds
                if block in last_member:
                    without.add(region_of[block])
                    small += region.small_bytes
            elif moment.kind == "use" and block in alive and block not in remade:
                if trace.runs_ahead:
                    in_memory.update(each for _, each in writing)
                for each in region.inputs:
                    if choices[each].moved_bytes and (until := come_back(each)) > clock:
                        stalled += until - clock
                        clock = until
                clock += region.use_seconds
                back = {each: trace.blocks[each].nbytes for each in region.members if each in alive}
                remade |= back
                resident += sum(back.values())
                replayed.add(region_of[block])
                for each in read_later.pop(region_of[block], ()):
                    resident -= choices[each].resident_bytes
                if region_of[block] in without:
                    without.discard(region_of[block])
                    small -= region.small_bytes
                resident_peak = max(resident_peak, resident)
                now = moment.other_bytes + resident + inflight + ahead + region.beside_bytes - small
                if now > peak:
                    peak, peak_moment = now, at + 1
            elif moment.kind == "free":
                alive.discard(block)
                resident -= remade.pop(block, 0)
                if region_of[block] in without:
                    without.discard(region_of[block])
                    small -= region.small_bytes
        elif moment.kind == "save":
            clock += option.save_seconds
            resident += option.resident_bytes
            resident_peak = max(resident_peak, resident)
            nbytes = option.moved_bytes
            if nbytes:
                while writing and inflight + nbytes > windows.inflight_bytes:
                    end, oldest = writing.popleft()
                    inflight -= choices[oldest].moved_bytes
                    stalled += max(0.0, end - clock)
                    clock = max(clock, end)
                down_free = max(down_free, clock) + nbytes / links.down_rate + latency
                written_at[block] = down_free
                writing.append((down_free, block))
                inflight += nbytes
                if (
                    nbytes > windows.inflight_bytes and not trace.runs_ahead
                ):  # written within the save, and in memory until that ends
                    now = moment.other_bytes + resident + inflight + ahead - small
                    if now > peak:
                        peak, peak_moment = now, at + 1
                    writing.pop()
                    inflight -= nbytes
                    stalled += down_free - clock
                    clock = down_free
        elif moment.kind == "use":
            clock += option.use_seconds
            ahead += option.made_bytes
            made.add(block)
            if trace.runs_ahead:
                in_memory.update(each for _, each in writing)
            if option.moved_bytes and (until := come_back(block)) > clock:
                stalled += until - clock
                clock = until
        elif (at_region := reader.get(block)) is not None and at_region not in replayed:
            read_later.setdefault(at_region, []).append(block)
        else:
            resident -= option.resident_bytes
            if block in ready:
                ahead -= option.moved_bytes
            if block in made:
                ahead -= option.made_bytes
        if moment.kind == "use":
            while next_read < len(order):
                block = order[next_read]
                nbytes = choices[block].moved_bytes
                if block not in ready and block not in in_memory:
                    if written_at.get(block, 0.0) > clock:
                        break
                    if ahead + nbytes > windows.prefetch_bytes:
                        break
                    up_free = max(up_free, clock) + nbytes / links.up_rate + latency
                    ready[block] = up_free
                    ahead += nbytes
                next_read += 1
    clock += trace.tail_seconds
    now = trace.tail_other_bytes + resident + inflight + ahead - small
    if now > peak:
        peak, peak_moment = now, len(trace.moments)
    if all_stay:
        peak += trace.beside_left_bytes
    moved_bytes = sum(each.moved_bytes for each in choices)
    return Forecast(clock, peak, stalled, resident_peak, peak_moment, moved_bytes)
