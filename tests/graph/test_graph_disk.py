"""``save_on_cpu``, ``save_on_disk`` and the modules: a stash under the name of what it is for."""

import copy
import functools
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from backstash import Disk, Stash
from backstash.errors import InplaceError, SizeError, StashIOError
from backstash.graph import SaveOnCpu, SaveOnDisk, _faces, save_on_cpu, save_on_disk, saved
from backstash.testing import TwinDevice, stash_on


def where(tensor: Tensor) -> list[str]:
    return [each.where for each in saved(tensor.grad_fn)]


@pytest.mark.parametrize("arguments", [(), (True,), (False, "cuda"), (False, "nonsense")])
def test_save_on_cpu_leaves_cpu_tensors_in_place(arguments: Any) -> None:
    x = torch.rand(3, requires_grad=True)
    with save_on_cpu(*arguments):
        y = (x * 1).exp()
    assert where(y) == ["in place"]
    y.sum().backward()
    assert torch.equal(x.grad, y.detach())


@pytest.mark.parametrize("shape", [(3,), ()])
def test_save_on_cpu_catches_a_change_in_place(shape: tuple[int, ...]) -> None:
    x = torch.rand(shape, requires_grad=True)
    with save_on_cpu():
        y = (x * 1).exp()
    y.detach().zero_()
    with pytest.raises(InplaceError):
        y.sum().backward()


def test_save_on_cpu_takes_sparse_tensors() -> None:
    x = torch.eye(3).to_sparse().requires_grad_()
    with save_on_cpu(pin_memory=True):
        y = x * x
    torch.sparse.sum(y).backward()
    assert torch.equal(x.grad.to_dense(), 2 * torch.eye(3))


@pytest.mark.parametrize("parameters", [True, False])
def test_save_on_cpu_on_an_accelerator(monkeypatch: pytest.MonkeyPatch, parameters: bool) -> None:
    """A twin plays the accelerator: one copy for each storage, parameters left alone on request."""
    device = TwinDevice()
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(_faces, "Stash", functools.partial(stash_on, device))
    weight = nn.Parameter(torch.rand(30, 30))
    x = torch.rand(30, 30, requires_grad=True)

    def program() -> Tensor:
        h = torch.tanh(x @ weight.t())
        return (h.sin() + h.t().cos()).sum()

    true = torch.autograd.grad(program(), (x, weight))
    hooks = save_on_cpu(pin_memory=True, parameters=parameters)
    with hooks:
        loss = program()
    # tanh's result is saved three times; the other two are x and a view of weight.
    assert len(device.downs) == (3 if parameters else 1)
    for mine, plain in zip(torch.autograd.grad(loss, (x, weight)), true, strict=True):
        assert torch.equal(mine, plain)
    hooks._stash.close()
    assert device.pinned_bytes == 0


def test_save_on_disk_holds_everything_by_default(disk_dir: Any) -> None:
    x = torch.rand(5, requires_grad=True)
    with save_on_disk(disk_dir) as stash:
        y = (x * 1).exp()
    assert where(y) == ["disk"]
    assert list(disk_dir.iterdir()) == []  # its file has no name
    for _ in range(3):
        y.sum().backward(retain_graph=True)
    assert torch.equal(x.grad, 3 * y.detach())
    stash.close()


@pytest.mark.parametrize(
    "options",
    [
        {"min_bytes": "64B"},
        {"min_bytes": 64},
        {"min_elements": 16},
        {"min_bytes": 1, "min_elements": 10},
    ],
)
def test_thresholds_by_bytes_and_by_elements(disk_dir: Any, options: Any) -> None:
    x = torch.rand(16, requires_grad=True) * 1
    with save_on_disk(disk_dir, **options) as stash:
        large, small = x.exp(), x[:9].exp().clone()
        small = (x[:9] * 1).exp()
    assert (where(large), where(small)) == (["disk"], ["in place"])
    stash.close()


def test_save_on_disk_passes_on_what_a_stash_takes(disk_dir: Any) -> None:
    store = Disk(disk_dir, max_bytes="1MiB")
    with save_on_disk(store, keep="1KiB", name="mine") as stash:
        y = torch.rand(16, requires_grad=True).exp()
    assert isinstance(stash, Stash) and where(y) == ["keep"] and stash.stats().name == "mine"
    stash.close()
    store.close()
    with pytest.raises(SizeError):
        save_on_disk(disk_dir, min_bytes="many")
    with pytest.raises(StashIOError):
        save_on_disk(disk_dir / "missing")


def model(wrap: Any) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(4, 8),
        wrap(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))),
        nn.Linear(8, 2),
    )


def gradients(module: nn.Module) -> list[Tensor]:
    module(torch.linspace(0, 1, 20).view(5, 4)).square().sum().backward()
    return [parameter.grad for parameter in module.parameters()]


@pytest.fixture(params=["cpu", "disk"])
def wrap(request: pytest.FixtureRequest, disk_dir: Any) -> Any:
    def on_disk(module: nn.Module) -> nn.Module:
        return SaveOnDisk(module, disk_dir)

    return SaveOnCpu if request.param == "cpu" else on_disk


def test_modules_change_no_gradient_no_name_and_no_key(wrap: Any) -> None:
    plain, wrapped = model(lambda m: m), model(wrap)
    assert list(plain.state_dict()) == list(wrapped.state_dict())
    assert [n for n, _ in wrapped[1].named_parameters()] == [
        n for n, _ in plain[1].named_parameters()
    ]
    for mine, theirs in zip(gradients(wrapped), gradients(plain), strict=True):
        assert torch.equal(mine, theirs)
    if isinstance(wrapped[1], SaveOnDisk):
        assert wrapped[1].context.stats().written_bytes > 0
    close(wrapped)


def close(module: nn.Module) -> None:
    for each in module.modules():
        if isinstance(each, SaveOnDisk):
            each.context.close()


def test_state_goes_both_ways_and_nests(wrap: Any) -> None:
    plain, wrapped = model(lambda m: m), model(lambda m: wrap(nn.Sequential(wrap(m))))
    torch.nn.init.ones_(plain[1][0].weight)
    inside = {key: value for key, value in wrapped.state_dict().items()}
    assert list(inside)[2] == "1.0.0.weight"
    wrapped = model(wrap)
    assert not wrapped.load_state_dict(plain.state_dict()).missing_keys
    assert torch.equal(wrapped[1][0].weight, torch.ones(8, 8))
    plain.load_state_dict(wrapped.state_dict())
    assert wrapped[1].module[2].bias is wrapped[1][2].bias
    close(wrapped)


def test_a_wrapped_modules_own_names_are_seen_through() -> None:
    wrapped = SaveOnCpu(nn.Linear(2, 3))
    assert wrapped.out_features == 3 and wrapped.weight.shape == (3, 2)
    with pytest.raises(AttributeError, match="nothing"):
        _ = wrapped.nothing
    assert wrapped.eval().module.training is False


def test_its_parameters_and_buffers_have_their_names_below_any_prefix() -> None:
    module = nn.BatchNorm1d(2)
    wrapped = SaveOnCpu(module)
    for prefix in ("", "module.x"):
        for method in ("named_parameters", "named_buffers"):
            found, true = (getattr(each, method)(prefix=prefix) for each in (wrapped, module))
            assert [name for name, _ in found] == [name for name, _ in true]


def test_a_module_on_the_cpu_catches_a_change_in_place() -> None:
    y = SaveOnCpu(nn.Sigmoid())(torch.rand(3, requires_grad=True))
    y.detach().zero_()
    with pytest.raises(InplaceError):
        y.sum().backward()


def test_keyword_arguments_and_other_outputs_pass() -> None:
    class Two(nn.Module):
        def forward(self, x: Tensor, *, scale: float) -> dict[str, Tensor]:
            return {"out": (x * scale).exp()}

    assert set(SaveOnCpu(Two())(torch.ones(1), scale=2.0)) == {"out"}


def test_replicas_in_threads(wrap: Any) -> None:
    module = model(wrap)
    expected = [gradient.clone() for gradient in gradients(module)]
    replicas = [module, *(copy.deepcopy(module) for _ in range(3))]
    found: dict[int, list[Tensor]] = {}

    def run(index: int) -> None:
        replicas[index].zero_grad()
        for _ in range(5):
            replicas[index].zero_grad()
            found[index] = gradients(replicas[index])

    threads = [threading.Thread(target=run, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    for mine in found.values():
        assert all(torch.equal(a, b) for a, b in zip(mine, expected, strict=True))
    close(module)


def test_shallow_replicas_as_data_parallel_makes_them(wrap: Any) -> None:
    module = model(wrap)[1]
    replica = module._replicate_for_data_parallel()
    replica.module = module.module
    x = torch.rand(3, 8)
    assert torch.equal(replica(x), module(x))
    close(module)


def test_on_an_accelerator_all_save_on_cpu_contexts_share_what_is_pinned(monkeypatch) -> None:
    """Programs make one for each step; a stash of its own would pin again each time."""
    from backstash import graph
    from backstash.graph import _faces

    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    _faces.on_host.cache_clear()
    try:
        one, two, other = (graph.save_on_cpu(parameters=p) for p in (True, True, False))
        assert one._stash is two._stash
        assert one._stash is not other._stash
    finally:
        _faces.on_host.cache_clear()
