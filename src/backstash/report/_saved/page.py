"""Convert a saved report to the values of its page and of its JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from ...units import format_bytes
from .figures import SavedFigures
from .rows import SavedTensorRow
from .text import where_of

__all__ = ["as_page", "as_values"]


def as_values(report: SavedFigures) -> dict[str, Any]:
    """Return the whole report as dicts, lists, numbers and strings."""
    return {
        "what": "backstash saved report",
        "total_bytes": report.total_bytes,
        "unique_bytes": report.unique_bytes,
        "peak_bytes": report.peak_bytes,
        "activation_bytes": report.activation_bytes,
        "recomputed_bytes": report.recomputed_bytes,
        "rows": [asdict(row) for row in report.rows],
        "by_op": [asdict(row) for row in report.by_op()],
        "by_dtype": [asdict(row) for row in report.by_dtype()],
        "by_kind": [asdict(row) for row in report.by_kind()],
        "waste": [asdict(each) for each in report.waste],
        "advice": [asdict(each) for each in report.advice],
        "budgets": [asdict(each) for each in report.budgets()],
        "notes": list(report.notes),
        "tensors": [_tensor(each) for each in report.tensors],
    }


def _tensor(row: SavedTensorRow) -> dict[str, Any]:
    return {name: getattr(row, name) for name in SavedTensorRow.__slots__} | {
        "dtype": str(row.dtype).removeprefix("torch."),
        "device": str(row.device),
        "shape": None if row.shape is None else [int(size) for size in row.shape],
        "storages": list(row.storages),
    }


def as_page(report: SavedFigures, title: str) -> dict[str, Any]:
    """Return the report as the mapping that :func:`~backstash.report.render_page` takes."""
    return {
        "title": title,
        "subtitle": "What forward saved for backward",
        "facts": _facts(report),
        "modules": {
            "columns": [
                {"label": "module", "unit": "text"},
                {"label": "unique", "unit": "bytes"},
                {"label": "saved", "unit": "bytes"},
                {"label": "share", "unit": "share"},
                {"label": "calls", "unit": "count"},
                {"label": "where", "unit": "text"},
            ],
            "rows": [
                [
                    row.name or "(outside any module)",
                    row.unique_bytes,
                    row.saved_bytes,
                    row.share,
                    row.calls,
                    where_of(row),
                ]
                for row in report.rows
            ],
            "note": "Each storage is counted once, where it was first saved; parameters are not counted.",
        },
        "advice": [asdict(each) for each in report.advice],
        "notes": [
            *(_waste_note(each) for each in report.waste[:20]),
            *report.notes,
        ],
    }


def _waste_note(each: Any) -> str:
    sizes = f"{format_bytes(each.nbytes)} could be {format_bytes(each.could_be_bytes)}"
    return f"{sizes}, exactly: {each.what} ({each.tensors} in {each.name or 'no module'})."


def _facts(report: SavedFigures) -> list[dict[str, Any]]:
    facts = [
        ("Held for backward", report.unique_bytes, "each storage once, parameters not"),
        (
            "Made by forward",
            report.activation_bytes,
            "the part of it that did not exist before forward",
        ),
        ("Saved in all", report.total_bytes, "as often as it was saved, parameters too"),
    ]
    if report.recomputed_bytes:
        facts.append(("To be recomputed", report.recomputed_bytes, "discarded by checkpointing"))
    return [
        {"label": label, "value": value, "unit": "bytes", "note": note}
        for label, value, note in facts
    ]
