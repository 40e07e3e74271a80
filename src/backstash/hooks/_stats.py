"""Statistics of tensors, computed where the tensors are and fetched together.

``measure`` queues a few kernels and returns a row of numbers on the tensor's device: it does not wait.
``fetch`` brings the rows of a whole report back in one transfer per device. The parts of a sharded tensor
are gathered as rows and merged, so that what is reported is the whole tensor's.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

import torch

__all__ = ["Stats", "measure", "merge", "stats_of"]


@dataclass(frozen=True, slots=True)
class Stats:
    """Numbers of one tensor, or of several together."""

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
        """The fields, with ``None`` for what JSON has no number for (``nan`` and ``inf`` say why)."""
        return {k: v if math.isfinite(v) else None for k, v in asdict(self).items()}

    def __str__(self) -> str:
        bad = "" if self.finite else f"  NaN {self.nan}  Inf {self.inf}"
        return (
            f"norm {self.norm:.3e}  mean {self.mean:+.2e}  std {self.std:.2e}  "
            f"min {self.min:+.2e}  max {self.max:+.2e}  zeros {self.zeros:.1%}{bad}"
        )


def measure(tensor: torch.Tensor) -> torch.Tensor:
    """The row of one local tensor: shape (9,), on its device, without waiting for it."""
    values = _numbers(tensor)
    wide = torch.float32 if values.device.type == "mps" else torch.float64
    nan = values.isnan()
    finite = values.isfinite()
    if values.numel() == 0:
        return values.new_tensor([0, 0, 0, 0, 0, 0, 0, math.inf, -math.inf], dtype=wide)
    count = finite.sum()
    clean = torch.where(finite, values, 0)
    mean = clean.sum() / count.clamp(min=1)
    spread = torch.where(finite, values - mean, 0)
    parts = (
        torch.full_like(mean, values.numel(), dtype=wide),
        nan.sum(),
        values.numel() - count - nan.sum(),
        (values == 0).sum(),
        torch.linalg.vector_norm(values),
        mean,
        spread.square().sum(),
        torch.where(finite, values, math.inf).amin(),
        torch.where(finite, values, -math.inf).amax(),
    )
    return torch.stack([part.to(wide) for part in parts])


def _numbers(tensor: torch.Tensor) -> torch.Tensor:
    values = tensor.detach()
    if values.layout is not torch.strided:
        values = values.coalesce().values() if values.is_sparse else values.values()
    if values.is_complex():
        values = torch.view_as_real(values)
    return values if values.dtype in (torch.float32, torch.float64) else values.float()


def merge(rows: Iterable[Sequence[float]]) -> Stats:
    """The statistics of everything that ``rows`` are parts of (Chan, Golub and LeVeque's update)."""
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


def stats_of(tensor: torch.Tensor) -> Stats:
    """The statistics of one local tensor, now: this waits for the device."""
    return merge([measure(tensor).tolist()])
