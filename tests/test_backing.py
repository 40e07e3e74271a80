"""Parcels: what is told when one dies, where small blocks lie in a segment, and readings."""

from contextlib import contextmanager

import pytest
import torch

from backstash._runtime.reclaim import ReclaimQueue
from backstash._tiers import backing as _backing
from backstash._tiers.backing import DiskBacking, DiskLoad, SegmentBacking
from backstash.errors import StashIOError
from backstash.stores import Slot
from backstash.testing import Failing, MemoryStore


def segment_of(nbytes, reclaim_queue=None):
    buffer = torch.zeros(nbytes, dtype=torch.uint8)
    return SegmentBacking(
        MemoryStore(),
        Slot(nbytes),
        buffer,
        ReclaimQueue() if reclaim_queue is None else reclaim_queue,
    )


def test_a_new_parcel_and_what_it_leaves():
    store, slot, reclaim_queue = MemoryStore(), Slot(5000), ReclaimQueue()
    backing = DiskBacking(store, slot, 64, reclaim_queue)
    assert (backing.tier, backing.nbytes, backing.skew, backing.slot) == ("disk", 5000, 64, slot)
    left = backing.cleanup
    assert (left.writing, backing.load, backing.ahead) == (None, None, False)
    assert (left.loaded_bytes, backing.blocks, left.inflight_bytes, backing.wanted) == (0, 1, 0, 0)
    left.loaded_bytes, left.inflight_bytes, left.writing = 7, 8, "future"
    del backing, left
    (left,) = reclaim_queue
    assert (left.store, left.slot, left.writing, left.loaded_bytes, left.inflight_bytes) == (
        store,
        slot,
        "future",
        7,
        8,
    )


def test_what_was_read_is_let_go_and_may_be_read_again():
    backing = DiskBacking(MemoryStore(), Slot(1), 0, ReclaimQueue())
    backing.load, backing.ahead = "reading", True
    backing.let_go()
    assert (backing.load, backing.ahead) == (None, False)


def test_a_reading_puts_the_bytes_where_the_source_s_lay():
    store = MemoryStore()
    slot = store.reserve(100)
    source = torch.arange(100, dtype=torch.uint8)
    store.write(slot, source.data_ptr())
    backing = DiskBacking(store, slot, 64, ReclaimQueue())
    load = DiskLoad(backing, torch.zeros(64 + 100, dtype=torch.uint8))
    assert load.arrival is None and load.needs_worker is True
    load.run()
    assert load.exception() is None
    assert not load.memory[:64].any() and torch.equal(load.memory[64:], source)


def test_a_profiler_sees_the_read(monkeypatch):
    seen = []

    @contextmanager
    def profiled(name):
        seen.append(name)
        yield
        seen.append("end of " + name)

    monkeypatch.setattr(_backing, "profiled", profiled)
    store = MemoryStore()
    slot = store.reserve(8)
    store.write(slot, torch.zeros(8).data_ptr())
    DiskLoad(DiskBacking(store, slot, 0, ReclaimQueue()), torch.zeros(8, dtype=torch.uint8)).run()
    assert seen == ["read", "end of read"]


def test_a_reading_that_fails_says_so_to_whoever_waits():
    store = Failing(MemoryStore())
    slot = store.reserve(100)
    store.on_read = StashIOError(5, "gone")
    load = DiskLoad(
        DiskBacking(store, slot, 0, ReclaimQueue()), torch.zeros(100, dtype=torch.uint8)
    )
    load.run()
    assert load.exception() is store.on_read


@pytest.mark.parametrize(
    ("filled", "residue", "nbytes", "at"),
    [
        (0, 0, 256, 0), (0, 0, 257, None), (0, 16, 240, 16), (0, 16, 241, None), (1, 0, 192, 64),
        (1, 0, 193, None), (64, 0, 192, 64), (64, 48, 144, 112), (65, 48, 80, 176), (256, 0, 1, None),
    ],
)  # fmt: skip
def test_a_small_block_lies_behind_the_others_with_its_residue(filled, residue, nbytes, at):
    segment = segment_of(256)
    assert (segment.filled, segment.blocks, segment.skew) == (0, 0, 0)
    assert segment.address == segment.buffer.data_ptr() and segment.tier == "disk"
    segment.filled = filled
    assert segment.place(4096 + residue, nbytes) == at
    assert segment.place(8192 + 640 + residue, nbytes) == at


def test_a_segment_that_dies_says_what_was_in_flight():
    reclaim_queue = ReclaimQueue()
    segment = segment_of(128, reclaim_queue)
    segment.cleanup.inflight_bytes = 100
    del segment
    assert [(left.writing, left.loaded_bytes, left.inflight_bytes) for left in reclaim_queue] == [
        (None, 0, 100)
    ]
