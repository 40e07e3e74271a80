"""In a control group with less memory than a step takes, `backstash run` trains and plain PyTorch is killed."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from bench._limit import limited_group

MIB = 1 << 20
TRAIN = """
import sys
import torch
from torch import nn
torch.manual_seed(0)
torch.set_num_threads(1)
model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.LeakyReLU()) for _ in range(12)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(5):
    optimizer.zero_grad()
    loss = model(torch.randn(65536, 64)).square().mean()
    loss.backward()
    optimizer.step()
    print(loss.item().hex(), flush=True)
(peak,) = (line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM'))
print(int(peak) >> 10, file=sys.stderr)  # getrusage's has that of the process that started this one
"""


def start(
    arguments: Sequence[str], directory: Path, prefix: Sequence[str] = ()
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*prefix, sys.executable, *arguments],
        cwd=directory,
        # glibc's own threshold grows, after which the peak of plain differs by 300 MiB from run to run.
        env=os.environ | {"TMPDIR": str(directory), "MALLOC_MMAP_THRESHOLD_": str(MIB)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_what_does_not_fit_runs_instead_of_dying(tmp_path: Path) -> None:
    """Without any option. A step saves 384 MiB, for all of which there is no room: there are 240 MiB less than
    plain takes, of which the group may not count what is mapped of libraries."""
    (tmp_path / "train.py").write_text(TRAIN)
    figures = tmp_path / "run.json"
    plain = start(["train.py"], tmp_path)
    limit_bytes = (int(plain.stderr.split()[-1]) - 240) * MIB
    with limited_group(limit_bytes) as group:
        if not group:
            pytest.skip(group.reason)
        killed = start(["train.py"], tmp_path, group.prefix)
        assert killed.returncode != 0 and killed.stdout != plain.stdout
        run = ["-m", "backstash", "run", "--json", str(figures), "train.py"]
        done = start(run, tmp_path, group.prefix)
    assert done.returncode == 0, done.stderr
    assert done.stdout == plain.stdout
    plan = json.loads(figures.read_text())["plan"]
    assert plan["state"] == "planned", done.stderr
    # The process has in memory what is mapped of libraries, some 50 MiB, which the group may not count.
    most = limit_bytes + 100 * MIB
    assert plan["measured"] is None or plan["measured"]["peak_bytes"] <= most
