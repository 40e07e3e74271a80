"""The way up by itself: what is read, shared, held and dropped, what is asked for ahead, and what may fail."""

import threading
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch

from backstash._runtime.critical_section import CriticalSection
from backstash._runtime.reclaim import ReclaimQueue
from backstash._saved.access_order import AccessPredictor
from backstash._saved.block import Block, StorageVersion
from backstash._saved.entry import Entry
from backstash._tiers.backing import DiskBacking, SegmentBacking
from backstash._tiers.prefetch import Prefetcher

GRAVE = ReclaimQueue()
SIDE = SimpleNamespace(number=0, reclaim_queue=GRAVE, stream=lambda: None)
SIZE = 4096


class Reading:
    """Bytes on their way back. ``error`` is what the read ends with; ``meanwhile`` is called while it runs."""

    def __init__(self, around, backing):
        self.memory = torch.empty(backing.skew + backing.nbytes, dtype=torch.uint8)
        self.memory.data[backing.skew :] = backing.store  # its version stays 0: nobody changed it
        self.arrival, self.needs_worker = around.arrival, around.needs_worker
        self.errors = around.errors.pop(backing, [])
        self.around, self.runs = around, 0

    def run(self):
        self.runs += 1
        return self.runs == 1

    def exception(self):
        meanwhile, self.around.meanwhile = self.around.meanwhile, None
        if meanwhile is not None:
            meanwhile()
        error = self.errors.pop(0) if self.errors else None
        if isinstance(error, torch.OutOfMemoryError):
            raise error
        return error


class Around:
    """What is around the way up, and what each was told."""

    def __init__(self, prefetch=4 * SIZE, memory=None, reads_one_beyond=False):
        self.fetched, self.begun, self.freed, self.told = [], [], [], []
        self.errors = {}  # of a parcel: what its next reading ends with, each time that it is asked
        self.refused = []  # what the next fetches raise
        self.meanwhile = self.arrival = None
        self.needs_worker, self.polls = True, 0
        self.reads_one_beyond = reads_one_beyond
        self.order = AccessPredictor()
        self.event_log = SimpleNamespace(on=True, emit=self.emit)
        self.prefetcher = Prefetcher(
            self.begun.append,
            self,
            threading.RLock(),
            CriticalSection(),
            self.freed.append,
            self.event_log,
            prefetch=prefetch,
            memory=memory,
        )

    def emit(self, *what, began=None, **more):
        self.told.append((*what, *more.values()) if began is None else (*what, *more.values(), "s"))

    def fetch(self, backing, *, ahead):
        if self.refused:
            error = self.refused.pop(0)
            if error is not None:
                raise error
        self.fetched.append((backing, ahead))
        return Reading(self, backing)

    def poll(self):
        self.polls += 1

    def block(self, value, nbytes=SIZE, skew=0, entries=1):
        """A block that has landed in a parcel of its own, and its entries."""
        block = self.in_place(torch.full((nbytes,), value, dtype=torch.uint8))
        block.backing = DiskBacking(
            block.alias.clone(), SimpleNamespace(nbytes=nbytes), skew, GRAVE
        )
        made = [Entry(block, block.alias, 0) for _ in range(entries)]
        block.entries, block.alias = entries, None
        return block, *made

    def in_place(self, tensor):
        block = Block(StorageVersion(tensor, tensor.untyped_storage()), tensor.detach(), SIDE)
        block.cleanup.module = "net"
        self.order.add(block)
        return block

    def segment(self, *sizes, low=0):
        """Blocks of bytes 1, 2, ... that lie in one segment, which has its buffer still; their entries."""
        buffer = torch.zeros(SIZE, dtype=torch.uint8)
        segment = SegmentBacking(buffer, SimpleNamespace(nbytes=SIZE), buffer, GRAVE)
        entries = []
        for value, nbytes in enumerate(sizes, 1):
            block = self.in_place(torch.full((nbytes,), value, dtype=torch.uint8))
            entries.append(Entry(block, block.alias, 0))
            block.address = 64 * value + low  # its residue modulo 64 is all that matters
            block.offset = segment.place(block.address, nbytes)
            segment.filled = block.offset + nbytes
            buffer[block.offset : segment.filled] = value
            block.backing, block.alias, block.entries = segment, None, 1
            segment.blocks += 1
        return segment, entries

    def use(self, entry):
        """What unpacking does; all values of the view."""
        self.order.use(entry.block)
        view = self.prefetcher.view(entry)
        self.prefetcher.ahead(entry.block)
        return view

    def ahead_of(self, *blocks):
        """Whose reads have been asked for ahead of need."""
        return [
            [backing for backing, ahead in self.fetched if ahead].count(each.backing)
            for each in blocks
        ]


def values(view):
    return set(view.tolist())


def test_one_read_serves_every_view_of_a_block_and_is_let_go_after_the_last():
    around = Around()
    up, (block, one, two) = around.prefetcher, around.block(7, entries=2)
    first = up.view(one)
    assert values(first) == {7}
    assert (up.misses, up.hits, up.read_bytes, up.ahead_bytes) == (1, 0, SIZE, SIZE)
    assert (block.turn, block.served) == (1, 1)
    assert up.view(one).data_ptr() == first.data_ptr()  # the same again is not another
    assert (block.served, around.freed) == (1, [SIZE])  # the reading's memory is the block's now
    second = up.view(two)
    assert second.data_ptr() == first.data_ptr() and second._version == 0
    assert (up.ahead_bytes, around.freed) == (0, [SIZE, SIZE])
    assert block.root is None and block.backing.load is None
    assert values(up.view(two)) == {7} and block.turn == 2  # another use of the graph
    assert (up.misses, up.read_bytes, len(around.fetched)) == (2, 2 * SIZE, 2)
    assert (block.served, up.ahead_bytes) == (1, SIZE)


def test_where_the_memory_begins_before_the_block_does():
    around = Around()
    block, entry = around.block(3, skew=64)
    view = around.prefetcher.view(entry)
    assert view.storage_offset() == 64 and values(view) == {3} and len(view) == SIZE
    assert block.backing.wanted == 0


def test_what_a_backward_changed_is_read_anew_for_the_next():
    around = Around()
    _, one, two, _ = around.block(7, entries=3)
    changed = around.prefetcher.view(one)
    assert around.prefetcher.view(two).data_ptr() == changed.data_ptr()
    changed.add_(1)
    fresh = around.prefetcher.view(two)
    assert values(fresh) == {7} and values(changed) == {8}
    assert (
        len(around.fetched) == 2 and around.prefetcher.ahead_bytes == SIZE
    )  # what was changed is not held


def test_another_thread_that_came_first_is_joined():
    around = Around()
    _, one, two, _ = around.block(7, entries=3)
    other = []
    around.meanwhile = lambda: other.append(around.prefetcher.view(two))
    assert around.prefetcher.view(one).data_ptr() == other[0].data_ptr()
    assert len(around.fetched) == 1 and around.prefetcher.ahead_bytes == SIZE
    assert (around.prefetcher.misses, around.prefetcher.hits) == (1, 0)


def test_two_threads_that_come_for_what_was_read_ahead_are_one_hit():
    around = Around()
    _, one, two, _ = around.block(7, entries=3)
    _, newest = around.block(8)
    around.use(newest)
    around.meanwhile = lambda: around.prefetcher.view(two)
    around.prefetcher.view(one)
    assert (around.prefetcher.misses, around.prefetcher.hits) == (1, 1)


def test_another_thread_that_came_first_and_changed_what_it_was_given():
    around = Around()
    _, one, two, _ = around.block(7, entries=3)
    around.meanwhile = lambda: around.prefetcher.view(two).add_(1)
    assert values(around.prefetcher.view(one)) == {7}
    assert len(around.fetched) == 2 and around.prefetcher.ahead_bytes == SIZE


def test_the_only_view_changed_by_another_thread_that_came_first():
    """The block has no memory any more then, but what this one waited for is that thread's."""
    around = Around()
    block, entry = around.block(7)
    around.meanwhile = lambda: around.prefetcher.view(entry).add_(1)
    assert values(around.prefetcher.view(entry)) == {7}
    assert len(around.fetched) == 2 and block.turn == 2


def test_a_segment_s_buffer_serves_until_it_has_landed():
    around = Around()
    segment, entries = around.segment(100, 200, low=16)
    for value, entry in enumerate(entries, 1):
        view = around.prefetcher.view(entry)
        assert values(view) == {value} and len(view) == 100 * value
        assert view.data_ptr() % 64 == entry.block.address % 64 == 16
        view.zero_()
    assert values(segment.buffer[segment.filled - 200 : segment.filled]) == {2}
    assert (around.fetched, around.prefetcher.misses) == ([], 0)
    assert around.prefetcher.ahead_bytes == 0 and around.freed == [0, 100, 0, 200]


@pytest.mark.parametrize("low", [0, 16])
def test_a_segment_is_read_once_for_all_of_its_blocks(low):
    around = Around()
    segment, entries = around.segment(100, 200, 50, low=low)
    segment.buffer = None
    for each in entries:
        each.block.entries = 2  # so that all are held
    assert values(around.prefetcher.view(entries[1])) == {2}
    assert (around.prefetcher.ahead_bytes, segment.wanted) == (SIZE + 200, 2)
    assert values(around.prefetcher.view(entries[0])) == {1}
    assert segment.load is not None
    assert values(around.prefetcher.view(entries[2])) == {3}
    assert segment.load is None and around.prefetcher.ahead_bytes == 350
    assert [backing for backing, _ in around.fetched] == [segment]
    assert around.freed == [SIZE]


def test_a_segment_s_storage_reaches_to_the_end_of_a_line():
    around = Around()
    _, [entry] = around.segment(113, low=16)
    entry.block.entries = 2
    around.prefetcher.view(entry)
    assert entry.block.root.nbytes == 192 and entry.block.root_low == 16


def test_what_an_accelerator_brings_is_ordered_for_each_who_uses_it():
    around = Around()
    orders = []
    around.arrival = SimpleNamespace(order=lambda: orders.append(1))
    _, one, two = around.block(7, entries=2)
    around.prefetcher.view(one), around.prefetcher.view(two)
    assert len(orders) == 2


@pytest.mark.parametrize("needs_worker", [True, False])
def test_a_read_by_need_and_what_is_told_of_it(needs_worker):
    around = Around()
    around.needs_worker = needs_worker
    block, entry = around.block(7, entries=1)
    around.prefetcher.view(entry)
    read = [("read", SIZE, 0, "net", "demand", "s")] * needs_worker
    assert around.told == [*read, ("stall", 0, 0, "net", "unpack", "s")]
    assert 0 < around.prefetcher.stall_seconds < 60
    around.told.clear()
    around.event_log.on = False
    around.prefetcher.view(entry)
    assert around.told == []
    assert [block.backing for block in [block]] == [around.fetched[0][0]]


def test_a_segment_is_told_without_a_block():
    around = Around()
    segment, [entry, _] = around.segment(100, 200)
    segment.buffer = None
    around.prefetcher.view(entry)
    assert around.told[0] == ("read", SIZE, -1, "", "demand", "s")


def test_a_failed_read_leaves_nothing_and_may_be_tried_again():
    around = Around()
    block, entry = around.block(7)
    around.errors[block.backing] = [OSError("no")]
    with pytest.raises(OSError, match="no"):
        around.prefetcher.view(entry)
    assert (around.prefetcher.ahead_bytes, block.backing.load, block.root) == (0, None, None)
    assert values(around.prefetcher.view(entry)) == {7}


def test_a_failed_read_that_somebody_has_replaced_is_not_taken_from_them():
    around = Around()
    segment, [one, two] = around.segment(100, 200)
    segment.buffer = None
    around.errors[segment] = [OSError("no"), OSError("no")]
    around.meanwhile = lambda: around.prefetcher.view(two)  # which asks again
    with pytest.raises(OSError, match="no"):
        around.prefetcher.view(one)
    assert segment.load is not None and around.prefetcher.ahead_bytes == SIZE
    assert values(around.prefetcher.view(one)) == {1}
    assert len(around.fetched) == 2


def test_a_read_ahead_of_need_that_failed_is_made_again_by_need():
    around = Around()
    block, entry = around.block(7)
    _, newest = around.block(8)
    around.errors[block.backing] = [OSError("ahead")]
    around.use(newest)
    assert block.backing.ahead
    assert values(around.use(entry)) == {7}
    assert around.fetched[1:] == [(block.backing, True), (block.backing, False)]
    assert (around.prefetcher.hits, around.prefetcher.misses) == (1, 2)


def test_a_hit_is_counted_once_and_reads_nothing():
    around = Around()
    block, one, two = around.block(7, entries=2)
    _, newest = around.block(8)
    around.use(newest)
    [work] = around.begun
    load = block.backing.load
    work.run()
    around.told.clear()
    assert values(around.use(one)) == values(around.use(two)) == {7}
    assert load.runs == 2  # a worker's, and who came for it looked whether one had
    assert (around.prefetcher.hits, around.prefetcher.misses, around.prefetcher.read_bytes) == (
        1,
        1,
        2 * SIZE,
    )
    assert [each[0] for each in around.told] == ["stall"] and not block.backing.ahead


def test_what_nobody_has_read_yet_is_read_by_who_needs_it_and_told_as_ahead():
    around = Around()
    block, entry = around.block(7)
    _, newest = around.block(8)
    around.use(newest)
    around.told.clear()
    around.use(entry)
    assert around.told[0] == ("read", SIZE, block.cleanup.serial, "net", "ahead", "s")


def out_of_memory():
    return torch.OutOfMemoryError("no memory")


def test_where_there_is_no_memory_what_was_read_ahead_gives_way():
    around = Around()
    later = [around.block(value)[0] for value in range(3)]
    _, newest = around.block(8, entries=1)
    around.use(newest)
    assert around.ahead_of(*later) == [1, 1, 1]
    odd, entry = around.block(9)
    around.refused = [out_of_memory(), None]
    assert values(around.prefetcher.view(entry)) == {9}
    assert around.prefetcher.ahead_bytes == 0 + SIZE * 1  # one is never dropped: it may be in use
    assert around.fetched[-1] == (odd.backing, False)
    around.refused = [out_of_memory(), out_of_memory()]
    with pytest.raises(torch.OutOfMemoryError):
        around.prefetcher.view(entry)


def test_where_the_copy_finds_no_memory_what_was_read_ahead_gives_way():
    around = Around()
    later = [around.block(value)[0] for value in range(3)]
    _, newest = around.block(8)
    around.use(newest)
    held = around.prefetcher.ahead_bytes
    odd, entry = around.block(9)
    around.errors[odd.backing] = [out_of_memory()]
    assert values(around.prefetcher.view(entry)) == {9}
    assert held == 3 * SIZE and around.prefetcher.ahead_bytes == 0
    assert [each.backing.load for each in later] == [None] * 3


def test_where_the_copy_fails_otherwise_the_second_time():
    around = Around()
    block, entry = around.block(7)
    around.errors[block.backing] = [out_of_memory(), OSError("no")]
    with pytest.raises(OSError, match="no"):
        around.prefetcher.view(entry)


@pytest.mark.parametrize("in_the_copy", [True, False])
def test_where_there_is_no_memory_what_is_larger_than_the_window_gives_way_too(in_the_copy):
    around = Around(prefetch=SIZE, reads_one_beyond=True)
    large, _ = around.block(1, nbytes=2 * SIZE)
    _, newest = around.block(8, nbytes=64)
    around.use(newest)
    _, entry, _ = around.block(9, nbytes=64, entries=2)
    around.prefetcher.view(entry)
    assert large.backing.load is not None and around.prefetcher.ahead_bytes == 2 * SIZE + 64
    odd, wanted = around.block(10)
    if in_the_copy:
        around.errors[odd.backing] = [out_of_memory()]
    else:
        around.refused = [out_of_memory()]
    assert values(around.prefetcher.view(wanted)) == {10}
    assert large.backing.load is None


def test_the_window_is_kept():
    around = Around(prefetch=3 * SIZE)
    blocks = [around.block(value) for value in range(6)]
    *_, (newest, entry) = blocks
    newest.entries = 2  # so that it stays: in use, and older than what comes ahead
    around.use(entry)
    assert around.ahead_of(*(block for block, *_ in blocks)) == [0, 0, 0, 1, 1, 0]
    assert around.prefetcher.ahead_bytes == around.prefetcher.ahead_peak_bytes == 3 * SIZE
    assert len(around.begun) == 2 and around.polls == 1


def test_beyond_the_window_the_oldest_is_dropped_and_what_is_in_use_stays():
    around = Around(prefetch=2 * SIZE)
    blocks = [around.block(value, entries=2) for value in range(4)]
    for block, entry, _ in blocks:
        around.order.use(block)
        around.prefetcher.view(entry)
    around.prefetcher.ahead(blocks[0][0])  # the longest held of all
    assert [block.root is not None for block, *_ in blocks] == [True, False, False, True]
    assert around.prefetcher.ahead_bytes == 2 * SIZE
    around.prefetcher.view(blocks[1][1])
    around.prefetcher.ahead(blocks[1][0])
    assert [block.root is not None for block, *_ in blocks] == [False, True, False, True]


def test_what_came_ahead_inside_the_window_is_not_spared():
    around = Around(prefetch=2 * SIZE)
    ahead, _ = around.block(1)
    _, newest = around.block(2)
    around.use(newest)
    later = [around.block(value, entries=2) for value in (3, 4)]
    for _, entry, _ in later:
        around.prefetcher.view(entry)
    assert ahead.backing.load is not None
    around.prefetcher.ahead(later[1][0])
    assert ahead.backing.load is None and around.prefetcher.ahead_bytes == 2 * SIZE


def test_a_block_of_a_segment_may_be_the_first_of_all():
    around = Around()
    _, [entry] = around.segment(100)
    assert values(around.use(entry)) == {1}


def test_small_ones_are_looked_for_when_so_many_bytes_were_used():
    around = Around(prefetch=128 * 64)
    looks = []
    entries = [around.block(value, nbytes=63)[1] for value in range(8)]
    for entry in reversed(entries):
        around.order.use(entry.block)
        entry.block.forward_pass = SimpleNamespace(
            successors=lambda index: looks.append(index) or []
        )
    misses_first = entries[-1]
    around.prefetcher.view(misses_first)
    around.prefetcher.ahead(misses_first.block)
    assert looks == [7]  # a read by need: it is high time
    for entry in entries[:4]:
        around.prefetcher.ahead(entry.block)
    assert looks == [7, 1, 3]  # after 64 bytes, or more


def test_what_need_not_be_asked_for_ahead():
    around = Around(prefetch=64 * SIZE)
    wanted, _ = around.block(1)
    in_place = around.in_place(torch.ones(SIZE, dtype=torch.uint8))
    _, (dwelling,) = around.segment(100)
    asked, _ = around.block(2)
    elsewhere, _ = around.block(3)
    elsewhere.tiers = SimpleNamespace(number=1)
    landing, _ = around.block(4)
    landing.alias = torch.ones(SIZE, dtype=torch.uint8)
    lost, _ = around.block(5)
    lost.backing = None
    _, at_hand, _ = around.block(5, entries=2)
    _, used = around.block(6)
    _, newest = around.block(7)
    around.prefetcher.view(at_hand)
    around.prefetcher.view(used)
    asked.backing.load = object()
    around.fetched.clear()
    around.use(newest)
    assert [backing for backing, ahead in around.fetched if ahead] == [wanted.backing]
    assert in_place.backing is None and dwelling.block.backing.buffer is not None


def test_what_an_earlier_pass_has_left_at_hand_is_not_asked_for():
    around = Around(prefetch=64 * SIZE)
    at_hand, held, _ = around.block(5, entries=2)
    newest, entry = around.block(7)
    around.use(held)
    around.prefetcher.view(entry)
    around.use(entry)
    assert (at_hand.turn, newest.turn, len(around.fetched)) == (1, 2, 3)


def test_in_the_next_pass_what_was_used_in_the_last_is_asked_for():
    around = Around(prefetch=64 * SIZE)
    older, old = around.block(1)
    block, entry = around.block(2)
    for turn in (1, 2):
        around.fetched.clear()
        around.use(entry)
        assert (older.backing, True) in around.fetched
        around.use(old)
        assert (older.turn, block.turn) == (turn, turn)


def test_a_block_from_a_segment_brings_its_segment():
    around = Around(prefetch=64 * SIZE)
    segment, entries = around.segment(100, 200)
    segment.buffer = None
    _, newest = around.block(7)
    around.use(newest)
    assert around.fetched[1:] == [(segment, True)]
    around.begun[0].run()
    assert around.told[-1] == ("read", SIZE, -1, "", "ahead", "s")
    assert values(around.prefetcher.view(entries[0])) == {1}


@pytest.mark.parametrize("error", [MemoryError(), out_of_memory()], ids=lambda error: str(error))
def test_where_there_is_no_memory_nothing_more_is_asked_for_ahead(error):
    around = Around()
    blocks = [around.block(value)[0] for value in range(3)]
    _, newest = around.block(8)
    around.refused = [None, None, error, None]
    around.use(newest)
    assert around.ahead_of(*blocks) == [0, 0, 1]
    assert around.prefetcher.ahead_bytes == SIZE


def test_no_more_is_asked_for_ahead_than_the_device_can_spare():
    asked = []
    memory = SimpleNamespace(has=lambda nbytes: asked.append(nbytes) or len(asked) < 3)
    around = Around(prefetch=64 * SIZE, memory=memory)
    blocks = [around.block(value)[0] for value in range(4)]
    _, newest = around.block(8)
    around.use(newest)
    assert around.ahead_of(*blocks) == [0, 0, 1, 1] and asked == [SIZE] * 3


def test_what_needs_no_worker_is_told_at_once():
    around = Around()
    around.needs_worker = False
    block, _ = around.block(7)
    _, newest = around.block(8)
    around.use(newest)
    assert around.begun == []
    assert around.told[-1] == ("read", SIZE, block.cleanup.serial, "net", "ahead")
    around.event_log.on = False
    around.told.clear()
    block.backing.let_go()
    around.prefetcher._used_bytes = around.prefetcher._prefetch
    around.prefetcher.ahead(newest.block)
    assert len(around.fetched) == 3 and around.told == []


@pytest.mark.parametrize("allowed", [True, False])
def test_one_that_is_larger_than_the_window_may_come_ahead(allowed):
    around = Around(prefetch=SIZE, reads_one_beyond=allowed)
    blocks = [around.block(value, nbytes=2 * SIZE)[0] for value in range(2)]
    _, entry = around.block(8, nbytes=SIZE // 2)
    around.use(entry)
    assert around.ahead_of(*blocks) == [0, int(allowed)]
    assert around.prefetcher.ahead_bytes == 2 * SIZE * allowed
    if allowed:  # it is not dropped for being too large, nor what is used then
        held, another, _ = around.block(9, nbytes=SIZE // 2, entries=2)
        around.prefetcher.view(another)
        around.prefetcher.ahead(held)
        assert around.ahead_of(*blocks) == [0, 1] and held.root is not None
        assert around.prefetcher.ahead_bytes == 2 * SIZE + SIZE // 2


def test_the_next_that_is_larger_comes_when_the_first_is_used():
    around = Around(prefetch=SIZE, reads_one_beyond=True)
    (first, _), (second, entry) = (around.block(value, nbytes=2 * SIZE) for value in range(2))
    _, newest = around.block(8)
    around.use(newest)
    assert around.ahead_of(first, second) == [0, 1]
    around.use(entry)
    assert around.ahead_of(first, second) == [1, 1] and around.prefetcher.misses == 1


@pytest.mark.parametrize("window", [0, 1])
def test_without_a_window_nothing_comes_ahead(window):
    around = Around(prefetch=window, reads_one_beyond=True)
    block, _ = around.block(1)
    _, newest = around.block(8)
    around.use(newest)
    assert around.ahead_of(block) == [window]


def test_one_of_the_window_s_size_is_no_exception():
    around = Around(prefetch=SIZE, reads_one_beyond=True)
    block, _ = around.block(1)
    newest, entry, _ = around.block(8, entries=2)
    around.use(entry)
    assert around.ahead_of(block) == [0] and newest.root is not None


def test_the_books_anew():
    around = Around(prefetch=SIZE)
    block, entry, _ = around.block(1, entries=2)
    other, _ = around.block(2)
    around.prefetcher.view(entry)
    block.cleanup.loaded_bytes, other.cleanup.loaded_bytes, block.backing.cleanup.loaded_bytes = (
        5,
        6,
        7,
    )
    other.backing.load = object()
    around.prefetcher.restore([block.backing, other.backing, block, other])
    held = [each.cleanup.loaded_bytes for each in (block, other, block.backing, other.backing)]
    assert held == [SIZE, 0, 0, SIZE] and len(around.prefetcher._window) == 2
    around.prefetcher.ahead_bytes = sum(held)
    around.prefetcher._shrink(to_bytes=SIZE)  # the parcel was named before the block
    assert other.backing.load is None and block.root is not None


def test_a_forked_process_lets_go_of_what_is_held():
    around = Around()
    later, _ = around.block(1)
    block, entry, _ = around.block(2, entries=2)
    around.use(entry)
    assert later.backing.load is not None
    lock = MagicMock()
    around.prefetcher.forked(lock)
    assert (later.backing.load, block.root, around.prefetcher.ahead_bytes) == (None, None, 0)
    assert values(around.prefetcher.view(entry)) == {2}
    assert lock.__enter__.called


def test_a_block_that_died_is_passed_over():
    around = Around(prefetch=SIZE)
    block, entry, _ = around.block(1, entries=2)
    around.prefetcher.view(entry)
    kept = [around.block(2, entries=2), around.block(3, entries=2)]
    for _, each, _ in kept:
        around.prefetcher.view(each)
    nbytes = block.cleanup.loaded_bytes
    del block, entry
    around.prefetcher.ahead_bytes -= nbytes  # as the books do
    around.prefetcher.ahead(kept[1][0])
    assert kept[0][0].root is None and around.prefetcher.ahead_bytes == SIZE


def test_no_block_is_alive_any_more():
    around = Around()
    _, entry, _ = around.block(1, entries=2)
    around.prefetcher.view(entry)
    around.prefetcher.forget()
    around.prefetcher._shrink(to_bytes=0)
    assert entry.block.root is not None and len(around.prefetcher._window) == 0
