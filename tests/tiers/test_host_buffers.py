"""Buffers of host memory: which one is given, who is waited for, and when one is given back."""

import errno
from collections import deque
from types import SimpleNamespace

import pytest

from backstash._device import pinned_pool as _pinned_pool
from backstash._device.base import Completion
from backstash._device.pinned_pool import PinnedPool
from backstash._runtime.reclaim import ReclaimQueue
from backstash._tiers import host_buffers as _host_buffers
from backstash._tiers.host_backing import HostCleanup
from backstash._tiers.host_buffers import HostBuffers
from backstash.errors import StashFullError

PAGE = 4096


class Copied(Completion):
    """Of a copy that ends when somebody waits for it, or when a test says so."""

    def __init__(self, *, over=False):
        self.over, self.looks, self.waits = over, 0, 0

    def ended(self):
        self.looks += 1
        return self.over

    def wait(self):
        self.waits += 1
        self.over = True


class Writeback:
    """What frees buffers by writing them to disk, as a test says."""

    def __init__(self):
        self.disk, self.refusal = None, ""
        self.sweeps, self.written, self.waits = deque(), deque(), deque()
        self.to_write, self.swept, self.released = deque(), 0, []

    def sweep(self):
        self.swept += 1
        return self.sweeps.popleft() if self.sweeps else False

    def evict(self):
        return self.written.popleft() if self.written else None

    def wait(self):
        return self.waits.popleft()() if self.waits else False

    def write_oldest(self):
        return self.to_write.popleft()() if self.to_write else False

    def release(self, slot, buffer):
        self.released.append((slot, buffer))


class Load:
    """A load that has a buffer until its copy has ended."""

    def __init__(self, buffer, *, may_be_waited_for=True):
        self.buffer, self.over, self.may_be_waited_for = buffer, False, may_be_waited_for
        self.waited = 0

    def take_buffer(self):
        if not self.over:
            return None
        buffer, self.buffer = self.buffer, None
        return buffer

    def arrive(self):
        self.waited += 1
        self.over = self.over or self.may_be_waited_for
        return self.may_be_waited_for


class Place:
    def __init__(self, pages=4, unpinned=None):
        self.reclaim_queue, self.writeback = ReclaimQueue(), Writeback()
        unpin = (lambda memory: None) if unpinned is None else unpinned.append
        self.pool = PinnedPool(pages * PAGE, SimpleNamespace(pin=lambda memory: "", unpin=unpin))
        self.buffers = HostBuffers(self.pool, self.writeback)

    def fill(self):
        taken = []
        while (buffer := self.pool.take(PAGE)) is not None:
            taken.append(buffer)
        return taken

    def left(self, buffer, *, over=False):
        """What a backing left whose copy may still run."""
        cleanup = HostCleanup(self.reclaim_queue, 1, buffer)
        cleanup.written = Copied(over=over)
        return cleanup


def test_a_buffer_is_taken_of_what_there_is_and_then_of_more():
    place = Place()
    first = place.buffers.take(PAGE)
    assert place.writeback.swept == 1, "before more memory is pinned"
    second = place.buffers.take(PAGE)
    assert place.writeback.swept == 1 and first is not second
    assert place.pool.used_bytes == 2 * PAGE


def test_what_the_budget_can_never_hold_is_not_waited_for():
    place = Place()
    place.writeback.waits.append(lambda: pytest.fail("nobody needs to wait"))
    with pytest.raises(StashFullError, match="no space for 20 KiB") as caught:
        place.buffers.take(5 * PAGE)
    assert caught.value.errno == errno.ENOSPC
    assert place.buffers.take(4 * PAGE).memory.numel() == 4 * PAGE


@pytest.mark.parametrize(
    "disk, refusal, refused, ending",
    [
        (None, "", "", ": raise host=, or give disk="),
        ("a disk", "", "", ": raise host="),
        ("a disk", ", and full", "", ", and full"),
        ("a disk", "", "no memory", " (no memory): free memory, or lower host="),
        (None, "", "no memory", " (no memory): free memory, or lower host="),
    ],
)
def test_no_room_says_what_would_help(disk, refusal, refused, ending):
    place = Place()
    taken = place.fill()
    place.writeback.disk, place.writeback.refusal, place.pool.refusal = disk, refusal, refused
    with pytest.raises(StashFullError) as caught:
        place.buffers.take(PAGE)
    assert caught.value.strerror == (
        f"host memory has no space for 4.00 KiB in addition to the 16 KiB it holds{ending}"
    )
    assert len(taken) == 4


def test_a_buffer_is_waited_for_and_then_made():
    place = Place(pages=1)
    (buffer,) = place.fill()
    steps = []

    def write():
        steps.append("write")
        place.writeback.waits.append(wait)
        return True

    def wait():
        steps.append("wait")
        place.writeback.written.append(place.left(buffer, over=True))
        return True

    place.writeback.to_write.append(write)
    assert place.buffers.take(PAGE) is buffer and steps == ["write", "wait"]


def test_without_a_wait_there_is_a_buffer_or_none():
    place = Place(pages=1)
    (buffer,) = place.fill()
    place.writeback.waits.append(lambda: pytest.fail("it waits"))
    assert place.buffers.take_idle(PAGE) is None
    place.buffers.defer(cleanup := place.left(buffer))
    assert place.buffers.take_idle(PAGE) is None and cleanup.written.waits == 0
    cleanup.written.over = True
    assert place.buffers.take_idle(PAGE) is not None


def test_more_memory_is_pinned_rather_than_asking_for_all_transfers(monkeypatch):
    """A host that is ahead of its device may have deferred hundreds, which would be asked for at each save."""
    monkeypatch.setattr(_pinned_pool, "_SLAB_BYTES", 8 * PAGE)
    place = Place(pages=16)
    left = [place.left(place.pool.take(PAGE)) for _ in range(8)]
    for each in left:
        place.buffers.defer(each)
    last = left[-1].buffer
    left[-1].written.over = True
    for each in left:
        each.written.looks = 0
    taken = [place.buffers.take(PAGE)]
    assert taken[0] is not last
    assert sum(each.written.looks for each in left) <= 4
    taken += place.fill()
    assert place.buffers.take(PAGE) is last


def test_a_write_that_has_ended_lets_its_buffer_be_evicted():
    """It ended between the first look and the second: only then is it on disk too."""
    place = Place(pages=1)
    (buffer,) = place.fill()

    def sweep():
        place.writeback.swept += 1
        if place.writeback.swept == 2:
            place.writeback.written.append(place.left(buffer, over=True))
            return True
        return False

    place.writeback.sweep = sweep
    assert place.buffers.take_idle(PAGE) is not None


def test_buffers_are_evicted_until_one_is_at_rest():
    place = Place(pages=2)
    busy, idle = place.fill()
    place.writeback.written.extend([place.left(busy), place.left(idle, over=True)])
    buffer = place.buffers.take_idle(PAGE)
    assert buffer is not None and not place.writeback.written
    assert place.pool.used_bytes == 2 * PAGE
    assert place.buffers.take_idle(PAGE) is None


def test_what_is_deferred_is_given_back_in_its_order_and_the_rest_when_it_is_needed():
    place = Place()
    taken = place.fill()
    cleanup = [place.left(buffer) for buffer in taken]
    cleanup[0].slot = "a slot"
    for each in cleanup:
        place.buffers.defer(each)
    assert place.pool.used_bytes == 4 * PAGE
    assert [each.written.looks for each in cleanup] == [4, 0, 0, 0], "each look asks the driver"
    for number in (0, 1, 3):
        cleanup[number].written.over = True
    slotted = place.left(None, over=True)
    slotted.slot = "another slot"
    place.buffers.defer(slotted)
    assert place.pool.used_bytes == 2 * PAGE and place.writeback.released == [("a slot", taken[0])]
    assert cleanup[0].buffer is cleanup[0].slot is None
    assert place.buffers.sweep() is True
    assert place.pool.used_bytes == PAGE
    assert place.writeback.released[1:] == [("another slot", None)]
    assert place.buffers.sweep() is False
    cleanup[2].written.over = True
    assert place.buffers.sweep() is True and place.pool.used_bytes == 0


def test_what_is_at_rest_already_is_given_back_at_once():
    place = Place()
    place.buffers.defer(place.left(place.pool.take(PAGE), over=True))
    assert place.pool.used_bytes == 0


def test_sweeping_keeps_the_order_of_what_still_runs():
    place = Place()
    cleanup = [place.left(buffer) for buffer in place.fill()]
    for each in cleanup:
        place.buffers.defer(each)
    cleanup[1].written.over = True
    assert place.buffers.sweep() is True
    assert list(place.buffers._deferred) == [cleanup[0], cleanup[2], cleanup[3]]


def test_a_load_s_buffer_comes_back_when_its_copy_has_ended():
    place = Place(pages=3)
    loads = [Load(buffer) for buffer in place.fill()]
    for each in loads:
        place.buffers.lend(each)
    assert place.buffers.sweep() is False
    loads[1].over = True
    assert place.buffers.sweep() is True and place.pool.used_bytes == 2 * PAGE
    assert place.buffers.sweep() is False, "once"
    assert [ref() for ref in place.buffers._staging] == [loads[0], loads[2]]
    del loads[2], each
    assert place.buffers.sweep() is False
    assert [ref() for ref in place.buffers._staging] == [loads[0]]


@pytest.mark.parametrize("found", [False, True])
def test_a_sweep_looks_at_the_writes_too(found):
    place = Place(pages=1)
    (buffer,) = place.fill()
    place.writeback.sweeps.append(found)
    assert place.buffers.sweep() is found and place.writeback.swept == 1
    place.buffers.lend(load := Load(buffer))
    load.over = True
    assert place.buffers.sweep() is True and place.writeback.swept == 2, "whatever else was found"


def test_the_oldest_is_waited_for_a_write_first_then_the_dead_then_loads(monkeypatch):
    place = Place(pages=3)
    taken = place.fill()
    clock = iter(range(10, 1000, 10))
    monkeypatch.setattr(_host_buffers.time, "perf_counter", lambda: float(next(clock)) ** 2)
    place.buffers.defer(older := place.left(taken[0]))
    place.buffers.defer(newer := place.left(taken[1]))
    loads = [Load(taken[2], may_be_waited_for=False), Load(None), Load(None)]
    gone = Load(None)
    for each in (gone, *loads):
        place.buffers.lend(each)
    place.writeback.waits.append(lambda: True)
    assert place.buffers._wait_for_one() is True
    assert older.written.waits == newer.written.waits == 0
    assert place.buffers.stall_seconds == 300.0
    assert place.buffers._wait_for_one() is True
    assert (older.written.waits, newer.written.waits) == (1, 0)
    assert place.buffers.stall_seconds == 300.0 + 700.0
    newer.written.over = True
    place.buffers.sweep()
    assert [each.waited for each in loads] == [0, 0, 0]
    del gone  # and nobody has looked since
    assert place.buffers._wait_for_one() is True
    assert [each.waited for each in loads] == [1, 1, 0]
    place.buffers._staging.clear()
    assert place.buffers._wait_for_one() is False


def test_closing_waits_for_the_dead_and_unpins_what_nobody_holds():
    unpinned = []
    place = Place(pages=2, unpinned=unpinned)
    cleanup = [place.left(buffer) for buffer in place.fill()]
    for each in cleanup:
        place.buffers.defer(each)
    place.buffers.close()
    assert [each.written.waits for each in cleanup] == [1, 1]
    assert place.pool.used_bytes == place.pool.slab_bytes == 0 and len(unpinned) == 1


def test_buffers_that_nobody_has_any_more_are_found():
    place = Place(pages=1)
    place.fill()  # and freed at once
    assert place.pool.used_bytes == PAGE
    place.buffers.sweep()
    assert place.pool.used_bytes == 0
