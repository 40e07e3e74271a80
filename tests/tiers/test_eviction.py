"""The way down, piece by piece: who goes, how, and who stays; each part around it is a test's."""

from types import SimpleNamespace

import pytest
import torch

from backstash._runtime.reclaim import ReclaimQueue
from backstash._runtime.weak import WeakQueue
from backstash._saved.block import Block, BlockCleanup, StorageVersion
from backstash._saved.placement import Resident, Stored, Writing
from backstash._saved.thread_state import ThreadState
from backstash._tiers.backing import DiskBacking, DiskCleanup, SegmentBacking
from backstash._tiers.eviction import Evictor, sequence_number
from backstash._tiers.health import Notes
from backstash._tiers.host_backing import HostBacking, HostCleanup
from backstash._tiers.resident import ResidentSet
from backstash._tiers.segments import SMALL_BYTES
from backstash.errors import StashFullError

RECLAIM_QUEUE = ReclaimQueue()
LARGE = SMALL_BYTES
FULL = StashFullError(28, "full")


class Inflight:
    """The window, as a test says."""

    def __init__(self, steps):
        self.steps, self.writes = steps, ["a write of long ago"]
        self.nbytes, self.peak_bytes, self.window_bytes, self.is_one = 0, 0, 1 << 40, False
        self.again = []

    def complete(self, thread_state, *, all_that_ended=False):
        self.steps.append(("complete", all_that_ended))

    def make_room(self, nbytes, thread_state):
        self.steps.append(("make room", nbytes))

    def free(self, nbytes, thread_state):
        self.steps.append(("free", nbytes))

    def add(self, block, backing, transfer):
        self.steps.append(("add", block, backing, transfer))
        block.placement = Writing(block.placement.alias, backing, transfer)
        self.nbytes += block.nbytes

    @property
    def stalls(self):
        return SimpleNamespace(wait=lambda transfer: self.steps.append(("wait", transfer)))

    def restore(self, *what):
        self.steps.append(("restore", *what))
        return self.again


class Tier:
    """Where blocks go."""

    def __init__(self, *, runs_ahead=False):
        self.full, self.begun, self.runs_ahead = False, [], runs_ahead

    def begin(self, block):
        if self.full:
            raise FULL
        self.begun.append(block)
        return f"backing {len(self.begun)}", f"write {len(self.begun)}"


class Memory:
    """An accelerator's."""

    def __init__(self):
        self.short_bytes, self.failed, self.capturing = 0, False, False
        self.device = SimpleNamespace(
            is_capturing=lambda: self.capturing, mark=lambda storage, made_on: (storage, made_on)
        )

    def shortage(self, nbytes):
        return self.short_bytes

    def forget_failures(self):
        self.failed = False


class Health:
    """Of the tier, as a test says."""

    def __init__(self, steps):
        self.steps, self.is_well, self.refusing, self.fulls = steps, True, False, []
        self.deferred, self.notes, self.asked = WeakQueue(lambda block: True), Notes(), []

    def refuses(self, nbytes):
        self.asked.append(nbytes)
        return self.refusing

    def full(self, error, nbytes):
        self.fulls.append((error, nbytes))
        self.is_well, self.refusing = False, True

    def restore(self):
        self.steps.append("restore health")


class Way:
    """A way down of which only ``Evictor`` and ``ResidentSet`` are real."""

    def __init__(self, limit=0, *, tier=True, runs_ahead=False, segments=True, memory=None):
        self.steps, self.gathered = [], []
        self.resident = ResidentSet(SimpleNamespace(on=False), limit=limit, memory=memory)
        self.health, self.inflight = Health(self.steps), Inflight(self.steps)
        self.tier = Tier(runs_ahead=runs_ahead)
        self.segments = SimpleNamespace(
            gather=self.gather, restore=lambda what: self.steps.append(("restore segments", what))
        )
        self.evictor = Evictor(
            self.resident,
            self.health,
            self.inflight,
            tier=self.tier if tier else None,
            segments=self.segments if segments else None,
        )
        self.thread_state = ThreadState()

    def gather(self, block, thread_state):
        assert thread_state is self.thread_state
        if self.tier.full:
            raise FULL
        self.resident.leave(block)
        self.gathered.append(block)

    def block(self, nbytes=LARGE, thread_state=None):
        tensor = torch.zeros(nbytes, dtype=torch.uint8)
        version = StorageVersion(tensor, tensor.untyped_storage())
        block = Block(version, tensor.detach(), RECLAIM_QUEUE, 0)
        block.thread_state = thread_state or self.thread_state
        return block

    def saved(self, nbytes=LARGE, *, thread_state=None, at_once=False):
        block = self.block(nbytes, thread_state)
        self.evictor.admit(block, at_once=at_once, complete=True)
        return block


def another(alive=True):
    thread_state = ThreadState()
    thread_state.thread = lambda: SimpleNamespace(is_alive=lambda: alive)
    return thread_state


def waiting(queue):
    """How many are in it, dead ones too."""
    return len(queue.refs)


def test_the_oldest_beyond_the_budget_go():
    way = Way(limit=2 * LARGE)
    blocks = [way.saved() for _ in range(2)]
    assert way.tier.begun == [] and way.resident.nbytes == way.resident.peak_bytes == 2 * LARGE
    blocks += [way.saved() for _ in range(2)]
    assert way.tier.begun == blocks[:2] and way.resident.nbytes == 2 * LARGE
    assert [type(block.placement) for block in blocks] == [Writing, Writing, Resident, Resident]
    assert blocks[0].cleanup.resident_bytes == 0
    assert way.steps == [
        ("complete", False),
        ("complete", False),
        ("complete", False),
        ("add", blocks[0], "backing 1", "write 1"),
        ("complete", False),
        ("add", blocks[1], "backing 2", "write 2"),
    ]


def test_the_peaks_are_those_between_operations():
    """While one runs, its tensors are the caller's."""
    way = Way(limit=2 * LARGE)
    blocks = [way.saved() for _ in range(3)]
    assert (way.resident.peak_bytes, way.inflight.peak_bytes) == (2 * LARGE, LARGE)
    way.inflight.nbytes = 7
    blocks.append(way.saved(1))
    way.inflight.nbytes = 0
    assert (way.resident.peak_bytes, way.inflight.peak_bytes) == (2 * LARGE, 7 + LARGE)


def test_where_nothing_is_under_way_nothing_is_looked_at():
    way = Way(limit=None)
    way.inflight.writes.clear()
    way.saved()
    assert way.steps == [] and waiting(way.resident.queue) == 1


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
    assert way.tier.begun == [block] and waiting(way.resident.queue) == 0
    way.tier.full = True
    block = way.saved(at_once=True)
    assert way.resident.queue.popleft() is block and way.health.fulls == [(FULL, LARGE)]


def test_small_ones_are_gathered_and_large_ones_are_not():
    way = Way()
    small, large = way.saved(SMALL_BYTES - 1), way.saved(SMALL_BYTES)
    assert way.gathered == [small] and way.tier.begun == [large]
    way = Way(segments=False)
    small = way.saved(100)
    assert way.tier.begun == [small]


def test_nobody_goes_where_there_is_nowhere_to_go_or_nobody_is_taken():
    way = Way(tier=False, segments=False)
    block = way.saved()
    assert way.health.deferred.popleft() is block and way.resident.nbytes == LARGE
    way = Way()
    way.health.is_well, way.health.refusing = False, True
    block = way.saved()
    assert way.health.deferred.popleft() is block and way.tier.begun == []
    assert way.health.asked == [LARGE]


def test_a_tier_is_asked_only_where_it_is_not_well():
    way = Way()
    way.health.refusing = True
    block = way.saved()
    assert way.tier.begun == [block] and way.health.asked == []
    way.health.is_well, way.health.refusing = False, False
    smaller = way.saved(100)
    assert way.gathered == [smaller] and way.health.asked == [100]


@pytest.mark.parametrize("at_once", [False, True])
def test_nobody_goes_while_a_graph_is_captured(at_once):
    way = Way(segments=False, memory=Memory())
    way.resident.memory.capturing = True
    block = way.saved(at_once=at_once)
    assert way.tier.begun == [] and way.resident.queue.popleft() is block
    assert waiting(way.health.deferred) == 0


def test_a_changed_block_is_lost_and_one_that_was_resized_stays():
    way = Way()
    changed, moved = way.block(), way.block()
    changed.placement.alias.add_(1)
    moved.placement.alias.untyped_storage().resize_(1 << 20)
    for block in (changed, moved):
        way.evictor.admit(block, at_once=False, complete=True)
    assert changed.placement.lost_at == 1 and way.tier.begun == []
    assert type(moved.placement) is Resident and moved.cleanup.resident_bytes == LARGE
    assert waiting(way.resident.queue) == waiting(way.health.deferred) == 0


@pytest.mark.parametrize("nbytes", [100, LARGE])
def test_a_full_tier_defers_it_and_smaller_ones_may_go(nbytes):
    way = Way()
    way.tier.full = True
    deferred = way.saved(nbytes)
    assert way.health.fulls == [(FULL, nbytes)] and way.health.deferred.popleft() is deferred
    assert type(deferred.placement) is Resident and deferred.cleanup.resident_bytes == nbytes
    assert way.health.asked == [nbytes], "the tier itself is asked once"
    way.tier.full = way.health.refusing = False
    way.saved(nbytes)
    assert way.resident.nbytes == nbytes


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("what", ["nothing", "a block that waits", "a refusal"])
def test_where_nothing_is_kept_a_block_goes_as_it_comes_unless_an_older_one_waits(
    monkeypatch, what, on_device
):
    way = Way(segments=False, memory=Memory() if on_device else None)
    older = []
    if what == "a block that waits":
        older.append(way.block())
        way.evictor.adopt(older[0])
    way.health.is_well = what != "a refusal"
    pressed, press = [], way.evictor._press
    monkeypatch.setattr(way.evictor, "_press", lambda *who: pressed.append(who) or press(*who))
    block = way.saved()
    assert way.tier.begun == [*older, block], "the oldest first"
    assert bool(pressed) is (what != "nothing")


def test_the_dead_are_passed_over():
    way = Way(limit=2 * LARGE)
    blocks = [way.saved() for _ in range(2)]
    del blocks[0]  # its bytes are counted until its cleanup is settled
    blocks.append(way.saved())
    assert way.tier.begun == [blocks[0]]


@pytest.mark.parametrize("window, goes", [(LARGE, True), (LARGE - 1, False)])
def test_another_thread_s_block_goes_where_nobody_has_to_wait_for_it(window, goes):
    way = Way(limit=LARGE)
    theirs = way.saved(thread_state=another())
    way.inflight.window_bytes = window
    mine = way.saved()
    assert way.tier.begun == ([theirs] if goes else [mine])
    if not goes:
        assert way.resident.queue.popleft() is theirs


def test_another_thread_s_block_does_not_leave_where_in_flight_transfers_fill_the_window():
    way = Way(limit=LARGE)
    theirs = way.saved(thread_state=another())
    way.inflight.window_bytes, way.inflight.nbytes = 2 * LARGE - 1, LARGE
    mine = way.saved()
    assert way.tier.begun == [mine] and way.resident.queue.popleft() is theirs


def test_another_thread_s_small_block_is_not_copied():
    way = Way(limit=LARGE)
    theirs = way.saved(LARGE - 1, thread_state=another())
    mine = way.saved()
    assert way.gathered == [] and way.tier.begun == [mine]
    assert way.resident.queue.popleft() is theirs


def test_where_both_have_to_stay_nothing_more_is_tried():
    way = Way(limit=0)
    way.tier.full = True
    theirs = way.block(100, another())
    way.resident.admit(theirs)
    way.resident.queue.append(theirs)
    mine = way.saved()
    assert way.health.fulls == [(FULL, LARGE)]
    assert [way.resident.queue.popleft() for _ in range(2)] == [theirs, mine]


def test_the_newest_goes_once():
    way = Way(limit=0)
    for _ in range(2):
        theirs = way.block(100, another())
        way.resident.admit(theirs)
        way.resident.queue.append(theirs)
    mine = way.saved()
    assert way.tier.begun == [mine]


def test_a_thread_that_has_ended_has_no_say():
    way = Way(limit=LARGE)
    orphan = way.saved(LARGE - 1, thread_state=another(alive=False))
    way.saved()
    assert way.gathered == [orphan]


@pytest.mark.parametrize("runs_ahead", [False, True])
@pytest.mark.parametrize("is_one", [False, True])
def test_one_beyond_the_window_is_moved_within_the_call(runs_ahead, is_one):
    """Unless it is alone in the window of an accelerator, where compute continues during the copy."""
    way = Way(runs_ahead=runs_ahead, segments=False)
    way.inflight.window_bytes, way.inflight.is_one = LARGE - 1, is_one
    block = way.saved()
    waited = [("wait", "write 1"), ("complete", True)]
    assert way.steps == [
        ("complete", False),
        ("make room", LARGE),
        ("add", block, "backing 1", "write 1"),
        *([] if runs_ahead and is_one else waited),
    ]


def test_nobody_waits_for_one_that_fills_the_window_to_its_end():
    way = Way()
    way.inflight.window_bytes = LARGE
    block = way.saved()
    assert way.steps == [("complete", False), ("add", block, "backing 1", "write 1")]


def test_space_is_made_where_in_flight_transfers_fill_the_window():
    way = Way()
    way.inflight.window_bytes, way.inflight.nbytes = 2 * LARGE - 1, LARGE
    way.saved()
    assert way.steps[1] == ("make room", LARGE)


def test_where_the_device_is_short_of_memory_as_much_is_freed_now():
    way = Way(limit=None, memory=Memory())
    way.resident.memory.short_bytes = LARGE
    block = way.saved()
    assert way.tier.begun == [block] and way.steps[-1] == ("free", LARGE)
    way.resident.memory.short_bytes = 0
    way.steps.clear()
    block = way.saved()
    assert way.steps == [("complete", False)] and type(block.placement) is Resident


def test_the_device_s_lack_of_memory_is_noted():
    way = Way(limit=4 << 20)
    way.evictor.ease()
    assert list(way.health.notes) == []
    way.resident.memory, way.resident.peak_bytes = Memory(), 4 << 20
    way.evictor.ease()
    assert list(way.health.notes) == ["out of device memory: keep is lowered to 2.00 MiB"]


def test_who_saves_after_the_device_had_no_memory_keeps_less():
    way = Way(limit=4 << 20, memory=Memory())
    way.resident.peak_bytes, way.resident.memory.failed = 4 << 20, True
    way.saved()
    assert way.resident.limit == 2 << 20 and not way.resident.memory.failed
    way.saved()
    assert way.resident.limit == 2 << 20 and len(list(way.health.notes)) == 1


def test_nobody_waits_any_more_when_all_blocks_have_died():
    way = Way(limit=None)
    held, deferred = way.saved(), way.block()
    way.health.deferred.append(deferred)
    way.evictor.forget()
    assert waiting(way.resident.queue) == waiting(way.health.deferred) == 0
    del held


def test_a_rebuild_gives_each_part_its_own():
    way = Way(limit=None)
    blocks = [way.saved() for _ in range(4)]
    slot = SimpleNamespace(nbytes=1)
    segment = SegmentBacking(None, slot, torch.zeros(1), RECLAIM_QUEUE)
    backing = DiskBacking(None, slot, 0, RECLAIM_QUEUE)
    blocks[0].placement, blocks[1].placement = Stored(segment), Stored(segment)
    blocks[2].placement = Stored(backing)
    cleanups = {
        BlockCleanup: [block.cleanup for block in blocks],
        DiskCleanup: [segment.cleanup, backing.cleanup],
        HostCleanup: [HostCleanup(RECLAIM_QUEUE, 1, None)],
    }
    way.steps.clear()
    way.inflight.again = ["a work", "another"]
    found = way.evictor.restore(blocks, {id(blocks[3])}, cleanups)
    assert way.steps == [
        "restore health",
        ("restore segments", [segment]),
        ("restore", blocks, [segment], cleanups[DiskCleanup]),
    ]
    assert found == ["a work", "another"]
    assert (
        way.resident.nbytes == LARGE and waiting(way.resident.queue) == 0
    )  # of the one that waits


def test_a_rebuild_without_segments():
    way = Way(runs_ahead=True, segments=False)
    block = way.block()
    buffer = SimpleNamespace(memory=torch.zeros(1))
    backing = HostBacking(RECLAIM_QUEUE, 1, buffer, None)
    block.placement = Writing(block.placement.alias, backing, "a copy")
    cleanups = {
        BlockCleanup: [block.cleanup],
        DiskCleanup: [],
        HostCleanup: [backing.cleanup],
    }
    assert way.evictor.restore([block], set(), cleanups) == []
    assert way.steps == ["restore health", ("restore", [block], [], [])]
