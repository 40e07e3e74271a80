"""Each example runs as a program, in its tiny mode, and says what it should."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from children import child
from long_tests import takes_long

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
# One thread each: two programs that spin on the same cores are slower than one.
ENVIRON = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(ROOT / "src"),
    "PYTHONWARNINGS": "error,ignore:Failed to initialize NumPy:UserWarning",
}


@pytest.fixture
def importable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The examples and the demo as modules."""
    for folder in (EXAMPLES, ROOT / "scripts"):
        monkeypatch.syspath_prepend(str(folder))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(EXAMPLES)):
            del sys.modules[name]


def run(*command: str | Path, cwd: Path) -> str:
    """What ``python COMMAND`` printed, run somewhere else; it must succeed."""
    ended = subprocess.run(
        [sys.executable, *map(str, command)], cwd=cwd, env=ENVIRON, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def losses(output: str) -> list[str]:
    return re.findall(r"^step \d+ loss (\S+) \d+\.\d+ s$", output, re.M)


@takes_long
def test_train_gpt_learns(tmp_path: Path) -> None:
    found = losses(run(EXAMPLES / "train_gpt.py", "--tiny", cwd=tmp_path))
    assert len(found) == 4
    assert float(found[-1]) < float(found[0])
    assert all(repr(float(loss)) == loss for loss in found)


class FakeLibrary(types.ModuleType):
    """In place of a logging library: what was called, and with what. None of the real ones is installed."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.calls: list[tuple[str, tuple[object, ...], dict[str, object]]] = []

    def SummaryWriter(self) -> "FakeLibrary":
        return self

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("_"):  # as code that looks at all modules asks
            raise AttributeError(name)
        return lambda *args, **kwargs: self.calls.append((name, args, kwargs))


@pytest.mark.usefixtures("importable")
@pytest.mark.parametrize("name", ["wandb", "mlflow", "tensorboard"])
def test_figures_go_to_a_log(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import log_figures

    module = "torch.utils.tensorboard" if name == "tensorboard" else name
    library = FakeLibrary(module)
    monkeypatch.setitem(sys.modules, module, library)
    monkeypatch.setattr(sys, "argv", ["log_figures.py", "--tiny", "--to", name])
    log_figures.main()
    calls = [call for call in library.calls if call[0] != "init"]
    if name == "tensorboard":
        logged = [{call[1][0]: call[1][1] for call in calls if call[1][2] == n} for n in range(2)]
    else:
        assert [call[2] for call in calls] == [{"step": 0}, {"step": 1}]
        logged = [call[1][0] for call in calls]
    saves = [figures["stash/saves"] for figures in logged]
    assert 0 < saves[0] < saves[1] and all(type(value) is float for value in logged[0].values())


@takes_long
def test_figures_are_printed_without_a_library(tmp_path: Path) -> None:
    output = run(EXAMPLES / "log_figures.py", "--tiny", cwd=tmp_path)
    assert re.findall(r"^(\d) stash/saves=", output, re.M) == ["0", "1"]
    assert list(tmp_path.iterdir()) == []


def test_train_gpt_is_plain_pytorch() -> None:
    imports = re.findall(
        r"^\s*(?:import|from) (\w+)", (EXAMPLES / "train_gpt.py").read_text(), re.M
    )
    assert "torch" in imports and "backstash" not in imports


@takes_long
def test_train_gpt_tiny_options_can_be_changed(tmp_path: Path) -> None:
    assert len(losses(run(EXAMPLES / "train_gpt.py", "--tiny", "--steps", "2", cwd=tmp_path))) == 2


def test_custom_function_is_exact_on_disk(tmp_path: Path) -> None:
    output = run(EXAMPLES / "custom_function.py", "--tiny", "--disk", tmp_path, cwd=tmp_path)
    assert "equal to the last bit" in output
    assert f"{4 * 256 * 256 * 8:,} bytes went to disk" in output
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("importable")
def test_custom_function_has_true_derivatives() -> None:
    from custom_function import energy, make_sites, square_root

    sites = make_sites(3, 5)

    def function(*each: torch.Tensor) -> torch.Tensor:
        return energy(list(each), square_root)

    assert torch.autograd.gradcheck(function, sites)
    assert torch.autograd.gradgradcheck(function, sites)


def test_draw_graph_reads_nothing_back(tmp_path: Path) -> None:
    output = run(EXAMPLES / "draw_graph.py", "--tiny", "--out", tmp_path / "out", cwd=tmp_path)
    assert "\n0 bytes were read back to draw it\n" in output
    pictures = ["graph-gpt.html", "graph-gpt.svg", "graph-product.svg"]
    names = ["graph-gpt.dot", "graph-gpt.txt", *(pictures if shutil.which("dot") else [])]
    assert {path.name for path in (tmp_path / "out").iterdir()} == set(names)
    assert "3 x Block  blocks.0 … blocks.2" in (tmp_path / "out/graph-gpt.txt").read_text("utf-8")


def control_groups() -> list[Path]:
    """The examples' control groups that exist now."""
    return list(Path("/sys/fs/cgroup").rglob("backstash-example-*"))


@takes_long
def test_resnet_finishes_only_with_a_stash(tmp_path: Path) -> None:
    output = run(EXAMPLES / "resnet_on_cpu.py", "--tiny", "--disk", tmp_path, cwd=tmp_path)
    plain, stash, *rest = output.splitlines()
    assert re.fullmatch(r"plain, 600 MiB by .*: (killed by the kernel|refused: .*memory.*)", plain)
    assert re.fullmatch(r"stash, 600 MiB by .*: finished", stash)
    first, last, moved = (re.findall(r"[\d.,]+", line)[0] for line in rest)
    assert float(last) < float(first)
    assert int(moved) > 500
    assert list(tmp_path.iterdir()) == [] and control_groups() == []


def test_resnet_leaves_no_control_group_when_terminated(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLES / "resnet_on_cpu.py"), "--tiny"]
    with child(command, cwd=tmp_path, env=ENVIRON, stdout=subprocess.DEVNULL) as process:
        while not control_groups() and process.poll() is None:
            time.sleep(0.05)
        if not control_groups():
            pytest.skip("no control group can be made here")
        process.terminate()
        assert process.wait(60) == 128 + signal.SIGTERM
    assert control_groups() == []


@pytest.mark.usefixtures("importable")
def test_memory_limit_falls_back_to_rlimit(monkeypatch: pytest.MonkeyPatch) -> None:
    import memory_limit

    monkeypatch.setattr(memory_limit, "memory_groups", lambda: iter(()))
    greedy = [
        sys.executable,
        "-c",
        "print('before', flush=True); bytearray(1 << 30); print('after')",
    ]
    refused = memory_limit.run_limited(greedy, 256 << 20)
    assert (refused.how, refused.output) == ("refused: MemoryError", "before\n")
    assert refused.limited_by == "RLIMIT_DATA"
    assert memory_limit.run_limited(greedy, 4 << 30).finished


@takes_long
def test_demo_compares_the_two_runs(tmp_path: Path) -> None:
    output = run(ROOT / "scripts/demo_compare.py", "--tiny", "--disk", tmp_path, cwd=tmp_path)
    assert "The losses of all 4 steps are equal to the last bit." in output
    assert re.search(r"^resident memory at its peak +\d+ MiB +\d+ MiB", output, re.M)
    assert re.search(r"^written to disk +0 MiB +\d+ MiB", output, re.M)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("importable")
def test_demo_distinguishes_losses_by_one_bit() -> None:
    from demo_compare import Run, differing

    plain = Run([2.5, 1.5], [0.1, 0.1], 0)
    assert differing(plain, Run([2.5, 1.5], [0.2, 0.2], 0)) == []
    (last,) = differing(plain, Run([2.5, 1.5000000000000002], [0.1, 0.1], 0))
    assert last.startswith("step 2: ")
    (count,) = differing(plain, Run([2.5], [0.1], 0))
    assert "plain took 2 steps, backstash 1" in count


@pytest.mark.usefixtures("importable")
def test_demo_asks_plain_again_where_the_losses_differ(capsys: pytest.CaptureFixture[str]) -> None:
    from demo_compare import Run, settled

    right, unlucky = Run([2.5, 1.5], [0.1, 0.1], 0), Run([2.5, 1.6], [0.1, 0.1], 0)
    assert settled(right, right, lambda: pytest.fail("asked again")) is right
    assert settled(unlucky, right, lambda: right) is right, "plain did not repeat itself"
    assert "did not repeat itself" in capsys.readouterr().out
    assert settled(right, unlucky, lambda: right) is right, "backstash is wrong, and stays so"
    assert "did not repeat itself" not in capsys.readouterr().out


@takes_long
def test_wave_inversion_comes_nearer(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pip install 'backstash[plot]'")
    picture = tmp_path / "media.png"
    output = run(EXAMPLES / "wave_inversion.py", "--tiny", "--picture", picture, cwd=tmp_path)
    errors = [float(each) for each in re.findall(r"medium's error (\S+)", output)]
    assert len(errors) == 3 and errors == sorted(errors, reverse=True)
    assert picture.stat().st_size > 1000


@takes_long
def test_long_recurrence_learns(tmp_path: Path) -> None:
    found = losses(run(EXAMPLES / "long_recurrence.py", "--tiny", cwd=tmp_path))
    assert len(found) == 4
    assert float(found[-1]) < float(found[0])
