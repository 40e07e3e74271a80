"""What a stash would do with what was saved: reckoned from the sizes, and said as the line to paste."""

from __future__ import annotations

import json
from dataclasses import dataclass

from ...units import format_bytes
from .replay import movable_devices, movable_peak_bytes, peak_bytes, replay
from .save import Found

__all__ = ["PLACE", "Advice", "Budget", "advise", "budgets"]

_WINDOW_BYTES = 128 << 20  # of Stash(inflight=...)
_WORTH_BYTES = 16 << 20
_SHARES = (("everything", 1.0), ("half", 0.5), ("a tenth", 0.1), ("nothing", 0.0))
_TIERS = {"keep": "in place", "host": "in host memory", "disk": "on disk"}
PLACE = "/path/on/a/fast/disk"
"""What stands in a line to paste for a directory that is not known."""


@dataclass(frozen=True, slots=True)
class Advice:
    """One thing to do."""

    text: str
    """Why, and what it would change."""
    code: str
    """The line to paste; ``""`` where there is none."""


@dataclass(frozen=True, slots=True)
class Budget:
    """What a ``keep`` budget would cost; reckoned, not measured."""

    name: str
    """How much would be kept, in words: ``"half"``."""
    keep_bytes: int
    """The budget, for each device."""
    moved_bytes: int
    """Bytes that would move down in forward and, if backward uses them, up again."""
    memory_bytes: int
    """The most bytes of saved tensors in memory at once, with those still on their way down."""
    code: str
    """The line to paste; ``""`` for everything, which needs no stash. An accelerator's tensors go to host
    memory (``host=``), the CPU's to the disk."""


def budgets(found: Found, disk: str = PLACE) -> tuple[Budget, ...]:
    """What it would cost to keep everything, half, a tenth and nothing of what can move."""
    movable, peak = movable_peak_bytes(found.lives), peak_bytes(found.lives)
    devices = movable_devices(found.lives)
    rows = []
    for name, share in _SHARES:
        keep = _rounded(int(movable * share))
        would = replay(found.lives, keep)
        on_the_way = min(would.moved_bytes, _WINDOW_BYTES)
        memory = min(peak, would.memory_peak_bytes + on_the_way)
        code = _line(keep, disk, devices) if share < 1 else ""
        rows.append(Budget(name, keep, would.moved_bytes, memory, code))
    return tuple(rows)


def _rounded(nbytes: int) -> int:
    """``nbytes``, up to a whole MiB, as a person would write it."""
    return -(-nbytes >> 20) << 20 if nbytes >= 1 << 20 else nbytes


def _line(keep: int, disk: str, devices: frozenset[str]) -> str:
    arguments = []
    if keep:
        arguments.append(f'keep="{keep >> 20}MiB"' if keep >= 1 << 20 else f"keep={keep}")
    if devices - {"cpu"}:
        arguments.append('host="auto"')  # an accelerator's tensors go there first
    if "cpu" in devices or not devices:
        arguments.append(f"disk={json.dumps(disk)}")
    return f"Stash({', '.join(arguments)})"


def advise(found: Found) -> tuple[Advice, ...]:
    """What to put where; the first is what saves most."""
    peak = peak_bytes(found.lives)
    rows = {row.name: row for row in budgets(found)}
    movable = rows["everything"].keep_bytes
    if movable < _WORTH_BYTES:
        return (Advice(_why_nothing(found, movable, peak), ""),)
    size = format_bytes
    texts = []
    for name in ("nothing", "half"):
        row = rows[name]
        window = min(row.moved_bytes, _WINDOW_BYTES)
        text = (
            f"saved tensors take at most {size(row.memory_bytes)} of memory, not {size(peak)}; "
            f"{size(row.moved_bytes)} move down and up again, {size(window)} of it at a time"
        )
        texts.append(Advice(text, row.code))
    return tuple(texts)


def _why_nothing(found: Found, movable: int, peak: int) -> str:
    size = format_bytes
    held: dict[str, int] = {}
    for save in found.saves:
        if save.unique_bytes and save.where in _TIERS:
            held[save.where] = held.get(save.where, 0) + save.unique_bytes
    if held:
        places = ", ".join(f"{size(held[tier])} {_TIERS[tier]}" for tier in _TIERS if tier in held)
        return f"a stash holds {places}; {size(movable)} more could move"
    if not peak:
        return "nothing was saved that is not there without backward too"
    return f"{size(movable)} of {size(peak)} could move: a stash would gain little"
