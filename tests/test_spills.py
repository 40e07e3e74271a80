"""Onward from host memory to disk: who goes and when, what is counted, and the books made anew."""

import errno
from types import SimpleNamespace

import pytest
import torch

from backstash._host_parcels import HostParcel
from backstash._remains import Grave, HostRemains
from backstash._spills import Spills
from backstash.errors import StashFullError, StashIOError
from backstash.stores._host import HostPool
from backstash.testing import TwinDevice

PAGE = 4096
NUMBER = 3


class Played:
    """A copy down that a worker waits for."""

    waited = 0

    def wait(self):
        self.waited += 1

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
    """A pool of ten pages and what makes room in it."""

    def __init__(self, *, budget=10 * PAGE, early=0, disk=None):
        self.grave, self.begun = Grave(), []
        self.disk = disk
        self.pool = HostPool(budget, TwinDevice())
        self.spills = Spills(
            self.pool, disk, self.begun.append, self.grave, number=NUMBER, early=early
        )

    def parcel(self, pages=1):
        room = self.pool.take(pages * PAGE)
        return HostParcel(self.grave, NUMBER, room, Played())

    def added(self, pages=1, *, at_once=False):
        parcel = self.parcel(pages)
        self.spills.add(parcel, at_once=at_once)
        return parcel

    @property
    def leaving(self):
        return self.spills._bytes_on_the_way_out

    def run(self):
        for work in self.begun:
            work.run()


def test_the_oldest_are_written_when_the_rooms_hold_more_than_the_budget_less_the_early_bytes():
    host = Host(early=6 * PAGE, disk=Disk())
    first, second = host.added(2), host.added(2)
    assert host.spills.refusal == "" and host.begun == [] and host.leaving == 0, "as much as may be"
    third = host.added(1)
    assert [each.remains.work is not None for each in (first, second, third)] == [
        True,
        False,
        False,
    ]
    assert host.leaving == 2 * PAGE and host.begun == [first.remains.work]
    assert host.disk.used_bytes == host.spills.disk_peak_bytes == first.remains.slot.nbytes
    fourth = host.added(2)
    assert second.remains.work is not None and fourth.remains.work is None
    assert host.leaving == 4 * PAGE
    host.run()
    assert host.disk.wrote == [
        (each.remains.slot, each.remains.room.memory.data_ptr()) for each in (first, second)
    ]
    assert first.remains.writing.waited == 1, "the worker waits for the copy down"
    assert all(work.error is None for work in host.begun)


def test_all_goes_where_the_early_bytes_are_more_than_the_budget():
    host = Host(early=20 * PAGE, disk=Disk())
    parcel = host.added(1)
    assert parcel.remains.work is not None and host.leaving == PAGE


def test_without_a_budget_nothing_goes_early():
    host = Host(budget=None, early=1, disk=Disk())
    host.added(50)
    assert host.begun == []


def test_one_that_is_to_go_on_goes_at_once():
    host = Host(disk=Disk())
    parcel = host.added(at_once=True)
    assert host.begun == [parcel.remains.work] and not host.spills.spill_oldest()
    host.disk.refuses = StashFullError(errno.ENOSPC, "full")
    other = host.added(at_once=True)
    assert other.remains.work is None
    host.disk.refuses = None
    assert host.spills.spill_oldest() and other.remains.work is not None


def test_a_disk_that_refuses_says_why_and_the_oldest_stays_the_first():
    host = Host(disk=Disk())
    first, second = host.added(), host.added()
    host.disk.refuses = StashFullError(errno.ENOSPC, "no room")
    assert host.spills.spill_oldest() is False
    assert host.spills.refusal == ", and no room" and host.leaving == 0
    assert first.remains.slot is None and host.disk.used_bytes == host.spills.disk_peak_bytes == 0
    host.disk.refuses = None
    assert host.spills.spill_oldest() is True
    assert first.remains.work is not None and second.remains.work is None


def test_the_dead_and_those_without_a_room_do_not_go():
    host = Host(disk=Disk())
    dead, roomless, other = host.added(), host.added(), host.added()
    roomless.remains.room = None
    del dead
    assert host.spills.spill_oldest() is False and host.begun == []
    roomless.remains.room = other.remains.room
    assert host.spills.spill_oldest() is True and roomless.remains.work is not None
    assert host.spills.spill_oldest() is True and other.remains.work is not None
    assert host.spills.spill_oldest() is False


def test_without_a_disk_nothing_goes():
    host = Host(early=20 * PAGE)
    parcel = host.added(at_once=True)
    assert host.spills.spill_oldest() is False and parcel.remains.work is None
    host.spills.release(SimpleNamespace(nbytes=1), None)  # which nobody can have


def test_what_has_been_written_is_on_disk_too_and_its_room_may_go():
    host = Host(disk=Disk())
    parcels = [host.added() for _ in range(3)]
    first, second, _ = parcels
    while host.spills.spill_oldest():
        pass
    assert host.spills.sweep() is False and host.spills.evict() is None
    host.begun[0].run()
    host.begun[2].run()
    assert host.spills.sweep() is True, "and what comes after one that runs is not looked at"
    assert [each.remains.work is None for each in parcels] == [True, False, False]
    assert host.spills.sweep() is False
    brought = first.remains.brought = object()
    room = first.remains.room
    left = host.spills.evict()
    assert isinstance(left, HostRemains) and left.room is room and left.brought is brought
    assert left.number == NUMBER and left.mark is host.grave.mark
    assert left.slot is left.work is left.writing is None
    assert first.remains.room is first.remains.brought is None
    assert first.remains.slot is not None and first.tier == "disk"
    assert host.leaving == 2 * PAGE and host.spills.evict() is None
    host.begun[1].run()
    assert host.spills.sweep() is True and host.spills.evict().room is not None
    assert second.remains.room is None and host.leaving == PAGE


def test_the_dead_are_passed_over():
    host = Host(disk=Disk())
    parcels = [host.added() for _ in range(4)]
    while host.spills.spill_oldest():
        pass
    host.begun[3].run()
    del parcels[:2]
    assert host.spills.sweep() is False and len(host.spills._spilling) == 2
    host.run()
    assert host.spills.sweep() is True and host.spills.sweep() is False
    room = parcels[1].remains.room
    del parcels[0]
    assert host.spills.evict().room is room


def test_a_write_that_failed_leaves_the_bytes_where_they_are_and_is_the_last():
    host = Host(disk=Disk())
    first, second = host.added(), host.added()
    host.spills.spill_oldest()
    slot = first.remains.slot
    host.disk.fails = StashIOError(errno.EIO, "broke")
    host.run()
    assert host.spills.sweep() is True
    assert "and the disk failed: " in host.spills.refusal and "broke" in host.spills.refusal
    assert host.spills.refusal.startswith(", ")
    assert first.remains.slot is first.remains.work is None and host.disk.released == [slot]
    assert host.leaving == 0 and host.spills.evict() is None
    assert host.spills.spill_oldest() is False and len(host.begun) == 1
    assert [host.spills._held.popleft() for _ in range(2)] == [first, second]


def test_the_oldest_write_is_waited_for():
    host = Host(disk=Disk())
    assert host.spills.wait() is False
    parcels = [host.added() for _ in range(4)]
    while host.spills.spill_oldest():
        pass
    parcels[1].remains.work = None  # somebody has looked at it already
    del parcels[0]
    assert host.spills.wait() is True
    assert [work.done() for work in host.begun] == [False, False, True, False]
    assert host.spills.wait() is True and not host.begun[3].done(), "until it is swept"
    parcels.clear()
    assert host.spills.wait() is False and not host.begun[3].done()


@pytest.mark.parametrize("with_room", [False, True])
def test_a_dead_one_s_slot_is_given_back(with_room):
    host = Host(disk=Disk())
    parcel = host.added(2, at_once=True)
    left = parcel.remains
    host.spills.release(left.slot, left.room if with_room else None)
    assert host.leaving == (0 if with_room else 2 * PAGE) and host.disk.released == [left.slot]


def test_the_peak_is_the_most_that_the_disk_held():
    host = Host(disk=Disk())
    parcel = host.added(2, at_once=True)
    host.disk.release(parcel.remains.slot)
    host.added(1, at_once=True)
    assert host.spills.disk_peak_bytes == 2 * PAGE


def test_nobody_waits_any_more_when_all_blocks_have_died():
    host = Host(disk=Disk())
    written, held = host.added(at_once=True), host.added()
    host.run()
    host.spills.sweep()
    host.spills.forget()
    assert not host.spills._held and not host.spills._spilled
    del written, held


def test_the_books_anew():
    host = Host(disk=Disk())
    parcels = [host.added(pages) for pages in (1, 2, 1, 1, 1, 1)]
    in_room, on_disk_too, on_disk, running, ended, second = parcels
    for parcel in (on_disk_too, on_disk, running, ended):
        host.spills._spill(parcel)
    for parcel in (on_disk_too, on_disk):
        parcel.remains.work.run()
        parcel.remains.work = None
    on_disk.remains.room = None
    ended.remains.work.run()
    dead = HostRemains(host.grave, NUMBER, host.pool.take(2 * PAGE))
    dead.slot = host.disk.reserve(2 * PAGE)
    host.spills._bytes_on_the_way_out = 12345
    host.spills._spilled.append(on_disk_too)
    host.begun.clear()
    host.spills.restore(parcels, [*(each.remains for each in parcels), dead])
    spills = host.spills
    assert host.leaving == 2 * PAGE + PAGE + PAGE + 2 * PAGE
    assert host.begun == [running.remains.work]
    assert [ref() for ref in spills._spilling] == [running, ended]
    assert [spills._held.popleft() for _ in range(len(spills._held))] == [in_room, second]
    assert [spills._spilled.popleft() for _ in range(len(spills._spilled))] == [on_disk_too]
    spills.restore(parcels, [])  # what has left the room since is not wanted in the queues
    in_room.remains.slot, on_disk_too.remains.room = object(), None
    assert spills._held.popleft() is None and spills._spilled.popleft() is None
    in_room.remains.slot = None


def test_a_profiler_sees_the_write():
    host = Host(disk=Disk())
    parcel = host.added(at_once=True)
    with torch.profiler.profile() as profile:
        host.run()
    assert "backstash: write" in {event.name for event in profile.events()}
    assert parcel.remains.work.error is None
