"""From the CPU's memory to a store: which slot, in which order, and whose room is taken back."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from backstash._runtime.reclaim import BlockCleanup, DiskCleanup, ReclaimQueue
from backstash._runtime.workers import Work
from backstash._saved.block import Block, StorageVersion
from backstash._tiers import disk as _disk
from backstash._tiers.backing import DiskBacking
from backstash._tiers.disk import DiskTier
from backstash.errors import StashFullError

FULL = StashFullError(28, "full")


class Store:
    """A store with room for so many slots."""

    def __init__(self, buffer=100):
        self.buffer, self.used_bytes, self.steps, self.asked = buffer, 0, [], 0

    def reserve(self, nbytes):
        self.asked += 1
        if not self.buffer:
            raise FULL
        self.buffer -= 1
        self.used_bytes += nbytes
        return SimpleNamespace(nbytes=nbytes)

    def release(self, slot):
        self.buffer += 1
        self.used_bytes -= slot.nbytes
        self.steps.append(("release", slot))

    def stage(self, slot, address):
        self.steps.append(("stage", slot, address))

    def write(self, slot, address):
        self.steps.append(("write", slot, address))


def made(store):
    begun, waited, told = [], [], []
    inflight = SimpleNamespace(wait=waited.append)
    event_log = SimpleNamespace(on=False, emit=lambda *what, **more: told.append((what, more)))
    tier = DiskTier(store, begun.append, ReclaimQueue(), inflight, event_log)
    return tier, SimpleNamespace(begun=begun, waited=waited, told=told, event_log=event_log)


def block_of(tier, nbytes=100):
    tiers = SimpleNamespace(number=0, reclaim_queue=tier.reclaim_queue, stream=lambda: None)
    tensor = torch.zeros(nbytes, dtype=torch.uint8)
    block = Block(StorageVersion(tensor, tensor.untyped_storage()), tensor.detach(), tiers)
    block.cleanup.module = "a module"
    return block


def test_a_block_is_written_from_its_own_memory():
    tier, seen = made(store := Store())
    block = block_of(tier, 5000)
    block.address += 4096 * 7 - block.address % 4096 + 64  # as some other one's
    backing = tier.begin(block)
    assert isinstance(backing, DiskBacking) and backing.store is store and backing.skew == 64
    assert store.steps == [("stage", backing.slot, block.address)]
    (work,) = seen.begun
    assert backing.cleanup.writing is work and not work.done()
    assert work.run() and work.exception() is None
    assert store.steps[1:] == [("write", backing.slot, block.address)]
    assert tier.peak_bytes == 5000 and seen.told == [] and len(tier.reclaim_queue) == 0
    del backing
    assert [type(left) for left in tier.reclaim_queue] == [DiskCleanup]


def test_its_memory_lives_until_the_write_has_ended():
    tier, seen = made(Store())
    block = block_of(tier)
    freed = []
    torch_alias = block.alias
    owner = type("Owner", (), {"__del__": lambda self: freed.append(True)})()
    backing = DiskBacking(tier.store, tier.reserve(100), 0, tier.reclaim_queue)
    work = tier.write_of(backing, block.address, owner)
    del owner
    assert freed == []
    work.run()
    assert freed == [True] and torch_alias is block.alias and seen.begun == []


def test_who_records_is_told_what_was_written_and_since_when(monkeypatch):
    tier, seen = made(store := Store())
    seen.event_log.on = True
    block = block_of(tier)
    backing = tier.begin(block)
    alone = tier.write_of(backing, 64, None)
    monkeypatch.setattr(_disk.time, "perf_counter", lambda: 10.0 + len(store.steps))
    assert seen.told == []
    seen.begun[0].run()
    alone.run()
    assert seen.begun[0].error is alone.error is None
    assert seen.told == [
        (("write", *block.facts), {"began": 11.0}),
        (("write", 100), {"began": 12.0}),
    ]


def test_the_peak_is_the_most_that_there_ever_was():
    tier, _ = made(store := Store())
    slots = [tier.reserve(nbytes) for nbytes in (100, 50)]
    store.release(slots[0])
    tier.reserve(10)
    assert tier.peak_bytes == 150


def test_a_full_store_is_asked_again_when_the_dead_have_given_back_their_room():
    tier, seen = made(store := Store(buffer=4))
    running = Work(lambda: None)
    assert running._running.acquire()
    waiting, over = Work(lambda: None), Work(lambda: None)
    over.run()
    slots = []
    for work in (running, waiting, over, None):
        left = DiskCleanup(tier.reclaim_queue, store, tier.reserve(10))
        left.writing = work
        tier.reclaim_queue.append(left)
        slots.append(left.slot)
    tier.reclaim_queue.append(BlockCleanup(tier.reclaim_queue, 0, 10))
    other = DiskCleanup(tier.reclaim_queue, Store(), SimpleNamespace(nbytes=10))
    gone = DiskCleanup(tier.reclaim_queue, store, None)
    tier.reclaim_queue.extend((other, gone))
    dead = list(tier.reclaim_queue)
    assert tier.reserve(20).nbytes == 20
    released = [step[1] for step in store.steps]
    assert all(one is two for one, two in zip(released, slots, strict=True))
    assert seen.waited == [running, over] and waiting.cancelled
    assert list(tier.reclaim_queue) == dead, "who drains it settles the rest"
    assert [left.slot for left in dead[:4]] == [None] * 4 and other.slot is not None
    running._running.release()


def test_a_full_store_says_so_where_nothing_has_died():
    tier, _ = made(store := Store(buffer=0))
    tier.reclaim_queue.append(BlockCleanup(tier.reclaim_queue, 0, 10))
    with pytest.raises(StashFullError) as caught:
        tier.begin(block_of(tier))
    assert caught.value is FULL and store.steps == [] and tier.peak_bytes == 0
    assert store.asked == 1
    FULL.__traceback__ = None


def test_a_profiler_sees_the_write(monkeypatch):
    spans = []
    monkeypatch.setattr(_disk, "profiled", lambda what: spans.append(what) or nullcontext())
    tier, _ = made(Store())
    tier.write_of(DiskBacking(tier.store, tier.reserve(10), 0, tier.reclaim_queue), 64, None).run()
    assert spans == ["write"]
