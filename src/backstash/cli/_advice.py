"""Advice from the figures of a run, each piece with the line to type."""

from __future__ import annotations

import shlex
from typing import Any

from ..units import format_bytes
from ._allocator import INSTALL_HINT

__all__ = ["advice", "next_step", "stash_line"]

_MUCH_WAITING = 0.05


def advice(figures: dict[str, Any], saved_peak_bytes: int | None) -> list[dict[str, str]]:
    """What to change, as sentences with a line of code each, the most useful first.

    Args:
        figures: the run's, as its JSON has them; ``settings`` are the options of ``backstash run``.
        saved_peak_bytes: peak bytes that were saved and not yet used; ``None`` where nothing was recorded.
    """
    settings = figures["settings"]
    plan = figures.get("plan")
    found = _of_tiers(figures, saved_peak_bytes) if plan is None else _of_budget(figures, plan)
    if (
        figures["allocator"]["kind"] in ("own", "glibc", "none")
        and figures["stats"]["written_bytes"]
    ):
        found.append(
            _advice(
                "glibc keeps some of the memory that is freed. Another allocator may be faster, with --malloc "
                f"tcmalloc or --malloc tbb, where it is installed ({INSTALL_HINT}). To compare them here:",
                "backstash doctor",
            )
        )
    found.append(_advice("The same inside your own code:", stash_line(settings)))
    return found


def next_step(figures: dict[str, Any]) -> str:
    """What to do next, in one line of a summary."""
    stats, plan = figures["stats"], figures.get("plan")
    script = shlex.join(figures.get("script") or ["SCRIPT"])
    if any("left in place" in note for note in stats["notes"]):
        return "--disk DIR with a directory that has room"
    if plan is not None:
        found = _of_budget(figures, plan)
        if plan["state"] == "measuring":
            return "a plan is made after three steps or more; run longer to see what it does"
        if found:
            return f"{found[0]['text']} {found[0]['code']}"
        return f"what other budgets cost is predicted by: backstash plan {script}"
    waited, seconds = stats["stall_seconds"], figures["seconds"]
    if not stats["written_bytes"]:
        return "nothing needs to be done: this script fits as it is"
    if seconds and waited / seconds > _MUCH_WAITING:
        return "--budget SIZE keeps in memory what fits, and moves or recomputes the rest, with less waiting"
    return (
        "--budget SIZE keeps a limit with as little moving as it takes; --verbose shows all figures"
    )


def _of_budget(figures: dict[str, Any], plan: dict[str, Any]) -> list[dict[str, str]]:
    """What to change about a budget."""
    waited, seconds = figures["stats"]["stall_seconds"], figures["seconds"]
    if plan["state"] == "too small" and plan["smallest_budget_bytes"]:
        smallest = format_bytes(plan["smallest_budget_bytes"])
        return [
            _advice(
                f"The budget cannot be kept. The smallest that can is {smallest}.",
                f"--budget {_rounded_up(plan['smallest_budget_bytes'])}",
            )
        ]
    if plan["state"] == "left alone":
        return [
            _advice(
                "Everything fits into the budget. What a smaller one would cost is predicted by:",
                f"backstash plan {shlex.join(figures['script'])}",
            )
        ]
    if plan["plain"] is not None and seconds and waited / seconds > _MUCH_WAITING:
        return [
            _advice(
                f"The script waited {waited:.1f} s for the stash, {waited / seconds:.0%} of its time. What "
                "larger budgets would take is predicted by:",
                f"backstash plan {shlex.join(figures['script'])}",
            )
        ]
    return []


def _of_tiers(figures: dict[str, Any], saved_peak_bytes: int | None) -> list[dict[str, str]]:
    """What to change about what is kept in place."""
    found = []
    stats, settings = figures["stats"], figures["settings"]
    waited, seconds = stats["stall_seconds"], figures["seconds"]
    if seconds and waited / seconds > _MUCH_WAITING and saved_peak_bytes:
        before = stats["keep_peak_bytes"] if settings["keep"] == "auto" else settings["keep"] or 0
        keep = _rounded(min(saved_peak_bytes, max(2 * before, saved_peak_bytes // 4)))
        found.append(
            _advice(
                f"The script waited {waited:.1f} s for the stash, {waited / seconds:.0%} of its time. Backward "
                f"needs the newest tensors first: with {keep} kept in place, those bytes need not move.",
                f"--keep {keep}",
            )
        )
    if _all_stays(settings["keep"], stats, saved_peak_bytes):
        found.append(
            _advice(
                "Everything fitted into the bytes that may stay in place, so nothing was moved. A smaller "
                "--keep would free memory.",
                f"--keep {_rounded((saved_peak_bytes or 4 << 20) // 4)}",
            )
        )
    return found


def _all_stays(keep: int | str | None, stats: dict[str, Any], saved_peak_bytes: int | None) -> bool:
    if isinstance(keep, int):
        return keep >= (saved_peak_bytes or float("inf"))
    return keep is None or not stats["written_bytes"]


def stash_line(settings: dict[str, Any]) -> str:
    """The ``Stash(...)`` line with the budgets in ``settings``."""
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


def _rounded(nbytes: int) -> str:
    """A size that is easy to read, of at least 1 MiB."""
    return f"{max(1, nbytes >> 20)}MiB"


def _rounded_up(nbytes: int) -> str:
    return f"{-(-nbytes >> 20)}MiB"


def _advice(text: str, code: str) -> dict[str, str]:
    return {"text": text, "code": code}
