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
RUNS = {
    "late": ("0.03", ""),
    "soon": ("0.4", ""),
    "expandable segments": ("0.1", "expandable_segments:True"),
    "cudaMallocAsync": ("0.1", "backend:cudaMallocAsync"),
}

pytestmark = pytest.mark.skipif(
    torch.version.cuda is None or torch.cuda.is_available() or "CUDA_ON_CPU" in os.environ,
    reason="needs a torch that was built for CUDA, and no GPU",
)


@pytest.fixture(scope="session")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, dict[str, str]]]:
    """Of all checks, by how likely what waits runs at each look, and PyTorch's allocator."""
    out = tmp_path_factory.mktemp("checks")
    running = []
    for how, (chance, allocator) in RUNS.items():
        command = [sys.executable, "tests/cuda_on_cpu", "tests/test_gpu.py", "--seconds", "600"]
        environ = {**os.environ, "CUDA_ON_CPU_CHANCE": chance, "CUDA_ON_CPU_DEVICES": "2"}
        environ["PYTORCH_ALLOC_CONF"] = allocator
        command += ["--out", str(out / how)]
        pipe = subprocess.PIPE
        running.append(
            subprocess.Popen(command, cwd=HERE.parent, env=environ, stdout=pipe, stderr=pipe)
        )
    found = {}
    for how, each in zip(RUNS, running, strict=True):
        _, words = each.communicate()
        if (out / how).exists():
            found[how] = json.loads((out / how).read_text())
        elif b"cuda_on_cpu: " in words:
            pytest.skip(words.decode())  # no compiler, or no headers
    return found


@pytest.mark.timeout(900)  # the first asks for all of them
@pytest.mark.parametrize("how", RUNS)
@pytest.mark.parametrize("check", CHECKS)
def test_a_check(check: str, how: str, results: dict[str, dict[str, dict[str, str]]]) -> None:
    found = results[how][check]
    if found["result"] == "skipped":
        pytest.skip(found["words"])
    assert found["result"] == "passed", found["words"]


def on_cuda(arguments: list[str], chance: float, directory: Path, **variables: str) -> str:
    """What Python with ``arguments`` prints on both streams, run in ``directory``; it must end well."""
    environ = {**os.environ, **variables, "CUDA_ON_CPU_CHANCE": str(chance)}
    environ["PYTHONPATH"] = str(HERE.parent / "src")
    command = [sys.executable, str(HERE / "cuda_on_cpu"), *arguments]
    done = subprocess.run(command, cwd=directory, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    return done.stdout + done.stderr


TRAIN = """
import torch
from torch import nn
torch.manual_seed(0)
layers = [nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.LayerNorm(256)) for _ in range(6)]
model = nn.Sequential(*layers).cuda()
optimizer = torch.optim.AdamW(model.parameters())
scaler = torch.amp.GradScaler("cuda")
for step in range(3):
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = model(torch.randn(512, 256, device="cuda")).float().square().mean()
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    print("loss", loss.item().hex())
"""


@pytest.mark.parametrize("keep", ["0", "1MiB", "auto"])
def test_a_script_under_backstash_run(tmp_path: Path, keep: str) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    run = ["-m", "backstash", "run", "--keep", keep, "--host", "64MiB", "--disk", str(tmp_path)]
    run += ["--inflight", "1MiB", "--report", "page.html", "train.py"]
    output = on_cuda(run, 0.3, tmp_path)
    losses = [line for line in output.splitlines() if line.startswith("loss")]
    assert losses == on_cuda(["train.py"], 0.3, tmp_path).splitlines()
    assert "device     cuda:0: " in output
    assert (keep == "auto") == ("0 B came back" in output), output
    assert "Peak on cuda:0" in (tmp_path / "page.html").read_text()


REPLICAS = """
import torch
from torch import nn
from torch.nn.parallel import parallel_apply
torch.manual_seed(0)
replicas = [nn.Sequential(nn.Linear(200, 200), nn.Tanh()).to(f"cuda:{at}") for at in range(2)]
inputs = [torch.randn(300, 200, device=f"cuda:{at}") for at in range(2)]
for out in parallel_apply(replicas, inputs):
    out.square().sum().backward()
print(*("loss " + each[0].weight.grad.double().sum().item().hex() for each in replicas))
"""


def test_replicas_in_threads_under_backstash_run(tmp_path: Path) -> None:
    """What ``nn.DataParallel`` does between NCCL's calls."""
    (tmp_path / "replicas.py").write_text(REPLICAS)
    run = ["-m", "backstash", "run", "--host", "64MiB", "replicas.py"]
    output = on_cuda(run, 0.3, tmp_path, CUDA_ON_CPU_DEVICES="2")
    plain = on_cuda(["replicas.py"], 0.3, tmp_path, CUDA_ON_CPU_DEVICES="2")
    assert plain.strip() in output
    assert (
        "moved      938 KiB, 100% of the 938 KiB that could move" in output
    )  # outs, and squares of them


STRIDES = """
import torch
from backstash import graph
for save_on_cpu in (torch.autograd.graph.save_on_cpu, graph.save_on_cpu):
    x = torch.ones(300, 200, device="cuda", requires_grad=True)
    with save_on_cpu(pin_memory=True):
        y = (x * 2).t().exp()
    print("strides", y.stride(), y.grad_fn._saved_result.stride())
"""


def test_pinned_save_on_cpu_keeps_strides_and_pytorchs_does_not(tmp_path: Path) -> None:
    output = on_cuda(["-c", STRIDES], 0.3, tmp_path).splitlines()
    found = [line for line in output if line.startswith("strides")]
    assert found == ["strides (1, 200) (300, 1)", "strides (1, 200) (1, 200)"]


@pytest.mark.timeout(300)
def test_random_programs() -> None:
    """``python tests/cuda_on_cpu scripts/soak_programs.py --accelerator`` is the long form."""
    soak = ["scripts/soak_programs.py", "--accelerator", "--programs", "40", "--seed", "11"]
    assert "40 programs  equal" in on_cuda(soak, 0.1, HERE.parent)


def test_the_benchmark_of_copies_under_way_runs() -> None:
    output = on_cuda(
        ["benchmarks/blocks_under_way.py", "--blocks", "8", "--repeats", "1"], 0.1, HERE.parent
    )
    assert [line.split("  ")[0] for line in output.splitlines()[2:]] == [
        "plain",
        "all stay",
        "all move",
    ]


@pytest.mark.timeout(300)
def test_the_benchmark_runs_through(tmp_path: Path) -> None:
    """``benchmarks/gpu.sh`` has ten minutes on a machine that is lent: no fault may first appear there."""
    bench = [
        "-m",
        "backstash",
        "bench",
        "--device",
        "cuda",
        "--tiny",
        "--repeats",
        "1",
        "--steps",
        "1",
    ]
    bench += ["--seconds", "250", "--disk", str(tmp_path), "--out", "bench.json"]
    output = on_cuda(bench, 0.3, tmp_path)
    assert "Traceback" not in output, output
    rows = [line for line in output.splitlines() if line.startswith("| `Stash")]
    assert len(rows) == 8, output
    assert all(row.endswith("| equal |") for row in rows[:6]), output
