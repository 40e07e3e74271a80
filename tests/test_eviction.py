"""The way down, piece by piece: who goes, how, and who stays; each part around it is a test's."""

from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from backstash._runtime.reclaim import BlockCleanup, DiskCleanup, HostCleanup, ReclaimQueue
from backstash._runtime.weak import WeakQueue
from backstash._saved.block import Block, StorageVersion
from backstash._saved.thread_state import ThreadState
from backstash._tiers.backing import DiskBacking, SegmentBacking
from backstash._tiers.eviction import SMALL_BYTES, Evictor, sequence_number
from backstash._tiers.host_backing import HostBacking
from backstash._tiers.resident import ResidentSet
from backstash.errors import StashFullError

GRAVE = ReclaimQueue()
LARGE = SMALL_BYTES
FULL = StashFullError(28, "full")


class Flights:
    """The window, as a test says."""

    def __init__(self, steps):
        self.steps, self.nbytes, self.buffer, self.is_one = steps, 0, 1 << 40, False
        self.again = []

    def has_room(self, nbytes):
        return nbytes <= self.buffer

    def complete(self, thread_state, *, all_that_ended=False):
        self.steps.append(("land", all_that_ended))

    def make_room(self, nbytes, thread_state):
        self.steps.append(("make room", nbytes))

    def add(self, block, writing):
        self.steps.append(("add", block, writing))

    def wait(self, writing):
        self.steps.append(("wait", writing))

    def measure(self):
        self.steps.append("measure")

    def restore(self, *what):
        self.steps.append(("restore", *what))
        return self.again


class Tier:
    """Where blocks go."""

    def __init__(self):
        self.full, self.begun, self.handed = False, [], []
        self.device = SimpleNamespace(is_capturing=lambda: self.capturing)
        self.capturing = False

    def begin(self, block):
        if self.full:
            raise FULL
        self.begun.append(block)
        return SimpleNamespace(cleanup=SimpleNamespace(writing=f"write {len(self.begun)}"))

    def begin_work(self, work):
        self.handed.append(work)


class Way:
    """A way down of which only ``Evictor`` and ``ResidentSet`` are real."""

    def __init__(self, limit=0, *, tier="disk", segments=True):
        self.steps, self.gathered, self.fulls = [], [], []
        self.event_log = SimpleNamespace(on=False)
        self.keep = ResidentSet(self.event_log, limit=limit)
        self.refusing = False
        self.health = SimpleNamespace(
            refuses=lambda nbytes: self.refusing,
            full=lambda error, nbytes: self.fulls.append((error, nbytes)),
            deferred=WeakQueue(lambda block: True),
            notes={},
            restore=lambda: self.steps.append("restore refusals"),
        )
        self.inflight, self.tier = Flights(self.steps), Tier()
        self.segments = SimpleNamespace(
            gather=self.gather, restore=lambda what: self.steps.append(("restore segments", what))
        )
        self.evictor = Evictor(
            self.keep,
            self.health,
            self.inflight,
            disk=self.tier if tier == "disk" else None,
            host=self.tier if tier == "host" else None,
            segments=self.segments if segments else None,
        )
        self.thread_state = ThreadState()

    def gather(self, block, thread_state):
        assert thread_state is self.thread_state
        if self.tier.full:
            raise FULL
        self.keep.leave(block)
        self.gathered.append(block)

    def block(self, nbytes=LARGE, thread_state=None):
        tiers = SimpleNamespace(number=0, reclaim_queue=GRAVE, stream=lambda: None)
        tensor = torch.zeros(nbytes, dtype=torch.uint8)
        block = Block(StorageVersion(tensor, tensor.untyped_storage()), tensor.detach(), tiers)
        block.thread_state = thread_state or self.thread_state
        return block

    def saved(self, nbytes=LARGE, *, thread_state=None, at_once=False):
        block = self.block(nbytes, thread_state)
        self.evictor.admit(block, at_once=at_once, complete=True)
        return block


def another(alive=True):
    thread_state = ThreadState()
    thread_state.thread = SimpleNamespace(is_alive=lambda: alive)
    return thread_state


def test_the_oldest_beyond_the_budget_go():
    way = Way(limit=2 * LARGE)
    blocks = [way.saved() for _ in range(2)]
    assert way.tier.begun == [] and way.keep.nbytes == way.keep.peak_bytes == 2 * LARGE
    blocks += [way.saved() for _ in range(2)]
    assert way.tier.begun == blocks[:2] and way.keep.nbytes == 2 * LARGE
    assert blocks[0].backing.cleanup.writing == "write 1" and blocks[0].cleanup.resident_bytes == 0
    assert way.steps[:3] == [("land", False), "measure", ("land", False)]
    assert way.steps[4:] == [
        ("land", False),
        ("make room", LARGE),
        ("add", blocks[0], "write 1"),
        "measure",
        ("land", False),
        ("make room", LARGE),
        ("add", blocks[1], "write 2"),
        "measure",
    ]


def test_what_need_not_be_complete_waits_for_its_operation():
    way = Way()
    block = way.block()
    torch.ones(2, requires_grad=True).sum()
    for at_once in (True, False):
        way.evictor.admit(block, at_once=at_once, complete=False)
    assert [(ref(), at_once) for ref, at_once in way.thread_state.waiting] == [
        (block, True),
        (block, False),
    ]
    assert way.thread_state.operation == sequence_number() and way.steps == way.tier.begun == []


def test_one_that_goes_at_once_passes_over_the_budget_or_waits_its_turn():
    way = Way(limit=None)
    block = way.saved(at_once=True)
    assert way.tier.begun == [block] and len(way.keep.queue) == 0
    way.tier.full = True
    block = way.saved(at_once=True)
    assert way.keep.queue.popleft() is block and way.fulls == [(FULL, LARGE)]


def test_small_ones_are_gathered_and_large_ones_are_not():
    way = Way()
    small, large = way.saved(SMALL_BYTES - 1), way.saved(SMALL_BYTES)
    assert way.gathered == [small] and way.tier.begun == [large]
    way = Way(segments=False)
    small = way.saved(100)
    assert way.tier.begun == [small]


def test_nobody_goes_where_there_is_nowhere_to_go_or_nobody_is_taken():
    way = Way(tier=None, segments=False)
    block = way.saved()
    assert way.health.deferred.popleft() is block and way.keep.nbytes == LARGE
    way = Way()
    way.refusing = True
    block = way.saved()
    assert way.health.deferred.popleft() is block and way.tier.begun == []


def test_nobody_goes_while_a_graph_is_captured():
    way = Way(tier="host", segments=False)
    way.tier.capturing = True
    block = way.saved()
    assert way.tier.begun == [] and way.health.deferred.popleft() is block


def test_a_changed_block_is_lost_and_one_that_was_resized_stays():
    way = Way()
    changed, moved = way.block(), way.block()
    changed.alias.add_(1)
    moved.alias.untyped_storage().resize_(1 << 20)
    for block in (changed, moved):
        way.evictor.admit(block, at_once=False, complete=True)
    assert changed.lost and way.tier.begun == []
    assert moved.alias is not None and moved.cleanup.resident_bytes == LARGE
    assert len(way.keep.queue) == len(way.health.deferred) == 0


@pytest.mark.parametrize("nbytes", [100, LARGE])
def test_a_full_tier_leaves_it_stuck_and_smaller_ones_may_go(nbytes):
    way = Way()
    way.tier.full = True
    deferred = way.saved(nbytes)
    assert way.fulls == [(FULL, nbytes)] and way.health.deferred.popleft() is deferred
    assert deferred.backing is None and deferred.cleanup.resident_bytes == nbytes
    way.tier.full = False
    way.saved(nbytes)
    assert way.keep.nbytes == nbytes


def test_the_dead_are_passed_over():
    way = Way(limit=2 * LARGE)
    blocks = [way.saved() for _ in range(2)]
    del blocks[0]  # its bytes are counted until somebody settles them
    blocks.append(way.saved())
    assert way.tier.begun == [blocks[0]]


@pytest.mark.parametrize("nbytes, buffer, goes", [(LARGE, LARGE, True), (LARGE, LARGE - 1, False)])
def test_another_thread_s_block_goes_where_nobody_has_to_wait_for_it(nbytes, buffer, goes):
    way = Way(limit=LARGE)
    theirs = way.saved(nbytes, thread_state=another())
    way.inflight.buffer = buffer
    mine = way.saved()
    assert way.tier.begun == ([theirs] if goes else [mine])
    if not goes:
        assert way.keep.queue.popleft() is theirs


def test_another_thread_s_small_block_is_not_copied():
    way = Way(limit=LARGE)
    theirs = way.saved(LARGE - 1, thread_state=another())
    mine = way.saved()
    assert way.gathered == [] and way.tier.begun == [mine]
    assert way.keep.queue.popleft() is theirs


def test_where_both_have_to_stay_nothing_more_is_tried():
    way = Way(limit=0)
    way.tier.full = True
    theirs = way.block(100, another())
    way.keep.admit(theirs)
    way.keep.queue.append(theirs)
    mine = way.saved()
    assert way.fulls == [(FULL, LARGE)]
    assert [way.keep.queue.popleft() for _ in range(2)] == [theirs, mine]


def test_the_newest_goes_once():
    way = Way(limit=0)
    for _ in range(2):
        theirs = way.block(100, another())
        way.keep.admit(theirs)
        way.keep.queue.append(theirs)
    mine = way.saved()
    assert way.tier.begun == [mine]


def test_a_thread_that_has_ended_has_no_say():
    way = Way(limit=LARGE)
    orphan = way.saved(LARGE - 1, thread_state=another(alive=False))
    way.saved()
    assert way.gathered == [orphan]


@pytest.mark.parametrize("tier", ["disk", "host"])
@pytest.mark.parametrize("is_one", [False, True])
def test_one_beyond_the_window_is_moved_within_the_call(tier, is_one):
    """Unless it is alone in the window of an accelerator, beside which compute goes on."""
    way = Way(tier=tier, segments=False)
    way.inflight.buffer, way.inflight.is_one = -1, is_one
    way.saved()
    waited = [("wait", "write 1"), ("land", True)]
    assert way.steps[3:] == ([] if tier == "host" and is_one else waited) + ["measure"]


def test_nobody_waits_for_one_that_fills_the_window_to_its_end():
    way = Way()
    way.inflight.buffer = 0
    block = way.saved()
    assert way.steps == [
        ("land", False),
        ("make room", LARGE),
        ("add", block, "write 1"),
        "measure",
    ]


def test_the_device_s_lack_of_memory_is_noted():
    way = Way(limit=4 << 20)
    way.evictor.ease()
    assert way.health.notes == {}
    way.keep._memory, way.keep.peak_bytes = Mock(), 4 << 20
    way.evictor.ease()
    assert list(way.health.notes) == ["out of device memory: keep is 2.00 MiB from then on"]


def test_nobody_waits_any_more_when_all_blocks_have_died():
    way = Way(limit=None)
    held, deferred = way.saved(), way.block()
    way.health.deferred.append(deferred)
    way.evictor.forget()
    assert len(way.keep.queue) == len(way.health.deferred) == 0
    del held


def test_the_books_anew_are_of_each_part_s_own():
    way = Way(limit=None)
    blocks = [way.saved() for _ in range(4)]
    slot = SimpleNamespace(nbytes=1)
    segment = SegmentBacking(None, slot, torch.zeros(1), GRAVE)
    blocks[0].backing = blocks[1].backing = segment
    blocks[2].backing = DiskBacking(None, slot, 0, GRAVE)
    of_blocks = [block.cleanup for block in blocks]
    of_parcels = [segment.cleanup, blocks[2].backing.cleanup]
    of_host = HostCleanup(GRAVE, 1, None)
    assert {type(each) for each in of_blocks} == {BlockCleanup}
    assert {type(each) for each in of_parcels} == {DiskCleanup}
    way.steps.clear()
    way.inflight.again = ["a work", "another"]
    way.evictor.restore(blocks, {id(blocks[3])}, [*of_parcels, of_host, *of_blocks])
    assert way.steps == [
        "restore refusals",
        ("restore segments", [segment]),
        ("restore", blocks, [segment], of_parcels),
    ]
    assert way.tier.handed == ["a work", "another"]
    assert way.keep.nbytes == LARGE and len(way.keep.queue) == 0  # of the one that waits


def test_without_segments_the_books_are_made_anew_too():
    way = Way(tier="host", segments=False)
    block = way.block()
    block.backing = HostBacking.__new__(HostBacking)
    way.evictor.restore([block], set(), [block.cleanup])
    assert way.steps == ["restore refusals", ("restore", [block], [], [])]
    block.backing = None
