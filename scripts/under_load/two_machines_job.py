"""What each process of `soak_two_machines.py` runs: DDP, FSDP2 and a pipeline, without a word of backstash.

Rank 0's last line has a digest of the gradients of all ranks.
"""

import hashlib
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.parallel import DistributedDataParallel

WIDTH, ROWS, STEPS = 256, 1024, 3


def block() -> nn.Module:
    return nn.Sequential(
        nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.LayerNorm(WIDTH)
    )


def blocks(seed: int, count: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(*(block() for _ in range(count)))


def trained(model: nn.Module, rank: int) -> nn.Module:
    generator = torch.Generator().manual_seed(rank)
    for _ in range(STEPS):
        model(torch.randn(ROWS, WIDTH, generator=generator)).square().mean().backward()
    return model


def sharded() -> nn.Module:
    model, mesh = blocks(0, 3), init_device_mesh("cpu", (dist.get_world_size(),))
    for each in model.children():
        fully_shard(each, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def pipeline(rank: int, world: int) -> nn.Module:
    part = blocks(rank, 1)
    stage = PipelineStage(part, rank, world, torch.device("cpu"))
    schedule = Schedule1F1B(stage, world, loss_fn=nn.functional.mse_loss)
    for step in range(STEPS):
        x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step))
        given = (x,) if rank == 0 else ()
        schedule.step(*given, **({"target": x} if rank == world - 1 else {}))
    return part


def main() -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    models = [
        trained(DistributedDataParallel(blocks(0, 3)), rank),
        trained(sharded(), rank),
        pipeline(rank, world),
    ]
    digest = hashlib.sha256()
    for model in models:
        for parameter in model.parameters():
            grad = getattr(parameter.grad, "_local_tensor", parameter.grad)
            digest.update(grad.numpy().tobytes())
    found: list[object] = [None] * world
    dist.all_gather_object(found, (os.environ["GROUP_RANK"], digest.hexdigest()))
    if rank == 0:
        machines = len({machine for machine, _ in found})
        every = hashlib.sha256("".join(each for _, each in found).encode()).hexdigest()
        print(f"machines {machines} ranks {world} gradients {every}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
