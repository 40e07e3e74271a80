"""benchmarks/hooks_overhead.py runs, small; the committed result is one of its own."""

import json
import subprocess
import sys
from pathlib import Path

from long_tests import takes_long

ROOT = Path(__file__).resolve().parents[2]


@takes_long
def test_the_benchmark_runs_small(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    script = str(ROOT / "benchmarks" / "hooks_overhead.py")
    subprocess.run([sys.executable, script, "--tiny", "--out", str(out)], check=True, timeout=100)
    fresh = json.loads(out.read_text())
    kept = json.loads((ROOT / "benchmarks" / "results" / "hooks_overhead.json").read_text())
    assert kept.keys() == fresh.keys() and kept["cases"].keys() == fresh["cases"].keys()
    for name, case in fresh["cases"].items():
        assert case["variants"].keys() == kept["cases"][name]["variants"].keys()
        assert case["variants"]["bare"]["ratio"] == 1.0
