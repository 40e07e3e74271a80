"""Checkpointed loops: the gradient through thousands of steps in the memory of a few.

``_schedules`` says which states to hold, and ``_choose`` picks a schedule. ``_steps`` evaluates one step and
finds, with ``_edges``, which outside tensors it uses. ``_loop`` runs forward, and runs steps again in
backward. ``_state`` flattens states and holds snapshots; ``_outputs`` stacks the outputs of steps. A replay
changes nothing but its result: ``_surroundings`` restores random numbers, autocast and settings, ``_effects``
undoes the step's side effects, and ``_saves`` decides where saved tensors go.
"""

from __future__ import annotations

from ._call import checkpoint_loop
from ._schedules import Binomial, KeepAll, Schedule, TwoLevel

__all__ = ["Binomial", "KeepAll", "Schedule", "TwoLevel", "checkpoint_loop"]
