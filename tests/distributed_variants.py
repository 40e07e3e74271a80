"""What DDP and FSDP2 can be configured to do, on two processes: gradients are plain's, and no weight moves."""

from contextlib import nullcontext

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from backstash import Stash

WIDTH, ROWS, STEPS = 32, 64, 3


class Block(nn.Module):
    """``how``: its checkpoint, if it has one."""

    def __init__(self, how=""):
        super().__init__()
        self.how = how
        self.layers = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        )

    def forward(self, x):
        if self.how == "selective":
            return checkpoint(self.layers, x, use_reentrant=False, context_fn=_keeps_products)
        if self.how:
            return checkpoint(self.layers, x, use_reentrant=self.how == "reentrant")
        return self.layers(x)


def _keeps_products():
    def policy(context, function, *args, **kwargs):
        keeps = function is torch.ops.aten.addmm.default
        return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


class Skips(nn.Module):
    """Uses its second block at every other step only."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return self.blocks[0](x) if self.calls % 2 else self.blocks[1](self.blocks[0](x))


class Doubled(torch.Tensor):
    """The shard of a parameter that is gathered by an extension of FSDP2: doubled before, halved after."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, inner.stride(), dtype=inner.dtype, requires_grad=inner.requires_grad
        )

    def __init__(self, inner):
        self.inner = inner

    def __tensor_flatten__(self):
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(inner, context, size, stride):
        return Doubled(inner["inner"])

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        def plain(tree):
            return torch.utils._pytree.tree_map_only(Doubled, lambda each: each.inner, tree)

        found = function(*plain(args), **plain(kwargs or {}))
        keeps = {
            torch.ops.aten.detach.default,
            torch.ops.aten.split.Tensor,
            torch.ops.aten.new_zeros.default,
            torch.ops.aten.slice.Tensor,
            torch.ops.aten.view.default,
            torch.ops.aten.as_strided.default,
            torch.ops.aten._to_copy.default,
            torch.ops.aten.clone.default,
        }
        if function is torch.ops.aten.copy_.default:
            return args[0]
        if function not in keeps:
            return found
        return torch.utils._pytree.tree_map_only(torch.Tensor, Doubled, found)

    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
        return (self.inner * 2,), None

    def fsdp_post_all_gather(self, outputs, metadata, param_dtype, *, out=None):
        (gathered,) = outputs
        if out is not None:
            # As FSDP fills a parameter's memory again itself.
            with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
                torch.mul(gathered, 0.5, out=out)
            return None
        whole = gathered * 0.5
        return whole, (whole,)


def blocks(how=""):
    torch.manual_seed(0)
    return nn.Sequential(*(Block(how) for _ in range(2)))


def ddp(make=blocks, hook=None, **options):
    model = DistributedDataParallel(make(), **options)
    if hook is not None:
        model.register_comm_hook(None, hook)
    return model


def sharded(how="", mesh=None, doubled=False, **options):
    model = blocks(how)
    if doubled:
        for block in model:
            for index in (0, 2):
                layer = block.layers[index]
                layer.weight = nn.Parameter(Doubled(layer.weight.detach()))
    for block in model:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def sharded_by_wrappers():
    """By the older class, around each block and the model."""
    cpu = torch.device("cpu")
    wrapped = nn.Sequential(*(FullyShardedDataParallel(each, device_id=cpu) for each in blocks()))
    return FullyShardedDataParallel(wrapped, device_id=cpu)


def no_sync(model, last):
    return nullcontext() if last else model.no_sync()


def accumulates(model, last):
    model.set_requires_gradient_sync(last)
    return nullcontext()


def gradients(model, rank, hold, around=None):
    model.zero_grad()
    generator = torch.Generator().manual_seed(rank)
    for step in range(STEPS):
        x = torch.randn(ROWS, WIDTH, generator=generator).requires_grad_()
        with around(model, step == STEPS - 1) if around is not None else nullcontext():
            with hold:
                loss = model(x).square().mean()
            loss.backward()
    grads = [parameter.grad for parameter in model.parameters()]
    return [getattr(grad, "_local_tensor", grad).clone() for grad in grads if grad is not None]


def variants():
    """A name, what decides how many bytes are saved, a maker of the model, and what is around a step."""
    line = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
    hybrid = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    yield "static graph", "", lambda: ddp(static_graph=True), None
    yield "no_sync", "", ddp, no_sync
    yield "bucket view", "", lambda: ddp(gradient_as_bucket_view=True), None
    yield "comm hook", "", lambda: ddp(hook=default_hooks.fp16_compress_hook), None
    yield "unused", "unused", lambda: ddp(Skips, find_unused_parameters=True), None
    yield "not resharded", "", lambda: sharded(mesh=line, reshard_after_forward=False), None
    yield "hybrid", "", lambda: sharded(mesh=hybrid), None
    yield "accumulated", "", lambda: sharded(mesh=line), accumulates
    yield "extension", "", lambda: sharded(mesh=line, doubled=True), None
    yield "mixed", "half", lambda: sharded(mesh=line, mp_policy=half), None
    for how in ("reentrant", "not reentrant", "selective"):
        yield f"ddp, {how}", how, lambda how=how: ddp(lambda: blocks(how), static_graph=True), None
        yield f"sharded, {how}", how, lambda how=how: sharded(how, mesh=line), None


def check_recompute(rank, directory):
    """Of what `fully_shard` has hooks on, and of the modules inside."""
    for options in ({}, {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}):
        true = gradients(sharded(**options), rank, nullcontext())
        for inside in (True, False):
            model = sharded(**options)
            stash = Stash(disk=directory, min_bytes=0, inflight=0)
            with stash.recompute(*(block.layers if inside else block for block in model)):
                mine = gradients(model, rank, stash)
            assert all(map(torch.equal, true, mine)), (options, inside)
            stats = stash.stats()
            assert stats.recomputed_bytes > 0, stats
            stash.close()
    true = gradients(sharded_by_wrappers(), rank, nullcontext())
    model = sharded_by_wrappers()
    stash = Stash(disk=directory, min_bytes=0, inflight=0)
    with stash.recompute(*(wrapper.module for wrapper in model.module)):
        mine = gradients(model, rank, stash)
    assert true and all(map(torch.equal, true, mine))
    assert stash.stats().recomputed_bytes > 0
    stash.close()


def check(rank, directory):
    check_recompute(rank, directory)
    saved = {}
    for name, kind, make, around in variants():
        true = gradients(make(), rank, nullcontext(), around)
        stash = Stash(disk=directory, min_bytes=0, inflight=0)
        mine = gradients(make(), rank, stash, around)
        assert true and len(true) == len(mine) and all(map(torch.equal, true, mine)), name
        stats = stash.stats()
        assert stats.written_bytes > 0, name
        # Sharded or not, activations alone: an unsharded parameter that moved would be bytes more.
        assert stats.eligible_bytes == saved.setdefault(kind, stats.eligible_bytes), name
        stash.close()
