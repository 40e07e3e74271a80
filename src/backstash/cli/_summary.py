"""Write the summary that ``backstash run`` prints at the end, from the same figures as its JSON."""

from __future__ import annotations

import signal
from typing import Any

from ..units import format_bytes
from ._advice import next_step
from ._verdict import GOOD_ENDS, only_line, step_line, verdict

__all__ = ["allocator_line", "left_lines", "outcome", "summary"]


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
        lines += _details(figures, stats) if verbose else ()
    return "\n".join(f"{label}: {line}" for line in lines)


def _without_scratch(notes: list[str]) -> list[str]:
    """Remove the note on the chosen directory: it matters only if something moved there."""
    return [note for note in notes if not note.startswith("what moves goes to ")]


def _details(figures: dict[str, Any], stats: dict[str, Any]) -> list[str]:
    """Return the figures of the whole run."""
    return [
        *_planned(figures.get("plan")),
        *_statistics(stats),
        *left_lines(stats["left"]),
        *(
            f"device     {name}: {format_bytes(peak)} at most"
            for name, peak in figures["devices"].items()
        ),
        _memory(figures["resident"], figures["seconds"], figures["outcome"]),
        allocator_line(figures["allocator"]),
    ]


def _planned(plan: dict[str, Any] | None) -> list[str]:
    """Return one line: the budget, the plan's state, and whether the prediction was right."""
    if plan is None:
        return []
    budget = format_bytes(plan["budget_bytes"])
    of = "" if plan.get("device", "cpu") == "cpu" else f" of {plan['device']}"
    measured, predicted = (
        f"not {name}" if plan[name] is None else f"{name} {format_bytes(plan[name]['peak_bytes'])}"
        for name in ("measured", "predicted")
    )
    return [f"budget     {budget}{of}: {plan['state']}; peak of a step: {measured}, {predicted}"]


def _statistics(stats: dict[str, Any]) -> list[str]:
    """Return a line for each figure of the stash that is not 0, by its name in the documentation."""
    figures = {name: value for name, value in stats.items() if isinstance(value, int | float)}
    return [f"{name:<22} {_with_unit(name, value)}" for name, value in figures.items() if value]


def _with_unit(name: str, value: float) -> str:
    if name.endswith("_bytes"):
        return format_bytes(int(value))
    return f"{value:.2f} s" if name.endswith("_seconds") else f"{value:,}"


def left_lines(left: dict[str, Any]) -> list[str]:
    """Return a line for each reason why tensors stayed in place, most bytes first."""
    by_size = sorted(left.items(), key=lambda item: -item[1]["nbytes"])
    return [
        f"stayed     {_size(record)}{record['count']} saves: {reason}" for reason, record in by_size
    ]


def _size(record: dict[str, int]) -> str:
    return f"{format_bytes(record['nbytes'])} in " if record["nbytes"] else ""  # else unknown


def _memory(resident: dict[str, int], seconds: float, ended: str) -> str:
    return (
        f"memory     {format_bytes(resident['peak_bytes'])} of the process at most, "
        f"{format_bytes(resident['over_start_bytes'])} over the start; {seconds:.1f} s, {ended}"
    )


def allocator_line(allocator: dict[str, Any]) -> str:
    """Return which allocator the process had, and why."""
    where = f" ({allocator['library']})" if allocator["library"] else ""
    return f"allocator  {allocator['kind']}{where}: {allocator['reason']}"
