"""Whether ``torch.profiler`` is running."""

from __future__ import annotations

import functools
from collections.abc import Callable

from torch.autograd import profiler

__all__ = ["is_profiling"]

is_profiling: Callable[[], bool] = functools.partial(
    getattr, profiler, "_is_profiler_enabled", False
)
"""Whether any profiler runs in this process: a C call. The flag exists in torch 2.11 to 2.15; if it is
missing: ``False``, and a trace contains no spans of the stash."""
