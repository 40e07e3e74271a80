"""Make the page of a run from the figures in its JSON and the timeline of its first steps."""

from __future__ import annotations

import os
import shlex
from dataclasses import asdict
from datetime import date
from typing import Any

from ..report import Timeline
from ..units import format_bytes
from ._advice import advice
from ._plan_page import plan_section

__all__ = ["run_page"]


def run_page(
    figures: dict[str, Any], line: Timeline, other: dict[str, Any] | None
) -> dict[str, Any]:
    """Return the page as plain values, for :func:`backstash.report.render_page`.

    Args:
        figures: the run's figures, as in its JSON.
        line: the timeline of its first steps.
        other: the figures of another run of the same script, to compare with.
    """
    sections = line.sections()
    sections["notes"] = [*_notes(figures, line), *sections["notes"]]
    return {
        "title": _title(figures["script"]),
        **_rank(figures["job"]),
        "command": figures["command"],
        "made": _made(figures),
        "facts": _facts(figures, line, other),
        "split": _split(figures["stats"]),
        "plan": plan_section(figures["plan"]) if figures.get("plan") else None,
        "advice": [asdict(each) for each in advice(figures)],
        **sections,
    }


def _title(script: list[str]) -> str:
    return script[1] if script[0] == "-m" else os.path.basename(script[0])


def _rank(job: dict[str, int]) -> dict[str, str]:
    """Return which process of a job the page shows, if there are several."""
    if job["processes"] == 1:
        return {}
    return {"subtitle": f"Rank {job['rank']} of a job of {job['processes']} processes"}


def _made(figures: dict[str, Any]) -> str:
    versions, machine = figures["versions"], figures["machine"]
    return (
        f"{date.today().isoformat()} · backstash {versions['backstash']}, torch {versions['torch']} · "
        f"{machine['processor']}, {machine['cores']} cores, {format_bytes(machine['memory_bytes'])}"
    )


def _facts(
    figures: dict[str, Any], line: Timeline, other: dict[str, Any] | None
) -> list[dict[str, Any]]:
    resident, stats = figures["resident"], figures["stats"]
    whole = format_bytes(resident["peak_bytes"])
    steps = len(line.steps)
    recorded = f"in {steps} recorded step{'s' if steps != 1 else ''}" if steps else "recorded"
    events = bool(line.events)
    waited = stats["stall_seconds"] / figures["seconds"] if figures["seconds"] else 0.0
    devices = _devices(figures["devices"], other["devices"] if other is not None else {})
    name = "Peak memory" if not devices else "Peak memory of the process"
    return [
        *devices,
        _fact(name, resident["over_start_bytes"], "bytes", f"over the start; {whole} in all"),
        *_compared(figures, other),
        _fact(
            "Saved at once, at most",
            line.saved_peak_bytes if events else None,
            "bytes",
            f"{recorded}, wherever it was",
        ),
        _fact(
            "In memory, at most",
            line.memory_peak_bytes if events else None,
            "bytes",
            "held by the stash, writes and reads too",
        ),
        _fact(
            "Waited",
            stats["stall_seconds"],
            "seconds",
            f"{waited:.1%} of {figures['seconds']:.1f} s; {stats['prefetch_hits']:,} blocks read ahead of "
            f"need, {stats['prefetch_misses']:,} not",
        ),
        *_made_again(line, recorded),
    ]


def _made_again(line: Timeline, recorded: str) -> list[dict[str, Any]]:
    """Return facts on packing and recomputing in backward, if there was any."""
    recomputed, unpacked = line.recomputed_blocks, line.unpacked_blocks
    if not recomputed and not unpacked:
        return []
    note = f"{recorded}; {recomputed:,} blocks recomputed, {unpacked:,} unpacked"
    return [_fact("Recomputed or unpacked in backward", line.made_again_seconds, "seconds", note)]


def _devices(peaks: dict[str, int], others: dict[str, int]) -> list[dict[str, Any]]:
    notes = {name: f"; {format_bytes(peak)} in the other run" for name, peak in others.items()}
    return [
        _fact(f"Peak on {name}", peak, "bytes", f"of all tensors{notes.get(name, '')}")
        for name, peak in peaks.items()
    ]


def _compared(figures: dict[str, Any], other: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Return the peak and the step time of another run; without one, how to make it."""
    how = _how(figures)
    if other is None:
        note = "the same script, everything in memory"
        return [
            _fact("Peak without a stash", None, "bytes", note, how),
            _fact("Slowdown", None, "ratio", _pace(figures), how),
        ]
    moved = other["stats"]["written_bytes"]
    name = "Peak without a stash" if not moved else "Peak of the other run"
    note = "nothing moved" if not moved else f"{format_bytes(moved)} moved: {other['command']}"
    peak = _fact(name, other["resident"]["over_start_bytes"], "bytes", note)
    own, theirs = figures["steps"]["median_seconds"], other.get("steps", {}).get("median_seconds")
    if own is None or theirs is None:
        return [peak, _fact("Slowdown", None, "ratio", "steps were not seen in both runs")]
    note = f"{own:.3g} s a step; {theirs:.3g} s there"
    return [peak, _fact("Slowdown", own / theirs, "ratio", note)]


def _how(figures: dict[str, Any]) -> str:
    arguments = shlex.join(figures["script"])
    return (
        f"backstash run --keep unlimited --json plain.json {arguments}\n"
        f"{figures['command'].replace('backstash run', 'backstash run --compare plain.json', 1)}"
    )


def _pace(figures: dict[str, Any]) -> str:
    steps = figures["steps"]
    if steps["median_seconds"] is None:
        return "no optimizer was seen to step twice"
    return f"{steps['median_seconds']:.3g} s a step, over {steps['count']} steps"


def _fact(label: str, value: Any, unit: str, note: str, how: str = "") -> dict[str, Any]:
    fact = {"label": label, "value": value, "unit": unit, "note": note}
    return fact | {"how": how} if how else fact


def _split(stats: dict[str, Any]) -> dict[str, Any]:
    packed, payload = stats["packed_bytes"], stats["payload_bytes"]
    freed = f"freed by packing {format_bytes(packed)} to {format_bytes(payload)}"
    left = sorted(stats["left"].items(), key=lambda item: -item[1]["nbytes"])
    parts = [
        ("went down", stats["written_bytes"], "disk"),
        (
            "discarded in forward, and recomputed in backward",
            stats["recomputed_bytes"],
            "recomputed",
        ),
        (freed, packed - payload, "packed"),
        ("stayed in place, within the budget", stats["stayed_bytes"], "keep"),
        *((f"left: {reason}", each["nbytes"], "left") for reason, each in left),
    ]
    return {
        "label": "Where the saved bytes went, in the whole run",
        "parts": [
            {"name": name, "bytes": nbytes, "key": key} for name, nbytes, key in parts if nbytes
        ],
    }


def _notes(figures: dict[str, Any], line: Timeline) -> list[str]:
    found = [*figures["notes"], *figures["stats"]["notes"]]
    if figures["outcome"] not in ("finished", "exit 0"):
        found.insert(0, f"The script did not finish: {figures['outcome']}.")
    recorded, count = len(line.steps), figures["steps"]["count"]
    if recorded and (figures.get("plan") or {}).get("state") in ("planned", "too small"):
        found.append(
            "Steps 1 and 2 were measured with everything moved that could move, step 3 with half of it; the "
            "plan is followed after them."
        )
    if recorded and count > recorded:
        found.append(
            f"The curve, the modules and the waits are of the first {recorded} of {count} steps, which alone "
            "were recorded; peak memory, where the bytes went and the time waited are of the whole run."
        )
    return found
