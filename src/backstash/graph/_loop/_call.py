"""``checkpoint_loop``: the public interface."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..._text import shown
from ...errors import UsageError
from ...stash import Stash
from ...stores import Disk
from ...units import in_bytes, parse_bytes
from ._choose import Budgets, LoopPlan, MeasuredStep, choose, describe, disk_speed
from ._loop import Loop
from ._outputs import Outputs
from ._saves import Saves
from ._schedules import Schedule
from ._state import StepState, flatten
from ._steps import Evaluation, Face, Stepper
from ._surroundings import Surroundings

__all__ = ["checkpoint_loop"]


class _CheckpointLoop:
    """The type of :data:`checkpoint_loop`. Its ``__call__`` and ``plan`` have the documentation."""

    def __call__(
        self,
        step: Callable[..., Any],
        state: Any,
        n: int | None,
        *args: Any,
        memory: int | str | None = None,
        disk: str | os.PathLike[str] | Disk | None = None,
        schedule: Schedule | None = None,
        stash: Stash | None = None,
        index: bool = False,
        xs: Any = None,
        ys: bool = False,
        until: Callable[[Any], Any] | None = None,
        progress: bool | None = None,
    ) -> Any:
        """Run ``for _ range(n): state = step(state, *args)`` so that backward needs little memory.

        Backward runs steps again from snapshots of the state. The gradients of ``state``, ``args``, ``xs`` and
        of tensors that ``step`` reaches through modules and closures are bit-identical to the plain loop's, or
        an error is raised. Without gradients (``torch.no_grad``) it is the plain loop.

        Args:
            step: ``step(state, *args)`` returns the next state. It must depend only on its arguments, tensors
                that do not change, and torch's random numbers. The order of its arguments is state, index, x,
                args.
            state: a tensor, or tensors and plain values in tuples, lists and dictionaries.
            n: the number of steps; ``None`` with ``until`` or ``xs``.
            *args: passed to each step.
            memory: bytes in memory for snapshots, and for what one step saves with its input, as an int or
                ``"4GiB"``.
            disk: a directory, or a :class:`~backstash.Disk`, for what does not fit in ``memory``.
            schedule: which states to hold, an object as described by :class:`Schedule`: ``Binomial``,
                ``TwoLevel``, ``KeepAll``, or one of your own. ``None``: the one that is predicted to be the
                fastest within the budgets, from the first step's time and bytes and the disk's speed.
            stash: a stash with budgets of its own that holds snapshots and what steps save. It requires a
                ``schedule``, and excludes ``memory`` and ``disk``. ``None``: one is created.
            index: whether ``step`` takes the step's number, from 0.
            xs: inputs of the steps: a tree of tensors whose first dimension is the steps.
            ys: whether ``step`` returns ``(state, y)``; then the result is ``(state, ys)``, tensors stacked
                in a new first dimension, other leaves in lists.
            until: ``until(state)`` after each step; the loop ends when it is true.
            progress: whether to show a line on stderr while backward runs. ``None``: after two seconds, on a
                terminal.

        Returns:
            The last state, or ``(state, ys)``.

        Raises:
            UsageError: bad arguments; no budget; a state whose structure changes; ``create_graph=True``, since
                double backward is not supported. Also, with the step's number: a step that changes its input
                in place, returns a view of it, or returns something else in a replay.
            InplaceError: from backward: a tensor that a step uses was changed in place after the loop ran.
            StashIOError: from backward: the disk cannot return a snapshot.

        Source of the idea: Griewank and Walther, "Algorithm 799: revolve", ACM TOMS 26 (2000).

        Snapshots, and what a step saves when it runs again, are blocks of the stash. With ``until`` they are
        spaced evenly, and the distance doubles whenever all are used. Two threads may go backward through one
        loop: one waits while the other reverses a step. After an error or Ctrl-C in a backward with
        ``retain_graph=True``, another backward may follow.

        A tensor from outside may come through a closure if the thread that runs the loop computed it. Pass
        another thread's tensor in ``args``. A tensor that an earlier step left behind raises. So does a leaf
        that a step creates and that reaches its result. Gradients of ``prod``, ``cumprod`` and ``det`` inside
        a step raise if it saves under its own hooks, or in ``torch.func.vjp``, ``jacrev`` or ``hessian``.

        A write to outside memory by other means than PyTorch's operations (``tensor.data = ...``, NumPy) is
        restored only in a buffer of a called module. A number may decide gradients and no result, as a gradient
        reversal's factor does. If an ``autograd.Function`` keeps it and it changed since forward, backward
        raises. In a closure of a gradient hook such a change is not detected.

        >>> w = torch.tensor(0.5, requires_grad=True)
        >>> state = checkpoint_loop(lambda s, w: torch.sin(s * w), torch.ones(3), 100, w, memory="1KiB")
        >>> state.sum().backward()
        >>> plain, v = torch.ones(3), torch.tensor(0.5, requires_grad=True)
        >>> for _ in range(100):
        ...     plain = torch.sin(plain * v)
        >>> plain.sum().backward()
        >>> torch.equal(w.grad, v.grad)
        True
        """
        job = _Job(step, state, n, args, Face(index, xs is not None, ys), xs, until)
        if not torch.is_grad_enabled():
            return job.plainly()
        tiers = _Tiers.of(memory, disk, schedule, stash)
        return job.run(tiers, schedule, progress)

    def plan(
        self,
        step: Callable[..., Any],
        state: Any,
        n: int,
        *args: Any,
        memory: int | str | None = None,
        disk: str | os.PathLike[str] | Disk | None = None,
        schedule: Schedule | None = None,
        index: bool = False,
        xs: Any = None,
        ys: bool = False,
        step_seconds: float | None = None,
        saved_bytes: int | None = None,
    ) -> LoopPlan:
        """Return what :data:`checkpoint_loop` would need with these arguments, without running the loop.

        The first step is run once to measure it, unless ``step_seconds`` and ``saved_bytes`` are both given.
        Its random numbers are restored.

        Returns:
            A record: ``evaluations``, ``memory_bytes``, ``disk_bytes``, ``predicted_seconds``, ``schedule``.

        >>> plan = checkpoint_loop.plan(
        ...     torch.sin, torch.ones(1000), 100, memory=40_000, step_seconds=1e-3, saved_bytes=4000
        ... )
        >>> plan.evaluations, plan.memory_bytes, plan.schedule.snapshots
        (334, 40000, 9)
        """
        job = _Job(step, state, n, args, Face(index, xs is not None, ys), xs, None)
        tiers = _Tiers.of(memory, disk, schedule, None)
        if step_seconds is None or saved_bytes is None:
            found = job.measured(tiers.stash)
        else:
            found = MeasuredStep(step_seconds, job.state.nbytes, saved_bytes)
        assert job.n is not None
        if schedule is not None:
            return describe(schedule, job.n, tiers.budgets(), found)
        return choose(job.n, tiers.budgets(), found)


checkpoint_loop = _CheckpointLoop()

_LEAST_WINDOW, _MOST_WINDOW = 256 << 10, 16 << 20  # bytes for writes, and as many for loads
_LEAST_ON_DISK = 4 << 10


@dataclass(frozen=True, slots=True)
class _Tiers:
    """The stash of a loop, and its budgets."""

    stash: Stash
    memory: int | None = None
    disk: str | os.PathLike[str] | Disk | None = None

    @classmethod
    def of(
        cls,
        memory: int | str | None,
        disk: str | os.PathLike[str] | Disk | None,
        schedule: Schedule | None,
        stash: Stash | None,
    ) -> _Tiers:
        if schedule is not None and not isinstance(schedule, Schedule):
            raise UsageError(
                f"schedule={shown(schedule)}: allowed is an object with keeps_graphs and next_snapshot, such "
                "as Binomial(16), or None"
            )
        if stash is not None:
            if memory is not None or disk is not None:
                raise UsageError("stash= has budgets of its own: give no memory= or disk= with it")
            if schedule is None:
                raise UsageError("stash= needs a schedule=, such as Binomial(16) or KeepAll()")
            return cls(stash)
        if memory is None and disk is None and schedule is None:
            raise UsageError(
                'checkpoint_loop has no budget: give memory="4GiB", disk="/scratch", or a schedule='
            )
        nbytes = None if memory is None else parse_bytes(memory, name="memory")
        if disk is None:
            return cls(Stash(keep=in_bytes(nbytes), name="checkpoint_loop"), nbytes)
        # Bytes in transit to and from the disk are in memory, too.
        window = min(max(nbytes // 8, _LEAST_WINDOW), _MOST_WINDOW) if nbytes else _MOST_WINDOW
        keep = max((nbytes or 0) - 2 * window, 0)
        made = Stash(
            keep=in_bytes(keep),
            disk=disk,
            inflight=window,
            prefetch=window,
            min_bytes=_LEAST_ON_DISK,
            name="checkpoint_loop",
        )
        return cls(made, keep, disk)

    def budgets(self) -> Budgets:
        if self.disk is None:
            return Budgets(self.memory)
        directory: Any = getattr(self.disk, "directory", self.disk)
        free, most = shutil.disk_usage(directory).free, getattr(self.disk, "max_bytes", None)
        return Budgets(
            self.memory, free if most is None else min(free, most), disk_speed(directory)
        )


class _Job:
    """The validated arguments of one call."""

    def __init__(
        self,
        step: Callable[..., Any],
        state: Any,
        n: int | None,
        args: tuple[Any, ...],
        face: Face,
        xs: Any,
        until: Callable[[Any], Any] | None,
    ) -> None:
        if not callable(step):
            raise UsageError(f"step={shown(step)}: allowed is a callable of the state and of args")
        if until is not None and not callable(until):
            raise UsageError(f"until={shown(until)}: allowed is a callable of the state, or None")
        if n is not None and (isinstance(n, bool) or not isinstance(n, int) or n < 0):
            raise UsageError(
                f"n={shown(n)}: allowed is a whole number of at least 0, or None with until="
            )
        self.step, self.args, self.face, self.until = step, args, face, until
        self.state = flatten(state, "state")
        self.xs = flatten(xs, "xs")
        self.n = self._length(n)
        if self.n is None and until is None:
            raise UsageError("n=None: allowed with until= or xs=, which end the loop")
        self._rows = [
            leaf.unbind(0) if isinstance(leaf, Tensor) else leaf for leaf in self.xs.leaves
        ]

    def _length(self, n: int | None) -> int | None:
        lengths = {each.shape[0] if each.dim() else -1 for each in self.xs.tensors}
        if self.face.xs and (len(lengths) != 1 or lengths == {-1}):
            raise UsageError(
                f"xs: allowed are tensors with one first dimension in common, the steps'; found {lengths}"
            )
        for length in lengths:
            if n is not None and n != length:
                raise UsageError(f"n={shown(n)}, but xs has inputs for {length} steps")
            return length
        return n

    def x(self, number: int) -> StepState:
        """Return the input of step ``number``."""
        leaves = [row[number] if isinstance(row, tuple) else row for row in self._rows]
        return StepState(leaves, self.xs.structure)

    def _ends(self, number: int, state: StepState) -> bool:
        if self.n is not None and number + 1 >= self.n:
            return True
        if self.until is None:
            return False
        with torch.no_grad():
            return bool(self.until(state.whole()))

    def plainly(self) -> Any:
        """Run the loop without snapshots."""
        state, number, outputs = self.state.whole(), 0, self._outputs()
        while self.n is None or number < self.n:
            given = self.face.arguments(state, number, self.x(number).whole(), self.args)
            result = self.step(*given)
            state, y = result if self.face.ys else (result, None)
            outputs.add(flatten(y, "y"))
            if self._ends(number, flatten(state, "state")):
                break
            number += 1
        return self._result(state, outputs)

    def _outputs(self) -> Outputs:
        return Outputs(None if self.until else self.n)

    def _result(self, state: Any, outputs: Outputs) -> Any:
        return (state, outputs.whole()) if self.face.ys else state

    def _loop(self, stash: Stash, progress: bool | None) -> tuple[Loop, Stepper]:
        stepper = Stepper(self.step, self.args, self.face)
        seen = [*self.state.tensors, *self.xs.tensors, *stepper.outer_tensors()]
        return Loop(stepper, stash, Surroundings(seen), progress=progress), stepper

    def measured(self, stash: Stash) -> MeasuredStep:
        """Run the first step and return its measurements."""
        loop, stepper = self._loop(stash, False)
        with loop.surroundings.replaying():
            found, saves = loop.evaluate(0, self.state, self.x(0), through_stash=True, again=True)
        return self._found(found, saves, stepper)

    def _found(self, found: Evaluation, saves: Saves, stepper: Stepper) -> MeasuredStep:
        """Return the measurements of the first step."""
        # Later steps get states that require gradients where this step's result does.
        inputs = [
            before
            for before, after in zip(self.state.leaves, found.state.leaves, strict=True)
            if isinstance(before, Tensor) and isinstance(after, Tensor) and after.requires_grad
        ]
        outside = [*stepper.outer_tensors(), *self.xs.tensors]
        saved, shared = saves.kept_bytes(inputs, found.state.tensors, outside)
        return MeasuredStep(saves.seconds, self.state.nbytes, saved, shared)

    def run(self, tiers: _Tiers, schedule: Schedule | None, progress: bool | None) -> Any:
        """Run the loop with snapshots."""
        if self.n == 0:
            return self._result(self.state.whole(), self._outputs())
        loop, stepper = self._loop(tiers.stash, progress)
        state, outputs, number = self.state, self._outputs(), 0
        loop.hold(0, state)
        while True:
            keep = schedule is None or schedule.keeps_graphs
            x = self.x(number)
            is_last = None if self.n is None or self.until else number + 1 == self.n
            state, y, found, saves = loop.advance(
                number, state, x, through_stash=keep or bool(is_last), copied=outputs.copied
            )
            outputs.add(y)
            if schedule is None:
                known = self._found(found, saves, stepper)
                schedule = choose(self.n or 1_000_000, tiers.budgets(), known).schedule
                keep = schedule.keeps_graphs
            loop.schedule = schedule
            if keep or is_last:
                loop.keep(number, found)
            del found, saves
            if self._ends(number, state):
                return self._result(state.whole(), outputs)
            number += 1
            loop.hold_if_asked(number, state, self.n)
