"""One of two processes that train by transformers' Trainer with DDP, plainly and then under a stash."""

# ruff: noqa: E402  what the processes are given before torch is imported
import os
import sys
import tempfile

rank, port = int(sys.argv[1]), sys.argv[2]
os.environ |= {
    "RANK": str(rank),
    "LOCAL_RANK": str(rank),
    "WORLD_SIZE": "2",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": port,
    "HF_HUB_OFFLINE": "1",
    "ACCELERATE_USE_CPU": "1",
}

import torch

from backstash import Stash
from backstash.integrations.transformers import prepare_trainer
from test_transformers import trainer_of


def trained(directory, stash):
    trainer = trainer_of(directory, ddp_backend="gloo", ddp_find_unused_parameters=False)
    if stash is not None:
        prepare_trainer(trainer, stash)
    trainer.train()
    assert isinstance(trainer.model_wrapped, torch.nn.parallel.DistributedDataParallel)
    return {name: each.detach().clone() for name, each in trainer.model.named_parameters()}


with tempfile.TemporaryDirectory() as directory:
    plain = trained(directory, None)
    stash = Stash(disk=directory, min_bytes=1024)
    held = trained(directory, stash)
    assert plain.keys() == held.keys()
    for name, each in held.items():
        assert torch.equal(each, plain[name]), name
    assert stash.stats().written_bytes > 10_000 and stash.stats().blocks == 0
    stash.close()
torch.distributed.destroy_process_group()
print("equal")
