"""One of several: `tensor_parallel_worker.py RANK STORE_FILE DIRECTORY WORLD_SIZE`. Fails by an assertion."""

import sys
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

from backstash import Stash
from backstash.testing import TwinDevice, stash_on

WIDTH, TOKENS, WORDS = 32, 16, 64


class Block(nn.Module):
    def __init__(self, checkpointed):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)
        self.checkpointed = checkpointed

    def forward(self, x):
        if self.checkpointed:
            return x + checkpoint(self.mlp, x, use_reentrant=False)
        return x + self.mlp(x)

    def mlp(self, x):
        return self.down(nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, checkpointed=False):
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block(checkpointed) for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens):
        x = self.words(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def parallel(mesh, checkpointed=False):
    """Sequence and tensor parallel, with the loss parallel over the words."""
    model = Model(checkpointed)
    parallelize_module(
        model,
        mesh,
        {
            "words": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "head": ColwiseParallel(
                input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False
            ),
        },
    )
    for block in model.blocks:
        parallelize_module(
            block,
            mesh,
            {
                "norm": SequenceParallel(),
                "up": ColwiseParallel(),
                "down": RowwiseParallel(output_layouts=Shard(1)),
            },
        )
        block.up = parallelize_module(
            block.up,
            mesh,
            PrepareModuleInput(
                input_layouts=Shard(1), desired_input_layouts=Replicate(), use_local_output=False
            ),
        )
    return model


class Local(nn.Module):
    """What Megatron-like code does: the local shard of a DTensor parameter in an operation of its own."""

    def __init__(self, mesh):
        super().__init__()
        torch.manual_seed(0)
        local = torch.randn(64 * WIDTH, WIDTH)
        self.weight = nn.Parameter(DTensor.from_local(local, mesh, [Replicate()]))

    def forward(self, x):
        return x @ self.weight.to_local().t()


def gradients(model, step, hold):
    model.zero_grad()
    for number in range(3):
        generator = torch.Generator().manual_seed(number)
        loss = step(model, generator, hold)
        loss.backward()
    grads = [parameter.grad for parameter in model.parameters()]
    return [getattr(grad, "_local_tensor", grad).clone() for grad in grads]


def words_step(model, generator, hold):
    tokens = torch.randint(WORDS, (4, TOKENS), generator=generator)
    with loss_parallel(), hold:
        logits = model(tokens)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())
        # Its backward needs the context as well.
        return Backward(loss)


class Backward:
    def __init__(self, loss):
        self.loss = loss

    def backward(self):
        with loss_parallel():
            self.loss.backward()


def same(true, mine):
    return len(true) == len(mine) and all(map(torch.equal, true, mine))


def stashes(directory):
    return (
        Stash(disk=directory, min_bytes=0, inflight=0),
        stash_on(TwinDevice(chance=0.3), host="1MiB", disk=directory, min_bytes=0, inflight=0),
    )


def check_models(directory):
    data = init_device_mesh(
        "cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("data", "tensor")
    )

    def sharded():
        model = parallel(data["tensor"])
        for block in model.blocks:
            fully_shard(block, mesh=data["data"])
        return fully_shard(model, mesh=data["data"])

    def mixed():
        model = parallel(data["tensor"])
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for block in model.blocks:
            fully_shard(block, mesh=data["data"], mp_policy=policy)
        return fully_shard(model, mesh=data["data"], mp_policy=policy)

    makers = {
        "tensor": lambda: parallel(data["tensor"]),
        "checkpointed": lambda: parallel(data["tensor"], checkpointed=True),
        "sharded": sharded,
        "mixed": mixed,
    }
    for name, make in makers.items():
        model = make()
        true = gradients(model, words_step, nullcontext())
        for stash in stashes(directory):
            for _ in range(2):
                assert same(true, gradients(model, words_step, stash)), name
            assert stash.stats().written_bytes > 0, name
            stash.close()


def check_local(mesh, directory):
    """No byte of the weight moves; all that does is the activation."""
    model = Local(mesh)

    def step(model, generator, hold):
        x = torch.randn(8, WIDTH, generator=generator)
        with hold:
            return model(x.requires_grad_().sin()).square().sum()

    true = gradients(model, step, nullcontext())
    stash = Stash(disk=directory, min_bytes=0, inflight=0)
    assert same(true, gradients(model, step, stash))
    stats = stash.stats()
    activations = 8 * WIDTH * 4 + 8 * 64 * WIDTH * 4  # the sine, and the product that is squared
    assert stats.eligible_bytes == 3 * activations, stats
    assert stats.written_bytes <= 3 * activations, (
        stats
    )  # a write that backward overtakes is called off
    stash.close()


def check_collective(directory):
    """What a collective still fills when it is saved is waited for before it is copied."""
    group = dist.group.WORLD

    def step(hold):
        x = torch.full((64, 64), float(dist.get_rank() + 1))
        w = torch.ones(64, 64, requires_grad=True)
        with hold:
            total = collectives.all_reduce(x, "sum", group)
            loss = (total * w).sum()
        loss.backward()
        return w.grad

    true = step(nullcontext())
    world = dist.get_world_size()
    assert bool((true == world * (world + 1) / 2).all())
    stash = Stash(disk=directory, min_bytes=0, inflight=0)
    assert torch.equal(true, step(stash))
    assert stash.stats().eligible_bytes == 64 * 64 * 4
    stash.close()


def main():
    rank, store, directory, world = int(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (world,))
    check_local(mesh, directory)
    check_collective(directory)
    check_models(directory)
    dist.destroy_process_group()
    Path(directory, f"done-{rank}").touch()


if __name__ == "__main__":
    main()
