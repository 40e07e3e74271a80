"""The accelerator's benchmark: the link, every model in every way, the largest that trains, no growth."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import torch

from ._device_ways import WAYS
from ._link import measure_link
from ._process import python

__all__ = ["device_benchmark"]

_WORKER = "backstash.cli._bench._device_worker"
_SHARES = ("stash-all", "stash-half", "stash-tenth", "stash")
_PEERS = ("save_on_cpu", "save_on_cpu-pinned", "checkpoint", "trl", "torchtune")
_SPENDS_SECONDS = 590  # of ten minutes
_GIB = 1 << 30

_MODELS = {
    "resnet152": ("plain", *_PEERS, *_SHARES, "stash-checkpoint"),
    "resnet152-bf16": ("plain", "save_on_cpu-pinned", "checkpoint", *_SHARES, "stash-checkpoint"),
    "llama-4k": ("plain", *_PEERS, *_SHARES, "stash-checkpoint", "stash-disk"),
    "llama-16k": ("plain", "checkpoint", *_SHARES, "stash-checkpoint"),
    "gpt2-medium": ("plain", "save_on_cpu-pinned", "checkpoint", *_SHARES, "stash-disk"),
}
_TINY_MODELS = {"resnet-tiny": tuple(WAYS), "llama-tiny": ("plain", "stash", "stash-disk")}


def device_benchmark(
    device: str, *, repeats: int, steps: int, directory: str, tiny: bool, say: Callable[[str], None]
) -> dict[str, Any]:
    """Everything in one go, inside ten minutes; what no time was left for says so.

    Args:
        device: ``"cuda"``, or another accelerator; ``"cpu"``, with ``tiny``, for tests.
        repeats: how often each way runs, in turn with the others.
        steps: steps timed each time.
        directory: where the disk tier is.
        tiny: small models, for tests; the figures mean nothing.
        say: called with a line of progress before each part.
    """
    until = time.perf_counter() + _SPENDS_SECONDS
    common = {"device": device, "directory": directory, "repeats": repeats, "steps": steps}
    say(f"{device}: the link")
    section: dict[str, Any] = {
        "kind": "device",
        "tiny": tiny,
        "device": _name(device),
        "repeats": repeats,
        "steps": steps,
        "link": measure_link(torch.device(device), 1 << 20 if tiny else _GIB, 64 if tiny else 8192),
        "models": {},
    }
    for workload, ways in (_TINY_MODELS if tiny else _MODELS).items():
        say(f"{device}: {workload}")
        task = common | {"kind": "rows", "workload": workload, "ways": ways}
        section["models"][workload] = _run(task, until - 120)
    say(f"{device}: the longest sequence")
    largest: dict[str, Any] = {
        "kind": "largest",
        "ways": ("plain", "checkpoint", "stash", "stash-checkpoint"),
        "blocks": 2 if tiny else 24,
        "width": 256 if tiny else 2048,
        "tokens": 1024 if tiny else 4096,
        "seconds": 1 if tiny else 20,
        "most": 2048 if tiny else 1 << 40,
    }
    section["largest"] = _run(common | largest | {"budget_bytes": 24 * _GIB}, until - 30)
    say(f"{device}: many steps")
    steady = {"kind": "steady", "width": 64 if tiny else 1024, "steps": 20 if tiny else 1000}
    section["steady"] = _run(common | steady, until)
    return section


def _run(task: dict[str, Any], until: float) -> dict[str, Any]:
    if time.perf_counter() > until:
        return {"failed": "no time was left"}
    ended = python(["-m", _WORKER, json.dumps(task)])
    if ended.status == 0 and ended.result:
        return ended.result
    return {"failed": f"status {ended.status}: {ended.error}"}


def _name(device: str) -> str:
    return torch.cuda.get_device_name(device) if device.startswith("cuda") else device
