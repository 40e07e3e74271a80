"""Rows of statistics, from their devices and processes to Python, together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ._distributed import is_dtensor
from ._stats import Stats, measure, merge

__all__ = ["Row", "fetch", "row_of"]


@dataclass(frozen=True, slots=True)
class Row:
    """The numbers of one tensor, or of this process's part of one."""

    values: torch.Tensor
    """Shape (9,), on the tensor's device."""
    groups: tuple[Any, ...] = ()
    """The process groups over which the tensor is sharded."""


def row_of(tensor: torch.Tensor) -> Row:
    """Measures a tensor without waiting; of a ``DTensor``, this process's shard."""
    if not is_dtensor(tensor):
        return Row(measure(tensor))
    whole: Any = tensor
    if any(placement.is_partial() for placement in whole.placements):
        return Row(measure(whole.full_tensor()))
    mesh = whole.device_mesh
    groups = tuple(
        mesh.get_group(dim)
        for dim, placement in enumerate(whole.placements)
        if placement.is_shard()
    )
    return Row(measure(whole.to_local()), groups)


def fetch(rows: Mapping[str, list[Row]]) -> tuple[dict[str, Stats], Stats]:
    """The statistics by name, of all rows of the name together, and those of everything.

    One transfer for each device and, for sharded tensors, one gathering for each set of groups. Every
    process must ask for the same names.
    """
    flat = [(name, row) for name in sorted(rows) for row in rows[name]]
    batches: dict[Any, list[int]] = defaultdict(list)
    for index, (_, row) in enumerate(flat):
        batches[row.values.device, row.groups].append(index)
    parts: dict[str, list[list[float]]] = {name: [] for name in rows}
    for (_, groups), indices in batches.items():
        gathered = _gather(torch.stack([flat[i][1].values for i in indices]), groups)
        for position, values in zip(indices, gathered.cpu().tolist(), strict=True):
            parts[flat[position][0]] += values
    total = merge(values for found in parts.values() for values in found)
    return {name: merge(found) for name, found in parts.items()}, total


def _gather(rows: torch.Tensor, groups: tuple[Any, ...]) -> torch.Tensor:
    """Rows (n, 9) of this process to (n, parts, 9): those of every process that holds a part."""
    distributed: Any = torch.distributed
    # The second name is what torch called it before 2.13.
    gather = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor
    gathered = rows.unsqueeze(0)
    for group in groups:
        size = distributed.get_world_size(group)
        out = gathered.new_empty((size * gathered.shape[0], *gathered.shape[1:]))
        gather(out, gathered.contiguous(), group=group)
        gathered = out
    return gathered.transpose(0, 1)
