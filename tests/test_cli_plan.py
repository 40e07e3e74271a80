"""``backstash plan``: a table of budgets from a few real steps."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from backstash.cli import main
from backstash.cli._plan_session import budgets_of, table
from backstash.errors import UsageError
from backstash.fake import FakeRun
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
    assert "step 2" in done.stdout, "three steps are measured; the plan is ready one or two later"
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


CHAIN = """
import torch
from torch import nn
class Sine(nn.Module):
    def forward(self, x):
        return x.sin()
weight = nn.Parameter(torch.ones(1 << 18))
net = nn.Sequential(*(Sine() for _ in range(16)))
optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
for _ in range(5):
    optimizer.zero_grad()
    loss = net(weight * 2).sum()
    loss.backward()
    optimizer.step()
    print("loss", loss.item())
"""


def fake(tmp_path: Path, script: str, *options: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "chain.py").write_text(script)
    command = [sys.executable, "-m", "backstash", "plan", "--fake", *options, "chain.py"]
    return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)


def test_a_fake_run_counts_the_bytes_of_tensors(tmp_path: Path) -> None:
    """Each of 16 sines saves its input, 1 MiB; there are a weight and its momentum besides, and in backward up
    to three temporaries."""
    done = fake(tmp_path, CHAIN, "--budget", "64MiB,12MiB,1MiB", "--json", "plans.json")
    assert done.returncode == 0 and done.stderr == ""
    assert done.stdout.splitlines()[0] == "loss 1.0", (
        "the second step ends the script before its print"
    )
    figures = json.loads((tmp_path / "plans.json").read_text())
    roomy, tight, none = (Plan.from_dict(each) for each in figures["plans"])
    assert roomy.state == "left alone" and tight.state == "planned" and none.state == "too small"
    assert roomy.predicted is not None and tight.predicted is not None
    assert 2 + 16 <= roomy.predicted.peak_bytes / MIB <= 2 + 16 + 3.1
    assert 2 <= (none.smallest_budget_bytes or 0) / MIB <= 2 + 8
    assert tight.predicted.peak_bytes <= 12 * MIB
    assert sum(each.nbytes for each in roomy.classes) == 16 * MIB
    assert figures["asked"] == {"chain.py:15": 1}
    assert "chain.py:15" in done.stdout and "everything fits" in done.stdout


def test_a_fake_run_of_what_no_machine_holds(tmp_path: Path) -> None:
    """256 TiB a sine."""
    script = CHAIN.replace("1 << 18", "1 << 46")
    done = fake(tmp_path, script, "--budget", "6000TiB", "--trace", "step.json")
    assert done.returncode == 0, done.stderr
    assert "everything fits" in done.stdout
    trace = json.loads((tmp_path / "step.json").read_text())
    assert Plan.from_trace(trace, "6000TiB").plain.peak_bytes >= 18 * (1 << 48)


def test_a_fake_run_says_what_it_cannot_do(tmp_path: Path) -> None:
    done = fake(tmp_path, CHAIN.replace("loss.item()", "loss.nonzero().tolist()"))
    assert done.returncode == 1
    assert "DynamicOutputShapeException" in done.stderr
    assert "shapes that depend on values" in done.stderr.splitlines()[-1]


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator here")
def test_a_fake_run_on_a_device_that_is_not_here(tmp_path: Path) -> None:
    """Autograd would end the process."""
    done = fake(tmp_path, CHAIN.replace("weight * 2", "torch.ones(9, device='cuda')"))
    assert done.returncode == 1
    assert "let the program use the CPU" in done.stderr


def test_a_fake_run_ends_where_its_context_does() -> None:
    with FakeRun() as run:
        weight = torch.ones(1 << 20, requires_grad=True)
        with pytest.raises(UsageError, match="no step has ended"):
            _ = run.trace
        (weight.sin() * 2).exp().sum().backward()
        run.mark()
    assert torch.ones(2).sum().item() == 2.0, "values again"
    assert sum(block["nbytes"] for block in run.trace["blocks"]) == 1 << 22
    assert run.asked == {}
