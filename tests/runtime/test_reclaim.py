"""What an object leaves when it dies: whose it is, and whether anything still uses it."""

import gc
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from backstash._runtime.reclaim import Cleanup, ReclaimQueue
from backstash._saved.block import Block, BlockCleanup, StorageVersion
from backstash._saved.view import raw_alias
from backstash._tiers.backing import DiskBacking, DiskCleanup
from backstash._tiers.host_backing import HostBacking, HostCleanup, HostLoad
from backstash.stores import Slot


class Ledger:
    """Notes what is subtracted and what is deferred."""

    def __init__(self):
        self.calls = []

    def subtract(self, **what):
        self.calls.append(what)

    def defer(self, cleanup):
        self.calls.append(cleanup)


def test_cleanups_know_their_queue_s_mark_and_count_for_nothing_yet():
    reclaim_queue, buffer, store, slot = ReclaimQueue(), object(), object(), object()
    block, backing = BlockCleanup(reclaim_queue, 2, 12), DiskCleanup(reclaim_queue, store, slot)
    host = HostCleanup(reclaim_queue, 3, buffer)
    assert block.mark is backing.mark is host.mark is reclaim_queue.mark is not ReclaimQueue().mark
    assert (block.number, backing.number, host.number) == (2, 0, 3)
    assert (block.nbytes, block.resident_bytes, block.loaded_bytes) == (12, 0, 0)
    assert (block.serial, block.module) == (-1, "")
    assert (backing.store, backing.slot, backing.transfer) == (store, slot, None)
    assert (backing.loaded_bytes, backing.inflight_bytes) == (0, 0)
    assert (host.buffer, host.slot, host.work) == (buffer, None, None)
    assert (host.written, host.brought, host.staged) == (None, None, None)
    assert host.loaded_bytes == 0
    assert [each.facts for each in (block, backing, host)] == [None] * 3


def objects(reclaim_queue):
    """One of everything that leaves a cleanup."""
    x, buffer = torch.zeros(4), SimpleNamespace(memory=torch.zeros(16, dtype=torch.uint8))
    host = HostCleanup(reclaim_queue, 1, None)
    work = SimpleNamespace()
    yield Block(StorageVersion(x, x.untyped_storage()), raw_alias(x), reclaim_queue, 0)
    yield DiskBacking(None, Slot(16), 0, reclaim_queue)
    yield HostBacking(reclaim_queue, 1, buffer, None)
    yield HostLoad(None, None, reclaim_queue, host, work, x, ahead=False)


def test_what_dies_leaves_its_cleanup_by_a_call_of_c():
    reclaim_queue = ReclaimQueue()
    for each in objects(reclaim_queue):
        end, cleanup = each.__del__, each.cleanup
        assert type(end) is partial and end.func == reclaim_queue.append and end.args == (cleanup,)
        del each, end
        assert reclaim_queue.pop() is cleanup and not reclaim_queue
        # It may wait long: nothing of a tensor is kept for its sake.
        held = gc.get_referents(cleanup)
        assert not any(isinstance(one, torch.Tensor) for one in held)


def test_a_cleanup_has_to_say_how_it_is_settled():
    class Plain(Cleanup):
        def settle(self, ledger):
            ledger.subtract()

    with pytest.raises(TypeError, match="abstract"):
        Cleanup()
    assert Plain().is_busy() is False and Plain().facts is None


def test_what_is_in_host_memory_is_deferred_whatever_uses_it():
    ledger, cleanup = Ledger(), left(written=Use(False), work=Use(False))
    assert cleanup.is_busy() is False
    cleanup.settle(ledger)
    assert ledger.calls == [cleanup] and cleanup.work.asked == []


@pytest.mark.parametrize("inflight", [0, 30])
def test_a_slot_is_released_and_what_was_in_flight_subtracted(inflight):
    released, ledger = [], Ledger()

    def release(slot):
        assert (cleanup.slot, cleanup.inflight_bytes) == (None, 0)  # struck out before
        released.append(slot)

    cleanup = DiskCleanup(ReclaimQueue(), SimpleNamespace(release=release), "slot")
    cleanup.inflight_bytes = inflight
    for _ in range(2):
        cleanup.settle(ledger)
    assert released == ["slot"]
    assert ledger.calls == ([{"inflight_bytes": 30}] if inflight else [])


@pytest.mark.parametrize(
    ("transfer", "is_busy"),
    [
        (lambda: None, False),
        (lambda: Use(True), False),
        (lambda: Use(False), True),
        (lambda: Use(False, can_be_cancelled=True), False),
    ],
)
def test_a_slot_is_busy_while_its_write_runs(transfer, is_busy):
    cleanup = DiskCleanup(ReclaimQueue(), None, "slot")
    cleanup.transfer = transfer()
    assert cleanup.is_busy() is is_busy


class Use:
    """A copy or a worker's work, that has ended or not, and notes what is asked of it."""

    def __init__(self, has_ended, can_be_cancelled=False):
        self.has_ended, self.can_be_cancelled, self.asked = has_ended, can_be_cancelled, []

    @property
    def finished(self):
        return self.has_ended

    def ended(self):
        return self.has_ended

    def cancel(self):
        self.asked.append("cancel")
        return self.can_be_cancelled

    def wait(self):
        self.asked.append("wait")

    exception = wait


def left(**uses):
    cleanup = HostCleanup(ReclaimQueue(), 0, SimpleNamespace())
    for name, use in uses.items():
        setattr(cleanup, name, use)
    return cleanup


@pytest.mark.parametrize(
    ("uses", "at_rest"),
    [
        ({}, True),
        ({"work": Use(True)}, True),
        ({"work": Use(False)}, False),
        ({"work": Use(False, can_be_cancelled=True)}, True),
        ({"written": Use(True), "brought": Use(True), "work": Use(True)}, True),
        ({"written": Use(False), "brought": Use(True)}, False),
        ({"written": Use(True), "brought": Use(False)}, False),
        ({"written": Use(False), "work": Use(True)}, False),
        ({"brought": Use(True), "work": Use(False)}, False),
    ],
)
def test_it_is_at_rest_when_nothing_uses_it(uses, at_rest):
    assert left(**uses).at_rest() is at_rest


def test_work_that_is_done_is_not_called_off():
    cleanup = left(work=Use(True))
    assert cleanup.at_rest() and cleanup.work.asked == []


def test_to_wait_is_to_wait_for_all_of_it():
    left().wait()  # there is nothing
    cleanup = left(written=Use(False), brought=Use(False), work=Use(False))
    cleanup.wait()
    assert cleanup.written.asked == cleanup.brought.asked == ["wait"]
    assert cleanup.work.asked == ["cancel", "wait"]


def test_work_that_is_called_off_is_not_waited_for():
    cleanup = left(work=Use(False, can_be_cancelled=True))
    cleanup.wait()
    assert cleanup.work.asked == ["cancel"]
