"""Long loops: the gradient through thousands of steps in the memory of a few.

``_schedules`` says which states to hold, ``_choose`` picks a schedule. ``_steps`` evaluates one step
and finds, with ``_edges``, what it uses; ``_loop`` runs forward and, from backward, steps again.
``_state`` takes states apart and holds snapshots, ``_outputs`` stacks what steps return beside it.
A replay changes nothing but its result: ``_surroundings`` has random numbers, autocast and settings as
they were, ``_effects`` undoes what else a step does, ``_saves`` says where that goes which it saves.
"""

from __future__ import annotations

from ._call import checkpoint_loop
from ._choose import LoopPlan, MeasuredStep
from ._schedules import (
    Binomial,
    KeepAll,
    Schedule,
    TwoLevel,
    count_evaluations,
    least_evaluations,
)

__all__ = [
    "Binomial",
    "KeepAll",
    "LoopPlan",
    "MeasuredStep",
    "Schedule",
    "TwoLevel",
    "checkpoint_loop",
    "count_evaluations",
    "least_evaluations",
]
