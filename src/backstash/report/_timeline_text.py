"""A timeline in words: its table, and what could not be known."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .._text import clean
from ..units import format_bytes
from ._lives import RECOMPUTED, UNKNOWN

if TYPE_CHECKING:
    from ._timeline import Timeline

__all__ = ["notes", "table"]

_LONGEST = 10


def notes(line: Timeline) -> list[str]:
    """What could not be known, in sentences."""
    found = []
    if not line.events:
        found.append("Nothing was recorded: no tensor that may move was saved meanwhile.")
    elif not line.steps:
        found.append(
            "Where a step ends is not known: no optimizer stepped and mark() was not called."
        )
    if line.full:
        found.append(
            f"The recording ended by itself at its limit of {len(line.events):,} events; "
            "what came after is not in it."
        )
    lives = line.lives
    if lives.recomputed_bytes:
        found.append(
            f"{format_bytes(lives.recomputed_bytes)} were saved while backward ran (recomputed, or for a "
            f"second backward), marked {RECOMPUTED.strip()}: their path begins at the recomputed part, not at "
            "the model."
        )
    unknown = sum(
        use.saved_bytes for use in lives.modules if use.path.removeprefix(RECOMPUTED) == UNKNOWN
    )
    if unknown:
        found.append(
            f"{format_bytes(unknown)} belong to no known module: they were saved outside any module's "
            "forward, or on a thread that runs none."
        )
    return found


def table(line: Timeline) -> str:
    """The steps, and the modules that saved most."""
    size = format_bytes
    lines = [
        f"timeline: {len(line.events):,} events; saved at once at most {size(line.saved_peak_bytes)}, "
        f"in memory at most {size(line.memory_peak_bytes)}",
        f"  came back: {line.reads_ahead} reads ahead of need, {line.reads_on_demand} on demand",
    ]
    for step in line.steps[:_LONGEST]:
        lines.append(
            f"  step {step.label:<8} {step.seconds:8.3f} s  {step.stall_seconds:7.3f} s waited  "
            f"{size(step.peak_bytes):>9} in memory at most  {size(step.down_bytes):>9} down  "
            f"{size(step.read_bytes):>9} back"
        )
    for use in line.modules[:_LONGEST]:
        lines.append(
            f"  {size(use.saved_bytes):>9} in {use.blocks} blocks, waited {use.stall_seconds:.3f} s: {use.path}"
        )
    hidden = max(0, len(line.modules) - _LONGEST)
    lines += [f"  and {hidden} more modules"] if hidden else []
    lines += [f"  note: {note}" for note in line.notes]
    return "\n".join(map(clean, lines))
