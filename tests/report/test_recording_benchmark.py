"""benchmarks/recording_overhead.py runs, small; the committed result is one of its own, within its bound."""

import json
import subprocess
import sys
from pathlib import Path

from long_tests import takes_long

ROOT = Path(__file__).resolve().parents[2]


@takes_long
def test_the_benchmark_runs_small(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    script = str(ROOT / "benchmarks" / "recording_overhead.py")
    command = [sys.executable, script, "--tiny", "--disk", str(tmp_path), "--out", str(out)]
    subprocess.run(command, check=True, timeout=100, stdout=subprocess.DEVNULL)
    fresh = json.loads(out.read_text())
    kept = json.loads((ROOT / "benchmarks" / "results" / "recording_overhead.json").read_text())
    assert kept.keys() == fresh.keys()
    assert fresh["events_per_step"] > 0 and len(fresh["seconds"]["recorded"]) == fresh["pairs"]
    assert kept["ratio"] <= 1.05, "recording costs more than 5% of the benchmark's step"
