"""From what a stash tells of a step, and samples of memory, to the trace of the step."""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass, field, replace
from typing import Any

from .meter import Measured, Sample
from .regions import Forward, Stays, traced_regions
from .trace import Links, Moment, Option, Trace, TracedBlock, TracedRegion

__all__ = ["StepRecord"]

_KINDS = ("save", "use", "free")
_TRANSFERS = ("write", "read")
_BOUNDS = ("enter", "leave")  # of a forward
_SLOWEST_RATE = 50e6  # bytes per second that are assumed where nothing was moved


@dataclass(slots=True)
class StepRecord:
    """One recorded step."""

    measured: Measured
    """What the device's meter measured."""
    groups: dict[int, str] = field(default_factory=dict)
    """The class of each block by its number."""
    offers: dict[int, dict[str, Option]] = field(default_factory=dict)
    """By the number of a block that was priced: its options beside staying and moving."""
    forwards: list[Forward] = field(default_factory=list)
    """Of the modules that may run again; the events ``"enter"`` and ``"leave"`` have their index here."""
    stays: Stays = field(default_factory=dict)
    """See :func:`traced_regions`."""

    @property
    def began(self) -> float:
        """See :class:`Measured`, as of the next three."""
        return self.measured.began

    @property
    def ended(self) -> float:
        return self.measured.ended

    @property
    def told(self) -> list[tuple[Any, ...]]:
        return self.measured.told

    @property
    def samples(self) -> list[Sample]:
        return self.measured.samples

    @property
    def seconds(self) -> float:
        return self.ended - self.began

    @property
    def stall_seconds(self) -> float:
        return float(sum(event[2] for event in self.told if event[0] == "stall"))

    @property
    def moved_bytes(self) -> int:
        """Both ways together."""
        return sum(event[3] for event in self.told if event[0] in _TRANSFERS)

    @property
    def peak_bytes(self) -> int:
        known = self.measured.known_peak_bytes
        return known or max((held for _, held, _ in self.samples), default=0)


def links_of(records: list[StepRecord]) -> Links:
    """How fast bytes moved: over the time in which at least one transfer of that direction ran."""
    rates = []
    for kind in _TRANSFERS:
        spans = sorted(
            (event[1], event[1] + event[2], event[3])
            for record in records
            for event in record.told
            if event[0] == kind and event[2] > 0
        )
        busy, until = 0.0, 0.0
        for start, end, _ in spans:
            busy += max(0.0, end - max(start, until))
            until = max(until, end)
        moved = sum(nbytes for *_, nbytes in spans)
        rates.append(moved / busy if busy and moved else _SLOWEST_RATE)
    return Links(rates[0], rates[1])


def interference(full: StepRecord, part: StepRecord) -> float:
    """Seconds that moving one byte costs the computing thread beside waiting, from two steps that differ in how
    much they moved; 0 where the difference says nothing."""
    moved = full.moved_bytes - part.moved_bytes
    if moved <= 0.1 * full.moved_bytes:
        return 0.0
    slower = (full.seconds - full.stall_seconds) - (part.seconds - part.stall_seconds)
    return max(0.0, slower / moved)


def trace_of(
    record: StepRecord,
    links: Links,
    seconds_per_byte: float,
    tier: str,
    *,
    runs_ahead: bool = False,
) -> Trace:
    """The trace of a recorded step.

    Args:
        record: of the step.
        links: of the tier below.
        seconds_per_byte: see :func:`interference`; taken off each interval in which bytes moved, and given to
            the option of moving.
        tier: the name of the option that moves a block.
        runs_ahead: see :class:`Trace`.
    """
    offers = _offers(record)
    blocks: list[TracedBlock] = []
    index: dict[int, int] = {}
    moments: list[Moment] = []
    used: set[int] = set()
    samples = deque(record.samples)
    before, waited, transferred = record.began, 0.0, 0
    computed = 0.0  # up to the last moment
    peak = other_before = 0

    def advance(until: float) -> None:
        nonlocal peak
        while samples and samples[0][0] <= until:
            _, held, ours = samples.popleft()
            peak = max(peak, held - ours)

    def since(now: float) -> float:
        """Seconds of computing from the last moment to ``now``."""
        return max(0.0, now - before - waited - seconds_per_byte * transferred)

    for event in record.told:
        kind, start, duration, nbytes, number, *_rest = event
        if kind in _BOUNDS:
            at = computed + since(start)
            record.forwards[number].seconds = (
                at if kind == "enter" else max(0.0, at - record.forwards[number].seconds)
            )
            continue
        advance(start)
        if kind == "stall":
            waited += duration
        elif kind in _TRANSFERS:
            transferred += nbytes
        if kind not in _KINDS or (kind != "save" and number not in index):
            continue
        if kind == "save":
            index[number] = len(blocks)
            options = {
                "keep": Option(nbytes),
                tier: Option(0, seconds_per_byte * nbytes, seconds_per_byte * nbytes, nbytes),
            }
            group = record.groups.get(number, "")
            options |= offers.get(group, {})
            blocks.append(TracedBlock(group, nbytes, options))
        elif kind == "use" and number in used:
            continue
        if kind == "use":
            used.add(number)
        seconds = since(start)
        computed += seconds
        if not peak:
            peak = other_before
        moments.append(Moment(kind, index[number], seconds, max(0, peak)))
        before, waited, transferred, other_before, peak = start, 0.0, 0, peak, 0
    advance(record.ended)
    regions = _alike(traced_regions(record.forwards, record.stays, blocks, index), blocks)
    other = max(0, peak or other_before)
    tail = since(record.ended)
    return Trace(tuple(blocks), tuple(moments), links, tail, other, runs_ahead, regions)


def _alike(
    regions: tuple[TracedRegion, ...], blocks: list[TracedBlock]
) -> tuple[TracedRegion, ...]:
    """The same, with typical seconds for those that let go of like blocks."""
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
    """By class, the options that each of its blocks has, with typical seconds and the most bytes."""
    members: dict[str, list[dict[str, Option]]] = {}
    for number, group in record.groups.items():
        members.setdefault(group, []).append(record.offers.get(number, {}))
    return {
        group: {
            name: _common([each[name] for each in offers])
            for name in set.intersection(*map(set, offers))
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
    """The median; 0 of nothing."""
    return statistics.median(values) if values else 0.0
