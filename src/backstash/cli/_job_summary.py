"""The summary of a job: its ranks on this machine side by side, from what each has left."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

from ..launcher import Job, numbers
from ..units import format_bytes
from ._ranks import DIED, Record
from ._summary import allocator_line, left_lines
from ._verdict import GOOD_ENDS, NO_TORCH, largest

__all__ = ["job_facts", "job_rows", "job_summary", "slowest"]

_GOOD_ENDS = (*GOOD_ENDS, NO_TORCH)
_SAME_PACE = 0.02  # of a step: ranks that wait for one another in each step differ by less

COLUMNS = (
    ("rank", "text"),
    ("peak", "text"),
    ("moved", "bytes"),
    ("came back", "bytes"),
    ("waited", "seconds"),
    ("steps", "count"),
    ("a step", "seconds"),
    ("ended", "text"),
)
"""Of the table: the name of each column, and its unit."""


def job_summary(job: Job, records: dict[int, Record], *, verbose: bool = False) -> str:
    """The lines, without a newline at the end.

    Where a rank failed, what is not about that is left out: it would hide a traceback.

    Args:
        job: of this process.
        records: by rank, what each has left.
        verbose: add what stayed in place, the allocator, and all notes. Default ``False``.
    """
    known = {rank: each["figures"] for rank, each in records.items() if each["figures"] is not None}
    failed = any(each["outcome"] not in _GOOD_ENDS for each in records.values())
    lines = [*job_facts(job, records), *_table(records)]
    if known and not failed:
        first = next(iter(known.values()))
        if verbose:
            lines += [
                *_by_ranks(known, lambda figures: left_lines(figures["stats"]["left"])),
                allocator_line(first["allocator"]),
            ]
        notes = notes_of if verbose else lambda figures: figures["stats"]["notes"]
        lines += _by_ranks(known, lambda figures: [f"note: {note}" for note in notes(figures)])
    return "\n".join(f"backstash: {line}" for line in lines)


def notes_of(figures: dict[str, Any]) -> list[str]:
    """What there is to know about one rank's figures."""
    return [*figures["notes"], *figures["stats"]["notes"]]


def job_facts(job: Job, records: dict[int, Record]) -> list[str]:
    """The first lines: which ranks these are, who failed, whose peak is the largest, who is the slowest."""
    known = {rank: each["figures"] for rank, each in records.items() if each["figures"] is not None}
    here = f"ranks {numbers(records)} of {job.processes}"
    if len(records) < job.processes:
        here += ", those that were seen on this machine"
    bad = {rank: each for rank, each in records.items() if each["outcome"] not in _GOOD_ENDS}
    if bad:
        return [f"{here}: {'; '.join(_how(rank, each) for rank, each in bad.items())}"]
    if not known:
        return [f"{here}: nothing was held"]
    return [f"{here}: {_peaks(known)}", *_pace(known)]


def _how(rank: int, record: Record) -> str:
    figures = record["figures"]
    if record["outcome"] != DIED:
        after = f" after {figures['seconds']:.1f} s" if figures is not None else ""
        return f"rank {rank} ended by {record['outcome']}{after}"
    if figures is None:
        return f"rank {rank} died before it imported torch"
    return (
        f"rank {rank} died: its process is gone, and its last figures are of {figures['seconds']:.1f} s after "
        f"its start, {figures['steps']['count']} steps"
    )


def _peaks(known: dict[int, dict[str, Any]]) -> str:
    peaks = {rank: largest(figures) for rank, figures in known.items()}
    most = max(peaks, key=lambda rank: peaks[rank][1])
    where, nbytes = peaks[most]
    total = sum(each for _, each in peaks.values())
    text = f"the largest peak is rank {most}'s, {format_bytes(nbytes)}{where}"
    return f"{text}; all peaks add up to {format_bytes(total)}"


def slowest(known: dict[int, dict[str, Any]]) -> int:
    """The rank whose steps take longest; where they take the same, the one that waited longest for a stash."""
    paces = {rank: figures["steps"]["median_seconds"] for rank, figures in known.items()}
    timed = {rank: pace for rank, pace in paces.items() if pace is not None}
    if timed and max(timed.values()) - min(timed.values()) > _SAME_PACE * max(timed.values()):
        return max(timed, key=lambda rank: timed[rank])
    return max(known, key=lambda rank: float(known[rank]["stats"]["stall_seconds"]))


def _pace(known: dict[int, dict[str, Any]]) -> list[str]:
    if len(known) == 1:
        return []
    worst = slowest(known)
    paces = {rank: figures["steps"]["median_seconds"] for rank, figures in known.items()}
    timed = [pace for pace in paces.values() if pace is not None]
    waited = known[worst]["stats"]["stall_seconds"]
    if paces[worst] is not None and paces[worst] - min(timed) > _SAME_PACE * paces[worst]:
        return [
            f"the slowest is rank {worst}: {paces[worst]:.3g} s a step, {min(timed):.3g} s on the fastest; it "
            f"waited {waited:.2f} s for tensors to move"
        ]
    pace = f"steps take {max(timed):.3g} s on all; " if timed else ""
    return [
        f"{pace}rank {worst} waited longest for tensors to move, {waited:.2f} s"
        if waited
        else f"{pace}no rank waited for tensors to move"
    ]


def job_rows(records: dict[int, Record]) -> list[list[Any]]:
    """The values of the table, a row a rank; ``None`` is not known."""
    return [_row(rank, each["figures"], each["outcome"]) for rank, each in records.items()]


def _row(rank: int, figures: dict[str, Any] | None, outcome: str) -> list[Any]:
    if figures is None:
        return [str(rank), *[None] * (len(COLUMNS) - 2), outcome]
    stats, steps = figures["stats"], figures["steps"]
    where, peak = largest(figures)
    return [
        str(rank),
        f"{format_bytes(peak)}{where}",
        stats["written_bytes"],
        stats["read_bytes"],
        stats["stall_seconds"],
        steps["count"],
        steps["median_seconds"],
        outcome,
    ]


_UNITS: dict[str, Callable[[Any], str]] = {
    "text": str,
    "bytes": format_bytes,
    "count": str,
    "seconds": lambda value: f"{value:.3g} s",
}


def _table(records: dict[int, Record]) -> list[str]:
    rows = [[name for name, _ in COLUMNS]]
    for row in job_rows(records):
        cells = zip(row, COLUMNS, strict=True)
        rows.append(["-" if each is None else _UNITS[unit](each) for each, (_, unit) in cells])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if unit == "text" and name != "rank" else cell.rjust(width)
            for cell, width, (name, unit) in zip(row, widths, COLUMNS, strict=True)
        ).rstrip()
        for row in rows
    ]


def _by_ranks(
    known: dict[int, dict[str, Any]], lines_of: Callable[[dict[str, Any]], list[str]]
) -> list[str]:
    """Each different line once, with the ranks that have it where not all do."""
    found: dict[str, list[int]] = defaultdict(list)
    for rank, figures in known.items():
        for line in lines_of(figures):
            found[line].append(rank)
    return [
        line
        if len(ranks) == len(known)
        else f"{line} (rank{'s'[: len(ranks) > 1]} {numbers(ranks)})"
        for line, ranks in found.items()
    ]
