"""The accelerator's benchmark, on one that is played; it ends and keeps its figures whatever happens."""

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from backstash.cli import main
from bench._workloads import blocks_of
from long_tests import takes_long

ROOT = Path(__file__).resolve().parent.parent

from device import benchmark, process  # noqa: E402
from device.models import DEVICE_WORKLOADS  # noqa: E402
from device.plan import Task, plan  # noqa: E402
from device.process import run_reporting  # noqa: E402
from device.rows import rows  # noqa: E402
from device.sanitizer import sanitized  # noqa: E402
from device.table import device_rows, device_table  # noqa: E402
from device.ways import WAYS, DeviceWay  # noqa: E402


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@takes_long
def test_it_runs_and_can_be_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    options = ["--tiny", "--repeats", "1", "--steps", "1", "--disk", str(tmp_path)]
    assert main(["bench", "--device", "cpu", *options, "--out", str(out)]) == 0
    assert sorted(tmp_path.iterdir()) == [out], "something was left in the directory"
    results = json.loads(out.read_text())
    (section,) = results["sections"]
    found = section["models"]["resnet-tiny"]
    assert "ended" not in section, section.get("ended")
    for name, row in found["rows"].items():
        if name.startswith("stash"):
            assert row["gradients"] == found["rows"]["plain"]["gradients"], name
    assert found["rows"]["stash"]["down_bytes"] > 0.9 * found["saved_bytes"]
    half = found["rows"]["stash-half"]
    assert 0.3 < half["up_bytes"] / found["saved_bytes"] < 0.7
    assert found["rows"]["stash-all"]["up_bytes"] == 0
    assert found["rows"]["stash-disk"]["stats"]["disk_peak_bytes"] > 0
    assert "No module named 'torchtune'" in found["rows"]["torchtune"]["failed"]
    assert section["largest"]["sequence-tiny"]["rows"]["stash"]["most"] == 192
    assert section["steady"]["steps"] == 20
    assert "| `Stash`, nothing in place |" in capsys.readouterr().out


def test_the_plan_fits_into_its_time() -> None:
    tasks = plan(tiny=False)
    assert len({tuple(task.path) for task in tasks}) == len(tasks), "each has a place of its own"
    for task in tasks:
        arguments = task.arguments
        assert set(arguments.get("ways", ())) <= set(WAYS)
        assert arguments.get("workload", "llama-4k") in DEVICE_WORKLOADS
    assert sum(task.seconds for task in tasks[:5]) < 300, "what matters most is in the first half"


WORKER = """
import json, sys
task = json.loads(sys.argv[1])
def report(path, value): print(json.dumps({"put": path, "value": value}), flush=True)
report(["description"], "a model")
for way in ("good", "breaks", "crashes", "last"):
    if way in task["known"]:
        continue
    report(["rows", way], {"failed": "it did not end"})
    if way == "breaks":
        report(["rows", way], {"failed": "CUDA error"})
        sys.exit(3)
    if way == "crashes":
        print("words on stderr", file=sys.stderr)
        sys.exit(11)
    report(["rows", way], {"step_seconds": [1.0]})
"""


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a_worker.py").write_text(WORKER)
    monkeypatch.setattr(benchmark, "_WORKER", tmp_path / "a_worker.py")


def test_a_row_that_breaks_or_crashes_takes_nothing_else_along(worker: None) -> None:
    task = Task("a task", ["models", "m"], 90.0, {"kind": "rows"}, least_seconds=0.0)
    section: dict[str, Any] = {}
    saved: list[str] = []
    benchmark._run(task, {}, 90.0, section, lambda now: saved.append(json.dumps(now)))
    assert section["models"]["m"]["rows"] == {
        "good": {"step_seconds": [1.0]},
        "breaks": {"failed": "CUDA error"},
        "crashes": {"failed": "it did not end"},
        "last": {"step_seconds": [1.0]},
    }
    assert [each["status"] for each in section["ended"]] == [3, 11]
    assert "words on stderr" in section["ended"][1]["error"]
    assert any('"good": {"step_seconds"' in each and "breaks" not in each for each in saved)


def test_a_task_that_fails_at_once_is_reported_and_not_restarted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(benchmark, "_WORKER", tmp_path / "no_such_worker.py")
    section: dict[str, Any] = {}
    task = Task("a task", ["steady"], 30.0, {"kind": "steady"}, least_seconds=0.0)
    benchmark._run(task, {}, 30.0, section, lambda now: None)
    assert "no_such_worker.py" in section["steady"]["failed"]
    assert len(section["ended"]) == 1


def test_without_time_everything_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"repeats": 1, "steps": 1, "directory": ".", "tiny": False}
    section = benchmark.device_benchmark(
        "cpu", **options, say=lambda line: None, seconds=1.0, host=1
    )
    assert section["models"]["llama-4k"] == {"failed": "no time was left"}
    assert section["steady"] == {"failed": "no time was left"}
    text = device_table(section)
    assert "llama-4k: no time was left" in text and "not measured GB/s down" in text


class OnceReported(threading.Thread):
    """A timer whose time has come when the test says so."""

    reported = threading.Event()

    def __init__(
        self, seconds: float, function: Callable[..., None], args: tuple[Any, ...]
    ) -> None:
        super().__init__(daemon=True)
        self.function, self.args = function, args

    def run(self) -> None:
        self.reported.wait(60)
        self.function(*self.args)

    def cancel(self) -> None:
        self.reported.set()


def test_a_process_that_hangs_ends_at_its_deadline_with_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process.threading, "Timer", OnceReported)
    OnceReported.reported.clear()
    program = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print('========= an error', flush=True)\n"
        "print('{\"child\": %d}' % child.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    figures: list[dict[str, Any]] = []

    def record(figure: dict[str, Any]) -> None:
        figures.append(figure)
        OnceReported.reported.set()

    status, said = run_reporting([sys.executable, "-c", program], record, 60.0)
    assert (status, said) == (-9, "========= an error")
    state = Path(f"/proc/{figures[0]['child']}/stat")
    deadline = time.monotonic() + 30  # a killed process needs a processor to die on
    while state.exists() and state.read_text().split()[2] != "Z":
        assert time.monotonic() < deadline, "the child lives on"
        time.sleep(0.01)


def test_a_sanitizer_is_found_by_its_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    common = {"device": "cuda"}
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_PATH", raising=False)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "nothing"))
    if not Path("/usr/local/cuda").exists():
        assert "neither in PATH" in sanitized(Path("w"), common, 100)["skipped"]
    program = tmp_path / "home/bin/compute-sanitizer"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\necho ========= Invalid read\nexit 9\n")
    program.chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "home"))
    found = sanitized(Path("w"), common, 100)
    assert (found["clean"], found["said"]) == (False, "========= Invalid read")
    assert sanitized(Path("w"), common, 5) == {"skipped": "no time was left"}


def test_a_row_out_of_memory_says_so_and_one_that_broke_the_device_ends_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Raises:
        def __init__(self, error: Exception) -> None:
            self.error = error

        def __enter__(self) -> None:
            raise self.error

        def __exit__(self, *_: object) -> None: ...

    no_memory = Raises(torch.OutOfMemoryError("CUDA out of memory."))
    broken = Raises(RuntimeError("CUDA error: an illegal memory access"))
    monkeypatch.setitem(WAYS, "short", DeviceWay("s", lambda workload: (no_memory, None)))
    monkeypatch.setitem(WAYS, "broken", DeviceWay("b", lambda workload: (broken, None)))
    task = {
        "workload": "resnet-tiny",
        "seconds": 60,
        "repeats": 2,
        "steps": 1,
        "host_bytes": 1 << 26,
    }
    task |= {"ways": ["plain", "short", "broken", "stash"], "known": [], "directory": str(tmp_path)}
    reported: dict[str, Any] = {}
    before = torch.are_deterministic_algorithms_enabled()

    def report(path: list[str], value: Any) -> None:
        reported[path[-1]] = dict(value) if isinstance(value, dict) else value

    status = rows(task, torch.device("cpu"), report)
    torch.use_deterministic_algorithms(before)
    assert status == 3
    assert reported["short"]["failed"] == "out of device memory"
    assert "illegal memory access" in reported["broken"]["failed"]
    assert reported["plain"]["step_seconds"] and "stash" not in reported


@pytest.mark.parametrize(
    ("gradients", "plain", "word"),
    [
        (["a", "a"], ["a"], "equal"),
        (["a", "b"], ["a"], "differ"),
        (["a"], ["a", "b"], "plain's own vary"),
        (["a"], [], ""),
    ],
)
def test_gradients_are_compared_with_all_of_plain_s(
    gradients: list[str], plain: list[str], word: str
) -> None:
    row = {"step_seconds": [2.0, 4.0], "peaks": [5], "down_bytes": 10, "up_bytes": 20}
    found = {
        "rows": {
            "plain": {"step_seconds": [2.0], "peaks": [9], "gradients": plain},
            "stash": row | {"gradients": gradients},
        }
    }
    link = {"down_bytes_per_second": 10.0, "up_bytes_per_second": 20.0}
    row = list(device_rows(found, link))[-1]
    assert row.gradients == word
    assert (row.ratio, row.compute_seconds, row.link_seconds) == (1.5, 2.0, 2.0)
    assert row.of_floor == pytest.approx(2 / 3)


def test_torchvision_s_resnet_is_ours_where_there_is_none() -> None:
    workload = DEVICE_WORKLOADS["resnet152-tiny"](torch.device("cpu"))
    assert "ResNet-152" in workload.description
    assert len(blocks_of(workload.model)) == 50


def without_benchmarks(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """``backstash`` in a process that has the package as a wheel has it: its folder and nothing else."""
    package = tmp_path / "site-packages" / "backstash"
    if not package.exists():
        shutil.copytree(
            ROOT / "src" / "backstash", package, ignore=shutil.ignore_patterns("__pycache__")
        )
    command = [sys.executable, "-m", "backstash", *arguments]
    environ = os.environ | {"PYTHONPATH": str(package.parent)}
    return subprocess.run(
        command, env=environ, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=100
    )


def test_an_installed_package_without_it_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = tmp_path / "device.json"
    result.write_text(json.dumps({"sections": [{"kind": "device"}]}))
    for arguments in (
        ["--device", "cpu", "--tiny"],
        ["--device", "cuda"],
        ["--table", str(result)],
        ["gpt"],
    ):
        done = without_benchmarks(tmp_path, "bench", *arguments)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
        assert done.stderr.startswith("backstash bench: the benchmarks are not")
        assert "clone the repository" in done.stderr
