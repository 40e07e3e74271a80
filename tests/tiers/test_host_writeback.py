"""Writeback from host memory to disk: who goes and when, what is counted, and how it is rebuilt."""

import errno
from types import SimpleNamespace

import pytest
import torch

from backstash._device.base import Completion
from backstash._device.pinned_pool import PinnedPool
from backstash._runtime.reclaim import ReclaimQueue
from backstash._tiers.host_backing import HostBacking, HostCleanup
from backstash._tiers.host_writeback import HostWriteback
from backstash.errors import StashFullError, StashIOError
from backstash.testing import TwinDevice

PAGE = 4096
NUMBER = 3


class Played(Completion):
    """Of a copy down that a worker waits for."""

    waited = begun = 0

    def wait(self):
        self.waited += 1

    def begin(self):
        self.begun += 1

    def ended(self):
        return True


class Disk:
    """A store that refuses or fails when a test says so."""

    def __init__(self):
        self.used_bytes, self.wrote, self.released = 0, [], []
        self.refuses = self.fails = None

    def reserve(self, nbytes):
        if self.refuses is not None:
            raise self.refuses
        self.used_bytes += nbytes
        return SimpleNamespace(nbytes=nbytes)

    def release(self, slot):
        self.used_bytes -= slot.nbytes
        self.released.append(slot)

    def write(self, slot, address):
        if self.fails is not None:
            raise self.fails
        self.wrote.append((slot, address))


class Host:
    """A pool of ten pages and what frees buffers of it."""

    def __init__(self, *, budget=10 * PAGE, early=0, disk=None):
        self.reclaim_queue, self.begun = ReclaimQueue(), []
        self.disk = disk
        self.pool = PinnedPool(budget, TwinDevice())
        self.writeback = HostWriteback(
            self.pool, disk, self.begun.append, self.reclaim_queue, number=NUMBER, early=early
        )

    def backing(self, pages=1):
        buffer = self.pool.take(pages * PAGE)
        return HostBacking(self.reclaim_queue, NUMBER, buffer, Played())

    def added(self, pages=1, *, at_once=False):
        backing = self.backing(pages)
        self.writeback.add(backing, at_once=at_once)
        return backing

    @property
    def leaving(self):
        return self.writeback._bytes_on_the_way_out

    def run(self):
        for work in self.begun:
            work.run()


def test_the_oldest_are_written_when_the_buffers_hold_more_than_the_budget_less_the_early_bytes():
    host = Host(early=6 * PAGE, disk=Disk())
    first, second = host.added(2), host.added(2)
    assert host.writeback.refusal == "" and host.begun == [] and host.leaving == 0, (
        "as much as may be"
    )
    third = host.added(1)
    assert [each.cleanup.work is not None for each in (first, second, third)] == [
        True,
        False,
        False,
    ]
    assert host.leaving == 2 * PAGE and host.begun == [first.cleanup.work]
    assert host.disk.used_bytes == host.writeback.disk_peak_bytes == first.cleanup.slot.nbytes
    fourth = host.added(2)
    assert second.cleanup.work is not None and fourth.cleanup.work is None
    assert host.leaving == 4 * PAGE
    host.run()
    assert host.disk.wrote == [
        (each.cleanup.slot, each.cleanup.buffer.memory.data_ptr()) for each in (first, second)
    ]
    assert first.cleanup.written.waited == 1, "the worker waits for the copy down"
    assert all(work.error is None for work in host.begun)


def test_all_goes_where_the_early_bytes_are_more_than_the_budget():
    host = Host(early=20 * PAGE, disk=Disk())
    backing = host.added(1)
    assert backing.cleanup.work is not None and host.leaving == PAGE


def test_without_a_budget_nothing_goes_early():
    host = Host(budget=None, early=1, disk=Disk())
    host.added(50)
    assert host.begun == []


def test_one_that_is_to_go_on_goes_at_once():
    host = Host(disk=Disk())
    backing = host.added(at_once=True)
    assert host.begun == [backing.cleanup.work] and not host.writeback.write_oldest()
    assert backing.cleanup.written.begun == 1, "the worker has no lock to begin the copy"
    host.disk.refuses = StashFullError(errno.ENOSPC, "full")
    other = host.added(at_once=True)
    assert other.cleanup.work is None
    host.disk.refuses = None
    assert host.writeback.write_oldest() and other.cleanup.work is not None


def test_a_disk_that_refuses_says_why_and_the_oldest_stays_the_first():
    host = Host(disk=Disk())
    first, second = host.added(), host.added()
    host.disk.refuses = StashFullError(errno.ENOSPC, "no room")
    assert host.writeback.write_oldest() is False
    assert host.writeback.refusal == ", and no room" and host.leaving == 0
    assert (
        first.cleanup.slot is None and host.disk.used_bytes == host.writeback.disk_peak_bytes == 0
    )
    host.disk.refuses = None
    assert host.writeback.write_oldest() is True
    assert first.cleanup.work is not None and second.cleanup.work is None


def test_the_dead_and_those_without_a_buffer_do_not_go():
    host = Host(disk=Disk())
    dead, bufferless, other = host.added(), host.added(), host.added()
    bufferless.cleanup.buffer = None
    del dead
    assert host.writeback.write_oldest() is False and host.begun == []
    bufferless.cleanup.buffer = other.cleanup.buffer
    assert host.writeback.write_oldest() is True and bufferless.cleanup.work is not None
    assert host.writeback.write_oldest() is True and other.cleanup.work is not None
    assert host.writeback.write_oldest() is False


def test_without_a_disk_nothing_goes():
    host = Host(early=20 * PAGE)
    backing = host.added(at_once=True)
    assert host.writeback.write_oldest() is False and backing.cleanup.work is None
    host.writeback.release(SimpleNamespace(nbytes=1), None)  # which nobody can have


def test_what_has_been_written_is_clean_and_its_buffer_may_go():
    host = Host(disk=Disk())
    backings = [host.added() for _ in range(3)]
    first, second, _ = backings
    while host.writeback.write_oldest():
        pass
    assert host.writeback.sweep() is False and host.writeback.evict() is None
    host.begun[0].run()
    host.begun[2].run()
    assert host.writeback.sweep() is True, "and what comes after one that runs is not looked at"
    assert [each.cleanup.work is None for each in backings] == [True, False, False]
    assert host.writeback.sweep() is False
    brought = first.cleanup.brought = object()
    buffer = first.cleanup.buffer
    left = host.writeback.evict()
    assert isinstance(left, HostCleanup) and left.buffer is buffer and left.brought is brought
    assert left.number == NUMBER and left.mark is host.reclaim_queue.mark
    assert left.slot is left.work is left.written is left.staged is None
    assert first.cleanup.buffer is first.cleanup.brought is None
    assert first.cleanup.slot is not None and first.tier == "disk"
    assert host.leaving == 2 * PAGE and host.writeback.evict() is None
    host.begun[1].run()
    assert host.writeback.sweep() is True and host.writeback.evict().buffer is not None
    assert second.cleanup.buffer is None and host.leaving == PAGE


def test_the_dead_are_passed_over():
    host = Host(disk=Disk())
    backings = [host.added() for _ in range(4)]
    while host.writeback.write_oldest():
        pass
    host.begun[3].run()
    del backings[:2]
    assert host.writeback.sweep() is False and len(host.writeback._writing) == 2
    host.run()
    assert host.writeback.sweep() is True and host.writeback.sweep() is False
    buffer = backings[1].cleanup.buffer
    del backings[0]
    assert host.writeback.evict().buffer is buffer


def test_a_write_that_failed_leaves_the_bytes_where_they_are_and_is_the_last():
    host = Host(disk=Disk())
    first, second = host.added(), host.added()
    host.writeback.write_oldest()
    slot = first.cleanup.slot
    host.disk.fails = StashIOError(errno.EIO, "broke")
    host.run()
    assert host.writeback.sweep() is True
    assert "and the disk failed: " in host.writeback.refusal and "broke" in host.writeback.refusal
    assert host.writeback.refusal.startswith(", ")
    assert first.cleanup.slot is first.cleanup.work is None and host.disk.released == [slot]
    assert host.leaving == 0 and host.writeback.evict() is None
    assert host.writeback.write_oldest() is False and len(host.begun) == 1
    assert [host.writeback._dirty.popleft() for _ in range(2)] == [first, second]


def test_the_oldest_write_is_waited_for():
    host = Host(disk=Disk())
    assert host.writeback.wait() is False
    backings = [host.added() for _ in range(4)]
    while host.writeback.write_oldest():
        pass
    backings[1].cleanup.work = None  # somebody has looked at it already
    del backings[0]
    assert host.writeback.wait() is True
    assert [work.done() for work in host.begun] == [False, False, True, False]
    assert host.writeback.wait() is True and not host.begun[3].done(), "until it is swept"
    backings.clear()
    assert host.writeback.wait() is False and not host.begun[3].done()


@pytest.mark.parametrize("with_buffer", [False, True])
def test_a_dead_one_s_slot_is_given_back(with_buffer):
    host = Host(disk=Disk())
    backing = host.added(2, at_once=True)
    left = backing.cleanup
    host.writeback.release(left.slot, left.buffer if with_buffer else None)
    assert host.leaving == (0 if with_buffer else 2 * PAGE) and host.disk.released == [left.slot]


def test_the_peak_is_the_most_that_the_disk_held():
    host = Host(disk=Disk())
    backing = host.added(2, at_once=True)
    host.disk.release(backing.cleanup.slot)
    host.added(1, at_once=True)
    assert host.writeback.disk_peak_bytes == 2 * PAGE


def test_nobody_waits_any_more_when_all_blocks_have_died():
    host = Host(disk=Disk())
    written, held = host.added(at_once=True), host.added()
    host.run()
    host.writeback.sweep()
    host.writeback.forget()
    assert not host.writeback._dirty.refs and not host.writeback._clean.refs
    del written, held


def test_queues_and_counts_are_rebuilt_from_what_is_alive():
    host = Host(disk=Disk())
    backings = [host.added(pages) for pages in (1, 2, 1, 1, 1, 1)]
    dirty, clean, on_disk, running, ended, second = backings
    for backing in (clean, on_disk, running, ended):
        host.writeback._begin_write(backing)
    for backing in (clean, on_disk):
        backing.cleanup.work.run()
        backing.cleanup.work = None
    on_disk.cleanup.buffer = None
    ended.cleanup.work.run()
    dead = HostCleanup(host.reclaim_queue, NUMBER, host.pool.take(2 * PAGE))
    dead.slot = host.disk.reserve(2 * PAGE)
    host.writeback._bytes_on_the_way_out = 12345
    host.writeback._clean.append(clean)
    host.begun.clear()
    host.writeback.restore(backings, [*(each.cleanup for each in backings), dead])
    writeback = host.writeback
    assert host.leaving == 2 * PAGE + PAGE + PAGE + 2 * PAGE
    assert host.begun == [running.cleanup.work]
    assert [ref() for ref in writeback._writing] == [running, ended]
    assert [writeback._dirty.popleft() for _ in range(len(writeback._dirty.refs))] == [
        dirty,
        second,
    ]
    assert [writeback._clean.popleft() for _ in range(len(writeback._clean.refs))] == [clean]
    writeback.restore(backings, [])  # what has left its buffer since is not wanted in the queues
    dirty.cleanup.slot, clean.cleanup.buffer = object(), None
    assert writeback._dirty.popleft() is None and writeback._clean.popleft() is None
    dirty.cleanup.slot = None


def test_a_profiler_sees_the_write():
    host = Host(disk=Disk())
    backing = host.added(at_once=True)
    with torch.profiler.profile() as profile:
        host.run()
    assert "backstash: write" in {event.name for event in profile.events()}
    assert backing.cleanup.work.error is None
