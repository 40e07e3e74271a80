"""From a result of a GPU to README: on a made-up result here, and on the real one once it is committed."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

import plot_device  # noqa: E402
from device.table import device_table  # noqa: E402

RESULT = ROOT / "benchmarks/results/device.json"
PICTURE = ROOT / "docs/gpu.svg"
NOT_YET = "other libraries' offloading was not compared there"


def a_row(seconds: float, gigabytes: float, **more: Any) -> dict[str, Any]:
    peaks = [int(gigabytes * 1e9)]
    return {"step_seconds": [seconds] * 3, "peaks": peaks, "gradients": ["ab"]} | more


@pytest.fixture
def section() -> dict[str, Any]:
    rows = {
        "plain": a_row(1.0, 40.0),
        "stash": a_row(1.25, 4.0, down_bytes=10**10, up_bytes=10**10),
        "trl": {"failed": "ModuleNotFoundError: No module named 'trl'"},
    }
    return {
        "kind": "device",
        "tiny": False,
        "device": "A <made-up> device",
        "repeats": 3,
        "steps": 1,
        "link": {"down_bytes_per_second": 2e10, "up_bytes_per_second": 2e10},
        "models": {
            "llama-4k": {"description": "A model & more", "saved_bytes": 10**10, "rows": rows},
            "cut": {"failed": "no time was left"},
        },
    }


def test_the_picture_has_each_way_that_ended(section: dict[str, Any]) -> None:
    svg = plot_device.picture(section)
    root = ElementTree.fromstring(svg)
    words = [each.text for each in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "A model & more" in words and "A <made-up> device" in words
    assert "1.25" in words and "10%" in words
    assert not any("TRL" in str(word) for word in words)
    bars = [each for each in root.iter("{http://www.w3.org/2000/svg}rect")]
    longest = max(float(bar.get("width", 0)) for bar in bars)
    assert len(bars) == 4 and longest == plot_device.BAR
    (floor,) = root.iter("{http://www.w3.org/2000/svg}line")
    assert float(floor.get("x1", 0)) == pytest.approx(plot_device.LABEL + plot_device.BAR / 1.25)


def test_the_table_has_floors_and_what_failed(section: dict[str, Any]) -> None:
    text = device_table(section)
    assert "| `Stash`, nothing in place | 1.250 s | 1.25 |" in text
    assert "| 1.000 s, 1.000 s | 0.80 | equal |" in text
    assert "No module named 'trl'" in text and "cut: no time was left" in text


def test_a_tiny_run_is_not_drawn(
    tmp_path: Path, section: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    results, out = tmp_path / "r.json", tmp_path / "out.svg"
    monkeypatch.setattr(sys, "argv", ["plot_device.py", str(results), str(out)])
    for tiny, status in ((True, 1), (False, 0)):
        results.write_text(json.dumps({"sections": [section | {"tiny": tiny}]}))
        assert plot_device.main() == status
        assert out.exists() is not tiny


def test_readme_says_so_until_there_is_a_result() -> None:
    readme = (ROOT / "README.md").read_text()
    if not RESULT.exists():
        assert NOT_YET in readme and not PICTURE.exists()
        return
    assert NOT_YET not in readme, "there is a result: draw its table and take the sentence out"
    tables = (ROOT / "docs/explanation/measured.md").read_text()
    assert "<!-- table: benchmarks/results/device.json -->" in tables
    (measured,) = json.loads(RESULT.read_text())["sections"]
    assert PICTURE.read_text() == plot_device.picture(measured), "run benchmarks/plot_device.py"


def test_the_script_runs_checks_then_the_benchmark_and_reports_both(tmp_path: Path) -> None:
    calls = tmp_path / "calls"
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/sh\necho "$@" >> {calls}\n'
        'case "$1" in */test_gpu.py) echo checked; exit 1;; -m) echo measured;; '
        "*/blocks_under_way.py) echo waiting;; esac\n"
    )
    python.chmod(0o755)
    out = tmp_path / "out"
    done = subprocess.run(
        [str(ROOT / "benchmarks/gpu.sh"), str(out), "100"],
        env=os.environ | {"PYTHON": str(python), "HOST": "1GiB", "DISK": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1, "a check failed"
    said = calls.read_text().splitlines()
    assert "test_gpu.py --out" in said[1] and said[1].endswith("--seconds 25")
    turns = said[2].split()
    assert turns[0].endswith("benchmarks/interleaved.py") and turns[1:3] == ["--device", "cuda"]
    assert 5 <= int(turns[turns.index("--seconds") + 1]) <= 15, "half of the time, less a margin"
    assert said[3].endswith("blocks_under_way.py")
    cells = said[4].split()
    assert cells[0].endswith("benchmarks/budget_cells.py") and cells[1:3] == ["--device", "cuda"]
    assert 5 <= int(cells[cells.index("--seconds") + 1]) <= 15, "half of the time, less a margin"
    assert said[5].startswith("-m backstash bench --device cuda --seconds ")
    assert said[5].endswith("--host 1GiB")
    assert 75 <= int(said[5].split()[6]) <= 85, "all end within the time"
    assert (out / "blocks.txt").read_text() == "waiting\n"
    assert (out / "bench.txt").read_text() == "measured\n"
    assert (out / "checks.txt").read_text() == "checked\n"
    assert (
        "checks: status 1; interleaved: status 0; budgets: status 0; benchmark: status 0"
        in done.stdout
    )
