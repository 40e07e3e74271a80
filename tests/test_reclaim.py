"""What an object leaves when it dies: whose it is, and whether anything still uses it."""

from types import SimpleNamespace

import pytest

from backstash._runtime.reclaim import (
    BlockCleanup,
    DiskCleanup,
    HostCleanup,
    ReclaimQueue,
    on_death,
)


def test_remains_know_their_grave_s_mark_and_count_for_nothing_yet():
    reclaim_queue, buffer, store, slot = ReclaimQueue(), object(), object(), object()
    block, backing = BlockCleanup(reclaim_queue, 2, 12), DiskCleanup(reclaim_queue, store, slot)
    host = HostCleanup(reclaim_queue, 3, buffer)
    assert block.mark is backing.mark is host.mark is reclaim_queue.mark is not ReclaimQueue().mark
    assert (block.number, backing.number, host.number) == (2, 0, 3)
    assert (block.nbytes, block.resident_bytes, block.loaded_bytes, block.serial, block.module) == (
        12,
        0,
        0,
        -1,
        "",
    )
    assert (backing.store, backing.slot, backing.writing) == (store, slot, None)
    assert (backing.loaded_bytes, backing.inflight_bytes) == (0, 0)
    assert (host.buffer, host.slot, host.writing, host.brought, host.work) == (buffer, *[None] * 4)
    assert host.loaded_bytes == 0
    on_death(reclaim_queue, host)()
    assert list(reclaim_queue) == [host]


class Use:
    """A copy or a worker's work, that has ended or not, and notes what is asked of it."""

    def __init__(self, has_ended, can_be_cancelled=False):
        self.has_ended, self.can_be_cancelled, self.asked = has_ended, can_be_cancelled, []

    def ended(self):
        return self.has_ended

    done = ended

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
        ({"writing": Use(True), "brought": Use(True), "work": Use(True)}, True),
        ({"writing": Use(False), "brought": Use(True)}, False),
        ({"writing": Use(True), "brought": Use(False)}, False),
        ({"writing": Use(False), "work": Use(True)}, False),
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
    cleanup = left(writing=Use(False), brought=Use(False), work=Use(False))
    cleanup.wait()
    assert cleanup.writing.asked == cleanup.brought.asked == ["wait"]
    assert cleanup.work.asked == ["cancel", "wait"]


def test_work_that_is_called_off_is_not_waited_for():
    cleanup = left(work=Use(False, can_be_cancelled=True))
    cleanup.wait()
    assert cleanup.work.asked == ["cancel"]
