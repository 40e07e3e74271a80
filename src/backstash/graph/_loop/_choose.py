"""Choose the fastest schedule within the budgets, and predict its costs."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ...errors import UsageError
from ...stash import Stash
from ...units import format_bytes
from ._schedules import Binomial, KeepAll, Schedule, TwoLevel, costs

__all__ = ["Budgets", "LoopPlan", "MeasuredStep", "choose", "describe", "disk_speed"]

_BACKWARD = 2.0  # a step's backward takes two evaluations: two matrix products for one
_PROBE_BYTES = 4 << 20
_speeds: dict[str, float] = {}


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """Measurements of one evaluation of a step."""

    step_seconds: float
    """Its time, in seconds."""
    state_bytes: int
    """Bytes of the state, and so of one snapshot."""
    saved_bytes: int
    """Bytes that the step keeps for its backward: what it saves, and its input state."""
    shared_bytes: int = 0
    """How many of these belong to the state that it returns, and so to the next step's input, too."""


@dataclass(frozen=True, slots=True)
class Budgets:
    """The memory and disk space that a loop may use."""

    memory: int | None
    """Bytes in memory; ``None``: no limit."""
    disk: int | None = None
    """Bytes on disk; ``None``: no disk."""
    disk_speed: float = 0.0
    """Bytes per second, for one write and one read of each byte."""


@dataclass(frozen=True, slots=True)
class LoopPlan:
    """The predicted costs of a loop."""

    schedule: Schedule
    """The schedule, which decides the states that are held."""
    n: int
    """The number of steps."""
    evaluations: int
    """Evaluations of the step, in forward and in backward."""
    snapshots: int
    """The most states that are held at once, including the first one."""
    memory_bytes: int
    """The peak of bytes in memory: snapshots, and what steps save."""
    disk_bytes: int
    """The peak of bytes on disk."""
    predicted_seconds: float
    """Seconds of forward and backward together. A step's backward is assumed to take two evaluations."""
    measured: MeasuredStep
    """The measurements behind the prediction."""

    def __str__(self) -> str:
        return (
            f"{self.schedule}: {self.evaluations} evaluations for {self.n} steps, {self.snapshots} snapshots, "
            f"{format_bytes(self.memory_bytes)} in memory, {format_bytes(self.disk_bytes)} on disk, "
            f"about {self.predicted_seconds:.3g} s"
        )


def choose(n: int, budgets: Budgets, measured: MeasuredStep) -> LoopPlan:
    """Return the plan with the shortest predicted time. Raises ``UsageError`` if none fits."""
    state, saved = measured.state_bytes, measured.saved_bytes
    memory = budgets.memory
    plans = [
        plan
        for schedule in _candidates(n, budgets, measured)
        if _fits(plan := describe(schedule, n, budgets, measured), budgets)
    ]
    if not plans:
        raise UsageError(
            f"memory={memory} bytes is too small for one state ({state} bytes) and what one step saves "
            f"({saved} bytes): give more memory, or a disk"
        )
    return min(plans, key=lambda plan: (plan.predicted_seconds, plan.disk_bytes, plan.memory_bytes))


def _fits(plan: LoopPlan, budgets: Budgets) -> bool:
    if budgets.memory is not None and plan.memory_bytes > budgets.memory:
        return False
    return budgets.disk is None or plan.disk_bytes <= budgets.disk


def _candidates(n: int, budgets: Budgets, measured: MeasuredStep) -> Iterator[Schedule]:
    yield KeepAll()
    slots = n
    if budgets.memory is not None:
        slots = (budgets.memory - measured.saved_bytes) // max(measured.state_bytes, 1)
    slots = max(1, min(slots, n))
    yield Binomial(slots)
    if budgets.disk is not None:
        every = 1
        while every < n:
            yield TwoLevel(every, min(slots, every))
            every *= 2


def describe(schedule: Schedule, n: int, budgets: Budgets, measured: MeasuredStep) -> LoopPlan:
    """Return the predicted costs of ``schedule`` for ``n`` steps."""
    seconds, state, saved = measured.step_seconds, measured.state_bytes, measured.saved_bytes
    evaluations, snapshots = costs(schedule, n)
    # If all steps are kept, a state is one step's input and often saved by the step before: it counts once.
    kept = (saved - measured.shared_bytes) * n if schedule.keeps_graphs else saved * min(n, 1)
    held = snapshots * state + kept
    below = 0
    if budgets.memory is not None and budgets.disk is not None:
        # A kept step's state begins its graph, as a parameter does, and a stash keeps such tensors in place.
        stays = min(state, saved) * n if schedule.keeps_graphs else 0
        below = max(0, held - max(budgets.memory, stays))
    compute = (evaluations + _BACKWARD * n) * seconds
    moving = below / budgets.disk_speed if below else 0.0  # overlaps computation
    return LoopPlan(
        schedule, n, evaluations, snapshots, held - below, below, max(compute, moving), measured
    )


def disk_speed(directory: str) -> float:
    """Return the bytes per second of a write to ``directory`` and a read. Measured once per process."""
    key = os.path.realpath(directory)
    if key not in _speeds:
        with tempfile.TemporaryDirectory(dir=directory) as scratch:
            probe = torch.zeros(_PROBE_BYTES, dtype=torch.uint8)
            stash = Stash(disk=scratch)
            begun = time.perf_counter()
            with stash:
                packed = stash.pack(probe)
            stash.close()
            del probe
            stash.unpack(packed)
            _speeds[key] = _PROBE_BYTES / (time.perf_counter() - begun)
    return _speeds[key]
