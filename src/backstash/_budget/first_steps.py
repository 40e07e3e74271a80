"""The first steps of a stash with a budget: what each moves so that it can be measured, and what they show."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Literal

from .._plan.trace import Links
from .record import Costs, StepRecord, links_of, typical, typical_costs

__all__ = ["FirstSteps", "Mode"]

Mode = Literal["fits", "all", "half", "left", "sampled"]
"""What a step moves: ``"fits"``, what does not fit in memory; ``"all"``, everything; ``"half"``, every other
block; ``"left"``, nothing (unmanaged); ``"sampled"``, nothing, and its memory is sampled."""

_TO_LEARN = 1  # bytes: the budget with which `backstash plan` measures what any budget would cost
_ALIKE = 0.02  # two steps of one shape differ by at most this part of their bytes
_LEFT_ALIKE = 0.125  # likewise if one was unmanaged: its last saves are not reported
_LEARNT_PAIRS = 3  # pairs of steps measured for `backstash plan`
# Unmanaged steps for `backstash plan`. Memory is freed before the first; the step after them is sampled.
_LEFT_STEPS = 4


class FirstSteps:
    """The steps before the first plan.

    The first step keeps what fits, and measures the memory. If it moved nothing, the second one does the same,
    since by then the optimizer has its state. If everything still fits, no other step is measured. Otherwise a
    pair follows: one step that moves everything, and one that moves every other block.

    On an accelerator, and where there is no tier below, the first step moves or recomputes everything: an
    operation that runs out of memory there ends the program, and a block that was kept cannot be recomputed
    later.

    With a budget of one byte, which ``backstash plan`` sets, the steps measure what any budget would cost.
    During the first pair free memory is returned to the system, which shows what a step holds in addition to
    its saved tensors. Two more pairs, which may hold more, show what moving costs, and unmanaged steps show the
    time of a step without it.

    Args:
        budget: in bytes.
        copies_aside: whether copies take no computing time, as on an accelerator.
        keeps_first: whether the first step keeps what fits.
    """

    def __init__(
        self, budget: int, *, copies_aside: bool = False, keeps_first: bool = False
    ) -> None:
        self._copies_aside = copies_aside
        self.learns = budget == _TO_LEARN
        """Whether the steps only measure what any budget would cost, and keep none."""
        self.records: list[StepRecord] = []
        self._asked_bytes: list[
            int
        ] = []  # of each record: bytes of all storages that it saved, see Planner.count_saved
        self.left: list[tuple[float, int]] = []
        """Of each unmanaged step: its seconds, and the bytes of all storages that it saved."""
        self._sampled: tuple[int, int] | None = (
            None  # of the sampled step: its peak, and these bytes
        )
        self.keeps_first = keeps_first and not self.learns
        """Whether the first step keeps what fits."""
        self.keeps_larger = self.keeps_first
        """Whether a step that is larger than any before it does, too. Once such a step did not fit, the next
        one moves everything, since a plan has to know what moving costs."""
        self.mode: Mode = "fits" if self.keeps_first else "all"
        """Mode of the current step."""
        self._is_second = False  # whether this is the second step with the mode "fits"

    def add(
        self, record: StepRecord | None, seconds: float, asked_bytes: int, peak_bytes: int
    ) -> None:
        """Add an ended step, which took ``seconds`` and saved storages of ``asked_bytes``.

        An unmanaged step has no record; ``peak_bytes`` is the highest sample of a sampled one.
        """
        if record is not None:
            self.records.append(record)
            self._asked_bytes.append(asked_bytes)
        if self.mode == "left":
            self.left.append((seconds, asked_bytes))
        if self.mode == "sampled":
            self._sampled = peak_bytes, asked_bytes

    def tries_again(self) -> bool:
        """Return whether the next step also keeps what fits, because the first one moved nothing."""
        again = self.mode == "fits" and not self._is_second and not self.records[0].moved_bytes
        if again:
            self._is_second = True
            self.forget()
        return again

    def forget(self) -> None:
        """Forget the records: a plan was made from them, or they are not used."""
        self.records.clear()
        self._asked_bytes.clear()

    @property
    def may_exceed(self) -> bool:
        """Whether the next step has windows and may exceed the budget, to measure what moving costs."""
        return self.learns and len(self.records) > 2

    def next_mode(self, spare_bytes: Callable[[], int]) -> Mode | None:
        """Return the mode of the next step after the first; ``None``: enough steps were measured.

        Args:
            spare_bytes: return the device's free memory; a step is unmanaged only if half of it suffices.
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
        """Whether a plan can be made from these steps alone."""
        return len(self.records) > 2

    @property
    def largest(self) -> StepRecord:
        """The step to plan for: the earliest that saved as much as any, without the first."""
        most = max(each.saved_bytes for each in self.records[1:])
        return next(each for each in self.records[1:] if each.saved_bytes >= most * (1 - _ALIKE))

    @property
    def traced(self) -> StepRecord:
        """The step whose moments the plan uses: :attr:`largest`, or, where copies take no computing time, the
        similar step with the shortest computing time. A host that tries recomputing and packing waits for its
        device, which is then idle."""
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

    def asked_bytes(self, record: StepRecord) -> int:
        """Return the bytes of all storages that this step saved."""
        return self._asked_bytes[self.records.index(record)]

    def alike(self) -> Iterable[tuple[StepRecord, StepRecord]]:
        """Yield the pairs of steps whose backward used as much as the largest's."""
        most, steps = self.largest.used_bytes, self.records[1:]
        for pair in zip(steps[::2], steps[1::2], strict=False):
            if all(abs(each.used_bytes - most) <= _ALIKE * most for each in pair):
                yield pair

    def costs(self) -> tuple[Links, Costs]:
        """Return the link rates, and the stash's costs, for a step like the largest."""
        pairs = [*self.alike()] or [(self.largest, self.largest)]
        late = [pair for pair in pairs if pair[0] is not self.records[1]] if self.learns else []
        used = late or pairs
        links = links_of([*itertools.chain(*used)])
        return links, typical_costs(used, links, copies_aside=self._copies_aside)

    @property
    def left_seconds(self) -> float | None:
        """Seconds of an unmanaged step like the largest; ``None`` if there was none."""
        whole = self.asked_bytes(self.largest)
        left = [seconds for seconds, nbytes in self.left[1:] if _is_alike(nbytes, whole)]
        return typical(left) if left else None

    @property
    def left_peak_bytes(self) -> int:
        """Peak memory of an unmanaged step like the largest, in bytes; 0 if unknown."""
        if self._sampled is None:
            return 0
        peak_bytes, nbytes = self._sampled
        return peak_bytes if _is_alike(nbytes, self.asked_bytes(self.largest)) else 0


def _is_alike(left_bytes: int, moved_bytes: int) -> bool:
    """Whether an unmanaged step saved about as much as another step."""
    return abs(left_bytes - moved_bytes) <= _LEFT_ALIKE * moved_bytes
