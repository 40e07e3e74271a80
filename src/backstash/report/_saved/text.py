"""Render a saved report as a table in plain text, or for rich."""

from __future__ import annotations

from typing import Any

from ..._text import clean
from ...places import label_of
from ...units import format_bytes
from .figures import SavedFigures
from .rows import Row
from .waste import PART, Waste

__all__ = ["as_rich", "as_text", "where_of"]

_HEAD = ("module", "calls", "saved", "unique", "share", "where")
_MOST_ROWS = 30
_MOST_WASTES = 6
_KINDS = (
    ("activation", "made by forward"),
    ("view", "again or as views"),
    ("input", "inputs"),
    ("parameter", "parameters"),
    ("buffer", "buffers"),
)
_NO_MODULE = "(outside any module)"


def as_text(report: SavedFigures, *, advice: bool) -> str:
    """Return the whole report, with or without advice, and without a newline at the end."""
    rows, rest = _shown_rows(report)
    body = [_cells(row) for row in rows]
    if rest:
        body.append((rest, "", "", "", "", ""))
    total = _total(report)
    widths = [max(map(len, column)) for column in zip(_HEAD, *body, total, strict=True)]
    rule = "  ".join("-" * width for width in widths)
    table = [_line(_HEAD, widths), rule, *(_line(cells, widths) for cells in body), rule]
    return "\n".join(
        [*_headline(report), "", *table, _line(total, widths), *_below(report, advice)]
    )


def _headline(report: SavedFigures) -> list[str]:
    """Return the totals, in two lines."""
    size = format_bytes
    kinds = {row.name: row for row in report.by_kind()}
    parts = [
        f"{size(kinds[kind].saved_bytes)} {words}"
        for kind, words in _KINDS
        if kind in kinds and kinds[kind].saved_bytes
    ]
    count = sum(row.saves for row in report.rows)
    peak, unique = report.peak_bytes, report.unique_bytes
    at_once = f", at most {size(peak)} at once" if peak < unique else ""
    first = f"{size(unique)} held for backward, each storage counted once, parameters not{at_once}"
    second = f"{size(report.total_bytes)} saved in all, {count:,} tensor{'' if count == 1 else 's'}"
    return [first, f"{second}: {', '.join(parts)}" if parts else second]


def _shown_rows(report: SavedFigures) -> tuple[tuple[Row, ...], str]:
    """Return the rows to print, folded if there are many, and a line on those left out."""
    rows = report.rows
    if len(rows) > _MOST_ROWS:
        rows = report.folded_rows()
    rest = rows[_MOST_ROWS:]
    unique = sum(row.unique_bytes for row in rest)
    words = f"... {len(rest)} more with {format_bytes(unique)} in all" if rest else ""
    return rows[:_MOST_ROWS], words


def _cells(row: Row) -> tuple[str, ...]:
    return (
        clean(row.name) or _NO_MODULE,
        "" if row.calls is None else f"{row.calls:,}",
        format_bytes(row.saved_bytes),
        format_bytes(row.unique_bytes),
        f"{row.share:.1%}",
        where_of(row),
    )


def where_of(row: Row) -> str:
    """Return the places of a row's bytes, in words."""
    total = sum(row.where.values())
    shares = {place: nbytes / total for place, nbytes in row.where.items() if nbytes}
    shown = {place: share for place, share in shares.items() if share >= 0.005}
    words = [
        f"{label_of(place)} {share:.0%}" if len(shown) > 1 else label_of(place)
        for place, share in shown.items()
    ]
    if row.recomputed_bytes:
        words.append(f"{format_bytes(row.recomputed_bytes)} recomputed")
    if not words and row.saves:
        words.append("parameters only" if row.saved_bytes and not total else "no bytes")
    return ", ".join(words)


def _total(report: SavedFigures) -> tuple[str, ...]:
    saved, unique = format_bytes(report.total_bytes), format_bytes(report.unique_bytes)
    return "total", "", saved, unique, "100.0%" if report.unique_bytes else "", ""


def _line(cells: tuple[str, ...], widths: list[int]) -> str:
    name, *numbers, where = (
        cell.ljust(width) if at in (0, 5) else cell.rjust(width)
        for at, (cell, width) in enumerate(zip(cells, widths, strict=True))
    )
    return "  ".join([name, *numbers, where]).rstrip()


def _below(report: SavedFigures, with_advice: bool) -> list[str]:
    waste, advice = report.waste, report.advice if with_advice else ()
    lines: list[str] = []
    if waste:
        lines += ["", "could be smaller, exactly:"]
        lines += [f"  {line}" for line in _waste_lines(waste)]
        packable = [each for each in waste if each.what != PART]
        if packable:
            gain = sum(each.nbytes - each.could_be_bytes for each in packable)
            lines.append(f'  Stash(policy=lambda saved: Action("pack")): {format_bytes(gain)} less')
    if advice:
        lines += ["", "advice:"]
    for each in advice:
        lines += [f"  {each.code}", f"      {each.text}"] if each.code else [f"  {each.text}"]
    if report.notes:
        lines += ["", *(f"note: {note}" for note in report.notes)]
    return list(map(clean, lines))


def _waste_lines(waste: tuple[Waste, ...]) -> list[str]:
    """Return a line for each of the largest, in columns."""
    cells = [
        (
            f"{format_bytes(each.nbytes)} -> {format_bytes(each.could_be_bytes)}",
            each.what,
            f"{each.tensors} in {clean(each.name) or _NO_MODULE}",
        )
        for each in waste[:_MOST_WASTES]
    ]
    first, second = (max(len(row[at]) for row in cells) for at in (0, 1))
    lines = [f"{a.rjust(first)}  {b.ljust(second)}  {c}" for a, b, c in cells]
    more = waste[_MOST_WASTES:]
    if more:
        gain = sum(each.nbytes - each.could_be_bytes for each in more)
        lines.append(f"... {len(more)} more with {format_bytes(gain)} to gain")
    return lines


def as_rich(report: SavedFigures, *, advice: bool) -> Any:
    """Return the whole report as an object that rich prints."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    rows, rest = _shown_rows(report)
    table = Table(show_footer=True, header_style="bold", pad_edge=False, box=None)
    for at, (name, foot) in enumerate(zip(_HEAD, _total(report), strict=True)):
        justify: Any = "left" if at in (0, 5) else "right"
        table.add_column(
            name, footer=foot, justify=justify, overflow="fold", no_wrap=at not in (0, 5)
        )
    for row in rows:
        table.add_row(
            *(Text(cell) for cell in _cells(row)), style="" if row.unique_bytes else "dim"
        )
    if rest:
        table.add_row(Text(rest), style="dim")
    first, *others = _headline(report)
    head = [Text(first, style="bold"), *(Text(line) for line in others), Text("")]
    return Group(*head, table, *(_rich_line(line) for line in _below(report, advice)))


def _rich_line(line: str) -> Any:
    from rich.padding import Padding
    from rich.text import Text

    is_head = line.endswith(":") and not line.startswith(" ")
    style = "bold" if is_head else "green" if line.startswith("  Stash(") else ""
    words = line.lstrip(" ")
    return Padding(Text(words, style=style), (0, 0, 0, len(line) - len(words)))
