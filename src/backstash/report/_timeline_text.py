"""Render a timeline as a table in plain text."""

from __future__ import annotations

from .._text import clean
from ..units import format_bytes
from ._lives import ModuleUse
from ._timeline_figures import TimelineFigures

__all__ = ["table"]

_LONGEST = 10


def table(line: TimelineFigures) -> str:
    """Return lines for the first steps and for the modules that saved most."""
    size = format_bytes
    lines = [
        f"timeline: {len(line.events):,} events; saved at once at most {size(line.saved_peak_bytes)}, "
        f"in memory at most {size(line.memory_peak_bytes)}",
        f"  came back: {line.reads_ahead} reads ahead of need, {line.reads_on_demand} on demand",
    ]
    recomputed, unpacked = line.recomputed_blocks, line.unpacked_blocks
    if recomputed or unpacked:
        lines.append(
            f"  rebuilt: {recomputed} blocks recomputed, {unpacked} unpacked, in "
            f"{line.made_again_seconds:.3f} s"
        )
    for step in line.steps[:_LONGEST]:
        lines.append(
            f"  step {step.label:<8} {step.seconds:8.3f} s  {step.stall_seconds:7.3f} s waited  "
            f"{size(step.peak_bytes):>9} in memory at most  {size(step.down_bytes):>9} down  "
            f"{size(step.read_bytes):>9} back"
        )
    for use in line.modules[:_LONGEST]:
        lines.append(
            f"  {size(use.saved_bytes):>9} in {use.blocks} blocks, waited {use.stall_seconds:.3f} s: {use.path}"
            + _let_go(use)
        )
    hidden = max(0, len(line.modules) - _LONGEST)
    lines += [f"  and {hidden} more modules"] if hidden else []
    lines += [f"  note: {note}" for note in line.notes]
    return "\n".join(map(clean, lines))


def _let_go(use: ModuleUse) -> str:
    """Return how much of a module's saved bytes was packed or recomputed; ``""`` if none."""
    parts = []
    if use.packed_bytes:
        parts.append(
            f"{format_bytes(use.packed_bytes)} packed to {format_bytes(use.payload_bytes)}"
        )
    if use.recomputed_bytes:
        parts.append(f"{format_bytes(use.recomputed_bytes)} recomputed")
    return f" ({', '.join(parts)})" if parts else ""
