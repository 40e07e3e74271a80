"""``backstash bench``: measure step time and memory, compared with the alternatives, on this machine.

The benchmarks are in ``benchmarks/bench`` of the repository; an installed package does not include them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from ..errors import UsageError

__all__ = ["main"]

_BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"  # in a clone, next to src
_MISSING = (
    "the benchmarks are not in the installed package; clone the repository, and run this command there after "
    "`pip install -e .`, or `benchmarks/gpu.sh OUT`"
)


def main(arguments: Sequence[str]) -> int:
    """Run the command and return its exit status.

    Raises:
        UsageError: the package does not run from a clone.
    """
    status: int = _command().main(arguments)
    return status


def _command() -> Any:
    if not (_BENCHMARKS / "bench" / "__init__.py").is_file():
        raise UsageError(_MISSING)
    if str(_BENCHMARKS) not in sys.path:
        sys.path.insert(0, str(_BENCHMARKS))
    return import_module("bench._command")
