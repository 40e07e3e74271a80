"""`backstash profile`: a script's steps, what they saved, and what each budget would cost."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from backstash.cli import _profile_text, main
from backstash.cli._disk_speed import DiskSpeed
from backstash.report._saved.budgets import Budget
from long_tests import takes_long

TRAIN = """
import sys
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(*(nn.Sequential(nn.Linear(128, 128), nn.Tanh()) for _ in range(4)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
other = torch.optim.SGD(model.parameters(), lr=0.1)
try:
    for step in range(int(sys.argv[1])):
        for _ in range(2):
            model(torch.randn(256 * (1 + step % 2), 128)).square().mean().backward()
        optimizer.step()
        other.step()
        optimizer.zero_grad()
        print("step", step)
    print("end of the script")
finally:
    print("cleaned up")
"""


def profile(
    directory: Path, source: str, *arguments: str, options: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    """The script under ``backstash profile``, with the directory's disk."""
    (directory / "script.py").write_text(textwrap.dedent(source))
    words = ["-m", "backstash", "profile", "--disk", str(directory), *options]
    return subprocess.run(
        [sys.executable, *words, "script.py", *arguments],
        cwd=directory,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_steps_are_counted_and_the_script_is_ended(tmp_path: Path) -> None:
    files = ("--json", "out.json", "--html", "out.html")
    done = profile(tmp_path, TRAIN, "9", options=("--steps", "3", *files))
    assert (done.returncode, done.stderr) == (0, "")
    head, _, shown = done.stdout.partition("\nbackstash profile: ")
    assert head == "step 0\nstep 1\ncleaned up\n"
    first = shown.splitlines()[0]
    assert first.startswith("step 2 of 3, which held most, ")
    assert first.endswith(" s with recording; nothing was moved")
    found = json.loads((tmp_path / "out.json").read_text())
    # A step runs forward and backward twice: half of what it saves is held at once.
    small, large = (rows * 128 * 4 * (4 + 1) for rows in (256, 512))
    figures = [(step["unique_bytes"], step["peak_bytes"]) for step in found["steps"]]
    assert figures == [(2 * small, small), (2 * large, large), (2 * small, small)]
    rows = {row["name"]: (row["calls"], row["saves"]) for row in found["report"]["rows"]}
    assert rows["0.0"] == (2, 2) and rows["0.1"] == (2, 2) and rows["1.0"] == (2, 4)
    ops = {row["name"] for row in found["report"]["by_op"]}
    assert ops == {"AddmmBackward0", "TanhBackward0", "PowBackward0"}
    assert found["outcome"] == "enough steps" and found["directory"] == str(tmp_path)
    costs = {cost["name"]: cost for cost in found["costs"]}
    assert costs["nothing"]["moved_bytes"] == 2 * large and costs["everything"]["moved_bytes"] == 0
    for cost in costs.values():
        expected = cost["moved_bytes"] / found["disk"]["write_bytes_per_second"]
        assert cost["write_seconds"] == pytest.approx(expected)
    assert "no budget would save memory: all that could move, 1.25 MiB, fits" in shown
    page = (tmp_path / "out.html").read_text()
    assert "backstash profile --disk" in page and '"0.1"' in page


@takes_long
def test_a_script_that_ends_first_keeps_its_status(tmp_path: Path) -> None:
    done = profile(tmp_path, TRAIN + "\nsys.exit(3)", "2", options=("--steps", "5"))
    assert done.returncode == 3
    assert "end of the script\ncleaned up\n" in done.stdout
    assert "step 2 of 2, which held most" in done.stdout
    assert "; the script ended first: exit 3; nothing was moved" in done.stdout


def test_without_an_optimizer_all_is_one_report(tmp_path: Path) -> None:
    source = """
        import torch
        x = torch.randn(300, 300, requires_grad=True)
        for _ in range(3):
            x.exp().sum().backward()
        raise ValueError("no")
        """
    done = profile(tmp_path, source)
    assert done.returncode == 1 and done.stderr.endswith("ValueError: no\n")
    assert done.stderr.count("File ") == 1  # the script's own frame
    assert "backstash profile: the whole script (ValueError); nothing was moved" in done.stdout
    assert "note: no optimizer has stepped" in done.stdout
    assert "1.03 MiB held for backward" in done.stdout and "at most 352 KiB at once" in done.stdout


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (
            "import torch\nprint('ran')",
            "nothing was saved for backward in the main thread (finished)",
        ),
        ("print('ran')", "the script did not import torch"),
    ],
)
def test_a_script_without_training_is_reported(tmp_path: Path, source: str, said: str) -> None:
    done = profile(tmp_path, source)
    assert (done.returncode, done.stdout) == (0, "ran\n")
    assert said in done.stderr and done.stderr.count("\n") == 1


@takes_long
def test_a_script_with_hooks_of_its_own_is_profiled_too(tmp_path: Path) -> None:
    source = TRAIN.replace(
        "try:",
        "import contextlib\nstack = contextlib.ExitStack()\n"
        "stack.enter_context(torch.autograd.graph.save_on_cpu())\ntry:",
    )
    done = profile(tmp_path, source, "9", options=("--steps", "1"))
    assert (done.returncode, done.stderr) == (0, "")
    assert "step 1 of 1, " in done.stdout and "640 KiB" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--steps", "0", "x.py"], "'0' is not a number of steps; allowed: 1, 2, 3, ..."),
        (["--steps", "two", "x.py"], "'two' is not a number of steps"),
        (["--keep", "1", "x.py"], "unknown argument '--keep'; options: --help, --steps"),
        (["--disk", "", "x.py"], "'' is not a directory"),
        (["--json", "/no/such/place/x", "x.py"], "cannot be written"),
    ],
)
def test_mistakes_are_one_line(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["profile", *arguments]) == 2
    shown = capsys.readouterr()
    assert said in shown.err and shown.err.startswith("backstash profile: ")
    assert shown.err.count("\n") == 1 and shown.out == ""


SPEED = DiskSpeed(1 << 20, 1e9, 2e9, 4e9, direct=True, unnamed=True, notes=())
DISK, HOST = 'Stash(disk="/a b")', 'Stash(host="auto")'


def budget(name: str, keep: int, memory: int, code: str = DISK) -> Budget:
    return Budget(name, keep, (1 << 30) - keep, memory, code)


EVERYTHING = budget("everything", 1 << 30, 1 << 30, "")


@pytest.mark.parametrize(("code", "shown"), [(DISK, True), (HOST, False)])
def test_the_disk_s_speed_is_shown_where_a_budget_would_use_it(code: str, shown: bool) -> None:
    nothing = budget("nothing", 0, 0, code)
    lines = _profile_text._costs([EVERYTHING, nothing], "/scratch", SPEED)
    assert ("/scratch writes 2.00 GB/s" in "\n".join(lines)) == shown
    seconds = _profile_text.seconds_of(nothing, SPEED)
    assert seconds == ((2**30 / 2e9, 2**30 / 4e9) if shown else (None, None))


def test_a_budget_is_advised_in_one_number_where_one_would_save() -> None:
    def advised(memory: int, code: str) -> str:
        budgets = [EVERYTHING, budget("nothing", 0, memory, code)]
        lines = [
            *_profile_text._one_number(budgets, "/a b", "train.py"),
            *_profile_text._costs(budgets, "/a b", None),
        ]
        return "\n".join(lines)

    text = advised(1 << 20, DISK)
    assert text.startswith("in one number, the most memory that the process may take")
    assert text.splitlines()[3:5] == ['  Stash(budget=SIZE, disk="/a b")', ""]
    assert "backstash run --budget SIZE --disk '/a b' train.py" in text
    assert DISK not in text
    assert "budget=SIZE" not in advised(1 << 30, DISK)
    text = advised(1 << 20, HOST)
    assert "the device's tensors may take" in text and HOST in text


def test_budgets_that_save_are_shown_in_a_table() -> None:
    half = budget("half", 1 << 29, 600 << 20)
    lines = _profile_text._costs([EVERYTHING, half], "/d", None)
    assert lines[0] == "what keep= would cost instead:" and "half (512 MiB)" in lines[3]
    assert lines[3].split()[-4:] == ["not", "measured", "not", "measured"]
    (line,) = _profile_text._costs([EVERYTHING, budget("nothing", 0, 1 << 30)], "/d", None)
    assert line.startswith("no budget would save memory: all that could move, 1.00 GiB, fits")
