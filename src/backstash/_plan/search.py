"""Local search: change single choices until the peak fits, undo changes where space is left, and swap
changes."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from .simulate import Forecast, Windows
from .solution import Solution, rank
from .table import REGION, Problem, added_seconds
from .trace import Option

__all__ = ["Search"]

_REPAIRS = 64  # rounds
_FILLS = 40  # sets of changes tried
_LEAST_FILLS = 10  # in a step of many blocks: the last of them are of a thousandth of all changes
_FILLED_BLOCKS = 16_000  # sets times blocks, at most
_SWAP_REPAIRS = 3  # rounds that make space for an undone change
_FIRST_STEP, _LAST_STEP = 16, 1024  # lower() tries steps from 1/16 to 1/1024 of a peak
_LOWER_REPAIRS = 8  # rounds for each such step
_MIB = 1 << 20
_NOTHING = Option(0)


@dataclass(frozen=True, slots=True)
class _Change:
    """Other choices for a block, or for all members of a region."""

    updates: tuple[tuple[int, str], ...]
    seconds: float
    """Seconds that it adds to the step."""
    freed: int
    """Bytes that it frees at the moment in question."""
    is_whole: bool = False
    """Whether it changes a whole region."""
    moves: bool = False
    """Whether it moves a block that did not move before."""

    @property
    def place(self) -> tuple[int, str]:
        """Sort key: the block that is saved earliest comes first."""
        return self.updates[0]


@dataclass(frozen=True, slots=True)
class Search:
    """Change the choices of one problem.

    All methods except :meth:`repair` and :meth:`lower` return their argument if they find nothing better.
    """

    problem: Problem
    link_seconds: float
    """Price of a byte that moves both ways, in seconds."""

    def repair(self, start: Sequence[str]) -> Solution:
        """Change single choices until the peak fits."""
        choices, forecast = self._repaired(start, self.problem.budget, _REPAIRS)
        return Solution(
            tuple(choices), self.problem.windows, forecast, 0.0, fits=self._fits(forecast)
        )

    def _repaired(
        self,
        start: Sequence[str],
        budget: int,
        rounds: int,
        *,
        but: Collection[int] = (),
        may_move: bool = True,
    ) -> tuple[list[str], Forecast]:
        """Return choices that fit, or those after this many rounds.

        Each round makes the changes that free a byte at the moment of the peak at the least cost, as many as
        the excess needs. Among equals, the earliest saved block comes first, since its write has the most time.

        Args:
            start: choices.
            budget: in bytes.
            rounds: at most.
            but: blocks whose choices stay.
            may_move: whether more blocks may move. A block in flight takes memory until the window is full.
        """
        choices, forecast = list(start), self._forecast(start)
        for _ in range(rounds):
            excess = forecast.peak_bytes - budget
            if excess <= 0:
                break
            changes = [
                each
                for each in self._changes(choices, forecast.peak_moment)
                if each.freed > 0 and (may_move or not each.moves)
            ]
            changes.sort(key=lambda each: (each.seconds / each.freed, each.place))
            changed, taken = set(but), []
            for change in changes:
                if excess <= 0:
                    break
                blocks = {block for block, _name in change.updates}
                if not blocks & changed:
                    taken.append(change)
                    changed |= blocks
                    excess -= change.freed
            if not taken:
                break
            choices = _with(choices, taken)
            forecast = self._forecast(choices)
        return choices, forecast

    def lower(self, start: Sequence[str]) -> Solution:
        """Return choices with as small a peak as the search finds. It lowers the budget in steps, which double
        where the choices can be repaired to fit, and halve where they cannot."""
        best = Solution(tuple(start), self.problem.windows, self._forecast(start), 0.0, fits=False)
        step = best.forecast.peak_bytes // _FIRST_STEP
        while step >= max(1, best.forecast.peak_bytes // _LAST_STEP):
            lower = best.forecast.peak_bytes - step
            choices, forecast = self._repaired(best.choices, lower, _LOWER_REPAIRS)
            if forecast.peak_bytes <= lower:
                best, step = replace(best, choices=tuple(choices), forecast=forecast), 2 * step
            else:
                step //= 2
        return replace(best, fits=self._fits(best.forecast))

    def fill(self, start: Solution) -> Solution:
        """Undo the most expensive changes for which there is space.

        The order is by seconds saved per byte, the latest saved first among equals. The number tried at once is
        halved when the peak no longer fits or the time rises.
        """
        if not start.fits:
            return start
        choices, forecast = list(start.choices), start.forecast
        gains = [each for each in self._changes(choices, None) if each.seconds < 0]
        gains.sort(
            key=lambda each: (
                each.seconds / each.freed if each.freed < 0 else float("inf"),
                each.place,
            ),
            reverse=True,
        )
        at, count = 0, max(1, len(gains) // 2)
        tries = min(_FILLS, max(_LEAST_FILLS, _FILLED_BLOCKS // max(1, len(choices))))
        while at < len(gains) and tries:
            tries -= 1
            tried = _with(choices, gains[at : at + count])
            outcome = self._forecast(tried)
            if self._fits(outcome) and outcome.step_seconds <= forecast.step_seconds + 1e-12:
                choices, forecast, at = tried, outcome, at + count
            elif count > 1:
                count //= 2
            else:
                at += 1
        return replace(start, choices=tuple(choices), forecast=forecast)

    def swap(self, start: Solution, tries: int) -> Solution:
        """Undo a change for which there is no space, and make cheaper ones in its place: at most ``tries``
        times, those that save the most time first, starting over whenever the step gets shorter."""
        choices, forecast = list(start.choices), start.forecast
        undone = self._undone(choices) if start.fits else []
        while undone and tries:
            tries -= 1
            change = undone.pop()
            blocks = [block for block, _name in change.updates]
            for may_move in (True, False):
                tried, outcome = self._repaired(
                    _with(choices, [change]),
                    self.problem.budget,
                    _SWAP_REPAIRS,
                    but=blocks,
                    may_move=may_move,
                )
                if self._fits(outcome):
                    break
            if self._fits(outcome) and outcome.step_seconds < forecast.step_seconds - 1e-12:
                choices, forecast = tried, outcome
                undone = self._undone(choices)
        return replace(start, choices=tuple(choices), forecast=forecast)

    def _undone(self, choices: Sequence[str]) -> list[_Change]:
        """Return the changes that save time; the one that saves the most comes last."""
        changes = [each for each in self._changes(choices, None) if each.seconds < 0]
        changes.sort(key=lambda each: (each.seconds, each.place), reverse=True)
        return changes

    def change_windows(self, start: Solution, given: tuple[int | None, int | None]) -> Solution:
        """Halve or double a window that is not given, as long as that shortens the step."""
        best, tried, turns = start, {start.windows}, start.fits
        while turns:
            turns = False
            down, up = best.windows
            for other in ((2 * down, up), (down, 2 * up), (down // 2, up), (down, up // 2)):
                windows = Windows(
                    *(
                        of if fixed is None else fixed
                        for of, fixed in zip(other, given, strict=True)
                    )
                )
                if windows in tried or min(windows) < _MIB:
                    continue
                tried.add(windows)
                search = replace(self, problem=replace(self.problem, windows=windows))
                found = search.fill(search.repair(best.choices))
                if rank(found) < rank(best):
                    best, turns = found, True
                    break
        return best

    def _forecast(self, choices: Sequence[str]) -> Forecast:
        return self.problem.forecast(choices)

    def _fits(self, forecast: Forecast) -> bool:
        return forecast.peak_bytes <= self.problem.budget

    def _changes(self, choices: Sequence[str], at: int | None) -> list[_Change]:
        """Return all single changes, with the bytes that each frees in the interval before the moment ``at``.
        ``None`` counts what each block holds from its save to its use, as if all blocks were alive at once."""
        problem, changes = self.problem, []
        for block, name in enumerate(choices):
            if name == REGION or (at is not None and not problem.is_alive(block, at)):
                continue
            now = problem.option(block, name)
            for other, option in problem.options(block):
                if other != name:
                    freed = problem.held_bytes(block, now, at) - problem.held_bytes(
                        block, option, at
                    )
                    seconds = added_seconds(now, option, self.link_seconds)
                    moves = option.moved_bytes > now.moved_bytes
                    changes.append(_Change(((block, other),), seconds, freed, moves=moves))
        for index in range(len(problem.regions)):
            changes += self._changes_of(choices, index, at)
        return changes

    def _changes_of(self, choices: Sequence[str], index: int, at: int | None) -> list[_Change]:
        """Return the change that recomputes a region; or the changes that stop recomputing it, with its members
        in place or held by the option that takes the least memory."""
        problem = self.problem
        region = problem.regions[index]
        seconds = region.save_seconds + region.use_seconds
        alive = {each for each in region.members if at is None or problem.is_alive(each, at)}
        returned = -region.small_bytes if at is None else problem.returned_bytes(index, at)

        def held(names: Sequence[str]) -> tuple[float, int]:
            """Return the seconds that these choices of the members add, and the bytes that they hold."""
            options = [
                problem.option(each, name) for each, name in zip(region.members, names, strict=True)
            ]
            nbytes = sum(
                option.resident_bytes
                for each, option in zip(region.members, options, strict=True)
                if each in alive
            )
            added = (added_seconds(_NOTHING, option, self.link_seconds) for option in options)
            return sum(added), nbytes

        if choices[region.members[0]] != REGION:
            cost, nbytes = held([choices[each] for each in region.members])
            updates = tuple((each, REGION) for each in region.members)
            return [_Change(updates, seconds - cost, nbytes - returned, is_whole=True)]
        found = []
        least = [problem.least_resident(each) for each in region.members]
        for names in (["keep"] * len(least), least):
            cost, nbytes = held(names)
            updates = tuple(zip(region.members, names, strict=True))
            found.append(_Change(updates, cost - seconds, returned - nbytes, is_whole=True))
        return found


def _with(choices: Sequence[str], changes: Sequence[_Change]) -> list[str]:
    changed = list(choices)
    for change in changes:
        if changed[change.updates[0][0]] == REGION and not change.is_whole:
            continue  # its region is recomputed, by an earlier change
        for block, name in change.updates:
            changed[block] = name
    return changed
