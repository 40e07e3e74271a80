"""From the CPU's memory to a store and back: which slot, in which order, and whose slot is taken back."""

import weakref
from array import array
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from backstash._runtime.reclaim import ReclaimQueue
from backstash._runtime.workers import Work
from backstash._saved.block import Block, BlockCleanup, StorageVersion
from backstash._tiers import disk as _disk
from backstash._tiers.backing import DiskBacking, DiskCleanup, DiskLoad
from backstash._tiers.base import LowerTier
from backstash._tiers.disk import DiskTier
from backstash.errors import StashFullError

FULL = StashFullError(28, "full")


class Store:
    """A store with so many slots."""

    def __init__(self, free=100):
        self.free, self.used_bytes, self.steps, self.asked = free, 0, [], 0

    def reserve(self, nbytes):
        self.asked += 1
        if not self.free:
            raise FULL
        self.free -= 1
        self.used_bytes += nbytes
        return SimpleNamespace(nbytes=nbytes)

    def release(self, slot):
        self.free += 1
        self.used_bytes -= slot.nbytes
        self.steps.append(("release", slot))

    def stage(self, slot, address):
        self.steps.append(("stage", slot, address))

    def write(self, slot, address):
        self.steps.append(("write", slot, address))

    def read(self, slot, address):
        self.steps.append(("read", slot, address))


class Pool:
    """Memory that is read back to, and how often it was rebuilt."""

    def __init__(self):
        self.taken, self.restored = [], 0

    def take(self, nbytes):
        self.taken.append(torch.zeros(nbytes, dtype=torch.uint8))
        return self.taken[-1]

    def restore(self):
        self.restored += 1


def made(store):
    begun, emitted = [], []
    event_log = SimpleNamespace(on=False, emit=lambda *what, **more: emitted.append((what, more)))
    tier = DiskTier(store, begun.append, ReclaimQueue(), event_log, pool := Pool())
    return tier, SimpleNamespace(begun=begun, emitted=emitted, event_log=event_log, pool=pool)


def block_of(tier, nbytes=100):
    tensor = torch.zeros(nbytes, dtype=torch.uint8)
    version = StorageVersion(tensor, tensor.untyped_storage())
    block = Block(version, tensor.detach(), tier.reclaim_queue, 0)
    block.cleanup.module = "a module"
    return block


def test_a_new_tier_has_used_nothing():
    tier, _ = made(store := Store())
    assert isinstance(tier, LowerTier) and not tier.runs_ahead
    assert (tier.host_bytes, tier.host_peak_bytes, tier.disk_peak_bytes) == (0, 0, 0)
    assert (tier.stall_seconds, tier.note) == (0.0, "")
    store.used_bytes = 7
    assert tier.used_bytes == 7


def test_a_block_is_written_from_its_own_memory():
    tier, seen = made(store := Store())
    block = block_of(tier, 5000)
    block.address += 4096 * 7 - block.address % 4096 + 64  # as some other one's
    backing, work = tier.begin(block)
    assert isinstance(backing, DiskBacking) and backing.store is store and backing.skew == 64
    assert store.steps == [("stage", backing.slot, block.address)]
    assert seen.begun == [work]
    assert backing.cleanup.transfer is work and not work.done()
    assert work.run() and work.exception() is None
    assert store.steps[1:] == [("write", backing.slot, block.address)]
    assert tier.disk_peak_bytes == 5000 and seen.emitted == [] and len(tier.reclaim_queue) == 0
    del backing
    assert [type(cleanup) for cleanup in tier.reclaim_queue] == [DiskCleanup]


def test_its_memory_lives_until_the_write_has_ended():
    tier, seen = made(Store())
    block = block_of(tier)
    freed = []
    owner = type("Owner", (), {"__del__": lambda self: freed.append(True)})()
    backing = DiskBacking(tier.store, tier.reserve(100), 0, tier.reclaim_queue)
    work = tier.write_of(backing, block.address, owner)
    del owner
    assert freed == []
    work.run()
    assert freed == [True] and seen.begun == []


def test_a_write_that_has_begun_owns_the_block_s_memory_and_not_the_block():
    tier, _ = made(Store())
    memory = array("B", bytes(100))
    is_alive = weakref.ref(memory)
    tensor = torch.frombuffer(memory, dtype=torch.uint8)
    version = StorageVersion(tensor, tensor.untyped_storage())
    block = Block(version, tensor.detach(), tier.reclaim_queue, 0)
    _, work = tier.begin(block)
    del memory, tensor, version, block
    assert BlockCleanup in map(type, tier.reclaim_queue), "the block has died"
    assert is_alive() is not None
    work.run()
    assert is_alive() is None


def test_a_recording_has_what_was_written_and_since_when(monkeypatch):
    tier, seen = made(store := Store())
    seen.event_log.on = True
    block = block_of(tier)
    backing, work = tier.begin(block)
    alone = tier.write_of(backing, 64, None)
    monkeypatch.setattr(_disk.time, "perf_counter", lambda: 10.0 + len(store.steps))
    assert seen.emitted == []
    work.run()
    alone.run()
    assert work.error is alone.error is None
    assert seen.emitted == [
        (("write", *block.facts), {"began": 11.0}),
        (("write", 100), {"began": 12.0}),
    ]


def test_the_peak_is_the_most_that_there_ever_was():
    tier, _ = made(store := Store())
    slots = [tier.reserve(nbytes) for nbytes in (100, 50)]
    store.release(slots[0])
    tier.reserve(10)
    assert tier.disk_peak_bytes == 150 and tier.used_bytes == 60


def test_a_full_store_is_asked_again_when_the_slots_of_the_dead_have_been_taken_back():
    tier, _ = made(store := Store(free=4))
    waited = []

    class Waited(Work):
        def exception(self):
            waited.append(self)

    running, waiting, over = Waited(int), Waited(int), Waited(int)
    assert running._running.acquire()
    over.run()
    slots = []
    for work in (running, waiting, over, None):
        cleanup = DiskCleanup(tier.reclaim_queue, store, tier.reserve(10))
        cleanup.transfer = work
        tier.reclaim_queue.append(cleanup)
        slots.append(cleanup.slot)
    tier.reclaim_queue.append(BlockCleanup(tier.reclaim_queue, 0, 10))
    other = DiskCleanup(tier.reclaim_queue, Store(), SimpleNamespace(nbytes=10))
    gone = DiskCleanup(tier.reclaim_queue, store, None)
    tier.reclaim_queue.extend((other, gone))
    dead = list(tier.reclaim_queue)
    assert tier.reserve(20).nbytes == 20
    released = [step[1] for step in store.steps]
    assert all(one is two for one, two in zip(released, slots, strict=True))
    assert waited == [running] and waiting.cancelled
    assert list(tier.reclaim_queue) == dead, "who drains it settles the rest"
    assert [cleanup.slot for cleanup in dead[:4]] == [None] * 4 and other.slot is not None
    running._running.release()


def test_a_full_store_says_so_where_nothing_has_died():
    tier, seen = made(store := Store(free=0))
    tier.reclaim_queue.append(BlockCleanup(tier.reclaim_queue, 0, 10))
    with pytest.raises(StashFullError) as caught:
        tier.begin(block_of(tier))
    assert caught.value is FULL and store.steps == [] and tier.disk_peak_bytes == 0
    assert store.asked == 1 and seen.begun == []
    FULL.__traceback__ = None


def test_a_profiler_sees_the_write(monkeypatch):
    spans = []
    monkeypatch.setattr(_disk, "profiled", lambda what: spans.append(what) or nullcontext())
    tier, _ = made(Store())
    tier.write_of(DiskBacking(tier.store, tier.reserve(10), 0, tier.reclaim_queue), 64, None).run()
    assert spans == ["write"]


@pytest.mark.parametrize("ahead", [False, True])
def test_a_block_comes_back_to_memory_of_the_pool_by_a_work_that_nobody_has_begun(ahead):
    tier, seen = made(store := Store())
    backing = DiskBacking(store, slot := tier.reserve(100), 64, tier.reclaim_queue)
    load = tier.fetch(backing, ahead=ahead)
    assert isinstance(load, DiskLoad) and [load.memory] == seen.pool.taken
    assert load.memory.numel() == 164 and store.steps == seen.begun == []
    assert load.exception() is None
    assert store.steps == [("read", slot, load.memory.data_ptr() + 64)]


def test_a_rebuild_begins_a_write_again_and_rebuilds_the_pool():
    tier, seen = made(Store())
    tier.resume(work := Work(int))
    assert seen.begun == [work] and not work.done()
    tier.restore([], [])
    assert seen.pool.restored == 1
