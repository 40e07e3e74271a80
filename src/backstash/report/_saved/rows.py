"""Add up saved tensors by module, operation, element type or kind."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch

from .save import OWNED, Save

__all__ = ["Row", "SavedTensorRow", "add_up", "describe", "pattern"]


@dataclass(frozen=True, slots=True)
class Row:
    """Sums over saved tensors that share a module, an operation, an element type or a kind."""

    name: str
    """The module's path, the operation, the element type or the kind. A module that no other module contains is
    named by its class in parentheses. ``""`` if no module was running, or if the name is unknown."""
    calls: int | None
    """Number of calls of the module during which something was saved; 0 for a module that is never called
    itself (a list of modules); ``None`` if calls were not counted, and in rows for other things than
    modules."""
    saves: int
    """Number of saved tensors."""
    saved_bytes: int
    """Bytes of their elements, each counted as often as it was saved."""
    unique_bytes: int
    """Bytes of the storages that are held because of them. A storage counts once, for its first save. Storages
    of parameters and buffers do not count: the model holds them even without backward."""
    share: float
    """This row's part of the report's ``unique_bytes``, from 0 to 1."""
    recomputed_bytes: int
    """Bytes of storages that ``torch.utils.checkpoint`` discarded and will recompute; in no other figure."""
    where: Mapping[str, int] = field(hash=False)
    """``saved_bytes`` by place, most first, without those of parameters and buffers. ``"in place"``;
    ``"keep"``, ``"packed"``, ``"recomputed"``, ``"host"`` or ``"disk"`` in a stash; ``"host"``, ``"copied"`` or
    ``"compressed"`` by other hooks; ``"hooks"`` if only the hooks that packed a tensor can read it."""

    @property
    def module(self) -> str:
        """``name``, in rows of modules."""
        return self.name


@dataclass(frozen=True, slots=True)
class SavedTensorRow:
    """One saved tensor."""

    module: str
    """The path of the module that saved it."""
    op: str
    """The autograd node that it was saved for, such as ``"AddmmBackward0"``; ``""`` if the graph was freed
    before the node was found."""
    name: str
    """The node's name for it, such as ``"self"`` or ``"result"``; ``""`` if the node was not found in time."""
    kind: str
    """``"parameter"``, ``"buffer"``, ``"input"`` (existed before forward, or was an argument of it),
    ``"activation"`` (made by forward), or ``"view"`` for an activation's storage that was saved before."""
    shape: tuple[int, ...] | None
    """Its sizes; ``None`` for nested tensors."""
    dtype: torch.dtype
    """Its element type."""
    device: torch.device
    """Its device when it was saved."""
    nbytes: int
    """Bytes of its elements."""
    unique_bytes: int
    """Bytes of storages that are held because of this save and of none before it."""
    storages: tuple[int, ...]
    """The storages of its elements, numbered in the order of their first saves; several for a tensor that
    consists of other tensors, none if its storage cannot be seen."""
    where: str
    """The place, as in :class:`Row`; also ``"recomputed"`` if a checkpoint discarded it and will recompute
    it."""


def add_up(
    saves: Iterable[Save], key: Callable[[Save], str], calls: Mapping[str, int] | None
) -> tuple[Row, ...]:
    """Return a row for each key, most unique bytes first.

    Args:
        saves: all saves of a report.
        key: return the name of the row that a save belongs to.
        calls: the number of calls by name; ``None`` for rows for other things than modules, or if calls were
            not counted.
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
    """Return one save as a row of its own."""
    same = (name for name in SavedTensorRow.__slots__ if name != "storages")
    fields = {name: getattr(save, name) for name in same}
    return SavedTensorRow(storages=tuple(each.index for each in save.stored), **fields)


def pattern(module: str) -> str:
    """Return ``module`` with ``*`` for its first number, which makes the paths of all blocks of a stack
    equal."""
    parts = module.split(".")
    at = next((at for at, part in enumerate(parts) if part.isdigit()), None)
    return module if at is None else ".".join([*parts[:at], "*", *parts[at + 1 :]])
