"""Two processes under DDP and under FSDP2, on gloo: see distributed_worker.py."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

WORKER = Path(__file__).with_name("distributed_worker.py")


@pytest.mark.skipif(
    not (torch.distributed.is_available() and torch.distributed.is_gloo_available()),
    reason="torch was built without gloo",
)
def test_ddp_and_fsdp2_have_plain_s_gradients(tmp_path):
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    workers = [
        subprocess.Popen(
            [sys.executable, str(WORKER), str(rank), str(tmp_path / "store"), str(tmp_path)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [worker.communicate(timeout=100)[0] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    for worker, output in zip(workers, outputs, strict=True):
        assert worker.returncode == 0, output
    assert {path.name for path in tmp_path.iterdir()} <= {"store"}
