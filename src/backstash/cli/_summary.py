"""Write the summary that ``backstash run`` prints at the end, from the same figures as its JSON."""

from __future__ import annotations

import signal
from dataclasses import asdict, dataclass
from typing import Any

from ..places import label_of
from ..units import format_bytes
from ._advice import next_step
from ._verdict import GOOD_ENDS, only_line, step_line, verdict

__all__ = ["ResidentMemory", "allocator_line", "left_lines", "outcome", "summary"]


@dataclass(frozen=True, slots=True)
class ResidentMemory:
    """The process's resident memory."""

    start_bytes: int
    """Resident bytes after torch was imported, before anything was held."""
    peak_bytes: int
    """The operating system's peak for the whole process."""

    @property
    def over_start_bytes(self) -> int:
        """Peak minus start: at most what the script's own work added."""
        return max(0, self.peak_bytes - self.start_bytes)

    def as_dict(self) -> dict[str, int]:
        """Return the fields as plain values, for JSON."""
        return {**asdict(self), "over_start_bytes": self.over_start_bytes}


def outcome(error: BaseException | None) -> str:
    """Return how a script ended: ``finished``, ``exit 3``, ``SIGINT`` or the name of the exception."""
    if error is None:
        return "finished"
    if isinstance(error, SystemExit):
        status = 0 if error.code is None else error.code if isinstance(error.code, int) else 1
        return f"exit {status}"
    return (
        signal.Signals.SIGINT.name if isinstance(error, KeyboardInterrupt) else type(error).__name__
    )


def summary(
    figures: dict[str, Any],
    other: dict[str, Any] | None = None,
    label: str = "backstash",
    *,
    verbose: bool = False,
) -> str:
    """Return the figures of a run as lines of text, without a newline at the end.

    There are three lines: the peak and the budget; a step and its waiting; what to do next. Notes follow if the
    user has to know more. If one line is enough, only that is returned.

    Args:
        figures: as in the JSON of ``backstash run``.
        other: the figures of another run, to compare with.
        label: put in front of each line.
        verbose: add all other figures. Default ``False``.
    """
    alone = only_line(figures)
    stats = figures["stats"]
    own = figures["notes"] if stats["written_bytes"] else _without_scratch(figures["notes"])
    notes = [f"note: {each}" for each in [*own, *stats["notes"]]]
    if alone:  # if the script failed, a note may say whether to run it again
        lines = [alone, *(notes if figures["outcome"] not in GOOD_ENDS else ())]
    else:
        first = verdict(figures, other)
        if figures["outcome"] not in ("finished", "exit 0"):
            first = f"ended by {figures['outcome']}; {first}"
        notes = [  # those that the lines do not repeat
            note
            for note in notes
            if note.removeprefix("note: ") not in first and "smallest that" not in note
        ]
        lines = [first, step_line(figures), f"next: {next_step(figures)}", *notes]
        lines += _details(figures, stats, other) if verbose else ()
    return "\n".join(f"{label}: {line}" for line in lines)


def _without_scratch(notes: list[str]) -> list[str]:
    """Remove the note on the chosen directory: it matters only if something moved there."""
    return [note for note in notes if not note.startswith("what moves goes to ")]


def _details(
    figures: dict[str, Any], stats: dict[str, Any], other: dict[str, Any] | None
) -> list[str]:
    """Return the figures of the whole run."""
    return [
        *_planned(figures.get("plan")),
        _moved(stats),
        *_let_go(stats),
        _peaks(stats),
        _waits(stats),
        *left_lines(stats["left"]),
        *_steps(figures["steps"]),
        *_devices(figures["devices"], other["devices"] if other is not None else {}),
        _memory(figures["resident"], figures["seconds"], figures["outcome"]),
        allocator_line(figures["allocator"]),
    ]


def _planned(plan: dict[str, Any] | None) -> list[str]:
    """Return one line: the budget, what was done about it, and whether the prediction was right."""
    if plan is None:
        return []
    budget, measured, predicted = (
        format_bytes(plan["budget_bytes"]),
        plan["measured"] or {},
        plan["predicted"] or {},
    )
    peak = format_bytes(measured["peak_bytes"]) if measured else "not measured"
    smallest = format_bytes(plan["smallest_budget_bytes"] or 0)
    expected = format_bytes(predicted["peak_bytes"]) if predicted else "not predicted"
    what = {
        "measuring": "too few steps to plan: all that can move was moved",
        "left alone": f"everything fits; peak of a step {peak}, predicted {expected}",
        "planned": f"peak of a step {peak}, predicted {expected}",
        "loaded": f"a plan from a file, predicted {expected}",
        "too small": f"too small: the smallest that can be kept is {smallest}; peak of a step {peak}",
    }[plan["state"]]
    device = plan.get("device", "cpu")
    of = "" if device == "cpu" else f" of {device}"
    return [f"budget     {budget}{of}: {what}"]


def _moved(stats: dict[str, Any]) -> str:
    size = format_bytes
    share = stats["written_bytes"] / stats["eligible_bytes"] if stats["eligible_bytes"] else 0.0
    again = stats["deduplicated_bytes"]
    where = "moved  " if stats["host_peak_bytes"] else "to disk"
    return (
        f"{where}    {size(stats['written_bytes'])}, {share:.0%} of the "
        f"{size(stats['eligible_bytes'])} that could move; {size(stats['read_bytes'])} came back"
        + (
            f"; another {size(again)} was saved a second time and needed no second move"
            if again
            else ""
        )
    )


def _let_go(stats: dict[str, Any]) -> list[str]:
    """Return lines on what was recomputed and what was packed, if anything was."""
    again, packed = stats["recomputed_bytes"], stats["packed_bytes"]
    lines = []
    if again:
        lines.append(
            f"recomputed {format_bytes(again)}: discarded in forward and recomputed in backward"
        )
    if packed:
        payload = format_bytes(stats["payload_bytes"])
        lines.append(f"packed     {format_bytes(packed)} to {payload}, exactly")
    return lines


def _peaks(stats: dict[str, Any]) -> str:
    peaks = {
        key: stats[f"{key}_peak_bytes"] for key in ("keep", "host", "disk", "inflight", "ahead")
    }
    shown = [
        f"{format_bytes(peak)} {label_of(key)}"
        for key, peak in peaks.items()
        if peak or key != "host"
    ]
    return f"at most    {', '.join(shown)}, each at its own time"


def _waits(stats: dict[str, Any]) -> str:
    uses = stats["prefetch_hits"] + stats["prefetch_misses"]
    return (
        f"waited     {stats['pack_stall_seconds']:.2f} s in forward for space, "
        f"{stats['unpack_stall_seconds']:.2f} s in backward for tensors"
    ) + (f"; {stats['prefetch_hits']} of {uses} were asked for ahead" if uses else "")


def left_lines(left: dict[str, Any]) -> list[str]:
    """Return a line for each reason why tensors stayed in place, most bytes first."""
    by_size = sorted(left.items(), key=lambda item: -item[1]["nbytes"])
    return [
        f"stayed     {_how_much(record)}: {_in_words_of_the_command_line(reason)}"
        for reason, record in by_size
    ]


def _how_much(record: dict[str, int]) -> str:
    if not record["nbytes"]:  # unknown
        return f"{record['count']} times"
    return f"{format_bytes(record['nbytes'])} in {record['count']} saves"


def _in_words_of_the_command_line(reason: str) -> str:
    for name, option in (
        ("disk=", "--disk DIR"),
        ("host=", "--host SIZE"),
        ("min_bytes", "--min-bytes"),
    ):
        reason = reason.replace(name, option)
    return reason


def _steps(steps: dict[str, Any]) -> list[str]:
    if steps["median_seconds"] is None:
        return []
    return [f"steps      {steps['count']}, {steps['median_seconds']:.3g} s each in the median"]


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
        f"memory     {format_bytes(resident['peak_bytes'])} of the process at most, "
        f"{format_bytes(resident['over_start_bytes'])} over the start; {seconds:.1f} s, {ended}"
    )


def allocator_line(allocator: dict[str, Any]) -> str:
    """Return which allocator the process had, and why."""
    where = f" ({allocator['library']})" if allocator["library"] else ""
    return f"allocator  {allocator['kind']}{where}: {allocator['reason']}"
