"""Summarize a job: its ranks side by side, from the figures that each has written."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

from ..launcher import numbers
from ..units import format_bytes
from ._summary import allocator_line, left_lines
from ._verdict import GOOD_ENDS, largest

__all__ = ["job_summary"]

_COLUMNS = ("rank", "peak", "moved", "came back", "waited", "steps", "a step", "ended")
_LEFT_ALIGNED = ("peak", "ended")


def job_summary(found: dict[int, dict[str, Any]], *, verbose: bool = False) -> str:
    """Return the lines, without a newline at the end.

    If a rank failed, only lines about that are included: others would hide its traceback.

    Args:
        found: by rank, the figures as in the JSON of ``backstash run``.
        verbose: add what stayed in place, the allocator, and all notes. Default ``False``.
    """
    first = next(iter(found.values()))
    lines = [*_facts(found, first["job"]["processes"]), *_table(found)]
    if not _failed(found):
        if verbose:
            lines += [
                *_by_ranks(found, lambda figures: left_lines(figures["stats"]["left"])),
                allocator_line(first["allocator"]),
            ]
        notes = _notes if verbose else lambda figures: figures["stats"]["notes"]
        lines += _by_ranks(found, lambda figures: [f"note: {note}" for note in notes(figures)])
    return "\n".join(f"backstash: {line}" for line in lines)


def _notes(figures: dict[str, Any]) -> list[str]:
    return [*figures["notes"], *figures["stats"]["notes"]]


def _failed(found: dict[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
    return {rank: each for rank, each in found.items() if each["outcome"] not in GOOD_ENDS}


def _facts(found: dict[int, dict[str, Any]], processes: int) -> list[str]:
    """Return the first lines: the ranks, which ones failed, whose peak is the largest, which is the slowest."""
    here = f"ranks {numbers(found)} of {processes}"
    if failed := _failed(found):
        how = [
            f"rank {rank} ended by {each['outcome']} after {each['seconds']:.1f} s"
            for rank, each in failed.items()
        ]
        return [f"{here}: {'; '.join(how)}"]
    return [f"{here}: {_peaks(found)}", _pace(found)]


def _peaks(found: dict[int, dict[str, Any]]) -> str:
    peaks = {rank: largest(figures) for rank, figures in found.items()}
    most = max(peaks, key=lambda rank: peaks[rank][1])
    where, nbytes = peaks[most]
    total = sum(each for _, each in peaks.values())
    text = f"the largest peak is rank {most}'s, {format_bytes(nbytes)}{where}"
    return f"{text}; all peaks add up to {format_bytes(total)}"


def _pace(found: dict[int, dict[str, Any]]) -> str:
    """Return which rank waited longest, and which has the longest steps; ranks may wait for one another."""
    waited = {rank: figures["stats"]["stall_seconds"] for rank, figures in found.items()}
    paces = {rank: figures["steps"]["median_seconds"] or 0.0 for rank, figures in found.items()}
    longest, slowest = max(waited, key=waited.__getitem__), max(paces, key=paces.__getitem__)
    text = (
        f"rank {longest} waited longest for tensors to move, {waited[longest]:.2f} s"
        if waited[longest]
        else "no rank waited for tensors to move"
    )
    step = f"the slowest is rank {slowest}, {paces[slowest]:.3g} s a step; "
    return f"{step if paces[slowest] else ''}{text}"


def _table(found: dict[int, dict[str, Any]]) -> list[str]:
    rows = [list(_COLUMNS), *(_row(rank, figures) for rank, figures in found.items())]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if name in _LEFT_ALIGNED else cell.rjust(width)
            for cell, width, name in zip(row, widths, _COLUMNS, strict=True)
        ).rstrip()
        for row in rows
    ]


def _row(rank: int, figures: dict[str, Any]) -> list[str]:
    stats, steps = figures["stats"], figures["steps"]
    where, peak = largest(figures)
    pace = steps["median_seconds"]
    return [
        str(rank),
        f"{format_bytes(peak)}{where}",
        format_bytes(stats["written_bytes"]),
        format_bytes(stats["read_bytes"]),
        f"{stats['stall_seconds']:.3g} s",
        str(steps["count"]),
        "-" if pace is None else f"{pace:.3g} s",
        figures["outcome"],
    ]


def _by_ranks(
    found: dict[int, dict[str, Any]], lines_of: Callable[[dict[str, Any]], list[str]]
) -> list[str]:
    """Return each different line once, with the ranks that have it unless all do."""
    ranks_of: dict[str, list[int]] = defaultdict(list)
    for rank, figures in found.items():
        for line in lines_of(figures):
            ranks_of[line].append(rank)
    return [
        line
        if len(ranks) == len(found)
        else f"{line} (rank{'s'[: len(ranks) > 1]} {numbers(ranks)})"
        for line, ranks in ranks_of.items()
    ]
