"""Collect the facts of a run for the advice on it, and write the line of code with the same options."""

from __future__ import annotations

import shlex
from typing import Any

from ..advice import Advice, advise
from ..units import format_bytes
from ._allocator import INSTALL_HINT

__all__ = ["advice", "next_step", "stash_line"]


def advice(figures: dict[str, Any]) -> tuple[Advice, ...]:
    """Return what to change after a run, most useful first.

    Args:
        figures: the run's figures, as in its JSON; ``settings`` are the options of ``backstash run``.
    """
    stats, settings, plan = figures["stats"], figures["settings"], figures.get("plan") or {}
    waited, seconds = stats["stall_seconds"], figures["seconds"]
    smallest = plan.get("smallest_budget_bytes") or 0
    facts = {
        "is_full": any("kept in memory" in note for note in stats["notes"]),
        "moved_bytes": stats["written_bytes"],
        "freed_bytes": stats["recomputed_bytes"] + stats["packed_bytes"],
        "waited_seconds": waited,
        "waited_share": waited / seconds if seconds else 0.0,
        "plan": plan.get("state", ""),
        "is_compared": not plan or plan["plain"] is not None,
        "is_too_small": plan.get("state") == "too small" and smallest > 0,
        "smallest": format_bytes(smallest),
        "smallest_budget": f"{-(-smallest >> 20)}MiB",
        "keep": settings["keep"],
        "allocator": figures["allocator"]["kind"],
        "install": INSTALL_HINT,
        "script": shlex.join(figures.get("script") or ["SCRIPT"]),
        "stash": stash_line(settings),
    }
    return advise("run", facts)


def next_step(figures: dict[str, Any]) -> str:
    """Return what to do next, as one line of a summary."""
    first = advice(figures)[0]
    return f"{first.text} {first.code}".rstrip()


def stash_line(settings: dict[str, Any]) -> str:
    """Return the ``Stash(...)`` line with the budgets in ``settings``."""
    words = []
    budget, plan = settings.get("budget"), settings.get("plan")
    if plan is not None:
        words.append(f"plan={plan!r}")
    elif budget is not None:
        words.append(f"budget={_size(budget)}")
    elif settings["keep"] != 0:
        words.append(f"keep={_size(settings['keep'])}")
    if settings["host"] != "auto":
        words.append(f"host={_size(settings['host'])}")
    if settings["disk"] is not None:
        bound = settings["max_bytes"]
        disk = repr(settings["disk"])
        words.append(
            f"disk={disk}" if bound is None else f"disk=Disk({disk}, max_bytes={_size(bound)})"
        )
    for name, default in (
        ("min_bytes", "auto"),
        ("inflight", "auto"),
        ("prefetch", "auto"),
    ):
        if settings[name] != default:
            words.append(f"{name}={_size(settings[name])}")
    return f"Stash({', '.join(words)})"


def _size(value: int | str | None) -> str:
    if value is None:
        return "None"
    if isinstance(value, str):
        return f'"{value}"'
    text = format_bytes(value).replace(" ", "")
    return f'"{text}"' if value % 1024 == 0 and "." not in text else str(value)
