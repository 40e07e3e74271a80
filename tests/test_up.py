"""The way up by itself: what is read, shared, held and dropped, what is asked for ahead, and what may fail."""

import threading
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch

from backstash._blocks import Block, Source
from backstash._entry import Entry
from backstash._guard import Guard
from backstash._order import Order
from backstash._parcels import Parcel, Segment
from backstash._remains import Grave
from backstash._up import Up

GRAVE = Grave()
SIDE = SimpleNamespace(number=0, grave=GRAVE, stream=lambda: None)
SIZE = 4096


class Reading:
    """Bytes on their way back. ``error`` is what the read ends with; ``meanwhile`` is called while it runs."""

    def __init__(self, around, parcel):
        self.memory = torch.empty(parcel.skew + parcel.nbytes, dtype=torch.uint8)
        self.memory.data[parcel.skew :] = parcel.store  # its version stays 0: nobody changed it
        self.arrival, self.needs_worker = around.arrival, around.needs_worker
        self.errors = around.errors.pop(parcel, [])
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
        self.order = Order()
        self.tape = SimpleNamespace(on=True, tell=self.tell)
        self.up = Up(
            self.begun.append,
            self,
            threading.RLock(),
            Guard(),
            self.freed.append,
            self.tape,
            prefetch=prefetch,
            memory=memory,
        )

    def tell(self, *what, began=None, **more):
        self.told.append((*what, *more.values()) if began is None else (*what, *more.values(), "s"))

    def fetch(self, parcel, *, ahead):
        if self.refused:
            error = self.refused.pop(0)
            if error is not None:
                raise error
        self.fetched.append((parcel, ahead))
        return Reading(self, parcel)

    def poll(self):
        self.polls += 1

    def block(self, value, nbytes=SIZE, skew=0, entries=1):
        """A block that has landed in a parcel of its own, and its entries."""
        block = self.in_place(torch.full((nbytes,), value, dtype=torch.uint8))
        block.parcel = Parcel(block.alias.clone(), SimpleNamespace(nbytes=nbytes), skew, GRAVE)
        made = [Entry(block, block.alias, 0) for _ in range(entries)]
        block.entries, block.alias = entries, None
        return block, *made

    def in_place(self, tensor):
        block = Block(Source(tensor, tensor.untyped_storage()), tensor.detach(), SIDE)
        block.remains.module = "net"
        self.order.add(block)
        return block

    def segment(self, *sizes, low=0):
        """Blocks of bytes 1, 2, ... that lie in one segment, which has its buffer still; their entries."""
        buffer = torch.zeros(SIZE, dtype=torch.uint8)
        segment = Segment(buffer, SimpleNamespace(nbytes=SIZE), buffer, GRAVE)
        entries = []
        for value, nbytes in enumerate(sizes, 1):
            block = self.in_place(torch.full((nbytes,), value, dtype=torch.uint8))
            entries.append(Entry(block, block.alias, 0))
            block.address = 64 * value + low  # its residue modulo 64 is all that matters
            block.offset = segment.place(block.address, nbytes)
            segment.filled = block.offset + nbytes
            buffer[block.offset : segment.filled] = value
            block.parcel, block.alias, block.entries = segment, None, 1
            segment.blocks += 1
        return segment, entries

    def use(self, entry):
        """What unpacking does; all values of the view."""
        self.order.use(entry.block)
        view = self.up.view(entry)
        self.up.ahead(entry.block)
        return view

    def ahead_of(self, *blocks):
        """Whose reads have been asked for ahead of need."""
        return [
            [parcel for parcel, ahead in self.fetched if ahead].count(each.parcel)
            for each in blocks
        ]


def values(view):
    return set(view.tolist())


def test_one_read_serves_every_view_of_a_block_and_is_let_go_after_the_last():
    around = Around()
    up, (block, one, two) = around.up, around.block(7, entries=2)
    first = up.view(one)
    assert values(first) == {7}
    assert (up.misses, up.hits, up.read_bytes, up.ahead_bytes) == (1, 0, SIZE, SIZE)
    assert (block.turn, block.served) == (1, 1)
    assert up.view(one).data_ptr() == first.data_ptr()  # the same again is not another
    assert (block.served, around.freed) == (1, [SIZE])  # the reading's memory is the block's now
    second = up.view(two)
    assert second.data_ptr() == first.data_ptr() and second._version == 0
    assert (up.ahead_bytes, around.freed) == (0, [SIZE, SIZE])
    assert block.root is None and block.parcel.reading is None
    assert values(up.view(two)) == {7} and block.turn == 2  # another use of the graph
    assert (up.misses, up.read_bytes, len(around.fetched)) == (2, 2 * SIZE, 2)
    assert (block.served, up.ahead_bytes) == (1, SIZE)


def test_where_the_memory_begins_before_the_block_does():
    around = Around()
    block, entry = around.block(3, skew=64)
    view = around.up.view(entry)
    assert view.storage_offset() == 64 and values(view) == {3} and len(view) == SIZE
    assert block.parcel.wanted == 0


def test_what_a_backward_changed_is_read_anew_for_the_next():
    around = Around()
    _, one, two, _ = around.block(7, entries=3)
    changed = around.up.view(one)
    assert around.up.view(two).data_ptr() == changed.data_ptr()
    changed.add_(1)
    fresh = around.up.view(two)
    assert values(fresh) == {7} and values(changed) == {8}
    assert (
        len(around.fetched) == 2 and around.up.ahead_bytes == SIZE
    )  # what was changed is not held


def test_another_thread_that_came_first_is_joined():
    around = Around()
    _, one, two, _ = around.block(7, entries=3)
    other = []
    around.meanwhile = lambda: other.append(around.up.view(two))
    assert around.up.view(one).data_ptr() == other[0].data_ptr()
    assert len(around.fetched) == 1 and around.up.ahead_bytes == SIZE
    assert (around.up.misses, around.up.hits) == (1, 0)


def test_two_threads_that_come_for_what_was_read_ahead_are_one_hit():
    around = Around()
    _, one, two, _ = around.block(7, entries=3)
    _, newest = around.block(8)
    around.use(newest)
    around.meanwhile = lambda: around.up.view(two)
    around.up.view(one)
    assert (around.up.misses, around.up.hits) == (1, 1)


def test_another_thread_that_came_first_and_changed_what_it_was_given():
    around = Around()
    _, one, two, _ = around.block(7, entries=3)
    around.meanwhile = lambda: around.up.view(two).add_(1)
    assert values(around.up.view(one)) == {7}
    assert len(around.fetched) == 2 and around.up.ahead_bytes == SIZE


def test_the_only_view_changed_by_another_thread_that_came_first():
    """The block has no memory any more then, but what this one waited for is that thread's."""
    around = Around()
    block, entry = around.block(7)
    around.meanwhile = lambda: around.up.view(entry).add_(1)
    assert values(around.up.view(entry)) == {7}
    assert len(around.fetched) == 2 and block.turn == 2


def test_a_segment_s_buffer_serves_until_it_has_landed():
    around = Around()
    segment, entries = around.segment(100, 200, low=16)
    for value, entry in enumerate(entries, 1):
        view = around.up.view(entry)
        assert values(view) == {value} and len(view) == 100 * value
        assert view.data_ptr() % 64 == entry.block.address % 64 == 16
        view.zero_()
    assert values(segment.buffer[segment.filled - 200 : segment.filled]) == {2}
    assert (around.fetched, around.up.misses) == ([], 0)
    assert around.up.ahead_bytes == 0 and around.freed == [0, 100, 0, 200]


@pytest.mark.parametrize("low", [0, 16])
def test_a_segment_is_read_once_for_all_of_its_blocks(low):
    around = Around()
    segment, entries = around.segment(100, 200, 50, low=low)
    segment.buffer = None
    for each in entries:
        each.block.entries = 2  # so that all are held
    assert values(around.up.view(entries[1])) == {2}
    assert (around.up.ahead_bytes, segment.wanted) == (SIZE + 200, 2)
    assert values(around.up.view(entries[0])) == {1}
    assert segment.reading is not None
    assert values(around.up.view(entries[2])) == {3}
    assert segment.reading is None and around.up.ahead_bytes == 350
    assert [parcel for parcel, _ in around.fetched] == [segment]
    assert around.freed == [SIZE]


def test_a_segment_s_storage_reaches_to_the_end_of_a_line():
    around = Around()
    _, [entry] = around.segment(113, low=16)
    entry.block.entries = 2
    around.up.view(entry)
    assert entry.block.root.nbytes == 192 and entry.block.root_low == 16


def test_what_an_accelerator_brings_is_ordered_for_each_who_uses_it():
    around = Around()
    orders = []
    around.arrival = SimpleNamespace(order=lambda: orders.append(1))
    _, one, two = around.block(7, entries=2)
    around.up.view(one), around.up.view(two)
    assert len(orders) == 2


@pytest.mark.parametrize("needs_worker", [True, False])
def test_a_read_by_need_and_what_is_told_of_it(needs_worker):
    around = Around()
    around.needs_worker = needs_worker
    block, entry = around.block(7, entries=1)
    around.up.view(entry)
    read = [("read", SIZE, 0, "net", "demand", "s")] * needs_worker
    assert around.told == [*read, ("stall", 0, 0, "net", "unpack", "s")]
    assert 0 < around.up.stall_seconds < 60
    around.told.clear()
    around.tape.on = False
    around.up.view(entry)
    assert around.told == []
    assert [block.parcel for block in [block]] == [around.fetched[0][0]]


def test_a_segment_is_told_without_a_block():
    around = Around()
    segment, [entry, _] = around.segment(100, 200)
    segment.buffer = None
    around.up.view(entry)
    assert around.told[0] == ("read", SIZE, -1, "", "demand", "s")


def test_a_failed_read_leaves_nothing_and_may_be_tried_again():
    around = Around()
    block, entry = around.block(7)
    around.errors[block.parcel] = [OSError("no")]
    with pytest.raises(OSError, match="no"):
        around.up.view(entry)
    assert (around.up.ahead_bytes, block.parcel.reading, block.root) == (0, None, None)
    assert values(around.up.view(entry)) == {7}


def test_a_failed_read_that_somebody_has_replaced_is_not_taken_from_them():
    around = Around()
    segment, [one, two] = around.segment(100, 200)
    segment.buffer = None
    around.errors[segment] = [OSError("no"), OSError("no")]
    around.meanwhile = lambda: around.up.view(two)  # which asks again
    with pytest.raises(OSError, match="no"):
        around.up.view(one)
    assert segment.reading is not None and around.up.ahead_bytes == SIZE
    assert values(around.up.view(one)) == {1}
    assert len(around.fetched) == 2


def test_a_read_ahead_of_need_that_failed_is_made_again_by_need():
    around = Around()
    block, entry = around.block(7)
    _, newest = around.block(8)
    around.errors[block.parcel] = [OSError("ahead")]
    around.use(newest)
    assert block.parcel.ahead
    assert values(around.use(entry)) == {7}
    assert around.fetched[1:] == [(block.parcel, True), (block.parcel, False)]
    assert (around.up.hits, around.up.misses) == (1, 2)


def test_a_hit_is_counted_once_and_reads_nothing():
    around = Around()
    block, one, two = around.block(7, entries=2)
    _, newest = around.block(8)
    around.use(newest)
    [work] = around.begun
    reading = block.parcel.reading
    work.run()
    around.told.clear()
    assert values(around.use(one)) == values(around.use(two)) == {7}
    assert reading.runs == 2  # a worker's, and who came for it looked whether one had
    assert (around.up.hits, around.up.misses, around.up.read_bytes) == (1, 1, 2 * SIZE)
    assert [each[0] for each in around.told] == ["stall"] and not block.parcel.ahead


def test_what_nobody_has_read_yet_is_read_by_who_needs_it_and_told_as_ahead():
    around = Around()
    block, entry = around.block(7)
    _, newest = around.block(8)
    around.use(newest)
    around.told.clear()
    around.use(entry)
    assert around.told[0] == ("read", SIZE, block.remains.serial, "net", "ahead", "s")


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
    assert values(around.up.view(entry)) == {9}
    assert around.up.ahead_bytes == 0 + SIZE * 1  # one is never dropped: it may be in use
    assert around.fetched[-1] == (odd.parcel, False)
    around.refused = [out_of_memory(), out_of_memory()]
    with pytest.raises(torch.OutOfMemoryError):
        around.up.view(entry)


def test_where_the_copy_finds_no_memory_what_was_read_ahead_gives_way():
    around = Around()
    later = [around.block(value)[0] for value in range(3)]
    _, newest = around.block(8)
    around.use(newest)
    held = around.up.ahead_bytes
    odd, entry = around.block(9)
    around.errors[odd.parcel] = [out_of_memory()]
    assert values(around.up.view(entry)) == {9}
    assert held == 3 * SIZE and around.up.ahead_bytes == 0
    assert [each.parcel.reading for each in later] == [None] * 3


def test_where_the_copy_fails_otherwise_the_second_time():
    around = Around()
    block, entry = around.block(7)
    around.errors[block.parcel] = [out_of_memory(), OSError("no")]
    with pytest.raises(OSError, match="no"):
        around.up.view(entry)


@pytest.mark.parametrize("in_the_copy", [True, False])
def test_where_there_is_no_memory_what_is_larger_than_the_window_gives_way_too(in_the_copy):
    around = Around(prefetch=SIZE, reads_one_beyond=True)
    large, _ = around.block(1, nbytes=2 * SIZE)
    _, newest = around.block(8, nbytes=64)
    around.use(newest)
    _, entry, _ = around.block(9, nbytes=64, entries=2)
    around.up.view(entry)
    assert large.parcel.reading is not None and around.up.ahead_bytes == 2 * SIZE + 64
    odd, wanted = around.block(10)
    if in_the_copy:
        around.errors[odd.parcel] = [out_of_memory()]
    else:
        around.refused = [out_of_memory()]
    assert values(around.up.view(wanted)) == {10}
    assert large.parcel.reading is None


def test_the_window_is_kept():
    around = Around(prefetch=3 * SIZE)
    blocks = [around.block(value) for value in range(6)]
    *_, (newest, entry) = blocks
    newest.entries = 2  # so that it stays: in use, and older than what comes ahead
    around.use(entry)
    assert around.ahead_of(*(block for block, *_ in blocks)) == [0, 0, 0, 1, 1, 0]
    assert around.up.ahead_bytes == around.up.ahead_peak_bytes == 3 * SIZE
    assert len(around.begun) == 2 and around.polls == 1


def test_beyond_the_window_the_oldest_is_dropped_and_what_is_in_use_stays():
    around = Around(prefetch=2 * SIZE)
    blocks = [around.block(value, entries=2) for value in range(4)]
    for block, entry, _ in blocks:
        around.order.use(block)
        around.up.view(entry)
    around.up.ahead(blocks[0][0])  # the longest held of all
    assert [block.root is not None for block, *_ in blocks] == [True, False, False, True]
    assert around.up.ahead_bytes == 2 * SIZE
    around.up.view(blocks[1][1])
    around.up.ahead(blocks[1][0])
    assert [block.root is not None for block, *_ in blocks] == [False, True, False, True]


def test_what_came_ahead_inside_the_window_is_not_spared():
    around = Around(prefetch=2 * SIZE)
    ahead, _ = around.block(1)
    _, newest = around.block(2)
    around.use(newest)
    later = [around.block(value, entries=2) for value in (3, 4)]
    for _, entry, _ in later:
        around.up.view(entry)
    assert ahead.parcel.reading is not None
    around.up.ahead(later[1][0])
    assert ahead.parcel.reading is None and around.up.ahead_bytes == 2 * SIZE


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
        entry.block.round = SimpleNamespace(successors=lambda index: looks.append(index) or [])
    misses_first = entries[-1]
    around.up.view(misses_first)
    around.up.ahead(misses_first.block)
    assert looks == [7]  # a read by need: it is high time
    for entry in entries[:4]:
        around.up.ahead(entry.block)
    assert looks == [7, 1, 3]  # after 64 bytes, or more


def test_what_need_not_be_asked_for_ahead():
    around = Around(prefetch=64 * SIZE)
    wanted, _ = around.block(1)
    in_place = around.in_place(torch.ones(SIZE, dtype=torch.uint8))
    _, (dwelling,) = around.segment(100)
    asked, _ = around.block(2)
    elsewhere, _ = around.block(3)
    elsewhere.side = SimpleNamespace(number=1)
    landing, _ = around.block(4)
    landing.alias = torch.ones(SIZE, dtype=torch.uint8)
    lost, _ = around.block(5)
    lost.parcel = None
    _, at_hand, _ = around.block(5, entries=2)
    _, used = around.block(6)
    _, newest = around.block(7)
    around.up.view(at_hand)
    around.up.view(used)
    asked.parcel.reading = object()
    around.fetched.clear()
    around.use(newest)
    assert [parcel for parcel, ahead in around.fetched if ahead] == [wanted.parcel]
    assert in_place.parcel is None and dwelling.block.parcel.buffer is not None


def test_what_an_earlier_pass_has_left_at_hand_is_not_asked_for():
    around = Around(prefetch=64 * SIZE)
    at_hand, held, _ = around.block(5, entries=2)
    newest, entry = around.block(7)
    around.use(held)
    around.up.view(entry)
    around.use(entry)
    assert (at_hand.turn, newest.turn, len(around.fetched)) == (1, 2, 3)


def test_in_the_next_pass_what_was_used_in_the_last_is_asked_for():
    around = Around(prefetch=64 * SIZE)
    older, old = around.block(1)
    block, entry = around.block(2)
    for turn in (1, 2):
        around.fetched.clear()
        around.use(entry)
        assert (older.parcel, True) in around.fetched
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
    assert values(around.up.view(entries[0])) == {1}


@pytest.mark.parametrize("error", [MemoryError(), out_of_memory()], ids=lambda error: str(error))
def test_where_there_is_no_memory_nothing_more_is_asked_for_ahead(error):
    around = Around()
    blocks = [around.block(value)[0] for value in range(3)]
    _, newest = around.block(8)
    around.refused = [None, None, error, None]
    around.use(newest)
    assert around.ahead_of(*blocks) == [0, 0, 1]
    assert around.up.ahead_bytes == SIZE


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
    assert around.told[-1] == ("read", SIZE, block.remains.serial, "net", "ahead")
    around.tape.on = False
    around.told.clear()
    block.parcel.let_go()
    around.up._used_bytes = around.up._prefetch
    around.up.ahead(newest.block)
    assert len(around.fetched) == 3 and around.told == []


@pytest.mark.parametrize("allowed", [True, False])
def test_one_that_is_larger_than_the_window_may_come_ahead(allowed):
    around = Around(prefetch=SIZE, reads_one_beyond=allowed)
    blocks = [around.block(value, nbytes=2 * SIZE)[0] for value in range(2)]
    _, entry = around.block(8, nbytes=SIZE // 2)
    around.use(entry)
    assert around.ahead_of(*blocks) == [0, int(allowed)]
    assert around.up.ahead_bytes == 2 * SIZE * allowed
    if allowed:  # it is not dropped for being too large, nor what is used then
        held, another, _ = around.block(9, nbytes=SIZE // 2, entries=2)
        around.up.view(another)
        around.up.ahead(held)
        assert around.ahead_of(*blocks) == [0, 1] and held.root is not None
        assert around.up.ahead_bytes == 2 * SIZE + SIZE // 2


def test_the_next_that_is_larger_comes_when_the_first_is_used():
    around = Around(prefetch=SIZE, reads_one_beyond=True)
    (first, _), (second, entry) = (around.block(value, nbytes=2 * SIZE) for value in range(2))
    _, newest = around.block(8)
    around.use(newest)
    assert around.ahead_of(first, second) == [0, 1]
    around.use(entry)
    assert around.ahead_of(first, second) == [1, 1] and around.up.misses == 1


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
    around.up.view(entry)
    block.remains.held, other.remains.held, block.parcel.remains.held = 5, 6, 7
    other.parcel.reading = object()
    around.up.restore([block.parcel, other.parcel, block, other])
    held = [each.remains.held for each in (block, other, block.parcel, other.parcel)]
    assert held == [SIZE, 0, 0, SIZE] and len(around.up._window) == 2
    around.up.ahead_bytes = sum(held)
    around.up._shrink(to_bytes=SIZE)  # the parcel was named before the block
    assert other.parcel.reading is None and block.root is not None


def test_a_forked_process_lets_go_of_what_is_held():
    around = Around()
    later, _ = around.block(1)
    block, entry, _ = around.block(2, entries=2)
    around.use(entry)
    assert later.parcel.reading is not None
    lock = MagicMock()
    around.up.forked(lock)
    assert (later.parcel.reading, block.root, around.up.ahead_bytes) == (None, None, 0)
    assert values(around.up.view(entry)) == {2}
    assert lock.__enter__.called


def test_a_block_that_died_is_passed_over():
    around = Around(prefetch=SIZE)
    block, entry, _ = around.block(1, entries=2)
    around.up.view(entry)
    kept = [around.block(2, entries=2), around.block(3, entries=2)]
    for _, each, _ in kept:
        around.up.view(each)
    nbytes = block.remains.held
    del block, entry
    around.up.ahead_bytes -= nbytes  # as the books do
    around.up.ahead(kept[1][0])
    assert kept[0][0].root is None and around.up.ahead_bytes == SIZE


def test_no_block_is_alive_any_more():
    around = Around()
    _, entry, _ = around.block(1, entries=2)
    around.up.view(entry)
    around.up.forget()
    around.up._shrink(to_bytes=0)
    assert entry.block.root is not None and len(around.up._window) == 0
