"""Which schedule is the fastest within the budgets, and what it will take."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ...errors import UsageError
from ...stash import Stash
from ...units import format_bytes
from ._schedules import Binomial, KeepAll, Schedule, TwoLevel, play

__all__ = ["Budgets", "LoopPlan", "MeasuredStep", "choose", "describe", "disk_speed", "free_bytes"]

_BACKWARD = 2.0  # a step's backward, in evaluations of it: two products of matrices for one
_PROBE_BYTES = 4 << 20
_speeds: dict[str, float] = {}


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """What one evaluation of a step took."""

    step_seconds: float
    """Its time."""
    state_bytes: int
    """Bytes of the state: of one snapshot."""
    saved_bytes: int
    """Bytes that the step saves for its backward."""


@dataclass(frozen=True, slots=True)
class Budgets:
    """Where bytes may be."""

    memory: int | None
    """Bytes in memory; ``None``: no limit."""
    disk: int | None = None
    """Bytes on disk; ``None``: there is none."""
    disk_speed: float = 0.0
    """Bytes a second, written and read once each."""


@dataclass(frozen=True, slots=True)
class LoopPlan:
    """What a loop will take."""

    schedule: Schedule
    """Which states are held."""
    n: int
    """The loop's steps."""
    evaluations: int
    """Runs of the step: forward, and again for backward."""
    snapshots: int
    """The most states that are held at once, the first one included."""
    memory_bytes: int
    """The most bytes in memory: snapshots, and what steps save."""
    disk_bytes: int
    """The most bytes on disk."""
    predicted_seconds: float
    """Forward and backward together, where a step's backward takes as long as two evaluations."""
    measured: MeasuredStep
    """What the prediction is from."""

    def __str__(self) -> str:
        return (
            f"{self.schedule}: {self.evaluations} evaluations for {self.n} steps, {self.snapshots} snapshots, "
            f"{format_bytes(self.memory_bytes)} in memory, {format_bytes(self.disk_bytes)} on disk, "
            f"about {self.predicted_seconds:.3g} s"
        )


def choose(n: int, budgets: Budgets, measured: MeasuredStep) -> LoopPlan:
    """The plan that is predicted to be the fastest. Raises ``UsageError`` where nothing fits."""
    state, saved = measured.state_bytes, measured.saved_bytes
    memory = budgets.memory
    plans = [
        plan
        for schedule in _candidates(n, budgets, measured)
        if _fits(plan := describe(schedule, n, budgets, measured), budgets)
    ]
    if not plans:
        raise UsageError(
            f"memory={memory} bytes is less than one state ({state} bytes) and what one step saves "
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
    """What ``schedule`` takes for ``n`` steps."""
    seconds, state, saved = measured.step_seconds, measured.state_bytes, measured.saved_bytes
    evaluations, snapshots = play(schedule, n)
    held = snapshots * state + saved * (n if schedule.keeps_graphs else min(n, 1))
    below = 0
    if budgets.memory is not None and budgets.disk is not None:
        # A kept step's state begins its graph, as a parameter does, and a stash leaves those in place.
        stays = min(state, saved) * n if schedule.keeps_graphs else 0
        below = max(0, held - max(budgets.memory, stays))
    compute = (evaluations + _BACKWARD * n) * seconds
    moving = below / budgets.disk_speed if below else 0.0  # beside compute
    return LoopPlan(
        schedule, n, evaluations, snapshots, held - below, below, max(compute, moving), measured
    )


def free_bytes(directory: str) -> int:
    """Bytes that ``directory``'s file system has free."""
    return shutil.disk_usage(directory).free


def disk_speed(directory: str) -> float:
    """Bytes a second that a stash writes to ``directory`` and reads back, measured once in a process."""
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
