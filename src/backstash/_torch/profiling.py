"""Whether ``torch.profiler`` runs."""

from __future__ import annotations

import functools
from collections.abc import Callable

from torch.autograd import profiler

__all__ = ["is_profiling"]

is_profiling: Callable[[], bool] = functools.partial(
    getattr, profiler, "_is_profiler_enabled", False
)
"""Whether a profiler of any kind runs in this process: a call of C. A flag of torch 2.11 to 2.15; where it
is missing, False, and a trace has no spans of ours."""
