"""One of two processes: `distributed_worker.py RANK STORE_FILE DIRECTORY`. Fails by an assertion."""

import sys
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import distributed_pipelines
import distributed_variants
from backstash import Stash
from backstash.testing import TwinDevice, stash_on

WIDTH = 64


def plain():
    torch.manual_seed(0)
    blocks = [
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH)) for _ in range(3)
    ]
    return nn.Sequential(*blocks)


def sharded():
    model = plain()
    mesh = init_device_mesh("cpu", (2,))
    for block in model:
        fully_shard(block, mesh=mesh, reshard_after_forward=True)
    return fully_shard(model, mesh=mesh, reshard_after_forward=True)


def gradients(model, rank, hold):
    """Of three steps that accumulate."""
    model.zero_grad()
    generator = torch.Generator().manual_seed(rank)
    for _ in range(3):
        x = torch.randn(32, WIDTH, generator=generator)
        with hold:
            loss = model(x).square().mean()
        loss.backward()
    grads = [parameter.grad for parameter in model.parameters()]
    return [getattr(grad, "_local_tensor", grad).clone() for grad in grads]


def check_budgets(model, rank, directory, true):
    """Each rank has a plan of its own: within a budget that cannot be kept, and within one that all fits in."""
    stash = Stash(budget={0: "1MiB", 1: "64GiB"}, disk=directory, min_bytes=0)
    for _ in range(4):
        mine = gradients(model, rank, stash)
        assert all(map(torch.equal, mine, true))
    assert stash.plan.state == ("too small", "left alone")[rank], str(stash.plan)
    stash.close()


def main():
    rank, store, directory = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    for make in (lambda: DistributedDataParallel(plain()), sharded):
        model = make()
        true = gradients(model, rank, nullcontext())
        for stash in (
            Stash(disk=directory, min_bytes=0, inflight=0),
            stash_on(TwinDevice(chance=0.3), host="1MiB", disk=directory, min_bytes=0, inflight=0),
        ):
            for _ in range(2):
                mine = gradients(model, rank, stash)
                assert all(map(torch.equal, mine, true)), make
            assert stash.stats().written_bytes > 3 * 32 * WIDTH * 4
            stash.close()
        check_budgets(model, rank, directory, true)
    distributed_variants.check(rank, directory)
    distributed_pipelines.check(rank, directory)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
