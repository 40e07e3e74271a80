import torch

from backstash import Disk, Stash
from backstash._saved.access_order import ForwardPass
from backstash.testing import Gated

MIB = 1 << 20


def blocks_of(x, length):
    for _ in range(length):
        x = x.exp() * 0.5
    return x.sum()


def test_backward_is_served_ahead_of_need(tmp_path):
    stash = Stash(disk=tmp_path, inflight=0)
    x = torch.zeros(MIB // 4, requires_grad=True)
    with stash:
        loss = blocks_of(x, 20)
    loss.backward()
    stats = stash.stats()
    assert stats.prefetch_misses == 1  # nobody could know when backward would begin
    assert stats.prefetch_hits == 19
    assert stats.read_bytes == 20 * MIB


def test_prefetch_keeps_inside_its_window_while_reads_hang(tmp_path):
    store = Gated(Disk(tmp_path))
    stash = Stash(disk=store, inflight=0, prefetch="3MiB")
    x = torch.zeros(MIB // 4, requires_grad=True)
    with stash:
        loss = blocks_of(x, 10)
    newest = loss.grad_fn.next_functions[0][0].next_functions[0][0]
    value = newest._saved_result  # one read by need; three more asked for, at most
    store.reads.clear()
    assert stash.stats().ahead_bytes <= 3 * MIB
    store.reads.set()
    assert torch.equal(value, newest._saved_result)
    loss.backward()
    store.close()


def test_small_blocks_are_looked_for_now_and_then_and_found(tmp_path, monkeypatch):
    looks = []
    after = ForwardPass.successors
    monkeypatch.setattr(ForwardPass, "successors", lambda *of: looks.append(of) or after(*of))
    stash = Stash(disk=tmp_path, inflight=0, prefetch="16MiB")
    x = torch.zeros(16_384, requires_grad=True)
    with stash:
        loss = blocks_of(x, 400)  # 25 MiB in blocks of 64 KiB
    loss.backward()
    stats = stash.stats()
    assert (stats.prefetch_misses, stats.prefetch_hits) == (1, 399)  # each written by itself
    assert 190 <= len(looks) <= 202  # each 128 KiB


def test_on_the_cpu_nothing_larger_than_the_window_comes_ahead(tmp_path):
    stash = Stash(disk=tmp_path, inflight=0, prefetch="512KiB")
    x = torch.zeros(MIB // 4, requires_grad=True)
    with stash:
        loss = blocks_of(x, 4)
    loss.backward()
    assert (stash.stats().prefetch_hits, stash.stats().prefetch_misses) == (0, 4)


class Crosswise(torch.autograd.Function):
    """Uses what it saved first before what it saved last."""

    @staticmethod
    def forward(ctx, *parts):
        ctx.save_for_backward(*[part.clone() for part in parts])
        return sum(parts)

    @staticmethod
    def backward(ctx, gradient):
        return tuple(gradient * saved for saved in ctx.saved_tensors)


def test_the_order_of_the_last_step_is_learnt(tmp_path):
    """Two graphs whose backwards run in the order of the saves, not in reverse."""
    stash = Stash(disk=tmp_path, inflight=0, prefetch="1MiB")
    x = torch.zeros(MIB // 4, requires_grad=True)

    def step():
        before = stash.stats()
        with stash:
            losses = [blocks_of(x, 2) for _ in range(8)]
        for loss in losses:
            loss.backward()
        after = stash.stats()
        return after.prefetch_hits - before.prefetch_hits

    first, second = step(), step()
    assert first <= 8  # the reverse of the saves finds the way inside each graph only
    assert second >= 14


def test_a_wrong_guess_costs_a_read_and_not_a_value(tmp_path):
    stash = Stash(disk=tmp_path, inflight=0, prefetch="64MiB")
    torch.manual_seed(0)
    x = torch.randn(MIB // 4).mul_(0.1).requires_grad_()
    with stash:
        losses = [blocks_of(x, 3) for _ in range(4)]
    for number in (2, 0, 3, 1):
        (gradient,) = torch.autograd.grad(losses[number], x)
        (expected,) = torch.autograd.grad(blocks_of(x, 3), x)
        assert torch.equal(gradient, expected)
    del losses
    assert stash.stats().ahead_bytes == 0


def layers_of(x, masks, length):
    for _ in range(length):
        x = x.sin()
        for mask in masks:
            x = (x.repeat(mask.numel() // x.numel()) * mask)[: x.numel()].clone()
    return x.sum()


def gradients_of_layers(stash, masks, *, steps=2):
    x = torch.linspace(0, 1, MIB // 4, requires_grad=True)
    (expected,) = torch.autograd.grad(layers_of(x, masks, 5), x)
    for _ in range(steps):
        with stash:
            loss = layers_of(x, masks, 5)
        (gradient,) = torch.autograd.grad(loss, x)
        assert torch.equal(gradient, expected)
        del loss
    return stash.stats()


def test_a_mask_larger_than_the_window_is_read_once_for_all_layers(tmp_path):
    stash = Stash(disk=tmp_path, inflight=0, prefetch="2MiB")
    stats = gradients_of_layers(stash, [torch.rand(3 * MIB // 4)])
    # Of x, the leaf, sin saves nothing that moves; of the other four layers 1 MiB each.
    assert stats.written_bytes == stats.read_bytes == 2 * (3 + 4) * MIB
    assert stats.ahead_peak_bytes <= (2 + 3) * MIB
    assert (stats.ahead_bytes, stats.blocks) == (0, 0)
    stash.close()


def test_of_two_such_masks_one_is_held_beside_the_window(tmp_path):
    stash = Stash(disk=tmp_path, inflight=0, prefetch="2MiB")
    with stash.record() as recording:
        stats = gradients_of_layers(stash, [torch.rand(3 * MIB // 4), torch.rand(MIB)], steps=1)
    read = [event.nbytes for event in recording.events if event.kind == "read"]
    assert read.count(4 * MIB) == 1  # backward meets it first
    assert read.count(3 * MIB) == 5
    # The window, the block beside it, and what is in use and larger than the window.
    assert stats.ahead_peak_bytes <= (2 + 4 + 3) * MIB
    stash.close()


def test_without_a_window_nothing_is_held_for_later(tmp_path):
    stash = Stash(disk=tmp_path, inflight=0, prefetch=0)
    stats = gradients_of_layers(stash, [torch.rand(3 * MIB // 4)])
    assert stats.read_bytes == 2 * (5 * 3 + 4) * MIB
    stash.close()


def test_a_block_that_backward_left_gives_way_to_the_next_pass(tmp_path):
    stash = Stash(disk=tmp_path, inflight=0, prefetch="2MiB")
    x, mask = torch.ones(MIB, requires_grad=True), torch.rand(MIB)
    with stash:
        one = x * mask
        other = x.sin() * mask  # of which the mask is not asked for
    torch.autograd.grad(one.sum(), x)
    assert stash.stats().ahead_bytes == 4 * MIB
    mask = mask + 1
    with stash:
        loss = ((x * mask) * mask).sum()
    before = stash.stats().read_bytes
    loss.backward()
    assert stash.stats().read_bytes - before == 4 * MIB
    assert stash.stats().ahead_bytes == 0
    del other, one
    stash.close()
