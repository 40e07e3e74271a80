"""The benchmark `gradients`: peak memory when `step_in_backward` frees each gradient as soon as it is used."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from ._process import python

__all__ = ["gradients"]

_WORKER = "bench._gradients_worker"


def gradients(
    *, repeats: int, directory: str, tiny: bool, say: Callable[[str], None]
) -> dict[str, Any]:
    """The peak and the weights after three steps, one process for each way and repeat, in turn.

    Args:
        repeats: how many processes of each way.
        directory: not used; every benchmark has this argument.
        tiny: a small model, for tests.
        say: called with a line of progress before each process.
    """
    from ._gradients_worker import WAYS  # here: it needs torch, which --help need not wait for

    layers, width = (4, 256) if tiny else (32, 2048)
    runs = []
    for repeat in range(repeats):
        for way in WAYS:
            say(f"gradients: {way}, {repeat + 1} of {repeats}")
            task = {"way": way, "layers": layers, "width": width, "steps": 3}
            ended = python(["-m", _WORKER, json.dumps(task)])
            failed = {} if ended.result else {"failed": f"status {ended.status}: {ended.error}"}
            runs.append({"way": way, **ended.result, **failed})
    description = f"{layers} linear layers of width {width}, batch 4, plain SGD, three steps"
    return {
        "kind": "gradients",
        "tiny": tiny,
        "repeats": repeats,
        "description": description,
        "gradient_bytes": layers * width * width * 4,
        "runs": runs,
    }
