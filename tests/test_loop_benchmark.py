"""The benchmark of long loops runs, small, and every way has plain's gradients."""

import os
import subprocess
import sys
from pathlib import Path

from long_tests import takes_long

ROOT = Path(__file__).resolve().parent.parent


@takes_long
def test_a_long_loop_has_the_same_gradients_in_every_way(disk_dir: Path) -> None:
    ended = subprocess.run(
        [sys.executable, ROOT / "benchmarks/long_loop.py", "--tiny", "--disk", disk_dir],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"},
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("gradients equal") == 5
