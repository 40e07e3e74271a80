"""Which states of a loop to hold as snapshots, so that its steps can be run again in reverse order.

Notation: ``n`` steps, at most ``c`` snapshots at once, including the loop's first state. ``beta(c, r)`` is the
binomial coefficient of ``c + r`` over ``c``: the most steps that ``c`` snapshots can reverse if no step runs
ahead more than ``r`` times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import comb
from typing import Protocol, runtime_checkable

from ..._text import shown
from ...errors import UsageError

__all__ = ["Binomial", "KeepAll", "Schedule", "TwoLevel"]


@runtime_checkable
class Schedule(Protocol):
    """The interface of a schedule for :func:`checkpoint_loop`: any object with these two members."""

    @property
    def keeps_graphs(self) -> bool:
        """Whether to keep what every step saves. Then no step runs twice, and nothing else is called."""
        ...

    def next_snapshot(self, held: Sequence[int], stop: int) -> int | None:
        """Return the next state to hold while the loop runs from the last held one.

        Args:
            held: the steps whose input states are held, in ascending order. The loop runs from ``held[-1]``.
            stop: the steps from ``held[-1]`` to ``stop - 1`` are reversed next.

        Returns:
            A step after ``held[-1]`` and before ``stop``, or ``None`` for no further snapshot.
        """
        ...


@dataclass(frozen=True, slots=True)
class KeepAll:
    """Keeps what every step saves; no step runs twice. The stash places it within its budgets."""

    keeps_graphs: bool = field(default=True, init=False, repr=False)
    """See :class:`Schedule`."""

    def next_snapshot(self, held: Sequence[int], stop: int) -> int | None:
        """Return ``None``: the first state is the only snapshot."""
        return None


@dataclass(frozen=True, slots=True)
class Binomial:
    """The fewest step evaluations for a number of snapshots (Griewank and Walther, Algorithm 799, 2000).

    For n steps and c snapshots they are n + r n - C(c + r, c + 1), with the least r that has n <= C(c + r, c).

    Raises:
        UsageError: ``snapshots`` is not a whole number of at least 1.
    """

    snapshots: int
    """The most states that are held at once, including the loop's first one."""
    keeps_graphs: bool = field(default=False, init=False, repr=False)
    """See :class:`Schedule`."""

    def __post_init__(self) -> None:
        _at_least_one(self.snapshots, "Binomial snapshots")

    def next_snapshot(self, held: Sequence[int], stop: int) -> int | None:
        """Return the best split of the remaining steps."""
        return _split(held[-1], stop, self.snapshots - len(held))


@dataclass(frozen=True, slots=True)
class TwoLevel:
    """Coarse snapshots at a fixed distance, which a stash moves to disk, with binomial ones between.

    The coarse snapshots are the oldest, so a stash's budget evicts them first.

    Raises:
        UsageError: a number is not a whole number of at least 1.
    """

    every: int
    """Steps from one coarse snapshot to the next."""
    snapshots: int
    """The most states held at once between two coarse snapshots, including the first of these."""
    keeps_graphs: bool = field(default=False, init=False, repr=False)
    """See :class:`Schedule`."""

    def __post_init__(self) -> None:
        _at_least_one(self.every, "TwoLevel every")
        _at_least_one(self.snapshots, "TwoLevel snapshots")

    def next_snapshot(self, held: Sequence[int], stop: int) -> int | None:
        """Return the next coarse snapshot; in the last interval, the split of :class:`Binomial`."""
        start = held[-1]
        coarse = start - start % self.every + self.every
        if coarse < stop:
            return coarse if start % self.every == 0 else _split(start, coarse, 0)
        fine = sum(1 for step in held if step > start - start % self.every)
        return _split(start, stop, self.snapshots - 1 - fine)


def _at_least_one(value: int, name: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UsageError(f"{name}={shown(value)}: allowed is a whole number of at least 1")


def _beta(snapshots: int, repeats: int) -> int:
    return comb(snapshots + repeats, snapshots) if snapshots >= 0 and repeats >= 0 else 0


def _repeats(steps: int, snapshots: int) -> int:
    """Return the least ``r`` with ``steps <= beta(snapshots, r)``."""
    if snapshots == 1:
        return steps - 1
    repeats = 0
    while _beta(snapshots, repeats) < steps:
        repeats += 1
    return repeats


def _split(start: int, stop: int, free: int) -> int | None:
    steps, snapshots = stop - start, free + 1
    if free < 1 or steps < 2:
        return None
    repeats = _repeats(steps, snapshots)
    last = min(_beta(snapshots, repeats - 1), steps - _beta(snapshots - 1, repeats - 1))
    return start + min(max(last, 1), steps - 1)


def least_evaluations(n: int, snapshots: int) -> int:
    """Return the fewest evaluations that run ``n`` steps and reverse them, by the published closed formula.

    The evaluations that run ahead are ``r n - beta(c + 1, r - 1)``, with the least ``r`` for which
    ``n <= beta(c, r)`` (Griewank and Walther, 2000). Each step also runs once more to record what it saves.

    >>> [least_evaluations(4, snapshots) for snapshots in (1, 2, 3, 4)]
    [10, 8, 7, 7]
    """
    if n == 0:
        return 0
    repeats = _repeats(n, snapshots)
    return n + repeats * n - _beta(snapshots + 1, repeats - 1)


def play(schedule: Schedule, n: int) -> tuple[int, int]:
    """Return the evaluations of ``n`` steps and their backward, and the most snapshots that are held at once.

    Both are counted by simulation.
    """
    if schedule.keeps_graphs or n == 0:
        return n, 1
    held, evaluations, most = [0], 0, 1
    for last in range(n - 1, -1, -1):
        while held[-1] > last:
            held.pop()
        evaluations += last + 1 - held[-1]
        while (following := checked_next(schedule, held, last + 1)) is not None:
            held.append(following)
        most = max(most, len(held))
    return evaluations, most


def costs(schedule: Schedule, n: int) -> tuple[int, int]:
    """Return what :func:`play` returns, by closed formulas for the schedules of this module.

    A simulation of a million steps takes minutes.
    """
    if type(schedule) is Binomial:
        return least_evaluations(n, schedule.snapshots), max(1, min(schedule.snapshots, n))
    if type(schedule) is TwoLevel and n:
        # Forward runs all steps. Each interval is then reversed as by Binomial, the last one first.
        fine, before = Binomial(schedule.snapshots), (n - 1) // schedule.every
        last = n - before * schedule.every
        in_last, held_in_last = costs(fine, last)
        in_whole, held_in_whole = costs(fine, schedule.every)
        most = before + (max(held_in_last, held_in_whole - 1) if before else held_in_last)
        return before * (schedule.every + in_whole) + in_last, most
    return play(schedule, n)


def checked_next(schedule: Schedule, held: Sequence[int], stop: int) -> int | None:
    """Return the schedule's answer. Raises ``UsageError`` if the step is out of range."""
    following = schedule.next_snapshot(tuple(held), stop)
    if following is None:
        return None
    if isinstance(following, bool) or not isinstance(following, int):
        raise UsageError(
            f"{schedule!r}.next_snapshot returned {shown(following)}: allowed is an int, or None"
        )
    if not held[-1] < following < stop:
        raise UsageError(
            f"{schedule!r}.next_snapshot returned {following} for held={tuple(held)}, stop={stop}: allowed "
            f"is a step after {held[-1]} and before {stop}, or None"
        )
    return following
