"""What was held at once, and what a budget would move: the saves and their ends, gone through in order."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from .save import ADDED, Save, Stored

__all__ = ["MIN_BYTES", "Replay", "movable_devices", "movable_peak_bytes", "peak_bytes", "replay"]

MIN_BYTES = 64 << 10
"""The default of ``Stash(min_bytes=...)``."""

Lives = Sequence[tuple[Save, bool]]


@dataclass(frozen=True, slots=True)
class Replay:
    """What a stash would have done."""

    moved_bytes: int
    """Bytes that would have gone down."""
    memory_peak_bytes: int
    """The most bytes of saved tensors in memory at once, those on their way down left out."""


def _changes(lives: Lives) -> Iterator[tuple[Stored, bool]]:
    """When each storage begins and ceases to be held, whichever saves hold it."""
    holders: dict[Stored, int] = {}
    for save, begins in list(lives):
        for stored in save.stored:
            if stored.kind not in ADDED:
                continue
            count = holders.get(stored, 0) + (1 if begins else -1)
            holders[stored] = count
            if count == (1 if begins else 0):
                yield stored, begins


def peak_bytes(lives: Lives) -> int:
    """The most bytes of storages that were held at once; parameters and buffers left out."""
    held = peak = 0
    for stored, begins in _changes(lives):
        held += stored.nbytes if begins else -stored.nbytes
        peak = max(peak, held)
    return peak


def _can_move(stored: Stored) -> bool:
    """Whether a stash would move it: large enough, in place, and nothing that gets a gradient."""
    return (
        not stored.stays
        and stored.nbytes >= MIN_BYTES
        and stored.device.type != "meta"
        and stored.holder is not None
        and stored.holder.where == "in place"
    )


def movable_peak_bytes(lives: Lives) -> int:
    """The most bytes held at once that a stash would move."""
    held = peak = 0
    for stored, begins in _changes(lives):
        if _can_move(stored):
            held += stored.nbytes if begins else -stored.nbytes
            peak = max(peak, held)
    return peak


def replay(lives: Lives, keep_bytes: int) -> Replay:
    """Keep at most ``keep_bytes`` on each device of what can move, the newest, as ``Stash(keep=...)`` does.

    An input moves too, and yet stays in memory: the program has it.
    """
    kept: dict[torch.device, OrderedDict[Stored, None]] = {}
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
    return Replay(moved, peak)


def movable_devices(lives: Lives) -> frozenset[str]:
    """The types of the devices that have what a stash would move."""
    return frozenset(stored.device.type for stored, _ in _changes(lives) if _can_move(stored))
