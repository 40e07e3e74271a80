"""``backstash plan``: a table of budgets from a few real steps."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from backstash.cli import main
from backstash.cli._plan_session import budgets_of, table
from backstash.plan import Plan, PlannedClass, StepFigures

MIB = 1 << 20

STEPS = """
import sys, torch
from torch import nn
model = nn.Sequential(*(nn.Sequential(nn.Linear(400, 400), nn.Tanh()) for _ in range(4)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(int(sys.argv[1])):
    optimizer.zero_grad()
    model(torch.randn(400, 400)).square().mean().backward()
    optimizer.step()
    print("step", step)
print("end")
"""


def planned(tmp_path: Path, steps: int, *options: str) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "train.py"
    script.write_text(STEPS)
    command = [
        sys.executable,
        "-m",
        "backstash",
        "plan",
        "--disk",
        ".",
        *options,
        str(script),
        str(steps),
    ]
    return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)


def test_a_script_is_planned_for_and_ended(tmp_path: Path) -> None:
    done = planned(tmp_path, 1000, "--json", "plans.json", "--trace", "trace.json")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "step 3" in done.stdout
    assert "end" not in done.stdout.splitlines()
    assert "everything fits" in done.stdout
    figures = json.loads((tmp_path / "plans.json").read_text())
    plans = [Plan.from_dict(each) for each in figures["plans"]]
    assert [each.budget_bytes for each in plans] == sorted({each.budget_bytes for each in plans})
    assert plans[-1].state == "left alone"
    for plan in plans:
        assert plan.predicted is not None
        assert plan.predicted.peak_bytes <= plan.budget_bytes or plan.state == "too small"
    trace = json.loads((tmp_path / "trace.json").read_text())
    assert Plan.from_trace(trace, plans[-1].budget_bytes).classes == plans[-1].classes


def test_a_script_that_ends_too_soon_is_told_so(tmp_path: Path) -> None:
    done = planned(tmp_path, 2)
    assert done.returncode == 0
    assert done.stdout.splitlines()[-1] == "end"
    assert done.stderr == (
        "backstash plan: the script ended before its fifth step had begun (finished): nothing was measured\n"
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--budget", "4GiB,half", "s.py"], "allowed: an int of bytes"),
        (["--disk", "missing", "s.py"], "missing"),
        (["missing.py"], "missing.py"),
    ],
)
def test_a_mistake_is_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    words: str,
) -> None:
    (tmp_path / "s.py").write_text("")
    monkeypatch.chdir(tmp_path)
    assert main(["plan", *arguments]) == 2
    told = capsys.readouterr().err
    assert told.startswith("backstash plan: ")
    assert told.count("\n") == 1
    assert words in told


def test_the_table_names_what_cannot_be_kept() -> None:
    each = PlannedClass("m #0 1.00 MiB", 4, 4 * MIB, (("disk", 3), ("keep", 1)), 0.0, "")
    figures = StepFigures(100 * MIB, 1.0)
    small = Plan(
        50 * MIB,
        "too small",
        (each,),
        figures,
        plain=StepFigures(200 * MIB, 1.0),
        smallest_budget_bytes=90 * MIB,
    )
    text = table("train.py", [small])
    assert "1.00 MiB   3.00 MiB  cannot be kept; 90 MiB can" in text
    assert budgets_of(small) == [96 * MIB, 128 * MIB, 160 * MIB, 192 * MIB, 208 * MIB]
