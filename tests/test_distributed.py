"""Processes under DDP, FSDP2, pipelines, tensor and context parallelism, on gloo: see distributed_worker.py,
tensor_parallel_worker.py and context_parallel_worker.py."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from backstash import Stash
from long_tests import takes_long
from two_processes import run_two

WORKER = Path(__file__).with_name("distributed_worker.py")
CONTEXT_PARALLEL = Path(__file__).with_name("context_parallel_worker.py")
TENSOR_PARALLEL = Path(__file__).with_name("tensor_parallel_worker.py")

needs_gloo = pytest.mark.skipif(
    not (torch.distributed.is_available() and torch.distributed.is_gloo_available()),
    reason="torch was built without gloo",
)


@needs_gloo
def test_ddp_fsdp2_and_pipelines_have_plain_s_gradients(tmp_path):
    run_two(WORKER, tmp_path / "store", tmp_path)
    assert {path.name for path in tmp_path.iterdir()} <= {"store"}


@needs_gloo
@pytest.mark.parametrize(
    "world",
    [pytest.param(2, marks=takes_long), pytest.param(4, marks=takes_long)],
)
def test_tensor_parallel_models_have_plain_s_gradients(tmp_path, world):
    """On a mesh of (1, 2), or of (2, 2), where weights are sharded both ways."""
    run_two(TENSOR_PARALLEL, tmp_path / "store", tmp_path, world, world=world)
    done = {f"done-{rank}" for rank in range(world)}
    assert done <= {path.name for path in tmp_path.iterdir()} <= {"store", *done}


@takes_long
@needs_gloo
def test_context_parallel_models_have_plain_s_gradients(tmp_path):
    run_two(CONTEXT_PARALLEL, tmp_path / "store", tmp_path)
    assert {path.name for path in tmp_path.iterdir()} <= {"store", "done-0", "done-1"}


class FilledLater(torch.Tensor):
    """As a collective's result: its memory is filled when it is waited for, and raises no version."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    def __tensor_flatten__(self):
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(inner, context, size, stride):
        return FilledLater(inner["inner"])

    def trigger_wait(self):
        self.inner.data.fill_(3.0)
        return self.inner

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        args = [each.inner if isinstance(each, FilledLater) else each for each in args]
        return function(*args, **(kwargs or {}))


def test_what_a_collective_still_fills_is_waited_for_before_it_is_copied(tmp_path):
    class Save(torch.autograd.Function):
        @staticmethod
        def forward(ctx, w, later):
            ctx.save_for_backward(later)
            return w.clone()

        @staticmethod
        def backward(ctx, grad):
            return ctx.saved_tensors[0].inner * grad, None

    w = torch.ones(64, requires_grad=True)
    with Stash(disk=tmp_path, min_bytes=0, inflight=0) as stash:
        out = Save.apply(w, FilledLater(torch.zeros(64)))
    out.sum().backward()
    assert stash.stats().eligible_bytes == 64 * 4
    assert torch.equal(w.grad, torch.full((64,), 3.0))


LOCAL_PART = """
import sys
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, init_device_mesh
from backstash import Stash

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,))
weight = nn.Parameter(DTensor.from_local(torch.randn(64, 64), mesh, [Replicate()]))
for is_transposed in (False, True):
    with Stash(disk=sys.argv[1], keep=0, min_bytes=1) as stash:
        x = torch.randn(8, 64, requires_grad=True) * 2
        local = weight.to_local()
        y = x @ local.t() if is_transposed else x @ local
        stats = stash.stats()
        y.sum().backward()
    assert stats.written_bytes == stats.eligible_bytes == x.nbytes, stats
    stash.close()
dist.destroy_process_group()
"""


@takes_long
@needs_gloo
def test_the_local_part_of_a_parameter_stays_outside_of_modules_too(tmp_path):
    """``F.linear(x, weight.to_local())``: the parameter holds the memory, so that moving it frees nothing."""
    command = [sys.executable, "-c", LOCAL_PART, str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
