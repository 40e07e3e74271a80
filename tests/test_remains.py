"""What an object leaves when it dies: whose it is, and whether anything still uses it."""

from types import SimpleNamespace

import pytest

from backstash._remains import BlockRemains, Grave, HostRemains, ParcelRemains, at_death


def test_remains_know_their_grave_s_mark_and_count_for_nothing_yet():
    grave, room, store, slot = Grave(), object(), object(), object()
    block, parcel = BlockRemains(grave, 2, 12), ParcelRemains(grave, store, slot)
    host = HostRemains(grave, 3, room)
    assert block.mark is parcel.mark is host.mark is grave.mark is not Grave().mark
    assert (block.number, parcel.number, host.number) == (2, 0, 3)
    assert (block.nbytes, block.kept, block.held, block.serial, block.module) == (12, 0, 0, -1, "")
    assert (parcel.store, parcel.slot, parcel.writing) == (store, slot, None)
    assert (parcel.held, parcel.flown) == (0, 0)
    assert (host.room, host.slot, host.writing, host.brought, host.work) == (room, *[None] * 4)
    assert host.held == 0
    at_death(grave, host)()
    assert list(grave) == [host]


class Use:
    """A copy or a worker's work, that has ended or not, and notes what is asked of it."""

    def __init__(self, has_ended, can_be_cancelled=False):
        self.has_ended, self.can_be_cancelled, self.asked = has_ended, can_be_cancelled, []

    def ended(self):
        return self.has_ended

    done = ended

    def cancel(self):
        self.asked.append("cancel")
        return self.can_be_cancelled

    def wait(self):
        self.asked.append("wait")

    exception = wait


def left(**uses):
    remains = HostRemains(Grave(), 0, SimpleNamespace())
    for name, use in uses.items():
        setattr(remains, name, use)
    return remains


@pytest.mark.parametrize(
    ("uses", "at_rest"),
    [
        ({}, True),
        ({"work": Use(True)}, True),
        ({"work": Use(False)}, False),
        ({"work": Use(False, can_be_cancelled=True)}, True),
        ({"writing": Use(True), "brought": Use(True), "work": Use(True)}, True),
        ({"writing": Use(False), "brought": Use(True)}, False),
        ({"writing": Use(True), "brought": Use(False)}, False),
        ({"writing": Use(False), "work": Use(True)}, False),
        ({"brought": Use(True), "work": Use(False)}, False),
    ],
)
def test_it_is_at_rest_when_nothing_uses_it(uses, at_rest):
    assert left(**uses).at_rest() is at_rest


def test_work_that_is_done_is_not_called_off():
    remains = left(work=Use(True))
    assert remains.at_rest() and remains.work.asked == []


def test_to_wait_is_to_wait_for_all_of_it():
    left().wait()  # there is nothing
    remains = left(writing=Use(False), brought=Use(False), work=Use(False))
    remains.wait()
    assert remains.writing.asked == remains.brought.asked == ["wait"]
    assert remains.work.asked == ["cancel", "wait"]


def test_work_that_is_called_off_is_not_waited_for():
    remains = left(work=Use(False, can_be_cancelled=True))
    remains.wait()
    assert remains.work.asked == ["cancel"]
