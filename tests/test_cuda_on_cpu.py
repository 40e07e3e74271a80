"""The checks of an accelerator, by PyTorch's own CUDA code on a machine without a GPU: see ``cuda_on_cpu``."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gpu_checks import CHECKS

HERE = Path(__file__).parent
CHANCES = ("0.03", "0.4")

pytestmark = pytest.mark.skipif(
    torch.version.cuda is None or torch.cuda.is_available() or "CUDA_ON_CPU" in os.environ,
    reason="needs a torch that was built for CUDA, and no GPU",
)


@pytest.fixture(scope="session")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, dict[str, str]]]:
    """Of all checks, by how likely what waits runs at each look."""
    out = tmp_path_factory.mktemp("checks")
    running = []
    for chance in CHANCES:
        command = [sys.executable, "tests/cuda_on_cpu", "tests/test_gpu.py", "--seconds", "600"]
        environ = {**os.environ, "CUDA_ON_CPU_CHANCE": chance, "CUDA_ON_CPU_DEVICES": "2"}
        command += ["--out", str(out / chance)]
        pipe = subprocess.PIPE
        running.append(
            subprocess.Popen(command, cwd=HERE.parent, env=environ, stdout=pipe, stderr=pipe)
        )
    found = {}
    for chance, each in zip(CHANCES, running, strict=True):
        _, words = each.communicate()
        if (out / chance).exists():
            found[chance] = json.loads((out / chance).read_text())
        elif b"cuda_on_cpu: " in words:
            pytest.skip(words.decode())  # no compiler, or no headers
    return found


@pytest.mark.timeout(900)  # the first asks for all of them
@pytest.mark.parametrize("chance", CHANCES)
@pytest.mark.parametrize("check", CHECKS)
def test_a_check(check: str, chance: str, results: dict[str, dict[str, dict[str, str]]]) -> None:
    found = results[chance][check]
    assert found["result"] == "passed", found["words"]


@pytest.mark.timeout(300)
def test_the_benchmark_runs_through(tmp_path: Path) -> None:
    """``benchmarks/gpu.sh`` has ten minutes on a machine that is lent: nothing in it may be met there first."""
    command = [sys.executable, "tests/cuda_on_cpu", "-m", "backstash", "bench", "--device", "cuda"]
    command += ["--tiny", "--repeats", "1", "--steps", "1", "--seconds", "250"]
    command += ["--disk", str(tmp_path), "--out", str(tmp_path / "bench.json")]
    environ = {**os.environ, "CUDA_ON_CPU_CHANCE": "0.3", "PYTHONPATH": str(HERE.parent / "src")}
    done = subprocess.run(command, cwd=HERE.parent, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert "Traceback" not in done.stdout, done.stdout
    rows = [line for line in done.stdout.splitlines() if line.startswith("| `Stash")]
    assert len(rows) == 8, done.stdout
    assert all(row.endswith("| equal |") for row in rows[:6]), done.stdout
