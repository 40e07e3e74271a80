"""A plan in the making: solved for in a thread, while steps go on."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from .._plan.simulate import Windows, simulate
from .._plan.solution import Solution, best_of
from .._plan.solve import follow, smallest_budget, solve_with_cuts
from .._plan.trace import Trace, TracedBlock

__all__ = ["Beside", "Kept", "Solved", "Solving", "left_alone"]

Solved = tuple[Trace, Solution, int]
"""What was planned for, how, and the smallest budget that such a step can keep."""

_LOWERED = 2  # times that less is tried for, where too much would be in place
_ALIKE = 0.01  # of a step's seconds: what was measured has to take so much less to be planned again


def left_alone(trace: Trace) -> Solved:
    """Everything stays, and nothing is done about it."""
    plain = simulate(trace, trace.left_alone(), Windows(0, 0))
    kept = ("keep",) * len(trace.blocks)
    solution = Solution(kept, Windows(0, 0), plain, plain.step_seconds, fits=True, left_after=0)
    return trace, solution, plain.peak_bytes


@dataclass(frozen=True, slots=True)
class Kept:
    """Choices that were measured, and kept the budget."""

    blocks: tuple[TracedBlock, ...]
    """Of the step."""
    choices: tuple[str, ...]
    windows: Windows
    peak_bytes: int
    """The highest that was measured of such steps."""
    is_near: bool
    """Whether that is more of the budget than plans use."""
    level: int = 0
    """See :attr:`Solution.level`."""


@dataclass(frozen=True, slots=True)
class Beside:
    """What was measured of a plan that held less than was predicted."""

    nbytes: int
    """That it held beside its blocks in place."""
    most_resident_bytes: int
    """The most bytes of blocks that may be in place beside as much."""


class Solving:
    """Of one planner: the latest solution, and the one that is made.

    What was measured of one plan corrects what is predicted of every choice, of some of them too far. So
    choices that were measured to keep the budget (:class:`Kept`) are not ruled out by a correction: where they
    take less time than what is found within the target, or move less in the same, they are the solution; those
    that came near the budget, where nothing else fits.

    Args:
        windows: of both directions, where they are given; see :func:`solve`.
        notes: gets a line where no plan could be made; what was followed before is followed on.
    """

    def __init__(self, windows: tuple[int | None, int | None], notes: dict[str, None]) -> None:
        self.found: Solved | None = None
        """The latest; ``None``: there is none yet, or another one is made."""
        self.taken: Solved | None = None
        """The one that is followed."""
        self.has_failed = False
        """Whether one could not be made; what was followed before is followed on."""
        self._thread: threading.Thread | None = None
        self._windows = windows
        self._notes = notes
        self._kept: dict[tuple[str, ...], Kept] = {}

    def keep(self, kept: Kept) -> None:
        """Steps with these choices may be planned again."""
        self._kept[kept.choices] = kept

    def give_up(self, choices: tuple[str, ...]) -> None:
        """Steps with these choices held more. If they did not before, the process has grown, and nothing is
        known of the others any more."""
        if choices in self._kept:
            self._kept.clear()

    def forget_kept(self) -> None:
        """The device has less than was thought: nothing is known of what it has room for."""
        self._kept.clear()

    def begin(
        self,
        trace: Trace,
        target: int,
        *,
        allowed: Sequence[str],
        spare_bytes: int = 0,
        beside: Beside | None = None,
    ) -> None:
        """Begin to solve for ``target`` bytes, ``spare_bytes`` of them left free if they can be.

        Of ``beside`` it is known what steps hold beside blocks in place; ``None``: it is not.
        """
        self._kept = {
            choices: each for choices, each in self._kept.items() if each.blocks is trace.blocks
        }
        self.found, kept = None, [*self._kept.values()]

        def work() -> None:
            try:
                planned_for = trace.raised(spare_bytes)
                solution = self._solved(planned_for, target, allowed, beside)
                if not solution.fits and spare_bytes:
                    planned_for = trace
                    solution = self._solved(trace, target, allowed, beside)
                best = solution
                for is_near in (False, True):
                    if not is_near or not best.fits:
                        among = [each for each in kept if each.is_near is is_near]
                        best = best_of([best, *_kept_of(planned_for, among, allowed)], _ALIKE)
                # The bound is that of choices that are predicted to fit; those that were kept may not be.
                bound = min(solution.bound_seconds, best.forecast.step_seconds)
                solution = replace(best, bound_seconds=bound)
                smallest = solution.forecast.peak_bytes
                if not solution.fits:
                    smallest = smallest_budget(trace, allowed=allowed, windows=self._windows)
                self.found = planned_for, solution, smallest
            except Exception as error:  # the step is worth more than the plan
                note = f"no plan could be made ({error!r}): what was done before goes on"
                self._notes[note] = None
                self.has_failed, self.found = True, self.taken

        thread = threading.Thread(target=work, name="backstash plan", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # no more threads, or the interpreter is ending
            work()
        else:
            self._thread = thread  # an interrupt before this leaves nobody waiting for it

    def _solved(
        self, trace: Trace, target: int, allowed: Sequence[str], beside: Beside | None
    ) -> Solution:
        first = solution = solve_with_cuts(trace, target, allowed=allowed, windows=self._windows)
        if beside is None:
            return solution
        lower = target
        for _ in range(_LOWERED):
            over = solution.forecast.resident_peak_bytes - beside.most_resident_bytes
            if over <= 0 or solution.forecast.peak_bytes > lower:
                break
            lower = solution.forecast.peak_bytes - over
            found = solve_with_cuts(trace, lower, allowed=allowed, windows=self._windows)
            # It is for this target all the same, and so is the bound.
            fits, bound = found.forecast.peak_bytes <= target, first.bound_seconds
            solution = replace(found, fits=fits, bound_seconds=bound)
        return replace(solution, beside_bytes=beside.nbytes)

    @property
    def is_running(self) -> bool:
        """Whether one is being made."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def is_new(self) -> bool:
        """Whether :attr:`found` was not taken yet."""
        return self.found is not self.taken

    def take(self) -> Solved:
        """The one that was found; it is followed from now on."""
        assert self.found is not None
        self.taken = self.found
        return self.found

    def wait(self) -> None:
        """Wait until none is being made."""
        thread = self._thread
        if thread is not None:
            thread.join()

    def forked(self) -> None:
        """In a forked process: the thread is the other one's, and so is what it was making."""
        self._thread = None
        if self.found is None:
            self.found = self.taken


def _kept_of(trace: Trace, kept: Iterable[Kept], allowed: Sequence[str]) -> Iterable[Solution]:
    for each in kept:
        of = trace.cut_at(each.level)
        solution = follow(of, each.choices, each.windows, allowed=allowed)
        yield replace(solution, measured_bytes=each.peak_bytes, level=each.level)
