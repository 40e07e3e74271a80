"""The window on the way down, piece by piece: what lands and when, and what cannot be known any more."""

import threading
from types import SimpleNamespace

import pytest
import torch

from backstash._device.base import Copy
from backstash._runtime.reclaim import ReclaimQueue
from backstash._runtime.workers import Work
from backstash._saved.block import Block, StorageVersion
from backstash._saved.thread_state import ThreadState
from backstash._tiers import inflight as _inflight
from backstash._tiers.backing import DiskBacking, SegmentBacking
from backstash._tiers.inflight import InflightWrites

GRAVE = ReclaimQueue()
BROKEN = OSError(5, "broken")


class Played(Copy):
    """A copy that is done, and has ended, when a test says so."""

    def __init__(self):
        self.is_done = self.has_ended = False
        self.asked = self.waited = self.ordered = self.released = 0

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

    def release(self):
        self.released += 1


class Window:
    """Flights, and what they tell the parts around them."""

    def __init__(self, nbytes=200):
        self.lost, self.returned, self.broke, self.freed, self.told = [], [], [], [], []
        self.asked, self.wants_room = [], True
        keep = SimpleNamespace(
            lose=self.lost.append,
            take_back=self.returned.append,
            wants_room=lambda leaving: self.asked.append(leaving) or self.wants_room,
        )
        self.event_log = SimpleNamespace(on=True, emit=lambda *what, **more: self.told.append(what))
        health = SimpleNamespace(broke=self.broke.append)
        self.inflight = InflightWrites(
            keep, health, self.freed.append, self.event_log, window_bytes=nbytes
        )

    @property
    def cargos(self):
        return [write.cargo() for write in self.inflight._inflight]


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
    tiers = SimpleNamespace(number=0, reclaim_queue=GRAVE, stream=lambda: None)
    tensor = torch.zeros(nbytes, dtype=torch.uint8)
    block = Block(StorageVersion(tensor, tensor.untyped_storage()), tensor.detach(), tiers)
    block.thread_state, block.cleanup.resident_bytes = thread_state, nbytes
    return block


def segment_of(nbytes=100, writing=None):
    segment = SegmentBacking(None, SimpleNamespace(nbytes=nbytes), torch.zeros(nbytes), GRAVE)
    segment.cleanup.inflight_bytes, segment.cleanup.writing = nbytes, writing
    return segment


def lane_of_another(*, alive):
    thread_state = ThreadState()
    thread_state.thread = SimpleNamespace(is_alive=lambda: alive)
    return thread_state


# What is counted.


def test_the_window_holds_what_fits_into_it():
    thread_state, window = ThreadState(), Window(200)
    inflight = window.inflight
    blocks = [block_of(thread_state, 100), block_of(thread_state, 60)]
    assert not inflight.is_one and inflight.has_room(200) and not inflight.has_room(201)
    inflight.add(blocks[0], work_of())
    assert inflight.is_one and (inflight.nbytes, inflight.peak_bytes) == (100, 0)
    inflight.add(blocks[1], work_of())
    assert not inflight.is_one
    assert inflight.has_room(40) and not inflight.has_room(41)
    inflight.measure()
    for write in inflight._inflight:
        write.writing.run()
    inflight.complete(thread_state)
    inflight.measure()
    assert (inflight.nbytes, inflight.peak_bytes, inflight.written_bytes) == (0, 160, 160)
    assert window.freed == [100, 60]


@pytest.mark.parametrize("nbytes", [0, 1])
def test_no_window_has_no_one_write_alone_in_it(nbytes):
    thread_state, window = ThreadState(), Window(nbytes)
    block = block_of(thread_state)
    window.inflight.add(block, work_of())
    assert window.inflight.is_one is (nbytes > 0)


def test_a_segment_s_bytes_are_counted_once():
    thread_state, window = ThreadState(), Window()
    inflight = window.inflight
    segment = segment_of(100)
    inflight.count(100)  # as it is filled
    inflight.add_segment(segment, work := work_of())
    assert (inflight.nbytes, inflight.written_bytes, segment.cleanup.inflight_bytes) == (
        100,
        100,
        0,
    )
    assert inflight._count_of == {None: 1}
    work.run()
    inflight.complete(thread_state)
    assert inflight.nbytes == 0 and segment.buffer is None and window.cargos == []
    assert inflight._count_of == {}
    assert window.freed == [100]


# What lands.


def test_what_has_ended_lands_and_the_rest_keeps_its_order():
    thread_state, window = ThreadState(), Window(1000)
    blocks = [block_of(thread_state, nbytes) for nbytes in (10, 20, 30, 40)]
    for block, writing in zip(blocks, (work_of(), done(), work_of(), done()), strict=True):
        window.inflight.add(block, writing)
    assert window.inflight._count_of == {thread_state: 4}
    window.inflight.complete(thread_state)
    assert window.inflight._count_of == {thread_state: 2}
    assert [block.alias is None for block in blocks] == [False, True, False, True]
    assert window.cargos == [blocks[0], blocks[2]]
    assert [block.unsure for block in blocks] == [False] * 4
    assert window.told == [("land", *blocks[1].facts), ("land", *blocks[3].facts)]
    assert window.freed == [20, 40] and window.inflight.nbytes == 40
    assert not any(write.writing.cancelled for write in window.inflight._inflight)


def test_nobody_is_told_where_nobody_records():
    thread_state, window = ThreadState(), Window()
    window.event_log.on = False
    block = block_of(thread_state)
    window.inflight.add(block, done())
    window.inflight.wait(work_of())
    window.inflight.complete(thread_state)
    assert block.alias is None and window.told == []


@pytest.mark.parametrize("how", ["work", "copy"])
def test_a_change_before_it_landed_loses_it(how):
    thread_state, window = ThreadState(), Window()
    block = block_of(thread_state)
    block.alias.add_(1)
    copy = Played()
    copy.is_done = True
    window.inflight.add(block, done() if how == "work" else copy)
    window.inflight.complete(thread_state)
    assert window.lost == [block] and window.returned == window.broke == window.told == []
    assert window.freed == [100] and window.cargos == []


def test_a_write_that_failed_leaves_the_block_where_it_was():
    thread_state, window = ThreadState(), Window()
    block = block_of(thread_state)
    block.alias.add_(1)  # it is in place: that is for autograd to see
    window.inflight.add(block, done(BROKEN))
    window.inflight.complete(thread_state)
    assert window.returned == [block] and window.broke == [BROKEN]
    assert window.lost == window.told == [] and block.alias is not None
    assert window.inflight.nbytes == 0


@pytest.mark.parametrize("error", [None, BROKEN])
def test_a_block_whose_memory_has_moved_stays_whatever_was_written(error):
    thread_state, window = ThreadState(), Window()
    block = block_of(thread_state)
    block.alias.untyped_storage().resize_(1 << 20)
    assert block.has_moved
    window.inflight.add(block, done(error))
    window.inflight.complete(thread_state)
    assert window.returned == [block] and window.broke == window.lost == []
    assert block.alias is not None and window.cargos == []


def test_a_segment_whose_write_failed_keeps_its_bytes():
    thread_state, window = ThreadState(), Window()
    segment = segment_of()
    window.inflight.count(100)
    window.inflight.add_segment(segment, done(BROKEN))
    window.inflight.complete(thread_state)
    assert segment.buffer is not None and window.broke == [BROKEN] and window.returned == []
    assert window.inflight.nbytes == 0 and window.cargos == []


def test_only_its_own_thread_lands_a_block_while_that_lives():
    thread_state, window = ThreadState(), Window(1000)
    theirs = block_of(lane_of_another(alive=True))
    orphan = block_of(lane_of_another(alive=False))
    segment = segment_of()
    window.inflight.add(theirs, done())
    window.inflight.add(orphan, done())
    window.inflight.add_segment(segment, done())
    window.inflight.complete(thread_state)
    assert window.cargos == [theirs] and theirs.alias is not None
    assert orphan.alias is None and segment.buffer is None  # a segment is a copy: anybody may
    window.inflight.complete(theirs.thread_state)
    assert window.cargos == [] and theirs.alias is None


def test_an_error_while_one_lands_loses_none():
    thread_state, window = ThreadState(), Window(1000)

    def raises(failure):
        raise UserWarning("made an error")

    theirs, mine = block_of(lane_of_another(alive=True)), block_of(thread_state)
    window.inflight.add(theirs, done())
    window.inflight.add(mine, done(BROKEN))
    window.inflight._health.broke = raises
    with pytest.raises(UserWarning):
        window.inflight.complete(thread_state)
    assert window.cargos == [theirs, mine] and window.inflight.nbytes == 200


# A host that runs ahead of its device has hundreds of copies under way: none may cost a look each time.


def under_way(window, thread_state, count=50):
    blocks, copies = (
        [block_of(thread_state) for _ in range(count)],
        [Played() for _ in range(count)],
    )
    for block, copy in zip(blocks, copies, strict=True):
        window.inflight.add(block, copy)
    return blocks, copies


def test_after_a_copy_that_has_not_ended_none_is_asked():
    thread_state, window = ThreadState(), Window(1 << 20)
    blocks, copies = under_way(window, thread_state)
    copies[0].is_done = True
    for _ in range(3):
        window.inflight.complete(thread_state)
    assert window.cargos == blocks[1:] and blocks[0].alias is None
    assert [copy.asked for copy in copies[:4]] == [1, 3, 0, 0]
    for copy in copies:
        copy.is_done = True
    window.inflight.complete(thread_state)
    assert window.cargos == [] and window.inflight.nbytes == 0


def test_those_that_stay_are_not_looked_at_and_the_dead_go_by_halves():
    thread_state, window = ThreadState(), Window(1 << 20)
    window.wants_room = False
    blocks, copies = under_way(window, thread_state, 40)
    for copy in copies:
        copy.is_done = True
    window.inflight.complete(thread_state)
    assert len(window.asked) == 1 and len(window.cargos) == 40
    del blocks[10:29]
    window.inflight.complete(thread_state)
    assert len(window.asked) == 2 and window.cargos.count(None) == 19
    del blocks[10]
    window.inflight.complete(thread_state)
    assert window.cargos == blocks and len(blocks) == 20
    assert window.freed == [100] * 20 and window.inflight.nbytes == 20 * 100
    assert sum(copy.asked for copy in copies) == 20
    del blocks[5]
    window.asked.clear()
    window.inflight.complete(thread_state)
    assert len(window.asked) == 1 and len(window.cargos) == 20
    del blocks[-10:]
    window.inflight.complete(thread_state)
    assert window.cargos == blocks and len(blocks) == 9


def test_a_thread_that_has_none_looks_at_nobody_else_s():
    thread_state, other, window = ThreadState(), lane_of_another(alive=True), Window(50 * 100)
    blocks, copies = under_way(window, other)
    asked = []
    other.thread.is_alive = lambda: asked.append(1) or True
    for copy in copies:
        copy.is_done = True
    window.inflight.complete(thread_state)
    assert len(asked) <= 2 and window.cargos == blocks
    mine, own = block_of(thread_state), Played()
    window.inflight.add(mine, own)
    window.inflight.complete(thread_state)
    own.is_done = True
    window.inflight.complete(thread_state)  # it finds its own behind them, and goes no further
    assert window.cargos == blocks and mine.alias is None and own.asked == 2
    asked.clear()
    window.inflight.complete(thread_state)
    assert len(asked) <= 2
    window.inflight.make_room(100, thread_state)
    del blocks[0]
    window.inflight.make_room(100, thread_state)  # a dead one is everybody's
    assert window.cargos == blocks and window.inflight.nbytes == 49 * 100
    other.thread.is_alive = lambda: False
    window.inflight.complete(thread_state)
    assert window.cargos == []


def test_a_dead_one_behind_another_thread_s_makes_room():
    thread_state, other, window = ThreadState(), lane_of_another(alive=True), Window(300)
    blocks, copies = under_way(window, other, 3)
    del blocks[1]
    window.inflight.make_room(100, thread_state)
    assert window.cargos == blocks and copies[1].ordered == copies[1].released == 1


def test_only_dead_copies_are_counted_as_such():
    """For writes all are looked at each time."""
    thread_state, window = ThreadState(), Window(1000)
    blocks = [block_of(thread_state) for _ in range(2)]
    for block, writing in zip(blocks, (work_of(), Played()), strict=True):
        window.inflight.add(block, writing)
    del block
    blocks.pop(0)
    assert len(window.inflight._dead) == 0
    blocks.clear()
    assert len(window.inflight._dead) == 1


def test_a_dead_block_s_write_is_called_off_or_ends():
    thread_state, window = ThreadState(), Window(1000)
    begun, ended, go_on = threading.Event(), threading.Event(), threading.Event()
    running = Work(lambda: (begun.set(), go_on.wait(30)))
    waiting, over = work_of(), done()
    other = lane_of_another(alive=True)
    for writing in (running, waiting, over):
        window.inflight.add(block_of(other), writing)  # and dead at once
    thread = threading.Thread(target=lambda: (running.run(), ended.set()))
    thread.start()
    assert begun.wait(30)
    window.inflight.complete(thread_state)
    assert [write.writing for write in window.inflight._inflight] == [running]
    assert waiting.cancelled and window.inflight.nbytes == 100
    go_on.set()
    thread.join()
    window.inflight.complete(thread_state)
    assert window.cargos == [] and window.inflight.nbytes == 0
    assert window.told == window.lost == window.returned == []


def test_where_there_is_room_what_was_copied_stays_until_it_is_in_the_way():
    thread_state, window = ThreadState(), Window(1000)
    block, copy, of_the_dead = block_of(thread_state), Played(), Played()
    copy.is_done = of_the_dead.is_done = True
    window.inflight.add(block, copy)
    window.inflight.add(block_of(thread_state, 50), of_the_dead)
    window.wants_room = False
    window.inflight.complete(thread_state)
    assert window.cargos == [block] and block.alias is not None and window.asked == [150]
    assert (copy.released, of_the_dead.released) == (0, 1)
    window.inflight.complete(thread_state, all_that_ended=True)
    assert window.cargos == [] and block.alias is None and copy.released == 1


@pytest.mark.parametrize("ended", [False, True])
def test_what_lands_while_it_is_copied_is_not_sure(ended):
    thread_state, window = ThreadState(), Window()
    block, copy = block_of(thread_state), Played()
    copy.is_done, copy.has_ended = True, ended
    window.inflight.add(block, copy)
    window.inflight.complete(thread_state)
    assert block.alias is None and block.unsure is not ended
    assert copy.released == 1 and window.told == [("land", *block.facts)]
    assert copy.ordered == copy.waited == 0


# Who is waited for.


def test_room_is_made_by_waiting_for_the_oldest_of_one_s_own():
    thread_state, window = ThreadState(), Window(100)
    inflight = window.inflight
    theirs = block_of(lane_of_another(alive=True), 10)
    mine = [block_of(thread_state, 30) for _ in range(3)]
    works = [work_of() for _ in range(4)]
    for block, work in zip((theirs, *mine), works, strict=True):
        inflight.add(block, work)
    inflight.make_room(0, thread_state)
    assert window.cargos == [theirs, *mine], "it is full, and no more is asked"
    inflight.make_room(31, thread_state)
    assert window.cargos == [theirs, mine[2]]
    assert [work.done() for work in works] == [False, True, True, False]
    inflight.make_room(
        95, thread_state
    )  # never fits beside another thread's, which nobody waits for
    assert window.cargos == [theirs] and not works[0].done()
    inflight.make_room(1000, thread_state)
    assert window.cargos == [theirs]


@pytest.mark.parametrize("nbytes, left", [(0, 3), (1, 2), (30, 2), (31, 1), (90, 0), (91, 0)])
def test_so_many_bytes_are_let_go_now(nbytes, left):
    thread_state, window = ThreadState(), Window(1000)
    blocks = [block_of(thread_state, 30) for _ in range(3)]
    for block in blocks:
        window.inflight.add(block, work_of())
    window.inflight.let_go(nbytes, thread_state)
    assert window.cargos == blocks[3 - left :]


def test_an_empty_window_is_not_waited_for():
    window = Window(100)
    window.inflight.make_room(1000, ThreadState())
    assert window.inflight.stall_seconds == 0


def test_room_is_made_of_what_lingers_too():
    thread_state, window = ThreadState(), Window(100)
    block, copy = block_of(thread_state), Played()
    copy.is_done, window.wants_room = True, False
    window.inflight.add(block, copy)
    window.inflight.make_room(1, thread_state)
    assert window.cargos == [] and copy.ordered == 0, "it was done: nobody waits"


def test_the_time_that_is_waited_is_counted(monkeypatch):
    window = Window()
    inflight, clock = window.inflight, iter((10.0, 13.0, 20.0, 24.0))
    monkeypatch.setattr(_inflight.time, "perf_counter", lambda: next(clock))
    began = []
    window.event_log.emit = lambda *what, **more: began.append((what, more))
    inflight.wait(done())
    assert inflight.stall_seconds == 0 and began == []
    inflight.wait(work := work_of())
    assert work.done() and inflight.stall_seconds == 3.0

    def interrupted():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        inflight.wait(Work(interrupted))
    assert inflight.stall_seconds == 7.0
    assert began == [(("stall", 0), {"cause": "pack", "began": at}) for at in (10.0, 20.0)]


def test_the_end_waits_for_copies_and_not_for_writes():
    thread_state, window = ThreadState(), Window(1000)
    window.wants_room = False
    blocks = [block_of(thread_state) for _ in range(3)]
    copies, work = [Played(), Played()], work_of()
    for block, writing in zip(blocks, (copies[0], work, copies[1]), strict=True):
        window.inflight.add(block, writing)
    window.inflight.finish(thread_state)
    assert [copy.waited for copy in copies] == [1, 1] and not work.done()
    assert window.cargos == [blocks[1]]


# The books anew.


def parcel_of(block, writing):
    backing = DiskBacking(None, SimpleNamespace(nbytes=block.nbytes), 0, GRAVE)
    backing.cleanup.writing, block.backing = writing, backing
    return backing.cleanup


def test_the_window_anew_is_of_what_is_on_its_way():
    thread_state, window = ThreadState(), Window(1000)
    inflight = window.inflight
    known, unknown, ended = (
        block_of(thread_state, 10),
        block_of(thread_state, 20),
        block_of(thread_state, 40),
    )
    works = [work_of(), work_of(), done()]
    cleanup = [parcel_of(*each) for each in zip((known, unknown, ended), works, strict=True)]
    landed, in_place = block_of(thread_state, 1), block_of(thread_state, 2)
    landed.alias = None
    cleanup.append(parcel_of(landed, work_of()))
    over = work_of()
    inflight.add(landed, over)  # it had landed, and not been taken out
    inflight.add(known, works[0])
    inflight.add(block_of(thread_state, 100), dead := work_of())  # and dead at once
    first = inflight._inflight[1]
    inflight.nbytes = 12345
    found = inflight.restore([known, landed, in_place, unknown, ended], [], cleanup)
    assert found == [dead, works[0], works[1]]
    assert window.cargos == [None, known, unknown, ended]
    assert inflight._count_of == {thread_state: 4}
    assert inflight._inflight[1] is first
    made = inflight._inflight[2]
    assert (made.nbytes, made.thread_state, made.writing) == (20, thread_state, works[1])
    assert inflight.nbytes == 100 + 10 + 20 + 40


def test_the_window_anew_has_each_segment_that_is_written():
    window = Window(1000)
    inflight, failure = window.inflight, done(BROKEN)
    known, unknown = segment_of(10, work_of()), segment_of(20, work_of())
    opened, landed = segment_of(40), segment_of(80, done())
    landed.buffer, landed.cleanup.inflight_bytes = None, 0
    failed, told = segment_of(160, failure), segment_of(320, done(BROKEN))
    inflight.add_segment(known, known.cleanup.writing)
    inflight.add_segment(told, told.cleanup.writing)  # which nobody has been told of
    failed.cleanup.inflight_bytes = (
        0  # it failed and has landed: its bytes are here, and count no more
    )
    segments = [opened, known, landed, unknown, failed, told]
    found = inflight.restore([], segments, [each.cleanup for each in segments])
    assert found == [known.cleanup.writing, unknown.cleanup.writing]
    assert window.cargos == [known, unknown, told]
    assert inflight._count_of == {None: 3}
    made = inflight._inflight[1]
    assert (made.nbytes, made.thread_state, made.writing) == (20, None, unknown.cleanup.writing)
    assert [each.cleanup.inflight_bytes for each in segments] == [40, 0, 0, 0, 0, 0]
    assert inflight.nbytes == 40 + 10 + 20 + 320


def test_copies_anew_are_not_begun_again():
    thread_state, window = ThreadState(), Window(1000)
    block = block_of(thread_state, 10)
    cleanup = parcel_of(block, Played())
    assert window.inflight.restore([block], [], [cleanup]) == []
    assert window.cargos == [block] and window.inflight.nbytes == 10
