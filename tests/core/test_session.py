"""The session: devices and their tiers, what waits for its operation, forks, and settling what died."""

import weakref
from types import SimpleNamespace

import pytest
import torch

from backstash import Stash
from backstash._core.session import Session
from backstash._runtime.critical_section import CriticalSection
from backstash._runtime.reclaim import Ledger, ReclaimQueue
from backstash._runtime.trace import EventLog
from backstash._saved.block import BlockCleanup
from backstash._saved.thread_state import Counts, ThreadState
from backstash._tiers.backing import DiskCleanup
from backstash._tiers.host_backing import HostCleanup
from backstash._tiers.resident import ResidentSet
from backstash.testing import MemoryStore, TwinDevice

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

    def _is_owned(self):
        return self.held > 0


class Evicts:
    def __init__(self):
        self.applied, self.completed, self.tried = [], [], []
        self.resident = ResidentSet(SimpleNamespace(on=False), limit=None)
        self.resident.queue = []
        self.inflight = SimpleNamespace(nbytes=0, writes=[1], complete=self.completed.append)
        self.health = SimpleNamespace(try_again=lambda: self.tried.append(True))

    def apply(self, thread_state, block, at_once):
        self.applied.append((thread_state, block, at_once))

    def ease(self):
        self.eased = True


class Tiers(Ledger):
    """As much of a device's tiers as a session asks."""

    def __init__(self, number=0, device=None):
        self.number, self.device, self.evictor = number, device, Evicts()
        self.deferred, self.forgot, self.begun = [], 0, []
        self.tier = SimpleNamespace(
            begin_waiting=lambda: self.begun.append(len(self.evictor.completed))
        )
        self.prefetcher = SimpleNamespace(ahead=SimpleNamespace(nbytes=0, again_bytes=0))

    def subtract(self, *, resident_bytes=0, inflight_bytes=0, again_bytes=0):
        self.evictor.resident.nbytes -= resident_bytes
        self.evictor.inflight.nbytes -= inflight_bytes
        self.prefetcher.ahead.again_bytes -= again_bytes

    def defer(self, cleanup):
        self.deferred.append(cleanup)

    def forget(self):
        self.forgot += 1


class Block:
    def __init__(self, number, resident_bytes=1):
        self.number, self.cleanup = number, SimpleNamespace(resident_bytes=resident_bytes)


def session_with(make_of=lambda device, number: "no driver", lock=None):
    section = CriticalSection()
    section.lock = lock or Lock()
    event_log = EventLog(lambda: (0,) * 5)
    cpu = Tiers()
    config = SimpleNamespace(
        reclaim_queue=ReclaimQueue(),
        section=section,
        event_log=event_log,
        tiers=lambda driver, number: cpu if (driver, number) == (None, 0) else None,
        tiers_of=make_of,
    )
    return Session(config, keep=77)


# Tiers.


def test_a_device_gets_its_tiers_once_and_under_the_lock():
    lock, made = Lock(), []

    def make(device, number):
        assert lock.held
        made.append((device, number))
        return Tiers(number)

    session = session_with(make, lock)
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
    session = session_with(lock=lock)
    lock.when_taken = lambda: pytest.fail("it was known already")
    assert session.tiers_of(CPU) is session.device_tiers[0]


def test_a_device_without_tiers_says_why_and_is_asked_once():
    asked = []
    session = session_with(lambda device, number: asked.append(device) or "no driver")
    assert session.tiers_of(OTHER) == session.tiers_of(OTHER) == "no driver"
    assert asked == [OTHER] and len(session.device_tiers) == 1


def test_two_threads_that_first_use_a_device_at_once_make_its_tiers_once():
    """The other one was quicker: while this one waited for the lock, it made the tiers."""
    quicker = Tiers()
    lock = Lock()
    session = session_with(lambda device, number: pytest.fail("made twice"), lock)
    lock.when_taken = lambda: session.put(OTHER, quicker)
    assert session.tiers_of(OTHER) is quicker
    assert session.device_tiers == [session.device_tiers[0], quicker]


# Forks.


def test_a_session_that_is_reset_holds_nothing_and_knows_the_threads_that_are_alive():
    session = session_with()
    session.put(OTHER, Tiers(1))
    mine, ended, queue = session.thread_state(), ThreadState(), ReclaimQueue()
    ended.thread = lambda: None
    session.thread_states.append(ended)
    mine.saves, session.blocks_alive = 3, 2
    mine.waiting.append((lambda: None, False))
    old, made = session.predictor, Tiers()
    session.restart(
        SimpleNamespace(reclaim_queue=queue, tiers=lambda *_: made, tiers_of=lambda *_: "no driver")
    )
    assert session.device_tiers == [made] and list(session.known_tiers) == [torch.device("cpu")]
    assert session.reclaim_queue is queue and session.predictor is not old
    assert session.thread_states == [mine] and not mine.waiting
    assert session.counts() == Counts() and session.blocks_alive == 0
    assert session.tiers_of(OTHER) == "no driver"


def interrupt(session):
    with pytest.raises(RuntimeError, match="in the middle"), session.section:
        raise RuntimeError("in the middle")


def test_a_session_that_was_left_dirty_is_rebuilt_for_the_next(monkeypatch):
    made = []
    monkeypatch.setattr(Session, "rebuild", lambda session: made.append(session))
    session = session_with()
    with session.section:
        assert made == []
    interrupt(session)
    with session.section:
        assert made == [session]
    with session.section:
        assert len(made) == 1


# What waits for its operation to end.


def waiting(session, *kept, at_once=False):
    thread_state = ThreadState()
    blocks = [Block(0, each) for each in kept]
    thread_state.waiting.extend((weakref.ref(block), at_once) for block in blocks)
    return thread_state, blocks


def test_what_waits_goes_when_its_operation_has_ended():
    session = session_with()
    evictor = session.device_tiers[0].evictor
    for at_once in (False, True):
        thread_state, (block,) = waiting(session, 1, at_once=at_once)
        thread_state.operation = torch.autograd._get_sequence_nr()
        session.settle(thread_state)
        assert evictor.applied == [] and len(thread_state.waiting) == 1  # it may still be filled
        (torch.ones(1, requires_grad=True) * 2).sum()  # later nodes
        session.settle(thread_state)
        assert evictor.applied == [(thread_state, block, at_once)] and not thread_state.waiting
        evictor.applied.clear()


def test_at_the_end_everything_that_waits_goes_except_what_is_gone():
    session = session_with()
    thread_state, blocks = waiting(session, 1, 0, 1, 1)
    thread_state.operation = torch.autograd._get_sequence_nr()
    kept = [blocks[0], blocks[2]]  # the second has left its place, the fourth is dead
    del blocks[3]
    session.settle(thread_state, ended=True)
    assert [block for _, block, _ in session.device_tiers[0].evictor.applied] == kept
    assert not thread_state.waiting


def test_one_that_raises_leaves_the_rest_waiting():
    session = session_with()
    thread_state, blocks = waiting(session, 1, 1)
    evictor = session.device_tiers[0].evictor
    evictor.apply = lambda *_: (_ for _ in ()).throw(OSError("full"))
    with pytest.raises(OSError, match="full"):
        session.settle(thread_state, ended=True)
    assert [ref() for ref, _ in thread_state.waiting] == blocks[1:]


def test_what_waited_on_a_thread_that_ended_is_queued():
    session = session_with()
    thread_state, blocks = waiting(session, 1, 1, 1)
    del blocks[1]
    session.adopt(thread_state)
    assert session.device_tiers[0].evictor.resident.queue == blocks and not thread_state.waiting


# Budgets.


def test_every_device_completes_and_follows_the_memory_that_is_free(monkeypatch):
    session = session_with()
    second = Tiers(1)
    second.device = SimpleNamespace(free_bytes=lambda: 1000, is_capturing=lambda: False)
    session.put(OTHER, second)
    thread_state = ThreadState()
    session.complete(thread_state)
    assert session.device_tiers[0].evictor.completed == second.evictor.completed == [thread_state]
    assert second.begun == [0], "what waits begins first"
    second.evictor.inflight.writes.clear()
    session.complete(thread_state)  # a device without a write is not asked
    assert len(session.device_tiers[0].evictor.completed) == 2
    assert second.evictor.completed == [thread_state]
    session.ease()
    assert session.device_tiers[0].evictor.eased and second.evictor.eased
    session.try_again()
    assert session.device_tiers[0].evictor.tried == second.evictor.tried == [True]
    monkeypatch.setattr("backstash._core.session.spare_bytes", lambda: 300)
    session.device_tiers[0].evictor.resident.nbytes, second.evictor.resident.nbytes = 101, 50
    session.limit("auto")
    assert [each.evictor.resident.limit for each in session.device_tiers] == [200, 525]
    second.device.is_capturing = lambda: True  # the driver may not be asked then
    session.limit("auto")
    assert [each.evictor.resident.limit for each in session.device_tiers] == [200, 0]


# What died.


class Write:
    """A worker's, that has ended or not."""

    def __init__(self, finished, can_be_cancelled=False):
        self.finished, self.can, self.asked = finished, can_be_cancelled, 0

    def cancel(self):
        self.asked += 1
        return self.can


def block_cleanup(session, number, resident, loaded, nbytes, serial, module):
    left = BlockCleanup(session.reclaim_queue, number, nbytes)
    left.resident_bytes, left.loaded_bytes = resident, loaded
    left.serial, left.module = serial, module
    return left


def disk_cleanup(session, store, slot, transfer, loaded, inflight):
    left = DiskCleanup(session.reclaim_queue, store, slot)
    left.transfer, left.loaded_bytes, left.inflight_bytes = transfer, loaded, inflight
    return left


def test_a_dead_block_is_subtracted_from_the_counts_of_its_device():
    session, events = session_with(), []
    assert session.blocks_alive == 0
    second = Tiers(1)
    session.put(OTHER, second)
    for each in session.device_tiers:
        each.evictor.resident.nbytes, each.prefetcher.ahead.nbytes = 100, 50
    session.blocks_alive = 3
    left = block_cleanup(session, 1, 30, 20, 64, 7, "layer")
    session.reclaim_queue.append(left)
    session.drain()
    # Struck out: nobody counts it again.
    assert (left.resident_bytes, left.loaded_bytes, left.serial) == (0, 0, -1)
    assert session.blocks_alive == 2
    cpu = session.device_tiers[0]
    assert (second.evictor.resident.nbytes, second.prefetcher.ahead.nbytes) == (70, 30)
    assert (cpu.evictor.resident.nbytes, cpu.prefetcher.ahead.nbytes) == (100, 50)
    session.event_log.start(events.append)
    session.reclaim_queue.append(block_cleanup(session, 0, 1, 2, 64, 8, "head"))
    session.drain()
    assert [(what[0], *what[3:6]) for what in events] == [("free", 64, 8, "head")]
    assert session.blocks_alive == 1 and not session.reclaim_queue


def test_what_was_never_counted_is_no_block_less():
    session, events = session_with(), []
    session.event_log.start(events.append)
    session.blocks_alive = 1
    session.reclaim_queue.append(block_cleanup(session, 0, 0, 0, 64, -1, ""))
    session.reclaim_queue.append(disk_cleanup(session, None, None, None, 0, 0))
    session.drain()
    assert session.blocks_alive == 1 and events == []


def test_when_the_last_block_is_gone_nothing_of_any_is_remembered():
    session, forgot = session_with(), []
    second = Tiers(1)
    session.put(OTHER, second)
    session.predictor.forget = lambda: forgot.append("order")
    session.blocks_alive = 2
    for alive in (1, 0):
        assert not forgot
        session.reclaim_queue.append(block_cleanup(session, 0, 0, 0, 1, 0, ""))
        session.drain()
        assert session.blocks_alive == alive
    assert forgot == ["order"]
    assert [each.forgot for each in session.device_tiers] == [1, 1]
    session.drain()  # there was none
    assert forgot == ["order"] and second.forgot == 1


def test_a_dead_backing_s_slot_is_released_when_nothing_writes_to_it():
    session, released = session_with(), []
    store = SimpleNamespace(release=released.append)
    cpu = session.device_tiers[0]
    cpu.evictor.inflight.nbytes, cpu.prefetcher.ahead.nbytes = 1000, 1000
    runs, stopped = Write(False), Write(False, can_be_cancelled=True)
    left = [
        disk_cleanup(session, store, *each)
        for each in (
            ("never written", None, 1, 10),
            ("still written to", runs, 2, 20),
            ("written", Write(True), 4, 40),
            ("not begun", stopped, 8, 80),
            (None, None, 16, 160),  # its slot was taken back before
        )
    ]
    session.reclaim_queue.extend(left)
    session.drain()
    assert released == ["never written", "written", "not begun"]
    assert (cpu.evictor.inflight.nbytes, cpu.prefetcher.ahead.nbytes) == (1000 - 290, 1000 - 29)
    assert len(session.reclaim_queue) == 1 and stopped.asked == 1
    session.drain()
    assert len(released) == 3
    runs.finished = True
    session.drain()
    assert released[3:] == ["still written to"] and not session.reclaim_queue
    struck_out = [(each.loaded_bytes, each.inflight_bytes, each.slot) for each in left]
    assert struck_out == [(0, 0, None)] * 5
    assert (cpu.evictor.inflight.nbytes, cpu.prefetcher.ahead.nbytes) == (1000 - 310, 1000 - 31)


def test_what_is_left_of_a_host_backing_is_deferred_by_its_device_s_tiers():
    session = session_with()
    second = Tiers(1)
    second.prefetcher.ahead.nbytes = 50
    session.put(OTHER, second)
    cleanup = HostCleanup(session.reclaim_queue, 1, None)
    cleanup.loaded_bytes = 20
    session.reclaim_queue.append(cleanup)
    session.drain()
    assert second.deferred == [cleanup] and session.device_tiers[0].deferred == []
    assert second.prefetcher.ahead.nbytes == 30


def test_what_raises_while_it_is_settled_is_settled_again_and_counted_once():
    """An interrupt came between two steps of it: the slot has gone back, the cleanup is still queued."""
    session, released = session_with(), []
    cpu = session.device_tiers[0]
    cpu.evictor.inflight.nbytes, cpu.prefetcher.ahead.nbytes = 100, 100

    def release(slot):
        released.append(slot)
        raise KeyboardInterrupt

    left = disk_cleanup(session, SimpleNamespace(release=release), "slot", None, 4, 40)
    session.reclaim_queue.append(left)
    with pytest.raises(KeyboardInterrupt):
        session.drain()
    assert list(session.reclaim_queue) == [left]
    session.drain()
    assert released == ["slot"] and not session.reclaim_queue
    assert (cpu.evictor.inflight.nbytes, cpu.prefetcher.ahead.nbytes) == (60, 96)


def test_an_interrupt_at_the_first_use_of_a_device_leaves_none_without_tiers(monkeypatch):
    stash = Stash(disk=MemoryStore(), host="1MiB")
    session, device = stash._session, torch.device("meta")
    made = stash._config.tiers
    session._config = SimpleNamespace(tiers_of=lambda _, number: made(TwinDevice(), number))

    def interrupted(self, tiers):
        raise KeyboardInterrupt

    monkeypatch.setattr(Session, "_begin", interrupted)
    with pytest.raises(KeyboardInterrupt):
        session.tiers_of(device)
    monkeypatch.undo()
    tiers = session.tiers_of(device)
    assert session.device_tiers[tiers.number] is tiers
