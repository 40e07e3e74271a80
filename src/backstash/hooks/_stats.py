"""Statistics of tensors, computed where the tensors are and fetched together.

``measure`` queues a few kernels and returns a row of numbers on the tensor's device: it does not wait.
``fetch`` brings the rows of a whole report back in one transfer per device. The parts of a sharded tensor
are gathered as rows and merged into the statistics of the whole tensor.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ._distributed import is_dtensor, replicated

__all__ = ["Stats", "StatsRow", "fetch", "measure", "norm_of", "row_of"]


@dataclass(frozen=True, slots=True)
class Stats:
    """Statistics of the elements of one tensor, or of several together.

    The elements of a sparse tensor include those that it does not store, which are zero. Of complex elements,
    ``mean``, ``std``, ``min`` and ``max`` are those of their real and imaginary parts.
    """

    count: int
    """Elements."""
    norm: float
    """Euclidean norm of all elements: NaN or infinite if one of them is."""
    mean: float
    """Mean of the finite elements; NaN if there are none, as for the next three."""
    std: float
    """Standard deviation of the finite elements (divided by their number)."""
    min: float
    """Least finite element."""
    max: float
    """Greatest finite element."""
    zeros: float
    """Share of the elements that are exactly zero, 0 to 1."""
    nan: int
    """Elements that are NaN."""
    inf: int
    """Elements that are infinite."""

    @property
    def finite(self) -> bool:
        """Whether every element is a number."""
        return not (self.nan or self.inf)

    def as_dict(self) -> dict[str, float | None]:
        """Return the fields as data for JSON, ``None`` for a number that is not finite."""
        return {k: v if math.isfinite(v) else None for k, v in asdict(self).items()}

    def __str__(self) -> str:
        bad = "" if self.finite else f"  NaN {self.nan}  Inf {self.inf}"
        return (
            f"norm {self.norm:.3e}  mean {self.mean:+.2e}  std {self.std:.2e}  "
            f"min {self.min:+.2e}  max {self.max:+.2e}  zeros {self.zeros:.1%}{bad}"
        )


def measure(tensor: torch.Tensor) -> torch.Tensor:
    """Compute the row of one local tensor: shape (9,), on its device, without waiting for it."""
    values = _stored(tensor)
    wide = torch.float32 if values.device.type == "mps" else torch.float64
    unstored = tensor.numel() - values.numel()
    if values.numel() == 0:
        ends = (0, 0) if unstored else (math.inf, -math.inf)
        row = [unstored, 0, 0, unstored, 0, 0, 0, *ends]
        return torch.tensor(row, dtype=wide, device=values.device)
    nan = values.isnan().sum()
    finite = values.isfinite()
    count = finite.sum()
    zeros = (values == 0).sum() + unstored
    parts_each = 1
    if values.is_complex():
        values, finite, parts_each = torch.view_as_real(values), finite.unsqueeze(-1), 2
    clean = torch.where(finite, values, 0)
    mean = clean.sum() / (count * parts_each).clamp(min=1)
    spread = torch.where(finite, values - mean, 0)
    mean = mean.to(wide)
    square = norm_of(spread).to(wide).square() / parts_each
    low = torch.where(finite, values, math.inf).amin()
    high = torch.where(finite, values, -math.inf).amax()
    if unstored:
        whole = count + unstored
        square = square + mean.square() * count * unstored / whole
        mean = mean * count / whole
        low, high = low.clamp(max=0), high.clamp(min=0)
    parts = (
        torch.full_like(mean, tensor.numel()),
        nan,
        tensor.numel() - unstored - count - nan,
        zeros,
        norm_of(values),
        mean,
        square,
        low,
        high,
    )
    return torch.stack([part.to(wide) for part in parts])


def norm_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the Euclidean norm of a tensor, or of a whole ``DTensor``, without waiting for it.

    In float32 the squares of large finite numbers are infinite, so the elements are scaled by a power of two.
    A ``DTensor``, of which a part may be empty, is squared in float64. That takes 20 times as long on a CPU.
    """
    norm: Callable[..., torch.Tensor] = torch.linalg.vector_norm
    if is_dtensor(tensor):
        return replicated(
            norm(tensor, dtype=torch.complex128 if tensor.is_complex() else torch.float64)
        )
    if tensor.dtype in (torch.float16, torch.bfloat16):
        tensor = tensor.float()
    if tensor.numel() == 0:
        return norm(tensor)
    peak = norm(tensor, math.inf)
    least = torch.finfo(peak.dtype).tiny
    scale = torch.where(peak.isfinite(), peak, 1).log2().floor().exp2().clamp(min=least)
    return norm(tensor / scale) * scale


def _stored(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements that a tensor stores, of at least 32 bits (for each part of a complex one)."""
    values = tensor.detach()
    if values.layout is not torch.strided:
        values = values.coalesce().values() if values.is_sparse else values.values()
    if values.is_complex():
        return values if values.dtype == torch.complex128 else values.to(torch.complex64)
    return values if values.dtype in (torch.float32, torch.float64) else values.float()


def _merge(rows: Iterable[Sequence[float]]) -> Stats:
    """Merge rows into the statistics of all their elements (Chan, Golub and LeVeque's update)."""
    count = nan = inf = zeros = 0.0
    norm = mean = square = 0.0
    low, high = math.inf, -math.inf
    done = 0.0
    for n, nans, infs, zero, part_norm, part_mean, part_square, part_low, part_high in rows:
        count, nan, inf, zeros = count + n, nan + nans, inf + infs, zeros + zero
        norm = math.hypot(norm, part_norm) if not math.isnan(part_norm + norm) else math.nan
        fresh = n - nans - infs
        if fresh:
            step = part_mean - mean
            mean += step * fresh / (done + fresh)
            square += part_square + step * step * done * fresh / (done + fresh)
            done += fresh
        low, high = min(low, part_low), max(high, part_high)
    none = math.nan
    return Stats(
        count=int(count),
        norm=norm,
        mean=mean if done else none,
        std=math.sqrt(square / done) if done else none,
        min=low if done else none,
        max=high if done else none,
        zeros=zeros / count if count else 0.0,
        nan=int(nan),
        inf=int(inf),
    )


@dataclass(frozen=True, slots=True)
class StatsRow:
    """The numbers of one tensor, or of this process's part of one."""

    values: torch.Tensor
    """Shape (9,), on the tensor's device."""
    groups: tuple[Any, ...] = ()
    """The process groups over which the tensor is sharded."""


def row_of(tensor: torch.Tensor) -> StatsRow:
    """Measure a tensor, or this process's shard of a ``DTensor``, without waiting."""
    if not is_dtensor(tensor):
        return StatsRow(measure(tensor))
    whole: Any = tensor
    if any(placement.is_partial() for placement in whole.placements):
        return StatsRow(measure(whole.full_tensor()))
    mesh = whole.device_mesh
    groups = tuple(
        mesh.get_group(dim)
        for dim, placement in enumerate(whole.placements)
        if placement.is_shard()
    )
    return StatsRow(measure(whole.to_local()), groups)


def fetch(rows: Mapping[str, list[StatsRow]]) -> tuple[dict[str, Stats], Stats]:
    """Wait for the rows. Return the statistics of each name's rows together, and those of all rows.

    There is one transfer for each device and, for sharded tensors, one all-gather for each set of process
    groups: every process must fetch the same names.
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
    total = _merge(values for found in parts.values() for values in found)
    return {name: _merge(found) for name, found in parts.items()}, total


def _gather(rows: torch.Tensor, groups: tuple[Any, ...]) -> torch.Tensor:
    """Gather this process's rows (n, 9) with those of the other processes that hold parts: (n, parts, 9)."""
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
