"""benchmarks/saved_report.py runs, small; the committed result keeps what the report promises."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


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
        assert found["variants"]["report"]["ratio"] <= 1.05
