"""Print the output of ``backstash profile``: with rich, on a terminal if it is installed, or as plain text."""

from __future__ import annotations

import importlib.util
import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from ..report import SavedReport
from ..units import format_bytes
from ._disk_speed import DiskSpeed

__all__ = ["Cost", "show"]

_HEAD = ("kept", "moves down", "in memory", "disk writes", "disk reads", "")


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of one ``keep`` budget in each step."""

    name: str
    """The share that would be kept, as text."""
    keep_bytes: int
    """The budget, in bytes."""
    moved_bytes: int
    """Bytes that would move out of memory, and as many back."""
    memory_bytes: int
    """Peak bytes of saved tensors in memory, including in-flight transfers."""
    write_seconds: float | None
    """Seconds that the disk alone needs to write ``moved_bytes``; ``None`` if not measured."""
    read_seconds: float | None
    """Seconds that the disk alone needs to read them; ``None`` if not measured."""
    code: str
    """The ``Stash(...)`` line to paste; ``""`` if everything would be kept, without a stash."""


def show(
    report: SavedReport,
    title: str,
    costs: Sequence[Cost],
    disk: str,
    speed: DiskSpeed | None,
    notes: Sequence[str],
    script: str = "SCRIPT",
) -> None:
    """Print the report, the budgets' costs and the notes on stdout; ``script`` is the script's command line."""
    head = f"backstash profile: {title}; nothing was moved"
    foot = [
        *_one_number(costs, disk, script),
        *_costs(costs, disk, speed),
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


def _costs(costs: Sequence[Cost], disk: str, speed: DiskSpeed | None) -> list[str]:
    if not costs[0].keep_bytes:
        return ["none of this could be moved to a disk, so no budget would change anything"]
    if all(cost.memory_bytes >= costs[0].memory_bytes for cost in costs):
        return [
            (
                f"no budget would save memory: all that could move, {format_bytes(costs[0].keep_bytes)}, "
                "fits into what a stash has in flight at a time (inflight=, at most 128 MiB by default)"
            )
        ]
    of_device = _is_of_device(costs)
    body = [_cells(cost, of_device) for cost in costs]
    widths = [max(map(len, column)) for column in zip(_HEAD, *body, strict=True)]
    lines = ["what keep= would cost instead:", _line(_HEAD, widths)]
    lines += [_line(cells, widths) for cells in body]
    # Only transfers to host memory, which use no disk, have no measured seconds.
    if speed is None or not any(cost.write_seconds for cost in costs):
        return lines
    rates = f"{_rate(speed.write_bytes_per_second)} and reads {_rate(speed.read_bytes_per_second)}"
    return [
        *lines,
        f"  {disk} writes {rates}, measured here on {format_bytes(speed.nbytes)}. The seconds are the disk's "
        "own;",
        "  Transfers that overlap with computing cost no time. `backstash run` measures the rest.",
    ]


def _one_number(costs: Sequence[Cost], disk: str, script: str) -> list[str]:
    """Return how to give a budget as one number, if a budget would save memory."""
    everything = costs[0]
    saves = any(cost.memory_bytes < everything.memory_bytes for cost in costs)
    if not everything.keep_bytes or not saves:
        return []
    where, of_device = json.dumps(disk), _is_of_device(costs)
    whose = "the device's tensors" if of_device else "the process"
    return [
        f"in one number, the most memory that {whose} may take; the cheapest way within it is found:",
        f"  backstash plan --disk {shlex.quote(disk)} {script}    says what budgets would cost",
        f"  backstash run --budget SIZE --disk {shlex.quote(disk)} {script}",
        f"  Stash(budget=SIZE, disk={where})",
        "",
    ]


def _is_of_device(costs: Sequence[Cost]) -> bool:
    return any("host=" in cost.code for cost in costs)


def _cells(cost: Cost, of_device: bool) -> tuple[str, ...]:
    return (
        f"{cost.name} ({format_bytes(cost.keep_bytes)})" if cost.keep_bytes else cost.name,
        format_bytes(cost.moved_bytes),
        format_bytes(cost.memory_bytes),
        _seconds(cost.write_seconds),
        _seconds(cost.read_seconds),
        (cost.code if of_device else "") or ("" if cost.code else "no stash"),
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
