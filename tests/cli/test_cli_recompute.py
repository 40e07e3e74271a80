"""``--recompute PATTERN``: modules of a script's model that may run again."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from backstash import Stash
from backstash.cli._recompute import RecomputedModules, matching, recompute_of
from backstash.errors import UsageError

SCRIPT = """
import torch
from torch import nn
torch.manual_seed(0)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(300, 300)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(300, 300), nn.GELU(), nn.Dropout(0.5)) for _ in range(3)
        )
    def forward(self, x):
        x = self.head(x)
        for block in self.blocks:
            x = block(x)
        return x

model = Model()
for _ in range(9):
    loss = model(torch.randn(300, 300)).square().mean()
    loss.backward()
    print(loss.item())
"""


def run(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200)


def test_modules_are_found_by_their_path_from_the_outermost_on() -> None:
    net = nn.Module()
    net.layers = nn.ModuleList(nn.Sequential(nn.Linear(2, 2)) for _ in range(2))
    wrapped = nn.Module()
    wrapped.module = net
    assert [path for path, _ in matching(net, ["layers.*"])] == ["layers.0", "layers.1"]
    assert [path for path, _ in matching(wrapped, ["layers.*"])] == [
        "module.layers.0",
        "module.layers.1",
    ]
    assert [path for path, _ in matching(net, ["*.1", "layers.0"])] == ["layers.0", "layers.1"]
    assert [*matching(net, ["blocks.*"])] == []
    assert [path for path, _ in matching(net, ["*"])] == ["layers.0", "layers.1"]


def test_the_hook_that_looks_is_gone_once_modules_are_found() -> None:
    net = nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Linear(8, 8))
    other = nn.Linear(8, 8)
    stash = Stash(min_bytes=0)
    found = RecomputedModules(stash, ["0"])
    with stash:
        other(torch.ones(4, 8))
        assert found.note
        net(torch.ones(4, 8)).sum().backward()
    assert found.found == ["0"] and not found.note
    assert stash.stats().recomputed_bytes, "no hook of another's was there"
    for module in net:
        module._forward_pre_hooks.clear()
        module._forward_hooks.clear()
    stash.close()


def test_without_a_budget_they_run_again_although_everything_fits(tmp_path: Path) -> None:
    ended = run(
        tmp_path, "-m", "backstash", "run", "--recompute", "*", "--json", "run.json", "train.py"
    )
    assert ended.returncode == 0, ended.stderr
    figures = json.loads((tmp_path / "run.json").read_text())
    assert figures["stats"]["recomputed_bytes"] and not figures["stats"]["written_bytes"]
    assert figures["settings"]["budget"] is None and figures["settings"]["keep"] is None


def test_a_script_s_modules_run_again(tmp_path: Path) -> None:
    plain = run(tmp_path, "train.py")
    options = ("--keep", "1GiB", "--disk", ".", "--json", "run.json", "--recompute", "blocks.*")
    done = run(tmp_path, "-m", "backstash", "run", *options, "train.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout == plain.stdout
    assert json.loads((tmp_path / "run.json").read_text())["stats"]["recomputed_bytes"] > 0


def test_a_pattern_that_nothing_matches_is_said(tmp_path: Path) -> None:
    options = ("--keep", "1GiB", "--disk", ".", "--recompute", "layers.*")
    done = run(tmp_path, "-m", "backstash", "run", *options, "train.py")
    assert done.returncode == 0, done.stderr
    assert "no module that ran has a path that matches 'layers.*'" in done.stderr


def test_plans_take_them_into_account(tmp_path: Path) -> None:
    options = ("--disk", ".", "--trace", "step.json", "--recompute", "blocks.*")
    done = run(tmp_path, "-m", "backstash", "plan", *options, "train.py")
    assert done.returncode == 0, done.stderr
    regions = json.loads((tmp_path / "step.json").read_text())["regions"]
    assert [(each["name"], each["index"]) for each in regions] == [
        ("blocks.*", at) for at in range(3)
    ]
    refused = run(tmp_path, "-m", "backstash", "plan", "--fake", "--recompute", "x", "train.py")
    assert refused.returncode == 2 and "--recompute with --fake" in refused.stderr


def test_off():
    assert recompute_of([]) == recompute_of(["blocks.*"]) == "auto"
    assert recompute_of(["off"]) is False
    with pytest.raises(UsageError, match="--recompute off with"):
        recompute_of(["off", "blocks.*"])
