"""The benchmarks `overhead` and `alive`: the cost of each small save, and of a save while many are alive."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from ._process import python

__all__ = ["alive", "overhead"]

_WORKER = "bench._small_worker"
_COUNTS = {"small": (3, 4, 5, 6), "keep": (3, 4, 5, 6), "disk": (3, 4, 5, 6)}  # powers of ten
_TINY_COUNTS = {"small": (3,), "keep": (3,), "disk": (2,)}


def overhead(
    *, repeats: int, directory: str, tiny: bool, say: Callable[[str], None]
) -> dict[str, Any]:
    """A chain of 10,000 small operations: without hooks, under empty hooks and under a stash.

    Args:
        repeats: how many processes; each runs the three in turn, nine times.
        directory: where the stash's disk tier is.
        tiny: 200 operations, for tests.
        say: called with a line of progress before each process.
    """
    task = {"what": "overhead", "operations": 200 if tiny else 10_000, "rounds": 3 if tiny else 9}
    runs = []
    for repeat in range(repeats):
        say(f"overhead: {repeat + 1} of {repeats}")
        runs.append(_run(task | {"directory": directory}))
    return {"kind": "overhead", "tiny": tiny, "repeats": repeats, "runs": runs}


def alive(*, directory: str, tiny: bool, say: Callable[[str], None]) -> dict[str, Any]:
    """The cost of a pack and of an unpack with a thousand to a million saved tensors alive.

    Args:
        directory: where the stash's disk tier is.
        tiny: up to a thousand, for tests.
        say: called with a line of progress before each process.
    """
    runs = []
    for mode, powers in (_TINY_COUNTS if tiny else _COUNTS).items():
        for power in powers:
            say(f"alive: {mode}, 10^{power} saved tensors")
            task = {"what": "alive", "mode": mode, "counts": [10**power], "directory": directory}
            result = _run(task)
            runs += result.get("rows", [result | {"mode": mode, "alive": 10**power}])
    return {"kind": "alive", "tiny": tiny, "runs": runs}


def _run(task: dict[str, Any]) -> dict[str, Any]:
    ended = python(["-m", _WORKER, json.dumps(task)])
    if ended.status == 0 and ended.result:
        return ended.result
    return {"failed": f"status {ended.status}: {ended.error}"}
