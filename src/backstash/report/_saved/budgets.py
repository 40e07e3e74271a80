"""Compute what a stash would do with the saved tensors, from the recorded sizes, with a line to paste.

For each budget, the module replays the begins and ends of all saves in order, as a stash would see them.
"""

from __future__ import annotations

import json
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from ...advice import Advice, advise
from ...places import label_of
from ...policy import MIN_BYTES
from ...units import format_bytes
from .save import ADDED, Found, Save, SavedStorage

__all__ = [
    "PLACE",
    "Budget",
    "advice_of",
    "budgets",
    "peak_bytes",
]

_WINDOW_BYTES = 128 << 20  # of Stash(inflight=...)
_WORTH_BYTES = 16 << 20
_UNITS = {"GiB": 1 << 30, "MiB": 1 << 20}
_SHARES = (("everything", 1.0), ("half", 0.5), ("a tenth", 0.1), ("nothing", 0.0))
_HELD = ("keep", "packed", "recomputed", "host", "disk")  # places of a stash
PLACE = "/path/on/a/fast/disk"
"""The directory in a line to paste if none is known."""
_Lives = Sequence[tuple[Save, bool]]


@dataclass(frozen=True, slots=True)
class Budget:
    """What a stash with one ``keep`` budget would move and hold; computed, not measured."""

    name: str
    """How much is kept: ``"everything"``, ``"half"``, ``"a tenth"`` or ``"nothing"``."""
    keep_bytes: int
    """The ``keep`` budget of each device."""
    moved_bytes: int
    """Bytes that would be evicted in forward and, if backward uses them, loaded again."""
    memory_bytes: int
    """Most bytes of saved tensors in memory at the same time, with those still being written."""
    code: str
    """The line to paste; ``""`` for everything, which needs no stash. It sends an accelerator's tensors to host
    memory (``host=``) and the CPU's to the disk."""


def budgets(found: Found, disk: str = PLACE) -> tuple[Budget, ...]:
    """Return what would be moved and held if everything, half, a tenth or nothing of what can move were
    kept."""
    movable, peak = peak_bytes(found.lives, _can_move), peak_bytes(found.lives)
    moving = (stored for stored, _ in _changes(found.lives) if _can_move(stored))
    devices = {stored.device.type for stored in moving}
    rows = []
    for name, share in _SHARES:
        keep, size = _rounded(int(movable * share)) if share < 1 else (movable, "")
        moved, held = _replay(found.lives, keep)
        memory = min(peak, held + min(moved, _WINDOW_BYTES))
        code = _line(size if keep else "", disk, devices) if share < 1 else ""
        rows.append(Budget(name, keep, moved, memory, code))
    return tuple(rows)


def _rounded(nbytes: int) -> tuple[int, str]:
    """Return ``nbytes`` rounded up to two digits of its unit, and as an argument of ``Stash``."""
    fitting = (each for each in _UNITS.items() if nbytes >= 10 * each[1])
    unit, factor = next(fitting, ("KiB", 1 << 10))
    count = -(-nbytes // factor)
    step = 10 ** max(0, len(str(count)) - 2)
    count = -(-count // step) * step
    return count * factor, f'"{count}{unit}"'


def _line(keep: str, disk: str, devices: set[str]) -> str:
    arguments = []
    if keep:
        arguments.append(f"keep={keep}")
    if devices - {"cpu"}:
        arguments.append('host="auto"')  # an accelerator's tensors move to host memory first
    if "cpu" in devices or not devices:
        arguments.append(f"disk={json.dumps(disk)}")
    return f"Stash({', '.join(arguments)})"


def advice_of(found: Found) -> tuple[Advice, ...]:
    """Return the stashes to use, the one that saves the most memory first; or the reason to use none."""
    peak = peak_bytes(found.lives)
    rows = {row.name: row for row in budgets(found)}
    movable = rows["everything"].keep_bytes
    facts = {
        "code": "",
        "places": _places(found),
        "movable": format_bytes(min(movable, peak)),  # keep_bytes was rounded up
        "peak_bytes": peak,
        "peak": format_bytes(peak),
    }
    if movable < _WORTH_BYTES:
        return advise("saved", facts)
    found_advice: list[Advice] = []
    for row in (rows["nothing"], rows["half"]):
        facts |= {
            "code": row.code,
            "memory": format_bytes(row.memory_bytes),
            "moved": format_bytes(row.moved_bytes),
            "window": format_bytes(min(row.moved_bytes, _WINDOW_BYTES)),
        }
        found_advice += advise("saved", facts)
    return tuple(found_advice)


def _places(found: Found) -> str:
    """Return how much a stash holds at each place, in words; ``""`` for nothing."""
    held: dict[str, int] = {}
    for save in found.saves:
        if save.unique_bytes and save.where in _HELD:
            held[save.where] = held.get(save.where, 0) + save.unique_bytes
    return ", ".join(f"{format_bytes(held[key])} {label_of(key)}" for key in _HELD if key in held)


def _changes(lives: _Lives) -> Iterator[tuple[SavedStorage, bool]]:
    """Yield each storage with True when a first save holds it, and with False when the last one is gone."""
    holders: dict[SavedStorage, int] = {}
    for save, begins in list(lives):
        for stored in save.stored:
            if stored.kind not in ADDED:
                continue
            count = holders.get(stored, 0) + (1 if begins else -1)
            holders[stored] = count
            if count == (1 if begins else 0):
                yield stored, begins


def peak_bytes(lives: _Lives, counts: Callable[[SavedStorage], bool] = lambda _: True) -> int:
    """Return the most bytes of storages held at the same time, without those of parameters and buffers.

    Args:
        lives: when each save began and ended, in order.
        counts: whether a storage counts. Default: all count.
    """
    held = peak = 0
    for stored, begins in _changes(lives):
        if counts(stored):
            held += stored.nbytes if begins else -stored.nbytes
            peak = max(peak, held)
    return peak


def _can_move(stored: SavedStorage) -> bool:
    """Whether a stash would move the storage: it is large enough, in place, and gets no gradient."""
    return (
        not stored.stays
        and stored.nbytes >= MIN_BYTES
        and stored.device.type != "meta"
        and stored.holder is not None
        and stored.holder.where == "in place"
    )


def _replay(lives: _Lives, keep_bytes: int) -> tuple[int, int]:
    """Keep the newest ``keep_bytes`` on each device of what can move, as ``Stash(keep=...)`` does.

    Return the bytes that would be evicted, and the most bytes of saved tensors in memory at the same time,
    without those still being written. An input is moved too, but stays in memory, because the program holds it.
    """
    kept: dict[torch.device, OrderedDict[SavedStorage, None]] = {}
    in_place: Counter[torch.device] = Counter()
    others = moved = peak = 0
    for stored, begins in _changes(lives):
        device = stored.device
        newest = kept.setdefault(device, OrderedDict())
        if not _can_move(stored):
            others += stored.nbytes if begins else -stored.nbytes
        elif begins:
            newest[stored] = None
            in_place[device] += stored.nbytes
            while in_place[device] > keep_bytes:
                oldest, _ = newest.popitem(last=False)
                in_place[device] -= oldest.nbytes
                moved += oldest.nbytes
                others += oldest.nbytes if oldest.kind == "input" else 0
        elif stored in newest:
            del newest[stored]
            in_place[device] -= stored.nbytes
        elif stored.kind == "input":
            others -= stored.nbytes
        peak = max(peak, in_place.total() + others)
    return moved, peak
