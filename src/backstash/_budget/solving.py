"""Solve for a plan in a thread while the program's steps continue."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from .._plan.simulate import Windows
from .._plan.solution import Solution, best_of
from .._plan.solve import follow, solve_with_cuts, whole_calls
from .._plan.trace import Trace, TracedBlock
from ..plan import StepFigures

__all__ = ["Kept", "Solved", "Solving"]

Solved = tuple[Trace, Solution]
"""The trace that was planned for, and the solution."""

_ALIKE = 0.01  # step times that differ by a smaller part count as equal
_TRIED = 0.1  # a plan is tried whose predicted time is at most so much longer
_FASTER = 0.05  # a plan takes the place of another one whose steps take so much longer


@dataclass(frozen=True, slots=True)
class Kept:
    """Choices that a measured step had and that kept the budget."""

    blocks: tuple[TracedBlock, ...]
    """Blocks of the step."""
    choices: tuple[str, ...]
    windows: Windows
    peak_bytes: int
    """The highest measured peak of such steps, in bytes."""
    is_near: bool
    """Whether that is more of the budget than plans use."""
    levels: tuple[int, ...] = ()
    """See :attr:`Solution.levels`."""


class Solving:
    """The latest solution of one planner, and the solution that is being made.

    A correction from one measured plan applies to every predicted peak, and is too large for some choices. So a
    correction does not rule out choices that were measured to keep the budget (:class:`Kept`). Such choices
    become the solution if they take less time than what is found within the target, or the same time and move
    less. Choices that came near the budget are used only if nothing else fits.

    Args:
        windows: those that are given, of both directions; see :func:`solve`.
        notes: gets a line if planning failed; the previous plan then stays in force.
    """

    def __init__(self, windows: tuple[int | None, int | None], notes: dict[str, None]) -> None:
        self.found: Solved | None = None
        """The latest solution; ``None`` if there is none yet, or another one is being made."""
        self.taken: Solved | None = None
        """The solution that is being followed."""
        self.has_failed = False
        """Whether a plan could not be made."""
        self._thread: threading.Thread | None = None
        self._windows = windows
        self._notes = notes
        self._kept: dict[tuple[str, ...], Kept] = {}
        # The plans of one trace whose steps were timed and kept the budget, with their figures.
        self._timed: dict[Any, tuple[StepFigures, Solved]] = {}
        self._trial: Solved | None = None  # see is_trying
        self._has_tried = False

    def keep(self, kept: Kept) -> None:
        """Allow these choices to be planned again."""
        self._kept[kept.choices] = kept

    def give_up(self, choices: tuple[str, ...]) -> None:
        """Record that steps with these choices exceeded the budget. If they kept it before, the process has
        grown, and the other kept choices are no longer reliable."""
        for each in [each for each in self._timed if each[0] == choices]:
            del self._timed[each]
        if choices in self._kept:
            self._kept.clear()

    def forget_kept(self) -> None:
        """Forget all kept choices: the device has less memory than assumed."""
        self._kept.clear()

    def begin(
        self,
        trace: Trace,
        target: int,
        *,
        spare_bytes: int = 0,
        most: int = 0,
    ) -> None:
        """Begin to solve for ``target`` bytes, leaving ``spare_bytes`` of them free if possible. If nothing
        fits, ``most`` bytes may be used."""
        self._kept = {
            choices: each for choices, each in self._kept.items() if each.blocks is trace.blocks
        }
        if self.found is None or self.found[0] is not trace:
            self._timed.clear()
            self._has_tried = False
        self.found, kept = None, [*self._kept.values()]

        def work() -> None:
            try:
                planned_for = trace.raised(spare_bytes)
                solution = self._solved(planned_for, target)
                if not solution.fits and spare_bytes:
                    planned_for = trace
                    solution = self._solved(trace, target)
                best = solution
                for is_near in (False, True):
                    if not is_near or not best.fits:
                        among = [each for each in kept if each.is_near is is_near]
                        best = best_of([best, *_kept_of(planned_for, among)], _ALIKE)
                if not best.fits and target < most:
                    best = best_of([best, self._solved(planned_for, most)])
                # The bound is for choices that are predicted to fit; kept choices may not be.
                bound = min(solution.bound_seconds, best.forecast.step_seconds)
                self.found = planned_for, replace(best, bound_seconds=bound)
            except Exception as error:  # a failed plan must not end the program
                note = f"planning failed ({error!r}): the stash continues as before"
                self._notes[note] = None
                self.has_failed, self.found = True, self.taken

        thread = threading.Thread(target=work, name="backstash plan", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # no more threads, or the interpreter is ending
            work()
        else:
            self._thread = (
                thread  # after an interrupt before this line, wait() does not wait for it
            )

    def _solved(self, trace: Trace, target: int) -> Solution:
        return solve_with_cuts(trace, target, windows=self._windows)

    def timed(self, measured: StepFigures) -> None:
        """Record what the steps of the plan that is followed take. Follow another one again whose steps took
        less time; the prediction said otherwise. Each plan is left for another one at most once, one that was
        tried for any that is faster."""
        enough = 0.0 if self.is_trying else _FASTER
        self._trial = None
        assert self.taken is not None
        key = _key(self.taken)
        self._timed[key] = measured, self.taken
        least, fastest = min(self._timed.values(), key=_seconds_of)
        if least.step_seconds < (1 - enough) * measured.step_seconds:
            del self._timed[key]
            self.found = fastest

    @property
    def measured(self) -> StepFigures | None:
        """The figures of the plan that is followed, if it was followed and timed before."""
        assert self.taken is not None
        known = self._timed.get(_key(self.taken))
        return None if known is None else known[0]

    def try_whole_calls(self, target: int) -> bool:
        """Follow a plan that only recomputes whole calls, to time it (see :func:`whole_calls`), once for each
        trace. Return whether there is one, and its predicted time is not much longer."""
        if self._has_tried or self.taken is None:
            return False
        self._has_tried = True
        trace, solution = self.taken
        other = whole_calls(trace, target, solution.windows)
        if other is None or other.choices == solution.choices:
            return False
        most = solution.forecast.step_seconds * (1 + _TRIED)
        if other.forecast.step_seconds > most:
            return False
        trial = trace, replace(other, bound_seconds=solution.bound_seconds)
        self.found = self._trial = trial
        return True

    @property
    def is_trying(self) -> bool:
        """Whether a plan is followed only to time it, and left again if its steps take longer than another's or
        exceed the budget."""
        return self._trial is not None and self.taken is self._trial

    def end_trial(self) -> None:
        """Follow the fastest plan that was timed: the one that was tried exceeded the budget, or was not timed
        since no two steps are alike."""
        self._trial = None
        if self._timed:
            self.found = min(self._timed.values(), key=_seconds_of)[1]

    @property
    def is_running(self) -> bool:
        """Whether a solution is being made."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def is_new(self) -> bool:
        """Whether :attr:`found` has not been taken yet."""
        return self.found is not self.taken

    def take(self) -> Solved:
        """Return the solution that was found, and follow it from now on."""
        assert self.found is not None
        self.taken = self.found
        return self.found

    def wait(self) -> None:
        """Wait until no solution is being made."""
        thread = self._thread
        if thread is not None:
            thread.join()

    def forked(self) -> None:
        """Reset in a forked process, where the thread does not run, so that its solution never comes."""
        self._thread = None
        if self.found is None:
            self.found = self.taken


def _key(solved: Solved) -> Any:
    """What two solutions have in common that are carried out alike."""
    _, solution = solved
    return solution.choices, solution.levels, solution.windows


def _seconds_of(timed: tuple[StepFigures, Solved]) -> float:
    return timed[0].step_seconds


def _kept_of(trace: Trace, kept: Iterable[Kept]) -> Iterable[Solution]:
    for each in kept:
        of = trace.cut_at(each.levels)
        solution = follow(of, each.choices, each.windows)
        yield replace(solution, measured_bytes=each.peak_bytes, levels=each.levels)
