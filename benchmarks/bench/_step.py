"""The benchmarks `gpt` and `resnet`: every variant in turn, again and again, each time in a new process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ._process import Ended, allocator_of, step_process
from ._variants import VARIANTS, Variant

__all__ = ["TINY_MIN_BYTES", "step"]

_MIN_BYTES = 64 << 10
TINY_MIN_BYTES = 4 << 10  # the tiny workloads' activations are below the usual 64 KiB


def step(
    workload: str,
    keys: Sequence[str],
    *,
    repeats: int,
    steps: int,
    directory: str,
    tiny: bool,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Time training steps of ``workload`` and return the figures of every process.

    Args:
        workload: ``gpt``, ``llama``, ``resnet`` or ``unet``.
        keys: the variants, as keys of ``VARIANTS``.
        repeats: how many processes each variant gets. Each round starts with another variant.
        steps: how many steps a process times, after one that it does not.
        directory: where the ways that use a disk put their files.
        tiny: the small workload, for tests; its figures mean nothing.
        say: called with a line of progress before each process.
    """
    task = {
        "workload": f"{workload}-tiny" if tiny else workload,
        "steps": steps,
        "warmup": 1,
        "directory": directory,
        "min_bytes": TINY_MIN_BYTES if tiny else _MIN_BYTES,
    }
    skipped = {key: _why_not(VARIANTS[key]) for key in keys}
    able = [VARIANTS[key] for key in keys if not skipped[key]]
    runs = _rounds(able, task, repeats, say)
    return {
        "kind": "step",
        "workload": workload,
        "description": next((run["description"] for run in runs if "description" in run), ""),
        "tiny": tiny,
        "steps": steps,
        "repeats": repeats,
        "runs": runs,
        "skipped": {key: reason for key, reason in skipped.items() if reason},
    }


def _rounds(
    able: list[Variant], task: dict[str, Any], repeats: int, say: Callable[[str], None]
) -> list[dict[str, Any]]:
    runs = []
    for repeat in range(repeats):
        turn = repeat % max(1, len(able))
        for at, variant in enumerate(able[turn:] + able[:turn]):
            place = f"round {repeat + 1} of {repeats}, {at + 1} of {len(able)}"
            say(f"{task['workload']}: {place}: {variant.key}")
            runs.append(_run(variant, task, repeat))
    return runs


def _why_not(variant: Variant) -> str:
    try:
        allocator_of(variant)
    except LookupError as error:
        return str(error.args[0])
    return ""


def _run(variant: Variant, task: dict[str, Any], repeat: int) -> dict[str, Any]:
    ended = step_process(variant, task)
    allocator = allocator_of(variant).kind
    return {
        "variant": variant.key,
        "repeat": repeat,
        "allocator": allocator,
        **_result(ended),
    }


def _result(ended: Ended) -> dict[str, Any]:
    if ended.status == 0 and ended.result:
        return ended.result
    return {"failed": f"status {ended.status}: {ended.error}"}
