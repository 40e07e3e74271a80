"""benchmarks/saved_report.py runs, small; report and operating system agree, here and in what is committed."""

import json
import os
import subprocess
import sys
from pathlib import Path

from long_tests import takes_long

ROOT = Path(__file__).resolve().parents[2]
MEASURE = """
import json, sys
sys.path.insert(0, sys.argv[1])
from saved_report import WORKLOADS, memory
from bench._workloads import _gpt
WORKLOADS["check"] = lambda: _gpt(2, 128, 24, 256)
print(json.dumps(memory("check", "cpu")))
"""


@takes_long
def test_a_forward_adds_what_the_report_says() -> None:
    """Tensors are mapped one by one, so that what is resident is what is alive."""
    command = [sys.executable, "-c", MEASURE, str(ROOT / "benchmarks")]
    variables = os.environ | {"MALLOC_MMAP_THRESHOLD_": str(64 << 10)}
    done = subprocess.run(
        command, env=variables, capture_output=True, text=True, check=True, timeout=100
    )
    found = json.loads(done.stdout)
    assert found["added_bytes"] > 100e6
    assert abs(found["activation_bytes"] / found["added_bytes"] - 1) < 0.02
    assert abs(found["added_under_report_bytes"] / found["added_bytes"] - 1) < 0.02


@takes_long
def test_the_benchmark_runs_small(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    script = str(ROOT / "benchmarks" / "saved_report.py")
    subprocess.run([sys.executable, script, "--tiny", "--out", str(out)], check=True, timeout=100)
    fresh = json.loads(out.read_text())
    kept = json.loads((ROOT / "benchmarks" / "results" / "saved_report.json").read_text())
    assert kept.keys() == fresh.keys()
    assert kept["memory"].keys() == kept["overhead"].keys() == {"gpt", "resnet"}
    for found in fresh["overhead"].values():
        assert found["variants"].keys() == kept["overhead"]["gpt"]["variants"].keys()
        assert found["variants"]["none"]["ratio"] == 1.0
    for found in fresh["memory"].values():
        assert found.keys() == kept["memory"]["gpt"].keys()
        assert found["total_bytes"] > found["activation_bytes"] > 0


def test_the_committed_result_is_within_what_is_promised() -> None:
    kept = json.loads((ROOT / "benchmarks" / "results" / "saved_report.json").read_text())
    for found in kept["memory"].values():
        assert all(abs(each) <= 0.02 for each in found["off"])
    for found in kept["overhead"].values():
        assert found["variants"]["report, look=False"]["ratio"] <= 1.05
    # Looking at values reads each ReLU's result once more, of which a ResNet has many.
    assert kept["overhead"]["gpt"]["variants"]["report"]["ratio"] <= 1.05
    assert kept["overhead"]["resnet"]["variants"]["report"]["ratio"] <= 1.06
