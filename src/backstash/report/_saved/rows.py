"""Saved tensors, added up by whatever they have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch

from .save import OWNED, Save

__all__ = ["Row", "SavedTensorRow", "add_up", "describe", "pattern"]


@dataclass(frozen=True, slots=True)
class Row:
    """Saved tensors that have a module, an operation, an element type or a kind in common."""

    name: str
    """The module's path, the operation, the element type or the kind. A module that is nobody's child is its
    class in parentheses; ``""`` is what no module saved, or what is not known."""
    calls: int | None
    """How often the module was called and something was saved meanwhile; 0 for one that is never called itself
    (a list of modules); ``None`` where that was not counted, and in rows that are no module's."""
    saves: int
    """How many tensors were saved."""
    saved_bytes: int
    """Bytes of their elements, as often as they were saved."""
    unique_bytes: int
    """Bytes of the storages that are held because of them. A storage counts once, where it was first saved;
    those of parameters and buffers, which are there without backward too, do not count."""
    share: float
    """``unique_bytes`` of the report's, from 0 to 1."""
    recomputed_bytes: int
    """Bytes of storages that ``torch.utils.checkpoint`` let go, to compute them again. In no other figure."""
    where: Mapping[str, int] = field(hash=False)
    """``saved_bytes`` without those of parameters and buffers, by place, most first: ``"in place"``; a stash's
    ``"keep"`` or ``"disk"``; ``"host"``, ``"copied"`` or ``"compressed"`` by other hooks; ``"hooks"`` for what
    only its hooks can read."""

    @property
    def module(self) -> str:
        """``name``, as rows of modules are told apart by."""
        return self.name


@dataclass(frozen=True, slots=True)
class SavedTensorRow:
    """One saved tensor."""

    module: str
    """The path of the module that saved it."""
    op: str
    """The node that it was saved for, ``"AddmmBackward0"``; ``""`` where the graph was gone before that could
    be seen."""
    name: str
    """The operation's name for it, ``"self"`` or ``"result"``; ``""`` likewise."""
    kind: str
    """``"parameter"``, ``"buffer"``, ``"input"`` (there before the forward, or given to it), ``"activation"``
    (made by it), or ``"view"`` for an activation's storage that was saved before."""
    shape: tuple[int, ...] | None
    """Its sizes; ``None`` for nested tensors."""
    dtype: torch.dtype
    """Its element type."""
    device: torch.device
    """Where it was when it was saved."""
    nbytes: int
    """Bytes of its elements."""
    unique_bytes: int
    """Bytes of storages that are held because of it, and because of none before it."""
    storages: tuple[int, ...]
    """Which storages it looks into, numbered in the order of their first saves; several for a tensor that is
    made of others, none where that cannot be seen."""
    where: str
    """The place, as in :class:`Row`; ``"recomputed"`` for what is let go, to be computed again."""


def add_up(
    saves: Iterable[Save], key: Callable[[Save], str], calls: Mapping[str, int] | None
) -> tuple[Row, ...]:
    """A row for each key, that with the most unique bytes first.

    Args:
        saves: all of a report's.
        key: what a row's tensors have in common.
        calls: by name; ``None`` where calls mean nothing, or were not counted.
    """
    groups: dict[str, list[Save]] = {}
    total = 0
    for save in saves:
        groups.setdefault(key(save), []).append(save)
        total += save.unique_bytes
    rows = [_row(name, group, total, calls) for name, group in groups.items()]
    rows.sort(key=lambda row: (-row.unique_bytes, -row.recomputed_bytes, -row.saved_bytes))
    return tuple(rows)


def _row(name: str, group: list[Save], total: int, calls: Mapping[str, int] | None) -> Row:
    count = saved = unique = dropped = 0
    where: dict[str, int] = {}
    for save in group:
        if not save.is_saved:
            dropped += save.recomputed_bytes
            continue
        count += 1
        saved += save.nbytes
        unique += save.unique_bytes
        if save.kind not in OWNED:
            where[save.where] = where.get(save.where, 0) + save.nbytes
    places = dict(sorted(where.items(), key=lambda item: -item[1]))
    share = unique / total if total else 0.0
    called = None if calls is None else calls.get(name, 0) if name else None
    return Row(name, called, count, saved, unique, share, dropped, places)


def describe(save: Save) -> SavedTensorRow:
    """One save as a row of its own."""
    return SavedTensorRow(
        save.module,
        save.op,
        save.name,
        save.kind,
        save.shape,
        save.dtype,
        save.device,
        save.nbytes,
        save.unique_bytes,
        tuple(each.index for each in save.stored),
        save.where,
    )


def pattern(module: str) -> str:
    """A path with ``*`` for its first number: the same for all blocks of a stack."""
    parts = module.split(".")
    at = next((at for at, part in enumerate(parts) if part.isdigit()), None)
    return module if at is None else ".".join([*parts[:at], "*", *parts[at + 1 :]])
