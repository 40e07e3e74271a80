"""Correct a plan after it has run: measure its first steps, and plan again if the peak differs.

Three steps after the first one are measured. One is enough if all steps save the same and it held far less
than predicted. backstash plans again if the peak differs by more than a fiftieth of the prediction, or by more
than a sixteenth of what is saved, if that is less, or if it exceeded the budget. An overshoot is subtracted in
full, and three quarters of an undershoot are credited, as far as what was held in addition to the blocks in
place leaves space for more of these. There are at most four corrections, and more only while the budget is
exceeded and a plan could hold less.

If an earlier plan, made with a larger correction, kept the budget, the next one lies between the two, by
linear interpolation of measured over simulated peaks. If that exceeds the budget too, the earlier correction
is used.

Later, steps are measured again after three in a row that take over a tenth longer or shorter than predicted.
If bytes then move at another rate, or the step computes for another time, by a tenth, a new plan is made for
it. Each further check waits for twice as many steps.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from .._plan.trace import Trace
from .record import StepRecord, links_of, typical

__all__ = ["Corrections"]

_VALIDATED_STEPS = 3
_MOST_FOLLOWED = 12  # steps that are measured under a plan, where few of them are of its shape
_OFF = 0.10  # of the seconds
_SPARED = 0.02  # of the peak that was predicted
_SPARED_OF_SAVED = 16  # the part of what is saved, where that is less
_FAR = 2  # times what is spared of no account
_CORRECTIONS = 4
_STEPS_OFF = 3  # in a row
_COMPUTING_STEPS = 2  # that tell for how long one computes
_SAMPLED = 8  # samples of a step: with fewer no thread took them


@dataclass(frozen=True, slots=True)
class _KeptPlan:
    """A plan that kept the budget."""

    bias_bytes: int
    """With which it was made."""
    simulated_peak_bytes: int
    measured_peak_bytes: int
    may_go_between: bool = True
    """No plan was made yet between this one and one that exceeded the budget."""

    def bias_between(self, simulated_bytes: int, measured_bytes: int, usable: int) -> int:
        """The bias with which a plan is to hold ``usable`` bytes, on the line from this plan to one that
        exceeded the budget; this one's, where that was tried or the line tells no less."""
        if not self.may_go_between:
            return self.bias_bytes
        grown = measured_bytes - self.measured_peak_bytes
        more = simulated_bytes - self.simulated_peak_bytes
        bound = self.simulated_peak_bytes + more * (usable - self.measured_peak_bytes) // grown
        return min(self.bias_bytes, usable - bound)


class Corrections:
    """Of one planner, over all of its plans."""

    def __init__(self) -> None:
        self.bias_bytes = 0
        """What is added to each peak that is simulated."""
        self.short_bytes = 0
        """Of this, what the device did not have of the budget."""
        self.beside_bytes: int | None = None
        """What a plan that held less than was predicted held beside its blocks in place, or a later one more
        than that. The next one holds as much beside its own; ``None``: as the simulation says."""
        self._least_bias_bytes: int | None = None  # with less the budget was exceeded
        self._kept: _KeptPlan | None = None  # the last plan that kept the budget
        # Of the plan: the peaks that were predicted and simulated, what its step saves, and whether all of it
        # stays.
        self._predicted_peak_bytes = self._simulated_peak_bytes = self._planned_bytes = 0
        self._resident_peak_bytes = 0  # of its blocks, those in place
        self._is_left = False
        self._saved_bytes = 0  # of the last step that was measured under it
        self._figures: list[
            tuple[int, float]
        ] = []  # peaks in bytes, and seconds, of steps like the plan's
        self._timed: list[float] = []  # seconds of such steps that were not measured block by block
        self._followed_steps = 0
        self._unseen_bytes = 0  # by which a look in one of these saw more than samples did
        self._least_bytes = 0  # of these, the least peak that was sampled
        self._followed: list[StepRecord] = []  # these, where they tell how fast bytes move now
        self._computing: list[
            float
        ] = []  # seconds of those like the plan's, without waits and hooks
        self._is_again = False
        self._off_steps = self._wait_steps = 0
        self._replans = 0  # for the peaks of steps of one shape
        self._timed_again = 0  # how often steps were measured again for their time

    def follow(
        self,
        predicted_peak_bytes: int,
        saved_bytes: int,
        *,
        is_left: bool,
        is_measured: bool = False,
        simulated_peak_bytes: int | None = None,
        resident_peak_bytes: int = 0,
    ) -> None:
        """A plan is followed from now on.

        Args:
            predicted_peak_bytes: of its steps.
            saved_bytes: by the step that was planned for.
            is_left: all is left in place.
            is_measured: it is the one before, of which another peak is predicted now, and no more.
            simulated_peak_bytes: without a bias; default: what was predicted less the bias.
            resident_peak_bytes: of these, the blocks that are in place.
        """
        self._resident_peak_bytes = resident_peak_bytes
        if simulated_peak_bytes is None:
            simulated_peak_bytes = predicted_peak_bytes - self.bias_bytes
        self._simulated_peak_bytes = simulated_peak_bytes
        self._predicted_peak_bytes, self._planned_bytes = predicted_peak_bytes, saved_bytes
        self._is_left = is_left
        if not is_measured:
            self.begin()

    def begin(self, *, again: bool = False) -> None:
        """Steps under a plan begin to be measured; ``again``: since :meth:`is_off` said so."""
        self._figures.clear()
        self._timed.clear()
        self._followed_steps = self._unseen_bytes = self._least_bytes = 0
        self.forget_followed()
        self._is_again = again

    def add(
        self, record: StepRecord, budget: int, looked_bytes: int = 0, *, is_alike: bool
    ) -> bool:
        """One has ended, which saved as much as the one that was planned for (``is_alike``), or not. Whether
        that is enough.

        One that exceeded the budget is. Where all save the same, so is one that held far less than was
        predicted, if the plan is then made again.

        Args:
            record: of the step.
            budget: in bytes.
            looked_bytes: the most that was held whenever the memory was looked at in the step.
            is_alike: see above.
        """
        self._followed_steps += 1
        saved_before, self._saved_bytes = self._saved_bytes, record.saved_bytes
        if self._is_again:
            self._followed.append(record)
        # Where no thread can be started to sample, looks are all there is. They also see an operation's peak
        # that no sample does: once, where the process never held as much.
        sampled_bytes, unseen_bytes = record.peak_bytes, self._unseen_bytes
        if len(record.samples) >= _SAMPLED:
            self._unseen_bytes = max(unseen_bytes, looked_bytes - sampled_bytes)
        self._least_bytes = min(self._least_bytes or sampled_bytes, sampled_bytes)
        if self._followed_steps == 1:
            return False  # it still holds what was moved before
        if sampled_bytes > budget:
            sampled_bytes = record.graph_peak_bytes
        unseen_bytes = self._least_bytes + unseen_bytes if unseen_bytes else 0
        peak_bytes = max(sampled_bytes, unseen_bytes, looked_bytes)
        if is_alike or peak_bytes > budget:
            self._figures.append((peak_bytes, record.unmeasured_seconds))
            if is_alike and self._is_again:
                self._computing.append(record.computing_seconds)
            if peak_bytes > budget:
                return True
            is_far = self._predicted_peak_bytes - peak_bytes > _FAR * self._little
            may_plan = self._least_bias_bytes is None and self._replans < _CORRECTIONS
            if is_far and may_plan and not self._is_left and self._saved_bytes == saved_before:
                return True
        return len(self._figures) >= _VALIDATED_STEPS or self._followed_steps >= _MOST_FOLLOWED

    def begin_larger(self) -> None:
        """A plan is made for larger steps than before, whose peaks are corrected as often."""
        self._replans = 0
        self._kept = self.beside_bytes = None

    def run_short(self, nbytes: int) -> None:
        """The device did not have the budget: so many bytes less of it are used, for good."""
        self.bias_bytes += nbytes
        self.short_bytes += nbytes
        self._least_bias_bytes = self.bias_bytes
        self._kept = self.beside_bytes = None

    def forget_followed(self) -> None:
        """What steps that were measured tell of their time was taken into account, or is of no plan."""
        self._followed.clear()
        self._computing.clear()

    def exceed(self, peak_bytes: int, seconds: float) -> None:
        """A step that was not measured block by block exceeded the budget."""
        self._figures = sorted([*self._figures, (peak_bytes, seconds)])[-_MOST_FOLLOWED:]

    def time(self, seconds: float) -> bool:
        """A step like the plan's took so long that was not measured block by block. Whether it is of the few
        that tell what such steps take: measuring takes its time, too."""
        if not self._figures or len(self._timed) >= _VALIDATED_STEPS:
            return False
        self._timed.append(seconds)
        return True

    @property
    def measured(self) -> tuple[int, float] | None:
        """The highest peak in bytes, and typical seconds; ``None``: no step was like the plan's."""
        if not self._figures:
            return None
        seconds = self._timed or [each for _, each in self._figures]
        return max(peak for peak, _ in self._figures), typical(seconds)

    @property
    def _kept_now(self) -> _KeptPlan:
        assert self.measured is not None
        return _KeptPlan(self.bias_bytes, self._simulated_peak_bytes, self.measured[0])

    @property
    def _little(self) -> float:
        """A peak that is beside the prediction by no more is as predicted."""
        return min(_SPARED * self._predicted_peak_bytes, self._planned_bytes / _SPARED_OF_SAVED)

    def correct(self, budget: int, usable: int, *, can_hold_less: bool = True) -> bool:
        """Take what was measured into account. Whether the plan is to be made again: where the budget was
        exceeded, unless no plan can hold less, more than a few times; or where the peak was not what was
        predicted, a few times, unless all is left in place.

        Where the peak was less than predicted, the difference may be of windows that were never full, and is no
        room for blocks that stay: :attr:`beside_bytes` says what was held beside these.

        Args:
            budget: in bytes.
            usable: bytes of it.
            can_hold_less: the plan does not hold as little as any could.
        """
        assert self.measured is not None
        peak, _ = self.measured
        off, was_kept = peak - self._predicted_peak_bytes, False
        # What was over is taken off whole, and never given back; of what was spared, three quarters are. More
        # may have been predicted than was simulated, which is what the bias is of.
        bias_bytes = self.bias_bytes + off * 3 // 4
        if off > 0:
            bias_bytes = max(self.bias_bytes + off, peak - self._simulated_peak_bytes)
        beside_bytes = max(0, peak - self._resident_peak_bytes)
        if self.beside_bytes is not None:
            self.beside_bytes = max(self.beside_bytes, beside_bytes)
        if peak > budget:
            if not can_hold_less and self._replans >= _CORRECTIONS:
                return False
            was_kept = self._predicted_peak_bytes != self._simulated_peak_bytes + self.bias_bytes
            if was_kept:  # what was measured of it was predicted again
                off = peak - self._simulated_peak_bytes - self.bias_bytes
                bias_bytes = self.bias_bytes + max(0, off)
            kept, self._kept = self._kept, None
            if kept is not None and kept.bias_bytes > self.bias_bytes:
                # What is held grows faster than what is simulated.
                between = kept.bias_between(self._simulated_peak_bytes, peak, usable)
                bias_bytes = between if between > self.bias_bytes else kept.bias_bytes
                if bias_bytes < kept.bias_bytes:
                    self._kept = replace(kept, may_go_between=False)
            self._least_bias_bytes = bias_bytes
        else:
            self._kept = self._kept_now
            if self._is_left or self._replans >= _CORRECTIONS or abs(off) <= self._little:
                return False
            if off < 0:
                self.beside_bytes = beside_bytes
        if self._least_bias_bytes is not None:
            bias_bytes = max(bias_bytes, self._least_bias_bytes)
        if bias_bytes == self.bias_bytes and not was_kept:
            return False
        self._replans += 1
        self.bias_bytes = bias_bytes
        return True

    def leave_all(self, moved_bytes: int, usable: int, predicted_peak_bytes: int) -> bool:
        """Whether all is to be left in place: what was measured of a plan leaves room for all that it does not
        keep, whatever was predicted; and the budget was never exceeded.

        Args:
            moved_bytes: that the plan does not keep.
            usable: bytes of the budget.
            predicted_peak_bytes: where all stays, without a bias; the bias is then what makes it right.
        """
        if self.measured is None or self._least_bias_bytes is not None:
            return False
        peak = self.measured[0] + moved_bytes
        if peak > usable:
            return False
        self._kept, self.bias_bytes = self._kept_now, peak - predicted_peak_bytes
        return True

    def as_now(self, trace: Trace, per_moved_byte: float, *, runs_again: bool) -> Trace:
        """The trace by how fast bytes move now, and for how long a step computes, where steps were measured
        again and it is not what it was.

        Args:
            trace: that is planned for.
            per_moved_byte: seconds of the computing thread's that it takes; see :class:`Costs`.
            runs_again: a module of the plan does, so that steps compute for longer than they did.
        """
        followed, computing = self._followed, typical(self._computing)
        if followed:
            found, links = links_of(followed), trace.links
            kinds = {event[0] for each in followed for event in each.told if event[3]}
            down = found.down_rate if "write" in kinds else links.down_rate
            up = found.up_rate if "read" in kinds else links.up_rate
            if max(abs(down / links.down_rate - 1), abs(up / links.up_rate - 1)) > _OFF:
                trace = replace(trace, links=replace(links, down_rate=down, up_rate=up))
        if len(self._computing) >= _COMPUTING_STEPS and not runs_again:
            moved = typical([float(each.moved_bytes) for each in followed])
            now, before = computing - per_moved_byte * moved, trace.compute_seconds
            if now > 0 and before > 0 and abs(now / before - 1) > _OFF:
                trace = trace.computing(now)
        self.forget_followed()
        return trace

    def is_off(self, seconds: float, predicted_seconds: float) -> bool:
        """A step that is not measured took so long. Whether one is to be measured again: the last few were all
        off by more than a tenth, and the last time is long enough ago. Off what was predicted; or, where that
        was measured again or the first steps under this plan took less, off what these took."""
        if len(self._timed) >= _VALIDATED_STEPS:
            found = typical(self._timed)
            if self._is_again or found < predicted_seconds:
                predicted_seconds = found
        off = abs(seconds - predicted_seconds) > _OFF * predicted_seconds
        self._off_steps = self._off_steps + 1 if off else 0
        self._wait_steps -= 1
        if self._off_steps < _STEPS_OFF or self._wait_steps > 0:
            return False
        self._off_steps = 0
        self._timed_again += 1
        self._wait_steps = 3 * 2 ** min(self._timed_again, 16)
        return True
