"""``%load_ext backstash``: its cell magics, and the notebook that shows the library round."""

import atexit
import json
from pathlib import Path

import pytest
import torch

from backstash import Stash
from backstash.report import SavedReport

interactiveshell = pytest.importorskip(
    "IPython.core.interactiveshell", reason="IPython is not installed"
)
traitlets = pytest.importorskip("traitlets.config")
TOUR = Path(__file__).parents[1] / "docs/tour.ipynb"


@pytest.fixture
def shell(tmp_path, monkeypatch):
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.chdir(tmp_path)
    config = traitlets.Config()
    config.HistoryManager.enabled = False  # no thread, no database
    made = interactiveshell.InteractiveShell(config=config)
    made.run_line_magic("load_ext", "backstash")
    yield made
    made.atexit_operations()
    atexit.unregister(made.atexit_operations)
    made.restore_sys_module_state()


def run(shell, source):
    """What a cell shows; what it raises, it raises here."""
    shell.run_cell(source).raise_error()
    return shell.user_ns["_oh"].get(
        0
    )  # not ``_``: IPython leaves that alone where builtins has one


def test_a_cell_under_a_stash(shell, tmp_path):
    run(shell, "import torch\nx = torch.ones(1000, 1000, requires_grad=True)")
    shown = run(
        shell, f"%%stash --disk {tmp_path} --name held\nz = x * 2\nloss = (z.exp() + z).sum()"
    )
    assert isinstance(shown, Stash) and shown is shell.user_ns["held"]
    assert shown.stats().eligible_bytes == 4_000_000 and shown.stats().blocks == 1
    run(shell, "loss.backward()")  # in a later cell, outside the stash
    assert torch.equal(shell.user_ns["x"].grad, (torch.full((1000, 1000), 2.0).exp() + 1) * 2)
    assert shown.stats().blocks == 0
    shown.close()


def test_keep_alone_has_the_systems_directory_below(shell):
    run(shell, "import torch\nx = torch.ones(1000, 1000, requires_grad=True)")
    stash = run(shell, "%%stash --keep 1GiB\nloss = (x * 2).exp().sum()")
    assert stash.stats().keep_bytes == 4_000_000
    run(shell, "loss.backward()")
    stash.close()


def test_what_a_cell_raises_leaves_no_hooks(shell, tmp_path, capsys):
    run(shell, f"%%stash --disk {tmp_path}\n1 / 0")
    assert "ZeroDivisionError" in capsys.readouterr().out
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
    shell.user_ns["stash"].close()


@pytest.mark.parametrize(
    ("magic", "message"),
    [
        ("%%stash --kep 1", "unrecognized arguments: --kep 1; usage: %%stash"),
        ("%%stash --name 1x", "the name of a variable"),
        ("%%stash --keep much", "much"),
        ("%%saved_report 1 + 1", "allowed is an nn.Module"),
    ],
)
def test_a_mistake_is_said(shell, capsys, magic, message):
    result = shell.run_cell(f"{magic}\npass")
    assert message in str(result.error_in_exec)


def test_a_report_of_a_cell(shell):
    run(shell, "import torch\nmodel = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh())")
    saved = run(shell, "%%saved_report model\nloss = model(torch.ones(4, 8)).sum()")
    assert isinstance(saved, SavedReport)
    assert [(row.module, row.unique_bytes) for row in saved.rows] == [("0", 128), ("1", 128)]
    assert run(shell, "%%saved_report\nmodel(torch.ones(4, 8)).sum()").rows


def test_the_tour_runs(shell):
    cells = json.loads(TOUR.read_text(encoding="utf-8"))["cells"]
    sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert len(sources) > 5
    for source in sources:
        run(shell, source)
    assert any("<svg" in str(cell.get("outputs")) for cell in cells), "no picture"
