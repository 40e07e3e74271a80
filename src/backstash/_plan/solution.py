"""A solution: choices for all blocks of a trace, and what they come to by the simulation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .simulate import Forecast, Windows

__all__ = ["Solution", "best_of", "rank"]

_ALIKE = 1e-3  # of a step's seconds: solutions that differ by less take the same time


@dataclass(frozen=True, slots=True)
class Solution:
    """Choices for all blocks of a trace."""

    choices: tuple[str, ...]
    """The name of each block's option; ``"region"`` for all members of a region that is recomputed."""
    windows: Windows
    """The windows that go with them."""
    forecast: Forecast
    """By the simulation."""
    bound_seconds: float
    """No choice of options within the budget makes the step shorter than this, by the same figures."""
    fits: bool
    """Whether the forecast's peak is within the budget."""
    left_after: int | None = None
    """After so many blocks all stay, and are left alone; ``None``: each is looked at."""
    measured_bytes: int | None = None
    """Of choices that were measured before: their peak, which is predicted again."""
    level: int = 0
    """Which cut of each region is recomputed, see :meth:`Trace.cut_at`."""
    beside_bytes: int = 0
    """What steps were seen to hold beside blocks in place; 0: it is not known."""

    def predicted_bytes(self, bias_bytes: int) -> int:
        """The peak, where steps were seen to hold so many bytes more than the simulation says."""
        if self.measured_bytes is not None:
            return self.measured_bytes
        simulated = self.forecast.peak_bytes + bias_bytes
        seen = self.beside_bytes + self.forecast.resident_peak_bytes if self.beside_bytes else 0
        return max(simulated, seen)


def best_of(solutions: Sequence[Solution], alike: float = _ALIKE) -> Solution:
    """Of those that fit, one that takes the least time. Of several that take the same, within such a part of
    it, the one that moves the least; where none fits, the one of the smallest peak."""
    best = min(solutions, key=rank)
    if not best.fits:
        return best
    most = best.forecast.step_seconds * (1 + alike)
    as_fast = [each for each in solutions if each.fits and each.forecast.step_seconds <= most]
    return min(as_fast, key=lambda each: each.forecast.moved_bytes)


def rank(solution: Solution) -> tuple[bool, float]:
    """The least is the best: one that fits by its time, another by its peak."""
    forecast = solution.forecast
    return not solution.fits, forecast.step_seconds if solution.fits else forecast.peak_bytes
