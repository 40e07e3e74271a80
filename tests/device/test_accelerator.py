"""Three tiers on an accelerator, played on the CPU by a device whose copies run when a test lets them."""

import gc
import threading

import pytest
import torch
from torch import nn

from backstash import Action, Disk, StashFullError, StashWarning
from backstash.errors import InplaceError, SizeError, UsageError
from backstash.testing import Failing, Gated, MemoryStore, TwinDevice, stash_on

SIDE = 256
BLOCK = SIDE * SIDE * 4  # bytes
MIB = 1 << 20


def chain(x, steps=8):
    for _ in range(steps):
        x = torch.tanh(x * 1.5)
    return x.sum()


def leaf(seed=0, width=SIDE):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(width, width, generator=generator, requires_grad=True)


def gradient(loss, x):
    return torch.autograd.grad(loss, x, retain_graph=True)[0]


def expected(program=chain):
    x = leaf()
    return gradient(program(x), x)


def settled(stash, device):
    """Everything has ended and has been seen to."""
    device.run(downs=-1, ups=-1)
    gc.collect()
    return stash.stats()


MIXES = {
    "host": {"host": "64MiB"},
    "host, no windows": {"host": "64MiB", "inflight": 0, "prefetch": 0},
    "host, small windows": {"host": "64MiB", "inflight": 2 * BLOCK, "prefetch": 2 * BLOCK},
    "keep and host": {"keep": 3 * BLOCK, "host": "64MiB", "inflight": BLOCK},
    "host and disk": {"host": 3 * BLOCK, "inflight": BLOCK, "prefetch": 2 * BLOCK},
    "all three": {"keep": 2 * BLOCK, "host": 2 * BLOCK, "inflight": BLOCK, "prefetch": BLOCK},
    "one buffer": {"host": BLOCK, "inflight": BLOCK, "prefetch": BLOCK},
}
WITH_DISK = {"host and disk", "all three", "one buffer"}


@pytest.mark.parametrize("chance", [0.0, 0.2, 0.7, 1.0])
@pytest.mark.parametrize("mix", MIXES)
def test_gradients_are_exact_however_late_the_copies_run(tmp_path, mix, chance):
    options = dict(MIXES[mix], disk=tmp_path if mix in WITH_DISK else None)
    for seed in range(3):
        device = TwinDevice(chance=chance, seed=seed)
        stash = stash_on(device, **options)
        x, true = leaf(), expected()
        for _ in range(3):
            with stash:
                loss = chain(x)
            assert torch.equal(gradient(loss, x), true)
            assert torch.equal(gradient(loss, x), true), "a second time"
        stats = stash.stats()
        # Three steps of eight blocks; what keep holds at the end has not left, but for what leaves ahead of it.
        kept = max(options.get("keep", 0) - options.get("inflight", 0), 0)
        assert stats.written_bytes == 24 * BLOCK - kept
        if mix in WITH_DISK:
            assert stats.host_peak_bytes == options["host"]
            assert stats.disk_peak_bytes > 0
        # Not exact: how many copies are under way at once is the device's chance.
        assert stats.inflight_peak_bytes <= options.get("inflight", 128 * MIB)
        del loss
        stash.close()
        assert device.faults == []
        assert device.pinned_bytes == 0, "what was pinned is not any more"


def test_forward_and_backward_never_wait_for_the_device(tmp_path):
    """Only the stream waits; a worker alone may wait itself, for what it writes to disk."""
    device = TwinDevice()
    stash = stash_on(device, host="64MiB", inflight=2 * BLOCK, prefetch=2 * BLOCK)
    x, true = leaf(), expected()
    for _ in range(2):
        with stash:
            loss = chain(x)
        assert torch.equal(gradient(loss, x), true)
    assert device.waits == 0
    assert device.orders > 0
    del loss
    stash.close()


def test_copies_begin_early_and_memory_goes_only_when_it_must():
    """Backward begins on what is still there."""
    device = TwinDevice(chance=1.0)
    stash = stash_on(device, keep=4 * BLOCK, host="64MiB", inflight=2 * BLOCK)
    x = leaf()
    with stash:
        loss = chain(x, steps=8)
    stats = stash.stats()
    assert stats.written_bytes == 6 * BLOCK, "two blocks before the budget was reached"
    assert stats.keep_bytes + stats.inflight_bytes == 4 * BLOCK, "no more went than had to"
    loss.backward()
    assert stash.stats().read_bytes == 4 * BLOCK
    stash.close()


def test_device_memory_stays_within_the_budget_and_the_window():
    device = TwinDevice()  # nothing runs by itself: only what the stream waits for
    stash = stash_on(device, keep=2 * BLOCK, host="64MiB", inflight=3 * BLOCK)
    x, most = leaf(), 0
    with stash:
        for _ in range(12):
            x = torch.tanh(x * 1.5)
            stats = stash.stats()
            most = max(most, stats.keep_bytes + stats.inflight_bytes)
    assert most <= 5 * BLOCK
    assert device.faults == []
    del x
    stash.close()


def test_blocks_larger_than_the_windows_still_overlap():
    """One at a time is on its way, and the next is on its way back while one is used."""
    device = TwinDevice()
    stash = stash_on(device, host="64MiB", inflight=BLOCK // 2, prefetch=BLOCK // 2)
    x, true = leaf(), expected()
    with stash:
        first = torch.tanh(x)
        assert len(device.downs) == 1 and device.orders == 0, "nobody waits for it yet"
        second = torch.tanh(first)
        assert len(device.downs) == 1 and device.orders == 1, "until the next one comes"
        del first, second
        loss = chain(x)
    assert torch.equal(gradient(loss, x), true)
    stats = stash.stats()
    assert stats.prefetch_hits >= 6
    assert stats.inflight_peak_bytes == BLOCK
    assert stats.ahead_peak_bytes == 2 * BLOCK
    del loss
    stash.close()


# Changes in place.


def change_after_save(stash, x):
    with stash:
        h = x * 2
        loss = h.sin().sum()
    return h, loss


def test_a_change_before_the_copy_ran_is_detected():
    device = TwinDevice()
    stash = stash_on(device, host="64MiB")
    x = leaf()
    h, loss = change_after_save(stash, x)
    with torch.no_grad():
        h.mul_(3)
    device.run(downs=-1)
    with pytest.raises(InplaceError, match="modified by an inplace operation"):
        gradient(loss, x)
    stash.close()


def test_a_change_after_the_copy_landed_changes_nothing():
    device = TwinDevice(chance=1.0)
    stash = stash_on(device, host="64MiB")
    x = leaf()
    h, loss = change_after_save(stash, x)
    stash.stats()
    with torch.no_grad():
        h.mul_(3)
    assert torch.equal(gradient(loss, x), expected(lambda x: (x * 2).sin().sum()))
    stash.close()


class LatePromise(TwinDevice):
    """The stream is set to wait, and the copy has still not run when the host goes on."""

    def down(self, source, target, made_on):
        copy = super().down(source, target, made_on)
        copy.promised = False

        class Late(type(copy)):
            def order(self):
                self.promised = True

            def done(self):
                return self.promised or self.ended()

        copy.__class__ = Late
        return copy


def test_a_change_between_landing_and_the_copy_s_end_is_detected():
    """The memory was freed because the stream waits; another stream may still change the tensor."""
    device = LatePromise()
    stash = stash_on(device, host="64MiB", inflight=BLOCK)
    x = leaf()
    with stash:
        h = x * 2
        loss = h.sin().sum()
        rest = [(x * number).cos() for number in range(2, 5)]
    assert stash.stats().inflight_bytes == BLOCK
    with torch.no_grad():
        h.mul_(3)
    device.run(downs=-1)
    with pytest.raises(InplaceError, match="modified by an inplace operation"):
        gradient(loss, x)
    del rest
    stash.close()


def test_bytes_still_on_their_way_down_come_back_after_they_have_arrived():
    device = LatePromise()
    stash = stash_on(device, host="64MiB", inflight=0, prefetch=0)
    x = leaf()
    with stash:
        loss = chain(x)
    assert len(device.downs) == 8, "freed, and not copied yet"
    assert torch.equal(gradient(loss, x), expected())
    del loss
    stash.close()


def test_every_view_of_a_block_is_ordered_after_its_copy():
    """Two views may be used on two streams: each has to wait."""
    device = TwinDevice()
    stash = stash_on(device, host="64MiB", inflight=0)
    x = leaf()
    with stash:
        h = x * 2
        one, other = h.sin(), h.t().cos()
    first = one.grad_fn._saved_self
    device.orders = 0
    second = other.grad_fn._saved_self
    assert device.orders == 1
    assert first.untyped_storage()._cdata == second.untyped_storage()._cdata
    del one, other, first, second
    stash.close()


# Buffers.


def test_a_buffer_is_not_used_again_while_a_copy_runs_into_it():
    """A graph dropped at once leaves a copy that still writes to its buffer."""
    device = TwinDevice()
    stash = stash_on(device, host=4 * BLOCK, inflight="64MiB")
    x, true = leaf(), expected(lambda x: chain(x, steps=2))
    for _ in range(6):  # more than there are buffers
        with stash:
            chain(x, steps=2)
    with stash:
        loss = chain(x, steps=2)
    device.run(downs=-1)
    assert torch.equal(gradient(loss, x), true)
    assert device.faults == []
    del loss
    assert settled(stash, device).host_bytes == 0
    stash.close()


def test_a_buffer_is_not_used_again_while_it_is_read():
    """A block whose bytes are still on their way back may die: its buffer waits for the copy."""
    device = TwinDevice()
    stash = stash_on(device, host=2 * BLOCK, inflight=0, prefetch=4 * BLOCK)
    x = leaf()
    with stash:
        first = torch.tanh(x * 1.5)
        held = first.grad_fn
    assert torch.equal(held._saved_result, first)
    device.orders = 0
    # Asked for and not waited for: nothing makes the stream wait yet.
    with stash:
        second = torch.tanh(x * 2.5)
    del first, held
    gc.collect()
    with stash:
        third = torch.tanh(x * 3.5)
    for out, factor in ((second, 2.5), (third, 3.5)):
        assert torch.equal(out.grad_fn._saved_result, torch.tanh(x * factor))
    del second, third, out
    stash.close()


class SlowToEnd(TwinDevice):
    """What is ordered sees its bytes, and the copy has still not ended for the host until ``over``."""

    over = False

    def up(self, source, after):
        copy = super().up(source, after)
        device = self

        class Slow(type(copy.completion)):
            def ended(self):
                return device.over and super().ended()

            def wait(self):
                device.over = True
                super().wait()

        copy.completion.__class__ = Slow
        return copy


def test_a_buffer_that_bytes_were_staged_in_waits_for_their_copy(tmp_path):
    """Read from disk to a buffer, on its way to the device: nobody may write there before it has arrived."""
    device = SlowToEnd(chance=1.0)
    stash = stash_on(device, host=2 * BLOCK, disk=tmp_path, inflight=2 * BLOCK, prefetch=0)
    x = leaf()
    with stash:
        outs = [torch.tanh(x * number) for number in range(1, 7)]
    stash._workers.close()  # all are on disk, so both buffers may be had
    for number in (1, 2):
        assert torch.equal(outs[number - 1].grad_fn._saved_result, torch.tanh(x * number))
    del outs
    gc.collect()
    assert stash.stats().host_bytes == 2 * BLOCK
    device.over = True
    assert settled(stash, device).host_bytes == 0
    stash.close()


class Behind(TwinDevice):
    """The host runs ahead: what is ordered sees its bytes, and nothing has ended until ``over``."""

    over, looks = False, 0

    def up(self, source, after):
        copy = super().up(source, after)
        device = self

        class Late(type(copy.completion)):
            def ended(self):
                device.looks += 1
                return device.over and super().ended()

        copy.completion.__class__ = Late
        return copy


def test_a_host_that_runs_ahead_does_not_ask_for_each_that_died_about_all_the_others():
    device = Behind(chance=1.0)
    stash = stash_on(device, host="256MiB", inflight=0, prefetch=0)
    x = leaf()
    with stash:
        loss = chain(x, steps=100)
    loss.backward()
    del loss
    gc.collect()
    assert len(stash._session.device_tiers[1].tier.buffers._deferred) >= 90
    assert device.looks < 1000, "not ten thousand"
    device.over = True
    assert stash.stats().host_bytes == 0
    stash.close()


def test_buffers_that_have_come_to_rest_are_used_before_more_is_pinned():
    device = Behind(chance=1.0)
    stash = stash_on(device, host=None, inflight=0, prefetch=0, min_bytes=0)
    pool = stash._session.device_tiers[1].tier.pool
    big = torch.zeros(16, MIB // 4, 16, requires_grad=True)  # as large as a slab
    for _ in range(2):
        with stash:
            loss = big.sin().cos().sum()
        device.over = False
        loss.backward()
        del loss
        gc.collect()
        stash.stats()  # defers them
        device.over = True  # and now they are at rest, when nobody looks
    assert pool.slab_peak_bytes == big.nbytes  # one slab serves both steps
    stash.close()


@pytest.mark.parametrize("chance", [0.0, 0.4])
def test_shapes_may_change_and_the_pool_stays_inside_its_budget(chance):
    device = TwinDevice(chance=chance)
    budget = 24 * BLOCK
    stash = stash_on(device, host=budget, inflight=2 * BLOCK)
    for step in range(40):
        x = leaf(step, 200 + 37 * (step % 7))
        with stash:
            loss = chain(x, steps=4)
        true = gradient(chain(x, steps=4), x)
        assert torch.equal(gradient(loss, x), true)
        stats = stash.stats()
        assert stats.host_peak_bytes == device.pinned_bytes == budget  # one slab
    del loss
    assert settled(stash, device).host_bytes == 0
    stash.close()


def test_without_a_buffer_a_block_stays_in_place_with_a_warning():
    device = TwinDevice()
    stash = stash_on(device, host=3 * BLOCK, inflight=0)
    x = leaf()
    with pytest.warns(
        UserWarning, match="host memory has no space for 256 KiB in addition to the 768 KiB"
    ):
        with stash:
            loss = chain(x)
    stats = stash.stats()
    assert stats.host_bytes == 3 * BLOCK and stats.keep_bytes == 5 * BLOCK
    assert any("give disk=" in note for note in stats.notes)
    assert torch.equal(gradient(loss, x), expected())
    del loss
    stash.close()


def test_on_full_raise_raises_from_forward_and_leaves_nothing():
    device = TwinDevice()
    stash = stash_on(device, host=3 * BLOCK, inflight=0, on_full="raise")
    x = leaf()
    with pytest.raises(StashFullError, match="raise host="), stash:
        chain(x)
    gc.collect()
    assert settled(stash, device).host_bytes == 0
    stash.close()
    assert device.pinned_bytes == 0


def test_memory_that_cannot_be_pinned_is_used_as_it_is_and_said():
    device = TwinDevice(refuses="the limit on locked memory")
    stash = stash_on(device, host="64MiB", inflight=0)
    x = leaf()
    with stash:
        loss = chain(x)
    assert torch.equal(gradient(loss, x), expected())
    (note,) = stash.stats().notes
    assert "not pinned (the limit on locked memory; PyTorch's allocator: a twin has none)" in note
    del loss
    stash.close()


# The disk under the host.


def test_the_oldest_go_on_to_disk_and_come_back_through_host_memory(tmp_path):
    device = TwinDevice(chance=0.5)
    disk = Disk(tmp_path, verify=True)
    stash = stash_on(device, host=4 * BLOCK, disk=disk, inflight=2 * BLOCK, prefetch=2 * BLOCK)
    x, true = leaf(), expected(lambda x: chain(x, steps=20))
    for _ in range(3):
        with stash:
            loss = chain(x, steps=20)
        # Not exact: how many of these 20 have gone on so far is up to the worker.
        assert disk.used_bytes >= 14 * BLOCK
        assert torch.equal(gradient(loss, x), true)
    stats = stash.stats()
    assert stats.prefetch_hits > 30
    assert stats.host_peak_bytes == 4 * BLOCK
    del loss
    settled(stash, device)
    stash.close()
    assert disk.used_bytes == 0
    disk.close()


def test_a_disk_that_fails_leaves_the_bytes_in_host_memory():
    device = TwinDevice(chance=1.0)
    failing = Failing(MemoryStore())
    failing.on_write = OSError(5, "broken")
    stash = stash_on(device, host=4 * BLOCK, disk=failing, inflight=0)
    x = leaf()
    with pytest.warns(UserWarning, match="the disk failed"), stash:
        loss = chain(x)
    assert torch.equal(gradient(loss, x), expected())
    assert stash.stats().host_bytes == 4 * BLOCK
    del loss
    settled(stash, device)
    stash.close()
    assert failing.used_bytes == 0


def test_a_graph_dropped_while_its_bytes_go_to_disk(tmp_path):
    device = TwinDevice(chance=1.0)
    gated = Gated(MemoryStore())
    gated.writes.clear()
    stash = stash_on(device, host=4 * BLOCK, disk=gated, inflight=4 * BLOCK)
    x = leaf()
    with stash:
        loss = chain(x, steps=3)
    assert gated.begun.acquire(timeout=30)
    del loss
    gc.collect()
    # Not exact: how many writes have begun is up to the workers.
    assert stash.stats().host_bytes >= BLOCK, "a worker still reads the buffer"
    gated.writes.set()
    stash._workers.close()
    assert stash.stats().host_bytes == 0
    assert gated.used_bytes == 0
    stash.close()


def test_a_policy_names_the_tier(tmp_path):
    device = TwinDevice(chance=1.0)
    tiers = iter(["keep", "host", "disk", "disk"])
    stash = stash_on(
        device, host="1MiB", disk=tmp_path, inflight=0, policy=lambda _: Action(next(tiers))
    )
    x = leaf()
    with stash:
        loss = chain(x, steps=4)
    stash._workers.close()
    stats = stash.stats()
    assert stats.left["the policy said so"].count == 1
    assert stats.disk_bytes == 2 * BLOCK
    assert torch.equal(gradient(loss, x), expected(lambda x: chain(x, steps=4)))
    del loss
    settled(stash, device)
    stash.close()


# The way up.


def test_a_wrong_guess_costs_time_and_nothing_else():
    device = TwinDevice()
    stash = stash_on(device, host="64MiB", inflight=0, prefetch=2 * BLOCK)
    x = leaf()
    with stash:
        outs = [torch.tanh(x * number) for number in range(1, 9)]
    for number in (5, 1, 8, 2, 7, 3, 6, 4):
        saved = outs[number - 1].grad_fn._saved_result
        assert torch.equal(saved, torch.tanh(x * number))
    assert stash.stats().ahead_peak_bytes == 2 * BLOCK
    assert device.faults == []
    del outs, saved
    stash.close()


def test_reading_ahead_stops_when_the_device_has_no_memory_to_spare():
    device = TwinDevice(free=64 * MIB)  # below what is left alone
    stash = stash_on(device, host="64MiB", inflight=0, prefetch="64MiB")
    x = leaf()
    with stash:
        loss = chain(x)
    assert torch.equal(gradient(loss, x), expected())
    stats = stash.stats()
    assert stats.prefetch_hits == 0 and stats.prefetch_misses == 8
    del loss
    stash.close()


def test_out_of_device_memory_on_the_way_up_is_an_error_and_can_be_tried_again():
    device = TwinDevice()
    stash = stash_on(device, host="64MiB", inflight=0, prefetch=0)
    x = leaf()
    with stash:
        loss = chain(x)
    device.free = 1000
    with pytest.raises(torch.OutOfMemoryError, match="1000 bytes"):
        gradient(loss, x)
    device.free = 1 << 40
    assert torch.equal(gradient(loss, x), expected())
    del loss
    stash.close()


def test_backward_on_another_thread():
    device = TwinDevice(chance=0.3)
    stash = stash_on(device, host="64MiB", inflight=2 * BLOCK)
    x, results = leaf(), []
    with stash:
        loss = chain(x)
    thread = threading.Thread(target=lambda loss=loss: results.append(gradient(loss, x)))
    thread.start()
    thread.join()
    assert torch.equal(results[0], expected())
    del loss, thread
    settled(stash, device)
    stash.close()


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint_under_a_stash(use_reentrant):
    from torch.utils.checkpoint import checkpoint

    def program(x):
        for _ in range(3):
            x = checkpoint(lambda h: torch.tanh(h * 1.5).sin(), x, use_reentrant=use_reentrant)
        return x.sum()

    device = TwinDevice(chance=0.3)
    stash = stash_on(device, host="64MiB", inflight=0)
    x = leaf()
    program(x).backward()
    true, x.grad = x.grad, None
    with stash:
        loss = program(x)
    loss.backward()
    assert torch.equal(x.grad, true)
    assert stash.stats().written_bytes == 2 * BLOCK, "the checkpoints' inputs go to the stash"
    stash.close()


def test_double_backward_views_and_regions():
    def program(x):
        q, k, v = (x @ x).split(SIDE // 2, dim=1)[0].unsqueeze(0), x.t(), x[::2, ::3]
        y = (q * k[:, : SIDE // 2]).sin().sum() + (v * v).sum() + (x[3] * x[5]).sum()
        (first,) = torch.autograd.grad(y, x, create_graph=True)
        return (first**3).sum()

    x = leaf()
    true = gradient(program(x), x)
    for chance in (0.0, 0.5):
        device = TwinDevice(chance=chance)
        stash = stash_on(device, host="64MiB", inflight=BLOCK, min_bytes=0)
        with stash:
            loss = program(x)
        assert torch.equal(gradient(loss, x), true)
        del loss
        settled(stash, device)
        stash.close()
        assert device.faults == []


def test_a_model_in_training_with_accumulation_and_autocast():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(SIDE, SIDE), nn.GELU(), nn.Linear(SIDE, SIDE), nn.Tanh())
    batches = [torch.randn(64, SIDE) for _ in range(4)]

    def gradients(context):
        model.zero_grad()
        for batch in batches:
            with context(), torch.autocast("cpu", torch.bfloat16):
                loss = model(batch).float().square().mean()
            loss.backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    import contextlib

    true = gradients(contextlib.nullcontext)
    device = TwinDevice(chance=0.5)
    stash = stash_on(device, host="8MiB", inflight="64KiB", min_bytes="4KiB")
    assert all(map(torch.equal, gradients(lambda: stash), true))
    assert stash.stats().written_bytes > 0
    stash.close()


# What is left alone.


def test_what_is_captured_into_a_graph_stays_and_says_why():
    device = TwinDevice()
    device.capturing = True
    stash = stash_on(device, host="64MiB")
    x = leaf()
    with stash:
        loss = chain(x)
    assert torch.equal(gradient(loss, x), expected())
    left = stash.stats().left
    assert left["a graph of the accelerator is being captured"].count == 8
    stash.close()


def test_a_capture_in_the_midst_of_copies_asks_nothing_of_the_device(tmp_path):
    """An event that is asked, or a copy that begins, would end the capture."""
    device = TwinDevice(free=2 * BLOCK)
    stash = stash_on(device, keep="auto", host="64MiB", disk=tmp_path, inflight=2 * BLOCK)
    x, true = leaf(), expected()
    with stash:
        before = chain(x)
        assert device.downs, "copies are under way when the capture begins"
        kept = torch.rand(SIDE, SIDE)  # as an operation's own: it waits for that to end
        product = x * kept
        device.capturing = True
        captured = chain(x)
        got = gradient(captured, x)
    with stash:  # entered and left within the capture
        assert torch.equal(gradient(chain(x), x), true)
    stash.stats()
    assert torch.equal(got, true)
    device.capturing = False
    assert torch.equal(gradient(before, x), true)
    assert torch.equal(gradient(product.sum(), x), kept)
    assert device.faults == []
    del before, captured, product
    settled(stash, device)
    stash.close()


def test_backward_alone_cannot_be_captured_and_says_why():
    device = TwinDevice(chance=1.0)
    stash = stash_on(device, host="64MiB", inflight=0)
    x = leaf()
    with stash:
        loss = chain(x)
    device.capturing = True
    with pytest.raises(UsageError, match="capture forward and backward together"):
        gradient(loss, x)
    device.capturing = False
    assert torch.equal(gradient(loss, x), expected())
    assert device.faults == []
    del loss
    stash.close()


def test_what_is_in_place_is_used_in_a_capture_as_it_is():
    device = TwinDevice()
    stash = stash_on(device, keep="64MiB", host="64MiB")
    x = leaf()
    with stash:
        loss = chain(x)
    device.capturing = True
    assert torch.equal(gradient(loss, x), expected())
    device.capturing = False
    assert device.faults == []
    del loss
    stash.close()


def test_without_host_memory_everything_stays(tmp_path):
    stash = stash_on(TwinDevice(), host=0, disk=tmp_path)
    x = leaf()
    with stash:
        loss = chain(x)
    assert stash.stats().left["no tier below: give host="].count == 8
    assert torch.equal(gradient(loss, x), expected())
    stash.close()


def test_keep_auto_follows_the_memory_that_is_free():
    device = TwinDevice(chance=1.0, free=8 * BLOCK)
    stash = stash_on(device, keep="auto", host="64MiB", inflight=0, prefetch=0)
    x = leaf()
    with stash:
        loss = chain(x)
    assert stash.stats().keep_bytes == 4 * BLOCK
    del loss
    device.free = 2 * BLOCK
    with stash:
        loss = chain(x)
    assert stash.stats().keep_bytes == 0  # less than what the next allocations may need is free
    device.free = 1 << 40
    loss.backward()
    del loss
    stash.close()


def test_keep_auto_keeps_from_the_first_step_on_and_in_one_long_context():
    device = TwinDevice(chance=1.0, free=40 * BLOCK)
    stash = stash_on(device, keep="auto", host="64MiB", inflight=0, prefetch=0)
    x, true, kept, moved = leaf(), expected(), [], []
    with stash:
        for free in (40, 8, 40):
            device.free = free * BLOCK
            loss = chain(x)
            stats = stash.stats()
            kept.append(stats.keep_bytes // BLOCK)
            moved.append(stats.written_bytes // BLOCK)
            assert torch.equal(gradient(loss, x), true)
            del loss, stats
    assert (kept, moved) == ([8, 4, 8], [0, 4, 4])
    stash.close()


def test_keep_auto_applies_to_a_device_first_used_in_the_middle_of_a_step(monkeypatch):
    from backstash import Stash
    from backstash._tiers import device_tiers as _device_tiers

    monkeypatch.setattr(_device_tiers, "accelerator", lambda device: TwinDevice(free=MIB))
    with Stash(keep="auto", host="64MiB") as stash:
        leaf().exp()
        tiers = stash._session.tiers_of(torch.device("meta"))
        assert tiers.evictor.resident.limit == MIB // 2
    stash.close()


def test_all_devices_together_pin_half_of_what_there_is_to_spare(monkeypatch):
    from backstash import Stash
    from backstash._device import pinned_pool as _pinned_pool
    from backstash._tiers import device_tiers as _device_tiers

    pools = []
    total = 64 * MIB
    monkeypatch.setattr(_pinned_pool, "_SLAB_BYTES", MIB)
    monkeypatch.setattr(_device_tiers, "accelerator", lambda device: TwinDevice())
    monkeypatch.setattr(
        _device_tiers, "spare_bytes", lambda: total - sum(pool.slab_bytes for pool in pools)
    )
    stash = Stash(host="auto")
    for index in range(3):
        tiers = stash._session.tiers_of(torch.device("meta", index))
        pools.append(tiers.tier.pool)
    buffers = [pool.take(MIB) for _ in range(40) for pool in pools]
    assert [buffers[at::3].count(None) for at in range(3)] == [29, 29, 30]
    assert sum(pool.slab_bytes for pool in pools) == total // 2
    assert not pools[0].could_hold(12 * MIB) and pools[0].could_hold(11 * MIB)
    del buffers
    stash.close()


# A device that runs short.


class Small(TwinDevice):
    """Has so many bytes for what is kept or on its way, and knows it."""

    def __init__(self, nbytes):
        super().__init__()
        self.nbytes, self.asked = nbytes, 0

    def free_bytes(self):
        self.asked += 1
        evictor = self.stash._session.device_tiers[1].evictor
        return self.nbytes - evictor.resident.nbytes - evictor.inflight.nbytes


@pytest.mark.parametrize("keep", [None, "16MiB"])
def test_where_the_device_runs_short_less_stays_than_may(keep):
    device = Small(14 * BLOCK)
    stash = device.stash = stash_on(device, keep=keep, host="64MiB", inflight=BLOCK)
    x, most, out = leaf(), 0, leaf()
    with stash:
        for _ in range(24):
            out = torch.tanh(out * 1.5)
            evictor = stash._session.device_tiers[1].evictor
            most = max(most, evictor.resident.nbytes + evictor.inflight.nbytes)
        loss = chain(x)
    assert most == 8 * BLOCK, "six blocks are left for what comes next"
    assert torch.equal(gradient(loss, x), expected())
    assert device.faults == []
    del loss, out
    stash.close()


def test_where_the_device_runs_short_what_leaves_it_has_left():
    """A host that runs ahead sees no copy end: backward would find memory taken that is freed soon."""
    device = Small(14 * BLOCK)
    stash = device.stash = stash_on(device, keep=None, host="64MiB", inflight=8 * BLOCK)
    x, out = leaf(), leaf()
    with stash:
        for _ in range(24):
            out = torch.tanh(out * 1.5)
        loss = chain(x)
    evictor = stash._session.device_tiers[1].evictor
    assert device.waits == 0 and device.orders > 0
    assert evictor.resident.nbytes + evictor.inflight.nbytes == 8 * BLOCK
    assert torch.equal(gradient(loss, x), expected())
    assert device.faults == []
    del loss, out
    stash.close()


@pytest.mark.parametrize("keep", [None, "auto"])
def test_out_of_memory_in_backward_lowers_keep_as_soon_as_it_is_seen(keep):
    """Nobody calls a stash then: the allocator counts, and is asked when the device is."""
    device = TwinDevice(chance=1.0, free=40 * BLOCK)
    device.failed = 3  # before there was a stash
    stash = stash_on(device, keep=keep, host="64MiB", inflight=0)
    x, true = leaf(), expected()

    def kept():
        with stash:
            loss = chain(x)
        stats = stash.stats()
        assert torch.equal(gradient(loss, x), true)
        return stats.keep_bytes // BLOCK, [note for note in stats.notes if "keep is" in note]

    assert kept() == (8, [])
    device.failed += 1
    device.free = 16 * BLOCK  # so that it is asked
    found = [kept() for _ in range(4)][-1]
    assert found == (4, ["out of device memory: keep is lowered to 1.00 MiB"])
    device.free = 40 * BLOCK
    assert kept()[0] == 4, "and once, for each that failed"
    stash.set_keep(None)
    assert kept()[0] == 8
    assert device.faults == []
    stash.close()


def test_keep_can_be_changed_before_and_after_the_first_tensor():
    device = TwinDevice(chance=1.0, free=1 << 30)
    stash = stash_on(device, host="64MiB", inflight=0)
    x = leaf()
    for keep, kept in ((4 * BLOCK, 4), (None, 8), ("auto", 8), ("256KiB", 1), (0, 0)):
        stash.set_keep(keep)
        with stash:
            loss = chain(x)
        assert stash.stats().keep_bytes == kept * BLOCK, keep
        assert torch.equal(gradient(loss, x), expected())
        del loss
    with pytest.raises(SizeError):
        stash.set_keep("plenty")
    stash.close()


def test_a_device_first_used_later_has_the_budget_that_was_set(monkeypatch):
    from backstash import Stash
    from backstash._tiers import device_tiers as _device_tiers

    monkeypatch.setattr(_device_tiers, "accelerator", lambda device: TwinDevice())
    stash = Stash(keep=0, host="64MiB")
    stash.set_keep("1MiB")
    tiers = stash._session.tiers_of(torch.device("meta"))
    assert tiers.evictor.resident.limit == MIB
    stash.close()


def test_a_device_with_room_is_seldom_asked():
    device = Small(1 << 40)
    stash = device.stash = stash_on(device, keep=None, host="64MiB")
    x = leaf()
    with stash:
        for _ in range(20):
            chain(x)
    assert device.asked <= 2
    assert stash.stats().written_bytes == 0
    stash.close()


def test_out_of_memory_in_a_step_lowers_keep_and_leaves_nothing():
    device = TwinDevice(chance=0.5)
    stash = stash_on(device, keep=6 * BLOCK, host="64MiB", inflight=2 * BLOCK)
    x, true = leaf(), expected()
    for kept in (3, 1):
        with pytest.raises(torch.OutOfMemoryError), stash:
            out = chain(x)
            raise torch.OutOfMemoryError("a large one")
        del out
        gc.collect()
        stats = settled(stash, device)
        assert (stats.blocks, stats.host_bytes, stats.keep_bytes) == (0, 0, 0)
        with stash:
            loss = chain(x)
        stats = stash.stats()
        # Not exact: how many copies have ended is the device's chance.
        assert stats.keep_bytes + stats.inflight_bytes <= (kept + 2) * BLOCK
        assert any("keep is" in note for note in stats.notes)
        assert torch.equal(gradient(loss, x), true)
        del loss
    assert device.faults == []
    stash.close()


def test_a_region_that_finds_no_memory_goes_as_a_whole(monkeypatch):
    from backstash._saved.view import StridedRegion

    def fail(region, tensor):
        raise torch.OutOfMemoryError("no")

    monkeypatch.setattr(StridedRegion, "copy", fail)
    device = TwinDevice(chance=1.0)
    stash = stash_on(device, host="64MiB", min_bytes=0)
    x = leaf()

    def program(x):
        return (x * 2)[3].sin().sum()

    with stash:
        loss = program(x)
    assert torch.equal(gradient(loss, x), expected(program))
    assert stash.stats().written_bytes == BLOCK
    del loss
    stash.close()


def test_closing_waits_for_what_was_brought_back_for_nobody():
    """A guess that was wrong still reads the buffer when the stash is closed."""
    device = SlowToEnd(chance=1.0)
    stash = stash_on(device, host="64MiB", inflight=0)
    x = leaf()
    with stash:
        loss = chain(x)
    assert torch.equal(gradient(loss, x), expected())
    del loss
    gc.collect()
    stash.close()
    assert device.over and device.pinned_bytes == 0


def test_closing_waits_for_what_runs_and_unpins():
    device = TwinDevice()
    stash = stash_on(device, host="64MiB")
    x = leaf()
    with stash:
        chain(x)
    assert device.downs
    stash.close()
    assert device.pinned_bytes == 0
    assert not device.downs


def test_a_block_larger_than_host_memory_stays_and_the_others_go_on(tmp_path):
    device = TwinDevice(chance=1.0)
    stash = stash_on(device, host=4 * BLOCK, disk=tmp_path, inflight=0, min_bytes=1)
    x, large = leaf(), leaf(width=3 * SIDE)  # 9 times a block
    with pytest.warns(StashWarning, match=r"no space for 2.25 MiB.*raise host="), stash:
        kept = (large * 1.5).exp()
        loss = chain(x, steps=20)
    stats = stash.stats()
    assert stats.keep_bytes == 9 * BLOCK
    assert stats.written_bytes == 20 * BLOCK and stats.disk_bytes == 16 * BLOCK
    assert torch.equal(gradient(loss, x), expected(lambda x: chain(x, steps=20)))
    del kept, loss
    stash.close()


def test_buffers_that_bytes_were_staged_in_are_free_when_those_are_on_the_device(tmp_path):
    device = TwinDevice(chance=1.0)
    stash = stash_on(device, host=6 * BLOCK, disk=tmp_path, inflight=5 * BLOCK, prefetch=4 * BLOCK)
    x, large = leaf(), leaf(width=2 * SIDE)  # 4 times a block
    with stash:
        loss = chain(x, steps=20)
    settled(stash, device)
    while stash._session.device_tiers[1].tier.writeback.wait():
        settled(stash, device)  # a buffer that is still written from cannot be read to
    node = loss.grad_fn.next_functions[0][0]
    for _ in range(10):  # of a tanh and a multiplication each
        node = node.next_functions[0][0].next_functions[0][0]
    held = node._saved_result  # from disk; others are read ahead, by way of buffers
    with stash:
        second = (large * 1.5).exp() + (large * 2.5).exp()
    stats = settled(stash, device)
    assert stats.keep_bytes == 0 and stats.ahead_bytes == 4 * BLOCK
    assert torch.equal(gradient(loss, x), expected(lambda x: chain(x, steps=20)))
    del loss, second, held, node
    stash.close()
