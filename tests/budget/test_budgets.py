"""Budgets hold, with every order of events forced by gates and none left to luck."""

import threading
import warnings

import pytest
import torch

from backstash import Action, Disk, Stash, StashFullError, StashWarning
from backstash._runtime.transfer import Stalls
from backstash.errors import StashIOError
from backstash.testing import Failing, Gated, MemoryStore

MIB = 1 << 20


def chain(x, length):
    """Each step saves one block of x's size."""
    for _ in range(length):
        x = x.exp() * 0.5
    return x.sum()


def leaf(mib):
    torch.manual_seed(0)
    return (torch.randn(mib * MIB // 4) * 0.1).requires_grad_()


def plain_gradient(x, length):
    (gradient,) = torch.autograd.grad(chain(x, length), x)
    return gradient


def test_keep_holds_the_newest_and_the_oldest_go_down(tmp_path):
    stash = Stash(keep="4MiB", disk=tmp_path)
    x = leaf(1)
    with stash:
        loss = chain(x, 10)
    stats = stash.stats()
    assert stats.eligible_bytes == 10 * MIB
    assert stats.keep_bytes == stats.keep_peak_bytes == 4 * MIB
    assert stats.written_bytes == 6 * MIB
    where = []
    node = loss.grad_fn
    while node is not None:
        packed = getattr(node, "_raw_saved_result", None)
        if packed is not None:
            where.append(packed.data.block.placement.is_kept)
        node = node.next_functions[0][0] if node.next_functions else None
    assert where[:4] == [True] * 4  # walking back from the loss: the newest first
    (gradient,) = torch.autograd.grad(loss, x)
    assert torch.equal(gradient, plain_gradient(x, 10))
    assert stash.stats().keep_bytes == 0


@pytest.mark.parametrize(
    ("keep", "inflight", "prefetch"),  # each pair of two of them
    [
        *((0, 0, 0), (0, "1MiB", "2MiB"), (0, "5MiB", "64MiB")),
        *(("3MiB", 0, "2MiB"), ("3MiB", "1MiB", "64MiB"), ("3MiB", "5MiB", 0)),
        *((None, 0, "64MiB"), (None, "1MiB", 0), (None, "5MiB", "2MiB")),
    ],
)
def test_no_budget_is_ever_exceeded(tmp_path, keep, inflight, prefetch):
    stash = Stash(keep=keep, disk=tmp_path, inflight=inflight, prefetch=prefetch)
    x = leaf(1)
    expected = plain_gradient(x, 12)
    for _ in range(2):
        with stash:
            loss = chain(x, 12)
        (gradient,) = torch.autograd.grad(loss, x)
        assert torch.equal(gradient, expected)
    stats = stash.stats()
    limit = {0: 0, **{f"{mib}MiB": mib * MIB for mib in (1, 2, 3, 5, 64)}}
    assert stats.keep_peak_bytes == (12 * MIB if keep is None else limit[keep])
    # Not exact: how many writes are under way at once is up to the disk; one is, where any is.
    least = min(limit[inflight], MIB) if keep is not None else 0
    assert least <= stats.inflight_peak_bytes <= limit[inflight]
    # Not exact: how soon blocks are asked for, of which there are fewer than 64 MiB.
    assert stats.ahead_peak_bytes <= limit[prefetch]
    assert stats.ahead_peak_bytes == limit[prefetch] or keep is None or prefetch == "64MiB"
    assert (stats.keep_bytes, stats.ahead_bytes, stats.blocks) == (0, 0, 0)


@pytest.mark.parametrize("kib", [64, 300, 511, 512, 700])
def test_budgets_hold_for_blocks_of_every_size(tmp_path, kib):
    torch.manual_seed(0)
    x = (torch.randn(kib * 256) * 0.1).requires_grad_()
    stash = Stash(keep="1MiB", disk=tmp_path, inflight="2MiB", prefetch="8MiB")
    with stash:
        loss = chain(x, 40)
    stats = stash.stats()
    assert stats.keep_peak_bytes == (MIB // (kib << 10)) * (kib << 10)
    # Not exact: how many writes are under way at once is up to the disk.
    assert kib << 10 <= stats.inflight_peak_bytes <= 2 * MIB
    assert stats.written_bytes + stats.keep_bytes == stats.eligible_bytes == 40 * kib * 1024
    (gradient,) = torch.autograd.grad(loss, x)
    assert torch.equal(gradient, plain_gradient(x, 40))


def test_forward_waits_when_the_window_is_full(tmp_path, monkeypatch):
    """No write can end until forward has come to wait for one."""
    store = Gated(Disk(tmp_path))
    stash = Stash(disk=store, inflight="3MiB")
    x = leaf(1)
    store.writes.clear()
    waits = []
    inflight = stash._session.device_tiers[0].evictor.inflight
    wait = Stalls.wait

    def open_then_wait(stalls, writing):
        waits.append(inflight.nbytes)
        store.writes.set()
        wait(stalls, writing)

    monkeypatch.setattr(Stalls, "wait", open_then_wait)
    with stash:
        loss = chain(x, 6)
    assert waits[0] == 3 * MIB
    (gradient,) = torch.autograd.grad(loss, x)
    assert torch.equal(gradient, plain_gradient(x, 6))
    assert stash.stats().inflight_peak_bytes == 3 * MIB
    monkeypatch.undo()
    store.close()


def test_a_block_larger_than_the_window_is_moved_within_the_call(tmp_path):
    stash = Stash(disk=tmp_path, inflight="1MiB", prefetch="1MiB")
    x = leaf(4)
    with stash:
        loss = chain(x, 3)
        assert stash.stats().inflight_bytes == 0
    (gradient,) = torch.autograd.grad(loss, x)
    assert torch.equal(gradient, plain_gradient(x, 3))


def test_a_thread_never_waits_for_another_one_s_memory(tmp_path):
    """One thread's copies fill the window and it does not come back; the other must not hang."""
    store = Gated(Disk(tmp_path))
    stash = Stash(disk=store, inflight="2MiB")
    x = leaf(1)
    with stash:
        mine = chain(x, 2)  # in flight, and this thread now waits for the other
    results = []

    def other():
        with stash:
            results.append(chain(x, 8))

    thread = threading.Thread(target=other)
    thread.start()
    thread.join(60)
    assert results, "the other thread hangs"
    assert stash.stats().inflight_peak_bytes == 2 * MIB
    for loss, length in ((results[0], 8), (mine, 2)):
        (gradient,) = torch.autograd.grad(loss, x)
        assert torch.equal(gradient, plain_gradient(x, length))
    store.close()


def test_a_full_store_leaves_blocks_in_place_and_warns_once(tmp_path):
    stash = Stash(disk=Disk(tmp_path, max_bytes="3MiB"))
    x = leaf(1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with stash:
            loss = chain(x, 9)
    assert [w.category for w in caught] == [StashWarning]
    assert "no space for 1.00 MiB" in str(caught[0].message)
    stats = stash.stats()
    assert stats.disk_bytes == 3 * MIB
    assert stats.keep_bytes == 6 * MIB
    assert any("kept in memory" in note for note in stats.notes)
    (gradient,) = torch.autograd.grad(loss, x)
    assert torch.equal(gradient, plain_gradient(x, 9))


def test_room_that_comes_back_is_used_again(tmp_path):
    stash = Stash(disk=Disk(tmp_path, max_bytes="3MiB"))
    x = leaf(1)
    with pytest.warns(StashWarning), stash:
        chain(x, 5).backward()
    with stash:
        chain(x, 3)
    stats = stash.stats()
    assert (stats.keep_bytes, stats.written_bytes) == (0, 6 * MIB)


def test_a_block_that_finds_no_room_does_not_keep_smaller_ones_from_going(tmp_path):
    stash = Stash(keep=0, disk=Disk(tmp_path, max_bytes="3MiB"), inflight=0)
    small, large = leaf(1), leaf(4)
    with pytest.warns(StashWarning, match="no space for 4.00 MiB"), stash:
        kept = chain(large, 2)
        loss = chain(small, 3)
    stats = stash.stats()
    assert (stats.keep_bytes, stats.disk_bytes) == (8 * MIB, 3 * MIB)
    (gradient,) = torch.autograd.grad(loss, small)
    assert torch.equal(gradient, plain_gradient(small, 3))
    del kept, loss
    stash.close()


def test_what_found_no_room_goes_when_room_comes_back(tmp_path):
    stash = Stash(keep=0, disk=Disk(tmp_path, max_bytes="4MiB"), inflight=0)
    x = leaf(1)
    with pytest.warns(StashWarning), stash:
        first, second = chain(x, 4), chain(x, 2)
    assert stash.stats().keep_bytes == 2 * MIB
    (gradient,) = torch.autograd.grad(first, x)
    assert torch.equal(gradient, plain_gradient(x, 4))
    with stash:
        third = chain(x, 1)
    assert stash.stats().keep_bytes == 0
    for loss, length in ((second, 2), (third, 1)):
        (gradient,) = torch.autograd.grad(loss, x)
        assert torch.equal(gradient, plain_gradient(x, length))
    stash.close()


def test_on_full_raise_raises_and_the_graph_so_far_is_whole(tmp_path):
    stash = Stash(disk=Disk(tmp_path, max_bytes="2MiB"), on_full="raise")
    x = leaf(1)
    with stash:
        first = chain(x, 2)
        with pytest.raises(StashFullError, match="raise max_bytes"):
            chain(x, 1)
    (gradient,) = torch.autograd.grad(first, x)
    assert torch.equal(gradient, plain_gradient(x, 2))
    with stash:  # it goes on once there is room
        (gradient,) = torch.autograd.grad(chain(x, 1), x)
    assert torch.equal(gradient, plain_gradient(x, 1))


@pytest.mark.parametrize("kib", [128, 1024])
def test_a_failed_write_leaves_the_block_where_it_was(kib):
    store = Failing(MemoryStore())
    store.on_write = StashIOError(5, "the disk broke")
    stash = Stash(disk=store)
    torch.manual_seed(0)
    x = (torch.randn(kib * 256) * 0.1).requires_grad_()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with stash:
            loss = chain(x, 50)
            stash._workers.close()  # each write has ended, before backward makes it needless
        (gradient,) = torch.autograd.grad(loss, x)
    assert torch.equal(gradient, plain_gradient(x, 50))
    assert len(caught) == 1
    assert "the disk broke" in str(caught[0].message)
    del loss
    stats = stash.stats()
    assert (stats.blocks, stats.keep_bytes, stats.disk_bytes) == (0, 0, 0)


def test_a_failed_write_raises_when_the_caller_wants_it():
    store = Failing(MemoryStore())
    store.on_write = StashIOError(5, "the disk broke")
    stash = Stash(disk=store, on_full="raise", inflight=0)
    x = leaf(1)
    with pytest.raises(Exception, match="the disk broke"), stash:
        chain(x, 4)


def test_a_failed_read_is_an_error_and_a_later_one_may_succeed():
    store = Failing(MemoryStore())
    stash = Stash(disk=store)
    x = leaf(1)
    with stash:
        loss = chain(x, 4)
    stash._workers.close()
    with stash:  # lands what was in flight
        pass
    store.on_read = StashIOError(5, "unreadable")
    with pytest.raises(StashIOError, match="unreadable"):
        torch.autograd.grad(loss, x, retain_graph=True)
    store.on_read = None
    (gradient,) = torch.autograd.grad(loss, x)
    assert torch.equal(gradient, plain_gradient(x, 4))


def test_without_threads_moves_run_on_the_caller(tmp_path, monkeypatch):
    def no_thread(self):
        raise RuntimeError("can't start new thread")

    stash = Stash(disk=tmp_path)
    x = leaf(1)
    monkeypatch.setattr(threading.Thread, "start", no_thread)
    with stash:
        loss = chain(x, 5)
    (gradient,) = torch.autograd.grad(loss, x)
    monkeypatch.undo()
    assert torch.equal(gradient, plain_gradient(x, 5))
    assert any("no worker thread" in note for note in stash.stats().notes)


def test_no_memory_for_a_read_buffer_is_a_memory_error_and_nothing_is_lost(tmp_path, monkeypatch):
    import backstash.stores._buffer_pool as memory

    stash = Stash(disk=tmp_path, inflight=0)
    x = leaf(1)
    with stash:
        loss = chain(x, 4)

    def none_left(nbytes):
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(memory, "_map", none_left)
    with pytest.raises(MemoryError, match="Cannot allocate memory"):
        torch.autograd.grad(loss, x, retain_graph=True)
    monkeypatch.undo()
    (gradient,) = torch.autograd.grad(loss, x)
    assert torch.equal(gradient, plain_gradient(x, 4))


def test_a_policy_may_pass_over_the_keep_budget(tmp_path):
    stash = Stash(keep=None, disk=tmp_path, policy=lambda saved: Action("disk"))
    x = leaf(1)
    with stash:
        loss = chain(x, 4)
    stats = stash.stats()
    assert stats.keep_bytes == 0
    assert stats.written_bytes == 4 * MIB
    (gradient,) = torch.autograd.grad(loss, x)
    assert torch.equal(gradient, plain_gradient(x, 4))


def test_room_that_a_dead_block_s_write_still_takes_is_waited_for(tmp_path, monkeypatch):
    store = Gated(Disk(tmp_path, max_bytes="2MiB"))
    stash = Stash(disk=store, on_full="raise")
    x = leaf(1)
    store.writes.clear()
    with stash:
        chain(x, 2)  # dropped at once; both writes stand at the gate
        for _ in range(2):
            assert store.begun.acquire(timeout=30)
        wait = Stalls.wait
        monkeypatch.setattr(Stalls, "wait", lambda stalls, w: (store.writes.set(), wait(stalls, w)))
        loss = chain(x, 2)
    (gradient,) = torch.autograd.grad(loss, x)
    assert torch.equal(gradient, plain_gradient(x, 2))
    monkeypatch.undo()
    store.close()


@pytest.mark.parametrize("where", ["add", "leave"])
def test_an_interrupt_while_a_block_leaves_loses_none_to_its_budget(tmp_path, monkeypatch, where):
    """It is in place and counted, or on its way: never in place and counted by nobody."""
    stash = Stash(keep="2MiB", disk=tmp_path)
    evictor = stash._session.device_tiers[0].evictor
    target = evictor.inflight if where == "add" else evictor.resident
    original, calls = getattr(target, where), []

    def interrupted(*arguments):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return original(*arguments)

    monkeypatch.setattr(target, where, interrupted)
    x = leaf(1)
    y, graphs = x, []
    with pytest.raises(KeyboardInterrupt), stash:
        for _ in range(8):
            y = y.sin()
            graphs.append(y)
    monkeypatch.undo()
    with stash:
        loss = graphs[-1].sin().sum()
    blocks = [
        each.grad_fn._raw_saved_self.data.block
        for each in graphs[1:]
        if hasattr(each.grad_fn._raw_saved_self.data, "block")
    ]
    kept = [block for block in blocks if block.placement.is_kept]
    assert blocks and all(block.cleanup.resident_bytes == block.nbytes for block in kept)
    assert stash.stats().keep_bytes == 2 * MIB
    assert torch.autograd.grad(loss, x)[0].isfinite().all()
    stash.close()
