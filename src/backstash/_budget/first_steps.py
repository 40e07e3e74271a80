"""The first steps of a stash within a budget: what each moves to be measured, and what they tell."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Literal

from .._plan.trace import Links
from .record import Costs, StepRecord, links_of, typical, typical_costs

__all__ = ["FirstSteps", "Mode"]

Mode = Literal["fits", "all", "half", "left", "sampled"]
"""What a step moves: what does not fit in memory, everything, every other block, or nothing, since it is left
alone; the last one of these has its memory sampled."""

_TO_LEARN = 1  # bytes: the budget by which `backstash plan` asks what any other one would cost
_ALIKE = 0.02  # how much two steps of one shape may differ in what they save
_LEFT_ALIKE = 0.125  # likewise where one of them was left alone, whose last saves are not told
_LEARNT_PAIRS = 3  # of steps that are measured where only what a plan would cost is to be learnt
# Likewise that are left alone. Memory was given back before the first of them; the one after them is sampled.
_LEFT_STEPS = 4


class FirstSteps:
    """The steps before anything is planned for.

    The first one keeps what fits, and measures the memory. Where it moved nothing, the second one does the
    same: the optimizer has its state by then. If everything still fits, no other step is measured. Otherwise a
    pair comes next: one step that moves everything, and one that moves every other block.

    On an accelerator, and where there is no tier below, the first step moves or recomputes everything: an
    operation that finds no memory there ends the program, and what was kept cannot be recomputed later.

    Within a budget of one byte, as ``backstash plan`` gives, it is learnt what any budget would cost. Memory is
    given back all the time in the first pair: it tells what is held beside what is saved. What moving costs is
    told by two more pairs, which may hold more; and steps that are left alone tell what that takes.

    Args:
        budget: in bytes.
        copies_aside: whether copies take no time of what computes, as on an accelerator.
        keeps_first: whether the first step keeps what fits.
    """

    def __init__(
        self, budget: int, *, copies_aside: bool = False, keeps_first: bool = False
    ) -> None:
        self._copies_aside = copies_aside
        self.learns = budget == _TO_LEARN
        """Whether no budget is kept, since it is learnt what any would cost."""
        self.records: list[StepRecord] = []
        self._told_bytes: list[
            int
        ] = []  # of each: of all storages that it saved, see Planner.count_saved
        self.left: list[tuple[float, int]] = []
        """Of each step that was left alone: its seconds, and the bytes of all storages that it saved."""
        self._sampled: tuple[int, int] | None = None  # of the last one: its peak, and these bytes
        self.keeps_first = keeps_first and not self.learns
        """Whether the first step keeps what fits."""
        self.keeps_larger = self.keeps_first
        """Whether a step that is larger than any before it does, too. Once such a step did not fit, the next
        one moves everything, since a plan has to know what moving takes."""
        self.mode: Mode = "fits" if self.keeps_first else "all"
        """Of the step under way."""
        self._is_second = False  # of those with the mode "fits"

    def add(
        self, record: StepRecord | None, seconds: float, told_bytes: int, peak_bytes: int
    ) -> None:
        """A step has ended, which took ``seconds`` and saved storages of ``told_bytes``.

        One that was left alone has no record; ``peak_bytes`` are the most that were sampled in the last one.
        """
        if record is not None:
            self.records.append(record)
            self._told_bytes.append(told_bytes)
        if self.mode == "left":
            self.left.append((seconds, told_bytes))
        if self.mode == "sampled":
            self._sampled = peak_bytes, told_bytes

    def tries_again(self) -> bool:
        """Whether the next step keeps what fits, too, since the first one moved nothing."""
        again = self.mode == "fits" and not self._is_second and not self.records[0].moved_bytes
        if again:
            self._is_second = True
            self.forget()
        return again

    def forget(self) -> None:
        """A plan was made from them."""
        self.records.clear()
        self._told_bytes.clear()

    @property
    def may_exceed(self) -> bool:
        """Whether the next step has windows and may hold more than the budget: what moving costs is learnt."""
        return self.learns and len(self.records) > 2

    def next_mode(self, spare_bytes: Callable[[], int]) -> Mode | None:
        """Of the next step, after the first; ``None``: enough are measured.

        Args:
            spare_bytes: what the device has left; a step is left alone where half of it is enough.
        """
        done = len(self.records) - 1
        if done < 2 * (_LEARNT_PAIRS if self.learns else 1):
            return "half" if done % 2 else "all"
        if not self.learns or self._sampled is not None:
            return None
        if len(self.left) == _LEFT_STEPS:
            return "sampled"
        return "left" if self.records[1].moved_bytes <= spare_bytes() // 2 else None

    @property
    def are_enough(self) -> bool:
        """Whether a plan can be made, if need be from no more than these."""
        return len(self.records) > 2

    @property
    def largest(self) -> StepRecord:
        """The step to plan for: the earliest that saved as much as any, but for the very first."""
        most = max(each.saved_bytes for each in self.records[1:])
        return next(each for each in self.records[1:] if each.saved_bytes >= most * (1 - _ALIKE))

    @property
    def traced(self) -> StepRecord:
        """The step whose moments are planned with: :attr:`largest`, or where copies run aside, the one like it
        that computed for the least time. A host that tries what can be recomputed and packed waits for its
        device, which then has nothing to do."""
        if not self._copies_aside:
            return self.largest
        return min(
            (each for pair in self.alike() for each in pair),
            key=lambda each: each.computing_seconds,
            default=self.largest,
        )

    @property
    def largest_moved_all(self) -> bool:
        """Whether :attr:`largest` is the first of a pair."""
        return self.records.index(self.largest) % 2 == 1

    def told_bytes(self, record: StepRecord) -> int:
        """Of all storages that this step saved."""
        return self._told_bytes[self.records.index(record)]

    def alike(self) -> Iterable[tuple[StepRecord, StepRecord]]:
        """The pairs of steps that both saved as much as the largest did."""
        most, steps = self.largest.saved_bytes, self.records[1:]
        for pair in zip(steps[::2], steps[1::2], strict=False):
            if all(abs(each.saved_bytes - most) <= _ALIKE * most for each in pair):
                yield pair

    def costs(self) -> tuple[Links, Costs]:
        """What moving takes, and what else the stash adds, for a step like the largest."""
        pairs = [*self.alike()] or [(self.largest, self.largest)]
        late = [pair for pair in pairs if pair[0] is not self.records[1]] if self.learns else []
        told = late or pairs
        links = links_of([*itertools.chain(*told)])
        return links, typical_costs(told, links, copies_aside=self._copies_aside)

    @property
    def left_seconds(self) -> float | None:
        """Of a step like the largest that was left alone; ``None``: there was none."""
        whole = self.told_bytes(self.largest)
        left = [seconds for seconds, nbytes in self.left[1:] if _is_alike(nbytes, whole)]
        return typical(left) if left else None

    @property
    def left_peak_bytes(self) -> int:
        """The most memory of a step like the largest that was left alone; 0: it is not known."""
        if self._sampled is None:
            return 0
        peak_bytes, nbytes = self._sampled
        return peak_bytes if _is_alike(nbytes, self.told_bytes(self.largest)) else 0


def _is_alike(left_bytes: int, moved_bytes: int) -> bool:
    """Whether two steps saved as much, of which one was left alone."""
    return abs(left_bytes - moved_bytes) <= _LEFT_ALIKE * moved_bytes
