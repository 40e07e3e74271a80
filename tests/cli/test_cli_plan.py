"""``backstash plan``: a table of budgets from a few real steps."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from backstash.cli import main
from backstash.cli._advice import advice
from backstash.cli._plan_page import plan_section
from backstash.cli._plan_table import budgets_of, notes_of, table
from backstash.cli._verdict import verdict
from backstash.cli.plan import _parser
from backstash.errors import UsageError
from backstash.fake import FakeRun
from backstash.plan import Plan, PlannedClass, StepFigures
from long_tests import takes_long

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


def test_a_script_is_planned_for_and_ended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
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
    monkeypatch.chdir(tmp_path)
    assert main(["plan", "--trace", "trace.json", "--json", "again.json"]) == 0
    lines = done.stdout.splitlines()
    outcome = capsys.readouterr()
    printed = outcome.out.splitlines()
    assert "no script was given, and nothing was run" in outcome.err
    assert printed[0] == f"backstash plan --trace {tmp_path}/trace.json"
    assert printed[1:] == lines[-len(printed) + 1 :], "the same table"
    again = json.loads((tmp_path / "again.json").read_text())["plans"]
    assert [each["classes"] for each in again] == [each["classes"] for each in figures["plans"]]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--trace", "no.json"], "allowed: a file that `backstash plan --trace FILE SCRIPT` wrote"),
        (["--trace", "plan.json"], "is not the trace of a step"),
        (["--trace", "plan.json", "--fake"], "allowed with it: --budget and --json"),
        (["--trace", "plan.json", "--disk", "."], "allowed with it: --budget and --json"),
        (["--trace", "plan.json", "--json", "plan.json"], "give another FILE"),
    ],
)
def test_a_step_that_cannot_be_read_is_one_line(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    options: list[str],
    words: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plan.json").write_text("{}")
    assert main(["plan", *options]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and words in error


def test_a_step_of_an_accelerator_is_planned_for_elsewhere(tmp_path: Path) -> None:
    with FakeRun() as run:
        for _ in range(2):
            torch.ones(512, 512, requires_grad=True).exp().sin().sum().backward()
            run.mark()
    path = tmp_path / "step.json"
    path.write_text(json.dumps({**run.trace, "runs_ahead": True}))
    plan = Plan.from_trace(path, "1GiB")
    assert plan.device == "accelerator"
    assert "the tensors on accelerator" in notes_of(plan, plan)[0]


def test_a_script_that_ends_too_soon_to_be_measured_is_reported(tmp_path: Path) -> None:
    done = planned(tmp_path, 2)
    assert done.returncode == 0
    assert done.stdout.splitlines()[-1] == "end"
    assert done.stderr == (
        "backstash plan: the script ended before its fourth step had begun (finished): nothing was measured\n"
    )


def test_budgets_may_be_given_one_by_one() -> None:
    given = _parser().read(["--budget", "4GiB,6GiB", "--budget", "8GiB"])
    assert given.budget == [4 << 30, 6 << 30, 8 << 30]
    assert _parser().read([]).budget is None


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
    assert notes_of(small, small)[-1] == "the smallest budget that can be kept: 90 MiB"
    head, row = table([small])
    line = "1.00 MiB   3.00 MiB        0 B        0 B  cannot be kept; 90 MiB can"
    assert line in row
    mixed = replace(each, choices=(("disk", 1), ("recompute", 2), ("pack", 1)))
    head, row = table([replace(small, classes=(mixed,))])
    assert " 0 B   1.00 MiB   2.00 MiB   1.00 MiB  cannot" in row
    left = replace(each, choices=(("disk", 3), ("left", 1)))
    assert table([replace(small, classes=(left,))])[1] == table([small])[1]
    assert head.split()[2:] == ["step", "bound", "stays", "moves", "recomputed", "packed"]
    head, row = table([small], has_times=False)
    assert "step" not in head and "1.000 s" not in row
    assert budgets_of(small) == [96 * MIB, 128 * MIB, 160 * MIB, 192 * MIB, 208 * MIB]


def test_the_page_s_plan_shows_measured_values_next_to_predictions() -> None:
    runs = (("disk", 2), ("recompute", 1), ("keep", 1), ("left", 2))
    each = PlannedClass("blocks.* #0 1.00 MiB", 6, 6 * MIB, runs, 0.5, "cheapest")
    made = Plan(
        200 * MIB,
        "planned",
        (each,),
        StepFigures(150 * MIB, 1.0),
        StepFigures(153 * MIB, 0.9),
        StepFigures(200 * MIB, 0.8),
        StepFigures(400 * MIB, 0.7),
    )
    section = plan_section(made.as_dict())
    assert [row[1:] for row in section["figures"]["rows"]] == [
        [400 * MIB, 0.7],
        [150 * MIB, 1.0],
        [153 * MIB, 0.9],
        [200 * MIB, 0.8],
    ]
    assert section["note"] == "Within a budget of 200 MiB for the memory of the process."
    (row,) = section["classes"]["rows"]
    held = "2 on disk, 1 to be recomputed, 1 kept, 2 left in place"
    assert row[:4] == [each.name, 6, 6 * MIB, held]
    sums = {part["name"]: part["bytes"] for part in section["parts"]}
    assert sums == {"kept": 3 * MIB, "on disk": 2 * MIB, "to be recomputed": MIB}

    def note(state: str, **changed: object) -> str:
        return str(plan_section(replace(made, state=state, **changed).as_dict())["note"])

    assert note("too small", smallest_budget_bytes=210 * MIB).startswith(
        "A budget of 200 MiB cannot be kept: the smallest that can is about 210 MiB."
    )
    assert "too few steps" in note("measuring", predicted=None, measured=None)
    assert note("loaded", measured=None) == "A plan from a file, for a budget of 200 MiB."
    assert "Everything fits" in note("left alone", predicted=None)


@pytest.mark.parametrize("state", ["left alone", "too small", "planned"])
def test_a_run_within_a_budget_is_advised_about_its_budget(state: str) -> None:
    made = Plan(200 * MIB, state, plain=StepFigures(MIB, 1.0), smallest_budget_bytes=210 * MIB + 1)
    settings = {"budget": 200 * MIB, "plan": None, "keep": 0, "host": "auto", "disk": "/d"}
    settings |= {"min_bytes": "auto", "inflight": "auto", "prefetch": "auto"}
    figures = {
        "plan": made.as_dict(),
        "settings": settings | {"max_bytes": None},
        "stats": {"stall_seconds": 1.0, "written_bytes": 1, "notes": []}
        | {"recomputed_bytes": 0, "packed_bytes": 0},
        "seconds": 2.0,
        "allocator": {"kind": "tcmalloc"},
        "script": ["train.py", "a b"],
    }
    first, last = advice(figures)
    by_state = {"too small": "--budget 211MiB"}
    assert first.code == by_state.get(state, "backstash plan train.py 'a b'")
    assert last.code == """Stash(budget="200MiB", disk='/d')"""


def test_the_verdict_says_where_a_budget_was_exceeded() -> None:
    made = Plan(200 * MIB, "planned", (), plain=StepFigures(400 * MIB, 1.0))
    figures = {
        "plan": made.as_dict(),
        "stats": {"stall_seconds": 0.0, "host_peak_bytes": 0, "disk_peak_bytes": 0},
        "devices": {},
        "resident": {"peak_bytes": 190 * MIB},
        "steps": {"median_seconds": None},
        "seconds": 1.0,
    }
    assert "peak 190 MiB, within the budget of 200 MiB" in verdict(figures, None)
    figures["resident"] = {"peak_bytes": 210 * MIB}
    said = (
        "peak 210 MiB, over the budget of 200 MiB; everything in place takes an estimated 400 MiB"
    )
    assert said in verdict(figures, None)
    figures["resident"] = {"peak_bytes": 200 * MIB + 1024}
    assert "peak 200 MiB, over the budget of 200 MiB by 1.00 KiB;" in verdict(figures, None)
    figures["resident"] = {"peak_bytes": 210 * MIB}
    figures["plan"] = replace(made, measured=StepFigures(199 * MIB, 1.0)).as_dict()
    said = (
        "over the budget of 200 MiB, which a step keeps with a peak of 199 MiB: the first steps, or"
    )
    assert said in verdict(figures, None)


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


@takes_long
def test_a_fake_run_counts_the_bytes_of_tensors(tmp_path: Path) -> None:
    """Each of 16 sines saves its input, 1 MiB; there are also a weight and its momentum, and in backward up
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


@takes_long
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


@takes_long
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
