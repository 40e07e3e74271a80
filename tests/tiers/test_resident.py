"""What stays in place, piece by piece: what is counted, how much may stay, and the rebuild."""

from types import SimpleNamespace

import pytest
import torch

from backstash._runtime.reclaim import ReclaimQueue
from backstash._saved.block import Block, StorageVersion
from backstash._saved.placement import Lost, Resident, Stored, Writing
from backstash._tiers.resident import ResidentSet, is_resident

RECLAIM_QUEUE = ReclaimQueue()


class Log:
    """An event log that somebody records, or nobody."""

    def __init__(self, on=True):
        self.on, self.emitted = on, []

    def emit(self, kind, *facts, cause=""):
        self.emitted.append((kind, facts, cause))


class Memory:
    """An accelerator's: short of so many bytes, each time somebody asks."""

    def __init__(self, *short):
        self.short, self.asked, self.capturing = list(short), [], False
        self.device = SimpleNamespace(is_capturing=lambda: self.capturing)
        self.failed, self.forgotten = False, 0

    def shortage(self, nbytes):
        self.asked.append(nbytes)
        return self.short.pop(0)

    def forget_failures(self):
        self.failed, self.forgotten = False, self.forgotten + 1


def block_of(nbytes=100):
    tensor = torch.zeros(nbytes, dtype=torch.uint8)
    version = StorageVersion(tensor, tensor.untyped_storage())
    return Block(version, tensor.detach(), RECLAIM_QUEUE, 0)


def begin_write(block):
    block.placement = Writing(block.placement.alias, "a backing", "a transfer")


def test_what_comes_leaves_and_returns_is_counted_once():
    event_log = Log()
    resident = ResidentSet(event_log, limit=None)
    one, two = block_of(100), block_of(30)
    assert (resident.nbytes, resident.peak_bytes, is_resident(one)) == (0, 0, 0)
    resident.admit(one)
    resident.admit(two)
    assert resident.nbytes == 130 and is_resident(one) == 100
    resident.leave(one)
    resident.leave(one)  # as often as it likes
    assert resident.nbytes == 30 and is_resident(one) == 0
    alias = one.placement.alias
    begin_write(one)
    resident.take_back(one)
    assert type(one.placement) is Resident and one.placement.alias is alias
    assert resident.nbytes == 130 and is_resident(one) == 100
    resident.take_back(one)
    assert resident.nbytes == 130
    resident.leave(two)
    assert (resident.nbytes, resident.peak_bytes) == (100, 0), "the peak is the evictor's to take"
    assert event_log.emitted == [
        ("save", one.facts, ""),
        ("save", two.facts, ""),
        ("return", one.facts, ""),
        ("return", one.facts, ""),
    ]


def test_a_lost_block_says_which_versions():
    event_log = Log()
    resident = ResidentSet(event_log, limit=None)
    block = block_of()
    resident.admit(block)
    begin_write(block)
    block.placement.alias.add_(1).add_(1)
    resident.lose(block)
    assert type(block.placement) is Lost
    assert (block.placement.lost_at, block.storage_version.version) == (2, 0)
    assert block.placement.alias is block.placement.backing is None
    assert resident.nbytes == is_resident(block) == 0
    assert event_log.emitted[1:] == [("lose", block.facts, "")]


def test_nothing_is_emitted_where_nobody_records():
    event_log = Log(on=False)
    resident = ResidentSet(event_log, limit=None)
    block = block_of()
    resident.admit(block)
    resident.take_back(block)
    resident.lose(block)
    assert event_log.emitted == []


def test_a_save_in_a_backward_is_recorded_as_such():
    event_log = Log()
    resident = ResidentSet(event_log, limit=None)
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    y.register_hook(lambda grad: resident.admit(block_of()))
    y.sum().backward()
    assert [cause for _, _, cause in event_log.emitted] == ["backward"]


def test_what_may_stay_on_the_cpu_is_the_limit():
    resident = ResidentSet(Log(), limit=70, early=20)
    assert resident.most(50, 50) == 70
    resident.limit = None
    assert resident.most(50, 50) is None
    assert resident.wants_room(0), "there is no other use for the memory"


@pytest.mark.parametrize(
    "limit, short, most",
    [
        (None, 0, None),
        (None, 8, None),  # as much is leaving
        (None, 38, 70),
        (None, 138, 0),
        (80, 0, 60),
        (80, 38, 60),
        (80, 68, 40),
        (25, 0, 5),
    ],
)
def test_what_may_stay_on_an_accelerator_is_less_where_it_runs_short(limit, short, most):
    memory = Memory(short)
    resident = ResidentSet(Log(), limit=limit, early=20, memory=memory)
    resident.admit(block_of(100))
    assert resident.most(7, 8) == most and memory.asked == [7]
    resident.limit = None
    assert resident.wants_room(0) is (short > 0)


@pytest.mark.parametrize("limit", [0, 10, 20])
def test_a_device_is_not_asked_where_all_goes_anyway(limit):
    memory = Memory()
    resident = ResidentSet(Log(), limit=limit, early=20, memory=memory)
    assert resident.most(7, 8) == 0 and memory.asked == []


def test_copies_begin_at_the_limit_where_nothing_else_was_said():
    assert ResidentSet(Log(), limit=80, memory=Memory(0)).most(7, 8) == 80


def test_nothing_is_asked_of_a_device_that_captures():
    memory = Memory()
    resident = ResidentSet(Log(), limit=50, memory=memory)
    memory.capturing = True
    assert resident.most(7, 8) is None and memory.asked == []


def test_memory_is_freed_only_beyond_the_limit():
    resident = ResidentSet(Log(), limit=150, early=50, memory=Memory(10, 0))
    resident.admit(block_of(100))
    assert not resident.wants_room(50) and resident.wants_room(51)
    resident.limit = None
    assert not resident.wants_room(1000)
    resident.most(1, 0)
    assert resident.wants_room(0), "the device is short"
    resident.most(1, 0)
    assert not resident.wants_room(0), "and is not any more"


def test_half_of_what_was_kept_stays_when_the_device_had_no_memory():
    memory = Memory()
    resident = ResidentSet(Log(), limit=None, memory=memory)
    assert resident.memory is memory
    memory.failed = True
    assert resident.halve() is None and resident.limit is None, "nothing was kept"
    assert not memory.failed and memory.forgotten == 1, "answered, or it would be halved again"
    resident.peak_bytes = 101
    assert resident.halve() == resident.limit == 50
    assert resident.halve() == resident.limit == 25
    resident.limit = 1000  # more than there ever was
    assert resident.halve() == 50
    resident.limit = 1
    assert resident.halve() == 0
    assert resident.halve() is None and resident.limit == 0
    cpu = ResidentSet(Log(), limit=100)
    cpu.peak_bytes = 100
    assert cpu.halve() is None and cpu.limit == 100


def test_a_limit_that_follows_stays_below_what_once_was_too_much():
    resident = ResidentSet(Log(), limit=0, memory=Memory())
    resident.follow(400)
    assert resident.limit == 200
    resident.admit(block_of(100))
    resident.peak_bytes = 100
    resident.follow(400)
    assert resident.limit == 250, "with what is kept"
    assert resident.halve() == 50
    resident.follow(400)
    assert resident.limit == 50
    resident.follow(-60)
    assert resident.limit == 20
    resident.set_limit(300)
    assert resident.limit == 300
    resident.follow(400)
    assert resident.limit == 250, "the caller's word is newer"


def test_a_rebuild_counts_what_is_in_place():
    resident = ResidentSet(Log(), limit=None)
    blocks = [block_of(nbytes) for nbytes in (1, 2, 4, 8, 16)]
    stored, leaving, first, waits, second = blocks
    for block in blocks:
        resident.admit(block)
    unborn = block_of(32)
    stored.placement = Stored("a backing")
    begin_write(leaving)
    dead = SimpleNamespace(resident_bytes=64)
    resident.queue.append(stored)
    resident.nbytes = 12345
    cleanups = [*(each.cleanup for each in blocks), unborn.cleanup, dead]
    resident.restore([*blocks, unborn], {id(waits)}, cleanups)
    assert is_resident(stored) == is_resident(leaving) == 0
    assert resident.nbytes == 4 + 8 + 16 + 64
    queue = resident.queue
    assert [queue.popleft() for _ in range(len(queue.refs))] == [first, second]
    for block in (waits, first):  # what has left since is not asked again
        queue.append(block)
    resident.leave(first)
    assert [queue.popleft() for _ in range(2)] == [waits, None]
