"""Sums up the processes of the step benchmark, one row for each variant."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ._variants import VARIANTS

__all__ = ["Ratio", "Row", "step_rows"]

_BASE = "plain"


@dataclass(frozen=True, slots=True)
class Ratio:
    """A variant's step time divided by another's of the same round, for all rounds."""

    median: float
    """The median round's."""
    least: float
    """The smallest."""
    most: float
    """The largest."""


@dataclass(frozen=True, slots=True)
class Row:
    """One variant."""

    title: str
    """What the table calls it."""
    step_seconds: float
    """The median of the processes' median steps."""
    ratio: Ratio
    """Its step over plain's."""
    same_allocator: Ratio | None
    """Its step over that of plain under the same allocator, where that is not plain itself."""
    peak_bytes: int
    """The resident peak over the resident bytes before the first step; the median process's."""
    peak_share: float
    """That peak over plain's."""
    on_disk: float | None
    """Bytes that went to disk over bytes that could; ``None`` where there is no stash."""
    left: float | None
    """Bytes that were still to be moved after packing and recomputing, over bytes that could; ``None`` without
    a stash that does so and has a disk."""
    exact: bool
    """Whether every process had plain's losses and gradients, to the bit."""


def step_rows(section: dict[str, Any]) -> list[Row]:
    """One row for each variant that ran without failing, in the order of the first round.

    Raises:
        LookupError: plain itself is not among them, so there is nothing to compare with.
    """
    good: dict[str, list[dict[str, Any]]] = {}
    for run in section["runs"]:
        if "failed" not in run:
            good.setdefault(run["variant"], []).append(run)
    if _BASE not in good:
        why = [run["failed"] for run in section["runs"] if run["variant"] == _BASE]
        raise LookupError(
            f"no run of {_BASE!r} to compare with: {'; '.join(why) or 'none was made'}"
        )
    return [_row(key, runs, good) for key, runs in good.items()]


def _row(key: str, runs: list[dict[str, Any]], good: dict[str, list[dict[str, Any]]]) -> Row:
    base = good[_BASE]
    same = _plain_under(runs[0]["allocator"], good)
    peak = statistics.median(map(_peak, runs))
    return Row(
        title=VARIANTS[key].title,
        step_seconds=statistics.median(map(_step, runs)),
        ratio=_ratio(runs, base),
        same_allocator=_ratio(runs, same) if same and same is not runs else None,
        peak_bytes=int(peak),
        peak_share=peak / max(1, statistics.median(map(_peak, base))),
        on_disk=_on_disk(runs),
        left=_left(runs),
        exact=all(
            (run["losses"], run["gradients"]) == (base[0]["losses"], base[0]["gradients"])
            for run in runs
        ),
    )


def _plain_under(allocator: str, good: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    plain = (runs for key, runs in good.items() if VARIANTS[key].title.startswith("plain"))
    return next((runs for runs in plain if runs[0]["allocator"] == allocator), [])


def _ratio(runs: list[dict[str, Any]], base: list[dict[str, Any]]) -> Ratio:
    rounds = {run["repeat"]: _step(run) for run in base}
    ratios = [_step(run) / rounds[run["repeat"]] for run in runs if run["repeat"] in rounds]
    return Ratio(statistics.median(ratios), min(ratios), max(ratios))


def _step(run: dict[str, Any]) -> float:
    seconds: Sequence[float] = run["step_seconds"]
    return statistics.median(seconds)


def _peak(run: dict[str, Any]) -> int:
    over: int = run["resident_peak_bytes"] - run["resident_start_bytes"]
    return over


def _on_disk(runs: list[dict[str, Any]]) -> float | None:
    shares = [
        run["stats"]["written_bytes"] / max(1, run["stats"]["eligible_bytes"])
        for run in runs
        if run.get("stats")
    ]
    return statistics.median(shares) if shares else None


def _left(runs: list[dict[str, Any]]) -> float | None:
    shares = [
        1 - _gone(stats) / max(1, stats["eligible_bytes"])
        for run in runs
        # Without a disk only what is made smaller is counted; with modules that run again, what they save too.
        if (stats := run.get("stats"))
        and stats["written_bytes"]
        and 0 < _gone(stats) <= stats["eligible_bytes"]
    ]
    return statistics.median(shares) if shares else None


def _gone(stats: dict[str, Any]) -> int:
    """The bytes that neither moved nor stayed."""
    packed: int = stats.get("packed_bytes", 0) - stats.get("payload_bytes", 0)
    recomputed: int = stats.get("recomputed_bytes", 0)
    return packed + recomputed
