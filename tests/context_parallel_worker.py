"""One of two: `context_parallel_worker.py RANK STORE_FILE DIRECTORY`. Fails by an assertion.

PyTorch's context parallel knows the attention kernels of CUDA; on the CPU it raises that the one of the CPU has
no sharding strategy. Here that kernel is added to its table, as PyTorch's ring attention calls the others. All
else is PyTorch's: `context_parallel` shards the buffers and replaces `scaled_dot_product_attention`; q, k and v
are DTensors, sharded by sequence, that autograd saves; backward sends keys and values around once more.
"""

import sys
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._context_parallel import _attention, set_rotate_method
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from backstash import Stash
from backstash.testing import TwinDevice, stash_on

ROWS, TOKENS, HEADS, WIDTH = 2, 32, 2, 32
BY_SEQUENCE = [Shard(2)]
OF_THE_CPU = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
ITS_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def local(tree):
    return [each.to_local() if isinstance(each, DTensor) else each for each in tree]


def sharded(tensors, mesh):
    return tuple(DTensor.from_local(each, mesh, BY_SEQUENCE, run_check=False) for each in tensors)


def ring(op_call, args, kwargs):
    mesh, (query, key, value, *rest) = args[0].device_mesh, local(args)
    is_causal = rest[1] if len(rest) > 1 else kwargs.get("is_causal", False)
    return sharded(
        _attention._templated_ring_attention(
            mesh.get_group(), 2, OF_THE_CPU, query, key, value, is_causal, scale=kwargs.get("scale")
        ),
        mesh,
    )


def ring_backward(op_call, args, kwargs):
    mesh = args[0].device_mesh
    grad, query, key, value, out, logsumexp, dropout, is_causal = local(args)
    found = _attention._templated_ring_attention_backward(
        mesh.get_group(),
        2,
        ITS_BACKWARD,
        grad.contiguous(),
        "grad_out",
        query,
        key,
        value,
        out,
        logsumexp,
        is_causal,
        dropout_p=dropout,
        scale=kwargs.get("scale"),
    )
    return sharded(found, mesh)


_attention.custom_ops |= {OF_THE_CPU: ring, ITS_BACKWARD: ring_backward}


class Block(nn.Module):
    def __init__(self, how=""):
        super().__init__()
        self.norm, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.how = how

    def attention(self, x):
        parts = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, -1)).unbind(-3)
        query, key, value = (each.transpose(1, 2) for each in parts)
        made = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return x + self.out(made.transpose(1, 2).flatten(2))

    def forward(self, x):
        if self.how:
            return checkpoint(self.attention, x, use_reentrant=self.how == "reentrant")
        return self.attention(x)


def model_of(how="", mesh=None):
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(how) for _ in range(3)))
    if mesh is not None:
        for block in model:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model


def gradients(model, mesh, hold, steps=2):
    for number in range(steps):
        x = torch.randn(ROWS, TOKENS, WIDTH, generator=torch.Generator().manual_seed(number))
        with context_parallel(mesh, buffers=[x], buffer_seq_dims=[1]):
            with hold:
                loss = model(x.clone().requires_grad_()).square().mean()
            loss.backward()
    assert nn.functional.scaled_dot_product_attention is scaled_dot_product_attention
    return [getattr(each.grad, "_local_tensor", each.grad).clone() for each in model.parameters()]


def whole(model, steps=2):
    """On one process."""
    for number in range(steps):
        x = torch.randn(ROWS, TOKENS, WIDTH, generator=torch.Generator().manual_seed(number))
        model(x).square().mean().backward()
    return [each.grad for each in model.parameters()]


def same(true, mine):
    return len(true) == len(mine) and all(map(torch.equal, true, mine))


def main():
    rank, store, directory = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    both = gradients(model_of(), mesh, nullcontext())
    for each in both:
        dist.all_reduce(each)
    assert all(map(torch.allclose, whole(model_of()), [each / 2 for each in both])), "no attention"
    for rotate in ("allgather", "alltoall"):
        set_rotate_method(rotate)
        for how, over in (("", None), ("reentrant", None), ("not reentrant", None), ("", mesh)):
            true = gradients(model_of(how, over), mesh, nullcontext())
            for stash in (
                Stash(disk=directory, min_bytes=0, inflight=0),
                stash_on(
                    TwinDevice(chance=0.3), host="1MiB", disk=directory, min_bytes=0, inflight=0
                ),
            ):
                assert same(true, gradients(model_of(how, over), mesh, stash)), (rotate, how, over)
                stats = stash.stats()
                assert stats.written_bytes > 0 and all(
                    why.startswith("a parameter") for why in stats.left
                ), stats
                stash.close()
    dist.destroy_process_group()
    Path(directory, f"done-{rank}").touch()


if __name__ == "__main__":
    main()
