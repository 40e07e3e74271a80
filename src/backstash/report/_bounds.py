"""Keep a page within limits: cut long tables and thin out long curves; the page says so.

The limits keep the file below about 10 MB and the browser fast. One row adds up the rows that are cut, so sums
stay right. Of each interval of a curve, the moments with the most bytes in memory and with the most bytes below
it stay, and the last moment, so peaks stay right.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["CHANGES", "bounded"]

_ROWS = 20_000
_POINTS = 2_400
_MOVES = 60_000
_LISTED = 200
_NAME = 300
CHANGES = ("memory", "down", "packed", "recomputed")
"""The changes of bytes in the curve of one module."""
_SUMMED = ("bytes", "count", "seconds", "share")


def bounded(report: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of ``report`` with tables, curves and lists cut to the limits, and notes that say so."""
    cut = {key: value for key, value in report.items() if value}
    notes = list(cut.get("notes", ()))
    if "curve" in cut:
        cut["curve"] = _thinned(cut["curve"], notes)
    if "modules" in cut:
        cut["modules"] = _shortened(cut["modules"], cut.get("curve"), notes)
    for name in ("stalls", "advice"):
        if name in cut:
            cut[name] = _first(cut[name], name, notes)
    if "plan" in cut and "classes" in cut["plan"]:
        classes = cut["plan"]["classes"]
        rows = _first(classes["rows"], "classes of the plan", notes)
        classes = {**classes, "rows": [[_short(each) for each in row] for row in rows]}
        cut["plan"] = {**cut["plan"], "classes": classes}
    return cut | {"notes": notes[:_LISTED]}


def _first(items: Sequence[Any], what: str, notes: list[str]) -> Sequence[Any]:
    if len(items) > _LISTED:
        notes.append(f"Of {len(items):,} {what}, the first {_LISTED} are shown.")
    return items[:_LISTED]


def _thinned(curve: Mapping[str, Any], notes: list[str]) -> dict[str, Any]:
    seconds = curve["seconds"]
    if len(seconds) <= _POINTS:
        return dict(curve)
    tiers = curve["tiers"]
    kept = _kept(seconds, _sums(tiers, False), _sums(tiers, True))
    notes.append(
        f"Of {len(seconds):,} changes of the curve {len(kept):,} are drawn: of each interval the moment of the "
        "most memory, that of the most below, and the last."
    )
    thin = [tier | {"bytes": [tier["bytes"][at] for at in kept]} for tier in tiers]
    return {**curve, "seconds": [seconds[at] for at in kept], "tiers": thin}


def _sums(tiers: Sequence[Mapping[str, Any]], below: bool) -> list[int]:
    chosen = [tier["bytes"] for tier in tiers if bool(tier.get("below")) is below]
    return [sum(each) for each in zip(*chosen, strict=True)] if chosen else []


def _kept(seconds: Sequence[float], memory: Sequence[int], below: Sequence[int]) -> list[int]:
    intervals = _POINTS // 3
    width = (seconds[-1] - seconds[0]) / intervals or 1.0
    kept: set[int] = {0}
    first = 0
    while first < len(seconds):
        end = seconds[first] + width
        last = max(first, bisect_right(seconds, end, lo=first) - 1)
        within = range(first, last + 1)
        kept |= {max(within, key=values.__getitem__) for values in (memory, below) if values}
        kept.add(last)
        first = last + 1
    return sorted(kept)


def _shortened(
    modules: Mapping[str, Any], curve: Mapping[str, Any] | None, notes: list[str]
) -> dict[str, Any]:
    columns, rows = modules["columns"], list(modules["rows"])
    cut = {key: value for key, value in modules.items() if key not in ("rows", "lives")}
    if len(columns) > 1 and columns[1]["unit"] in _SUMMED:
        rows.sort(key=lambda row: -(row[1] or 0))
    if len(rows) > _ROWS:
        rest = rows[_ROWS:]
        notes.append(
            f"Of {len(rows):,} rows the first {_ROWS:,} are shown; the last row adds up the others."
        )
        rows[_ROWS:] = [_added_up(columns, rest)]
    cut["rows"] = [[_short(each) for each in row] for row in rows]
    if curve and modules.get("lives"):
        cut["lives"] = _gathered(modules["lives"], curve["seconds"], notes)
    return cut


def _added_up(columns: Sequence[Mapping[str, Any]], rows: Sequence[Sequence[Any]]) -> list[Any]:
    total: list[Any] = [f"({len(rows):,} more rows)"]
    for at, column in enumerate(columns[1:], start=1):
        known = [row[at] for row in rows if row[at] is not None]
        total.append(sum(known) if column["unit"] in _SUMMED and known else None)
    return total


def _short(value: Any) -> Any:
    if not isinstance(value, str) or len(value) <= _NAME:
        return value
    return f"{value[: _NAME // 2]}…{value[-_NAME // 2 :]}"


def _gathered(
    lives: Mapping[str, Any], seconds: Sequence[float], notes: list[str]
) -> dict[str, Any]:
    """Add up moves by path and point of the curve; if there are too many, merge deep paths into their
    parents."""
    points = [max(0, bisect_right(seconds, each) - 1) for each in lives["seconds"]]
    none = [0] * len(points)
    changes = list(zip(*(lives.get(name, none) for name in CHANGES), strict=True))
    paths = [_short(path) for path in lives["paths"]]
    depth = full = max((path.count(".") for path in paths), default=0) + 1
    while len(sums := _sums_of(paths, points, changes)) > _MOVES and depth > 1:
        depth -= 1
        paths = [".".join(path.split(".")[:depth]) for path in paths]
    if depth < full:
        notes.append(
            f"Curves are kept for modules down to level {depth}; a deeper module shows the one above it."
        )
    order = [(path, point, *each) for (path, point), each in sums.items() if any(each)]
    names = list(dict.fromkeys(each[0] for each in order))
    numbers = {name: at for at, name in enumerate(names)}
    return {
        "paths": names,
        "path": [numbers[each[0]] for each in order],
        "point": [each[1] for each in order],
        **{name: [each[2 + at] for each in order] for at, name in enumerate(CHANGES)},
    }


def _sums_of(
    paths: Sequence[str], points: Sequence[int], changes: Sequence[Sequence[int]]
) -> dict[tuple[str, int], list[int]]:
    """Return the changes of bytes in each of ``CHANGES``, by path and by point."""
    sums: dict[tuple[str, int], list[int]] = {}
    for path, point, change in zip(paths, points, changes, strict=True):
        total = sums.setdefault((path, point), [0] * len(CHANGES))
        for at, each in enumerate(change):
            total[at] += each
    return sums
