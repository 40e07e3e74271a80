"""Bytes below an accelerator and on their way back: whose room is whose, and what is waited for."""

from types import SimpleNamespace

import pytest
import torch

from backstash._device.pinned_pool import PinnedPool
from backstash._runtime.reclaim import ReclaimQueue
from backstash._tiers.host import HostTier
from backstash._tiers.host_backing import HostLoad
from backstash.errors import StashIOError
from backstash.testing import TwinDevice

PAGE = 4096
NUMBER = 3


class Copied:
    """A copy up or down."""

    def __init__(self, memory=None, *, over=False):
        self.memory, self.over, self.waits = memory, over, 0

    def ended(self):
        return self.over

    def wait(self):
        self.waits += 1
        self.over = True


class Device:
    """Begins copies, or fails when a test says so."""

    def __init__(self):
        self.fails, self.downs, self.ups, self.finished = None, [], [], 0

    def down(self, source, target, made_on):
        if self.fails is not None:
            raise self.fails
        target.copy_(source)
        self.downs.append((source, target, made_on))
        return Copied(target)

    def up(self, source, after):
        if self.fails is not None:
            raise self.fails
        self.ups.append((source, after))
        return Copied(source.clone())

    def finish(self):
        self.finished += 1


class Disk:
    used_bytes = 1000

    def __init__(self):
        self.fails, self.reads = None, []

    def read(self, slot, address):
        if self.fails is not None:
            raise self.fails
        self.reads.append((slot, address))


class Lock:
    held = 0

    def __enter__(self):
        self.held += 1

    def __exit__(self, *_):
        pass


class Place:
    def __init__(self, pages=4, disk=True):
        self.added, self.restored, self.lent = [], [], []
        self.disk = Disk() if disk else None
        self.writeback = SimpleNamespace(
            disk=self.disk,
            refusal="",
            add=lambda backing, *, at_once: self.added.append((backing, at_once)),
            restore=lambda *what: self.restored.append(what),
            sweep=lambda: False,
            evict=lambda: None,
            wait=lambda: False,
            write_oldest=lambda: False,
        )
        self.device, self.reclaim_queue, self.lock = Device(), ReclaimQueue(), Lock()
        self.pool = PinnedPool(pages * PAGE, TwinDevice())
        self.tier = HostTier(
            self.device, self.pool, self.writeback, self.reclaim_queue, self.lock, number=NUMBER
        )

    def block(self, nbytes=PAGE, goes_on=False):
        alias = torch.arange(nbytes // 4, dtype=torch.float32)[1:]
        return SimpleNamespace(nbytes=nbytes, alias=alias, stream="a stream", goes_on=goes_on)

    def on_disk(self):
        backing = self.tier.begin(self.block())
        self.pool.give(backing.cleanup.buffer)
        backing.cleanup.buffer, backing.cleanup.slot = None, "a slot"
        return backing


@pytest.mark.parametrize("goes_on", [False, True])
def test_a_block_is_copied_to_a_room_of_its_own(goes_on):
    place = Place()
    block = place.block(2 * PAGE, goes_on)
    backing = place.tier.begin(block)
    ((source, target, made_on),) = place.device.downs
    assert made_on == "a stream" and source.dtype == torch.uint8 and source.numel() == 2 * PAGE
    assert source.data_ptr() == block.alias.untyped_storage().data_ptr()
    left = backing.cleanup
    assert target is left.buffer.memory and left.writing.memory is target
    assert (left.number, left.mark, left.slot) == (NUMBER, place.reclaim_queue.mark, None)
    assert place.added == [(backing, goes_on)]
    assert (backing.nbytes, backing.blocks, backing.skew, backing.wanted) == (2 * PAGE, 1, 0, 0)
    assert backing.load is None and backing.ahead is False and backing.tier == "host"
    assert place.tier.used_bytes == 2 * PAGE + 1000 and place.tier.disk is place.disk
    place.added.clear()
    del backing
    assert list(place.reclaim_queue) == [left]


def test_without_a_disk_only_rooms_are_used():
    place = Place(disk=False)
    backing = place.tier.begin(place.block())
    assert place.tier.used_bytes == PAGE and place.tier.disk is None
    load = place.tier.fetch(backing, ahead=False)
    assert load.exception() is None
    load = HostLoad(place.tier, "a slot", torch.zeros(1), None, ahead=False)
    assert load.run() is True and load.has_come(), "there is nobody to ask"


@pytest.mark.parametrize("fails", [RuntimeError("no link"), KeyboardInterrupt()])
def test_a_copy_that_does_not_begin_gives_its_room_back(fails):
    place = Place()
    place.device.fails = fails
    buffer = []
    give = place.pool.give
    place.pool.give = lambda each: (buffer.append(each), give(each))
    with pytest.raises(type(fails)):
        place.tier.begin(place.block())
    assert len(buffer) == isinstance(fails, Exception), "after an interrupt it may have begun"
    assert place.added == []


def test_what_is_in_a_room_comes_from_there_after_its_copy_down():
    place = Place()
    backing = place.tier.begin(place.block())
    load = place.tier.fetch(backing, ahead=True)
    left = backing.cleanup
    assert place.device.ups == [(left.buffer.memory, left.writing)]
    assert load.needs_worker is False and load.cleanup.buffer is None
    assert left.brought is load.arrival and load.memory is load.arrival.memory
    assert load.run() is False and load.exception() is None and len(place.device.ups) == 1
    assert load.has_come() and place.disk.reads == []
    backing.load, backing.ahead = load, True
    backing.let_go()
    assert backing.load is None and backing.ahead is False


@pytest.mark.parametrize("ahead", [False, True])
def test_what_is_on_disk_is_read_to_a_room_that_is_lent(ahead):
    place = Place()
    backing = place.on_disk()
    assert backing.tier == "disk"
    load = place.tier.fetch(backing, ahead=ahead)
    buffer = load.cleanup.buffer
    assert load.needs_worker and buffer is not None and place.device.ups == []
    assert [ref() for ref in place.tier.buffers._staging] == [load]
    assert [ref() for ref in place.tier._coming] == ([load] if ahead else [])
    assert load.take_buffer() is None and load.has_come() is False
    held = place.lock.held
    assert load.exception() is None and place.lock.held == held + 1
    assert place.disk.reads == [("a slot", buffer.memory.data_ptr())] and load.has_come()
    assert [source is buffer.memory for source, _ in place.device.ups] == [True]
    assert load.take_buffer() is None, "its copy still runs"
    load.arrival.over = True
    assert load.take_buffer() is buffer and load.take_buffer() is None
    left = load.cleanup
    assert left.number == NUMBER and left.mark is place.reclaim_queue.mark
    del load
    assert list(place.reclaim_queue)[-1] is left


def test_where_there_is_no_room_only_what_is_needed_now_is_read():
    place = Place(pages=1)
    backing = place.on_disk()
    taken = place.pool.take(PAGE)
    with pytest.raises(MemoryError, match="no room in host memory to read ahead"):
        place.tier.fetch(backing, ahead=True)
    load = place.tier.fetch(backing, ahead=False)
    assert load.cleanup.buffer is None and len(place.tier.buffers._staging) == 0
    assert load.exception() is None and load.memory.numel() == PAGE
    assert load.take_buffer() is None and taken is not None


def test_a_read_that_failed_begins_no_copy():
    place = Place()
    place.disk.fails = error = StashIOError(5, "unreadable")
    load = place.tier.fetch(place.on_disk(), ahead=True)
    assert load.exception() is error and place.device.ups == []
    assert load.has_come() is False and load.arrive() is False
    place.tier.poll()
    assert place.device.ups == [] and len(place.tier._coming) == 1


def test_an_arrival_is_waited_for_where_a_worker_reads():
    place = Place()
    mine, ahead = (place.tier.fetch(place.on_disk(), ahead=each) for each in (False, True))
    assert mine.arrive() is False and place.disk.reads == [], "its own thread may wait for us"
    assert ahead.arrive() is True and ahead.arrival.waits == 1
    mine.exception()
    assert mine.arrive() is True and mine.arrival.waits == 1
    full = place.tier.fetch(place.on_disk(), ahead=True)
    place.device.fails = torch.OutOfMemoryError("full")
    assert full.arrive() is False and full.arrival is None


def test_what_has_come_from_disk_is_sent_on():
    place = Place(pages=8)
    loads = [place.tier.fetch(place.on_disk(), ahead=True) for _ in range(4)]
    loads[1].run()
    loads[2].run()
    loads[2].send()
    place.device.ups.clear()
    waiting = loads.pop(3)
    place.tier.poll()
    assert loads[1].arrival is not None and len(place.device.ups) == 1
    assert [ref() for ref in place.tier._coming] == [loads[0], waiting]
    del waiting
    place.tier.poll()
    assert [ref() for ref in place.tier._coming] == [loads[0]]
    loads.append(place.tier.fetch(place.on_disk(), ahead=True))
    for each in (loads[0], loads[3]):
        each.run()
    place.device.fails = torch.OutOfMemoryError("full")
    place.tier.poll()
    assert loads[0].arrival is None
    assert [ref() for ref in place.tier._coming] == [loads[3]], "nor is there memory for that"
    place.device.fails = None
    assert loads[0].exception() is None, "whoever needs it tries again"


def test_the_books_anew_wait_for_the_device_first():
    place = Place(pages=1)
    place.pool.take(PAGE)  # and let go at once
    used = []
    place.writeback.restore = lambda *what: used.append((place.pool.used_bytes, *what))
    finish = place.device.finish
    place.device.finish = lambda: (used.append(place.pool.used_bytes), finish())
    place.tier.restore(["parcels"], ["remains"])
    assert used == [PAGE, (0, ["parcels"], ["remains"])] and place.device.finished == 1


def test_a_profiler_sees_the_read():
    place = Place()
    load = place.tier.fetch(place.on_disk(), ahead=False)
    with torch.profiler.profile() as profile:
        assert load.run() is True
    assert "backstash: read" in {event.name for event in profile.events()}
