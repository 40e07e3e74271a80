"""The window on the way down, piece by piece: what lands and when, and what cannot be known any more."""

import threading
from types import SimpleNamespace

import pytest
import torch

from backstash import _flights
from backstash._blocks import Block, Source
from backstash._flights import Flights
from backstash._lanes import Lane
from backstash._parcels import Parcel, Segment
from backstash._remains import Grave
from backstash._streams import Copy
from backstash._workers import Work

GRAVE = Grave()
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
        self.tape = SimpleNamespace(on=True, tell=lambda *what, **more: self.told.append(what))
        refusals = SimpleNamespace(broke=self.broke.append)
        self.flights = Flights(keep, refusals, self.freed.append, self.tape, window_bytes=nbytes)

    @property
    def cargos(self):
        return [flight.cargo() for flight in self.flights._flights]


def work_of(error=None):
    def call():
        if error is not None:
            raise error

    return Work(call)


def done(error=None):
    work = work_of(error)
    work.run()
    return work


def block_of(lane, nbytes=100):
    side = SimpleNamespace(number=0, grave=GRAVE, stream=lambda: None)
    tensor = torch.zeros(nbytes, dtype=torch.uint8)
    block = Block(Source(tensor, tensor.untyped_storage()), tensor.detach(), side)
    block.lane, block.remains.kept = lane, nbytes
    return block


def segment_of(nbytes=100, writing=None):
    segment = Segment(None, SimpleNamespace(nbytes=nbytes), torch.zeros(nbytes), GRAVE)
    segment.remains.flown, segment.remains.writing = nbytes, writing
    return segment


def lane_of_another(*, alive):
    lane = Lane()
    lane.thread = SimpleNamespace(is_alive=lambda: alive)
    return lane


# What is counted.


def test_the_window_holds_what_fits_into_it():
    lane, window = Lane(), Window(200)
    flights = window.flights
    blocks = [block_of(lane, 100), block_of(lane, 60)]
    assert not flights.is_one and flights.has_room(200) and not flights.has_room(201)
    flights.add(blocks[0], work_of())
    assert flights.is_one and (flights.nbytes, flights.peak_bytes) == (100, 0)
    flights.add(blocks[1], work_of())
    assert not flights.is_one
    assert flights.has_room(40) and not flights.has_room(41)
    flights.measure()
    for flight in flights._flights:
        flight.writing.run()
    flights.land(lane)
    flights.measure()
    assert (flights.nbytes, flights.peak_bytes, flights.written_bytes) == (0, 160, 160)
    assert window.freed == [100, 60]


@pytest.mark.parametrize("nbytes", [0, 1])
def test_no_window_has_no_one_write_alone_in_it(nbytes):
    lane, window = Lane(), Window(nbytes)
    block = block_of(lane)
    window.flights.add(block, work_of())
    assert window.flights.is_one is (nbytes > 0)


def test_a_segment_s_bytes_are_counted_once():
    lane, window = Lane(), Window()
    flights = window.flights
    segment = segment_of(100)
    flights.count(100)  # as it is filled
    flights.add_segment(segment, work := work_of())
    assert (flights.nbytes, flights.written_bytes, segment.remains.flown) == (100, 100, 0)
    assert flights._flying == {None: 1}
    work.run()
    flights.land(lane)
    assert flights.nbytes == 0 and segment.buffer is None and window.cargos == []
    assert flights._flying == {}
    assert window.freed == [100]


# What lands.


def test_what_has_ended_lands_and_the_rest_keeps_its_order():
    lane, window = Lane(), Window(1000)
    blocks = [block_of(lane, nbytes) for nbytes in (10, 20, 30, 40)]
    for block, writing in zip(blocks, (work_of(), done(), work_of(), done()), strict=True):
        window.flights.add(block, writing)
    assert window.flights._flying == {lane: 4}
    window.flights.land(lane)
    assert window.flights._flying == {lane: 2}
    assert [block.alias is None for block in blocks] == [False, True, False, True]
    assert window.cargos == [blocks[0], blocks[2]]
    assert [block.unsure for block in blocks] == [False] * 4
    assert window.told == [("land", *blocks[1].facts), ("land", *blocks[3].facts)]
    assert window.freed == [20, 40] and window.flights.nbytes == 40
    assert not any(flight.writing.cancelled for flight in window.flights._flights)


def test_nobody_is_told_where_nobody_records():
    lane, window = Lane(), Window()
    window.tape.on = False
    block = block_of(lane)
    window.flights.add(block, done())
    window.flights.wait(work_of())
    window.flights.land(lane)
    assert block.alias is None and window.told == []


@pytest.mark.parametrize("how", ["work", "copy"])
def test_a_change_before_it_landed_loses_it(how):
    lane, window = Lane(), Window()
    block = block_of(lane)
    block.alias.add_(1)
    copy = Played()
    copy.is_done = True
    window.flights.add(block, done() if how == "work" else copy)
    window.flights.land(lane)
    assert window.lost == [block] and window.returned == window.broke == window.told == []
    assert window.freed == [100] and window.cargos == []


def test_a_write_that_failed_leaves_the_block_where_it_was():
    lane, window = Lane(), Window()
    block = block_of(lane)
    block.alias.add_(1)  # it is in place: that is for autograd to see
    window.flights.add(block, done(BROKEN))
    window.flights.land(lane)
    assert window.returned == [block] and window.broke == [BROKEN]
    assert window.lost == window.told == [] and block.alias is not None
    assert window.flights.nbytes == 0


@pytest.mark.parametrize("error", [None, BROKEN])
def test_a_block_whose_memory_has_moved_stays_whatever_was_written(error):
    lane, window = Lane(), Window()
    block = block_of(lane)
    block.alias.untyped_storage().resize_(1 << 20)
    assert block.has_moved
    window.flights.add(block, done(error))
    window.flights.land(lane)
    assert window.returned == [block] and window.broke == window.lost == []
    assert block.alias is not None and window.cargos == []


def test_a_segment_whose_write_failed_keeps_its_bytes():
    lane, window = Lane(), Window()
    segment = segment_of()
    window.flights.count(100)
    window.flights.add_segment(segment, done(BROKEN))
    window.flights.land(lane)
    assert segment.buffer is not None and window.broke == [BROKEN] and window.returned == []
    assert window.flights.nbytes == 0 and window.cargos == []


def test_only_its_own_thread_lands_a_block_while_that_lives():
    lane, window = Lane(), Window(1000)
    theirs = block_of(lane_of_another(alive=True))
    orphan = block_of(lane_of_another(alive=False))
    segment = segment_of()
    window.flights.add(theirs, done())
    window.flights.add(orphan, done())
    window.flights.add_segment(segment, done())
    window.flights.land(lane)
    assert window.cargos == [theirs] and theirs.alias is not None
    assert orphan.alias is None and segment.buffer is None  # a segment is a copy: anybody may
    window.flights.land(theirs.lane)
    assert window.cargos == [] and theirs.alias is None


def test_an_error_while_one_lands_loses_none():
    lane, window = Lane(), Window(1000)

    def raises(failure):
        raise UserWarning("made an error")

    theirs, mine = block_of(lane_of_another(alive=True)), block_of(lane)
    window.flights.add(theirs, done())
    window.flights.add(mine, done(BROKEN))
    window.flights._refusals.broke = raises
    with pytest.raises(UserWarning):
        window.flights.land(lane)
    assert window.cargos == [theirs, mine] and window.flights.nbytes == 200


# A host that runs ahead of its device has hundreds of copies under way: none may cost a look each time.


def under_way(window, lane, count=50):
    blocks, copies = [block_of(lane) for _ in range(count)], [Played() for _ in range(count)]
    for block, copy in zip(blocks, copies, strict=True):
        window.flights.add(block, copy)
    return blocks, copies


def test_after_a_copy_that_has_not_ended_none_is_asked():
    lane, window = Lane(), Window(1 << 20)
    blocks, copies = under_way(window, lane)
    copies[0].is_done = True
    for _ in range(3):
        window.flights.land(lane)
    assert window.cargos == blocks[1:] and blocks[0].alias is None
    assert [copy.asked for copy in copies[:4]] == [1, 3, 0, 0]
    for copy in copies:
        copy.is_done = True
    window.flights.land(lane)
    assert window.cargos == [] and window.flights.nbytes == 0


def test_those_that_stay_are_not_looked_at_and_the_dead_go_by_halves():
    lane, window = Lane(), Window(1 << 20)
    window.wants_room = False
    blocks, copies = under_way(window, lane, 40)
    for copy in copies:
        copy.is_done = True
    window.flights.land(lane)
    assert len(window.asked) == 1 and len(window.cargos) == 40
    del blocks[10:29]
    window.flights.land(lane)
    assert len(window.asked) == 2 and window.cargos.count(None) == 19
    del blocks[10]
    window.flights.land(lane)
    assert window.cargos == blocks and len(blocks) == 20
    assert window.freed == [100] * 20 and window.flights.nbytes == 20 * 100
    assert sum(copy.asked for copy in copies) == 20
    del blocks[5]
    window.asked.clear()
    window.flights.land(lane)
    assert len(window.asked) == 1 and len(window.cargos) == 20
    del blocks[-10:]
    window.flights.land(lane)
    assert window.cargos == blocks and len(blocks) == 9


def test_a_thread_that_has_none_looks_at_nobody_else_s():
    lane, other, window = Lane(), lane_of_another(alive=True), Window(50 * 100)
    blocks, copies = under_way(window, other)
    asked = []
    other.thread.is_alive = lambda: asked.append(1) or True
    for copy in copies:
        copy.is_done = True
    window.flights.land(lane)
    assert len(asked) <= 2 and window.cargos == blocks
    mine, own = block_of(lane), Played()
    window.flights.add(mine, own)
    window.flights.land(lane)
    own.is_done = True
    window.flights.land(lane)  # it finds its own behind them, and goes no further
    assert window.cargos == blocks and mine.alias is None and own.asked == 2
    asked.clear()
    window.flights.land(lane)
    assert len(asked) <= 2
    window.flights.make_room(100, lane)
    del blocks[0]
    window.flights.make_room(100, lane)  # a dead one is everybody's
    assert window.cargos == blocks and window.flights.nbytes == 49 * 100
    other.thread.is_alive = lambda: False
    window.flights.land(lane)
    assert window.cargos == []


def test_a_dead_one_behind_another_thread_s_makes_room():
    lane, other, window = Lane(), lane_of_another(alive=True), Window(300)
    blocks, copies = under_way(window, other, 3)
    del blocks[1]
    window.flights.make_room(100, lane)
    assert window.cargos == blocks and copies[1].ordered == copies[1].released == 1


def test_only_dead_copies_are_counted_as_such():
    """For writes all are looked at each time."""
    lane, window = Lane(), Window(1000)
    blocks = [block_of(lane) for _ in range(2)]
    for block, writing in zip(blocks, (work_of(), Played()), strict=True):
        window.flights.add(block, writing)
    del block
    blocks.pop(0)
    assert len(window.flights._dead) == 0
    blocks.clear()
    assert len(window.flights._dead) == 1


def test_a_dead_block_s_write_is_called_off_or_ends():
    lane, window = Lane(), Window(1000)
    begun, ended, go_on = threading.Event(), threading.Event(), threading.Event()
    running = Work(lambda: (begun.set(), go_on.wait(30)))
    waiting, over = work_of(), done()
    other = lane_of_another(alive=True)
    for writing in (running, waiting, over):
        window.flights.add(block_of(other), writing)  # and dead at once
    thread = threading.Thread(target=lambda: (running.run(), ended.set()))
    thread.start()
    assert begun.wait(30)
    window.flights.land(lane)
    assert [flight.writing for flight in window.flights._flights] == [running]
    assert waiting.cancelled and window.flights.nbytes == 100
    go_on.set()
    thread.join()
    window.flights.land(lane)
    assert window.cargos == [] and window.flights.nbytes == 0
    assert window.told == window.lost == window.returned == []


def test_where_there_is_room_what_was_copied_stays_until_it_is_in_the_way():
    lane, window = Lane(), Window(1000)
    block, copy, of_the_dead = block_of(lane), Played(), Played()
    copy.is_done = of_the_dead.is_done = True
    window.flights.add(block, copy)
    window.flights.add(block_of(lane, 50), of_the_dead)
    window.wants_room = False
    window.flights.land(lane)
    assert window.cargos == [block] and block.alias is not None and window.asked == [150]
    assert (copy.released, of_the_dead.released) == (0, 1)
    window.flights.land(lane, all_that_ended=True)
    assert window.cargos == [] and block.alias is None and copy.released == 1


@pytest.mark.parametrize("ended", [False, True])
def test_what_lands_while_it_is_copied_is_not_sure(ended):
    lane, window = Lane(), Window()
    block, copy = block_of(lane), Played()
    copy.is_done, copy.has_ended = True, ended
    window.flights.add(block, copy)
    window.flights.land(lane)
    assert block.alias is None and block.unsure is not ended
    assert copy.released == 1 and window.told == [("land", *block.facts)]
    assert copy.ordered == copy.waited == 0


# Who is waited for.


def test_room_is_made_by_waiting_for_the_oldest_of_one_s_own():
    lane, window = Lane(), Window(100)
    flights = window.flights
    theirs = block_of(lane_of_another(alive=True), 10)
    mine = [block_of(lane, 30) for _ in range(3)]
    works = [work_of() for _ in range(4)]
    for block, work in zip((theirs, *mine), works, strict=True):
        flights.add(block, work)
    flights.make_room(0, lane)
    assert window.cargos == [theirs, *mine], "it is full, and no more is asked"
    flights.make_room(31, lane)
    assert window.cargos == [theirs, mine[2]]
    assert [work.done() for work in works] == [False, True, True, False]
    flights.make_room(95, lane)  # never fits beside another thread's, which nobody waits for
    assert window.cargos == [theirs] and not works[0].done()
    flights.make_room(1000, lane)
    assert window.cargos == [theirs]


@pytest.mark.parametrize("nbytes, left", [(0, 3), (1, 2), (30, 2), (31, 1), (90, 0), (91, 0)])
def test_so_many_bytes_are_let_go_now(nbytes, left):
    lane, window = Lane(), Window(1000)
    blocks = [block_of(lane, 30) for _ in range(3)]
    for block in blocks:
        window.flights.add(block, work_of())
    window.flights.let_go(nbytes, lane)
    assert window.cargos == blocks[3 - left :]


def test_an_empty_window_is_not_waited_for():
    window = Window(100)
    window.flights.make_room(1000, Lane())
    assert window.flights.stall_seconds == 0


def test_room_is_made_of_what_lingers_too():
    lane, window = Lane(), Window(100)
    block, copy = block_of(lane), Played()
    copy.is_done, window.wants_room = True, False
    window.flights.add(block, copy)
    window.flights.make_room(1, lane)
    assert window.cargos == [] and copy.ordered == 0, "it was done: nobody waits"


def test_the_time_that_is_waited_is_counted(monkeypatch):
    window = Window()
    flights, clock = window.flights, iter((10.0, 13.0, 20.0, 24.0))
    monkeypatch.setattr(_flights.time, "perf_counter", lambda: next(clock))
    began = []
    window.tape.tell = lambda *what, **more: began.append((what, more))
    flights.wait(done())
    assert flights.stall_seconds == 0 and began == []
    flights.wait(work := work_of())
    assert work.done() and flights.stall_seconds == 3.0

    def interrupted():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        flights.wait(Work(interrupted))
    assert flights.stall_seconds == 7.0
    assert began == [(("stall", 0), {"cause": "pack", "began": at}) for at in (10.0, 20.0)]


def test_the_end_waits_for_copies_and_not_for_writes():
    lane, window = Lane(), Window(1000)
    window.wants_room = False
    blocks = [block_of(lane) for _ in range(3)]
    copies, work = [Played(), Played()], work_of()
    for block, writing in zip(blocks, (copies[0], work, copies[1]), strict=True):
        window.flights.add(block, writing)
    window.flights.finish(lane)
    assert [copy.waited for copy in copies] == [1, 1] and not work.done()
    assert window.cargos == [blocks[1]]


# The books anew.


def parcel_of(block, writing):
    parcel = Parcel(None, SimpleNamespace(nbytes=block.nbytes), 0, GRAVE)
    parcel.remains.writing, block.parcel = writing, parcel
    return parcel.remains


def test_the_window_anew_is_of_what_is_on_its_way():
    lane, window = Lane(), Window(1000)
    flights = window.flights
    known, unknown, ended = block_of(lane, 10), block_of(lane, 20), block_of(lane, 40)
    works = [work_of(), work_of(), done()]
    remains = [parcel_of(*each) for each in zip((known, unknown, ended), works, strict=True)]
    landed, in_place = block_of(lane, 1), block_of(lane, 2)
    landed.alias = None
    remains.append(parcel_of(landed, work_of()))
    over = work_of()
    flights.add(landed, over)  # it had landed, and not been taken out
    flights.add(known, works[0])
    flights.add(block_of(lane, 100), dead := work_of())  # and dead at once
    first = flights._flights[1]
    flights.nbytes = 12345
    found = flights.restore([known, landed, in_place, unknown, ended], [], remains)
    assert found == [dead, works[0], works[1]]
    assert window.cargos == [None, known, unknown, ended]
    assert flights._flying == {lane: 4}
    assert flights._flights[1] is first
    made = flights._flights[2]
    assert (made.nbytes, made.lane, made.writing) == (20, lane, works[1])
    assert flights.nbytes == 100 + 10 + 20 + 40


def test_the_window_anew_has_each_segment_that_is_written():
    window = Window(1000)
    flights, failure = window.flights, done(BROKEN)
    known, unknown = segment_of(10, work_of()), segment_of(20, work_of())
    opened, landed = segment_of(40), segment_of(80, done())
    landed.buffer, landed.remains.flown = None, 0
    failed, told = segment_of(160, failure), segment_of(320, done(BROKEN))
    flights.add_segment(known, known.remains.writing)
    flights.add_segment(told, told.remains.writing)  # which nobody has been told of
    failed.remains.flown = 0  # it failed and has landed: its bytes are here, and count no more
    segments = [opened, known, landed, unknown, failed, told]
    found = flights.restore([], segments, [each.remains for each in segments])
    assert found == [known.remains.writing, unknown.remains.writing]
    assert window.cargos == [known, unknown, told]
    assert flights._flying == {None: 3}
    made = flights._flights[1]
    assert (made.nbytes, made.lane, made.writing) == (20, None, unknown.remains.writing)
    assert [each.remains.flown for each in segments] == [40, 0, 0, 0, 0, 0]
    assert flights.nbytes == 40 + 10 + 20 + 320


def test_copies_anew_are_not_begun_again():
    lane, window = Lane(), Window(1000)
    block = block_of(lane, 10)
    remains = parcel_of(block, Played())
    assert window.flights.restore([block], [], [remains]) == []
    assert window.cargos == [block] and window.flights.nbytes == 10
