"""Render a timeline as sections of a page: curve, modules, stalls and notes."""

from __future__ import annotations

from typing import Any

from ._bounds import CHANGES
from ._levels import BELOW, TIERS
from ._timeline_figures import TimelineFigures

__all__ = ["facts_of", "sections_of"]

_LET_GO = (
    ("packed", "packed_bytes"),
    ("packed to", "payload_bytes"),
    ("recomputed", "recomputed_bytes"),
)
_STALLS = 50
_LEAST_STALL_SECONDS = 1e-3


def facts_of(line: TimelineFigures) -> list[dict[str, Any]]:
    """Return the headline of a page that shows only the timeline."""
    waited = sum(event.duration_seconds for event in line.stalls)
    return [
        _fact("Saved at once, at most", line.saved_peak_bytes, "bytes", "wherever it was"),
        _fact(
            "In memory, at most",
            line.memory_peak_bytes,
            "bytes",
            "held by the stash, writes and reads too",
        ),
        _fact("Waited for the stash", waited, "seconds", "all computing threads, all steps"),
        _fact(
            "Reads ahead of need", line.reads_ahead, "count", f"{line.reads_on_demand} on demand"
        ),
        *_made_again(line),
    ]


def _made_again(line: TimelineFigures) -> list[dict[str, Any]]:
    """Return facts on packing and recomputing in backward, if there was any."""
    recomputed, unpacked = line.recomputed_blocks, line.unpacked_blocks
    if not recomputed and not unpacked:
        return []
    note = f"{recomputed:,} blocks recomputed, {unpacked:,} unpacked; without reads and waits"
    return [_fact("Recomputed or unpacked in backward", line.made_again_seconds, "seconds", note)]


def _fact(label: str, value: Any, unit: str, note: str) -> dict[str, Any]:
    return {"label": label, "value": value, "unit": unit, "note": note}


def sections_of(line: TimelineFigures) -> dict[str, Any]:
    """Return ``curve``, ``modules``, ``stalls`` and ``notes`` for :func:`render_page`."""
    began = line.began_seconds
    stalls = _stalls(line, began)
    quiet = ["No wait was as long as 1 ms."] if line.stalls and not stalls else []
    return {
        "curve": _curve(line, began) if line.levels else None,
        "modules": _modules(line, began) if line.modules else None,
        "stalls": stalls,
        "notes": [*quiet, *line.notes],
    }


def _curve(line: TimelineFigures, began: float) -> dict[str, Any]:
    levels = line.levels
    tiers: list[dict[str, Any]] = [
        {
            "key": field.removesuffix("_bytes"),
            "name": name,
            "below": field in BELOW,
            "bytes": [getattr(level, field) for level in levels],
        }
        for field, name in TIERS.items()
    ]
    quiet = len(line.phases) <= 4 * max(1, len(line.steps))
    return {
        "seconds": [round(level.seconds - began, 6) for level in levels],
        "tiers": [tier for tier in tiers if any(tier["bytes"])],
        "marks": [_span(step.label, step, began) for step in line.steps],
        "phases": [_span(phase.name, phase, began) for phase in line.phases] if quiet else [],
    }


def _span(label: str, span: Any, began: float) -> dict[str, Any]:
    begin, end = span.begin_seconds - began, span.end_seconds - began
    return {"label": label, "begin": round(begin, 6), "end": round(end, 6)}


def _modules(line: TimelineFigures, began: float) -> dict[str, Any]:
    let_go = [
        (label, field)
        for label, field in _LET_GO
        if any(getattr(use, field) for use in line.modules)
    ]
    columns = [
        {"label": "module", "unit": "text"},
        {"label": "saved", "unit": "bytes"},
        {"label": "went down", "unit": "bytes"},
        *({"label": label, "unit": "bytes"} for label, _ in let_go),
        {"label": "blocks", "unit": "count"},
        {"label": "uses", "unit": "count"},
        {"label": "waited for", "unit": "seconds"},
    ]
    rows = [
        [
            use.path,
            use.saved_bytes,
            use.down_bytes,
            *(getattr(use, field) for _, field in let_go),
            use.blocks,
            use.uses,
            round(use.stall_seconds, 6),
        ]
        for use in line.modules
    ]
    moves = line.lives.moves
    lives: dict[str, list[Any]] = {
        "paths": [move.path for move in moves],
        "seconds": [round(move.seconds - began, 6) for move in moves],
    }
    for name in CHANGES:
        lives[name] = [getattr(move, f"{name}_bytes") for move in moves]
    count = len(line.steps)
    span = f"over {count} step{'s' if count != 1 else ''}" if count else "over the whole recording"
    note = f"What each module's own operations saved, {span}."
    return {"columns": columns, "rows": rows, "lives": lives, "note": note}


def _stalls(line: TimelineFigures, began: float) -> list[dict[str, Any]]:
    return [
        {
            "seconds": round(event.seconds - began, 6),
            "duration": event.duration_seconds,
            "module": line.lives.paths.get(event.block, event.module)
            or ("space for more" if event.cause == "pack" else "not known"),
            "what": "forward" if event.cause == "pack" else "backward",
        }
        for event in line.stalls[:_STALLS]
        if event.duration_seconds >= _LEAST_STALL_SECONDS
    ]
