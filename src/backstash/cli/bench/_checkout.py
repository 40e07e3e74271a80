"""Imports the accelerator's benchmark from ``benchmarks/device`` of a checkout; a wheel does not have it."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from ...errors import UsageError

__all__ = ["device_module"]

_BENCHMARKS = Path(__file__).resolve().parents[4] / "benchmarks"  # in a checkout, beside src
_MISSING = (
    "the accelerator's benchmark is not in the installed package; clone the repository and run "
    "`benchmarks/gpu.sh OUT` there, or this command after `pip install -e .`"
)


def device_module(name: str) -> Any:
    """Import ``benchmarks/device/NAME.py`` of the checkout that this package runs from.

    Raises:
        UsageError: the package does not run from a checkout; the message says what to do.
    """
    if not (_BENCHMARKS / "device" / "__init__.py").is_file():
        raise UsageError(_MISSING)
    if sys.path[:1] != [str(_BENCHMARKS)]:
        sys.path.insert(0, str(_BENCHMARKS))
    return import_module(f"device.{name}")
