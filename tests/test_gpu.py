"""On a real accelerator, where there is one: exact, within its budgets, without growth."""

import gc
import threading

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from backstash import Disk, Stash
from backstash.errors import InplaceError

pytestmark = pytest.mark.skipif(
    not torch.accelerator.is_available(),
    reason="needs an accelerator; the twin plays one elsewhere",
)
MIB = 1 << 20


@pytest.fixture
def device():
    return torch.accelerator.current_accelerator()


def model_on(device, dtype=torch.float32):
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(1024, 1024), nn.GELU(), nn.LayerNorm(1024)) for _ in range(8)]
    return nn.Sequential(*layers).to(device, dtype)


def gradients(model, x, context=None, backwards=1):
    model.zero_grad()
    if context is None:
        loss = model(x).float().square().mean()
    else:
        with context:
            loss = model(x).float().square().mean()
    for left in reversed(range(backwards)):
        loss.backward(retain_graph=bool(left))
    torch.accelerator.synchronize()
    return [parameter.grad.clone() for parameter in model.parameters()]


MIXES = {
    "host": {"host": "2GiB"},
    "small windows": {"host": "2GiB", "inflight": "8MiB", "prefetch": "8MiB"},
    "no windows": {"host": "2GiB", "inflight": 0, "prefetch": 0},
    "keep and host": {"keep": "32MiB", "host": "2GiB", "inflight": "16MiB"},
    "keep auto": {"keep": "auto", "host": "2GiB"},
    "host and disk": {"host": "32MiB", "inflight": "16MiB", "prefetch": "16MiB"},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mix", MIXES)
def test_gradients_are_exact(tmp_path, device, mix, dtype):
    model, x = model_on(device, dtype), torch.randn(2048, 1024, device=device, dtype=dtype)
    true = gradients(model, x)
    stash = Stash(**MIXES[mix], disk=tmp_path if "disk" in mix else None)
    for _ in range(4):
        assert all(map(torch.equal, gradients(model, x, stash), true))
    assert stash.stats().notes == (), "nothing was refused"
    doubled = gradients(model, x, stash, backwards=2)
    assert all(torch.equal(two, one + one) for two, one in zip(doubled, true, strict=True))
    if mix != "keep auto":
        assert stash.stats().written_bytes > 0
    stash.close()


def test_device_memory_is_let_go(device):
    model, x = model_on(device), torch.randn(8192, 1024, device=device)
    gradients(model, x)

    def held(context):
        torch.accelerator.synchronize()
        before = torch.accelerator.memory_allocated()
        with context:
            loss = model(x).square().mean()
        torch.accelerator.synchronize()
        after = torch.accelerator.memory_allocated()
        loss.backward()
        return after - before

    import contextlib

    plain = held(contextlib.nullcontext())
    stash = Stash(host="4GiB", inflight="64MiB")
    held(stash)
    assert held(stash) < plain / 4 + 64 * MIB
    stash.close()


def test_nothing_grows_over_many_steps(device):
    model, stash = model_on(device), Stash(host="1GiB", inflight="32MiB", prefetch="32MiB")
    seen = []
    for step in range(60):
        x = torch.randn(256 + 64 * (step % 5), 1024, device=device)
        gradients(model, x, stash)
        del x
        seen.append((torch.accelerator.memory_allocated(), stash.stats().host_peak_bytes))
    assert seen[59] <= max(seen[20:30])
    gc.collect()
    assert stash.stats().host_bytes <= 32 * MIB
    stash.close()


def test_streams_of_the_program_s_own(device):
    model, x = model_on(device), torch.randn(2048, 1024, device=device)
    true = gradients(model, x)
    stash = Stash(host="2GiB", inflight="8MiB", prefetch="8MiB")
    stream = torch.Stream(device)
    before = torch.accelerator.current_stream()
    torch.accelerator.synchronize()
    torch.accelerator.set_stream(stream)
    try:
        for _ in range(3):
            assert all(map(torch.equal, gradients(model, x, stash), true))
    finally:
        torch.accelerator.set_stream(before)
    stash.close()


def test_a_change_in_place_is_told_or_changes_nothing(device):
    stash = Stash(host="2GiB", inflight="4MiB")
    told = 0
    for _ in range(10):
        x = torch.randn(1024, 1024, device=device, requires_grad=True)
        with stash:
            h = x * 2
            loss = h.sin().sum()
        true = (x.detach() * 2).cos() * 2
        with torch.no_grad():
            h.mul_(3)
        try:
            loss.backward()
        except InplaceError:
            told += 1
        else:
            assert torch.equal(x.grad, true)
    stash.close()


def test_checkpoint_autocast_and_another_thread(device):
    model, x = model_on(device), torch.randn(2048, 1024, device=device, requires_grad=True)

    def loss_of():
        with torch.autocast(device.type, torch.bfloat16):
            h = x
            for block in model:
                h = checkpoint(block, h, use_reentrant=False)
        return h.float().square().mean()

    loss_of().backward()
    true, x.grad = x.grad.clone(), None
    stash = Stash(host="2GiB", inflight="4MiB", prefetch="4MiB")
    with stash:
        loss = loss_of()
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    assert torch.equal(x.grad, true)
    assert stash.stats().written_bytes >= 7 * x.nbytes
    stash.close()


def test_disk_under_host_is_exact_and_verified(tmp_path, device):
    model, x = model_on(device), torch.randn(4096, 1024, device=device)
    true = gradients(model, x)
    disk = Disk(tmp_path, verify=True)
    stash = Stash(host="64MiB", disk=disk, inflight="32MiB", prefetch="32MiB")
    for _ in range(3):
        assert all(map(torch.equal, gradients(model, x, stash), true))
    stats = stash.stats()
    assert stats.disk_peak_bytes > 100 * MIB
    assert stats.host_peak_bytes <= 64 * MIB
    stash.close()
    disk.close()
