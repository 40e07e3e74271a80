from contextlib import nullcontext

import torch
from torch import nn

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
    assert stash.stats().ahead_bytes == 3 * MIB
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
    assert stats.ahead_peak_bytes == (2 + 3) * MIB  # the window, and the mask in addition
    assert (stats.ahead_bytes, stats.blocks) == (0, 0)
    stash.close()


def test_of_two_such_masks_one_is_held_in_addition_to_the_window(tmp_path):
    stash = Stash(disk=tmp_path, inflight=0, prefetch="2MiB")
    with stash.record() as recording:
        stats = gradients_of_layers(stash, [torch.rand(3 * MIB // 4), torch.rand(MIB)], steps=1)
    read = [event.nbytes for event in recording.events if event.kind == "read"]
    assert read.count(4 * MIB) == 1  # backward uses it first
    assert read.count(3 * MIB) == 5
    # The block in addition to the window, and what is in use and larger than the window.
    assert stats.ahead_peak_bytes == (4 + 3) * MIB
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


def layers(count, rows=512, width=128):
    torch.manual_seed(0)
    layer = [nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)]
    model = nn.Sequential(*(nn.Sequential(*layer) for _ in range(count)))
    return model, torch.randn(rows, width, requires_grad=True)


def in_two_parts(model, x, hold, graphs=2):
    """As a pipeline's schedule does: for each graph the gradient of the input, later those of the weights."""
    with hold:
        losses = [model(x * number).square().sum() for number in range(1, graphs + 1)]
    found = [torch.autograd.grad(loss, x, retain_graph=True) for loss in losses]
    for _ in range(graphs):
        found.append(torch.autograd.grad(losses.pop(0), list(model.parameters())))
    return [gradient for gradients in found for gradient in gradients]


def test_what_two_backwards_of_a_retained_graph_want_is_read_once(tmp_path):
    model, x = layers(4)
    stash = Stash(disk=tmp_path, inflight=0, prefetch="128MiB")
    true, mine = in_two_parts(model, x, nullcontext()), in_two_parts(model, x, stash)
    assert all(map(torch.equal, true, mine))
    stats = stash.stats()
    # Not exact: of a block that lies in a segment, the units of 4096 bytes are read that it is in.
    assert stats.written_bytes <= stats.read_bytes <= stats.written_bytes + 10 * 4096, stats
    assert (
        stats.blocks,
        stats.ahead_bytes,
        stash._session.device_tiers[0].prefetcher.ahead.again_bytes,
    ) == (0, 0, 0)
    stash.close()


def test_where_it_does_not_fit_it_is_read_again_and_the_window_holds(tmp_path):
    model, x = layers(4)
    true = in_two_parts(model, x, nullcontext())
    read = {}
    for window in (0, 1 * MIB, 8 * MIB):
        stash = Stash(disk=tmp_path, inflight=0, prefetch=window)
        assert all(map(torch.equal, true, in_two_parts(model, x, stash)))
        stats = stash.stats()
        # Not exact: the largest window is not a sum of these blocks.
        assert stats.ahead_peak_bytes <= window and stats.ahead_bytes == 0
        assert stats.ahead_peak_bytes == window or window == 8 * MIB
        read[window] = stats.read_bytes
        # Reading ahead has its half of the window all the same.
        assert window == 0 or stats.prefetch_hits > stats.prefetch_misses, stats
        stash.close()
    # Half of the window is held at least, for the first graph whose other backward comes. Not exact: more is,
    # by how the blocks of 1 MiB fit.
    assert read[8 * MIB] <= read[0] - 4 * MIB + MIB, read


def test_what_the_program_changed_through_a_retained_graph_s_tensor_is_read_again(tmp_path):
    class Doubles(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x * 1)
            return x.sum()

        @staticmethod
        def backward(ctx, grad):
            (saved,) = ctx.saved_tensors
            out = saved.clone() * grad
            saved.mul_(2)
            return out

    x = torch.randn(MIB // 4, requires_grad=True)
    with Stash(disk=tmp_path, inflight=0) as stash:
        out = Doubles.apply(x)
    for _ in range(3):
        assert torch.equal(torch.autograd.grad(out, x, retain_graph=True)[0], x)
    assert stash.stats().read_bytes == 3 * MIB


def test_more_than_fits_again_and_again_finds_what_came_first(tmp_path):
    """Were the oldest dropped, each backward would find nothing."""
    x = torch.linspace(0, 1, MIB // 4, requires_grad=True)
    stash = Stash(disk=tmp_path, inflight=0, prefetch=6 * MIB)
    with stash:
        loss = blocks_of(x, 8)
    for _ in range(4):
        torch.autograd.grad(loss, x, retain_graph=True)
    # Not exact: where the window is full, which block gives way is up to how soon reads end.
    assert 8 * MIB < stash.stats().read_bytes <= (8 + 3 * 5) * MIB


def test_looking_at_what_a_node_saved_holds_nothing(tmp_path):
    x = torch.zeros(MIB // 4, requires_grad=True)
    with Stash(disk=tmp_path, inflight=0) as stash:
        y = x.exp()
    for number in (1, 2):
        assert torch.equal(y.grad_fn._saved_result, torch.ones_like(x))
        stats = stash.stats()
        assert (stats.ahead_bytes, stats.read_bytes) == (0, number * MIB)


def test_a_backward_that_retains_its_graph_gives_way_to_the_next(tmp_path):
    """A window that is full of what nobody comes for is that of the graph whose backward runs."""
    x = torch.linspace(0, 1, MIB // 4, requires_grad=True)
    stash = Stash(disk=tmp_path, inflight=0, prefetch=4 * MIB)
    with stash:
        left, other = blocks_of(x, 8), blocks_of(x, 8)
    torch.autograd.grad(left, x, retain_graph=True)
    held = stash.stats().ahead_bytes
    assert held == 4 * MIB
    before = stash.stats()
    torch.autograd.grad(other, x)
    stats = stash.stats()
    assert stats.prefetch_hits - before.prefetch_hits >= 6
    assert stats.ahead_peak_bytes == 4 * MIB and stats.ahead_bytes == 2 * MIB
    del left
    assert stash.stats().ahead_bytes == 0
