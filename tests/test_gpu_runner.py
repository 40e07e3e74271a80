"""The runner of the accelerator's checks: what fails, hangs or dies takes nothing else along."""

import json
import os
import subprocess
import sys
from pathlib import Path

from long_tests import takes_long

TESTS = Path(__file__).resolve().parent
CHECKS = """
import threading
from gpu_place import Skip

def passes(place): assert place.directory.is_dir()
def fails(place): raise AssertionError("two is not three")
def skips(place): raise Skip("not here")
def breaks(place): raise RuntimeError("CUDA error: an illegal memory access was encountered")
def hangs(place): threading.Event().wait()

CHECKS = {"first": passes, "fails": fails, "skips": skips, "breaks": breaks, "hangs": hangs,
          "last": passes}
"""


@takes_long
def test_each_check_is_reported_whatever_the_others_do(tmp_path: Path) -> None:
    (tmp_path / "some_checks.py").write_text(CHECKS)
    out = tmp_path / "found.json"
    done = subprocess.run(
        [
            *(sys.executable, str(TESTS / "test_gpu.py"), "--checks", "some_checks"),
            *("--out", str(out), "--check-seconds", "1"),
        ],
        env=os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{TESTS.parent / 'src'}"},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    found = json.loads(out.read_text())
    assert {name: each["result"] for name, each in found.items()} == {
        "first": "passed",
        "fails": "failed",
        "skips": "skipped",
        "breaks": "failed",
        "hangs": "ended",
        "last": "passed",
    }, done.stdout + done.stderr
    assert "two is not three" in found["fails"]["words"]
    assert "Timeout" in found["hangs"]["words"], "where it hung is shown"
    assert done.returncode == 1
