"""Turn a stash's events and memory samples of a step into the step's trace."""

from __future__ import annotations

import bisect
import itertools
import math
import statistics
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from .._plan.regions import Forward, Stays, traced_regions
from .._plan.trace import Links, Moment, Option, Trace, TracedBlock, TracedRegion
from .meter import Measured, Sample

__all__ = ["Costs", "StepRecord"]

_KINDS = ("save", "use", "free")
_TRANSFERS = ("write", "read")
_RETURNS = ("read", "decode")
_HOOKS = ("pack hook", "unpack hook")  # each for one block
_OURS = (*_HOOKS, "region hook")
_BOUNDS = ("enter", "leave")  # of a forward
_SLOWEST_RATE = 50e6  # bytes per second, assumed if nothing was moved


@dataclass(slots=True)
class StepRecord:
    """One recorded step."""

    measured: Measured
    """The meter's measurements."""
    groups: dict[int, str] = field(default_factory=dict)
    """The class of each block by its number."""
    offers: dict[int, dict[str, Option]] = field(default_factory=dict)
    """By the number of a priced block: its options other than staying and moving."""
    again: dict[int, int] = field(default_factory=dict)
    """By the number of a block that was saved more than once: the number of blocks in the step at its last
    save."""
    copies: set[int] = field(default_factory=set)
    """The numbers of blocks whose memory had been saved before in this step, and had moved: a step that holds
    what is saved again until its last save has no such blocks."""
    forwards: list[Forward] = field(default_factory=list)
    """Forwards of modules that may be recomputed; the events ``"enter"`` and ``"leave"`` contain their
    index."""
    stays: Stays = field(default_factory=dict)
    """See :func:`traced_regions`."""
    fault_seconds: float = 0.0
    """Seconds spent allocating memory that was returned to the system in order to measure the step."""

    @property
    def began(self) -> float:
        """See :class:`Measured`, also for the next three."""
        return self.measured.began

    @property
    def ended(self) -> float:
        return self.measured.ended

    @property
    def events(self) -> list[tuple[Any, ...]]:
        return self.measured.events

    @property
    def samples(self) -> list[Sample]:
        return self.measured.samples

    @property
    def seconds(self) -> float:
        return self.ended - self.began

    @property
    def unmeasured_seconds(self) -> float:
        """Seconds that the step would have taken without being measured."""
        return self.seconds - self.measured.looking_seconds

    @property
    def stall_seconds(self) -> float:
        return float(sum(event[2] for event in self.events if event[0] == "stall"))

    @property
    def blocks(self) -> int:
        """Number of saved blocks."""
        return sum(event[0] == "save" for event in self.events)

    def hook_seconds(self, kind: str) -> float:
        """Return the mean seconds of a hook (one of ``_HOOKS``) per block, without waits, and without the hook
        that begins the step, which takes the record of the step before."""
        seconds = sum(
            own for event, own in _own_seconds(self) if event[0] == kind and event[1] > self.began
        )
        return seconds / max(1, self.blocks)

    @property
    def computing_seconds(self) -> float:
        """Seconds of the step without waits, hooks and ``fault_seconds``."""
        hooks = sum(own for event, own in _own_seconds(self) if event[0] in _OURS)
        return max(0.0, self.seconds - self.stall_seconds - hooks - self.fault_seconds)

    @property
    def saved_bytes(self) -> int:
        """Bytes of the saved blocks."""
        return sum(event[3] for event in self.events if event[0] == "save")

    @property
    def used_bytes(self) -> int:
        """Bytes of the saved tensors that backward used. A step that tries what recomputing costs saves more,
        which only its trials read."""
        return sum(event[3] for event in self.events if event[0] == "use")

    @property
    def moved_bytes(self) -> int:
        """Bytes transferred, both directions together."""
        return sum(event[3] for event in self.events if event[0] in _TRANSFERS)

    @property
    def peak_bytes(self) -> int:
        known = self.measured.known_peak_bytes
        return known or max((held for _, held, _ in self.samples), default=0)

    @property
    def graph_peak_bytes(self) -> int:
        """The peak up to the last use of a block: no plan changes what an optimizer or an evaluation holds
        after that. If the device knows its own peak, that one."""
        known = self.measured.known_peak_bytes
        # A block's death is reported at the next call, which may be in the next step.
        last = max((event[1] for event in self.events if event[0] == "use"), default=self.ended)
        return known or max((held for at, held, _ in self.samples if at <= last), default=0)


def _own_seconds(record: StepRecord) -> Iterator[tuple[tuple[Any, ...], float]]:
    """Yield each event of a step with the seconds that the computing thread waited or spent in a hook.

    A hook's seconds exclude the waits in it, which are reported before its end; a region hook's also exclude
    other hooks in it. The first hook begins before the step.
    """
    waits: list[tuple[float, float]] = []
    hooks: list[tuple[float, float]] = []
    for event in record.events:
        kind, start, duration, *_ = event
        if start < record.began:
            start, duration = record.began, max(0.0, start + duration - record.began)
        if kind == "stall":
            waits.append((start, duration))
            yield event, duration
        elif kind in _OURS:
            inside = waits if kind in _HOOKS else [*waits, *hooks]
            yield event, max(0.0, duration - sum(took for at, took in inside if at >= start))
            # An earlier wait may be in an enclosing region hook.
            waits[:] = [each for each in waits if each[0] < start] if record.forwards else []
            if kind in _HOOKS:
                hooks.append((start, duration))
            else:
                hooks.clear()
        else:
            yield event, 0.0


def links_of(records: list[StepRecord]) -> Links:
    """Return the transfer rates, over the time in which at least one transfer of that direction ran."""
    rates = []
    for kind in _TRANSFERS:
        busy, moved = 0.0, 0
        for record in records:  # each has its own clock: an accelerator's starts with the step
            until = -math.inf
            spans = sorted(
                (event[1], event[1] + event[2], event[3])
                for event in record.events
                if event[0] == kind and event[2] > 0
            )
            for start, end, nbytes in spans:
                busy += max(0.0, end - max(start, until))
                until = max(until, end)
                moved += nbytes
        rates.append(moved / busy if busy and moved else _SLOWEST_RATE)
    return Links(rates[0], rates[1])


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds that the stash adds to the computing thread, without waits; figures per block are means."""

    per_moved_byte: float = 0.0
    """Outside the hooks: for memory that is allocated again, and for what else uses the machine."""
    kept: tuple[float, float] = (0.0, 0.0)
    """In the hooks, for a block that stays: at its save and at its use."""
    moved: tuple[float, float] = (0.0, 0.0)
    """In the hooks, for a block that moves: at its save and at its use."""
    computing_seconds: float | None = None
    """Seconds of a step without all of this; ``None``: as in the record at hand."""
    fault_seconds: float = 0.0
    """See :attr:`Trace.anew_seconds`."""
    left_seconds: float | None = None
    """See :class:`Trace`."""
    extra_each: float = 0.0
    """Outside the hooks, per block: half at its save and half at its use."""


def costs_of(
    full: StepRecord, part: StepRecord, links: Links, *, copies_aside: bool = False
) -> Costs:
    """Return the costs from two steps that moved different amounts; ``part``, the later one, has less
    first-time cost.

    The cost of a byte outside the hooks is the difference of the steps, but at least 0 and at most the time of
    its transfer. (A change of the machine's speed between the steps would add to the difference.) It is 0 where
    copies take no computing time. There the hooks' time is the shorter one, too: in the step that tries what
    recomputing costs the host waits for the device, which is then idle in each hook. The computing time is the
    shorter one of the two steps. The rest of the longer one is due to other programs, or to the host locking or
    allocating memory.
    """
    moved_bytes = full.moved_bytes
    if not moved_bytes:
        return Costs()
    fewer = moved_bytes - part.moved_bytes
    is_alike = fewer <= moved_bytes // 10
    share = part.moved_bytes / moved_bytes
    kept, moved = [], []
    for kind in _HOOKS:
        all_moved, some_moved = full.hook_seconds(kind), part.hook_seconds(kind)
        if copies_aside or is_alike:
            all_moved = stays = min(all_moved, some_moved)
        else:
            stays = min(max(0.0, (some_moved - share * all_moved) / (1 - share)), all_moved)
        kept.append(stays)
        moved.append(all_moved)
    per_byte = 0.0
    if not is_alike and not copies_aside:
        slower = full.computing_seconds - part.computing_seconds
        most = 0.5 / links.down_rate + 0.5 / links.up_rate  # moved_bytes has both directions
        per_byte = min(max(0.0, slower / fewer), most)
    computing = min(each.computing_seconds - per_byte * each.moved_bytes for each in (full, part))
    return Costs(per_byte, (kept[0], kept[1]), (moved[0], moved[1]), max(0.0, computing))


def typical_costs(
    pairs: Sequence[tuple[StepRecord, StepRecord]], links: Links, *, copies_aside: bool = False
) -> Costs:
    """Return the medians of what :func:`costs_of` finds for each pair of steps.

    With several pairs, the computing time is the median over all steps: the shorter of two is less than steps
    usually take.
    """
    found = [costs_of(full, part, links, copies_aside=copies_aside) for full, part in pairs]
    if not any(full.moved_bytes for full, _ in pairs):
        return Costs()
    per_byte = typical([each.per_moved_byte for each in found])
    computing = [
        [each.computing_seconds - per_byte * each.moved_bytes for each in pair] for pair in pairs
    ]
    computing_time = (
        min(computing[0]) if len(pairs) == 1 else typical([*itertools.chain(*computing)])
    )
    kept, moved = (
        (typical([save for save, _ in way]), typical([use for _, use in way]))
        for way in ([each.kept for each in found], [each.moved for each in found])
    )
    # In the first of a pair, trials may have returned memory to the system more often.
    faults = typical([part.fault_seconds for _, part in pairs])
    return Costs(per_byte, kept, moved, max(0.0, computing_time), faults)


def compared_with_unmanaged(costs: Costs, blocks: int, left_seconds: float | None) -> Costs:
    """Return the same costs, given that an unmanaged step took ``left_seconds``; ``None``: there was none.

    This becomes the computing time of a step, so that no plan is predicted to take less. The longer computing
    of steps with ``blocks`` blocks is attributed to these, in addition to the hooks' own time: small tensors
    were packed, too, and the hooks displace data from caches. A plan that leaves most blocks unmanaged has less
    of it.
    """
    if left_seconds is None:
        return costs
    computing = left_seconds if costs.computing_seconds is None else costs.computing_seconds
    each = max(0.0, computing - left_seconds) / max(1, blocks)
    return replace(
        costs, extra_each=each, computing_seconds=left_seconds, left_seconds=left_seconds
    )


class _TimeAside:
    """The time in which the computing thread waited or was in a hook of the stash, as a function of time.

    By the clock, and not by the order of the events: the first hook of a step begins before the step's first
    save, and may take as long as many operations.
    """

    def __init__(self, record: StepRecord) -> None:
        spans = sorted(
            (max(record.began, start), start + duration)
            for kind, start, duration, *_ in record.events
            if kind == "stall" or kind in _OURS
        )
        self._ends: list[float] = []  # of spans that do not overlap
        self._starts: list[float] = []
        self._sums = [0.0]  # seconds in the spans up to each
        for start, end in spans:
            if self._ends and start <= self._ends[-1]:
                if end > self._ends[-1]:
                    self._sums[-1] += end - self._ends[-1]
                    self._ends[-1] = end
            elif end > start:
                self._starts.append(start)
                self._ends.append(end)
                self._sums.append(self._sums[-1] + end - start)

    def until(self, now: float) -> float:
        """Return these seconds up to ``now``."""
        at = bisect.bisect_right(self._starts, now)
        if not at:
            return 0.0
        return self._sums[at] - max(0.0, self._ends[at - 1] - now)


class _Intervals:
    """Between the moments of a recorded step: seconds of computing, and memory that is not the stash's."""

    def __init__(self, record: StepRecord, per_moved_byte: float) -> None:
        self._samples = deque(record.samples)
        self._per_moved_byte = per_moved_byte
        self._aside = _TimeAside(record)
        self._before, self._transferred = record.began, 0
        self.computed = 0.0  # up to the last moment
        # Seconds of moved bytes that did not fit into the intervals up to the last moment.
        self._owed = 0.0
        self._peak = self._peak_before = 0
        self.in_use_bytes = 0
        """Bytes that backward is using and that the stash no longer holds. A plan's step holds them, too."""

    def add_transferred(self, transferred_bytes: int) -> None:
        """Add bytes that moved in this interval."""
        self._transferred += transferred_bytes

    def look(self, until: float) -> None:
        """Read the memory samples up to ``until``."""
        while self._samples and self._samples[0][0] <= until:
            _, held, ours = self._samples.popleft()
            self._peak = max(self._peak, held - ours - self.in_use_bytes)

    def seconds(self, now: float) -> float:
        """Return the seconds of computing from the last moment to ``now``; negative if the next intervals owe
        some."""
        aside = self._aside.until(now) - self._aside.until(self._before)
        return now - self._before - aside - self._per_moved_byte * self._transferred - self._owed

    @property
    def other_bytes(self) -> int:
        """The most memory in this interval, in bytes; without samples in it, that of the interval before."""
        return max(0, self._peak or self._peak_before)

    def end(self, now: float) -> tuple[float, int]:
        """End the interval at a moment; return its seconds, and the most memory in it."""
        rest, other_bytes = self.seconds(now), self.other_bytes
        self._owed = max(0.0, -rest)
        self.computed += max(0.0, rest)
        self._before, self._transferred = now, 0
        self._peak_before, self._peak = self._peak or self._peak_before, 0
        return max(0.0, rest), other_bytes


class _Events:
    """The blocks of a recorded step and their moments, in order.

    Args:
        record: of the step. The forwards in it get their seconds.
        costs: what the stash adds.
        tier: see :func:`trace_of`.
        offers: by class, the ways to hold a block other than staying and moving.
    """

    def __init__(
        self,
        record: StepRecord,
        costs: Costs,
        tier: str,
        offers: Mapping[str, Mapping[str, Option]],
    ) -> None:
        self._record, self._costs, self._tier, self._offers = record, costs, tier, offers
        self._used: set[int] = set()
        self._last_use = {event[4]: event[1] for event in record.events if event[0] == "use"}
        # Blocks that were loaded or computed, and those among all that are used and not the stash's any more.
        self._returned: set[int] = set()
        self._in_use: set[int] = set()
        self.blocks: list[TracedBlock] = []
        self.index: dict[int, int] = {}
        """Of each block's number: its place in :attr:`blocks`."""
        self.moments: list[Moment] = []

    def read(self, intervals: _Intervals) -> None:
        """Read the step to its last event."""
        record = self._record
        for kind, start, duration, nbytes, number, *_rest in record.events:
            if kind in _BOUNDS:
                if number < len(record.forwards):
                    at = intervals.computed + max(0.0, intervals.seconds(start))
                    forward = record.forwards[number]
                    forward.seconds = at if kind == "enter" else max(0.0, at - forward.seconds)
                continue
            intervals.add_transferred(nbytes if kind in _TRANSFERS else 0)
            if kind not in _OURS:
                intervals.look(start)
            if kind in _KINDS and number not in record.copies and self._is_first(kind, number):
                if kind == "save":
                    self._add_block(number, nbytes)
                self.moments.append(Moment(kind, self.index[number], *intervals.end(start)))
            self._note_in_use(intervals, kind, start, duration, number)

    def _note_in_use(
        self, intervals: _Intervals, kind: str, start: float, duration: float, number: int
    ) -> None:
        """Count the bytes that backward uses and the stash does not hold.

        That is a block that was loaded or computed, from its last use to its death, and one that was used in
        place while it was being written, from the end of the write.
        """
        if kind in _RETURNS or (kind == "land" and number in self._used):
            self._returned.add(number)
        if number not in self.index or number not in self._returned:
            return
        nbytes = self.blocks[self.index[number]].nbytes
        if kind == "free":
            if number in self._in_use:
                self._in_use.discard(number)
                intervals.in_use_bytes -= nbytes
        elif number in self._used and number not in self._in_use:
            if start >= self._last_use.get(number, math.inf):  # a load on demand begins after it
                intervals.look(start + duration)
                self._in_use.add(number)
                intervals.in_use_bytes += nbytes

    def _is_first(self, kind: str, number: int) -> bool:
        """Whether this is a save, or the first use or the death of a block that the step saved."""
        if kind == "save":
            return True
        if number not in self.index or (kind == "use" and number in self._used):
            return False
        if kind == "use":
            self._used.add(number)
        return True

    def _add_block(self, number: int, nbytes: int) -> None:
        record, group = self._record, self._record.groups.get(number, "")
        options = _options(nbytes, self._costs, self._tier, self._offers.get(group, {}))
        self.index[number] = len(self.blocks)
        self.blocks.append(TracedBlock(group, nbytes, options, record.again.get(number, 0)))


def trace_of(
    record: StepRecord,
    links: Links,
    costs: Costs,
    tier: str,
    *,
    runs_ahead: bool = False,
    priced: StepRecord | None = None,
) -> Trace:
    """Return the trace of a recorded step.

    Args:
        record: of the step.
        links: of the tier below.
        costs: what the stash adds. The trace's options contain these costs. The costs of hooks and moved bytes
            are subtracted from the interval in which they arose, and from the next ones if that is too short;
            then all intervals are scaled to ``computing_seconds``.
        tier: the name of the option that moves a block.
        runs_ahead: see :class:`Trace`.
        priced: the step whose blocks have options other than staying and moving; ``None``: this one.
    """
    intervals = _Intervals(record, costs.per_moved_byte)
    events = _Events(record, costs, tier, _offers(priced or record))
    events.read(intervals)
    moments, blocks = events.moments, events.blocks
    intervals.look(record.ended)
    tail = max(0.0, intervals.seconds(record.ended))
    if costs.computing_seconds is not None and intervals.computed + tail:
        faster = costs.computing_seconds / (intervals.computed + tail)
        moments = [replace(each, seconds=each.seconds * faster) for each in moments]
        tail *= faster
        for forward in record.forwards:
            forward.seconds *= faster
    regions = traced_regions(record.forwards, record.stays, blocks, events.index)
    regions = tuple(  # the hooks still run for what it saves
        replace(
            each,
            save_seconds=each.save_seconds + len(each.members) * costs.extra_each / 2,
            use_seconds=each.use_seconds
            + len(each.members) * (costs.kept[1] + costs.extra_each / 2),
        )
        for each in _alike(regions, blocks)
    )
    return Trace(
        tuple(blocks),
        tuple(moments),
        links,
        tail,
        intervals.other_bytes,
        runs_ahead,
        regions,
        costs.fault_seconds,
        costs.left_seconds,
    )


def _options(
    nbytes: int, costs: Costs, tier: str, offers: Mapping[str, Option]
) -> dict[str, Option]:
    """Return the ways to hold a block.

    Args:
        nbytes: size of the block.
        costs: per block.
        tier: see :func:`trace_of`.
        offers: the ways other than staying and moving, without the hooks' time.
    """
    (kept_save, kept_use), (moved_save, moved_use) = costs.kept, costs.moved
    save, use = (each + costs.extra_each / 2 for each in costs.kept)
    transfer = costs.per_moved_byte * nbytes
    return {
        "keep": Option(nbytes, save, use),
        tier: Option(
            0,
            save + max(0.0, moved_save - kept_save) + transfer,
            use + max(0.0, moved_use - kept_use) + transfer,
            nbytes,
        ),
    } | {
        name: replace(
            each, save_seconds=each.save_seconds + save, use_seconds=each.use_seconds + use
        )
        for name, each in offers.items()
    }


def _alike(
    regions: tuple[TracedRegion, ...], blocks: list[TracedBlock]
) -> tuple[TracedRegion, ...]:
    """Return the regions with the median seconds of all regions of the same name that discard blocks of the
    same classes."""
    keys = [(each.name, *(blocks[at].group for at in each.members)) for each in regions]
    like: dict[Any, list[TracedRegion]] = {}
    for key, each in zip(keys, regions, strict=True):
        like.setdefault(key, []).append(each)
    seconds = {
        key: (
            typical([each.save_seconds for each in of]),
            typical([each.use_seconds for each in of]),
        )
        for key, of in like.items()
    }
    return tuple(
        replace(each, save_seconds=seconds[key][0], use_seconds=seconds[key][1])
        for key, each in zip(keys, regions, strict=True)
    )


def _offers(record: StepRecord) -> dict[str, dict[str, Option]]:
    """Return, by class, the options that three of four of its blocks have, with median seconds and the most
    bytes.

    The operations that made a step's first blocks may not have been recorded; in the next step they are.
    """
    members: dict[str, list[dict[str, Option]]] = {}
    for number, group in record.groups.items():
        members.setdefault(group, []).append(record.offers.get(number, {}))
    return {
        group: {
            name: _common([each[name] for each in offers if name in each])
            for name, count in Counter(itertools.chain(*offers)).items()
            if 4 * count >= 3 * len(offers)
        }
        for group, offers in members.items()
    }


def _common(options: list[Option]) -> Option:
    return Option(
        max(each.resident_bytes for each in options),
        typical([each.save_seconds for each in options]),
        typical([each.use_seconds for each in options]),
        made_bytes=max(each.made_bytes for each in options),
    )


def typical(values: list[float]) -> float:
    """Return the median; 0 for an empty list."""
    return statistics.median(values) if values else 0.0
