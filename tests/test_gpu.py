"""On a real accelerator where there is one, and the same checks with a twin in its place.

Under pytest, or alone where there is no pytest::

    python tests/test_gpu.py [--out FILE] [--seconds N]
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    import gpu_runner

    sys.exit(gpu_runner.main())


import pytest
import torch

import gpu_runner
from gpu_checks import CHECKS
from gpu_place import Place, Skip

there = torch.accelerator.is_available()
device = torch.accelerator.current_accelerator() if there else torch.device("cpu")


@pytest.mark.parametrize("name", CHECKS)
def test_a_check(tmp_path: Path, name: str) -> None:
    """On the accelerator; without one, what a twin can play."""
    try:
        CHECKS[name](Place(device or torch.device("cpu"), tmp_path))
    except Skip as reason:
        pytest.skip(str(reason))
