"""Small blocks on their way down: where they lie in a segment, when that is written, and the rebuild."""

import ctypes
import gc
from types import SimpleNamespace

import pytest
import torch

from backstash._runtime.reclaim import ReclaimQueue
from backstash._saved.block import Block, StorageVersion
from backstash._saved.placement import Resident, Stored
from backstash._tiers.backing import SegmentBacking
from backstash._tiers.segments import SEGMENT_BYTES, Segments
from backstash.errors import StashFullError

RECLAIM_QUEUE = ReclaimQueue()
KIB = 1 << 10
THREAD_STATE = object()


class Around:
    """What is around the segments, and what each was given."""

    def __init__(self, window=64 * KIB):
        self.steps, self.emitted, self.left, self.slots = [], [], [], []
        self.event_log = SimpleNamespace(on=True, emit=lambda *what: self.emitted.append(what))
        self.inflight = SimpleNamespace(
            window_bytes=window,
            nbytes=0,
            written_bytes=0,
            make_room=lambda nbytes, thread_state: self.steps.append(
                ("make room", nbytes, thread_state)
            ),
            add_segment=lambda segment, work: self.steps.append(("add", segment, work)),
        )
        disk = SimpleNamespace(
            store="the store",
            reclaim_queue=RECLAIM_QUEUE,
            reserve=self.reserve,
            count_peak=lambda: None,
            write_of=self.write_of,
            begin_work=lambda work: self.steps.append(("begin", work)),
        )
        pool = SimpleNamespace(take=lambda nbytes: torch.zeros(nbytes, dtype=torch.uint8))
        resident = SimpleNamespace(leave=self.left.append)
        self.segments = Segments(disk, pool, resident, self.inflight, self.event_log)

    def reserve(self, nbytes, *, is_open=False):
        self.slots.append(SimpleNamespace(nbytes=nbytes))
        return self.slots[-1]

    def write_of(self, segment, address, owner):
        assert address == segment.address and owner is segment.buffer
        number = [slot is segment.slot for slot in self.slots].index(True)
        segment.cleanup.transfer = f"write {number}"
        return segment.cleanup.transfer


def block_of(nbytes, value=1):
    tensor = torch.full((nbytes,), value, dtype=torch.uint8)
    version = StorageVersion(tensor, tensor.untyped_storage())
    return Block(version, tensor.detach(), RECLAIM_QUEUE, 0)


def segment_of(block):
    return block.placement.backing


def bytes_at(block):
    return ctypes.string_at(segment_of(block).address + block.offset, block.nbytes)


def test_blocks_share_a_segment_until_the_next_one_does_not_fit():
    around = Around()
    blocks = [block_of(3 * KIB, 1), block_of(100, 2), block_of(4 * KIB, 3), block_of(2 * KIB, 4)]
    addresses = [block.address for block in blocks]
    for block in blocks:
        around.segments.gather(block, THREAD_STATE)
    first, second = segment_of(blocks[0]), segment_of(blocks[3])
    assert isinstance(first, SegmentBacking)
    assert first is segment_of(blocks[1]) is segment_of(blocks[2])
    assert first is not second
    assert [slot.nbytes for slot in around.slots] == [8 * KIB, 8 * KIB]
    assert (first.store, first.slot, second.slot) == ("the store", *around.slots)
    for number, (block, address) in enumerate(zip(blocks, addresses, strict=True), 1):
        assert type(block.placement) is Stored and block.offset % 64 == address % 64
        assert bytes_at(block) == bytes([number]) * block.nbytes
    assert (first.blocks, second.blocks) == (3, 1)
    assert (
        first.filled == blocks[2].offset + 4 * KIB and second.filled == blocks[3].offset + 2 * KIB
    )
    assert (first.cleanup.inflight_bytes, second.cleanup.inflight_bytes) == (7 * KIB + 100, 2 * KIB)
    assert around.left == blocks
    assert around.inflight.nbytes == around.inflight.written_bytes == 9 * KIB + 100
    assert around.emitted == [("land", *block.facts) for block in blocks]
    assert around.steps == [("add", first, "write 0"), ("begin", "write 0")]


def test_nothing_is_emitted_where_nobody_records():
    around = Around()
    around.event_log.on = False
    around.segments.gather(block := block_of(100), THREAD_STATE)
    assert around.emitted == [] and block.placement.alias is None


def test_a_segment_is_written_when_the_window_is_full_and_no_earlier():
    around = Around(window=8 * KIB)
    around.segments.gather(first := block_of(8 * KIB), THREAD_STATE)
    assert around.steps == [], "it fits into the window, which nobody has to empty"
    around.segments.gather(block := block_of(1), THREAD_STATE)
    assert around.steps == [
        ("make room", 1, THREAD_STATE),
        ("add", segment_of(block), "write 0"),
        ("begin", "write 0"),
        ("make room", 0, THREAD_STATE),
    ]
    assert segment_of(first) is segment_of(block)
    around.segments.gather(third := block_of(1), THREAD_STATE)
    assert segment_of(third) is not segment_of(block)


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
    around.segments.gather(block := block_of(nbytes), THREAD_STATE)
    assert [each.nbytes for each in around.slots] == [slot]
    assert bytes_at(block) == bytes([1]) * nbytes


def test_a_segment_whose_blocks_have_died_is_never_written():
    around = Around()
    around.segments.gather(block_of(100), THREAD_STATE)
    around.left.clear()
    gc.collect()
    around.segments.gather(block_of(100), THREAD_STATE)
    assert around.steps == [] and len(around.slots) == 2


def test_a_block_that_finds_no_room_has_not_left():
    around = Around()
    around.segments.gather(first := block_of(7 * KIB), THREAD_STATE)
    error = StashFullError(28, "full")

    def refuse(nbytes, *, is_open=False):
        raise error

    around.segments._disk.reserve = refuse
    block = block_of(3 * KIB)
    with pytest.raises(StashFullError):
        around.segments.gather(block, THREAD_STATE)
    assert type(block.placement) is Resident and around.left == [first]
    assert [step[0] for step in around.steps] == ["add", "begin"]
    assert around.inflight.nbytes == 7 * KIB


def test_a_rebuild_gives_a_write_to_what_had_none():
    around = Around()
    blocks = [block_of(6 * KIB) for _ in range(3)]
    for block in blocks:
        around.segments.gather(block, THREAD_STATE)
    opened = segment_of(blocks[2])
    known, stopped = segment_of(blocks[0]), segment_of(blocks[1])
    stored = SegmentBacking("the store", around.reserve(100), torch.zeros(100), RECLAIM_QUEUE)
    stored.buffer = None
    stopped.cleanup.transfer = None  # closed, and interrupted before it had one
    known.cleanup.transfer = "mine"
    around.segments.restore([known, stopped, stored, opened])
    assert [each.cleanup.transfer for each in (known, stopped, stored, opened)] == [
        "mine",
        "write 1",
        None,
        None,
    ]
    around.segments._close()
    assert opened.cleanup.transfer == "write 2"
    opened.cleanup.transfer = None
    around.segments.restore([opened])
    assert opened.cleanup.transfer == "write 2"
