"""The window on the way down, piece by piece: what completes and when, and what cannot be known any more."""

import threading
import weakref
from array import array
from types import SimpleNamespace

import pytest
import torch

from backstash._device.base import Copy
from backstash._runtime.reclaim import ReclaimQueue
from backstash._runtime.workers import Work
from backstash._saved.block import Block, StorageVersion
from backstash._saved.placement import Lost, Resident, Stored, Writing
from backstash._saved.thread_state import ThreadState
from backstash._tiers.backing import DiskBacking, SegmentBacking
from backstash._tiers.inflight import InflightWrites

RECLAIM_QUEUE = ReclaimQueue()
BROKEN = OSError(5, "broken")


class Played(Copy):
    """A copy that is done, and has ended, when a test says so."""

    def __init__(self):
        self.is_done = self.has_ended = False
        self.asked = self.waited = self.ordered = 0

    def done(self):
        self.asked += 1
        return self.is_done

    def ended(self):
        return self.has_ended

    def order(self):
        self.ordered += 1
        self.is_done = True

    def wait(self):
        self.waited += 1
        self.is_done = self.has_ended = True


class Window:
    """Writes in flight, and what the parts around them were given."""

    def __init__(self, nbytes=200, memory="an accelerator's"):
        self.lost, self.returned, self.broke, self.freed, self.emitted = [], [], [], [], []
        self.asked, self.wants_room = [], True
        self.event_log = SimpleNamespace(on=True, emit=lambda *what, **_: self.emitted.append(what))
        resident = SimpleNamespace(
            lose=self.lost.append,
            take_back=self.returned.append,
            wants_room=lambda leaving: self.asked.append(leaving) or self.wants_room,
            memory=memory,
            event_log=self.event_log,
        )
        health = SimpleNamespace(broke=self.broke.append)
        self.inflight = InflightWrites(
            resident, health, self.freed.append, self.event_log, window_bytes=nbytes
        )

    def add(self, block, transfer):
        """As it is added when its tier has begun to write it; its backing's cleanup."""
        backing = backing_of(block, transfer)
        self.inflight.add(block, backing, transfer)
        return backing.cleanup

    @property
    def targets(self):
        return [write.target() for write in self.inflight.writes]


def work_of(error=None):
    def call():
        if error is not None:
            raise error

    return Work(call)


def done(error=None):
    work = work_of(error)
    work.run()
    return work


def block_of(thread_state, nbytes=100):
    tensor = torch.zeros(nbytes, dtype=torch.uint8)
    version = StorageVersion(tensor, tensor.untyped_storage())
    block = Block(version, tensor.detach(), RECLAIM_QUEUE, 0)
    block.thread_state, block.cleanup.resident_bytes = thread_state, nbytes
    return block


def backing_of(block, transfer):
    backing = DiskBacking(None, SimpleNamespace(nbytes=block.nbytes), 0, RECLAIM_QUEUE)
    if isinstance(transfer, Work):
        backing.cleanup.transfer = transfer
    return backing


def is_stored(block):
    return type(block.placement) is Stored


def segment_of(nbytes=100, transfer=None):
    segment = SegmentBacking(
        None, SimpleNamespace(nbytes=nbytes), torch.zeros(nbytes), RECLAIM_QUEUE
    )
    segment.cleanup.inflight_bytes, segment.cleanup.transfer = nbytes, transfer
    return segment


def state_of_another(*, alive):
    thread_state = ThreadState()
    thread_state.thread = lambda: SimpleNamespace(is_alive=lambda: alive)
    return thread_state


# What is counted.


def test_the_window_holds_what_fits_into_it():
    thread_state, window = ThreadState(), Window(200)
    inflight = window.inflight
    blocks = [block_of(thread_state, 100), block_of(thread_state, 60)]
    assert not inflight.is_one
    window.add(blocks[0], work_of())
    assert inflight.is_one and inflight.nbytes == 100
    window.add(blocks[1], work_of())
    assert not inflight.is_one and inflight.nbytes == 160
    inflight.make_room(40, thread_state)
    assert window.targets == blocks
    inflight.make_room(41, thread_state)
    assert window.targets == blocks[1:]
    inflight.writes[0].transfer.run()
    inflight.complete(thread_state)
    assert (inflight.nbytes, inflight.written_bytes) == (0, 160)
    assert inflight.peak_bytes == 0, "the peak is the evictor's to take"
    assert window.freed == [100, 60]


def test_a_block_that_is_written_is_in_place_still():
    thread_state, window = ThreadState(), Window()
    block = block_of(thread_state)
    alias, backing = block.placement.alias, backing_of(block, work := work_of())
    window.inflight.add(block, backing, work)
    placement = block.placement
    assert type(placement) is Writing and placement.alias is alias
    assert placement.backing is backing and placement.transfer is work
    work.run()
    window.inflight.complete(thread_state)
    assert is_stored(block) and block.placement.backing is backing


@pytest.mark.parametrize("nbytes", [0, 1])
def test_no_window_has_no_one_write_alone_in_it(nbytes):
    thread_state, window = ThreadState(), Window(nbytes)
    block = block_of(thread_state)
    window.add(block, work_of())
    assert window.inflight.is_one is (nbytes > 0)


def test_a_segment_s_bytes_are_counted_once():
    thread_state, window = ThreadState(), Window()
    inflight = window.inflight
    segment = segment_of(100)
    inflight.nbytes = 100  # as it is filled
    inflight.add_segment(segment, work := work_of())
    assert (inflight.nbytes, inflight.written_bytes) == (100, 0)
    assert segment.cleanup.inflight_bytes == 0
    assert inflight._count_of == {None: 1}
    work.run()
    inflight.complete(thread_state)
    assert inflight.nbytes == 0 and segment.buffer is None and window.targets == []
    assert inflight._count_of == {}
    assert window.freed == [100]


# What completes.


def test_what_has_ended_completes_and_the_rest_keeps_its_order():
    thread_state, window = ThreadState(), Window(1000)
    blocks = [block_of(thread_state, nbytes) for nbytes in (10, 20, 30, 40)]
    for block, work in zip(blocks, (work_of(), done(), work_of(), done()), strict=True):
        window.add(block, work)
    assert window.inflight._count_of == {thread_state: 4}
    window.inflight.complete(thread_state)
    assert window.inflight._count_of == {thread_state: 2}
    assert [is_stored(block) for block in blocks] == [False, True, False, True]
    assert window.targets == [blocks[0], blocks[2]]
    assert [block.placement.is_unordered for block in blocks] == [False] * 4
    assert window.emitted == [("land", *blocks[1].facts), ("land", *blocks[3].facts)]
    assert window.freed == [20, 40] and window.inflight.nbytes == 40
    assert not any(write.transfer.cancelled for write in window.inflight.writes)


def test_nothing_is_emitted_where_nobody_records():
    thread_state, window = ThreadState(), Window()
    window.event_log.on = False
    block = block_of(thread_state)
    window.add(block, done())
    window.inflight.stalls.wait(work_of())
    window.inflight.complete(thread_state)
    assert is_stored(block) and window.emitted == []


@pytest.mark.parametrize("how", ["work", "copy"])
def test_a_change_before_it_completes_loses_it(how):
    thread_state, window = ThreadState(), Window()
    block = block_of(thread_state)
    block.placement.alias.add_(1)
    copy = Played()
    copy.is_done = True
    window.add(block, done() if how == "work" else copy)
    window.inflight.complete(thread_state)
    assert window.lost == [block] and window.returned == window.broke == window.emitted == []
    assert window.freed == [100] and window.targets == []


def test_a_write_that_failed_leaves_the_block_where_it_was():
    thread_state, window = ThreadState(), Window()
    block = block_of(thread_state)
    block.placement.alias.add_(1)  # it is in place: that is for autograd to see
    window.add(block, done(BROKEN))
    window.inflight.complete(thread_state)
    assert window.returned == [block] and window.broke == [BROKEN]
    assert window.lost == window.emitted == [] and block.placement.alias is not None
    assert window.inflight.nbytes == 0


@pytest.mark.parametrize("error", [None, BROKEN])
def test_a_block_whose_memory_has_moved_stays_whatever_was_written(error):
    thread_state, window = ThreadState(), Window()
    block = block_of(thread_state)
    block.placement.alias.untyped_storage().resize_(1 << 20)
    assert block.has_moved
    window.add(block, done(error))
    window.inflight.complete(thread_state)
    assert window.returned == [block] and window.broke == window.lost == []
    assert block.placement.alias is not None and window.targets == []


def test_a_block_whose_copy_was_skipped_stays():
    """Its memory was another one when the copy began, and may be the first one again."""
    thread_state, window = ThreadState(), Window()
    block, copy = block_of(thread_state), Played()
    window.add(block, copy)
    copy.is_done = copy.was_skipped = True
    window.inflight.complete(thread_state)
    assert window.returned == [block] and window.broke == window.lost == []


def test_a_segment_whose_write_failed_keeps_its_bytes():
    thread_state, window = ThreadState(), Window()
    segment = segment_of()
    window.inflight.nbytes = 100
    window.inflight.add_segment(segment, done(BROKEN))
    window.inflight.complete(thread_state)
    assert segment.buffer is not None and window.broke == [BROKEN] and window.returned == []
    assert window.inflight.nbytes == 0 and window.targets == []


def test_only_its_own_thread_completes_a_block_while_that_lives():
    thread_state, window = ThreadState(), Window(1000)
    theirs = block_of(state_of_another(alive=True))
    orphan = block_of(state_of_another(alive=False))
    segment = segment_of()
    window.add(theirs, done())
    window.add(orphan, done())
    window.inflight.add_segment(segment, done())
    window.inflight.complete(thread_state)
    assert window.targets == [theirs] and type(theirs.placement) is Writing
    assert is_stored(orphan) and segment.buffer is None  # a segment is a copy: anybody may
    window.inflight.complete(theirs.thread_state)
    assert window.targets == [] and is_stored(theirs)


def test_an_error_while_one_completes_loses_none():
    thread_state, window = ThreadState(), Window(1000)

    def raises(failure):
        raise UserWarning("made an error")

    theirs, mine = block_of(state_of_another(alive=True)), block_of(thread_state)
    window.add(theirs, done())
    window.add(mine, done(BROKEN))
    window.inflight._health.broke = raises
    with pytest.raises(UserWarning):
        window.inflight.complete(thread_state)
    assert window.targets == [theirs, mine] and window.inflight.nbytes == 200


# A host that runs ahead of its device has hundreds of copies under way: none may cost a look each time.


def under_way(window, thread_state, count=50):
    blocks, copies = (
        [block_of(thread_state) for _ in range(count)],
        [Played() for _ in range(count)],
    )
    for block, copy in zip(blocks, copies, strict=True):
        window.add(block, copy)
    return blocks, copies


def test_after_a_copy_that_has_not_ended_none_is_asked():
    thread_state, window = ThreadState(), Window(1 << 20)
    blocks, copies = under_way(window, thread_state)
    copies[0].is_done = True
    for _ in range(3):
        window.inflight.complete(thread_state)
    assert window.targets == blocks[1:] and is_stored(blocks[0])
    assert [copy.asked for copy in copies[:4]] == [1, 3, 0, 0]
    for copy in copies:
        copy.is_done = True
    window.inflight.complete(thread_state)
    assert window.targets == [] and window.inflight.nbytes == 0


def test_those_that_stay_are_not_looked_at_and_the_dead_go_by_halves():
    thread_state, window = ThreadState(), Window(1 << 20)
    window.wants_room = False
    blocks, copies = under_way(window, thread_state, 40)
    for copy in copies:
        copy.is_done = True
    window.inflight.complete(thread_state)
    assert len(window.asked) == 1 and len(window.targets) == 40
    del blocks[10:29]
    window.inflight.complete(thread_state)
    assert len(window.asked) == 2 and window.targets.count(None) == 19
    del blocks[10]
    window.inflight.complete(thread_state)
    assert window.targets == blocks and len(blocks) == 20
    assert window.freed == [100] * 20 and window.inflight.nbytes == 20 * 100
    assert sum(copy.asked for copy in copies) == 0, "of what is dead or stays nobody asks"
    del blocks[5]
    window.asked.clear()
    window.inflight.complete(thread_state)
    assert len(window.asked) == 1 and len(window.targets) == 20
    del blocks[-10:]
    window.inflight.complete(thread_state)
    assert window.targets == blocks and len(blocks) == 9


def test_a_thread_that_has_none_looks_at_nobody_else_s():
    thread_state, other, window = ThreadState(), state_of_another(alive=True), Window(50 * 100)
    blocks, copies = under_way(window, other)
    asked = []
    other.thread.is_alive = lambda: asked.append(1) or True
    for copy in copies:
        copy.is_done = True
    window.inflight.complete(thread_state)
    assert len(asked) <= 2 and window.targets == blocks
    mine, own = block_of(thread_state), Played()
    window.add(mine, own)
    window.inflight.complete(thread_state)
    own.is_done = True
    window.inflight.complete(thread_state)  # it finds its own behind them, and goes no further
    assert window.targets == blocks and is_stored(mine) and own.asked == 2
    asked.clear()
    window.inflight.complete(thread_state)
    assert len(asked) <= 2
    window.inflight.make_room(100, thread_state)
    del blocks[0]
    window.inflight.make_room(100, thread_state)  # a dead one is everybody's
    assert window.targets == blocks and window.inflight.nbytes == 49 * 100
    other.thread = lambda: None
    window.inflight.complete(thread_state)
    assert window.targets == []


def test_a_dead_one_behind_another_thread_s_makes_room():
    thread_state, other, window = ThreadState(), state_of_another(alive=True), Window(300)
    blocks, copies = under_way(window, other, 3)
    del blocks[1]
    window.inflight.make_room(100, thread_state)
    assert window.targets == blocks and window.inflight.nbytes == 200
    assert [copy.ordered for copy in copies] == [0] * 3, "nobody waits"


def test_only_dead_copies_are_counted_as_such():
    """For writes all are looked at each time."""
    thread_state, window = ThreadState(), Window(1000)
    blocks = [block_of(thread_state) for _ in range(2)]
    for block, transfer in zip(blocks, (work_of(), Played()), strict=True):
        window.add(block, transfer)
    del block
    blocks.pop(0)
    assert len(window.inflight._dead) == 0
    blocks.clear()
    assert len(window.inflight._dead) == 1


def memory_of(block):
    """A weak reference to bytes that become the block's own: they live as long as its storage."""
    memory = array("B", bytes(block.nbytes))
    alias = torch.frombuffer(memory, dtype=torch.uint8)
    block.placement, block.address = Resident(alias), alias.data_ptr()
    return weakref.ref(memory)


@pytest.mark.parametrize("wants_room", [True, False])
def test_a_dead_block_s_copy_is_not_owned(wants_room):
    """Neither is its memory: the device's allocator gives that to others at once, in the copy's order."""
    thread_state, window = ThreadState(), Window(1000)
    window.wants_room = wants_room
    block, copy = block_of(thread_state), Played()
    is_alive, copy_is_alive = memory_of(block), weakref.ref(copy)
    window.add(block, copy)
    window.add(kept := block_of(thread_state, 10), Played())
    del copy
    window.inflight.complete(thread_state)
    assert is_alive() is not None and copy_is_alive() is not None, "its block owns both"
    del block
    assert is_alive() is None and copy_is_alive() is None
    assert window.inflight.nbytes == 110, "nobody has looked"
    window.inflight.complete(state_of_another(alive=True))
    assert window.targets == [kept] and window.inflight.nbytes == 10 and window.freed == [100]
    assert window.lost == window.returned == window.emitted == []


def test_a_dead_block_s_write_is_owned_until_it_has_ended():
    """A worker may be about to read its memory."""
    thread_state, window = ThreadState(), Window(1000)
    block, work = block_of(thread_state), work_of()
    is_alive = weakref.ref(work)
    window.add(block, work)
    del block, work
    RECLAIM_QUEUE.clear()
    RECLAIM_QUEUE.leased.clear()
    assert is_alive() is window.inflight.writes[0].transfer is not None
    window.inflight.complete(thread_state)
    assert is_alive() is None and window.targets == []


def test_a_completed_copy_is_freed_with_its_memory():
    thread_state, window = ThreadState(), Window(1000)
    block, copy = block_of(thread_state), Played()
    is_alive, copy_is_alive, copy.is_done = memory_of(block), weakref.ref(copy), True
    window.add(block, copy)
    del copy
    window.inflight.complete(thread_state)
    assert is_stored(block) and is_alive() is None and copy_is_alive() is None


def test_a_block_that_was_found_changed_while_it_was_copied_leaves_the_window():
    """Who unpacks it finds that; the write has nothing to judge any more."""
    thread_state, other, window = ThreadState(), state_of_another(alive=True), Window(1000)
    waiting, over = work_of(), done(BROKEN)
    lost = [block_of(thread_state, 10) for _ in range(3)]
    for block, transfer in zip(lost, (Played(), waiting, over), strict=True):
        window.add(block, transfer)
        block.placement = Lost(1)
    window.inflight.complete(other)
    assert window.targets == lost, "it is not that thread's to say"
    window.inflight.complete(thread_state)
    assert window.targets == [] and window.inflight.nbytes == 0 and waiting.cancelled
    assert window.lost == window.returned == window.emitted == []
    assert window.broke == [BROKEN], "the tier is known to have failed"
    assert window.freed == [10] * 3 and all(type(block.placement) is Lost for block in lost)


def test_the_memory_of_a_block_that_was_found_changed_counts_until_its_write_has_ended():
    thread_state, window = ThreadState(), Window(1000)
    window.add(lost := block_of(thread_state), work := work_of())
    lost.placement = Lost(1)
    with work._running:  # a worker makes it
        window.inflight.complete(thread_state)
    assert window.targets == [lost] and window.inflight.nbytes == 100
    window.inflight.complete(thread_state)
    assert window.targets == [] and window.inflight.nbytes == 0


def test_a_dead_block_s_write_is_called_off_or_ends():
    thread_state, window = ThreadState(), Window(1000)
    begun, ended, go_on = threading.Event(), threading.Event(), threading.Event()
    running = Work(lambda: (begun.set(), go_on.wait(30)))
    waiting, over = work_of(), done()
    other = state_of_another(alive=True)
    for work in (running, waiting, over):
        window.add(block_of(other), work)  # and dead at once
    thread = threading.Thread(target=lambda: (running.run(), ended.set()))
    thread.start()
    assert begun.wait(30)
    window.inflight.complete(thread_state)
    assert [write.transfer for write in window.inflight.writes] == [running]
    assert waiting.cancelled and window.inflight.nbytes == 100
    go_on.set()
    thread.join()
    window.inflight.complete(thread_state)
    assert window.targets == [] and window.inflight.nbytes == 0
    assert window.emitted == window.lost == window.returned == []


def test_where_there_is_room_what_was_copied_stays_until_it_is_in_the_way():
    thread_state, window = ThreadState(), Window(1000)
    block, copy = block_of(thread_state), Played()
    copy.is_done = True
    window.add(block, copy)
    window.add(block_of(thread_state, 50), Played())  # and dead at once
    window.wants_room = False
    window.inflight.complete(thread_state)
    assert window.targets == [block] and block.placement.alias is not None and window.asked == [150]
    window.inflight.complete(thread_state, all_that_ended=True)
    assert window.targets == [] and is_stored(block)


def test_on_the_cpu_nothing_stays_that_has_been_written():
    thread_state, window = ThreadState(), Window(memory=None)
    window.wants_room = False
    window.add(block := block_of(thread_state), done())
    window.inflight.complete(thread_state)
    assert is_stored(block) and window.asked == []


@pytest.mark.parametrize("ended", [False, True])
def test_what_completes_while_it_is_copied_is_unordered(ended):
    thread_state, window = ThreadState(), Window()
    block, copy = block_of(thread_state), Played()
    copy.is_done, copy.has_ended = True, ended
    window.add(block, copy)
    window.inflight.complete(thread_state)
    assert is_stored(block) and block.placement.is_unordered is not ended
    assert window.emitted == [("land", *block.facts)]
    assert copy.ordered == copy.waited == 0


# Who is waited for.


def test_room_is_made_by_waiting_for_the_oldest_of_one_s_own():
    thread_state, window = ThreadState(), Window(100)
    inflight = window.inflight
    theirs = block_of(state_of_another(alive=True), 10)
    mine = [block_of(thread_state, 30) for _ in range(3)]
    works = [work_of() for _ in range(4)]
    for block, work in zip((theirs, *mine), works, strict=True):
        window.add(block, work)
    inflight.make_room(0, thread_state)
    assert window.targets == [theirs, *mine], "it is full, and no more is asked"
    inflight.make_room(31, thread_state)
    assert window.targets == [theirs, mine[2]]
    assert [work.done() for work in works] == [False, True, True, False]
    inflight.make_room(
        95, thread_state
    )  # never fits next to another thread's, which nobody waits for
    assert window.targets == [theirs] and not works[0].done()
    inflight.make_room(1000, thread_state)
    assert window.targets == [theirs]


@pytest.mark.parametrize("nbytes, left", [(0, 3), (1, 2), (30, 2), (31, 1), (90, 0), (91, 0)])
def test_so_many_bytes_are_freed_now(nbytes, left):
    thread_state, window = ThreadState(), Window(1000)
    blocks = [block_of(thread_state, 30) for _ in range(3)]
    for block in blocks:
        window.add(block, work_of())
    window.inflight.free(nbytes, thread_state)
    assert window.targets == blocks[3 - left :]


def test_an_empty_window_is_not_waited_for():
    window = Window(100)
    window.inflight.make_room(1000, ThreadState())
    assert window.inflight.stalls.seconds == 0


def test_room_is_made_of_what_lingers_too():
    thread_state, window = ThreadState(), Window(100)
    block, copy = block_of(thread_state), Played()
    copy.is_done, window.wants_room = True, False
    window.add(block, copy)
    window.inflight.make_room(1, thread_state)
    assert window.targets == [] and copy.ordered == 0, "it was done: nobody waits"


def test_the_end_waits_for_each_that_has_begun():
    """And for none of a device's that are of dead blocks, which nobody has any more."""
    thread_state, window = ThreadState(), Window(1000)
    window.wants_room = False
    theirs = block_of(state_of_another(alive=True))
    blocks = [*(block_of(thread_state) for _ in range(3)), theirs]
    copies, works = [Played() for _ in range(4)], [work_of(), work_of()]
    for block, transfer in zip(blocks, (copies[0], works[0], copies[1], copies[2]), strict=True):
        window.add(block, transfer)
    window.add(block_of(thread_state), copies[3])  # and dead at once
    window.add(block_of(thread_state), works[1])  # likewise
    window.inflight.finish(thread_state)
    assert [copy.waited for copy in copies] == [1, 1, 1, 0]
    assert [copy.ordered for copy in copies] == [0] * 4
    assert all(work.done() for work in works)
    assert window.targets == [theirs] and all(is_stored(block) for block in blocks[:3])


# The rebuild.


def test_a_rebuild_finds_what_is_on_its_way():
    thread_state, window = ThreadState(), Window(1000)
    inflight = window.inflight
    known, unknown, ended = (block_of(thread_state, nbytes) for nbytes in (10, 20, 40))
    works = [work_of(), work_of(), done()]
    stored, in_place = block_of(thread_state, 1), block_of(thread_state, 2)
    cleanups = [window.add(stored, work_of())]  # it was completed, and not taken out
    stored.placement = Stored(stored.placement.backing)
    cleanups.append(window.add(known, works[0]))
    window.add(block_of(thread_state, 100), dead := work_of())  # and dead at once
    for block, work in ((unknown, works[1]), (ended, works[2])):
        backing = backing_of(block, work)
        block.placement = Writing(block.placement.alias, backing, work)
        cleanups.append(backing.cleanup)
    first = inflight.writes[1]
    inflight.nbytes = 12345
    found = inflight.restore([known, stored, in_place, unknown, ended], [], cleanups)
    assert found == [dead, works[0], works[1]]
    assert window.targets == [None, known, unknown, ended]
    assert inflight._count_of == {thread_state: 4}
    assert inflight.writes[1] is first
    made = inflight.writes[2]
    assert (made.nbytes, made.thread_state, made.transfer) == (20, thread_state, works[1])
    assert inflight.nbytes == 100 + 10 + 20 + 40


def test_a_rebuild_finds_each_segment_that_is_written():
    window = Window(1000)
    inflight, failure = window.inflight, done(BROKEN)
    known, unknown = segment_of(10, work_of()), segment_of(20, work_of())
    opened, stored = segment_of(40), segment_of(80, done())
    stored.buffer, stored.cleanup.inflight_bytes = None, 0
    failed, noted = segment_of(160, failure), segment_of(320, done(BROKEN))
    inflight.add_segment(known, known.cleanup.transfer)
    inflight.add_segment(noted, noted.cleanup.transfer)  # whose failure nobody knows yet
    # It failed and was completed: its bytes are here, and count no more.
    failed.cleanup.inflight_bytes = 0
    segments = [opened, known, stored, unknown, failed, noted]
    found = inflight.restore([], segments, [each.cleanup for each in segments])
    assert found == [known.cleanup.transfer, unknown.cleanup.transfer]
    assert window.targets == [known, unknown, noted]
    assert inflight._count_of == {None: 3}
    made = inflight.writes[1]
    assert (made.nbytes, made.thread_state, made.transfer) == (20, None, unknown.cleanup.transfer)
    assert [each.cleanup.inflight_bytes for each in segments] == [40, 0, 0, 0, 0, 0]
    assert inflight.nbytes == 40 + 10 + 20 + 320


def test_after_a_rebuild_no_copy_is_begun_again():
    thread_state, window = ThreadState(), Window(1000)
    block, copy = block_of(thread_state, 10), Played()
    block.placement = Writing(block.placement.alias, backing_of(block, copy), copy)
    cleanup = block.placement.backing.cleanup
    assert window.inflight.restore([block], [], [cleanup]) == []
    assert window.targets == [block] and window.inflight.nbytes == 10


def test_a_block_found_changed_while_a_worker_writes_it_is_waited_for_once():
    """Not asked again and again under the lock, and counted as a stall."""
    state, window = ThreadState(), Window(100)
    begun, may_end = threading.Event(), threading.Event()
    work = Work(lambda: (begun.set(), may_end.wait(30)))
    window.add(block := block_of(state), work)
    block.placement = Lost(1)  # as unpack leaves it
    runner = threading.Thread(target=work.run)
    runner.start()
    assert begun.wait(30)
    looks, complete = [], window.inflight.complete
    window.inflight.complete = lambda *a, **k: (looks.append(1), complete(*a, **k))
    threading.Timer(0.05, may_end.set).start()
    window.inflight.make_room(100, state)
    runner.join()
    assert len(looks) == 1 and window.inflight.stalls.seconds > 0
    assert window.inflight.nbytes == 0
