"""From the CPU's memory to a store: which slot, in which order, and whose room is taken back."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from backstash import _disk
from backstash._blocks import Block, Source
from backstash._disk import DiskTier
from backstash._parcels import Parcel
from backstash._remains import BlockRemains, Grave, ParcelRemains
from backstash._workers import Work
from backstash.errors import StashFullError

FULL = StashFullError(28, "full")


class Store:
    """A store with room for so many slots."""

    def __init__(self, room=100):
        self.room, self.used_bytes, self.steps, self.asked = room, 0, [], 0

    def reserve(self, nbytes):
        self.asked += 1
        if not self.room:
            raise FULL
        self.room -= 1
        self.used_bytes += nbytes
        return SimpleNamespace(nbytes=nbytes)

    def release(self, slot):
        self.room += 1
        self.used_bytes -= slot.nbytes
        self.steps.append(("release", slot))

    def stage(self, slot, address):
        self.steps.append(("stage", slot, address))

    def write(self, slot, address):
        self.steps.append(("write", slot, address))


def made(store):
    begun, waited, told = [], [], []
    flights = SimpleNamespace(wait=waited.append)
    tape = SimpleNamespace(on=False, tell=lambda *what, **more: told.append((what, more)))
    tier = DiskTier(store, begun.append, Grave(), flights, tape)
    return tier, SimpleNamespace(begun=begun, waited=waited, told=told, tape=tape)


def block_of(tier, nbytes=100):
    side = SimpleNamespace(number=0, grave=tier.grave, stream=lambda: None)
    tensor = torch.zeros(nbytes, dtype=torch.uint8)
    block = Block(Source(tensor, tensor.untyped_storage()), tensor.detach(), side)
    block.remains.module = "a module"
    return block


def test_a_block_is_written_from_its_own_memory():
    tier, seen = made(store := Store())
    block = block_of(tier, 5000)
    block.address += 4096 * 7 - block.address % 4096 + 64  # as some other one's
    parcel = tier.begin(block)
    assert isinstance(parcel, Parcel) and parcel.store is store and parcel.skew == 64
    assert store.steps == [("stage", parcel.slot, block.address)]
    (work,) = seen.begun
    assert parcel.remains.writing is work and not work.done()
    assert work.run() and work.exception() is None
    assert store.steps[1:] == [("write", parcel.slot, block.address)]
    assert tier.peak_bytes == 5000 and seen.told == [] and len(tier.grave) == 0
    del parcel
    assert [type(left) for left in tier.grave] == [ParcelRemains]


def test_its_memory_lives_until_the_write_has_ended():
    tier, seen = made(Store())
    block = block_of(tier)
    freed = []
    torch_alias = block.alias
    owner = type("Owner", (), {"__del__": lambda self: freed.append(True)})()
    parcel = Parcel(tier.store, tier.reserve(100), 0, tier.grave)
    work = tier.write_of(parcel, block.address, owner)
    del owner
    assert freed == []
    work.run()
    assert freed == [True] and torch_alias is block.alias and seen.begun == []


def test_who_records_is_told_what_was_written_and_since_when(monkeypatch):
    tier, seen = made(store := Store())
    seen.tape.on = True
    block = block_of(tier)
    parcel = tier.begin(block)
    alone = tier.write_of(parcel, 64, None)
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
    tier, seen = made(store := Store(room=4))
    running = Work(lambda: None)
    assert running._running.acquire()
    waiting, over = Work(lambda: None), Work(lambda: None)
    over.run()
    slots = []
    for work in (running, waiting, over, None):
        left = ParcelRemains(tier.grave, store, tier.reserve(10))
        left.writing = work
        tier.grave.append(left)
        slots.append(left.slot)
    tier.grave.append(BlockRemains(tier.grave, 0, 10))
    other = ParcelRemains(tier.grave, Store(), SimpleNamespace(nbytes=10))
    gone = ParcelRemains(tier.grave, store, None)
    tier.grave.extend((other, gone))
    dead = list(tier.grave)
    assert tier.reserve(20).nbytes == 20
    released = [step[1] for step in store.steps]
    assert all(one is two for one, two in zip(released, slots, strict=True))
    assert seen.waited == [running, over] and waiting.cancelled
    assert list(tier.grave) == dead, "who drains it settles the rest"
    assert [left.slot for left in dead[:4]] == [None] * 4 and other.slot is not None
    running._running.release()


def test_a_full_store_says_so_where_nothing_has_died():
    tier, _ = made(store := Store(room=0))
    tier.grave.append(BlockRemains(tier.grave, 0, 10))
    with pytest.raises(StashFullError) as caught:
        tier.begin(block_of(tier))
    assert caught.value is FULL and store.steps == [] and tier.peak_bytes == 0
    assert store.asked == 1
    FULL.__traceback__ = None


def test_a_profiler_sees_the_write(monkeypatch):
    spans = []
    monkeypatch.setattr(_disk, "profiled", lambda what: spans.append(what) or nullcontext())
    tier, _ = made(Store())
    tier.write_of(Parcel(tier.store, tier.reserve(10), 0, tier.grave), 64, None).run()
    assert spans == ["write"]
