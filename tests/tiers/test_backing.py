"""Backings: what one leaves when it dies, where small blocks lie in a segment, loads, and placements."""

import gc
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from backstash import Disk
from backstash._runtime.reclaim import ReclaimQueue
from backstash._runtime.workers import Work
from backstash._saved.placement import Backing, Load, Lost, Resident, Stored, Writing
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


def test_a_new_backing_and_what_it_leaves():
    store, slot, reclaim_queue = MemoryStore(), Slot(5000), ReclaimQueue()
    backing = DiskBacking(store, slot, 64, reclaim_queue)
    assert (backing.tier, backing.nbytes, backing.skew, backing.slot) == ("disk", 5000, 64, slot)
    assert (backing.buffer, backing.is_shared) == (None, False)
    cleanup = backing.cleanup
    assert (cleanup.transfer, backing.load, backing.ahead) == (None, None, False)
    assert (cleanup.mark, cleanup.number, cleanup.facts) == (reclaim_queue.mark, 0, None)
    assert (cleanup.loaded_bytes, cleanup.inflight_bytes) == (0, 0)
    assert (backing.blocks, backing.wanted) == (1, 0)
    cleanup.loaded_bytes, cleanup.inflight_bytes, cleanup.transfer = 7, 8, "future"
    del backing, cleanup
    (cleanup,) = reclaim_queue
    assert (cleanup.store, cleanup.slot, cleanup.transfer) == (store, slot, "future")
    assert (cleanup.loaded_bytes, cleanup.inflight_bytes) == (7, 8)


def test_what_the_collector_finds_keeps_its_place_until_it_is_settled(tmp_path):
    """Its slot comes back with the cleanup: another that was given the place would share it."""
    disk, reclaim_queue = Disk(tmp_path), ReclaimQueue()
    backing = DiskBacking(disk, disk.reserve(5000), 0, reclaim_queue)
    cycle = [backing]
    cycle.append(cycle)
    place = backing.slot.offset
    del backing, cycle
    gc.collect()
    (cleanup,) = reclaim_queue
    assert reclaim_queue.leased == {cleanup}
    other = disk.reserve(5000)
    assert other.offset != place
    cleanup.settle(None)
    assert disk.reserve(5000).offset == place
    disk.close()


def test_what_was_read_is_freed_and_may_be_read_again():
    backing = DiskBacking(MemoryStore(), Slot(1), 0, ReclaimQueue())
    backing.load, backing.ahead = "a load", True
    backing.free()
    assert (backing.load, backing.ahead) == (None, False)


def test_a_slot_is_given_back_once_and_what_was_in_flight_is_subtracted_once():
    released, subtracted = [], []
    store = SimpleNamespace(release=released.append)
    ledger = SimpleNamespace(subtract=lambda **what: subtracted.append(what))
    backing = DiskBacking(store, slot := Slot(10), 0, ReclaimQueue())
    cleanup = backing.cleanup
    cleanup.inflight_bytes = 8
    for _ in range(2):
        cleanup.settle(ledger)
    assert released == [slot] and subtracted == [{"inflight_bytes": 8}]
    empty = DiskBacking(store, Slot(10), 0, ReclaimQueue()).cleanup
    empty.settle(ledger)
    assert len(released) == 2 and len(subtracted) == 1, "nothing was in flight"


def test_a_slot_is_busy_until_its_write_has_ended_or_will_not_begin():
    cleanup = DiskBacking(MemoryStore(), Slot(10), 0, ReclaimQueue()).cleanup
    assert not cleanup.is_busy(), "nothing was ever written"
    running, waiting, over = Work(int), Work(int), Work(int)
    over.run()
    with running._running:
        cleanup.transfer = running
        assert cleanup.is_busy()
    cleanup.transfer = waiting
    assert not cleanup.is_busy() and waiting.cancelled
    cleanup.transfer = over
    assert not cleanup.is_busy()


def test_a_load_puts_the_bytes_where_the_source_s_lay():
    store = MemoryStore()
    slot = store.reserve(100)
    source = torch.arange(100, dtype=torch.uint8)
    store.write(slot, source.data_ptr())
    backing = DiskBacking(store, slot, 64, ReclaimQueue())
    load = DiskLoad(backing, torch.zeros(64 + 100, dtype=torch.uint8))
    assert isinstance(load, Load) and load.arrival is None and not load.is_ready
    assert load.work.run() and load.is_ready
    assert load.exception() is None
    assert not load.memory[:64].any() and torch.equal(load.memory[64:], source)


def test_who_asks_how_a_load_has_ended_makes_it():
    store = MemoryStore()
    slot = store.reserve(8)
    source = torch.arange(8, dtype=torch.uint8)
    store.write(slot, source.data_ptr())
    load = DiskLoad(DiskBacking(store, slot, 0, ReclaimQueue()), torch.zeros(8, dtype=torch.uint8))
    assert load.exception() is None and load.is_ready
    assert torch.equal(load.memory, source)


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
    backing = DiskBacking(store, slot, 0, ReclaimQueue())
    DiskLoad(backing, torch.zeros(8, dtype=torch.uint8)).work.run()
    assert seen == ["read", "end of read"]


def test_a_load_that_fails_reports_its_error_to_any_waiting_caller():
    store = Failing(MemoryStore())
    slot = store.reserve(100)
    store.on_read = StashIOError(5, "gone")
    load = DiskLoad(
        DiskBacking(store, slot, 0, ReclaimQueue()), torch.zeros(100, dtype=torch.uint8)
    )
    load.work.run()
    assert load.exception() is store.on_read and not load.is_ready


def test_a_backing_of_one_block_hands_out_the_memory_that_was_read():
    backing = DiskBacking(MemoryStore(), Slot(100), 64, ReclaimQueue())
    backing.wanted = 1
    memory = torch.zeros(164, dtype=torch.uint8)
    root, low = backing.storage_for(0, 4096 + 64, 100, memory)
    assert root is memory and low == 64 and backing.wanted == 0


def test_a_segment_hands_out_a_copy_of_each_block():
    segment = segment_of(256)
    segment.wanted = 2
    memory = torch.arange(256, dtype=torch.uint8)
    root, low = segment.storage_for(80, 4096 + 16, 113, memory)
    assert (root.numel(), low, segment.wanted) == (192, 16, 1), "to the end of a line"
    assert torch.equal(root[16 : 16 + 113], memory[80 : 80 + 113])
    root.zero_()
    assert torch.equal(memory, torch.arange(256, dtype=torch.uint8))


@pytest.mark.parametrize(
    ("filled", "residue", "nbytes", "at"),
    [
        (0, 0, 256, 0), (0, 0, 257, None), (0, 16, 240, 16), (0, 16, 241, None), (1, 0, 192, 64),
        (1, 0, 193, None), (64, 0, 192, 64), (64, 48, 144, 112), (65, 48, 80, 176), (256, 0, 1, None),
    ],
)  # fmt: skip
def test_a_small_block_lies_behind_the_others_with_its_residue(filled, residue, nbytes, at):
    segment = segment_of(256)
    assert (segment.filled, segment.blocks, segment.skew, segment.is_shared) == (0, 0, 0, True)
    assert segment.address == segment.buffer.data_ptr() and segment.tier == "disk"
    segment.filled = filled
    assert segment.place(4096 + residue, nbytes) == at
    assert segment.place(8192 + 640 + residue, nbytes) == at


def test_a_segment_that_dies_says_what_was_in_flight():
    reclaim_queue = ReclaimQueue()
    segment = segment_of(128, reclaim_queue)
    segment.cleanup.inflight_bytes = 100
    del segment
    assert [
        (cleanup.transfer, cleanup.loaded_bytes, cleanup.inflight_bytes)
        for cleanup in reclaim_queue
    ] == [(None, 0, 100)]


# Placements: what each says of a block, and what it says by default.


def facts_of(placement):
    return {
        "alias": placement.alias,
        "backing": placement.backing,
        "transfer": placement.transfer,
        "is_kept": placement.is_kept,
        "is_unordered": placement.is_unordered,
        "lost_at": placement.lost_at,
    }


NOTHING = {
    "alias": None,
    "backing": None,
    "transfer": None,
    "is_kept": False,
    "is_unordered": False,
    "lost_at": None,
}


@pytest.mark.parametrize(
    "placement, says",
    [
        (Resident("alias"), {"alias": "alias", "is_kept": True}),
        (
            Writing("alias", "backing", "transfer"),
            {"alias": "alias", "backing": "backing", "transfer": "transfer"},
        ),
        (Stored("backing"), {"backing": "backing"}),
        (Stored("backing", is_unordered=True), {"backing": "backing", "is_unordered": True}),
        (Lost(3), {"lost_at": 3}),
        (Lost(0), {"lost_at": 0}),
    ],
    ids=["resident", "writing", "stored", "stored while it was copied", "lost", "lost at first"],
)
def test_a_placement_says_all_of_a_block_and_nothing_that_it_does_not_have(placement, says):
    assert facts_of(placement) == NOTHING | says


@pytest.mark.parametrize("kind", [Resident, Writing, Stored, Lost])
def test_a_placement_has_no_attributes_other_than_its_own(kind):
    placement = kind.__new__(kind)
    with pytest.raises(AttributeError):
        placement.anything = 1
    absent = {*NOTHING} - {*kind.__slots__}
    for name in sorted(absent):
        with pytest.raises(AttributeError):
            setattr(placement, name, 1)


def test_nobody_makes_a_backing_or_a_load_of_no_tier():
    for kind in (Backing, Load):
        with pytest.raises(TypeError, match="abstract"):
            kind()
