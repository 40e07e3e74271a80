"""A solution: a choice for each block of a trace, and the simulated step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .simulate import Forecast, Windows

__all__ = ["Solution", "best_of", "rank"]

_ALIKE = 1e-3  # step times that differ by a smaller part count as equal


@dataclass(frozen=True, slots=True)
class Solution:
    """A choice for each block of a trace."""

    choices: tuple[str, ...]
    """The name of each block's option; ``"region"`` for members of a recomputed region."""
    windows: Windows
    """The windows that the choices were simulated with."""
    forecast: Forecast
    """The simulated step."""
    bound_seconds: float
    """A lower bound of the step's seconds for any choices within the budget, by the same figures."""
    fits: bool
    """Whether the simulated peak is within the budget."""
    left_after: int | None = None
    """After this many blocks all blocks stay, unmanaged; ``None``: the stash manages each block."""
    measured_bytes: int | None = None
    """Of choices that were measured before: their peak, which is predicted again."""
    levels: tuple[int, ...] = ()
    """Which cut of each region is recomputed, see :meth:`Trace.cut_at`."""

    def predicted_bytes(self, bias_bytes: int) -> int:
        """Return the predicted peak, where measured steps exceeded the simulation by this many bytes."""
        if self.measured_bytes is not None:
            return self.measured_bytes
        return self.forecast.peak_bytes + bias_bytes


def best_of(solutions: Sequence[Solution], alike: float = _ALIKE) -> Solution:
    """Return the best solution: of those that fit, one of the fastest. Among equally fast ones, within a part
    ``alike`` of the time, it is the one that moves the fewest bytes. If none fits, it is the one with the
    smallest peak."""
    best = min(solutions, key=rank)
    if not best.fits:
        return best
    most = best.forecast.step_seconds * (1 + alike)
    as_fast = [each for each in solutions if each.fits and each.forecast.step_seconds <= most]
    return min(as_fast, key=lambda each: each.forecast.moved_bytes)


def rank(solution: Solution) -> tuple[bool, float]:
    """Return a sort key, best first: solutions that fit by their time, then the others by their peak."""
    forecast = solution.forecast
    return not solution.fits, forecast.step_seconds if solution.fits else forecast.peak_bytes
