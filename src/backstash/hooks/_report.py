"""A table of gradients, as one fact."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from .._text import clean
from ._distributed import Reduction
from ._stats import Stats

__all__ = ["GradientReport"]

_REDUCED = {
    "none": "",
    "before": ", this process's before the reduction",
    "after": ", after the reduction",
    "unknown": ", before or after the reduction: unknown, give the DDP or FSDP module to tell",
}


@dataclass(frozen=True, slots=True)
class GradientReport:
    """The gradients of one backward."""

    step: int
    """Which backward since the watch began; the first is 0."""
    per: str
    """What a row is: ``"parameter"``, ``"module"`` (gradient of its output) or ``"tensor"``."""
    reduction: Reduction
    """``"before"`` or ``"after"`` the processes' gradients were averaged, ``"none"`` for one process,
    ``"unknown"`` where several processes run but the model is not a DDP or FSDP module."""
    rows: dict[str, Stats]
    """By path, in the model's order; what got no gradient is not there."""
    total: Stats
    """Of all rows together: its norm is the global gradient norm."""

    def as_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "step": self.step,
            "per": self.per,
            "reduction": self.reduction,
            "total": self.total.as_dict(),
            "rows": {name: stats.as_dict() for name, stats in self.rows.items()},
        }

    def scalars(self) -> Iterator[tuple[str, float]]:
        """As curves: ``grad/<name>/<number>``, and ``grad/total/<number>``."""
        for name, stats in [("total", self.total), *self.rows.items()]:
            for number in ("norm", "min", "max", "zeros", "nan", "inf"):
                yield f"grad/{name or '(model)'}/{number}", float(getattr(stats, number))

    def __str__(self) -> str:
        names = [clean(name) or "(model)" for name in self.rows]
        width = max(map(len, [*names, "total"]))
        lines = [f"gradients of backward {self.step}, per {self.per}{_REDUCED[self.reduction]}"]
        for name, stats in [*zip(names, self.rows.values(), strict=True), ("total", self.total)]:
            lines.append(f"  {name:{width}}  {stats}")
        return "\n".join(lines)
