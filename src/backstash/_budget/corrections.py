"""Correct a plan after it has run: measure its first steps, and plan again if the peak differs.

Three steps after the first one are measured. backstash plans again if the peak exceeded the budget, or if it
differs from the prediction by more than a fiftieth of it or a sixteenth of the saved bytes, whichever is less.
An overshoot is subtracted in full. Three quarters of an undershoot are credited. There are at most four
corrections, and more only while the budget is exceeded and a plan could hold less.

Later, steps are measured again after three in a row that take over a tenth longer or shorter than predicted.
If bytes then move at another rate, or the step computes for another time, by a tenth, a new plan is made for
it. Each further check waits for twice as many steps.
"""

from __future__ import annotations

from dataclasses import replace

from .._plan.trace import Trace
from ..plan import StepFigures
from .record import StepRecord, links_of, typical

__all__ = ["Corrections"]

_VALIDATED_STEPS = 3
_MOST_FOLLOWED = 12  # most steps measured under a plan, if few of them have its shape
_OFF = 0.10  # of the seconds
_SPARED = 0.02  # of the predicted peak: smaller differences are ignored
_SPARED_OF_SAVED = 16  # or 1/16 of the saved bytes, if that is less
_CORRECTIONS = 4
_STEPS_OFF = 3  # in a row
_COMPUTING_STEPS = 2  # fewest steps that show a new computing time
_SAMPLED = 8  # samples of a step: with fewer, no sampling thread ran


class Corrections:
    """Learn from measured steps how far the predicted peaks of one planner's plans were off."""

    def __init__(self) -> None:
        self.bias_bytes = 0
        """Bytes added to each simulated peak."""
        self.short_bytes = 0
        """Part of the bias that is due to a device with less memory than the budget."""
        self._least_bias_bytes: int | None = None  # with a smaller bias the budget was exceeded
        # The plan's predicted and simulated peaks, the bytes that its step saves, and whether all blocks are
        # unmanaged.
        self._predicted_peak_bytes = self._simulated_peak_bytes = self._planned_bytes = 0
        self._is_left = False
        self._window_bytes = 0  # of the plan's windows, which a step need not fill
        self._avoided_bytes = 0  # by which its steps would have held more without the guard
        self._figures: list[
            tuple[int, float]
        ] = []  # peaks in bytes, and seconds, of steps like the plan's
        self._timed: list[float] = []  # seconds of such steps that were not recorded
        self._followed_steps = 0
        self._unseen_bytes = 0  # by which the guard's readings exceeded the samples
        self._least_bytes = 0  # the lowest sampled peak of these steps
        self._followed: list[
            StepRecord
        ] = []  # records of these steps, if measured again for their time
        self._computing: list[float] = []  # computing seconds of those like the plan's step
        self._is_again = self._is_only_timed = False
        self._off_steps = self._wait_steps = 0
        self._replans = 0  # for the peaks of steps of one shape
        self._timed_again = 0  # how often steps were measured again for their time

    def follow(
        self,
        predicted_peak_bytes: int,
        saved_bytes: int,
        *,
        is_left: bool,
        simulated_peak_bytes: int | None = None,
        window_bytes: int = 0,
    ) -> None:
        """Follow a plan from now on.

        Args:
            predicted_peak_bytes: of its steps.
            saved_bytes: by the step that was planned for.
            is_left: every block stays in place, unmanaged.
            simulated_peak_bytes: peak without the bias; default: the predicted peak minus the bias.
            window_bytes: part of the predicted peak that a step holds only if its transfers are slow.
        """
        if simulated_peak_bytes is None:
            simulated_peak_bytes = predicted_peak_bytes - self.bias_bytes
        self._simulated_peak_bytes = simulated_peak_bytes
        self._predicted_peak_bytes, self._planned_bytes = predicted_peak_bytes, saved_bytes
        self._is_left, self._window_bytes = is_left, window_bytes
        self.begin()

    def begin(self, *, again: bool = False) -> None:
        """Begin to measure steps under a plan; ``again``: because :meth:`is_off` returned true."""
        self._figures.clear()
        self._timed.clear()
        self._followed_steps = self._unseen_bytes = self._least_bytes = 0
        self._avoided_bytes = 0
        self.forget_followed()
        self._is_again, self._is_only_timed = again, False

    def begin_timing(self) -> None:
        """Begin to time steps under a plan without recording them: the device's allocator knows their peak."""
        self.begin()
        self._is_only_timed = True

    @property
    def begins_timing(self) -> bool:
        """Whether no step was timed since :meth:`begin_timing`. Which steps are alike is not known yet."""
        return self._is_only_timed and not self._figures

    def unlike(self) -> bool:
        """Add a step unlike the plan's that was not recorded. Return whether to stop timing, since no two steps
        are alike."""
        self._followed_steps += 1
        return self.begins_timing and self._followed_steps >= _MOST_FOLLOWED

    def take_as_known(self, measured: StepFigures) -> None:
        """Follow a plan whose steps were measured and timed before."""
        self.begin()
        self._figures.append((measured.peak_bytes, measured.step_seconds))
        self._timed = [measured.step_seconds] * _VALIDATED_STEPS

    def add(
        self,
        record: StepRecord,
        budget: int,
        looked_bytes: int = 0,
        avoided_bytes: int = 0,
        *,
        is_alike: bool,
    ) -> bool:
        """Add an ended step. Return whether enough steps were measured.

        One step is enough if it exceeded the budget.

        Args:
            record: of the step.
            budget: in bytes.
            looked_bytes: the most held at the guard's readings of the memory in the step.
            avoided_bytes: see :attr:`MemoryGuard.avoided_bytes`.
            is_alike: whether the step saved as much as the planned one.
        """
        self._followed_steps += 1
        if self._is_again:
            self._followed.append(record)
        # Without a sampling thread there are only the guard's readings. They also show an operation's peak that
        # no sample shows, but only once: when the process holds more than ever before.
        sampled_bytes, unseen_bytes = record.peak_bytes, self._unseen_bytes
        if len(record.samples) >= _SAMPLED:
            self._unseen_bytes = max(unseen_bytes, looked_bytes - sampled_bytes)
        self._least_bytes = min(self._least_bytes or sampled_bytes, sampled_bytes)
        if self._followed_steps == 1:
            return False  # its memory still includes transfers from before
        if sampled_bytes > budget:
            sampled_bytes = record.graph_peak_bytes
        unseen_bytes = self._least_bytes + unseen_bytes if unseen_bytes else 0
        peak_bytes = max(sampled_bytes, unseen_bytes, looked_bytes)
        if is_alike or peak_bytes > budget:
            self._figures.append((peak_bytes, record.unmeasured_seconds))
            self._avoided_bytes = max(self._avoided_bytes, avoided_bytes)
            if is_alike and self._is_again:
                self._computing.append(record.computing_seconds)
            if peak_bytes > budget:
                return True
        return len(self._figures) >= _VALIDATED_STEPS or self._followed_steps >= _MOST_FOLLOWED

    def begin_larger(self) -> None:
        """Allow as many corrections again: a plan is being made for larger steps."""
        self._replans = 0

    def run_short(self, nbytes: int) -> None:
        """Use this many bytes less from now on: the device did not have the whole budget."""
        self.bias_bytes += nbytes
        self.short_bytes += nbytes
        self._least_bias_bytes = self.bias_bytes

    def forget_followed(self) -> None:
        """Forget the measured times of steps: they have been used, or belong to no plan."""
        self._followed.clear()
        self._computing.clear()

    def exceed(self, peak_bytes: int, seconds: float) -> None:
        """Add a step that was not recorded and exceeded the budget."""
        self._figures = sorted([*self._figures, (peak_bytes, seconds)])[-_MOST_FOLLOWED:]

    def time(self, found: StepFigures) -> bool:
        """Add a step like the plan's that was not recorded. Return whether its seconds are used: only those of
        the first few are. (Recording a step takes time, so these are better figures.)"""
        if self._is_only_timed:
            self._followed_steps += 1
            if self._followed_steps > 1:  # the first still includes transfers from before
                self._figures.append((found.peak_bytes, found.step_seconds))
        if not self._figures or self.is_timed:
            return False
        self._timed.append(found.step_seconds)
        return True

    @property
    def is_timed(self) -> bool:
        """Whether enough steps were timed that were not recorded."""
        return len(self._timed) >= _VALIDATED_STEPS

    @property
    def measured(self) -> tuple[int, float] | None:
        """The highest peak in bytes, and the median seconds; ``None`` if no step was like the plan's."""
        if not self._figures:
            return None
        seconds = self._timed or [each for _, each in self._figures]
        return max(peak for peak, _ in self._figures), typical(seconds)

    @property
    def _little(self) -> float:
        """Bytes by which a peak may differ from the prediction without a correction."""
        return min(_SPARED * self._predicted_peak_bytes, self._planned_bytes / _SPARED_OF_SAVED)

    def correct(self, budget: int, *, can_hold_less: bool = True) -> bool:
        """Update the bias from what was measured. Return whether to plan again.

        Plan again if the budget was exceeded; after a few times only if a plan can hold less. Plan again, a few
        times, if the peak differs from the prediction, unless every block is unmanaged.

        Args:
            budget: in bytes.
            can_hold_less: whether another plan could hold less.
        """
        assert self.measured is not None
        peak = self.measured[0] + self._avoided_bytes
        off, was_kept = peak - self._predicted_peak_bytes, False
        # Subtract an overshoot in full and for good. Credit three quarters of an undershoot, except of windows
        # that were not filled: another plan may have none. The bias is relative to the simulated peak, which
        # may be less than predicted.
        if off < 0:
            off = min(0, off + self._window_bytes)
        bias_bytes = self.bias_bytes + off * 3 // 4
        if off > 0:
            bias_bytes = max(self.bias_bytes + off, peak - self._simulated_peak_bytes)
        if self.measured[0] > budget:
            if not can_hold_less and self._replans >= _CORRECTIONS:
                return False
            was_kept = self._predicted_peak_bytes != self._simulated_peak_bytes + self.bias_bytes
            if was_kept:  # its measured peak was predicted, not simulated + bias
                off = peak - self._simulated_peak_bytes - self.bias_bytes
                bias_bytes = self.bias_bytes + max(0, off)
            self._least_bias_bytes = bias_bytes
        else:
            if self._is_left or self._replans >= _CORRECTIONS or abs(off) <= self._little:
                return False
        if self._least_bias_bytes is not None:
            bias_bytes = max(bias_bytes, self._least_bias_bytes)
        if bias_bytes == self.bias_bytes and not was_kept:
            return False
        self._replans += 1
        self.bias_bytes = bias_bytes
        return True

    def leave_all(self, moved_bytes: int, usable: int, predicted_peak_bytes: int) -> bool:
        """Return whether to leave every block in place: given what a plan was measured to hold, all the blocks
        that it does not keep fit, too, and the budget was never exceeded.

        Args:
            moved_bytes: bytes that the plan does not keep.
            usable: bytes of the budget that plans use.
            predicted_peak_bytes: the peak with every block in place, without a bias. The bias is set to correct
                it.
        """
        if self.measured is None or self._least_bias_bytes is not None:
            return False
        peak = self.measured[0] + moved_bytes
        if peak > usable:
            return False
        self.bias_bytes = peak - predicted_peak_bytes
        return True

    def as_now(self, trace: Trace, per_moved_byte: float, *, runs_again: bool) -> Trace:
        """Return the trace with the current transfer rates and computing time, if steps were measured again and
        these have changed.

        Args:
            trace: the trace that is planned for.
            per_moved_byte: seconds of the computing thread; see :class:`Costs`.
            runs_again: whether the plan recomputes a module, so that steps compute for longer.
        """
        followed, computing = self._followed, typical(self._computing)
        if followed:
            found, links = links_of(followed), trace.links
            kinds = {event[0] for each in followed for event in each.events if event[3]}
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
        """Return whether to measure a step again, given the seconds of a step that was not measured.

        That is so if the last few steps were all off by more than a tenth, and the last time is long enough
        ago. They are compared with the prediction; or with the first steps under this plan, if those were
        measured again or took less.
        """
        if self.is_timed:
            found = typical(self._timed)
            if self._is_again or found < predicted_seconds:
                predicted_seconds = found
        off = abs(seconds - predicted_seconds) > _OFF * predicted_seconds
        off = off and (self.is_timed or not self._is_only_timed)
        self._off_steps = self._off_steps + 1 if off else 0
        self._wait_steps -= 1
        if self._off_steps < _STEPS_OFF or self._wait_steps > 0:
            return False
        self._off_steps = 0
        self._timed_again += 1
        self._wait_steps = 3 * 2 ** min(self._timed_again, 16)
        return True
