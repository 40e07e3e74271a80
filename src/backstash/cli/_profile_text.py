"""Print the output of ``backstash profile``: with rich, on a terminal if it is installed, or as plain text."""

from __future__ import annotations

import importlib.util
import json
import shlex
import sys
from collections.abc import Sequence
from typing import Any

from ..report import SavedReport
from ..units import format_bytes
from ._disk_speed import DiskSpeed

__all__ = ["seconds_of", "show"]

_HEAD = ("kept", "moves down", "at most held", "disk writes", "disk reads", "")


def show(
    report: SavedReport,
    title: str,
    budgets: Sequence[Any],
    disk: str,
    speed: DiskSpeed | None,
    notes: Sequence[str],
    script: str = "SCRIPT",
) -> None:
    """Print the report, the budgets' costs and the notes on stdout.

    Args:
        report: of the step that held most.
        title: which step that is.
        budgets: what :meth:`~backstash.report.SavedReport.budgets` returned.
        disk: the directory to move to.
        speed: that of its disk; ``None``: not measured.
        notes: lines to print last.
        script: the script's command line.
    """
    head = f"backstash profile: {title}; nothing was moved"
    foot = [
        *_one_number(budgets, disk, script),
        *_costs(budgets, disk, speed),
        *(f"note: {note}" for note in notes),
    ]
    sys.stdout.flush()
    if sys.stdout.isatty() and importlib.util.find_spec("rich") is not None:
        from rich.console import Console
        from rich.text import Text

        console = Console()
        console.print(Text(f"\n{head}", style="bold"), "", report.rich(advice=False), "", sep="\n")
        for line in foot:
            console.print(Text(line, no_wrap=True, overflow="ignore"), soft_wrap=True)
    else:
        print("\n".join(["", head, "", report.text(advice=False), "", *foot]), flush=True)


def seconds_of(budget: Any, speed: DiskSpeed | None) -> tuple[float | None, float | None]:
    """Return the seconds that the disk needs to write and to read a budget's bytes; ``None``: not measured.

    The transfer rate of a device is never measured.
    """
    if speed is None or "host=" in budget.code:
        return None, None
    moved = budget.moved_bytes
    return moved / speed.write_bytes_per_second, moved / speed.read_bytes_per_second


def _costs(budgets: Sequence[Any], disk: str, speed: DiskSpeed | None) -> list[str]:
    everything = budgets[0]
    if not everything.keep_bytes:
        return ["none of this could be moved to a disk, so no budget would change anything"]
    if not _would_save(budgets):
        return [
            (
                f"no budget would save memory: all that could move, {format_bytes(everything.keep_bytes)}, "
                "fits into what a stash has in flight at a time (inflight=, at most 128 MiB by default)"
            )
        ]
    body = [_cells(budget, speed, _is_of_device(budgets)) for budget in budgets]
    widths = [max(map(len, column)) for column in zip(_HEAD, *body, strict=True)]
    lines = ["what keep= would cost instead:", *(_line(each, widths) for each in (_HEAD, *body))]
    # Only transfers to host memory, which use no disk, have no measured seconds.
    if speed is None or not any(seconds_of(budget, speed)[0] for budget in budgets):
        return lines
    rates = f"{_rate(speed.write_bytes_per_second)} and reads {_rate(speed.read_bytes_per_second)}"
    return [
        *lines,
        f"  {disk} writes {rates}, measured here on {format_bytes(speed.nbytes)}. The seconds are the disk's "
        "own.",
        "  Transfers that overlap with computing cost no time. `backstash run` measures the rest.",
    ]


def _would_save(budgets: Sequence[Any]) -> bool:
    return any(budget.memory_bytes < budgets[0].memory_bytes for budget in budgets)


def _one_number(budgets: Sequence[Any], disk: str, script: str) -> list[str]:
    """Return how to give a budget as one number, if a budget would save memory."""
    if not budgets[0].keep_bytes or not _would_save(budgets):
        return []
    whose = "the device's tensors" if _is_of_device(budgets) else "the process"
    return [
        f"in one number, the most memory that {whose} may take; the cheapest way within it is found:",
        f"  backstash plan --disk {shlex.quote(disk)} {script}    says what budgets would cost",
        f"  backstash run --budget SIZE --disk {shlex.quote(disk)} {script}",
        f"  Stash(budget=SIZE, disk={json.dumps(disk)})",
        "",
    ]


def _is_of_device(budgets: Sequence[Any]) -> bool:
    return any("host=" in budget.code for budget in budgets)


def _cells(budget: Any, speed: DiskSpeed | None, of_device: bool) -> tuple[str, ...]:
    write, read = seconds_of(budget, speed)
    kept = f" ({format_bytes(budget.keep_bytes)})" if budget.keep_bytes else ""
    return (
        f"{budget.name}{kept}",
        format_bytes(budget.moved_bytes),
        format_bytes(budget.memory_bytes),
        _seconds(write),
        _seconds(read),
        (budget.code if of_device else "") or ("" if budget.code else "no stash"),
    )


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    shown = [
        cell.ljust(width) if at in (0, len(cells) - 1) else cell.rjust(width)
        for at, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]
    return ("  " + "  ".join(shown)).rstrip()


def _seconds(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.2f} s"


def _rate(bytes_per_second: float) -> str:
    return f"{bytes_per_second / 1e9:.2f} GB/s"
