"""Two processes under DDP and under FSDP2, on gloo: see distributed_worker.py."""

from pathlib import Path

import pytest
import torch

from two_processes import run_two

WORKER = Path(__file__).with_name("distributed_worker.py")


@pytest.mark.skipif(
    not (torch.distributed.is_available() and torch.distributed.is_gloo_available()),
    reason="torch was built without gloo",
)
def test_ddp_and_fsdp2(tmp_path: Path) -> None:
    for output in run_two(WORKER, tmp_path / "store"):
        assert "DDP and FSDP2 are as expected" in output
