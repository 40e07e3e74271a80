"""The books: devices and their sides, what waits for its operation, forks, and settling what died."""

import os
import threading
import weakref
from types import SimpleNamespace

import pytest
import torch

from backstash import _session
from backstash._runtime.critical_section import CriticalSection
from backstash._runtime.reclaim import BlockCleanup, DiskCleanup, HostCleanup, ReclaimQueue
from backstash._runtime.trace import EventLog
from backstash._saved.thread_state import ThreadState
from backstash._session import Session
from backstash._tiers.resident import ResidentSet

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
        self.resident = ResidentSet(SimpleNamespace(on=False), limit=None)
        self.resident.queue = []
        self.inflight = SimpleNamespace(nbytes=0, complete=self.landed.append)
        self.health = SimpleNamespace(try_again=lambda: self.tried.append(True))

    def apply(self, thread_state, block, at_once):
        self.applied.append((thread_state, block, at_once))

    def ease(self):
        self.eased = True

    def forget(self):
        self.forgot = True


def tiers(**more):
    up = SimpleNamespace(forked=lambda lock: locks.append(lock), ahead_bytes=0)
    locks = []
    return SimpleNamespace(
        evictor=Down(), prefetcher=up, locks=locks, device=None, host=None, **more
    )


class Block:
    def __init__(self, of, kept=1):
        self.tiers, self.cleanup = of, SimpleNamespace(resident_bytes=kept)


def books_with(make=lambda device, number: "no driver", lock=None):
    event_log = EventLog(lambda: (0,) * 5)
    return Session(
        tiers(), ReclaimQueue(), lock or Lock(), CriticalSection(), event_log, make, keep=77
    )


# Sides.


def test_a_device_gets_its_side_once_and_under_the_lock():
    lock, made = Lock(), []

    def make(device, number):
        assert lock.held
        made.append((device, number))
        return tiers()

    session = books_with(make, lock)
    cpu = session.device_tiers[0]
    assert session.tiers_of(CPU) is cpu and not made
    other = session.tiers_of(OTHER)
    assert session.tiers_of(OTHER) is other and made == [(OTHER, 1)]
    assert session.device_tiers == [cpu, other] and not lock.held
    assert (cpu.evictor.resident.limit, other.evictor.resident.limit) == (77, 77)
    session.limit(88)
    assert (cpu.evictor.resident.limit, other.evictor.resident.limit) == (88, 88)
    assert session.tiers_of(torch.device("cuda", 1)).evictor.resident.limit == 88


def test_a_known_device_takes_no_lock():
    lock = Lock()
    session = books_with(lock=lock)
    lock.when_taken = lambda: pytest.fail("it was known already")
    assert session.tiers_of(CPU) is session.device_tiers[0]


def test_a_device_without_a_side_says_why_and_is_asked_once():
    asked = []
    session = books_with(lambda device, number: asked.append(device) or "no driver")
    assert session.tiers_of(OTHER) == session.tiers_of(OTHER) == "no driver"
    assert asked == [OTHER] and len(session.device_tiers) == 1


def test_two_threads_that_meet_a_device_make_one_side():
    """The other one was quicker: while this one waited for the lock, it made the side."""
    quicker = tiers()
    lock = Lock()
    session = books_with(lambda device, number: pytest.fail("made twice"), lock)
    lock.when_taken = lambda: session.put(OTHER, quicker)
    assert session.tiers_of(OTHER) is quicker
    assert session.device_tiers == [session.device_tiers[0], quicker]


# Forks.


def test_a_forked_process_has_a_lock_of_its_own(monkeypatch):
    lock = Lock()
    session = books_with(lock=lock)
    second = tiers()
    session.put(OTHER, second)
    assert session.is_forked() is False and session.lock is lock
    here = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: here + 1)
    assert session.is_forked() is True
    mine = session.lock
    assert mine is not lock and isinstance(mine, type(threading.RLock()))
    assert session.device_tiers[0].locks == second.locks == [mine]
    assert session.is_forked() is True and session.lock is mine  # once for each process
    monkeypatch.setattr(os, "getpid", lambda: here + 2)  # a child of the child
    assert session.is_forked() is True and session.lock is not mine
    assert second.locks == [mine, session.lock]


def test_a_forked_process_does_not_mend_what_another_was_writing(monkeypatch):
    session = books_with()
    monkeypatch.setattr(_session, "rebuild", lambda *_: pytest.fail("nobody writes here"))
    tear(session)
    here = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: here + 1)
    assert session.is_forked() is True
    with session.section:
        pass


def tear(session):
    with pytest.raises(RuntimeError, match="in the middle"), session.section:
        raise RuntimeError("in the middle")


def test_books_that_are_torn_are_made_anew_for_the_next(monkeypatch):
    session, made = books_with(), []
    monkeypatch.setattr(_session, "rebuild", lambda *what: made.append(what))
    with session.section:
        assert made == []
    tear(session)
    with session.section:
        assert made == [(session, session.thread_states)]
    with session.section:
        assert len(made) == 1


# What waits for its operation to end.


def waiting(session, *kept, at_once=False):
    thread_state = ThreadState()
    blocks = [Block(session.device_tiers[0], each) for each in kept]
    thread_state.waiting.extend((weakref.ref(block), at_once) for block in blocks)
    return thread_state, blocks


def test_what_waits_goes_when_its_operation_has_ended():
    session = books_with()
    down = session.device_tiers[0].evictor
    for at_once in (False, True):
        thread_state, (block,) = waiting(session, 1, at_once=at_once)
        thread_state.operation = torch.autograd._get_sequence_nr()
        session.settle(thread_state)
        assert down.applied == [] and len(thread_state.waiting) == 1  # it may still be filled
        (torch.ones(1, requires_grad=True) * 2).sum()  # later nodes
        session.settle(thread_state)
        assert down.applied == [(thread_state, block, at_once)] and not thread_state.waiting
        down.applied.clear()


def test_at_the_end_everything_that_waits_goes_except_what_is_gone():
    session = books_with()
    thread_state, blocks = waiting(session, 1, 0, 1, 1)
    thread_state.operation = torch.autograd._get_sequence_nr()
    kept = [blocks[0], blocks[2]]  # the second has left its place, the fourth is dead
    del blocks[3]
    session.settle(thread_state, ended=True)
    assert [block for _, block, _ in session.device_tiers[0].evictor.applied] == kept
    assert not thread_state.waiting


def test_one_that_raises_leaves_the_rest_waiting():
    session = books_with()
    thread_state, blocks = waiting(session, 1, 1)
    down = session.device_tiers[0].evictor
    down.apply = lambda *_: (_ for _ in ()).throw(OSError("full"))
    with pytest.raises(OSError, match="full"):
        session.settle(thread_state, ended=True)
    assert [ref() for ref, _ in thread_state.waiting] == blocks[1:]


def test_what_waited_on_a_thread_that_ended_is_queued():
    session = books_with()
    thread_state, blocks = waiting(session, 1, 1, 1)
    del blocks[1]
    session.adopt(thread_state)
    assert session.device_tiers[0].evictor.resident.queue == blocks and not thread_state.waiting


# Budgets.


def test_every_side_lands_and_follows_the_memory_that_is_free(monkeypatch):
    session = books_with()
    second = tiers()
    second.device = SimpleNamespace(free_bytes=lambda: 1000, is_capturing=lambda: False)
    session.put(OTHER, second)
    thread_state = ThreadState()
    session.complete(thread_state)
    assert session.device_tiers[0].evictor.landed == second.evictor.landed == [thread_state]
    session.ease()
    assert session.device_tiers[0].evictor.eased and second.evictor.eased
    session.try_again()
    assert session.device_tiers[0].evictor.tried == second.evictor.tried == [True]
    monkeypatch.setattr("backstash._session.spare_bytes", lambda: 300)
    session.device_tiers[0].evictor.resident.nbytes, second.evictor.resident.nbytes = 101, 50
    session.limit("auto")
    assert [each.evictor.resident.limit for each in session.device_tiers] == [200, 525]
    second.device.is_capturing = lambda: True  # the driver may not be asked then
    session.limit("auto")
    assert [each.evictor.resident.limit for each in session.device_tiers] == [200, 0]


# What died.


class Writing:
    def __init__(self, done, can_be_cancelled=False):
        self.is_done, self.can, self.asked = done, can_be_cancelled, 0

    def done(self):
        return self.is_done

    def cancel(self):
        self.asked += 1
        return self.can


def block_remains(reclaim_queue, number, kept, held, nbytes, serial, module):
    left = BlockCleanup(reclaim_queue, number, nbytes)
    left.resident_bytes, left.loaded_bytes, left.serial, left.module = kept, held, serial, module
    return left


def parcel_remains(reclaim_queue, store, slot, writing, held, inflight_bytes):
    left = DiskCleanup(reclaim_queue, store, slot)
    left.writing, left.loaded_bytes, left.inflight_bytes = writing, held, inflight_bytes
    return left


def test_a_dead_block_is_taken_off_the_books_of_its_side():
    session, told = books_with(), []
    assert session.blocks_alive == 0
    second = tiers()
    session.put(OTHER, second)
    for each in session.device_tiers:
        each.evictor.resident.nbytes, each.prefetcher.ahead_bytes = 100, 50
    session.blocks_alive = 3
    left = block_remains(session.reclaim_queue, 1, 30, 20, 64, 7, "layer")
    session.reclaim_queue.append(left)
    session.drain()
    assert (left.resident_bytes, left.loaded_bytes, left.serial) == (
        0,
        0,
        -1,
    )  # struck out: nobody counts it again
    assert (
        second.evictor.resident.nbytes,
        second.prefetcher.ahead_bytes,
        session.blocks_alive,
    ) == (70, 30, 2)
    assert (
        session.device_tiers[0].evictor.resident.nbytes,
        session.device_tiers[0].prefetcher.ahead_bytes,
    ) == (100, 50)
    session._event_log.start(told.append)
    session.reclaim_queue.append(block_remains(session.reclaim_queue, 0, 1, 2, 64, 8, "head"))
    session.drain()
    assert [(what[0], *what[3:6]) for what in told] == [("free", 64, 8, "head")]
    assert not session.reclaim_queue


def test_when_the_last_block_is_gone_nothing_of_any_is_remembered():
    session, forgot = books_with(), []
    second = tiers()
    second.host = SimpleNamespace(writeback=SimpleNamespace(forget=lambda: forgot.append("host")))
    session.put(OTHER, second)
    for each in session.device_tiers:
        each.prefetcher.forget = lambda: forgot.append("up")
    session.predictor.forget = lambda: forgot.append("order")
    session.blocks_alive = 2
    for alive in (1, 0):
        assert not forgot
        session.reclaim_queue.append(block_remains(session.reclaim_queue, 0, 0, 0, 1, 0, ""))
        session.drain()
        assert session.blocks_alive == alive
    assert forgot == ["order", "up", "up", "host"]
    assert all(each.evictor.forgot for each in session.device_tiers)
    session.drain()  # there was none
    assert len(forgot) == 4


def test_a_dead_parcel_s_slot_is_released_when_nothing_writes_to_it():
    session, released = books_with(), []
    store = SimpleNamespace(release=released.append)
    cpu = session.device_tiers[0]
    cpu.evictor.inflight.nbytes, cpu.prefetcher.ahead_bytes = 1000, 1000
    runs, stopped = Writing(False), Writing(False, can_be_cancelled=True)
    left = [
        parcel_remains(session.reclaim_queue, store, *each)
        for each in (
            ("never written", None, 1, 10),
            ("still written to", runs, 2, 20),
            ("written", Writing(True), 4, 40),
            ("not begun", stopped, 8, 80),
            (None, None, 16, 160),  # its slot was taken back before
        )
    ]
    session.reclaim_queue.extend(left)
    session.drain()
    assert released == ["never written", "written", "not begun"]
    assert (cpu.evictor.inflight.nbytes, cpu.prefetcher.ahead_bytes) == (1000 - 290, 1000 - 29)
    assert len(session.reclaim_queue) == 1 and stopped.asked == 1
    session.drain()
    assert len(released) == 3
    runs.is_done = True
    session.drain()
    assert released[3:] == ["still written to"] and not session.reclaim_queue
    assert [(each.loaded_bytes, each.inflight_bytes, each.slot) for each in left] == [
        (0, 0, None)
    ] * 5
    assert (cpu.evictor.inflight.nbytes, cpu.prefetcher.ahead_bytes) == (1000 - 310, 1000 - 31)


def test_what_is_left_of_a_host_parcel_goes_to_its_side():
    session, buried = books_with(), []
    second = tiers()
    second.host = SimpleNamespace(buffers=SimpleNamespace(defer=buried.append))
    second.prefetcher.ahead_bytes = 50
    session.put(OTHER, second)
    cleanup = HostCleanup(session.reclaim_queue, 1, None)
    cleanup.loaded_bytes = 20
    session.reclaim_queue.append(cleanup)
    session.drain()
    assert buried == [cleanup] and second.prefetcher.ahead_bytes == 30
