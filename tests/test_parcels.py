"""Parcels: what is told when one dies, where small blocks lie in a segment, and readings."""

from contextlib import contextmanager

import pytest
import torch

from backstash import _parcels
from backstash._parcels import Parcel, Reading, Segment
from backstash._remains import Grave
from backstash.errors import StashIOError
from backstash.stores import Slot
from backstash.testing import Failing, MemoryStore


def segment_of(nbytes, grave=None):
    buffer = torch.zeros(nbytes, dtype=torch.uint8)
    return Segment(MemoryStore(), Slot(nbytes), buffer, Grave() if grave is None else grave)


def test_a_new_parcel_and_what_it_leaves():
    store, slot, grave = MemoryStore(), Slot(5000), Grave()
    parcel = Parcel(store, slot, 64, grave)
    assert (parcel.tier, parcel.nbytes, parcel.skew, parcel.slot) == ("disk", 5000, 64, slot)
    left = parcel.remains
    assert (left.writing, parcel.reading, parcel.ahead) == (None, None, False)
    assert (left.held, parcel.blocks, left.flown, parcel.wanted) == (0, 1, 0, 0)
    left.held, left.flown, left.writing = 7, 8, "future"
    del parcel, left
    (left,) = grave
    assert (left.store, left.slot, left.writing, left.held, left.flown) == (
        store,
        slot,
        "future",
        7,
        8,
    )


def test_what_was_read_is_let_go_and_may_be_read_again():
    parcel = Parcel(MemoryStore(), Slot(1), 0, Grave())
    parcel.reading, parcel.ahead = "reading", True
    parcel.let_go()
    assert (parcel.reading, parcel.ahead) == (None, False)


def test_a_reading_puts_the_bytes_where_the_source_s_lay():
    store = MemoryStore()
    slot = store.reserve(100)
    source = torch.arange(100, dtype=torch.uint8)
    store.write(slot, source.data_ptr())
    parcel = Parcel(store, slot, 64, Grave())
    reading = Reading(parcel, torch.zeros(64 + 100, dtype=torch.uint8))
    assert reading.arrival is None and reading.needs_worker is True
    reading.run()
    assert reading.exception() is None
    assert not reading.memory[:64].any() and torch.equal(reading.memory[64:], source)


def test_a_profiler_sees_the_read(monkeypatch):
    seen = []

    @contextmanager
    def profiled(name):
        seen.append(name)
        yield
        seen.append("end of " + name)

    monkeypatch.setattr(_parcels, "profiled", profiled)
    store = MemoryStore()
    slot = store.reserve(8)
    store.write(slot, torch.zeros(8).data_ptr())
    Reading(Parcel(store, slot, 0, Grave()), torch.zeros(8, dtype=torch.uint8)).run()
    assert seen == ["read", "end of read"]


def test_a_reading_that_fails_says_so_to_whoever_waits():
    store = Failing(MemoryStore())
    slot = store.reserve(100)
    store.on_read = StashIOError(5, "gone")
    reading = Reading(Parcel(store, slot, 0, Grave()), torch.zeros(100, dtype=torch.uint8))
    reading.run()
    assert reading.exception() is store.on_read


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
    grave = Grave()
    segment = segment_of(128, grave)
    segment.remains.flown = 100
    del segment
    assert [(left.writing, left.held, left.flown) for left in grave] == [(None, 0, 100)]
