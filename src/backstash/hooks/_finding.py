"""Where a NaN or an infinity came from: the values of one forward or backward, and the finding."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch

from .._text import clean
from .._torch.module_parts import own_parameters
from ._distributed import is_dtensor
from ._paths import Site
from ._stats import Stats, StatsRow, fetch, measure
from ._tree import tensors_in

__all__ = ["Finding", "Kind", "ValuesSeen"]


Phase = Literal["forward", "backward"]
Kind = Literal["input", "output", "output gradient", "input gradient", "parameter gradient"]


@dataclass(frozen=True, slots=True)
class Finding:
    """The first value of one forward or backward that is not finite."""

    step: int
    """Which forward or backward since the search began; the first is 0."""
    phase: Phase
    """Which of the two it was."""
    kind: Kind
    """Which value of the module at ``path`` is not finite."""
    path: str
    """The module's path; the model itself is ``""``."""
    module: str
    """The module's class."""
    made_by: str
    """The cause, in words: a module, its backward, operations between modules, the input, the loss."""
    stats: Stats
    """Statistics of the value that is not finite."""
    before: Stats | None
    """Statistics of the value measured just before it; ``None`` if it was the first."""
    parameters: tuple[str, ...]
    """The module's own parameters that are not finite."""

    def as_dict(self) -> dict[str, Any]:
        """Return the finding as data for JSON."""
        before = None if self.before is None else self.before.as_dict()
        changed = {"stats": self.stats.as_dict(), "before": before}
        return {**asdict(self), **changed, "parameters": list(self.parameters)}

    def scalars(self) -> Iterator[tuple[str, float]]:
        """Yield the finding as curves: how many elements are NaN or infinite."""
        yield f"nonfinite/{self.phase}/nan", float(self.stats.nan)
        yield f"nonfinite/{self.phase}/inf", float(self.stats.inf)

    def __str__(self) -> str:
        lines = [
            f"{self.phase} {self.step}: the {self.kind} of {self.path or '(model)'} ({self.module}) is not "
            f"finite; made by {self.made_by}",
            f"  {self.kind}: {self.stats}",
        ]
        if self.before is not None:
            lines.append(f"  before it: {self.before}")
        if self.parameters:
            lines.append(f"  not finite either: its {', '.join(self.parameters)}")
        return "\n".join(map(clean, lines))


@dataclass(frozen=True, slots=True)
class _Seen:
    kind: Kind
    site: Site
    rows: list[StatsRow]


class ValuesSeen:
    """The statistics of one forward's or backward's values, in order; only ``judge`` waits for the device."""

    __slots__ = ("_count_inf", "_phase", "_seen", "_step")

    def __init__(self, phase: Phase, *, count_inf: bool) -> None:
        self._phase: Phase = phase
        self._count_inf = count_inf
        self._seen: list[_Seen] = []
        self._step = 0

    def see(self, kind: Kind, site: Site, value: Any) -> None:
        """Measure the floating-point tensors of a value."""
        tensors = [t for t in tensors_in(value) if t.is_floating_point() or t.is_complex()]
        if tensors:
            self._seen.append(_Seen(kind, site, [StatsRow(measure(_local(t))) for t in tensors]))

    def clear(self) -> None:
        """Drop the values seen so far, such as those of a forward or backward that raised."""
        self._seen = []

    def judge(self) -> Finding | None:
        """Return the first value that is not finite, if any, and drop all values. Waits for the device once."""
        seen, self._seen = self._seen, []
        if not seen:
            return None
        fetched, _ = fetch({str(index): item.rows for index, item in enumerate(seen)})
        step, self._step = self._step, self._step + 1
        before: _Seen | None = None
        stats_before: Stats | None = None
        for index, item in enumerate(seen):
            stats = fetched[str(index)]
            if stats.nan or (self._count_inf and stats.inf):
                return self._finding(step, item, stats, before, stats_before)
            before, stats_before = item, stats
        return None

    def _finding(
        self,
        step: int,
        item: _Seen,
        stats: Stats,
        before: _Seen | None,
        stats_before: Stats | None,
    ) -> Finding:
        module = item.site.module
        return Finding(
            step=step,
            phase=self._phase,
            kind=item.kind,
            path=item.site.path,
            module=type(module).__name__,
            made_by=_made_by(item, before),
            stats=stats,
            before=stats_before,
            parameters=tuple(
                name
                for name, parameter in own_parameters(module)
                if not bool(_local(parameter).isfinite().all())
            ),
        )


def _local(tensor: torch.Tensor) -> torch.Tensor:
    # The shard of this process: a search must not wait for processes that found nothing.
    part: Any = tensor
    return part.to_local() if is_dtensor(tensor) else tensor


def _made_by(item: _Seen, before: _Seen | None) -> str:
    if item.kind == "output":
        own = any(True for _ in item.site.module.children())
        return "its own operations, outside the modules in it" if own else "this module"
    if item.kind in ("input gradient", "parameter gradient"):
        return "this module's backward"
    if before is None:
        return (
            "the caller: it came with the model's input"
            if item.kind == "input"
            else ("the loss, or what comes after the model")
        )
    where = f"{before.site.label} ({before.kind})"
    if item.kind == "input":
        return f"operations between modules, after {where}"
    return f"the backward of operations between modules, after {where}"
