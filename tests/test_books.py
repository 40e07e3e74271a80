"""The books: devices and their sides, what waits for its operation, forks, and settling what died."""

import os
import threading
import weakref
from types import SimpleNamespace

import pytest
import torch

from backstash import _books
from backstash._books import Books
from backstash._events import Tape
from backstash._guard import Guard
from backstash._keep import Keep
from backstash._lanes import Lane
from backstash._remains import BlockRemains, Grave, HostRemains, ParcelRemains

CPU, OTHER = torch.device("cpu"), torch.device("cuda", 0)


class Lock:
    """A lock that knows whether it is held, and does something when it is taken."""

    def __init__(self, when_taken=lambda: None):
        self.held = 0
        self.when_taken = when_taken

    def __enter__(self):
        self.held += 1
        self.when_taken()

    def __exit__(self, *_):
        self.held -= 1


class Down:
    def __init__(self):
        self.applied, self.landed, self.tried = [], [], []
        self.keep = Keep(SimpleNamespace(on=False), limit=None)
        self.keep.queue = []
        self.flights = SimpleNamespace(nbytes=0, land=self.landed.append)
        self.refusals = SimpleNamespace(try_again=lambda: self.tried.append(True))

    def apply(self, lane, block, at_once):
        self.applied.append((lane, block, at_once))

    def ease(self):
        self.eased = True

    def forget(self):
        self.forgot = True


def side(**more):
    up = SimpleNamespace(forked=lambda lock: locks.append(lock), ahead_bytes=0)
    locks = []
    return SimpleNamespace(down=Down(), up=up, locks=locks, device=None, host=None, **more)


class Block:
    def __init__(self, of, kept=1):
        self.side, self.remains = of, SimpleNamespace(kept=kept)


def books_with(make=lambda device, number: "no driver", lock=None):
    tape = Tape(lambda: (0,) * 5)
    return Books(side(), Grave(), lock or Lock(), Guard(), tape, make, keep=77)


# Sides.


def test_a_device_gets_its_side_once_and_under_the_lock():
    lock, made = Lock(), []

    def make(device, number):
        assert lock.held
        made.append((device, number))
        return side()

    books = books_with(make, lock)
    cpu = books.sides[0]
    assert books.side_of(CPU) is cpu and not made
    other = books.side_of(OTHER)
    assert books.side_of(OTHER) is other and made == [(OTHER, 1)]
    assert books.sides == [cpu, other] and not lock.held
    assert (cpu.down.keep.limit, other.down.keep.limit) == (77, 77)
    books.limit(88)
    assert (cpu.down.keep.limit, other.down.keep.limit) == (88, 88)
    assert books.side_of(torch.device("cuda", 1)).down.keep.limit == 88


def test_a_known_device_takes_no_lock():
    lock = Lock()
    books = books_with(lock=lock)
    lock.when_taken = lambda: pytest.fail("it was known already")
    assert books.side_of(CPU) is books.sides[0]


def test_a_device_without_a_side_says_why_and_is_asked_once():
    asked = []
    books = books_with(lambda device, number: asked.append(device) or "no driver")
    assert books.side_of(OTHER) == books.side_of(OTHER) == "no driver"
    assert asked == [OTHER] and len(books.sides) == 1


def test_two_threads_that_meet_a_device_make_one_side():
    """The other one was quicker: while this one waited for the lock, it made the side."""
    quicker = side()
    lock = Lock()
    books = books_with(lambda device, number: pytest.fail("made twice"), lock)
    lock.when_taken = lambda: books.put(OTHER, quicker)
    assert books.side_of(OTHER) is quicker
    assert books.sides == [books.sides[0], quicker]


# Forks.


def test_a_forked_process_has_a_lock_of_its_own(monkeypatch):
    lock = Lock()
    books = books_with(lock=lock)
    second = side()
    books.put(OTHER, second)
    assert books.is_forked() is False and books.lock is lock
    here = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: here + 1)
    assert books.is_forked() is True
    mine = books.lock
    assert mine is not lock and isinstance(mine, type(threading.RLock()))
    assert books.sides[0].locks == second.locks == [mine]
    assert books.is_forked() is True and books.lock is mine  # once for each process
    monkeypatch.setattr(os, "getpid", lambda: here + 2)  # a child of the child
    assert books.is_forked() is True and books.lock is not mine
    assert second.locks == [mine, books.lock]


def test_a_forked_process_does_not_mend_what_another_was_writing(monkeypatch):
    books = books_with()
    monkeypatch.setattr(_books, "repair", lambda *_: pytest.fail("nobody writes here"))
    tear(books)
    here = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: here + 1)
    assert books.is_forked() is True
    with books.guard:
        pass


def tear(books):
    with pytest.raises(RuntimeError, match="in the middle"), books.guard:
        raise RuntimeError("in the middle")


def test_books_that_are_torn_are_made_anew_for_the_next(monkeypatch):
    books, made = books_with(), []
    monkeypatch.setattr(_books, "repair", lambda *what: made.append(what))
    with books.guard:
        assert made == []
    tear(books)
    with books.guard:
        assert made == [(books, books.lanes)]
    with books.guard:
        assert len(made) == 1


# What waits for its operation to end.


def waiting(books, *kept, at_once=False):
    lane = Lane()
    blocks = [Block(books.sides[0], each) for each in kept]
    lane.waiting.extend((weakref.ref(block), at_once) for block in blocks)
    return lane, blocks


def test_what_waits_goes_when_its_operation_has_ended():
    books = books_with()
    down = books.sides[0].down
    for at_once in (False, True):
        lane, (block,) = waiting(books, 1, at_once=at_once)
        lane.operation = torch.autograd._get_sequence_nr()
        books.settle(lane)
        assert down.applied == [] and len(lane.waiting) == 1  # it may still be filled
        (torch.ones(1, requires_grad=True) * 2).sum()  # later nodes
        books.settle(lane)
        assert down.applied == [(lane, block, at_once)] and not lane.waiting
        down.applied.clear()


def test_at_the_end_everything_that_waits_goes_except_what_is_gone():
    books = books_with()
    lane, blocks = waiting(books, 1, 0, 1, 1)
    lane.operation = torch.autograd._get_sequence_nr()
    kept = [blocks[0], blocks[2]]  # the second has left its place, the fourth is dead
    del blocks[3]
    books.settle(lane, ended=True)
    assert [block for _, block, _ in books.sides[0].down.applied] == kept
    assert not lane.waiting


def test_one_that_raises_leaves_the_rest_waiting():
    books = books_with()
    lane, blocks = waiting(books, 1, 1)
    down = books.sides[0].down
    down.apply = lambda *_: (_ for _ in ()).throw(OSError("full"))
    with pytest.raises(OSError, match="full"):
        books.settle(lane, ended=True)
    assert [ref() for ref, _ in lane.waiting] == blocks[1:]


def test_what_waited_on_a_thread_that_ended_is_queued():
    books = books_with()
    lane, blocks = waiting(books, 1, 1, 1)
    del blocks[1]
    books.adopt(lane)
    assert books.sides[0].down.keep.queue == blocks and not lane.waiting


# Budgets.


def test_every_side_lands_and_follows_the_memory_that_is_free(monkeypatch):
    books = books_with()
    second = side()
    second.device = SimpleNamespace(free_bytes=lambda: 1000, is_capturing=lambda: False)
    books.put(OTHER, second)
    lane = Lane()
    books.land(lane)
    assert books.sides[0].down.landed == second.down.landed == [lane]
    books.ease()
    assert books.sides[0].down.eased and second.down.eased
    books.try_again()
    assert books.sides[0].down.tried == second.down.tried == [True]
    monkeypatch.setattr("backstash._books.spare_bytes", lambda: 300)
    books.sides[0].down.keep.nbytes, second.down.keep.nbytes = 101, 50
    books.limit("auto")
    assert [each.down.keep.limit for each in books.sides] == [200, 525]
    second.device.is_capturing = lambda: True  # the driver may not be asked then
    books.limit("auto")
    assert [each.down.keep.limit for each in books.sides] == [200, 0]


# What died.


class Writing:
    def __init__(self, done, can_be_cancelled=False):
        self.is_done, self.can, self.asked = done, can_be_cancelled, 0

    def done(self):
        return self.is_done

    def cancel(self):
        self.asked += 1
        return self.can


def block_remains(grave, number, kept, held, nbytes, serial, module):
    left = BlockRemains(grave, number, nbytes)
    left.kept, left.held, left.serial, left.module = kept, held, serial, module
    return left


def parcel_remains(grave, store, slot, writing, held, flown):
    left = ParcelRemains(grave, store, slot)
    left.writing, left.held, left.flown = writing, held, flown
    return left


def test_a_dead_block_is_taken_off_the_books_of_its_side():
    books, told = books_with(), []
    assert books.blocks_alive == 0
    second = side()
    books.put(OTHER, second)
    for each in books.sides:
        each.down.keep.nbytes, each.up.ahead_bytes = 100, 50
    books.blocks_alive = 3
    left = block_remains(books.grave, 1, 30, 20, 64, 7, "layer")
    books.grave.append(left)
    books.drain()
    assert (left.kept, left.held, left.serial) == (0, 0, -1)  # struck out: nobody counts it again
    assert (second.down.keep.nbytes, second.up.ahead_bytes, books.blocks_alive) == (70, 30, 2)
    assert (books.sides[0].down.keep.nbytes, books.sides[0].up.ahead_bytes) == (100, 50)
    books._tape.start(told.append)
    books.grave.append(block_remains(books.grave, 0, 1, 2, 64, 8, "head"))
    books.drain()
    assert [(what[0], *what[3:6]) for what in told] == [("free", 64, 8, "head")]
    assert not books.grave


def test_when_the_last_block_is_gone_nothing_of_any_is_remembered():
    books, forgot = books_with(), []
    second = side()
    second.host = SimpleNamespace(spills=SimpleNamespace(forget=lambda: forgot.append("host")))
    books.put(OTHER, second)
    for each in books.sides:
        each.up.forget = lambda: forgot.append("up")
    books.order.forget = lambda: forgot.append("order")
    books.blocks_alive = 2
    for alive in (1, 0):
        assert not forgot
        books.grave.append(block_remains(books.grave, 0, 0, 0, 1, 0, ""))
        books.drain()
        assert books.blocks_alive == alive
    assert forgot == ["order", "up", "up", "host"]
    assert all(each.down.forgot for each in books.sides)
    books.drain()  # there was none
    assert len(forgot) == 4


def test_a_dead_parcel_s_slot_is_released_when_nothing_writes_to_it():
    books, released = books_with(), []
    store = SimpleNamespace(release=released.append)
    cpu = books.sides[0]
    cpu.down.flights.nbytes, cpu.up.ahead_bytes = 1000, 1000
    runs, stopped = Writing(False), Writing(False, can_be_cancelled=True)
    left = [
        parcel_remains(books.grave, store, *each)
        for each in (
            ("never written", None, 1, 10),
            ("still written to", runs, 2, 20),
            ("written", Writing(True), 4, 40),
            ("not begun", stopped, 8, 80),
            (None, None, 16, 160),  # its slot was taken back before
        )
    ]
    books.grave.extend(left)
    books.drain()
    assert released == ["never written", "written", "not begun"]
    assert (cpu.down.flights.nbytes, cpu.up.ahead_bytes) == (1000 - 290, 1000 - 29)
    assert len(books.grave) == 1 and stopped.asked == 1
    books.drain()
    assert len(released) == 3
    runs.is_done = True
    books.drain()
    assert released[3:] == ["still written to"] and not books.grave
    assert [(each.held, each.flown, each.slot) for each in left] == [(0, 0, None)] * 5
    assert (cpu.down.flights.nbytes, cpu.up.ahead_bytes) == (1000 - 310, 1000 - 31)


def test_what_is_left_of_a_host_parcel_goes_to_its_side():
    books, buried = books_with(), []
    second = side()
    second.host = SimpleNamespace(rooms=SimpleNamespace(bury=buried.append))
    second.up.ahead_bytes = 50
    books.put(OTHER, second)
    remains = HostRemains(books.grave, 1, None)
    remains.held = 20
    books.grave.append(remains)
    books.drain()
    assert buried == [remains] and second.up.ahead_bytes == 30
