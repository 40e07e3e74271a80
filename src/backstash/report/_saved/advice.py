"""What a stash would do with what was saved: reckoned from the sizes, and said as the line to paste."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...units import format_bytes
from .save import Save

__all__ = ["Advice", "Budget", "advise", "budgets", "movable_bytes"]

_MIN_BYTES = 64 << 10  # the default of Stash(min_bytes=...)
_WINDOW_BYTES = 128 << 20  # of Stash(inflight=...)
_WORTH_BYTES = 16 << 20
_SHARES = (("everything", 1.0), ("half", 0.5), ("a tenth", 0.1), ("nothing", 0.0))
_PLACE = "/path/on/a/fast/disk"


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
    """The budget."""
    moved_bytes: int
    """Bytes that each forward would move down, and each backward up."""
    memory_bytes: int
    """Bytes of saved tensors in memory when forward ends, with those still on their way."""
    code: str
    """The line to paste."""


def movable_bytes(saves: Sequence[Save]) -> int:
    """Bytes of forward's own storages that a stash would move: large enough, in place, of the CPU."""
    return sum(
        each.nbytes
        for save in saves
        if save.is_saved and save.where == "in place"
        for each in save.first
        if each.kind == "activation" and each.device.type == "cpu" and each.nbytes >= _MIN_BYTES
    )


def budgets(saves: Sequence[Save]) -> tuple[Budget, ...]:
    """What it would cost to keep everything, half, a tenth and nothing of what can move."""
    movable = movable_bytes(saves)
    held = sum(save.unique_bytes for save in saves)
    found = []
    for name, share in _SHARES:
        keep = _rounded(int(movable * share))
        moved = max(0, movable - keep)
        memory = held - moved + min(moved, _WINDOW_BYTES)
        found.append(Budget(name, keep, moved, memory, _line(keep, movable)))
    return tuple(found)


def _rounded(nbytes: int) -> int:
    """``nbytes``, up to a whole MiB, as a person would write it."""
    return -(-nbytes >> 20) << 20 if nbytes >= 1 << 20 else nbytes


def _line(keep: int, movable: int) -> str:
    if keep == 0:
        return f'Stash(disk="{_PLACE}")'
    size = f'"{keep >> 20}MiB"' if keep >= 1 << 20 else str(keep)
    return f'Stash(keep={size}, disk="{_PLACE}")'


def advise(saves: Sequence[Save]) -> tuple[Advice, ...]:
    """What to put where; the first is what saves most."""
    movable = movable_bytes(saves)
    held = sum(save.unique_bytes for save in saves)
    size = format_bytes
    if movable < _WORTH_BYTES:
        return (Advice(_why_nothing(saves, movable, held), ""),)
    kept = {budget.name: budget for budget in budgets(saves)}
    found = []
    for name in ("nothing", "half"):
        budget = kept[name]
        window = min(budget.moved_bytes, _WINDOW_BYTES)
        found.append(
            Advice(
                f"moves {size(budget.moved_bytes)} down in forward and up again in backward; "
                f"saved tensors then take {size(budget.memory_bytes)} of memory when forward ends "
                f"instead of {size(held)}, {size(window)} of that on its way to the disk",
                budget.code,
            )
        )
    return tuple(found)


def _why_nothing(saves: Sequence[Save], movable: int, held: int) -> str:
    size = format_bytes
    below = [save for save in saves if save.is_saved and save.where in ("disk", "keep", "host")]
    other = sum(save.unique_bytes for save in saves if save.device.type != "cpu")
    if other > held // 2:
        return (
            f"{size(other)} are on an accelerator; what a stash would do there is not reckoned yet"
        )
    if below:
        held_below = sum(save.unique_bytes for save in below)
        return f"a stash has {size(held_below)} of {size(held)} already; {size(movable)} more could move"
    if not held:
        return "nothing was saved that is not there without backward too"
    return f"only {size(movable)} of {size(held)} could move: a stash would gain little"
