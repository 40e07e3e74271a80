"""One process of the accelerator's benchmark: prints each figure as soon as it has it, as a line of JSON."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

import torch

from .largest import largest
from .link import measure_link
from .rows import rows
from .steady import small, steady

__all__ = ["main"]


def main() -> None:
    """Measure what the only argument asks for, in JSON."""
    task = json.loads(sys.argv[1])
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True
    kinds: dict[str, Callable[..., int]] = {
        "link": _link,
        "rows": rows,
        "largest": largest,
        "steady": steady,
        "small": small,
    }
    sys.exit(kinds[task["kind"]](task, torch.device(task["device"]), _report))


def _report(path: list[str], value: Any) -> None:
    print(json.dumps({"put": path, "value": value}), flush=True)


def _link(
    task: dict[str, Any], device: torch.device, report: Callable[[list[str], Any], None]
) -> int:
    for name, value in measure_link(device, task["bytes"], task["side"]).items():
        report([name], value)
    return 0
