"""The tasks of the accelerator's benchmark, the most important first, and how long each may take."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .ways import WAYS

__all__ = ["Task", "plan"]

_GIB = 1 << 30
_SHARES = ("stash-all", "stash-half", "stash-tenth", "stash")
_OURS = ("plain", "checkpoint", *_SHARES, "stash-checkpoint")
# These copy each view to host memory of their own, rounded up to powers of two: compared on a smaller batch.
_PEERS = (
    "plain",
    "stash",
    "save_on_cpu-pinned",
    "trl",
    "torchtune",
    "transformer-engine",
    "save_on_cpu",
)


@dataclass(frozen=True, slots=True)
class Task:
    """One process of the benchmark."""

    title: str
    """Its name in lines of progress."""
    path: list[str]
    """The keys under which its figures stand in the result."""
    seconds: float
    """The most seconds that it may take."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """The worker's task."""
    least_seconds: float = 20.0
    """With less time left it is not begun: its process needs so long to start and build the model."""


def plan(tiny: bool) -> list[Task]:
    """All tasks; with ``tiny`` small ones, in seconds."""
    if tiny:
        return _tiny()
    return [
        Task("the link", ["link"], 25, {"kind": "link", "bytes": _GIB, "side": 8192}),
        _model("llama-4k", _OURS, 60),
        _model("resnet152", _OURS, 70),
        _largest("sequence", 45, size=4096, step=1024, most=1 << 18),
        Task("many steps", ["steady"], 30, {"kind": "steady", "width": 1024, "count": 1000}),
        _model("llama-4k-1", _PEERS, 45, "peers"),
        _model("resnet152-64", _PEERS, 50, "peers"),
        _model("gpt2-medium", ("plain", *_SHARES, "stash-disk"), 55),
        _model("resnet152-bf16", _OURS, 45),
        _model("llama-16k", _OURS, 45),
        _largest("batch", 40, size=16, step=8, most=1 << 12),
    ]


def _model(workload: str, ways: tuple[str, ...], seconds: float, group: str = "models") -> Task:
    arguments = {"kind": "rows", "workload": workload, "ways": ways}
    title = workload + (", other ways" if group == "peers" else "")
    return Task(title, [group, workload], seconds, arguments)


def _largest(what: str, seconds: float, *, size: int, step: int, most: int) -> Task:
    arguments = {"kind": "largest", "what": what, "size": size, "step": step, "most": most}
    arguments |= {
        "ways": ("plain", "checkpoint", "stash", "stash-checkpoint"),
        "budget_bytes": 16 * _GIB,
    }
    return Task(f"the largest {what}", ["largest", what], seconds, arguments)


def _tiny() -> list[Task]:
    tasks = [
        Task("the link", ["link"], 60, {"kind": "link", "bytes": 1 << 20, "side": 64}),
        _model("resnet-tiny", tuple(WAYS), 60),
        _largest("sequence-tiny", 60, size=64, step=64, most=192),
        Task("many steps", ["steady"], 60, {"kind": "steady", "width": 64, "count": 20}),
    ]
    return [Task(each.title, each.path, each.seconds, each.arguments, 0.0) for each in tasks]
