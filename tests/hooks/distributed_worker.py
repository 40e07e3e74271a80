"""One of two processes: `distributed_worker.py RANK STORE_FILE`. Fails by an assertion."""

import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from backstash.errors import UsageError
from backstash.hooks import (
    capture,
    clip_gradients,
    edit_gradients,
    find_nonfinite,
    hooks_on,
    step_in_backward,
    watch_gradients,
)


def plain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 7), nn.ReLU(inplace=True), nn.Linear(7, 3))


def batch(rank: int) -> torch.Tensor:
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(rank))


def gradients(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    model(x).pow(2).sum().backward()
    return [p.grad.clone() for p in model.parameters()]


def norms_of(*batches: torch.Tensor) -> dict[str, float]:
    """The norms of the mean gradient, by an undistributed model."""
    model = plain()
    each = [gradients(model, x) for x in batches]
    means = [torch.stack(parts).mean(0) for parts in zip(*each, strict=True)]
    names = [name for name, _ in model.named_parameters()]
    return {name: mean.norm().item() for name, mean in zip(names, means, strict=True)}


def agree(report: object, expected: dict[str, float]) -> None:
    rows = report.rows
    assert list(rows) == list(expected), (list(rows), list(expected))
    for name, norm in expected.items():
        assert abs(rows[name].norm - norm) <= 1e-4 * norm, (name, rows[name].norm, norm)
    total = sum(norm**2 for norm in expected.values()) ** 0.5
    assert abs(report.total.norm - total) <= 1e-4 * total
    assert report.total.count == sum(p.numel() for p in plain().parameters())


def check_ddp(rank: int) -> None:
    model = DistributedDataParallel(plain())
    mine, mean = norms_of(batch(rank)), norms_of(batch(0), batch(1))
    with watch_gradients(model, every=1, to=None) as watch:
        gradients(model, batch(rank))
        assert watch.last.reduction == "after" and ", after the reduction" in str(watch.last)
        agree(watch.last, mean)
        with model.no_sync():
            gradients(model, batch(rank))
        assert watch.last.reduction == "before"
        agree(watch.last, mine)
    with watch_gradients(model.module, every=1, to=None) as watch:
        gradients(model, batch(rank))
    assert watch.last.reduction == "unknown"
    agree(watch.last, mine)
    with watch_gradients(model, per="module", to=None) as watch:
        gradients(model, batch(rank))
    assert watch.last.reduction == "before" and list(watch.last.rows) == ["", "0", "1", "2"]
    with clip_gradients(model, value=0.1) as clip, capture(model, "0", clone=True) as got:
        clipped = gradients(model, batch(rank))
    assert clip.reduction == "before" and "reduction: before" in repr(clip)
    assert all(g.abs().max() <= 0.1 for g in clipped) and got["0"].output.shape == (5, 7)
    try:
        step_in_backward(lambda p: torch.optim.SGD(p, lr=1.0), model)
    except UsageError as error:
        assert "DDP averages" in str(error)
    else:
        raise AssertionError("DDP is refused")
    assert not hooks_on(model)


def sharded() -> nn.Sequential:
    model = plain()
    mesh = init_device_mesh("cpu", (2,))
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def whole(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad.full_tensor() for p in model.parameters()]


def check_fsdp2(rank: int) -> None:
    model = sharded()
    gradients(model, batch(rank))  # FSDP2 registers its own hooks at the first call
    before = hooks_on(model)
    assert before and not any(hook.ours for hook in before)
    with watch_gradients(model, every=1, to=None) as watch, find_nonfinite(model):
        gradients(model, batch(rank))
    assert watch.last.reduction == "after"
    agree(watch.last, norms_of(batch(0), batch(1)))
    means = whole(model)
    check_change(
        model, rank, lambda: clip_gradients(model, value=0.5), [g.clamp(-0.5, 0.5) for g in means]
    )
    bound = sorted(g.norm().item() for g in means)[1] * 1.01
    scaled = [g * min(1.0, bound / g.norm().item()) for g in means]
    check_change(model, rank, lambda: clip_gradients(model, norm=bound), scaled)
    halved = [*means[:3], means[3] / 2]
    check_change(model, rank, lambda: edit_gradients({"2.bias": lambda g: g / 2}, model), halved)
    with capture(model, ["0", "2"], grads=True, clone=True) as got:
        gradients(model, batch(rank))
        assert got["0"].grad.shape == (5, 7) and got["2"].output.shape == (5, 3)
    model.zero_grad()
    start = [p.full_tensor().clone() for p in model.parameters()]
    with step_in_backward(lambda p: torch.optim.SGD(p, lr=0.1), model):
        model(batch(rank)).pow(2).sum().backward()
    for parameter, old, mean in zip(model.parameters(), start, means, strict=True):
        assert parameter.grad is None
        torch.testing.assert_close(parameter.full_tensor(), old - 0.1 * mean)
    assert hooks_on(model) == before


def check_change(
    model: nn.Module, rank: int, register: Callable[[], object], expected: list[torch.Tensor]
) -> None:
    with register() as handle:
        gradients(model, batch(rank))
    assert handle.reduction == "after"
    for got, want in zip(whole(model), expected, strict=True):
        torch.testing.assert_close(got, want)


def main(rank: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    try:
        check_ddp(rank)
        check_fsdp2(rank)
        print("DDP and FSDP2 are as expected")
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
