"""The summary that ``backstash run`` prints at the end, from the same figures as its JSON."""

from __future__ import annotations

import signal
from dataclasses import asdict, dataclass
from typing import Any

from ..units import format_bytes

__all__ = ["Resident", "outcome", "summary"]


@dataclass(frozen=True, slots=True)
class Resident:
    """The process's resident memory."""

    start_bytes: int
    """Resident bytes after torch was imported, before anything was held."""
    peak_bytes: int
    """The operating system's figure for the peak of the whole process."""

    @property
    def over_start_bytes(self) -> int:
        """Peak less start: at most what the script's own work added."""
        return max(0, self.peak_bytes - self.start_bytes)

    def as_dict(self) -> dict[str, int]:
        """The fields as plain values, for JSON."""
        return {**asdict(self), "over_start_bytes": self.over_start_bytes}


def outcome(error: BaseException | None) -> str:
    """How a script ended: ``finished``, ``exit 3``, ``SIGINT`` or the name of what it raised."""
    if error is None:
        return "finished"
    if isinstance(error, SystemExit):
        status = 0 if error.code is None else error.code if isinstance(error.code, int) else 1
        return f"exit {status}"
    return (
        signal.Signals.SIGINT.name if isinstance(error, KeyboardInterrupt) else type(error).__name__
    )


def summary(
    figures: dict[str, Any], other: dict[str, Any] | None = None, label: str = "backstash"
) -> str:
    """The figures of a run as lines of text, without a newline at the end.

    Args:
        figures: as the JSON of ``backstash run`` has them.
        other: the figures of another run, to compare with.
        label: put in front of each line.
    """
    lines = [
        _moved(figures["stats"]),
        _peaks(figures["stats"]),
        _waits(figures["stats"]),
        *_left(figures["stats"]["left"]),
        *_steps(figures["steps"]),
        *_devices(figures["devices"], other["devices"] if other is not None else {}),
        _memory(figures["resident"], figures["seconds"], figures["outcome"]),
        *_compared(figures, other),
        _allocator(figures["allocator"]),
        *(f"note       {note}" for note in [*figures["notes"], *figures["stats"]["notes"]]),
    ]
    return "\n".join(f"{label}: {line}" for line in lines)


def _moved(stats: dict[str, Any]) -> str:
    size = format_bytes
    share = stats["written_bytes"] / stats["eligible_bytes"] if stats["eligible_bytes"] else 0.0
    again = stats["deduplicated_bytes"]
    where = "moved  " if stats["host_peak_bytes"] else "to disk"
    return (
        f"{where}    {size(stats['written_bytes'])}, {share:.0%} of the "
        f"{size(stats['eligible_bytes'])} that could move; {size(stats['read_bytes'])} came back"
        + (f"; {size(again)} saved again, not moved again" if again else "")
    )


def _peaks(stats: dict[str, Any]) -> str:
    tiers = {
        "in place": "keep_peak_bytes",
        **({"in host memory": "host_peak_bytes"} if stats["host_peak_bytes"] else {}),
        "on disk": "disk_peak_bytes",
        "in flight": "inflight_peak_bytes",
        "read ahead": "ahead_peak_bytes",
    }
    shown = [f"{format_bytes(stats[key])} {name}" for name, key in tiers.items()]
    return f"at most    {', '.join(shown)}"


def _waits(stats: dict[str, Any]) -> str:
    return (
        f"waited     {stats['pack_stall_seconds']:.2f} s in forward, "
        f"{stats['unpack_stall_seconds']:.2f} s in backward; "
        f"{stats['prefetch_hits']} blocks read ahead of need, {stats['prefetch_misses']} not"
    )


def _left(left: dict[str, Any]) -> list[str]:
    by_size = sorted(left.items(), key=lambda item: -item[1]["nbytes"])
    return [
        f"left       {format_bytes(record['nbytes'])} in {record['count']} saves: {reason}"
        for reason, record in by_size
    ]


def _steps(steps: dict[str, Any]) -> list[str]:
    if steps["median_seconds"] is None:
        return []
    return [f"steps      {steps['count']}, {steps['median_seconds']:.3g} s each in the median"]


def _compared(figures: dict[str, Any], other: dict[str, Any] | None) -> list[str]:
    if other is None:
        return []
    own, theirs = figures["resident"]["over_start_bytes"], other["resident"]["over_start_bytes"]
    memory = (
        f"{own / theirs:.0%} of its memory over the start" if theirs else "its memory is not known"
    )
    step, its = figures["steps"]["median_seconds"], other["steps"]["median_seconds"]
    pace = f"{step / its:.2f} of its step" if step and its else "steps were not seen in both runs"
    return [f"compared   {pace}, {memory}: {other['file']}"]


def _devices(peaks: dict[str, int], others: dict[str, int]) -> list[str]:
    shares = {
        name: f", {peaks[name] / peak:.0%} of the other run's"
        for name, peak in others.items()
        if name in peaks
    }
    return [
        f"device     {name}: {format_bytes(peak)} at most{shares.get(name, '')}"
        for name, peak in peaks.items()
    ]


def _memory(resident: dict[str, int], seconds: float, ended: str) -> str:
    return (
        f"resident   {format_bytes(resident['peak_bytes'])} at most, "
        f"{format_bytes(resident['over_start_bytes'])} over the start; {seconds:.1f} s, {ended}"
    )


def _allocator(allocator: dict[str, Any]) -> str:
    where = f" ({allocator['library']})" if allocator["library"] else ""
    return f"allocator  {allocator['kind']}{where}: {allocator['reason']}"
