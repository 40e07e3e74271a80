"""What is checked on an accelerator: each by itself, small, and in an order that leaves the risky ones last.

``tests/test_gpu.py`` runs them, under pytest or alone. On the CPU a twin plays the accelerator, and
``tests/device/test_simulated.py`` runs them on one that is simulated (``simulated``).
"""

import contextlib
import functools
import gc
import os
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from backstash import Action, Disk, graph
from backstash._device import accelerator as _accelerator
from backstash._device.fingerprint import kernel, sums
from backstash._device.pinned_pool import PinnedPool
from backstash.codecs import BFloat16
from backstash.errors import InplaceError, UsageError
from gpu_place import MIB, Place, Skip, same, simulated
from numbered import number_ahead

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # or cuBLAS refuses to be deterministic


def names_of_torch(place: Place) -> None:
    """Everything of torch that an accelerator is driven by, one by one: the first to look at."""
    place.only_real()
    device = torch.device(place.device.type, torch.accelerator.current_device_index())
    stream, before = torch.Stream(device), torch.accelerator.current_stream(device)
    assert stream != before and before == torch.accelerator.current_stream(device), (
        "streams compare"
    )
    torch.accelerator.set_stream(stream)
    assert torch.accelerator.current_stream(device) == stream, "set_stream"
    torch.accelerator.set_stream(before)
    x = torch.ones(1 << 20, device=device)
    event = before.record_event()
    stream.wait_event(event)
    x.record_stream(stream)
    event.synchronize()
    assert event.query() is True, "query"
    assert len(torch.accelerator.get_memory_info(device)) == 2
    statistics = torch.accelerator.memory_stats(device)
    for name in ("reserved_bytes.all.current", "active_bytes.all.current"):
        assert statistics[name] > 0, f"memory_stats has no {name}"
    if device.type == "cuda":
        assert torch.cuda.is_current_stream_capturing() is False
        assert torch.cuda.get_per_process_memory_fraction(device) > 0


def memory_is_pinned(place: Place) -> None:
    """Registering a slab works, its buffers are pinned for torch, and it is unpinned again."""
    place.only_real()
    if place.device.type != "cuda":
        raise Skip("only CUDA locks memory that exists")
    _accelerator.empty_host_cache()
    before = place.pinned_bytes()
    memory = _goes_both_ways_through_a_pool(place, "")
    assert not memory.is_pinned(), "still pinned after trim"
    # To read a number from the device PyTorch has a little of its own.
    assert place.pinned_bytes() - before < MIB, "PyTorch's allocator was not asked"


def memory_is_pinned_by_pytorch(place: Place) -> None:
    """Where memory that exists cannot be registered, PyTorch's allocator pins it, and has it back."""
    place.only_real()
    _accelerator.empty_host_cache()
    before = place.pinned_bytes()
    with _refused("pin"):
        memory = _goes_both_ways_through_a_pool(
            place, "host memory is pinned by PyTorch's allocator"
        )
    assert memory.is_pinned() and place.pinned_bytes() == before + 64 * MIB
    del memory
    _accelerator.empty_host_cache()
    assert place.pinned_bytes() == before, "still pinned when nobody looks into it"


def _goes_both_ways_through_a_pool(place: Place, note: str) -> torch.Tensor:
    """Returns a view of what the pool had, now trimmed."""
    device = _accelerator.accelerator(torch.device(place.device.type, 0))
    assert isinstance(device, _accelerator.Accelerator), f"nothing drives the device: {device}"
    pool = PinnedPool(64 * MIB, device)
    buffer = pool.take(5 * MIB)
    assert buffer is not None and pool.note.partition(" (")[0] == note, pool.note
    assert buffer.memory.is_pinned(), "torch does not see that the buffer is pinned"
    source = torch.randint(0, 255, (5 * MIB,), dtype=torch.uint8, device=place.device)
    device.down(source, buffer.memory, device.stream()).wait()
    assert torch.equal(buffer.memory, source.cpu()), "bytes down"
    copy = device.up(buffer.memory, None)
    copy.order()
    assert torch.equal(copy.memory, source), "bytes up"
    pool.give(buffer)
    memory = buffer.memory
    del buffer, copy
    pool.trim()
    return memory


@contextlib.contextmanager
def _refused(*names: str) -> Iterator[None]:
    """Ways to pin memory that no device has meanwhile."""
    honest = {name: getattr(_accelerator.Accelerator, name) for name in names}
    for name in names:
        setattr(_accelerator.Accelerator, name, lambda self, what: "refused for a check")
    try:
        yield
    finally:
        for name, method in honest.items():
            setattr(_accelerator.Accelerator, name, method)


MIXES: dict[str, dict[str, object]] = {
    "host": {"host": 2048},
    "small windows": {"host": 2048, "inflight": 8, "prefetch": 8},
    "no windows": {"host": 2048, "inflight": 0, "prefetch": 0},
    "keep and host": {"keep": 32, "host": 2048, "inflight": 16},
    "keep auto": {"keep": "auto", "host": 2048},
    "host and disk": {"host": 64, "inflight": 16, "prefetch": 16},
}


def exact(place: Place, mix: str, dtype: torch.dtype) -> None:
    """Several steps, then a second backward of the same graph, equal to plain's to the bit."""
    model, x = place.model(dtype), place.batch(dtype)
    true = place.gradients(model, x)
    same(place.gradients(model, x), true, "plain against itself")
    stash = place.stash(**MIXES[mix], disk=place.directory if "disk" in mix else None)
    for step in range(3):
        same(place.gradients(model, x, stash), true, f"step {step}")
    doubled = place.gradients(model, x, stash, backwards=2)
    same(doubled, [each + each for each in true], "two backwards")
    stats = stash.stats()
    signs = ("not pinned", "kept in memory")
    refused = [note for note in stats.notes if any(sign in note for sign in signs)]
    assert not refused, f"something was refused: {refused}"
    assert mix == "keep auto" or stats.written_bytes > 0, "nothing moved"
    assert "disk" not in mix or stats.disk_peak_bytes > 0, "nothing went to disk"
    stash.close()


def memory_is_let_go(place: Place) -> None:
    """What forward leaves on the device is a small part of what it does without a stash."""
    model, x = place.model(), place.batch(rows=8)

    def left(hold: object = None) -> int:
        before = place.allocated()
        with hold or torch.enable_grad():  # type: ignore[attr-defined]
            loss = model(x).square().mean()
        after = place.allocated()
        loss.backward()
        return after - before

    left()
    plain = left()
    stash = place.stash(host=4096, inflight=32)
    left(stash)
    held = left(stash)
    assert held <= plain // 3, f"{held / MIB:.0f} MiB left on the device, plain {plain / MIB:.0f}"
    stash.close()


def nothing_grows(place: Place) -> None:
    """Device and pinned memory after 60 steps of changing shapes are what they were after 30."""
    model, stash = place.model(), place.stash(host=1024, inflight=32, prefetch=32)
    seen = []
    for step in range(60 if place.is_real else 12):
        x = place.batch()[: 256 + 64 * (step % 5)]
        place.gradients(model, x, stash)
        del x
        seen.append((place.allocated(), stash.stats().host_peak_bytes))
    half = len(seen) // 2
    for what, numbers in zip(("device", "pinned"), zip(*seen, strict=True), strict=True):
        most = max(numbers[:half]) + 32 * MIB  # what was read ahead for nobody may still be there
        assert numbers[-1] <= most, f"{what} memory grows: {numbers}"
    gc.collect()
    place.synchronize()
    held = stash.stats().host_bytes
    assert held == 0 or held <= 64 * MIB, f"{held} bytes of host buffers are still held"
    stash.close()


def streams_of_the_program(place: Place) -> None:
    """All of it on a stream that is not the default one; then forwards on two streams in turn."""
    place.only_real()
    warnings.filterwarnings("ignore", "The AccumulateGrad node's stream")
    model, x = place.model(), place.batch()
    true = place.gradients(model, x)
    stash = place.stash(host=2048, inflight=8, prefetch=8)
    before = torch.accelerator.current_stream()
    streams = [torch.Stream(place.device), torch.Stream(place.device)]
    place.synchronize()
    try:
        for step in range(6):
            torch.accelerator.set_stream(streams[0] if step < 3 else streams[step % 2])
            same(place.gradients(model, x, stash), true, f"step {step}")
    finally:
        torch.accelerator.set_stream(before)
    stash.close()


def saved_here_used_there(place: Place) -> None:
    """A saved tensor is made on one stream, used on another and unpacked on a third, under pressure."""
    place.only_real()
    side, main = torch.Stream(place.device), torch.accelerator.current_stream()
    stash = place.stash(host=2048, inflight=4, prefetch=8)
    x = place.batch().requires_grad_()
    true = (x.detach() * 2).cos() * 2
    for step in range(10):
        x.grad = None
        with stash:
            h = x * 2
            side.wait_stream(main)
            torch.accelerator.set_stream(side)
            h.record_stream(side)
            loss = h.sin().sum()
            torch.accelerator.set_stream(main)
        del h
        noise = [
            torch.full_like(x, float("nan")) for _ in range(8)
        ]  # takes what was freed too early
        main.wait_stream(side)
        loss.backward()
        place.synchronize()
        same([x.grad], [true], f"step {step}")
        del noise
    stash.close()


def layers_on_streams_in_turn(place: Place) -> None:
    """Each layer on the other of two streams: what one reads ahead, the other uses; several budgets."""
    place.only_real()
    warnings.filterwarnings("ignore", "The AccumulateGrad node's stream")
    model, x = place.model(), place.batch()
    true = place.gradients(model, x)
    before = torch.accelerator.current_stream()
    streams = [torch.Stream(place.device), torch.Stream(place.device)]

    class InTurn(nn.Module):
        def forward(self, h: torch.Tensor) -> torch.Tensor:
            current = torch.accelerator.current_stream()
            for number, layer in enumerate(model):
                stream = streams[number % 2]
                stream.wait_stream(current)  # and so nobody needs record_stream
                torch.accelerator.set_stream(stream)
                h, current = layer(h), stream
            before.wait_stream(current)
            torch.accelerator.set_stream(before)
            return h

        zero_grad, parameters = model.zero_grad, model.parameters

    for inflight, keep in ((0, None), (4, None), (16, None), (24, 8), (40, None)):
        stash = place.stash(host=2048, inflight=inflight, keep=keep)
        for step in range(4):
            same(place.gradients(InTurn(), x, stash), true, f"inflight={inflight}, step {step}")
        stash.close()


def backward_that_breaks_off(place: Place) -> None:
    """What was read ahead for a backward that failed is freed, and its memory used again at once."""
    model, x = place.model(), place.batch()
    true = place.gradients(model, x)
    stash = place.stash(host=2048, inflight=8, prefetch=64)

    def fail(gradient: torch.Tensor) -> None:
        raise ZeroDivisionError

    for step in range(6):
        with stash:
            h = model[:4](x)
            h.register_hook(fail)
            loss = model[4:](h).square().mean()
        try:
            loss.backward()
        except ZeroDivisionError:
            pass
        else:
            raise AssertionError("the hook was not called")
        del h, loss
        noise = [torch.full_like(x, step) for _ in range(16)]
        same(place.gradients(model, x, stash), true, f"step {step}")
        for each in noise:
            assert bool((each == step).all()), f"step {step}: memory was written after it was freed"
        del noise, each
    stash.close()


def branches_on_two_streams(place: Place, *, crossing: bool) -> None:
    """Two chains, each on its stream: blocks that one reads ahead, or moves away, are the other's.

    ``crossing``: the second saves what the first has made, and the first waits for that, as a program must
    that frees it then. Otherwise neither waits for the other.
    """
    place.only_real()
    if crossing and place.allocator == "cudaMallocAsync":
        raise Skip("plain autograd frees what another stream still reads in backward")
    warnings.filterwarnings("ignore", "The AccumulateGrad node's stream")
    one, two, x = place.model(), place.model(), place.batch()
    before = torch.accelerator.current_stream()
    streams = [torch.Stream(place.device), torch.Stream(place.device)]

    def loss_of(streams: list[torch.Stream]) -> torch.Tensor:
        ends, moved = [x, x], [x, x]
        for stream in streams:
            stream.wait_stream(before)
        for layers in zip(one, two, strict=True):
            for number, stream in enumerate(streams):
                torch.accelerator.set_stream(stream)
                if crossing and number:
                    stream.wait_stream(streams[0])
                    ends[1] = ends[1] * moved[0]
                    streams[0].wait_stream(stream)
                moved[number] = ends[number] * -1
                ends[number] = None
                moved[number] = moved[number] * -1  # takes memory again before anything is saved
                ends[number] = layers[number](moved[number])
                if crossing and not number:
                    moved[0] = ends[0] * 0.5  # nothing on its own stream saves it
        for stream in streams:
            before.wait_stream(stream)
        torch.accelerator.set_stream(before)
        return sum(each.square().mean() for each in ends)

    def gradients(streams: list[torch.Stream], stash: object = None) -> list[torch.Tensor]:
        for model in (one, two):
            model.zero_grad()
        with stash or torch.enable_grad():  # type: ignore[attr-defined]
            loss = loss_of(streams)
        loss.backward()
        place.synchronize()
        return [each.grad.clone() for model in (one, two) for each in model.parameters()]

    true = gradients([before, before])
    same(gradients(streams), true, "plain on two streams")
    for inflight, prefetch in ((0, 0), (4, 8), (16, 2), (24, 8), (40, 64)):
        sizes = {"inflight": inflight, "prefetch": prefetch}
        stash = place.stash(host=2048, **sizes)
        for step in range(4):
            same(gradients(streams, stash), true, f"{sizes}, step {step}")
        stash.close()


def copies_that_die(place: Place) -> None:
    """A copy whose block died keeps its memory until it has ended: nothing is there that it overwrites."""
    place.only_real()
    device = _accelerator.accelerator(torch.device(place.device.type, 0))
    assert isinstance(device, _accelerator.Accelerator), f"nothing drives the device: {device}"
    nbytes = place.size(64)
    host, arrived = device.pinned(nbytes), device.pinned(nbytes)
    assert isinstance(host, torch.Tensor) and isinstance(arrived, torch.Tensor), (host, arrived)
    host.fill_(0xAB)
    for step in range(10):
        source = torch.full((nbytes,), step, dtype=torch.uint8, device=place.device)
        before = torch.accelerator.memory_allocated(place.device)
        ended = []
        for _ in range(3):
            up = device.up(host, None)
            ended.append(up.completion)
            assert torch.accelerator.memory_allocated(place.device) >= before + nbytes
            # A mode sees operators, and would keep a word to the allocator from it.
            with FakeTensorMode() if step % 2 else contextlib.nullcontext():
                del up
            mine = torch.full_like(source, step)
            down = device.down(mine, arrived, device.stream())
            ended.append(down.completion)
            del mine, down
        noise = [torch.full_like(source, 1 + step) for _ in range(6)]
        copied = [each + 1 for each in noise]
        # What is read of the host's memory and written to it is ours to own.
        for completion in ended:
            completion.wait()
        assert bool((arrived == step).all()), f"step {step}: what was read was overwritten before"
        for each in noise:
            assert bool((each == 1 + step).all()), f"step {step}: a dead copy has written here"
        for each in copied:
            assert bool((each == 2 + step).all()), f"step {step}: what was there was read too early"
        del source, noise, copied, each
        device.up(host, None).wait()
        held = device.unfinished_bytes()
        assert held <= nbytes, "what has ended is freed when the next copy begins"
    for memory in (host, arrived):
        device.give_back(memory)


def changes_in_place(place: Place) -> None:
    """An error is raised, or the gradient is that of the saved values; never anything else."""
    stash = place.stash(host=2048, inflight=4)
    raised = 0
    for step in range(10):
        x = place.batch().requires_grad_()
        with stash:
            h = x * 2
            loss = h.sin().sum()
        true = (x.detach() * 2).cos() * 2
        with torch.no_grad():
            h.mul_(3)
        try:
            loss.backward()
        except InplaceError:
            raised += 1
        else:
            same([x.grad], [true], f"step {step}")
    stash.close()
    place.forget_races()


def checkpoint_autocast_thread(place: Place) -> None:
    """Checkpointed blocks under autocast, backward on another thread; their inputs go to the stash."""
    model, x = place.model(), place.batch().requires_grad_()

    def loss_of() -> torch.Tensor:
        h = x
        with torch.autocast(place.device.type, torch.bfloat16):
            for block in model:
                h = checkpoint(block, h, use_reentrant=False)
        return h.float().square().mean()

    loss_of().backward()
    true, x.grad = x.grad, None
    stash = place.stash(host=2048, inflight=4, prefetch=4)
    with stash:
        loss = loss_of()
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join(60)
    assert not thread.is_alive(), "backward on another thread hangs"
    same([x.grad], [true], "gradient of the input")
    assert stash.stats().written_bytes > 0, "the checkpoints' inputs did not go to the stash"
    del loss, thread
    stash.close()


def disk_under_host(place: Place) -> None:
    """Checksums of what comes back from disk, and the host's budget, hold."""
    model, x = place.model(), place.batch(rows=4)
    true = place.gradients(model, x)
    disk = Disk(place.directory, verify=True)
    stash = place.stash(host=128, disk=disk, inflight=32, prefetch=32)
    for step in range(2):
        same(place.gradients(model, x, stash), true, f"step {step}")
    stats = stash.stats()
    assert stats.disk_peak_bytes > place.size(64), f"{stats.disk_peak_bytes} bytes on disk"
    assert stats.host_peak_bytes <= place.size(128), f"host: {stats.host_peak_bytes} bytes taken"
    stash.close()
    disk.close()


def views_and_kinds(place: Place) -> None:
    """Double backward, parts of storages, transposes, complex and conjugate views, channels_last."""
    convolution = nn.Conv2d(8, 16, 3, padding=1).to(place.device, memory_format=torch.channels_last)

    def program(x: torch.Tensor) -> torch.Tensor:
        half = x.shape[0] // 2
        q, k, v = (x @ x).split(half, dim=1)[0].unsqueeze(0), x.t(), x[::2, ::3]
        y = (q * k[:, :half]).sin().sum() + (v * v).sum() + (x[3] * x[5]).sum()
        z = torch.view_as_complex(x[:, : 2 * half].reshape(-1, 2))
        y = y + (z.conj() * z * z).real.sum() + (z.conj().imag * z.real.sin()).sum()
        y = y + torch._neg_view(x).cos().sum()
        image = x[: half // 8 * 8, :64].reshape(-1, 8, 8, 8)
        y = y + convolution(image.contiguous(memory_format=torch.channels_last)).relu().sum()
        (first,) = torch.autograd.grad(y, x, create_graph=True)
        return (first**3).sum() + y

    x = place.batch(rows=1).requires_grad_()
    if place.is_real:
        number_ahead(place.device, 50_000)
    with torch.backends.cudnn.flags(deterministic=True):
        true = torch.autograd.grad(program(x), x)
        same(list(torch.autograd.grad(program(x), x)), list(true), "plain against itself")
        stash = place.stash(host=2048, inflight=4, prefetch=4)
        with stash:
            loss = program(x)
        same(list(torch.autograd.grad(loss, x)), list(true), "under the stash")
        with stash:
            loss = program(x)  # and is freed without a backward
    del loss
    gc.collect()
    patience = time.monotonic() + 10  # the device's own thread frees a graph when it gets there
    while (left := stash.stats().blocks) and time.monotonic() < patience:
        time.sleep(0.01)
    assert left == 0, f"{left} blocks are still alive"
    stash.close()


def memory_is_told(place: Place) -> None:
    """A kernel's sums of the device's memory are what its words and weights say, and depend on every byte."""
    place.only_real()
    made = kernel(place.device)
    if isinstance(made, str):
        raise Skip(made)
    words = torch.randint(-(1 << 31), 1 << 31, (70_001,)).to(torch.int32)
    weights = torch.randint(-(1 << 63), (1 << 63) - 1, (2 * made.COLUMNS + 3,)) | 1
    computed = torch.zeros(2, dtype=torch.int64, device=place.device)
    made.add_sums(words.to(place.device), weights.to(place.device), computed)
    assert computed.tolist() == _sums_of(words.tolist(), weights.tolist(), made), "the sums"
    raw = torch.randint(256, (64 * MIB + 3,), dtype=torch.uint8, device=place.device)
    before = sums(raw.untyped_storage())
    for at in (0, 1_000_003, 64 * MIB - 1, 64 * MIB + 2):
        raw[at] ^= 128
        now = sums(raw.untyped_storage())
        assert (now != before).all(), f"byte {at} has changed"
        raw[at] ^= 128
    assert torch.equal(sums(raw.untyped_storage()), before), "the same bytes"


def _sums_of(words: list[int], weights: list[int], made: Any) -> list[int]:
    """By Python's integers."""
    columns, rows, most = made.COLUMNS, made.ROWS, 1 << 64
    steps, key = weights[2 * columns : 2 * columns + 2], weights[2 * columns + 2]
    totals = [0, 0]
    for first in range(0, len(words), columns * rows):
        number = (first // (columns * rows) + key) % most
        for which, seed in enumerate((number, number ^ 0x9E3779B97F4A7C15)):
            total = 0
            for row in range(rows):
                some = words[first + row * columns : first + (row + 1) * columns]
                ours = weights[which * columns : which * columns + len(some)]
                total = total * steps[which] + sum(map(int.__mul__, some, ours))
            totals[which] += total * _mixed(seed)
    return [(each + most // 2) % most - most // 2 for each in totals]


def _mixed(number: int) -> int:
    number = (number ^ number >> 30) * 0xBF58476D1CE4E5B9 % (1 << 64)
    number = (number ^ number >> 27) * 0x94D049BB133111EB % (1 << 64)
    return (number ^ number >> 31) | 1


def masks_packed(place: Place) -> None:
    """Masks are packed to bits without a look at them, on several streams too; a lossy codec by name."""
    x = place.batch(rows=4).requires_grad_()

    def program(x: torch.Tensor) -> torch.Tensor:
        y = x
        for step in range(4):
            y = torch.where(y > 0.1 * step, y.sin(), 0.5)
        return y.square().sum()

    true = torch.autograd.grad(program(x), x)
    for options in ({}, {"keep": 1024}, {"codec": None}):
        policy = (lambda saved: Action("pack")) if "codec" not in options else None
        stash = place.stash(host=2048, inflight=4, prefetch=4, policy=policy, **options)
        for _ in range(2):
            with stash:
                loss = program(x)
            if place.is_real:
                stream = torch.Stream(place.device)
                node = loss.grad_fn.next_functions[0][0].next_functions[0][0]
                stream.wait_stream(torch.accelerator.current_stream(place.device))
                before = torch.accelerator.current_stream(place.device)
                torch.accelerator.set_stream(stream)
                seen = [node._saved_condition.clone()]
                torch.accelerator.set_stream(before)
                before.wait_stream(stream)
                same(seen, [node._saved_condition], "looked at by another stream")
            same(list(torch.autograd.grad(loss, x)), list(true), str(options))
        packed = stash.stats().packed_bytes
        assert bool(packed) == (policy is not None), f"{packed} bytes packed"
        stash.close()
    stash = place.stash(host=2048, codec=BFloat16())
    with stash:
        loss = (x * 2).exp().sum()
    found = torch.autograd.grad(loss, x)
    same(list(found), [2 * (x * 2).exp().bfloat16().to(x.dtype).detach()], "bfloat16")
    stash.close()


def recomputed(place: Place) -> None:
    """Results are computed again on the stream that uses them, modules are run again; what changed raises."""
    model, x = place.model(layers=4), place.batch()
    model.insert(2, nn.Dropout(0.2))

    def step() -> list[torch.Tensor]:
        torch.manual_seed(3)
        with torch.random.fork_rng(
            [torch.accelerator.current_device_index()] if place.device.type == "cuda" else []
        ):
            return list(torch.autograd.grad(model(x).square().mean(), list(model.parameters())))

    true = step()
    for options in ({}, {"keep": 1024}):
        stash = place.stash(host=2048, policy=lambda saved: Action("recompute"), **options)
        for _ in range(2):
            with stash:
                same(step(), true, f"recomputed, {options}")
        assert stash.stats().recomputed_bytes > 0
        stash.close()
        stash = place.stash(host=2048, **options)
        with stash.recompute(*model):
            for _ in range(2):
                same(step(), true, f"run again, {options}")
        assert stash.stats().recomputed_bytes > 0
        stash.close()
    stash = place.stash(host=2048, keep=1024, policy=lambda saved: Action("recompute"))
    with stash:
        torch.autograd.grad(model(x).sum(), list(model.parameters()))
    with stash:
        y = x.clone().requires_grad_() * 1
        loss = F.gelu(y).square().sum()
    before = stash.stats().recomputed_bytes
    assert before > 0
    place.synchronize()  # a copy of it may have begun: that reads what was saved
    y.data.add_(1)
    try:
        loss.backward()
    except InplaceError as error:
        assert "recomputing" in str(error)
    else:
        raise AssertionError("an operand that was written unseen gave no error")
    stash.close()


def kept_busy(place: Place) -> None:
    """What is given to a device that is kept busy for a while begins after that."""
    place.only_real()
    index = torch.accelerator.current_device_index()
    driver = _accelerator.accelerator(torch.device(place.device.type, index))
    assert not isinstance(driver, str), driver
    for seconds in (1e-3, 5e-3):
        since = driver.time_mark()
        driver.keep_busy(seconds)
        took = driver.seconds_between(since, driver.time_mark())
        assert took >= seconds * 0.9, (seconds, took)


def graphs_in_turn(place: Place) -> None:
    """Several graphs alive at once, one dropped without backward, gradients accumulated."""
    model, stash = place.model(layers=4), place.stash(host=2048, inflight=8, prefetch=8)
    batches = [place.batch()[: 200 + 40 * each] for each in range(4)]

    def accumulated(hold: object) -> list[torch.Tensor]:
        model.zero_grad()
        losses = []
        for x in batches:
            with hold:  # type: ignore[attr-defined]
                losses.append(model(x).square().mean())
        del losses[1]
        for loss in (losses[2], losses[0], losses[1]):
            loss.backward()
        place.synchronize()
        return [each.grad.clone() for each in model.parameters()]

    true = accumulated(torch.enable_grad())
    for step in range(3):
        same(accumulated(stash), true, f"step {step}")
    stash.close()


def save_on_cpu_of_ours(place: Place) -> None:
    """``backstash.graph.save_on_cpu``, made again for each step as programs do."""
    place.only_real()
    model, x = place.model(layers=4), place.batch()
    true = place.gradients(model, x)
    for step in range(3):
        same(place.gradients(model, x, graph.save_on_cpu(pin_memory=True)), true, f"step {step}")


def pinning_refused(place: Place) -> None:
    """Where the system refuses to lock memory the result is the same, and the note says why."""
    place.only_real()
    model, x = place.model(layers=4), place.batch()
    true = place.gradients(model, x)
    for names in (["pin"], ["pin", "pinned"]):
        _accelerator.empty_host_cache()
        before = place.pinned_bytes()
        with _refused(*names):
            stash = place.stash(host=2048, inflight=8, prefetch=8)
            same(place.gradients(model, x, stash), true, f"without {names}")
            (note,) = stash.stats().notes
            stash.close()
        assert ("host memory is not pinned" in note) == ("pinned" in names), note
        assert note.count("refused for a check") == len(names), note
        assert place.pinned_bytes() - before < MIB


def llama_in_bf16(place: Place) -> None:
    """Grouped-query attention with torch's fused kernels, made deterministic."""
    # Next to these tests, wherever the package is: mutants are tried on a copy of `src` alone.
    benchmarks = str(Path(__file__).resolve().parent.parent / "benchmarks")
    if benchmarks not in sys.path:
        sys.path.insert(0, benchmarks)
    from device.models import llama

    torch.manual_seed(0)
    width, tokens = (256, 64) if place.is_small else (512, 1024)
    workload = llama(2, width, tokens, place.device)
    torch.use_deterministic_algorithms(True)
    try:
        x = workload.inputs[0]
        true = place.gradients(workload.model, x)
        same(place.gradients(workload.model, x), true, "plain against itself")
        stash = place.stash(host=2048, inflight=8, prefetch=8)
        for step in range(2):
            same(place.gradients(workload.model, x, stash), true, f"step {step}")
        stash.close()
    finally:
        torch.use_deterministic_algorithms(False)


def several_devices(place: Place) -> None:
    """A model over two devices: each has budgets, streams and host buffers of its own."""
    place.only_real()
    if torch.accelerator.device_count() < 2:
        raise Skip("needs two devices")
    here, there = (torch.device(place.device.type, index) for index in range(2))
    one, two = place.model(layers=2).to(here), place.model(layers=2).to(there)
    x = place.batch().to(here).requires_grad_()
    stash = place.stash(host=1024, inflight=8, prefetch=8)
    two(one(x).to(there)).square().mean().backward()
    true, x.grad = x.grad, None
    with stash:
        loss = two(one(x).to(there)).square().mean()
    loss.backward()
    same([x.grad], [true], "over two devices")
    stash.close()


def within_a_budget(place: Place) -> None:
    """One number for the device's memory: predictions come true, and no step under the plan exceeds it."""
    place.only_real()
    model, x = place.model(layers=12), place.batch(rows=8)
    true = place.gradients(model, x)

    def peak_of(stash: Any) -> int:
        place.synchronize()
        torch.accelerator.reset_peak_memory_stats(place.device)
        same(place.gradients(model, x, stash), true, "within a budget")
        place.synchronize()
        return int(torch.accelerator.max_memory_allocated(place.device))

    held, plain = place.allocated(), peak_of(None)
    budget = held + (plain - held) * 7 // 10
    stash, peaks, last = place.stash(budget=budget, host=4096), [], None
    # Where steps are not what a plan says, it is made again: each is compared with the one that it followed.
    for _ in range(40):
        before = stash.plan
        peak, plan = peak_of(stash), stash.plan
        if plan is None or plan.predicted is None or plan.state != "planned":
            continue
        if before is None or before.predicted != plan.predicted or plan.measured is None:
            peaks, last = [], None
            continue
        peaks.append(peak)
        last = plan
        if len(peaks) == 4:
            break
    plan = stash.plan
    assert last is not None and last.predicted is not None and len(peaks) == 4, str(plan)
    assert last.device == f"{place.device.type}:0", str(last)
    assert max(peaks) <= budget, f"peaks {peaks} of a budget of {budget}\n{last}"
    summary = f"{last.predicted.peak_bytes} predicted, {peaks} measured, {plain} plain\n{last}"
    assert abs(max(peaks) / last.predicted.peak_bytes - 1) < (0.2 if place.is_small else 0.1), (
        summary
    )
    moved = stash.stats().written_bytes
    peak_of(stash)
    moved = stash.stats().written_bytes - moved
    assert moved < plain - held, "not all of it needs to move"
    stash.close()

    roomy = place.stash(budget=plain * 2, host=4096)
    for _ in range(3):
        peak_of(roomy)
    moved = roomy.stats().written_bytes
    peak_of(roomy)
    assert roomy.plan is not None and roomy.plan.state == "left alone", str(roomy.plan)
    assert roomy.stats().written_bytes == moved, "what fits is left in place"
    roomy.close()


def modules_that_a_plan_runs_again(place: Place) -> None:
    """The named modules are traced, and what the plan decides about them changes no bit."""
    place.only_real()
    model, x = place.model(layers=6), place.batch(rows=8)
    true = place.gradients(model, x)
    if place.device.type == "simulated":
        simulated.rates(10e9, 0.02e9, 0.02e9)  # a link so slow that running again is cheaper
    held = place.allocated()
    place.synchronize()
    torch.accelerator.reset_peak_memory_stats(place.device)
    place.gradients(model, x)
    place.synchronize()
    plain = int(torch.accelerator.max_memory_allocated(place.device))
    stash = place.stash(budget=held + (plain - held) * 6 // 10, host=4096)
    with stash.recompute(*model):
        for _ in range(10):
            same(place.gradients(model, x, stash), true, "modules that a plan runs again")
    assert stash.plan is not None and stash.plan.regions, str(stash.plan)
    choices = {name for each in stash.plan.regions for name, _ in each.choices}
    if place.device.type == "simulated":
        simulated.rates(10e9, 5e9, 5e9)
        assert "region" in choices, str(stash.plan)
        assert stash.stats().recomputed_bytes > 0
    stash.close()


def budgets_of_two_devices(place: Place) -> None:
    """Each device has a plan of its own for the same budget; the CPU then has none."""
    place.only_real()
    if torch.accelerator.device_count() < 2:
        raise Skip("needs two devices")
    here, there = (torch.device(place.device.type, index) for index in range(2))
    one, two = place.model(layers=3).to(here), place.model(layers=3).to(there)
    x = place.batch().to(here).requires_grad_()
    two(one(x).to(there)).square().mean().backward()
    true, x.grad = x.grad, None
    stash = place.stash(budget=torch.accelerator.memory_allocated(here) * 3 // 2, host=4096)
    for _ in range(8):
        with stash:
            loss = two(one(x).to(there)).square().mean()
        loss.backward()
        same([x.grad], [true], "over two devices within budgets")
        x.grad = None
    assert len(stash._session.planners) == 2 and 0 not in stash._session.planners
    assert all(each.plan.predicted for each in stash._session.planners.values())
    stash.close()


def out_of_memory(place: Place) -> None:
    """Where plain runs out of memory a stash trains; where it too does, nothing is leaked and it goes on."""
    place.only_real()
    model, x = place.model(layers=16), place.batch(rows=16)
    true = place.gradients(model, x[: 4 * place.width])
    stash = place.stash(keep=None, host=8192, inflight=64, prefetch=64)
    late = place.size(256 if place.is_small else 0)  # copies that never end take memory, too
    with place.at_most(place.size(900) + late):
        try:
            place.gradients(model, x)
        except torch.OutOfMemoryError:
            pass
        else:
            raise AssertionError("plain was to run out of memory: the check is too small")
        model.zero_grad()
        gc.collect()
        torch.accelerator.empty_cache()
        for _ in range(3):
            place.gradients(model, x, stash)
        held = place.allocated()
        try:
            with stash:
                loss = (model(x).repeat(32, 1) * 2).sin().sum()
            raise AssertionError(f"2 GiB in 0.9: the check is too small ({loss})")
        except torch.OutOfMemoryError:
            pass
        gc.collect()
        leaked = place.allocated() - held
        assert leaked <= place.size(192), f"{leaked} bytes more than before it failed"
        same(place.gradients(model, x[: 4 * place.width], stash), true, "after it was short")
    stash.close()


class Greedy(torch.autograd.Function):
    """Needs much more memory in backward than anything that is saved."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, rows: int) -> torch.Tensor:
        """The same."""
        ctx.rows = rows
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        """The same, and a long way round."""
        taken = grad.new_zeros(ctx.rows, grad.shape[1])
        return grad + taken[:1], None


def out_of_memory_in_backward(place: Place) -> None:
    """Nothing calls the stash then; it keeps less by the next steps, until one has the memory it needs."""
    place.only_real()
    if place.allocator == "cudaMallocAsync":
        raise Skip("cudaMallocAsync does not count how often it had no memory")
    model, x = place.model(layers=16), place.batch(rows=16)

    def loss_of(taken: torch.Tensor) -> torch.Tensor:
        return Greedy.apply(model(taken), 160 * place.width).square().mean()

    loss_of(x[: 4 * place.width]).backward()
    # Gradients are parts of the memory that backward needed, which the allocator could not give back.
    true = [each.grad.cpu() for each in model.parameters() if each.grad is not None]
    model.zero_grad()
    stash, steps = place.stash(keep=None, host=8192, inflight=64, prefetch=64), []
    late = place.size(256 if place.is_small else 0)
    with place.at_most(place.size(900) + late):
        while not steps or "failed" in steps[-1:]:
            assert len(steps) < 8, f"{steps}, {stash.stats()}"
            loss = None
            model.zero_grad()
            gc.collect()
            with stash:
                loss = loss_of(x)
            try:
                loss.backward()
            except torch.OutOfMemoryError:
                steps.append("failed")
            else:
                steps.append("passed")
        assert "failed" in steps, "the check is too small"
        assert any("keep is" in note for note in stash.stats().notes), stash.stats().notes
    loss = None
    model.zero_grad()
    with stash:
        loss = loss_of(x[: 4 * place.width])
    loss.backward()
    found = [each.grad.cpu() for each in model.parameters() if each.grad is not None]
    same(found, true, "after it was short")
    stash.close()


def dropped_in_the_midst(place: Place) -> None:
    """A stash nobody closes, with copies under way both ways: its memory outlives them."""
    place.only_real()
    for first in ("stash", "loss"):
        for backwards in (0, 1):
            model, x = place.model(layers=2), place.batch()
            stash = place.stash(host=1024, inflight=512, prefetch=512)
            with stash:
                loss = model(x).square().mean()
            if backwards:
                loss.backward()
            held = {"stash": stash, "loss": loss}
            del stash, loss
            del held[first]
            gc.collect()
            held.clear()
            gc.collect()
    place.synchronize()


def exit_without_closing(place: Place) -> None:
    """A process that ends with copies under way ends without a word, status 0."""
    place.only_real()
    program = (
        f"{place.prelude}import torch\nfrom backstash import Stash\n"
        "stash = Stash(host='1GiB', inflight='1GiB')\n"
        f"x = torch.randn({4 * place.width}, 4096, device='{place.device.type}', requires_grad=True)\n"
        "with stash:\n    loss = x.sin().exp().tanh().sum()\n"
        "print('ended')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, f"status {done.returncode}: {done.stderr[-500:]}"
    assert done.stdout == "ended\n", done.stdout
    for sign in ("Traceback", "Exception ignored", "Error", "CUDA"):
        assert sign not in done.stderr, done.stderr[-500:]


def compiled_blocks(place: Place) -> None:
    """``torch.compile`` on each block, the stash around them."""
    place.only_real()
    model, x = place.model(layers=1), place.batch()
    backend = "aot_eager" if place.is_small else "inductor"
    for block in model:
        block.compile(backend=backend)
    try:
        true = place.gradients(model, x)
    except Exception as error:
        raise Skip(
            f"torch.compile does not work here: {type(error).__name__}: {error}"[:200]
        ) from error
    same(place.gradients(model, x), true, "plain against itself")
    stash = place.stash(host=2048, inflight=8, prefetch=8)
    for step in range(2):
        same(place.gradients(model, x, stash), true, f"step {step}")
    stash.close()


def captured_graph(place: Place) -> None:
    """Forward and backward captured together under a stash replay to plain's gradients; alone is refused."""
    place.only_real()
    if place.device.type != "cuda":
        raise Skip("needs CUDA graphs")
    warnings.filterwarnings("ignore", "The AccumulateGrad node's stream")
    model, x = place.model(layers=4), place.batch()
    true = place.gradients(model, x)
    stash = place.stash(host=2048, inflight=8, prefetch=8)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            model.zero_grad(set_to_none=True)
            with stash:
                loss = model(x).float().square().mean()
            loss.backward()
        del loss
    torch.cuda.current_stream().wait_stream(stream)
    captured = torch.cuda.CUDAGraph()
    model.zero_grad(set_to_none=True)
    with torch.cuda.graph(captured):
        with stash:
            loss = model(x).float().square().mean()
        loss.backward()
    for each in model.parameters():
        each.grad.zero_()
    captured.replay()
    place.synchronize()
    same([each.grad for each in model.parameters()], true, "replayed")
    left = stash.stats().left
    assert "a graph of the accelerator is being captured" in left, f"left: {list(left)}"
    stash.close()


def backward_alone_captured(place: Place) -> None:
    """A backward that is captured without its forward, whose tensors have moved, is refused in words."""
    place.only_real()
    if place.device.type != "cuda":
        raise Skip("needs CUDA graphs")
    warnings.filterwarnings("ignore", "The AccumulateGrad node's stream")
    model, x = place.model(layers=2), place.batch()
    stash = place.stash(host=2048, inflight=0, prefetch=0)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), stash:  # backward runs on the stream of its forward
        loss = model(x).float().square().mean()
    place.synchronize()
    stash.stats()
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream):
            loss.backward()
    except UsageError:
        pass
    except RuntimeError as error:
        assert isinstance(error.__cause__ or error.__context__, UsageError), repr(error)
    else:
        raise AssertionError("it was captured, and a replay would not bring the tensors back")
    del loss
    place.synchronize()
    stash.close()


CHECKS: dict[str, Callable[[Place], None]] = {
    check.__name__: check
    for check in (names_of_torch, memory_is_pinned, memory_is_pinned_by_pytorch)
}
CHECKS |= {
    f"exact, {mix}, {str(dtype).removeprefix('torch.')}": functools.partial(
        exact, mix=mix, dtype=dtype
    )
    for mix in MIXES
    for dtype in (torch.float32, torch.bfloat16)
}
CHECKS |= {
    f"branches_on_two_streams, {how}": functools.partial(
        branches_on_two_streams, crossing=how == "crossing"
    )
    for how in ("apart", "crossing")
}
CHECKS |= {
    check.__name__: check
    for check in (
        memory_is_let_go,
        nothing_grows,
        streams_of_the_program,
        saved_here_used_there,
        layers_on_streams_in_turn,
        backward_that_breaks_off,
        copies_that_die,
        changes_in_place,
        checkpoint_autocast_thread,
        disk_under_host,
        views_and_kinds,
        memory_is_told,
        masks_packed,
        recomputed,
        kept_busy,
        graphs_in_turn,
        save_on_cpu_of_ours,
        pinning_refused,
        llama_in_bf16,
        several_devices,
        within_a_budget,
        modules_that_a_plan_runs_again,
        budgets_of_two_devices,
        out_of_memory,
        out_of_memory_in_backward,
        dropped_in_the_midst,
        exit_without_closing,
        captured_graph,
        backward_alone_captured,
        compiled_blocks,
    )
}
"""By name, the risky ones last."""
