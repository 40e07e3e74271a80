"""Transfers that fail, stop short or are interrupted, at random: right gradients or a clear error."""

import errno
import gc
import os
import random
import warnings

import pytest
import torch

from backstash import StashError, StashFullError
from backstash.errors import StashIOError
from backstash.stores._leases import Leases
from backstash.testing import TwinDevice, stash_on
from faulty import INPUTS, MIXES, are_right, forward, gradients, wrong_after
from transfers import Faults


@pytest.mark.parametrize("mix", MIXES)
def test_short_and_interrupted_transfers_change_nothing(tmp_path, monkeypatch, mix):
    stash = MIXES[mix](tmp_path)
    faults = Faults(random.Random(3), short=0.7, interrupted=0.3)
    faults.put_under(monkeypatch)
    for _ in range(
        100
    ):  # what is used while it is being written is not read: few transfers in some steps
        assert are_right(gradients(stash))
        if faults.counts["short"] and faults.counts["interrupted"]:
            break
    assert faults.counts["short"] and faults.counts["interrupted"]
    monkeypatch.undo()
    assert not wrong_after(stash)


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.ENOMEM])
def test_a_write_that_fails_leaves_its_block_in_place(tmp_path, monkeypatch, mix, number):
    for seed in range(3):
        stash = MIXES[mix](tmp_path)
        faults = Faults(random.Random(seed), fails=0.3, number=number, calls=("pwrite",))
        faults.put_under(monkeypatch)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(4):
                assert are_right(gradients(stash))
        monkeypatch.undo()
        gc.collect()
        if caught:
            message = str(caught[0].message)
            assert os.strerror(number) in message and "kept in memory" in message
        stash.close()
        stats = stash.stats()
        assert (stats.blocks, stats.keep_bytes, stats.inflight_bytes, stats.disk_bytes) == (0,) * 4


@pytest.mark.parametrize("mix", MIXES)
def test_a_read_that_fails_raises_and_can_be_tried_again(tmp_path, monkeypatch, mix):
    """Read ahead and on demand; the graph is whole and so is every other one."""
    failures = 0
    for seed in range(4):
        stash = MIXES[mix](tmp_path)
        with stash:
            loss, other = forward(), forward()
        faults = Faults(random.Random(seed), fails=0.5, calls=("preadv",))
        faults.put_under(monkeypatch)
        for _ in range(8):
            try:
                assert are_right(torch.autograd.grad(loss, INPUTS, retain_graph=True))
            except StashIOError as error:
                failures += 1
                assert error.errno == errno.EIO
                assert "read failed: Input/output error" in str(error)
                assert str(tmp_path) in str(error)
        monkeypatch.undo()
        for each in (loss, other):
            assert are_right(torch.autograd.grad(each, INPUTS))
        del loss, other, each
        assert not wrong_after(stash)
    assert failures


@pytest.mark.parametrize("mix", MIXES)
def test_what_an_error_held_is_never_lent_twice(tmp_path, monkeypatch, mix):
    """The collector finds a failed read in the cycle of its error, just before its place could be taken."""
    stash = MIXES[mix](tmp_path)
    faults = Faults(random.Random(0), fails=0.5, calls=("preadv",))
    take, failures = Leases.take, 0

    def take_after_a_collection(self, owner, nbytes):
        gc.collect()
        return take(self, owner, nbytes)

    for _ in range(2):
        with stash:
            loss = forward()
        monkeypatch.setattr(Leases, "take", take_after_a_collection)
        with monkeypatch.context() as bad_disk:
            faults.put_under(bad_disk)
            for _ in range(6):
                try:
                    assert are_right(torch.autograd.grad(loss, INPUTS, retain_graph=True))
                except StashIOError as error:
                    failures += 1
                    error.cycle = error  # as an exception that is kept together with its frames
        assert are_right(gradients(stash))
        assert are_right(torch.autograd.grad(loss, INPUTS))
        monkeypatch.undo()
        del loss
    assert failures
    assert not wrong_after(stash)


def test_a_copy_that_fails_leaves_its_block_on_the_device(tmp_path, monkeypatch):
    rng = random.Random(0)
    device = TwinDevice(chance=0.3)
    down, failed = device.down, []

    def fails_now_and_then(*arguments):
        if rng.random() < 0.2:
            failed.append(1)
            raise RuntimeError("the twin's link is down")
        return down(*arguments)

    monkeypatch.setattr(device, "down", fails_now_and_then)
    stash = stash_on(device, host="3MiB", disk=tmp_path, min_bytes=64, inflight="1MiB")
    raised = 0
    for _ in range(12):
        try:
            assert are_right(gradients(stash))
        except RuntimeError as error:
            assert "link is down" in str(error)
            raised += 1
    assert raised and failed
    monkeypatch.undo()
    assert not wrong_after(stash)


def test_a_copy_back_that_fails_can_be_tried_again(tmp_path, monkeypatch):
    rng = random.Random(0)
    device = TwinDevice(chance=0.3)
    stash = stash_on(device, host="3MiB", disk=tmp_path, min_bytes=64, inflight="1MiB")
    with stash:
        loss = forward()
    up, raised = device.up, 0

    def fails_now_and_then(*arguments):
        if rng.random() < 0.2:
            raise torch.OutOfMemoryError("the twin is full")
        return up(*arguments)

    monkeypatch.setattr(device, "up", fails_now_and_then)
    for _ in range(400):  # what fails ahead of need is tried again in silence: few are raised
        stash._session.device_tiers[-1].prefetcher.free()  # or nothing is copied back again
        try:
            assert are_right(torch.autograd.grad(loss, INPUTS, retain_graph=True))
        except torch.OutOfMemoryError:
            raised += 1
        if raised == 2:
            break
    assert raised == 2
    monkeypatch.undo()
    assert are_right(torch.autograd.grad(loss, INPUTS))
    del loss
    assert not wrong_after(stash)


@pytest.mark.parametrize("mix", MIXES)
def test_on_full_raise_names_the_fault_and_leaves_nothing(tmp_path, monkeypatch, mix):
    stash = MIXES[mix](tmp_path)
    for tiers in stash._session.device_tiers:
        tiers.evictor.health._raises = True
    faults = Faults(random.Random(1), fails=1.0, number=errno.ENOSPC, calls=("pwrite",))
    faults.put_under(monkeypatch)
    messages = []
    for _ in range(3):
        try:
            assert are_right(gradients(stash))
        except StashError as error:
            messages.append(type(error))
    monkeypatch.undo()
    if mix != "accelerator":  # there the host's memory may do
        assert messages
    assert set(messages) <= {StashFullError}
    gc.collect()
    stash.close()
    assert (stash.stats().blocks, stash.stats().disk_bytes) == (0, 0)
