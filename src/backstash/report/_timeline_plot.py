"""A timeline as one picture: bytes in memory above the line, evicted bytes below it, moves and stalls last."""

from __future__ import annotations

from typing import Any

from ..units import format_bytes
from ._levels import BELOW, TIERS
from ._timeline_snapshot import Snapshot

__all__ = ["plot"]

_COLORS = {
    "keep_bytes": "#3b6fb6",
    "inflight_bytes": "#e3a02e",
    "ahead_bytes": "#3aa387",
    "host_bytes": "#8a63b3",
    "disk_bytes": "#8a94a3",
    "packed_bytes": "#6f9f3c",
    "recomputed_bytes": "#c76b98",
}
_ROWS = {
    "read": ("came back", "#3aa387"),
    "write": ("went down", "#e3a02e"),
    "decode": ("made again", "#c76b98"),
    "stall": ("waited", "#c8453b"),
}
_SEEN = 1 / 2000  # the least width of a bar, as a part of the picture


def plot(line: Snapshot) -> Any:
    """The picture as a figure, which belongs to no window."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("plot() draws with matplotlib: pip install 'backstash[plot]'") from error
    figure = Figure(figsize=(11, 5.5), layout="constrained")
    held, moved = figure.subplots(2, 1, sharex=True, height_ratios=[4, 1])
    _draw_levels(held, line)
    _draw_moves(moved, line)
    _draw_phases(held, line)
    _draw_steps(held, line)
    if held.get_legend_handles_labels()[1]:
        held.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    figure.suptitle(
        f"Saved at once at most {format_bytes(line.saved_peak_bytes)}, in memory at most "
        f"{format_bytes(line.memory_peak_bytes)}",
        x=0.01,
        ha="left",
        fontsize=12,
    )
    return figure


def _draw_levels(axes: Any, line: Snapshot) -> None:
    began = line.began_seconds
    seconds = [level.seconds - began for level in line.levels]
    above, below = [0] * len(seconds), [0] * len(seconds)
    for field, name in TIERS.items():
        values = [getattr(level, field) for level in line.levels]
        if not any(values):
            continue
        base = below if field in BELOW else above
        sign = -1 if field in BELOW else 1
        top = [old + sign * value for old, value in zip(base, values, strict=True)]
        axes.fill_between(
            seconds, base, top, step="post", color=_COLORS[field], label=name, linewidth=0
        )
        base[:] = top
    axes.axhline(0, color="#222222", linewidth=0.8)
    axes.yaxis.set_major_formatter(lambda value, _: format_bytes(abs(round(value))))
    axes.yaxis.set_major_locator(_binary_ticks(max([*above, *(-each for each in below), 1])))
    axes.set_ylabel("below   |   in memory")
    axes.margins(x=0)
    axes.set_xlim(left=0)
    for side in ("top", "right", "bottom"):
        axes.spines[side].set_visible(False)
    axes.tick_params(bottom=False)


def _binary_ticks(most: int) -> Any:
    """Ticks at a power of two of bytes, about four of them up to ``most``."""
    from matplotlib.ticker import MultipleLocator

    return MultipleLocator(2 ** max(0, (most // 3).bit_length() - 1))


def _draw_moves(axes: Any, line: Snapshot) -> None:
    began = line.began_seconds
    last = max((event.seconds + event.duration_seconds for event in line.events), default=began)
    least = (last - began) * _SEEN
    kinds = {event.kind for event in line.events}
    rows = {kind: row for kind, row in _ROWS.items() if kind != "decode" or kind in kinds}
    for row, (kind, (_, color)) in enumerate(rows.items()):
        bars = [
            (event.seconds - began, max(event.duration_seconds, least))
            for event in line.events
            if event.kind == kind and (kind != "stall" or event.duration_seconds >= least)
        ]
        axes.broken_barh(bars, (row - 0.4, 0.8), color=color, linewidth=0)
    axes.set_yticks(range(len(rows)), [name for name, _ in rows.values()])
    axes.set_xlabel("seconds")
    axes.tick_params(left=False)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def _draw_phases(axes: Any, line: Snapshot) -> None:
    """A shade behind backward, if forward and backward alternate about once a step."""
    if len(line.phases) > 4 * max(1, len(line.steps)):
        return
    began = line.began_seconds
    label = "backward"
    for phase in line.phases:
        if phase.name == "backward":
            span = (phase.begin_seconds - began, phase.end_seconds - began)
            axes.axvspan(*span, color="#eef0f3", zorder=0, linewidth=0, label=label)
            label = ""


def _draw_steps(axes: Any, line: Snapshot) -> None:
    began = line.began_seconds
    many = len(line.steps) > 12
    for step in line.steps:
        axes.axvline(
            step.end_seconds - began, color="#222222", linewidth=0.6, linestyle=(0, (3, 3))
        )
        if not many:
            middle = (step.begin_seconds + step.end_seconds) / 2 - began
            axes.annotate(
                f"step {step.label}",
                (middle, 1),
                xycoords=("data", "axes fraction"),
                xytext=(0, 3),
                textcoords="offset points",
                ha="center",
                fontsize=9,
                color="#555555",
            )
