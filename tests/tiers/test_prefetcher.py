"""The way up by itself: what is read, shared, held and dropped, what is asked for ahead, and what may fail."""

from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch

from backstash._runtime.critical_section import CriticalSection
from backstash._runtime.reclaim import ReclaimQueue
from backstash._runtime.workers import Work
from backstash._saved.access_order import AccessPredictor
from backstash._saved.block import Block, BlockCleanup, StorageVersion
from backstash._saved.entry import Entry
from backstash._saved.placement import Load, Lost, Stored, Writing
from backstash._tiers.ahead import AheadSet, ViewServer
from backstash._tiers.backing import DiskBacking, DiskCleanup, SegmentBacking
from backstash._tiers.prefetch import Prefetcher

RECLAIM_QUEUE = ReclaimQueue()
SIZE = 4096


class Read(Load):
    """Bytes on their way back. ``errors``: what it ends with, each time that somebody waits for it."""

    memory = arrival = work = None

    def __init__(self, around, backing):
        self.memory = torch.empty(backing.skew + backing.nbytes, dtype=torch.uint8)
        self.memory.data[backing.skew :] = backing.store  # its version stays 0: nobody changed it
        self.arrival, self.errors = around.arrival, around.errors.pop(backing, [])
        self.around, self.runs, self.waited = around, [], 0
        self.work = Work(self.runs.append, "here") if around.by_worker else None

    @property
    def is_ready(self):
        return self.work is None or (self.work.finished and not self.errors)

    def exception(self):
        self.waited += 1
        meanwhile, self.around.meanwhile = self.around.meanwhile, None
        if meanwhile is not None:
            meanwhile()
        error = self.errors.pop(0) if self.errors else None
        if isinstance(error, torch.OutOfMemoryError):
            raise error
        return error


class Around:
    """What is around the way up, and what each was given."""

    def __init__(self, prefetch=4 * SIZE, memory=None, runs_ahead=False):
        self.fetched, self.begun, self.freed, self.emitted = [], [], [], []
        self.errors = {}  # of a backing: what its next load ends with, each time that it is asked
        self.refused = []  # what the next fetches raise
        self.meanwhile = None  # is called once, while a load is waited for
        self.arrival, self.by_worker, self.polls, self.waited = None, True, 0, 0
        self.runs_ahead = runs_ahead
        self.order, self.section = AccessPredictor(), CriticalSection()
        self.event_log = SimpleNamespace(on=True, emit=self.emit)
        ahead = AheadSet(self.freed.append, window_bytes=prefetch, memory=memory)
        self.prefetcher = Prefetcher(
            self.begun.append,
            self,
            ahead,
            ViewServer(ahead, memory),
            SimpleNamespace(has_derived=False),
            self.section,
            self.event_log,
        )

    def emit(self, *what, began=None, **more):
        since = () if began is None else ("s",)
        self.emitted.append((*what, *more.values(), *since))

    def fetch(self, backing, *, ahead):
        if self.refused:
            error = self.refused.pop(0)
            if error is not None:
                raise error
        self.fetched.append((backing, ahead))
        return Read(self, backing)

    def poll(self):
        self.polls += 1

    def begin_waiting(self):
        self.waited = len(self.fetched)  # of these, all have begun

    def block(self, value, nbytes=SIZE, skew=0, entries=1):
        """A block that is stored in a backing of its own, and its entries."""
        block = self.in_place(torch.full((nbytes,), value, dtype=torch.uint8))
        alias, slot = block.placement.alias, SimpleNamespace(nbytes=nbytes)
        made = [Entry(block, alias, 0) for _ in range(entries)]
        block.placement = Stored(DiskBacking(alias.clone(), slot, skew, RECLAIM_QUEUE))
        block.entries = entries
        return block, *made

    def in_place(self, tensor):
        version = StorageVersion(tensor, tensor.untyped_storage())
        block = Block(version, tensor.detach(), RECLAIM_QUEUE, 0)
        block.cleanup.module = "net"
        self.order.add(block)
        return block

    def segment(self, *sizes, low=0):
        """Blocks of bytes 1, 2, ... that lie in one segment, which has its buffer still; their entries."""
        buffer = torch.zeros(SIZE, dtype=torch.uint8)
        segment = SegmentBacking(buffer, SimpleNamespace(nbytes=SIZE), buffer, RECLAIM_QUEUE)
        entries = []
        for value, nbytes in enumerate(sizes, 1):
            block = self.in_place(torch.full((nbytes,), value, dtype=torch.uint8))
            entries.append(Entry(block, block.placement.alias, 0))
            block.address = 64 * value + low  # its residue modulo 64 is all that matters
            block.offset = segment.place(block.address, nbytes)
            segment.filled = block.offset + nbytes
            buffer[block.offset : segment.filled] = value
            block.placement, block.entries = Stored(segment), 1
            segment.blocks += 1
        return segment, entries

    def use(self, entry):
        """What unpacking does; all values of the view."""
        self.order.use(entry.block)
        return self._unpack(entry)

    def view(self, entry):
        """The same, with nothing asked for ahead of need: that is looked at by itself."""
        with patch.object(self.prefetcher, "look_ahead"):
            return self._unpack(entry)

    def _unpack(self, entry):
        with self.section.lock, self.section:
            view = self.prefetcher.at_hand(entry)
            if view is not None:
                self.prefetcher.look_ahead(entry.block)
                return view
            load, mine = self.prefetcher.load(entry.block)
        return self.prefetcher.view(entry, load, mine=mine)

    def ahead_of(self, *blocks):
        """Whose reads have been asked for ahead of need."""
        return [
            [backing for backing, ahead in self.fetched if ahead].count(backing_of(each))
            for each in blocks
        ]


def backing_of(block):
    return block.placement.backing


def is_held(block):
    return block.loaded is not None


def values(view):
    return set(view.tolist())


def test_one_read_serves_every_view_of_a_block_and_is_freed_after_the_last():
    around = Around()
    up, (block, one, two) = around.prefetcher, around.block(7, entries=2)
    first = around.view(one)
    assert values(first) == {7}
    assert (up.misses, up.hits, up.read_bytes, up.ahead.nbytes) == (1, 0, SIZE, SIZE)
    assert (block.turn, block.served) == (1, 1)
    assert around.view(one).data_ptr() == first.data_ptr()  # the same again is not another
    assert (block.served, around.freed) == (1, [SIZE])  # the load's memory is the block's now
    second = around.view(two)
    assert second.data_ptr() == first.data_ptr() and second._version == 0
    assert (up.ahead.nbytes, around.freed) == (0, [SIZE, SIZE])
    assert not is_held(block) and backing_of(block).load is None
    assert values(around.view(two)) == {7} and block.turn == 2  # another use of the graph
    assert (up.misses, up.read_bytes, len(around.fetched)) == (2, 2 * SIZE, 2)
    assert (block.served, up.ahead.nbytes) == (1, SIZE)


@pytest.mark.parametrize("expected", [None, 0, 3])
def test_a_block_of_slices_is_held_from_first_to_last_use_in_addition_to_the_window(expected):
    """Else each of them would read all of it. Where some were copied and it was then saved whole, none does."""
    around = Around()
    up, (block, *entries) = around.prefetcher, around.block(7, entries=3)
    if expected is not None:
        block.storage_version.slices = SimpleNamespace(expected=expected)
    others = [around.block(8, entries=2) for _ in entries]
    for entry, (_, other, _) in zip(entries, others, strict=True):
        assert values(around.view(entry)) == {7}
        around.view(other)
        up.free()
        assert is_held(block) == (bool(expected) and entry is not entries[-1])
        assert up.ahead.nbytes == SIZE, "of the other block"
    assert up.misses - 3 == (1 if expected else 3)
    around.view(entries[0])  # another use of the graph
    assert is_held(block)


def test_a_block_with_one_entry_is_served_without_being_held():
    around = Around()
    up, (block, entry) = around.prefetcher, around.block(7, skew=64)
    first = around.view(entry)
    assert values(first) == {7} and not is_held(block) and backing_of(block).load is None
    assert (block.turn, block.served, entry.turn) == (1, 1, 1)
    assert (up.ahead.nbytes, block.cleanup.loaded_bytes, around.freed) == (0, 0, [SIZE])
    with patch.object(up.ahead, "hold") as hold:
        second = around.view(entry)  # another use of the graph
    assert values(second) == {7} and second.data_ptr() != first.data_ptr()
    assert (block.turn, block.served, entry.turn, up.misses) == (2, 1, 2, 2)
    assert [each.args for each in hold.call_args_list] == [(backing_of(block),)], "while it is read"


def test_a_block_with_one_entry_that_two_threads_want_is_read_once():
    around = Around()
    block, entry = around.block(7)
    other = []
    around.meanwhile = lambda: other.append(around.view(entry))
    assert around.view(entry).data_ptr() == other[0].data_ptr()
    assert len(around.fetched) == 1 and not is_held(block)
    assert (around.prefetcher.ahead.nbytes, around.freed) == (0, [SIZE])


def in_a_retained_graph():
    """As while a node of a backward with ``retain_graph`` runs."""
    return patch.multiple(
        "backstash._tiers.ahead", keeps_graph=lambda: True, current_node=lambda: "node"
    )


def test_what_a_retained_graph_has_used_stays_for_its_other_backward():
    around = Around()
    up, (block, one, two) = around.prefetcher, around.block(7, entries=2)
    alone, its = around.block(8)
    with in_a_retained_graph():
        for turn in (1, 2, 3):
            views = [around.view(entry) for entry in (one, two)]
            assert [values(view) for view in views] == [{7}, {7}] and values(around.view(its)) == {
                8
            }
            assert [(each.turn, each.served) for each in (block, alone)] == [(turn, 2), (turn, 1)]
            assert up.ahead.again_bytes == up.ahead.nbytes == 2 * SIZE and len(around.fetched) == 2
    around.view(one)
    assert up.ahead.again_bytes == SIZE and up.ahead.nbytes == 2 * SIZE, (
        "the other entry wants it still"
    )
    around.view(two)
    around.view(its)
    assert up.ahead.again_bytes == up.ahead.nbytes == 0 and len(around.fetched) == 2
    assert not is_held(block) and not is_held(alone)


def test_what_was_changed_does_not_stay():
    around = Around()
    _, entry = around.block(7)
    with in_a_retained_graph():
        around.view(entry).add_(1)
        assert values(around.view(entry)) == {7}
    assert len(around.fetched) == 2 and around.prefetcher.ahead.again_bytes == SIZE


def test_what_stays_is_the_first_to_go_and_the_newest_of_it_before_the_rest():
    around = Around(prefetch=4 * SIZE)
    up, waited = around.prefetcher, around.block(1, entries=2)
    around.view(waited[1])
    used = [around.block(value) for value in (2, 3, 4, 5)]
    with in_a_retained_graph():
        for _, entry in used:
            around.view(entry)
    assert up.ahead.nbytes == 5 * SIZE and up.ahead.again_bytes == 4 * SIZE
    up.ahead.shrink(to_bytes=3 * SIZE)
    assert [is_held(block) for block, *_ in (waited, *used)] == [True, True, True, False, False]
    assert up.ahead.nbytes == 3 * SIZE and up.ahead.again_bytes == 2 * SIZE
    up.ahead.shrink(to_bytes=0)
    assert up.ahead.nbytes == up.ahead.again_bytes == 0


@pytest.mark.parametrize("who", ["memory", "budget"])
def test_where_there_is_no_memory_nothing_stays_for_another_backward(who):
    memory = SimpleNamespace(has=lambda nbytes: False) if who == "memory" else None
    around = Around(memory=memory)
    if who == "budget":
        around.prefetcher.ahead.has_room = lambda nbytes: False
    block, entry = around.block(7)
    with in_a_retained_graph():
        assert values(around.view(entry)) == {7}
    assert not is_held(block)
    assert around.prefetcher.ahead.nbytes == around.prefetcher.ahead.again_bytes == 0


def test_where_the_memory_begins_before_the_block_does():
    around = Around()
    block, entry = around.block(3, skew=64)
    view = around.view(entry)
    assert view.storage_offset() == 64 and values(view) == {3} and len(view) == SIZE
    assert backing_of(block).wanted == 0


def test_what_a_backward_changed_is_read_again_for_the_next():
    around = Around()
    _, one, two, _ = around.block(7, entries=3)
    changed = around.view(one)
    assert around.view(two).data_ptr() == changed.data_ptr()
    changed.add_(1)
    fresh = around.view(two)
    assert values(fresh) == {7} and values(changed) == {8}
    assert len(around.fetched) == 2
    assert around.prefetcher.ahead.nbytes == SIZE  # what was changed is not held


def test_another_thread_that_came_first_is_joined():
    around = Around()
    _, one, two, _ = around.block(7, entries=3)
    other = []
    around.meanwhile = lambda: other.append(around.view(two))
    assert around.view(one).data_ptr() == other[0].data_ptr()
    assert len(around.fetched) == 1 and around.prefetcher.ahead.nbytes == SIZE
    assert (around.prefetcher.misses, around.prefetcher.hits) == (1, 0)


def test_two_threads_that_come_for_what_was_read_ahead_are_one_hit():
    around = Around()
    _, one, two, _ = around.block(7, entries=3)
    _, newest = around.block(8)
    around.use(newest)
    around.meanwhile = lambda: around.view(two)
    around.view(one)
    assert (around.prefetcher.misses, around.prefetcher.hits) == (1, 1)


def test_another_thread_that_came_first_and_changed_what_it_was_given():
    around = Around()
    _, one, two, _ = around.block(7, entries=3)
    around.meanwhile = lambda: around.view(two).add_(1)
    assert values(around.view(one)) == {7}
    assert len(around.fetched) == 2 and around.prefetcher.ahead.nbytes == SIZE


def test_the_only_view_changed_by_another_thread_that_came_first():
    """The block has no memory any more then, but what this one waited for is that thread's."""
    around = Around()
    block, entry = around.block(7)
    around.meanwhile = lambda: around.view(entry).add_(1)
    assert values(around.view(entry)) == {7}
    assert len(around.fetched) == 2 and block.turn == 2


def test_a_segment_s_buffer_serves_until_its_write_has_completed():
    around = Around()
    segment, entries = around.segment(100, 200, low=16)
    for value, entry in enumerate(entries, 1):
        view = around.view(entry)
        assert values(view) == {value} and len(view) == 100 * value
        assert view.data_ptr() % 64 == entry.block.address % 64 == 16
        view.zero_()
    assert values(segment.buffer[segment.filled - 200 : segment.filled]) == {2}
    assert (around.fetched, around.prefetcher.misses) == ([], 0)
    assert around.prefetcher.ahead.nbytes == 0 and around.freed == [], "nothing was ever held"


def test_what_a_segment_s_buffer_gives_is_held_for_the_block_s_other_entries():
    around = Around()
    segment, [entry, _] = around.segment(100, 200)
    entry.block.entries = 2
    view = around.view(entry)
    assert around.view(entry).data_ptr() == view.data_ptr() != segment.buffer.data_ptr()
    assert is_held(entry.block) and around.prefetcher.ahead.nbytes == 100 and around.fetched == []


@pytest.mark.parametrize("low", [0, 16])
def test_a_segment_is_read_once_for_all_of_its_blocks(low):
    around = Around()
    segment, entries = around.segment(100, 200, 50, low=low)
    segment.buffer = None
    for each in entries:
        each.block.entries = 2  # so that all are held
    assert values(around.view(entries[1])) == {2}
    assert (around.prefetcher.ahead.nbytes, segment.wanted) == (SIZE + 200, 2)
    assert values(around.view(entries[0])) == {1}
    assert segment.load is not None
    assert values(around.view(entries[2])) == {3}
    assert segment.load is None and around.prefetcher.ahead.nbytes == 350
    assert [backing for backing, _ in around.fetched] == [segment]
    assert around.freed == [SIZE]


def test_a_segment_s_storage_reaches_to_the_end_of_a_line():
    around = Around()
    _, [entry] = around.segment(113, low=16)
    entry.block.entries = 2
    around.view(entry)
    assert entry.block.loaded.root.nbytes == 192 and entry.block.loaded.low == 16


def test_what_an_accelerator_brings_is_ordered_for_each_who_uses_it():
    around = Around()
    orders = []
    around.arrival = SimpleNamespace(order=lambda: orders.append(1))
    _, one, two = around.block(7, entries=2)
    around.view(one), around.view(two)
    assert len(orders) == 2
    _, alone = around.block(8)
    around.view(alone)
    assert len(orders) == 3


def test_a_read_by_need_and_what_is_recorded_of_it():
    around = Around()
    block, entry = around.block(7, entries=1)
    around.view(entry)
    assert around.emitted == [
        ("read", SIZE, 0, "net", "demand", "s"),
        ("stall", 0, 0, "net", "unpack", "s"),
    ]
    assert 0 < around.prefetcher.stall_seconds < 60
    around.emitted.clear()
    around.event_log.on = False
    around.view(entry)
    assert around.emitted == []
    assert around.fetched == [(backing_of(block), False)] * 2


def test_what_a_device_brings_by_itself_is_not_waited_for():
    """Its copy orders whatever uses the memory."""
    around = Around()
    around.by_worker = False
    _, entry = around.block(7)
    assert values(around.view(entry)) == {7}
    assert around.emitted == [] and around.prefetcher.stall_seconds == 0
    assert (around.prefetcher.misses, around.prefetcher.read_bytes) == (1, SIZE)


def test_a_read_of_a_segment_is_recorded_without_a_block():
    around = Around()
    segment, [entry, _] = around.segment(100, 200)
    segment.buffer = None
    around.view(entry)
    assert around.emitted[0] == ("read", SIZE, -1, "", "demand", "s")


def test_a_failed_read_leaves_nothing_and_may_be_tried_again():
    around = Around()
    block, entry = around.block(7)
    around.errors[backing_of(block)] = [OSError("no")]
    with pytest.raises(OSError, match="no"):
        around.view(entry)
    assert around.prefetcher.ahead.nbytes == 0
    assert backing_of(block).load is None and not is_held(block)
    assert values(around.view(entry)) == {7}


def test_a_failed_read_that_somebody_has_replaced_is_not_taken_from_them():
    around = Around()
    segment, [one, two] = around.segment(100, 200)
    segment.buffer = None
    around.errors[segment] = [OSError("no"), OSError("no")]
    around.meanwhile = lambda: around.view(two)  # which asks again
    with pytest.raises(OSError, match="no"):
        around.view(one)
    assert segment.load is not None and around.prefetcher.ahead.nbytes == SIZE
    assert values(around.view(one)) == {1}
    assert len(around.fetched) == 2


def test_a_read_ahead_of_need_that_failed_is_made_again_by_need():
    around = Around()
    block, entry = around.block(7)
    _, newest = around.block(8)
    around.errors[backing_of(block)] = [OSError("ahead")]
    around.use(newest)
    assert backing_of(block).ahead
    assert values(around.use(entry)) == {7}
    assert around.fetched[1:] == [(backing_of(block), True), (backing_of(block), False)]
    assert (around.prefetcher.hits, around.prefetcher.misses) == (1, 2)


@pytest.mark.parametrize("recorded", [True, False])
def test_a_load_that_has_ended_is_a_hit_and_served_without_a_stall(recorded):
    around = Around()
    around.event_log.on = recorded
    block, one, two = around.block(7, entries=2)
    _, newest = around.block(8)
    around.use(newest)
    [work] = around.begun
    load, stalled = backing_of(block).load, around.prefetcher.stall_seconds
    assert not load.is_ready
    work.run()
    assert load.is_ready
    around.emitted.clear()
    assert values(around.use(one)) == values(around.use(two)) == {7}
    assert (load.runs, load.waited) == (["here"], 0)
    assert (around.prefetcher.hits, around.prefetcher.misses) == (1, 1)
    assert around.prefetcher.read_bytes == 2 * SIZE and not backing_of(block).ahead
    assert around.emitted == [] and around.prefetcher.stall_seconds == stalled


def test_a_load_that_has_ended_badly_is_looked_at_and_made_again():
    around = Around()
    block, entry = around.block(7)
    _, newest = around.block(8)
    around.errors[backing_of(block)] = [OSError("ahead")]
    around.use(newest)
    load = backing_of(block).load
    load.work.run()
    assert not load.is_ready and values(around.use(entry)) == {7}
    assert load.waited == 1 and around.fetched[2:] == [(backing_of(block), False)]


def test_a_load_that_is_ready_and_was_changed_is_made_again():
    around = Around()
    block, entry = around.block(7)
    _, newest = around.block(8)
    around.use(newest)
    load = backing_of(block).load
    load.work.run()
    with around.section.lock, around.section:
        assert around.prefetcher.load(block) == (load, False)
    around.view(entry).add_(1)  # another thread came first, and changed what it was given
    with patch.object(around.prefetcher, "look_ahead"):
        view = around.prefetcher.view(entry, load, mine=False)
    assert values(view) == {7} and around.fetched[2:] == [(backing_of(block), False)]


def test_what_nobody_has_read_yet_is_read_by_who_needs_it_and_recorded_as_ahead():
    around = Around()
    block, entry = around.block(7)
    _, newest = around.block(8)
    around.use(newest)
    around.emitted.clear()
    around.use(entry)
    assert around.emitted[0] == ("read", SIZE, block.cleanup.serial, "net", "ahead", "s")


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
    assert values(around.view(entry)) == {9}
    assert around.prefetcher.ahead.nbytes == SIZE  # one is never dropped: it may be in use
    assert around.fetched[-1] == (backing_of(odd), False)
    around.refused = [out_of_memory(), out_of_memory()]
    with pytest.raises(torch.OutOfMemoryError):
        around.view(entry)


def test_where_the_copy_finds_no_memory_what_was_read_ahead_gives_way():
    around = Around()
    later = [around.block(value)[0] for value in range(3)]
    _, newest = around.block(8)
    around.use(newest)
    held = around.prefetcher.ahead.nbytes
    odd, entry = around.block(9)
    around.errors[backing_of(odd)] = [out_of_memory()]
    assert values(around.view(entry)) == {9}
    assert held == 3 * SIZE and around.prefetcher.ahead.nbytes == 0
    assert [backing_of(each).load for each in later] == [None] * 3


def test_where_the_copy_fails_otherwise_the_second_time():
    around = Around()
    block, entry = around.block(7)
    around.errors[backing_of(block)] = [out_of_memory(), OSError("no")]
    with pytest.raises(OSError, match="no"):
        around.view(entry)


@pytest.mark.parametrize("in_the_copy", [True, False])
def test_where_there_is_no_memory_what_is_larger_than_the_window_gives_way_too(in_the_copy):
    around = Around(prefetch=SIZE, runs_ahead=True)
    large, _ = around.block(1, nbytes=2 * SIZE)
    _, newest = around.block(8, nbytes=64)
    around.use(newest)
    _, entry, _ = around.block(9, nbytes=64, entries=2)
    around.view(entry)
    assert backing_of(large).load is not None and around.prefetcher.ahead.nbytes == 2 * SIZE + 64
    odd, wanted = around.block(10)
    if in_the_copy:
        around.errors[backing_of(odd)] = [out_of_memory()]
    else:
        around.refused = [out_of_memory()]
    assert values(around.view(wanted)) == {10}
    assert backing_of(large).load is None


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_the_window_is_kept(runs_ahead):
    around = Around(prefetch=3 * SIZE, runs_ahead=runs_ahead)
    blocks = [around.block(value) for value in range(6)]
    *_, (newest, entry) = blocks
    newest.entries = 2  # so that it stays: in use, and older than what comes ahead
    around.use(entry)
    assert around.ahead_of(*(block for block, *_ in blocks)) == [0, 0, 0, 1, 1, 0]
    assert around.prefetcher.ahead.nbytes == around.prefetcher.ahead.peak_bytes == 3 * SIZE
    assert len(around.begun) == 2 and around.polls == runs_ahead
    assert around.waited == len(around.fetched) == 3, "what was found ahead begins together"


def test_beyond_the_window_the_oldest_is_dropped_and_what_is_in_use_stays():
    around = Around(prefetch=2 * SIZE)
    blocks = [around.block(value, entries=2) for value in range(4)]
    for block, entry, _ in blocks:
        around.order.use(block)
        around.view(entry)
    around.prefetcher.look_ahead(blocks[0][0])  # the longest held of all
    assert [is_held(block) for block, *_ in blocks] == [True, False, False, True]
    assert around.prefetcher.ahead.nbytes == 2 * SIZE
    around.view(blocks[1][1])
    around.prefetcher.look_ahead(blocks[1][0])
    assert [is_held(block) for block, *_ in blocks] == [False, True, False, True]


def test_what_came_ahead_inside_the_window_is_not_spared():
    around = Around(prefetch=2 * SIZE)
    ahead, _ = around.block(1)
    _, newest = around.block(2)
    around.use(newest)
    later = [around.block(value, entries=2) for value in (3, 4)]
    for _, entry, _ in later:
        around.view(entry)
    assert backing_of(ahead).load is not None
    around.prefetcher.look_ahead(later[1][0])
    assert backing_of(ahead).load is None and around.prefetcher.ahead.nbytes == 2 * SIZE


def test_who_is_served_what_another_thread_has_brought_asks_for_what_comes_next():
    around = Around()
    before, _ = around.block(1)
    block, one, two, _ = around.block(7, entries=3)
    around.meanwhile = lambda: around.view(two)
    around.order.use(block)
    with around.section.lock, around.section:
        load, mine = around.prefetcher.load(block)
    around.prefetcher.view(one, load, mine=mine)
    assert mine and around.ahead_of(before, block) == [1, 0]


def test_where_no_tier_is_nothing_comes_ahead():
    around = Around()
    block, _ = around.block(1)
    _, newest = around.block(2)
    around.prefetcher._tier = None
    around.prefetcher._used_bytes = around.prefetcher.ahead.window_bytes
    around.prefetcher.look_ahead(newest.block)
    assert around.fetched == [] and backing_of(block).load is None


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
    around.view(misses_first)
    around.prefetcher.look_ahead(misses_first.block)
    assert looks == [7]  # a read by need: it is high time
    for entry in entries[:4]:
        around.prefetcher.look_ahead(entry.block)
    assert looks == [7, 1, 3]  # after 64 bytes, or more


def test_what_need_not_be_asked_for_ahead():
    around = Around(prefetch=64 * SIZE)
    wanted, _ = around.block(1)
    in_place = around.in_place(torch.ones(SIZE, dtype=torch.uint8))
    _, [gathered] = around.segment(100)
    asked, _ = around.block(2)
    elsewhere, _ = around.block(3)
    elsewhere.number = 1
    leaving, _ = around.block(4)
    alias = torch.ones(SIZE, dtype=torch.uint8)
    leaving.placement = Writing(alias, backing_of(leaving), "a transfer")
    lost, _ = around.block(5)
    lost.placement = Lost(1)
    _, at_hand, _ = around.block(5, entries=2)
    _, used = around.block(6)
    _, newest = around.block(7)
    around.view(at_hand)
    around.view(used)
    backing_of(asked).load = object()
    around.fetched.clear()
    around.use(newest)
    assert [backing for backing, ahead in around.fetched if ahead] == [backing_of(wanted)]
    assert backing_of(in_place) is None and backing_of(gathered.block).buffer is not None


def test_what_an_earlier_pass_has_left_at_hand_is_not_asked_for():
    around = Around(prefetch=64 * SIZE)
    at_hand, held, _ = around.block(5, entries=2)
    newest, entry = around.block(7)
    around.use(held)
    around.view(entry)
    around.use(entry)
    assert (at_hand.turn, newest.turn, len(around.fetched)) == (1, 2, 3)


def test_in_the_next_pass_what_was_used_in_the_last_is_asked_for():
    around = Around(prefetch=64 * SIZE)
    older, old = around.block(1)
    block, entry = around.block(2)
    for turn in (1, 2):
        around.fetched.clear()
        around.use(entry)
        assert (backing_of(older), True) in around.fetched
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
    assert around.emitted[-1] == ("read", SIZE, -1, "", "ahead", "s")
    assert values(around.view(entries[0])) == {1}


@pytest.mark.parametrize("error", [MemoryError(), out_of_memory()], ids=lambda error: str(error))
def test_where_there_is_no_memory_nothing_more_is_asked_for_ahead(error):
    around = Around()
    blocks = [around.block(value)[0] for value in range(3)]
    _, newest = around.block(8)
    around.refused = [None, None, error, None]
    around.use(newest)
    assert around.ahead_of(*blocks) == [0, 0, 1]
    assert around.prefetcher.ahead.nbytes == SIZE


def test_no_more_is_asked_for_ahead_than_the_device_can_spare():
    asked = []
    memory = SimpleNamespace(has=lambda nbytes: asked.append(nbytes) or len(asked) < 3)
    around = Around(prefetch=64 * SIZE, memory=memory)
    blocks = [around.block(value)[0] for value in range(4)]
    _, newest = around.block(8)
    around.use(newest)
    assert around.ahead_of(*blocks) == [0, 0, 1, 1] and asked == [SIZE] * 3


def test_what_needs_no_worker_is_recorded_at_once():
    around = Around()
    around.by_worker = False
    block, _ = around.block(7)
    _, newest = around.block(8)
    around.use(newest)
    assert around.begun == []
    assert around.emitted[-1] == ("read", SIZE, block.cleanup.serial, "net", "ahead")
    around.event_log.on = False
    around.emitted.clear()
    backing_of(block).free()
    around.prefetcher._used_bytes = around.prefetcher.ahead.window_bytes
    around.prefetcher.look_ahead(newest.block)
    assert len(around.fetched) == 3 and around.emitted == []


@pytest.mark.parametrize("allowed", [True, False])
def test_one_that_is_larger_than_the_window_may_come_ahead(allowed):
    around = Around(prefetch=SIZE, runs_ahead=allowed)
    blocks = [around.block(value, nbytes=2 * SIZE)[0] for value in range(2)]
    _, entry = around.block(8, nbytes=SIZE // 2)
    around.use(entry)
    assert around.ahead_of(*blocks) == [0, int(allowed)]
    assert around.prefetcher.ahead.nbytes == 2 * SIZE * allowed
    if allowed:  # neither it nor what is used then is dropped for being too large
        held, another, _ = around.block(9, nbytes=SIZE // 2, entries=2)
        around.view(another)
        around.prefetcher.look_ahead(held)
        assert around.ahead_of(*blocks) == [0, 1] and is_held(held)
        assert around.prefetcher.ahead.nbytes == 2 * SIZE + SIZE // 2


def test_the_next_that_is_larger_comes_when_the_first_is_used():
    around = Around(prefetch=SIZE, runs_ahead=True)
    (first, _), (second, entry) = (around.block(value, nbytes=2 * SIZE) for value in range(2))
    _, newest = around.block(8)
    around.use(newest)
    assert around.ahead_of(first, second) == [0, 1]
    around.use(entry)
    assert around.ahead_of(first, second) == [1, 1] and around.prefetcher.misses == 1


@pytest.mark.parametrize("window", [0, 1])
def test_without_a_window_nothing_comes_ahead(window):
    around = Around(prefetch=window, runs_ahead=True)
    block, _ = around.block(1)
    _, newest = around.block(8)
    around.use(newest)
    assert around.ahead_of(block) == [window]


def test_one_of_the_window_s_size_is_no_exception():
    around = Around(prefetch=SIZE, runs_ahead=True)
    block, _ = around.block(1)
    newest, entry, _ = around.block(8, entries=2)
    around.use(entry)
    assert around.ahead_of(block) == [0] and is_held(newest)


def test_a_rebuild_finds_what_is_held():
    around = Around(prefetch=SIZE)
    block, entry, _ = around.block(1, entries=2)
    other, _ = around.block(2)
    around.view(entry)
    its, other_s = backing_of(block), backing_of(other)
    for number, holder in enumerate((block, other, its), 5):
        holder.cleanup.loaded_bytes = number
    other_s.load = object()
    cleanups = {
        BlockCleanup: [block.cleanup, other.cleanup],
        DiskCleanup: [its.cleanup, other_s.cleanup],
    }
    around.prefetcher.ahead.restore([its, other_s], [block, other], cleanups)
    held = [each.cleanup.loaded_bytes for each in (block, other, its, other_s)]
    assert held == [SIZE, 0, 0, SIZE] and around.prefetcher.ahead.nbytes == sum(held)
    around.prefetcher.ahead.shrink(to_bytes=SIZE)  # backings come before blocks
    assert other_s.load is None and is_held(block)


def test_a_rebuild_finds_what_stays_for_another_backward():
    around = Around()
    (block, entry), (gone, _) = around.block(1), around.block(2)
    with in_a_retained_graph():
        around.view(entry)
    gone.cleanup.again_bytes = SIZE  # as if somebody were interrupted in the middle of dropping it
    around.prefetcher.ahead.restore(
        [], [block, gone], {BlockCleanup: [block.cleanup, gone.cleanup]}
    )
    assert [each.cleanup.again_bytes for each in (block, gone)] == [SIZE, 0]
    assert around.prefetcher.ahead.again_bytes == SIZE


def test_a_block_that_died_is_passed_over():
    around = Around(prefetch=SIZE)
    block, entry, _ = around.block(1, entries=2)
    around.view(entry)
    kept = [around.block(2, entries=2), around.block(3, entries=2)]
    for _, each, _ in kept:
        around.view(each)
    nbytes = block.cleanup.loaded_bytes
    del block, entry
    around.prefetcher.ahead.nbytes -= nbytes  # as the session does
    around.prefetcher.look_ahead(kept[1][0])
    assert not is_held(kept[0][0]) and around.prefetcher.ahead.nbytes == SIZE


def test_no_block_is_alive_any_more():
    around = Around()
    block, entry, _ = around.block(1, entries=2)
    around.view(entry)
    around.prefetcher.ahead.forget()
    around.prefetcher.ahead.shrink(to_bytes=0)
    assert is_held(block) and len(around.prefetcher.ahead._window.refs) == 0
