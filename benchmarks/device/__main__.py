"""One process of the accelerator's benchmark: ``python benchmarks/device TASK``, with the task in JSON."""

from __future__ import annotations

import sys
from pathlib import Path

__all__: list[str] = []

if __name__ == "__main__":
    # Python put this folder first in the path. Its modules are imported as the package `device`, from the
    # folder above, and `backstash` from this checkout.
    benchmarks = Path(__file__).resolve().parent.parent
    sys.path[:1] = [str(benchmarks), str(benchmarks.parent / "src")]

    from device.worker import main

    main()
