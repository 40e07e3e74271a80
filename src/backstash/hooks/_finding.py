"""Where a NaN or an infinity came from, as a fact."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from .._text import clean
from ._stats import Stats

__all__ = ["Finding", "Kind"]

Kind = Literal["input", "output", "output gradient", "input gradient", "parameter gradient"]


@dataclass(frozen=True, slots=True)
class Finding:
    """The first value of one forward or backward that is not finite."""

    step: int
    """Which forward or backward since the search began; the first is 0."""
    phase: Literal["forward", "backward"]
    """Which of the two it was."""
    kind: Kind
    """What is not finite: of the module at ``path``."""
    path: str
    """The module's path; the model itself is ``""``."""
    module: str
    """The module's class."""
    made_by: str
    """Who made it, in words."""
    stats: Stats
    """Of the value that is not finite."""
    before: Stats | None
    """Of the value seen just before it: what went in. ``None`` if nothing was seen before."""
    parameters: tuple[str, ...]
    """The module's own parameters that are not finite."""

    def as_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "step": self.step,
            "phase": self.phase,
            "kind": self.kind,
            "path": self.path,
            "module": self.module,
            "made_by": self.made_by,
            "stats": self.stats.as_dict(),
            "before": None if self.before is None else self.before.as_dict(),
            "parameters": list(self.parameters),
        }

    def scalars(self) -> Iterator[tuple[str, float]]:
        """As curves: how many elements are NaN or infinite."""
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
