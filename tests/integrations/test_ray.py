"""Ray Train's workers under a stash: the losses are plain PyTorch's. Needs `pip install 'backstash[ray]'`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="pip install 'backstash[ray]'")

EXAMPLE = Path(__file__).parents[2] / "examples" / "ray_train.py"


@pytest.mark.timeout(300)  # each of the two runs starts a cluster
def test_two_workers_of_ray_have_plain_s_losses(tmp_path):
    environment = {**os.environ, "HOME": str(tmp_path), "RAY_USAGE_STATS_ENABLED": "0"}
    disk = tmp_path / "disk"
    disk.mkdir()
    outputs = [
        subprocess.run(
            [sys.executable, EXAMPLE, "--tiny", *options],
            env=environment,
            capture_output=True,
            text=True,
            timeout=140,
            check=True,
        ).stdout.splitlines()
        for options in (["--plain"], ["--disk", str(disk)])
    ]
    plain, held = outputs
    # The launcher's ranks are known from the environment that Ray makes.
    assert plain[0] == held[0] == "2 ranks, 2 on this machine"
    assert plain[1] == held[1] and plain[1].startswith("loss 0x")
    assert held[2].startswith("written 2."), held
    assert not list(disk.iterdir())
