"""Rooms of host memory: which one is given, who is waited for, and when one is given back."""

import errno
from collections import deque
from types import SimpleNamespace

import pytest

from backstash import _rooms
from backstash._remains import Grave, HostRemains
from backstash._rooms import Rooms
from backstash.errors import StashFullError
from backstash.stores._host import HostPool

PAGE = 4096


class Copied:
    """A copy that ends when somebody waits for it, or when a test says so."""

    def __init__(self, *, over=False):
        self.over, self.looks, self.waits = over, 0, 0

    def ended(self):
        self.looks += 1
        return self.over

    def wait(self):
        self.waits += 1
        self.over = True


class Spills:
    """What makes room by writing to disk, as a test says."""

    def __init__(self):
        self.disk, self.refusal = None, ""
        self.sweeps, self.written, self.waits = deque(), deque(), deque()
        self.to_spill, self.swept, self.released = deque(), 0, []

    def sweep(self):
        self.swept += 1
        return self.sweeps.popleft() if self.sweeps else False

    def evict(self):
        return self.written.popleft() if self.written else None

    def wait(self):
        return self.waits.popleft()() if self.waits else False

    def spill_oldest(self):
        return self.to_spill.popleft()() if self.to_spill else False

    def release(self, slot, room):
        self.released.append((slot, room))


class Reading:
    """A reading that has a room until its copy has ended."""

    def __init__(self, room, *, may_be_waited_for=True):
        self.room, self.over, self.may_be_waited_for = room, False, may_be_waited_for
        self.waited = 0

    def take_room(self):
        if not self.over:
            return None
        room, self.room = self.room, None
        return room

    def arrive(self):
        self.waited += 1
        self.over = self.over or self.may_be_waited_for
        return self.may_be_waited_for


class Place:
    def __init__(self, pages=4, unpinned=None):
        self.grave, self.spills = Grave(), Spills()
        unpin = (lambda memory: None) if unpinned is None else unpinned.append
        self.pool = HostPool(pages * PAGE, SimpleNamespace(pin=lambda memory: "", unpin=unpin))
        self.rooms = Rooms(self.pool, self.spills)

    def fill(self):
        taken = []
        while (room := self.pool.take(PAGE)) is not None:
            taken.append(room)
        return taken

    def left(self, room, *, over=False):
        """What a parcel left whose copy may still run."""
        remains = HostRemains(self.grave, 1, room)
        remains.writing = Copied(over=over)
        return remains


def test_a_room_is_taken_of_what_there_is_and_then_of_more():
    place = Place()
    first = place.rooms.take(PAGE)
    assert place.spills.swept == 1, "before more memory is pinned"
    second = place.rooms.take(PAGE)
    assert place.spills.swept == 1 and first is not second
    assert place.pool.used_bytes == 2 * PAGE


def test_what_the_budget_can_never_hold_is_not_waited_for():
    place = Place()
    place.spills.waits.append(lambda: pytest.fail("nobody needs to wait"))
    with pytest.raises(StashFullError, match="no room for 20 KiB") as caught:
        place.rooms.take(5 * PAGE)
    assert caught.value.errno == errno.ENOSPC
    assert place.rooms.take(4 * PAGE).memory.numel() == 4 * PAGE


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
    place.spills.disk, place.spills.refusal, place.pool.refusal = disk, refusal, refused
    with pytest.raises(StashFullError) as caught:
        place.rooms.take(PAGE)
    assert caught.value.strerror == (
        f"host memory has no room for 4.00 KiB beside the 16 KiB it holds{ending}"
    )
    assert len(taken) == 4


def test_a_room_is_waited_for_and_then_made():
    place = Place(pages=1)
    (room,) = place.fill()
    steps = []

    def spill():
        steps.append("spill")
        place.spills.waits.append(wait)
        return True

    def wait():
        steps.append("wait")
        place.spills.written.append(place.left(room, over=True))
        return True

    place.spills.to_spill.append(spill)
    assert place.rooms.take(PAGE) is not room and steps == ["spill", "wait"]


def test_without_a_wait_there_is_a_room_or_none():
    place = Place(pages=1)
    (room,) = place.fill()
    place.spills.waits.append(lambda: pytest.fail("it waits"))
    assert place.rooms.take_idle(PAGE) is None
    place.rooms.bury(remains := place.left(room))
    assert place.rooms.take_idle(PAGE) is None and remains.writing.waits == 0
    remains.writing.over = True
    assert place.rooms.take_idle(PAGE) is not None


def test_a_write_that_has_ended_lets_its_room_be_chosen():
    """It ended between the first look and the second: only then is it on disk too."""
    place = Place(pages=1)
    (room,) = place.fill()

    def sweep():
        place.spills.swept += 1
        if place.spills.swept == 2:
            place.spills.written.append(place.left(room, over=True))
            return True
        return False

    place.spills.sweep = sweep
    assert place.rooms.take_idle(PAGE) is not None


def test_rooms_are_evicted_until_one_is_at_rest():
    place = Place(pages=2)
    busy, idle = place.fill()
    place.spills.written.extend([place.left(busy), place.left(idle, over=True)])
    room = place.rooms.take_idle(PAGE)
    assert room is not None and not place.spills.written
    assert place.pool.used_bytes == 2 * PAGE
    assert place.rooms.take_idle(PAGE) is None


def test_what_is_buried_is_given_back_in_its_order_and_the_rest_when_it_is_needed():
    place = Place()
    taken = place.fill()
    remains = [place.left(room) for room in taken]
    remains[0].slot = "a slot"
    for each in remains:
        place.rooms.bury(each)
    assert place.pool.used_bytes == 4 * PAGE
    assert [each.writing.looks for each in remains] == [4, 0, 0, 0], "each look asks the driver"
    for number in (0, 1, 3):
        remains[number].writing.over = True
    slotted = place.left(None, over=True)
    slotted.slot = "another slot"
    place.rooms.bury(slotted)
    assert place.pool.used_bytes == 2 * PAGE and place.spills.released == [("a slot", taken[0])]
    assert remains[0].room is remains[0].slot is None
    assert place.rooms.sweep() is True
    assert place.pool.used_bytes == PAGE
    assert place.spills.released[1:] == [("another slot", None)]
    assert place.rooms.sweep() is False
    remains[2].writing.over = True
    assert place.rooms.sweep() is True and place.pool.used_bytes == 0


def test_what_is_at_rest_already_is_given_back_at_once():
    place = Place()
    place.rooms.bury(place.left(place.pool.take(PAGE), over=True))
    assert place.pool.used_bytes == 0


def test_sweeping_keeps_the_order_of_what_still_runs():
    place = Place()
    remains = [place.left(room) for room in place.fill()]
    for each in remains:
        place.rooms.bury(each)
    remains[1].writing.over = True
    assert place.rooms.sweep() is True
    assert list(place.rooms._buried) == [remains[0], remains[2], remains[3]]


def test_a_reading_s_room_comes_back_when_its_copy_has_ended():
    place = Place(pages=3)
    readings = [Reading(room) for room in place.fill()]
    for each in readings:
        place.rooms.lend(each)
    assert place.rooms.sweep() is False
    readings[1].over = True
    assert place.rooms.sweep() is True and place.pool.used_bytes == 2 * PAGE
    assert place.rooms.sweep() is False, "once"
    assert [ref() for ref in place.rooms._staging] == [readings[0], readings[2]]
    del readings[2], each
    assert place.rooms.sweep() is False
    assert [ref() for ref in place.rooms._staging] == [readings[0]]


@pytest.mark.parametrize("found", [False, True])
def test_a_sweep_looks_at_the_writes_too(found):
    place = Place(pages=1)
    (room,) = place.fill()
    place.spills.sweeps.append(found)
    assert place.rooms.sweep() is found and place.spills.swept == 1
    place.rooms.lend(reading := Reading(room))
    reading.over = True
    assert place.rooms.sweep() is True and place.spills.swept == 2, "whatever else was found"


def test_the_oldest_is_waited_for_a_write_first_then_the_dead_then_readings(monkeypatch):
    place = Place(pages=3)
    taken = place.fill()
    clock = iter(range(10, 1000, 10))
    monkeypatch.setattr(_rooms.time, "perf_counter", lambda: float(next(clock)) ** 2)
    place.rooms.bury(older := place.left(taken[0]))
    place.rooms.bury(newer := place.left(taken[1]))
    readings = [Reading(taken[2], may_be_waited_for=False), Reading(None), Reading(None)]
    gone = Reading(None)
    for each in (gone, *readings):
        place.rooms.lend(each)
    place.spills.waits.append(lambda: True)
    assert place.rooms._wait_for_one() is True
    assert older.writing.waits == newer.writing.waits == 0
    assert place.rooms.stall_seconds == 300.0
    assert place.rooms._wait_for_one() is True
    assert (older.writing.waits, newer.writing.waits) == (1, 0)
    assert place.rooms.stall_seconds == 300.0 + 700.0
    newer.writing.over = True
    place.rooms.sweep()
    assert [each.waited for each in readings] == [0, 0, 0]
    del gone  # and nobody has looked since
    assert place.rooms._wait_for_one() is True
    assert [each.waited for each in readings] == [1, 1, 0]
    place.rooms._staging.clear()
    assert place.rooms._wait_for_one() is False


def test_closing_waits_for_the_dead_and_unpins_what_nobody_holds():
    unpinned = []
    place = Place(pages=2, unpinned=unpinned)
    remains = [place.left(room) for room in place.fill()]
    for each in remains:
        place.rooms.bury(each)
    place.rooms.close()
    assert [each.writing.waits for each in remains] == [1, 1]
    assert place.pool.used_bytes == place.pool.slab_bytes == 0 and len(unpinned) == 1


def test_rooms_that_nobody_has_any_more_are_found():
    place = Place(pages=1)
    place.fill()  # and let go at once
    assert place.pool.used_bytes == PAGE
    place.rooms.sweep()
    assert place.pool.used_bytes == 0
