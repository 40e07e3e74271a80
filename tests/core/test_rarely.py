"""What rarely happens, and has to go well all the same: each was found by looking at what no test ran."""

import threading

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from backstash import Disk, Stash
from backstash.errors import InplaceError, StashIOError, UsageError
from backstash.policy import first, larger_than
from backstash.testing import Gated, TwinDevice, stash_on
from oracle import gradients, same_bits


def leaf(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1)).requires_grad_()


class FailsAhead(Gated):
    """Every first read of a slot that is not asked for by the thread that waits for it fails."""

    failures = 0

    def read(self, slot, address):
        if threading.current_thread() is not threading.main_thread():
            self.failures += 1
            raise StashIOError(5, "not now")
        super().read(slot, address)


def test_a_read_ahead_of_need_that_fails_is_asked_for_again(tmp_path):
    store = FailsAhead(Disk(tmp_path))
    stash = Stash(disk=store, inflight=0)
    x = leaf(600, 600)

    def program():
        h = x
        for _ in range(6):
            h = h.sin()
        return h

    expected = gradients(program(), x)
    with stash:
        loss = program()
    assert same_bits(*gradients(loss, x), *expected)
    assert store.failures > 0
    del loss
    stash.close()
    store.close()


def test_leaving_a_stash_that_was_not_entered():
    stash = Stash()
    with pytest.raises(UsageError, match="exited a stash more often than it entered it"):
        stash.__exit__(None, None, None)
    with stash:
        pass
    with pytest.raises(UsageError, match="more often"):
        stash.__exit__(None, None, None)


class Leaves(nn.Module):
    def __init__(self, stash):
        super().__init__()
        self.stash = stash

    def forward(self, x):
        self.stash.__exit__(None, None, None)
        return x


def test_leaving_a_stash_inside_a_module_that_it_is_attached_to():
    stash = Stash()
    module = Leaves(stash)
    with stash.attach(module):
        with pytest.raises(UsageError, match="inside the forward of a module it is attached to"):
            module(leaf(3))
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def test_a_module_that_fails_before_its_stash_was_entered(tmp_path):
    """Its forward hook runs all the same, and must not leave the stash around it."""
    stash, module = Stash(disk=tmp_path, min_bytes=0), nn.Linear(4, 4)

    def refuse(*_):
        raise ValueError("not today")

    x = leaf(4)
    with stash.attach(module), stash:
        handle = module.register_forward_pre_hook(refuse, prepend=True)
        with pytest.raises(ValueError, match="not today"):
            module(x)
        handle.remove()
        before = stash.stats().saves
        loss = x.exp().sin()
        assert stash.stats().saves > before
    assert same_bits(*gradients(loss, x), *gradients(x.exp().sin(), x))
    del loss
    stash.close()


def test_a_policy_where_none_names_an_action(tmp_path):
    x = leaf(200, 200)
    with Stash(disk=tmp_path, policy=first(larger_than("1GiB", None), lambda saved: None)) as stash:
        loss = x.exp().sin()
    assert stash.stats().eligible_bytes > 0  # the default decides
    del loss
    stash.close()


def test_stats_report_host_memory():
    x = leaf(200, 200)
    with stash_on(TwinDevice(), host="8MiB") as stash:
        loss = x.exp().sin()
    assert "  in host " in str(stash.stats())
    gradients(loss, x)
    del loss
    stash.close()


def test_a_tensor_changed_in_place_is_freed_when_its_turn_to_leave_comes(tmp_path):
    """It can never be used any more: backward will raise an error, and nobody need hold its bytes."""
    stash = Stash(disk=tmp_path, keep="1MiB")
    x = leaf(500, 500)
    with stash:
        h = x * 2
        lost = h.sin()
        h.add_(1)
        weak = StorageWeakRef(h.untyped_storage())
        del h
        assert not weak.expired() and stash.stats().keep_bytes == 1_000_000
        loss = x.exp().sin().exp()  # now the oldest has to go
    assert weak.expired()
    assert stash.stats().keep_bytes == 1_000_000
    with pytest.raises(InplaceError):
        gradients(lost, x)
    assert same_bits(*gradients(loss, x), *gradients(x.exp().sin().exp(), x))
    del lost, loss
    stash.close()
