"""Small blocks on their way down: where they lie in a segment, when that is written, and the books anew."""

import ctypes
import gc
from types import SimpleNamespace

import pytest
import torch

from backstash._runtime.reclaim import ReclaimQueue
from backstash._saved.block import Block, StorageVersion
from backstash._tiers.backing import SegmentBacking
from backstash._tiers.segments import SEGMENT_BYTES, Segments
from backstash.errors import StashFullError

GRAVE = ReclaimQueue()
KIB = 1 << 10
LANE = object()


class Around:
    """What is around the segments, and what each was told."""

    def __init__(self, window=64 * KIB):
        self.steps, self.told, self.left, self.slots = [], [], [], []
        self.window, self.inflight_bytes, self.restored = window, 0, 0
        self.event_log = SimpleNamespace(on=True, emit=lambda *what: self.told.append(what))
        inflight = SimpleNamespace(
            window_bytes=window,
            make_room=lambda nbytes, thread_state: self.steps.append(
                ("room", nbytes, thread_state)
            ),
            count=self.count,
            has_room=lambda nbytes: self.inflight_bytes + nbytes <= self.window,
            add_segment=lambda segment, work: self.steps.append(("add", segment, work)),
        )
        disk = SimpleNamespace(
            store="the store",
            reclaim_queue=GRAVE,
            reserve=self.reserve,
            write_of=self.write_of,
            begin_work=lambda work: self.steps.append(("begin", work)),
        )
        pool = SimpleNamespace(
            take=lambda nbytes: torch.zeros(nbytes, dtype=torch.uint8), restore=self.restore
        )
        resident = SimpleNamespace(leave=self.left.append)
        self.segments = Segments(disk, pool, resident, inflight, self.event_log)

    def count(self, nbytes):
        self.inflight_bytes += nbytes

    def reserve(self, nbytes):
        self.slots.append(SimpleNamespace(nbytes=nbytes))
        return self.slots[-1]

    def write_of(self, segment, address, owner):
        assert address == segment.address and owner is segment.buffer
        segment.cleanup.writing = (
            f"write {[slot is segment.slot for slot in self.slots].index(True)}"
        )
        return segment.cleanup.writing

    def restore(self):
        self.restored += 1


def block_of(nbytes, value=1):
    tiers = SimpleNamespace(number=0, reclaim_queue=GRAVE, stream=lambda: None)
    tensor = torch.full((nbytes,), value, dtype=torch.uint8)
    return Block(StorageVersion(tensor, tensor.untyped_storage()), tensor.detach(), tiers)


def bytes_at(block):
    return ctypes.string_at(block.backing.address + block.offset, block.nbytes)


def test_blocks_share_a_segment_until_the_next_one_does_not_fit():
    around = Around()
    blocks = [block_of(3 * KIB, 1), block_of(100, 2), block_of(4 * KIB, 3), block_of(2 * KIB, 4)]
    addresses = [block.address for block in blocks]
    for block in blocks:
        around.segments.gather(block, LANE)
    first, second = blocks[0].backing, blocks[3].backing
    assert isinstance(first, SegmentBacking) and first is blocks[1].backing is blocks[2].backing
    assert first is not second
    assert [slot.nbytes for slot in around.slots] == [8 * KIB, 8 * KIB]
    assert (first.store, first.slot, second.slot) == ("the store", *around.slots)
    for number, (block, address) in enumerate(zip(blocks, addresses, strict=True), 1):
        assert block.alias is None and block.offset % 64 == address % 64
        assert bytes_at(block) == bytes([number]) * block.nbytes
    assert (first.blocks, second.blocks) == (3, 1)
    assert (
        first.filled == blocks[2].offset + 4 * KIB and second.filled == blocks[3].offset + 2 * KIB
    )
    assert (first.cleanup.inflight_bytes, second.cleanup.inflight_bytes) == (7 * KIB + 100, 2 * KIB)
    assert around.left == blocks and around.inflight_bytes == 9 * KIB + 100
    assert around.told == [("land", *block.facts) for block in blocks]
    assert around.steps == [
        ("room", 3 * KIB, LANE),
        ("room", 100, LANE),
        ("room", 4 * KIB, LANE),
        ("add", first, "write 0"),
        ("begin", "write 0"),
        ("room", 2 * KIB, LANE),
    ]


def test_nobody_is_told_where_nobody_records():
    around = Around()
    around.event_log.on = False
    around.segments.gather(block := block_of(100), LANE)
    assert around.told == [] and block.alias is None


def test_a_segment_is_written_when_the_window_is_full_and_no_earlier():
    around = Around(window=8 * KIB)
    around.segments.gather(first := block_of(8 * KIB), LANE)
    assert [step[0] for step in around.steps] == ["room"]
    around.segments.gather(block := block_of(1), LANE)
    assert around.steps[1:] == [
        ("room", 1, LANE),
        ("add", block.backing, "write 0"),
        ("begin", "write 0"),
        ("room", 0, LANE),
    ]
    assert first.backing is block.backing
    around.segments.gather(third := block_of(1), LANE)
    assert third.backing is not block.backing


@pytest.mark.parametrize(
    "window, nbytes, slot",
    [
        (64 << 20, 100, SEGMENT_BYTES),
        (1 << 20, 100, 128 * KIB),
        (0, 100, 4 * KIB),
        (0, 4 * KIB - 128, 4 * KIB),
        (0, 4 * KIB - 127, 8 * KIB),
    ],
)
def test_a_segment_is_an_eighth_of_the_window_and_has_room_for_the_block(window, nbytes, slot):
    around = Around(window)
    around.segments.gather(block := block_of(nbytes), LANE)
    assert [each.nbytes for each in around.slots] == [slot]
    assert bytes_at(block) == bytes([1]) * nbytes


def test_a_segment_whose_blocks_have_died_is_never_written():
    around = Around()
    around.segments.gather(block_of(100), LANE)
    around.left.clear()
    gc.collect()
    around.segments.gather(block_of(100), LANE)
    assert [step[0] for step in around.steps] == ["room", "room"] and len(around.slots) == 2


def test_a_block_that_finds_no_room_has_not_left():
    around = Around()
    around.segments.gather(first := block_of(7 * KIB), LANE)
    error = StashFullError(28, "full")

    def refuse(nbytes):
        raise error

    around.segments._disk.reserve = refuse
    block = block_of(3 * KIB)
    with pytest.raises(StashFullError):
        around.segments.gather(block, LANE)
    assert block.backing is None and block.alias is not None and around.left == [first]
    assert [step[0] for step in around.steps] == ["room", "add", "begin"]


def test_the_books_anew_give_a_write_to_what_had_none():
    around = Around()
    blocks = [block_of(6 * KIB) for _ in range(3)]
    for block in blocks:
        around.segments.gather(block, LANE)
    opened = blocks[2].backing
    known, stopped = blocks[0].backing, blocks[1].backing
    landed = SegmentBacking("the store", around.reserve(100), torch.zeros(100), GRAVE)
    landed.buffer = None
    stopped.cleanup.writing = None  # closed, and interrupted before it had one
    known.cleanup.writing = "mine"
    around.segments.restore([known, stopped, landed, opened])
    assert [each.cleanup.writing for each in (known, stopped, landed, opened)] == [
        "mine",
        "write 1",
        None,
        None,
    ]
    assert around.restored == 1
    around.segments._close()
    assert opened.cleanup.writing == "write 2"
    opened.cleanup.writing = None
    around.segments.restore([opened])
    assert opened.cleanup.writing == "write 2"
