"""Runs a small program under compute-sanitizer, where that is installed, to find wrong memory accesses."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from .process import run_reporting

__all__ = ["sanitized"]

_PLACES = ("CUDA_HOME", "CUDA_PATH")
_LEAST_SECONDS = 30
# This allocator frees in stream order, so that an access outside that order is found.
_VARIABLES = {"PYTORCH_ALLOC_CONF": "backend:cudaMallocAsync"}
_OPTIONS = ("--tool", "memcheck", "--track-stream-ordered-races", "all", "--error-exitcode", "9")


def sanitized(worker: Path, common: dict[str, Any], seconds: float) -> dict[str, Any]:
    """Run a few steps under ``compute-sanitizer``.

    Args:
        worker: the script or folder that Python runs for them.
        common: the part of the task that all workers share.
        seconds: after so many it is ended.

    Returns:
        ``{"clean": True}``, or ``{"clean": False, "said": ...}``; ``{"skipped": why}`` where it did not run.
    """
    program = _found()
    if program is None:
        return {"skipped": "compute-sanitizer is neither in PATH nor in CUDA_HOME/bin"}
    if not common["device"].startswith("cuda"):
        return {"skipped": "it checks CUDA devices"}
    if seconds < _LEAST_SECONDS:
        return {"skipped": "no time was left"}
    words = json.dumps(common | {"kind": "small", "seconds": seconds})
    figures: list[dict[str, Any]] = []
    command = [program, *_OPTIONS, sys.executable, str(worker), words]
    status, error = run_reporting(command, figures.append, seconds, _VARIABLES)
    if status == 0:
        return {"clean": True, "steps": len(figures)}
    if status < 0:
        return {"skipped": f"it did not end within {seconds:.0f} s, after {len(figures)} steps"}
    return {"clean": False, "status": status, "said": error, "steps": len(figures)}


def _found() -> str | None:
    homes = [os.environ[name] for name in _PLACES if os.environ.get(name)] + ["/usr/local/cuda"]
    path = os.pathsep.join(
        [os.environ.get("PATH", ""), *(str(Path(home, "bin")) for home in homes)]
    )
    return shutil.which("compute-sanitizer", path=path)
