"""Bytes below an accelerator and on their way back: whose buffer is whose, and what is waited for."""

import weakref
from types import SimpleNamespace

import pytest
import torch

from backstash._device.base import Completion, Copy
from backstash._device.pinned_pool import PinnedPool
from backstash._runtime.reclaim import ReclaimQueue
from backstash._runtime.workers import Work
from backstash._saved.placement import Resident, Stored
from backstash._tiers.host import HostTier
from backstash._tiers.host_backing import HostCleanup
from backstash.errors import StashIOError
from backstash.testing import TwinDevice

PAGE = 4096
NUMBER = 3


class Ended(Completion):
    """Once ``over``, or somebody has waited for it."""

    def __init__(self):
        self.over, self.waits = False, 0

    def ended(self):
        return self.over

    def wait(self):
        self.waits += 1
        self.over = True


class Copied(Copy):
    """A copy up or down, and the device's end of it."""

    def __init__(self, memory, mine):
        self.memory, self.mine, self.completion = memory, mine, Ended()

    def done(self):
        return self.ended()

    def order(self):
        pass


class Device:
    """Begins copies, or fails when a test says so."""

    def __init__(self):
        self.fails, self.downs, self.ups, self.finished = None, [], [], 0
        self.swept = 0

    def sweep(self):
        self.swept += 1

    def down(self, source, target, made_on):
        if self.fails is not None:
            raise self.fails
        target.copy_(source)
        self.downs.append((source.data_ptr(), source.numel(), source.dtype, made_on))
        return Copied(target, source)

    def up(self, source, after):
        if self.fails is not None:
            raise self.fails
        self.ups.append((source, after))
        memory = source.clone()
        return Copied(memory, memory)

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
        section = SimpleNamespace(lock=self.lock)
        self.tier = HostTier(
            self.device, self.pool, self.writeback, self.reclaim_queue, section, number=NUMBER
        )

    def block(self, nbytes=PAGE, to_disk=False):
        alias = torch.arange(nbytes // 4, dtype=torch.float32)[1:]
        placement = Resident(alias)
        return SimpleNamespace(
            nbytes=nbytes, placement=placement, stream="a stream", tier="disk" if to_disk else ""
        )

    def begun(self):
        backing, _ = self.tier.begin(self.block())
        return backing

    def on_disk(self):
        backing = self.begun()
        self.pool.give(backing.cleanup.buffer)
        backing.cleanup.buffer, backing.cleanup.slot = None, "a slot"
        return backing


@pytest.mark.parametrize("to_disk", [False, True])
def test_a_block_is_copied_to_a_buffer_of_its_own(to_disk):
    place = Place()
    block = place.block(2 * PAGE, to_disk)
    backing, copy = place.tier.begin(block)
    storage = block.placement.alias.untyped_storage()
    assert place.device.downs == [(storage.data_ptr(), 2 * PAGE, torch.uint8, "a stream")]
    left = backing.cleanup
    assert copy.memory is left.buffer.memory and left.written is copy.completion
    assert (left.number, left.mark, left.slot) == (NUMBER, place.reclaim_queue.mark, None)
    assert left.work is left.brought is left.staged is None
    assert place.added == [(backing, to_disk)]
    assert (backing.nbytes, backing.blocks, backing.skew, backing.wanted) == (2 * PAGE, 1, 0, 0)
    assert backing.load is None and backing.ahead is False and backing.tier == "host"
    assert backing.buffer is None and backing.is_shared is False
    place.added.clear()
    del backing
    assert list(place.reclaim_queue) == [left]


def test_a_cleanup_holds_no_device_memory():
    """What died gives its memory back at once; its buffer and its copies are seen to later."""
    place = Place()
    block = place.block()
    source = weakref.ref(block.placement.alias.untyped_storage())
    backing, copy = place.tier.begin(block)
    load = place.tier.fetch(backing, ahead=False)
    memory, left = weakref.ref(load.memory.untyped_storage()), backing.cleanup
    assert left.brought is load.arrival.completion
    del load
    assert memory() is None and not left.at_rest()
    place.added.clear()
    del block, copy, backing
    assert source() is None and left.buffer is not None and not left.at_rest()
    assert list(place.reclaim_queue) == [left], "a load from a buffer has nothing of its own"


@pytest.mark.parametrize("way", ["written", "brought"])
def test_a_cleanup_is_at_rest_when_its_copies_have_ended(way):
    place = Place()
    left = HostCleanup(place.reclaim_queue, NUMBER, None)
    assert left.at_rest() and left.is_busy() is False and left.facts is None
    copy = Ended()
    setattr(left, way, copy)
    assert not left.at_rest() and copy.waits == 0
    left.wait()
    assert left.at_rest() and copy.waits == 1


def test_a_cleanup_waits_for_its_worker_and_calls_off_one_that_has_not_begun():
    place = Place()
    left, done = HostCleanup(place.reclaim_queue, NUMBER, None), []
    left.work = Work(done.append, 1)
    assert left.at_rest() and left.work.cancelled, "nobody has begun it, and nobody will"
    left.work = Work(lambda: done.append(left.at_rest()))
    left.work.run()
    assert done == [False] and left.at_rest(), "it runs, and then it has ended"
    left.work = Work(done.append, 2)
    left.wait()
    assert done == [False], "a dead one's bytes are of no use to anybody"


def test_a_cleanup_is_settled_by_being_deferred():
    place = Place()
    left, deferred = HostCleanup(place.reclaim_queue, NUMBER, None), []
    left.settle(SimpleNamespace(defer=deferred.append))
    assert deferred == [left]
    place.tier.buffers.defer = deferred.append
    place.tier.defer(left)
    assert deferred == [left, left]


def test_without_a_disk_only_buffers_are_used():
    place = Place(disk=False)
    backing = place.begun()
    load = place.tier.fetch(backing, ahead=False)
    assert load.exception() is None and load.work is None


@pytest.mark.parametrize("disk", [False, True])
def test_its_figures_are_of_buffers_and_of_the_disk(disk):
    place = Place(disk=disk)
    place.begun()
    place.writeback.disk_peak_bytes = 5000
    place.tier.buffers.stall_seconds = 1.5
    place.pool.note = "a note"
    tier = place.tier
    assert tier.used_bytes == PAGE + (1000 if disk else 0)
    assert (tier.host_bytes, tier.host_peak_bytes) == (PAGE, 4 * PAGE)
    assert (tier.disk_peak_bytes, tier.stall_seconds, tier.note) == (5000, 1.5, "a note")
    assert tier.runs_ahead is True


@pytest.mark.parametrize("fails", [RuntimeError("no link"), KeyboardInterrupt()])
def test_a_copy_that_does_not_begin_gives_its_buffer_back(fails):
    place = Place()
    place.device.fails = fails
    buffer = []
    give = place.pool.give
    place.pool.give = lambda each: (buffer.append(each), give(each))
    with pytest.raises(type(fails)):
        place.tier.begin(place.block())
    assert len(buffer) == isinstance(fails, Exception), "after an interrupt it may have begun"
    assert place.added == []


def test_what_is_in_a_buffer_comes_from_there_after_its_copy_down():
    place = Place()
    backing = place.begun()
    load = place.tier.fetch(backing, ahead=True)
    left = backing.cleanup
    assert place.device.ups == [(left.buffer.memory, left.written)]
    assert load.work is None and load.is_ready
    assert left.brought is load.arrival.completion and load.memory is load.arrival.memory
    assert load.exception() is None and len(place.device.ups) == 1 and place.disk.reads == []
    assert backing.storage_for(0, 64, PAGE, load.memory) == (load.memory, 0)
    backing.load, backing.ahead = load, True
    backing.free()
    assert backing.load is None and backing.ahead is False


@pytest.mark.parametrize("ahead", [False, True])
def test_what_is_on_disk_is_read_to_a_buffer_that_is_lent(ahead):
    place = Place()
    backing = place.on_disk()
    assert backing.tier == "disk"
    load = place.tier.fetch(backing, ahead=ahead)
    buffer = load.cleanup.buffer
    assert load.work is load.cleanup.work is load.read and load.is_ready is False
    assert buffer is not None and load.cleanup.staged is None and place.device.ups == []
    assert [ref() for ref in place.tier.buffers._staging] == [load]
    assert [ref() for ref in place.tier._coming] == ([load] if ahead else [])
    assert load.take_buffer() is None and load.has_come() is False
    held = place.lock.held
    assert load.exception() is None and place.lock.held == held + 1
    assert place.disk.reads == [("a slot", buffer.memory.data_ptr())] and load.has_come()
    assert [source is buffer.memory for source, _ in place.device.ups] == [True]
    assert place.device.ups[0][1] is None and load.is_ready
    assert load.cleanup.brought is load.arrival.completion
    assert load.take_buffer() is None, "its copy still runs"
    load.arrival.completion.over = True
    assert load.take_buffer() is buffer and load.take_buffer() is None
    left = load.cleanup
    assert left.number == NUMBER and left.mark is place.reclaim_queue.mark
    del load
    assert list(place.reclaim_queue)[-1] is left


def test_where_there_is_no_buffer_only_what_is_needed_now_is_read():
    place = Place(pages=1)
    backing = place.on_disk()
    taken = place.pool.take(PAGE)
    with pytest.raises(MemoryError, match="no space in host memory to read ahead"):
        place.tier.fetch(backing, ahead=True)
    load = place.tier.fetch(backing, ahead=False)
    assert load.cleanup.buffer is None and len(place.tier.buffers._staging) == 0
    assert load.exception() is None and load.memory.numel() == PAGE
    assert load.take_buffer() is None and taken is not None
    left, source = load.cleanup, place.device.ups[0][0]
    place.device.ups.clear()
    memory = weakref.ref(source.untyped_storage())
    del load, source
    assert memory() is not None and left.staged.numel() == PAGE, "until its copy has ended"


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
    assert ahead.arrive() is True and ahead.arrival.completion.waits == 1
    mine.exception()
    assert mine.arrive() is True and mine.arrival.completion.waits == 1
    full = place.tier.fetch(place.on_disk(), ahead=True)
    place.device.fails = torch.OutOfMemoryError("full")
    assert full.arrive() is False and full.arrival is None


def test_what_has_come_from_disk_is_sent_on():
    place = Place(pages=8)
    loads = [place.tier.fetch(place.on_disk(), ahead=True) for _ in range(4)]
    loads[1].read.run()
    loads[2].read.run()
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
        each.read.run()
    place.device.fails = torch.OutOfMemoryError("full")
    place.tier.poll()
    assert loads[0].arrival is None
    assert [ref() for ref in place.tier._coming] == [loads[3]], "and there is no memory for that"
    place.device.fails = None
    assert loads[0].exception() is None, "the caller that needs it tries again"


def test_a_rebuild_waits_for_the_device_first():
    place = Place(pages=4)
    backing = place.begun()
    place.added.clear()
    place.pool.take(PAGE)  # and freed at once
    used = []
    place.writeback.restore = lambda *what: used.append((place.pool.used_bytes, *what))
    finish = place.device.finish
    place.device.finish = lambda: (used.append(place.pool.used_bytes), finish())
    blocks = [place.block(), place.block()]
    blocks[1].placement = Stored(backing)
    place.tier.restore(blocks, ["cleanups"])
    assert used == [2 * PAGE, (PAGE, [backing], ["cleanups"])] and place.device.finished == 1


def test_a_profiler_sees_the_read():
    place = Place()
    load = place.tier.fetch(place.on_disk(), ahead=False)
    with torch.profiler.profile() as profile:
        assert load.read.run() is True
    assert "backstash: read" in {event.name for event in profile.events()}
